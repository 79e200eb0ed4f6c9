"""Models -> structural OpenAPI v3 schema with CEL rules -> the CustomResourceDefinition in crds/.

`python -m kvern_operator.api.schema [FILE]` writes it. Only this file knows what a structural schema may hold: no $ref,
no anyOf but that of int-or-string, no titles, no additionalProperties: false, boolean exclusive bounds, a bound on
every string, list and map (or the API server refuses the cost of the rules).
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from kvern_operator.api.base import KvernModel
from kvern_operator.api.patterns import RIGHT
from kvern_operator.api.types import (
    GROUP,
    KIND,
    PLURAL,
    ROOT_VALIDATIONS,
    VERSION,
    InferenceService,
    InferenceServiceSpec,
)

CRD_NAME = f"{PLURAL}.{GROUP}"
SIZE_LIMIT = 262_144  # bytes of the last-applied annotation, which `kubectl apply` puts the whole CRD into

# (name, type, JSON path, description, priority); priority 1 shows with -o wide only.
COLUMNS = [
    ("Model", "string", ".status.model", "Name clients ask for", 0),
    ("TP", "integer", ".status.parallelism.current", "Tensor-parallel size", 0),
    ("Ready", "integer", ".status.readyReplicas", "Replicas that answer", 0),
    ("Desired", "integer", ".status.desiredReplicas", "Replicas that are wanted", 0),
    ("GPUs", "integer", ".status.capacity.gpus", "GPUs of all replicas", 0),
    ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason', "Reason of the condition Ready", 0),
    (
        "Scaling",
        "string",
        ".status.autoscaling.lastDecision.cause",
        "Term or limit that decided about the replicas",
        0,
    ),
    ("URL", "string", ".status.url", "Base URL for OpenAI clients", 0),
    ("Age", "date", ".metadata.creationTimestamp", "Age", 0),
    ("Message", "string", '.status.conditions[?(@.type=="Ready")].message', "Message of the condition Ready", 1),
    ("Why", "string", ".status.autoscaling.lastDecision.reason", "The last decision about the replicas", 1),
]


def structural_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The structural schema of a model. Raises ValueError where the model holds what a CRD cannot say."""
    document = model.model_json_schema(by_alias=True, mode="validation")
    classes = _classes(model)
    return _Converter(document.get("$defs", {}), classes).convert(document, model.__name__)


def _classes(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """All models reachable from one, by name."""
    found: dict[str, type[BaseModel]] = {}

    def visit(annotation: Any) -> None:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            if annotation.__name__ in found:
                return
            found[annotation.__name__] = annotation
            for info in annotation.model_fields.values():
                visit(info.annotation)
        for inner in getattr(annotation, "__args__", ()):
            visit(inner)

    visit(model)
    return found


class _Converter:
    def __init__(self, defs: dict[str, Any], classes: dict[str, type[BaseModel]]) -> None:
        self._defs = defs
        self._classes = classes

    def convert(self, schema: dict[str, Any], name: str | None = None) -> dict[str, Any]:
        schema, name = self._resolved(schema, name)
        out: dict[str, Any] = {}
        for key, value in schema.items():
            if key in ("title", "$defs", "required", "properties", "items", "$ref"):
                continue
            if key == "const":
                out["enum"] = [value]
            elif key in ("exclusiveMinimum", "exclusiveMaximum"):
                out[key.replace("exclusiveM", "m")] = value
                out[key] = True
            elif key == "additionalProperties" and isinstance(value, bool):
                continue  # pruning of unknown fields does it
            elif key == "default" and (value is None or value == [] or (value == {} and "properties" not in schema)):
                continue
            else:
                out[key] = value
        if "properties" in schema:
            out["properties"] = {key: self.convert(value) for key, value in schema["properties"].items()}
            if schema.get("required"):
                out["required"] = list(schema["required"])
        if "items" in schema:
            out["items"] = self.convert(schema["items"])
        if out.get("pattern") in RIGHT:
            out["x-kubernetes-validations"] = [_pattern_rule(out)]
        self._add_rules(out, name)
        _check_structural(out, name)
        return out

    def _resolved(self, schema: dict[str, Any], name: str | None) -> tuple[dict[str, Any], str | None]:
        """Replace `$ref` and `anyOf [X, null]` by what they stand for; keys beside them win."""
        while True:
            beside = {k: v for k, v in schema.items() if k not in ("$ref", "anyOf")}
            if "$ref" in schema:
                name = schema["$ref"].rpartition("/")[2]
                schema = {**self._defs[name], **beside}
            elif "anyOf" in schema and "x-kubernetes-int-or-string" not in schema:
                options = [option for option in schema["anyOf"] if option.get("type") != "null"]
                if len(options) != 1:
                    raise ValueError(f"a CRD cannot say {json.dumps(schema)[:200]}")
                schema = {**options[0], **beside}
            else:
                return schema, name

    def _add_rules(self, out: dict[str, Any], name: str | None) -> None:
        model = self._classes.get(name or "")
        if model is None or not issubclass(model, KvernModel) or "properties" not in out:
            return
        rules = [_rule(rule.cel, rule.message, rule.field) for rule in model.RULES]
        rules += [_rule(cel, message, field) for field, cel, message in model.TRANSITION_RULES]
        if rules:
            out["x-kubernetes-validations"] = rules


def _rule(cel: str, message: str, field: str) -> dict[str, str]:
    return {"rule": cel, "message": message, "fieldPath": f".{field}"}


def _pattern_rule(schema: dict[str, Any]) -> dict[str, str]:
    """A pattern once more as a rule: the API server's message of a pattern is the pattern, that of a rule is words."""
    pattern = schema["pattern"]
    quoted = pattern.replace("\\", "\\\\").replace("'", "\\'")
    number = "type(self) == int || " if "x-kubernetes-int-or-string" in schema else ""
    return {"rule": f"{number}self.matches('{quoted}')", "message": f"must be {RIGHT[pattern]}"}


def _check_structural(schema: dict[str, Any], name: str | None) -> None:
    preserved = schema.get("x-kubernetes-preserve-unknown-fields") or schema.get("x-kubernetes-int-or-string")
    problem = None
    if "type" not in schema and not preserved:
        problem = "has no type"
    elif schema.get("type") == "string" and not ({"maxLength", "enum"} & schema.keys()):
        problem = "is a string without maxLength"
    elif schema.get("type") == "array" and "maxItems" not in schema:
        problem = "is a list without maxItems"
    elif "additionalProperties" in schema and "maxProperties" not in schema:
        problem = "is a map without maxProperties"
    if problem:
        raise ValueError(f"{name or schema.get('description', '?')}: {problem}: {json.dumps(schema)[:200]}")


def resource_schema() -> dict[str, Any]:
    """The schema of a whole InferenceService, metadata left to the API server."""
    from kvern_operator.api.status import InferenceServiceStatus

    status = structural_schema(InferenceServiceStatus)
    return {
        "type": "object",
        "description": (InferenceService.__doc__ or "").strip(),
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": "Version of this schema."},
            "kind": {"type": "string", "description": "Kind of this object."},
            "metadata": {"type": "object"},
            "spec": structural_schema(InferenceServiceSpec),
            "status": _without_defaults(status),
        },
        "x-kubernetes-validations": ROOT_VALIDATIONS,
    }


def _without_defaults(schema: dict[str, Any]) -> dict[str, Any]:
    """Status carries no defaults: the API server would fill in fields that the operator has not written."""
    out = {key: value for key, value in schema.items() if key != "default"}
    if "properties" in out:
        out["properties"] = {key: _without_defaults(value) for key, value in out["properties"].items()}
    if isinstance(out.get("items"), dict):
        out["items"] = _without_defaults(out["items"])
    return out


def custom_resource_definition() -> dict[str, Any]:
    """The CustomResourceDefinition as it is applied."""
    columns = [
        {
            "name": name,
            "type": type_,
            "jsonPath": path,
            "description": description,
            **({"priority": priority} if priority else {}),
        }
        for name, type_, path, description, priority in COLUMNS
    ]
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": CRD_NAME},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["infs"],
                "categories": ["all", "kvern"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "additionalPrinterColumns": columns,
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.replicas",
                            "statusReplicasPath": ".status.replicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                    "schema": {"openAPIV3Schema": resource_schema()},
                }
            ],
        },
    }


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def crd_yaml() -> str:
    """The CRD as YAML text. Raises ValueError above half of the size that kubectl apply can carry."""
    text = "# Generated by `python -m kvern_operator.api.schema`; do not edit.\n" + yaml.dump(
        custom_resource_definition(), Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True
    )
    if len(text) > SIZE_LIMIT // 2:
        raise ValueError(f"the CRD has {len(text)} bytes; above {SIZE_LIMIT} kubectl apply refuses it")
    return text


def main(argv: list[str]) -> int:
    """Write the CRD to the file named, or to standard output."""
    if argv:
        Path(argv[0]).write_text(crd_yaml())
    else:
        sys.stdout.write(crd_yaml())
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
