"""A YAML manifest -> a validated InferenceService, or every error at once, one line each.

An error names the place (file, line, path), the value and what is allowed; an unknown field, the nearest known one. The
models decide what is valid (types.py); this file finds places and words. It reads no cluster.
"""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from kvern_operator.api.patterns import RIGHT
from kvern_operator.api.types import API_VERSION, KIND, InferenceService

Path_ = tuple[str | int, ...]
Lines = dict[Path_, int]


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. `path` is dotted (spec.autoscaling.minReplicas), empty for the document itself."""

    path: str
    message: str
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class ManifestError(ValueError):
    """A manifest that cannot be used. `problems` is never empty; str() is one line a problem."""

    def __init__(self, problems: list[Problem], source: str = "") -> None:
        self.problems = problems
        self.source = source
        super().__init__("\n".join(self._lines()))

    def _lines(self) -> Iterator[str]:
        for problem in self.problems:
            place = ":".join(str(part) for part in (self.source, problem.line) if part)
            yield f"{place}: {problem}" if place else str(problem)


# ---------------------------------------------------------------- YAML


def _read_yaml(text: str) -> tuple[Any, Lines]:
    """The single document of a YAML text and the line of each path. Raises ManifestError."""
    try:
        nodes = list(yaml.compose_all(text, Loader=yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = f"not valid YAML: {error.problem or error.context}"
        raise ManifestError([Problem("", message, mark.line + 1 if mark else None)]) from None
    except yaml.YAMLError as error:
        raise ManifestError([Problem("", f"not valid YAML: {' '.join(str(error).split())}")]) from None
    nodes = [node for node in nodes if not _is_null(node)]
    if not nodes:
        raise ManifestError([Problem("", f"is empty; it should hold one {KIND} ({API_VERSION})")])
    if len(nodes) > 1:
        message = f"{len(nodes)} documents; a file holds one {KIND}: put the others into files of their own"
        raise ManifestError([Problem("", message, nodes[1].start_mark.line + 1)])
    lines: Lines = {}
    problems = list(_walk(nodes[0], (), lines))
    if problems:
        raise ManifestError(problems)
    return _construct(nodes[0]), lines


def _is_null(node: yaml.Node | None) -> bool:
    return node is None or (isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null")


def _walk(node: yaml.Node, path: Path_, lines: Lines) -> Iterator[Problem]:
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _walk(item, (*path, index), lines)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else "?"
            here, line = (*path, name), key.start_mark.line + 1
            if here in lines:
                yield Problem(dotted(here), f"is given twice (first on line {lines[here]})", line)
                continue
            lines[here] = line
            yield from _walk(value, here, lines)


def _construct(node: yaml.Node) -> Any:
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        raise ManifestError([Problem("", f"not valid YAML: {error.problem}", line)]) from None
    finally:
        loader.dispose()


# ---------------------------------------------------------------- words


def dotted(path: Path_) -> str:
    """("spec", "adapters", 0, "name") -> "spec.adapters[0].name"."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def show(value: Any) -> str:
    """A value as people wrote it, shortened."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "a map" if value else "{}"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "[]"
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _model_at(path: Path_) -> type[BaseModel] | None:
    """The model that owns the object at this path."""
    model: Any = InferenceService
    for part in path:
        if isinstance(part, int):
            continue
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return None
        annotation = next((i.annotation for n, i in model.model_fields.items() if (i.alias or n) == part), None)
        model = _inner_model(annotation)
    return model if isinstance(model, type) and issubclass(model, BaseModel) else None


def _inner_model(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arg in get_args(annotation) if (found := _inner_model(arg)) is not None), None)


def _all_paths(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str]]:
    """(field name, dotted path) of every field below a model."""
    for name, info in model.model_fields.items():
        alias = info.alias or name
        yield alias, f"{prefix}.{alias}"
        inner = _inner_model(info.annotation)
        if inner is not None and get_origin(info.annotation) is not list:
            yield from _all_paths(inner, f"{prefix}.{alias}")


def _unknown_field(path: Path_) -> str:
    """The field that was meant: the same word in another spelling, then in another place, then a similar sibling."""
    name = str(path[-1])
    owner = _model_at(path[:-1])
    siblings = [info.alias or field for field, info in owner.model_fields.items()] if owner else []
    folded = {s.lower(): s for s in siblings}
    plain = name.replace("_", "").replace("-", "").lower()
    if plain in folded:
        return f"unknown field; did you mean {folded[plain]}?"
    spec = _model_at(("spec",)) if path[0] == "spec" else None
    elsewhere = [where for field, where in _all_paths(spec, "spec") if field.lower() == plain] if spec else []
    if elsewhere:
        return f"unknown field here; did you mean {elsewhere[0]}?"
    near = difflib.get_close_matches(plain, folded, n=1, cutoff=0.6)
    if near:
        return f"unknown field; did you mean {folded[near[0]]}?"
    return f"unknown field; known are {', '.join(siblings)}" if siblings else "unknown field"


_KINDS = {
    "int_type": "a whole number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a map",
    "model_type": "a map",
    "model_attributes_type": "a map",
}


def _wrong_type(kind: str, value: Any) -> str:
    wanted = _KINDS[kind]
    if value is None:
        return f"is empty; it must be {wanted}, or leave the field out"
    if kind == "string_type" and isinstance(value, bool | int | float):
        noun = "a boolean" if isinstance(value, bool) else "a number"
        return f'{show(value)} is {noun}; write it in quotes: "{show(value)}"'
    if kind == "string_type" and isinstance(value, date):
        return f'{value} is a date; write it in quotes: "{value}"'
    if kind == "int_type" and isinstance(value, str) and value.lstrip("-").isdigit():
        return f"{show(value)} is text; write it without quotes: {value}"
    return f"{show(value)} must be {wanted}"


def _describe(error: Any) -> str:
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind in _KINDS:
        return _wrong_type(kind, value)
    if kind == "missing":
        return "is missing"
    if kind in ("literal_error", "enum"):
        options = context["expected"].replace("'", "").replace(" or ", ", ")
        return f"{show(value)} must be {'one of ' if ',' in options else ''}{options}"
    if kind in ("greater_than_equal", "less_than_equal"):
        bound = context.get("ge", context.get("le"))
        return f"{show(value)} must be {'at least' if 'ge' in context else 'at most'} {bound}"
    if kind == "string_pattern_mismatch":
        return f"{show(value)} must be {RIGHT.get(context['pattern'], 'text like ' + context['pattern'])}"
    if kind == "string_too_short":
        return "must not be empty"
    if kind == "string_too_long":
        return f"has {len(value)} characters; at most {context['max_length']} are allowed"
    if kind == "too_long":
        return f"has {context['actual_length']} entries; at most {context['max_length']} are allowed"
    if kind in ("quantity", "int_or_percent"):
        return str(context["text"])
    return f"{show(value)}: {error['msg']}"


def _constraint_path(error: Any) -> Path_:
    """Where the error is, in the file's terms: without pydantic's own steps for unions and map keys."""
    steps = [s for s in error["loc"] if not (isinstance(s, str) and s != "[key]" and _is_union_step(s))]
    return tuple(s for s in steps if s != "[key]")


def _is_union_step(step: str) -> bool:
    return step in ("str", "int", "constrained-str", "constrained-int") or "function-" in step or "[" in step


def _from_validation(error: ValidationError, lines: Lines) -> list[Problem]:
    problems: dict[tuple[str, str], Problem] = {}
    for item in error.errors():
        path = _constraint_path(item)
        for problem in _problems_of(item, path, lines):
            problems.setdefault((problem.path, problem.message), problem)
    # A union reports each of its branches; one line a place is enough.
    first: dict[str, Problem] = {}
    for problem in problems.values():
        if problem.path not in first or not problem.message.endswith("must be a whole number"):
            first.setdefault(problem.path, problem)
    unions = {dotted(_constraint_path(i)) for i in error.errors() if len(_constraint_path(i)) < len(i["loc"])}
    kept = [p for p in problems.values() if p.path not in unions or first[p.path] is p]
    return sorted(kept, key=lambda p: p.line or 0)


def _problems_of(item: Any, path: Path_, lines: Lines) -> Iterator[Problem]:
    if item["type"] == "rule":
        for broken in item["ctx"]["problems"]:
            at = (*path, *broken["field"].split("."))
            values = ", ".join(f"{name} {show(v)}" for name, v in broken["values"].items() if v is not None)
            yield Problem(dotted(at), broken["message"] + (f" ({values})" if values else ""), _line(at, lines))
        return
    message = _unknown_field(path) if item["type"] == "extra_forbidden" else _describe(item)
    yield Problem(dotted(path), message, _line(path, lines))


def _line(path: Path_, lines: Lines) -> int | None:
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path)


# ---------------------------------------------------------------- the way in


def parse_service(document: Any, lines: Lines | None = None) -> InferenceService:
    """A plain object -> InferenceService. Raises ManifestError with every problem."""
    lines = lines or {}
    if not isinstance(document, dict):
        raise ManifestError([Problem("", f"holds {show(document)}; it should hold one {KIND}", lines.get(()))])
    problems = list(_head_problems(document, lines))
    if problems:
        raise ManifestError(problems)
    try:
        return InferenceService.model_validate(document)
    except ValidationError as error:
        raise ManifestError(_from_validation(error, lines)) from None


def _head_problems(document: dict[str, Any], lines: Lines) -> Iterator[Problem]:
    for key, wanted in (("apiVersion", API_VERSION), ("kind", KIND)):
        found = document.get(key)
        if found is None:
            yield Problem(key, f"is missing; write {key}: {wanted}", lines.get(()))
        elif found != wanted:
            yield Problem(key, f"{show(found)} must be {wanted}", lines.get((key,)))


def load_text(text: str, source: str = "") -> InferenceService:
    """YAML text -> InferenceService. Raises ManifestError; `source` (a file's name) goes in front of each line."""
    try:
        document, lines = _read_yaml(text)
        return parse_service(document, lines)
    except ManifestError as error:
        raise ManifestError(error.problems, source) from None


def load_file(path: str | Path) -> InferenceService:
    """A YAML file -> InferenceService. Raises ManifestError, also where the file cannot be read."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ManifestError([Problem("", "no such file")], str(path)) from None
    except IsADirectoryError:
        raise ManifestError([Problem("", "is a folder; name one YAML file in it")], str(path)) from None
    except UnicodeDecodeError as error:
        raise ManifestError([Problem("", f"is not UTF-8 text (byte {error.start})")], str(path)) from None
    except OSError as error:
        raise ManifestError([Problem("", f"cannot be read: {error.strerror}")], str(path)) from None
    return load_text(text, str(path))
