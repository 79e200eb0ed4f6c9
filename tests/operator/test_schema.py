"""The CRD: fresh, structural, and in agreement with the models."""

from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from kvern_operator.api.flags import RESERVED_ARGS
from kvern_operator.api.load import ManifestError, parse_service
from kvern_operator.api.schema import SIZE_LIMIT, crd_yaml, custom_resource_definition
from kvern_operator.api.status import InferenceServiceStatus
from kvern_operator.api.types import InferenceServiceSpec

CRD_FILE = Path(__file__).parents[2] / "crds" / "kvern.dev_inferenceservices.yaml"
VERSION = custom_resource_definition()["spec"]["versions"][0]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]


def closed(schema: Any) -> Any:
    """As the API server treats it with strict field validation: fields that are not listed are refused."""
    if isinstance(schema, list):
        return [closed(s) for s in schema]
    if not isinstance(schema, dict):
        return schema
    out = {key: closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        out["additionalProperties"] = False
    return out


SPEC_CHECK = jsonschema_rs.validator_for(closed(SCHEMA["properties"]["spec"]))
STATUS_CHECK = jsonschema_rs.validator_for(closed(SCHEMA["properties"]["status"]))


def test_the_committed_crd_is_what_the_models_say():
    assert CRD_FILE.read_text() == crd_yaml(), "run: make generate"


def test_it_is_far_smaller_than_kubectl_apply_can_carry():
    assert len(crd_yaml()) < SIZE_LIMIT / 3


def test_names_subresources_and_columns():
    spec = custom_resource_definition()["spec"]
    assert spec["names"]["shortNames"] == ["infs"] and "kvern" in spec["names"]["categories"]
    assert VERSION["subresources"]["scale"] == {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    shown = [c["name"] for c in VERSION["additionalPrinterColumns"] if not c.get("priority")]
    columns = ["Model", "TP", "Ready", "Desired", "GPUs", "Reason", "Scaling", "URL", "Age"]
    assert shown == columns


def walk(schema: dict, path: str = ""):
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from walk(inner, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from walk(schema[key], f"{path}[]")


def test_it_is_structural():
    for path, schema in walk(SCHEMA):
        assert not {"$ref", "title", "allOf", "oneOf", "not", "const", "definitions", "$defs"} & schema.keys(), path
        assert schema.get("additionalProperties") is not False, path
        assert schema.get("default", 0) is not None, path
        if "x-kubernetes-int-or-string" in schema:
            assert schema["anyOf"] == [{"type": "integer"}, {"type": "string"}] and "type" not in schema, path
            continue
        assert "anyOf" not in schema, path
        assert schema["type"] in ("object", "array", "string", "integer", "boolean"), path
        for bound in ("exclusiveMinimum", "exclusiveMaximum"):
            assert schema.get(bound, True) is True, path
        if "properties" in schema and schema.get("default") is not None:
            assert schema["default"] == {}, path
            assert "required" not in schema, f"{path}: a default of {{}} that is not valid"


def test_every_string_list_and_map_has_a_bound_so_that_rules_have_a_cost():
    for path, schema in walk(SCHEMA["properties"]["spec"]):
        if schema.get("type") == "string":
            assert {"maxLength", "enum"} & schema.keys(), path
        if schema.get("type") == "array":
            assert "maxItems" in schema and "x-kubernetes-list-type" in schema, path
        if "additionalProperties" in schema:
            assert "maxProperties" in schema, path


def test_every_field_is_described_for_kubectl_explain():
    for path, schema in walk(SCHEMA):
        if path and not path.endswith("]") and path != ".metadata":
            assert schema.get("description"), path


def test_rules_of_the_models_are_in_the_schema_with_their_messages():
    rules = {r["message"] for _, s in walk(SCHEMA) for r in s.get("x-kubernetes-validations", ())}
    for words in (
        "minReplicas must be at most maxReplicas",
        "size must be within min..max",
        "give one cache source",
        "maxSurge and maxUnavailable must not both be 0",
        "the name clients use is immutable",
        "tensor size x pipeline size must divide",
        "metadata.name must have at most 40 characters",
        "max-model-len: set spec.engine.maxModelLen instead",
    ):
        assert [r for r in rules if words in r], words


def test_status_has_no_defaults_that_the_api_server_would_fill_in():
    assert not [path for path, schema in walk(SCHEMA["properties"]["status"]) if "default" in schema]


def filled(schema: dict, value: Any) -> Any:
    """Defaults as the API server fills them in."""
    if not isinstance(value, dict):
        return value
    out = dict(value)
    for name, inner in schema.get("properties", {}).items():
        if name not in out and "default" in inner:
            out[name] = inner["default"]
        if name in out:
            out[name] = filled(inner, out[name])
    return out


def test_defaults_of_schema_and_models_are_the_same():
    model = {"model": {"uri": "builtin://smollm2-135m"}}
    by_server = filled(SCHEMA["properties"]["spec"], model)
    by_models = InferenceServiceSpec.model_validate(model).to_dict()

    def without_empty(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: v for k, inner in value.items() if (v := without_empty(inner)) not in ({}, [], None)}
        return value

    assert without_empty(by_server) == without_empty(by_models)


# ---------------------------------------------------------------- agreement

BASE: dict[str, Any] = {"model": {"uri": "builtin://smollm2-135m"}}


def values_for(schema: dict) -> st.SearchStrategy:
    """Values that a schema allows, rules over several fields aside, with its bounds among them."""
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if schema.get("x-kubernetes-int-or-string"):
        low, high = schema.get("minimum", 0), min(schema.get("maximum", 1000), 1000)
        text = st.from_regex(schema["pattern"], fullmatch=True) if "pattern" in schema else st.just("x")
        return st.integers(low, high) | text.filter(lambda s: len(s) <= schema["maxLength"] and s.isascii())
    kind = schema["type"]
    if kind == "boolean":
        return st.booleans()
    if kind == "integer":
        low, high = schema.get("minimum", 0), schema.get("maximum", 2**31 - 1)
        return st.sampled_from([low, high]) | st.integers(low, high)
    if kind == "string":
        if schema.get("format") == "date-time":
            return st.datetimes().map(lambda t: t.strftime("%Y-%m-%dT%H:%M:%SZ").zfill(20))
        if "pattern" in schema:
            found = st.from_regex(schema["pattern"], fullmatch=True)
        else:
            found = st.text(
                st.characters(min_codepoint=33, max_codepoint=126), min_size=schema.get("minLength", 0), max_size=20
            )
        return found.filter(lambda s: schema.get("minLength", 0) <= len(s) <= schema["maxLength"] and s.isascii())
    if kind == "array":
        return st.lists(values_for(schema["items"]), max_size=2)
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return st.dictionaries(st.sampled_from(["spec", "metadata"]), st.dictionaries(st.just("a"), st.integers(0, 3)))
    if "additionalProperties" in schema:
        return st.dictionaries(st.sampled_from(["a", "b"]), values_for(schema["additionalProperties"]), max_size=2)
    required = schema.get("required", [])
    fields = {k: values_for(v) for k, v in schema["properties"].items()}
    return st.fixed_dictionaries(
        {k: v for k, v in fields.items() if k in required},
        optional={k: v for k, v in fields.items() if k not in required},
    )


SPEC_SCHEMA = SCHEMA["properties"]["spec"]
GOOD_ARGS = st.fixed_dictionaries({}, optional={"block-size": st.sampled_from([16, "32"]), "seed": st.integers(0, 9)})


def whole_specs() -> st.SearchStrategy:
    specs = values_for(SPEC_SCHEMA)
    return st.tuples(specs, GOOD_ARGS).map(lambda pair: _with_args(*pair))


def _with_args(spec: dict, args: dict) -> dict:
    if "engine" in spec:
        spec["engine"].pop("args", None)
        spec["engine"] |= {"args": args}
    return spec


@settings(max_examples=120, deadline=None)
@given(whole_specs())
def test_what_the_schema_allows_the_models_take_unless_a_rule_forbids_it(spec):
    SPEC_CHECK.validate(spec)
    try:
        model = InferenceServiceSpec.model_validate(spec)
    except ValidationError as error:
        assert {e["type"] for e in error.errors()} == {"rule"}, error
        return
    SPEC_CHECK.validate(model.to_dict())
    assert InferenceServiceSpec.model_validate(model.to_dict()) == model


WRONG = [
    {"replicas": -1},
    {"replicas": "1"},
    {"replicas": 1.5},
    {"replicas": 10_001},
    {"replica": 1},
    {"suspend": "yes"},
    {"model": {}},
    {"model": {"uri": "file:///x"}},
    {"model": {"uri": "builtin://tiny-kjv", "adapters": [{"name": "a"}]}},
    {"engine": {"gpuMemoryUtilization": 0.9}},
    {"engine": {"gpuMemoryUtilization": "1.1"}},
    {"engine": {"maxModelLen": 0}},
    {"engine": {"quantization": "int3"}},
    {"engine": {"args": {"enforce-eager": True}}},
    {"engine": {"args": {"sim-speed": 0.5}}},
    {"engine": {"args": ["block-size"]}},
    {"resources": {"cpu": "2x"}},
    {"resources": {"cpu": -1}},
    {"resources": {"gpusPerPod": 65}},
    {"resources": {"nodeSelector": {"a": 1}}},
    {"resources": {"tolerations": [{"effect": "Never"}]}},
    {"parallelism": {"tensor": {"size": 0}}},
    {"parallelism": {"tensor": {"mode": "auto"}}},
    {"autoscaling": {"kvTarget": "80%"}},
    {"autoscaling": {"slo": {"ttftP95Ms": 0}}},
    {"rollout": {"maxSurge": "200%"}},
    {"rollout": {"drainTimeoutSeconds": 3601}},
    {"cache": {"pvc": {"size": "big"}}},
    {"router": {"replicas": 0}},
    {"router": {"policy": "RoundRobin"}},
    {"overrides": {"podTemplate": []}},
]


@pytest.mark.parametrize("change", WRONG, ids=str)
def test_what_is_wrong_is_refused_by_both(change):
    spec = BASE | change
    assert not SPEC_CHECK.is_valid(spec)
    with pytest.raises(ValidationError):
        InferenceServiceSpec.model_validate(spec)


def test_reserved_flags_are_refused_by_the_rule_and_by_the_models():
    rules = SPEC_SCHEMA["properties"]["engine"]["properties"]["args"]["x-kubernetes-validations"]
    for name in RESERVED_ARGS:
        assert f"!('{name}' in self)" in [r["rule"] for r in rules]
        document = {
            "apiVersion": "kvern.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "a"},
            "spec": BASE | {"engine": {"args": {name: "1"}}},
        }
        with pytest.raises(ManifestError):
            parse_service(document)


@settings(max_examples=60, deadline=None)
@given(values_for(SCHEMA["properties"]["status"]))
def test_a_status_that_the_models_write_is_one_that_the_schema_takes(status):
    STATUS_CHECK.validate(InferenceServiceStatus.model_validate(status).to_dict())
