"""Writes the reference pages of docs/ from the code that they describe: `python tools/reference.py [--check]`.

The resource's fields from its models, engine flags from engine_flags.json, commands from the argument parser, reasons
from advice.py, metrics from what the processes expose, chart values from the charts. With --check nothing is written
and the exit status says whether something would change.
"""

import argparse
import ast
import json
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
NOTE = "<!-- Written by tools/reference.py (make generate); do not edit. -->\n\n"
BEGIN, END = "<!-- generated: begin -->", "<!-- generated: end -->"


def pages() -> dict[Path, str]:
    """Every generated page (or page with a generated part) as it should be."""
    troubleshooting = DOCS / "troubleshooting.md"
    return {
        DOCS / "reference/inferenceservice.md": NOTE + resource_page(),
        DOCS / "reference/engine-flags.md": NOTE + flags_page(),
        DOCS / "reference/cli.md": NOTE + commands_page(),
        DOCS / "reference/metrics.md": NOTE + metrics_page(),
        DOCS / "reference/chart-values.md": NOTE + values_page(),
        troubleshooting: _between(troubleshooting.read_text(), reasons_part()),
    }


def _between(page: str, part: str) -> str:
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"tools/reference.py: a page lacks its marks {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{part}\n{END}{after}"


# ---------------------------------------------------------------- the resource

SCALARS = {"string": "text", "integer": "integer", "boolean": "true or false"}


def resource_page() -> str:
    """Every field of InferenceService."""
    from kvern_operator.api.schema import structural_schema
    from kvern_operator.api.status import InferenceServiceStatus
    from kvern_operator.api.types import InferenceServiceSpec

    parts = {"spec": structural_schema(InferenceServiceSpec), "status": structural_schema(InferenceServiceStatus)}
    out = [
        "# InferenceService",
        "`kvern.dev/v1alpha1`, short name `infs`. On a cluster, `kubectl explain infs.spec` says the same. A field "
        "marked **required** must be given where the object that holds it is; all others have a default or may be "
        "left out. Unknown fields are refused (by `kubectl apply` and `kvern validate`).",
    ]
    for name, part in parts.items():
        out += [f"## {name}", _sentence(part.get("description", "")), *_objects(part, name)]
    return "\n\n".join(out) + "\n"


def _objects(schema: Mapping[str, Any], path: str) -> Iterator[str]:
    """The table of an object's fields, then those of the objects in it."""
    fields = schema.get("properties", {})
    rows = ["| field | what it is |", "|---|---|"]
    deeper: list[tuple[str, Mapping[str, Any]]] = []
    for name, field in fields.items():
        inner = _inner(field)
        own = f"{path}.{name}" + ("[]" if inner is not field else "")
        if "properties" in inner:
            deeper.append((own, inner))
        rows.append(f"| `{name}`{_required(name, schema)} | {_cell(field, inner, own)} |")
    yield "\n".join(rows)
    yield from (f"- {_sentence(rule['message'])}" for rule in _rules(schema))
    for own, inner in deeper:
        yield f"### {own}"
        text = inner.get("description", "")
        if text:
            yield _sentence(text)
        yield from _objects(inner, own)


def _inner(field: Mapping[str, Any]) -> Mapping[str, Any]:
    return field["items"] if field.get("type") == "array" else field


def _rules(schema: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    return schema.get("x-kubernetes-validations", ())


def _required(name: str, schema: Mapping[str, Any]) -> str:
    return "<br>**required**" if name in schema.get("required", ()) else ""


def _cell(field: Mapping[str, Any], inner: Mapping[str, Any], path: str) -> str:
    text = _sentence(field.get("description") or inner.get("description", ""))
    facts = [_type(field, inner)]
    if "properties" in inner:
        facts = [f"[{path}](#{_anchor(path)})"]
    facts += _bounds(field if inner is field else inner)
    default = field.get("default")
    if default not in (None, {}, []):
        facts.append(f"default `{json.dumps(default, ensure_ascii=False)}`")
    rules = "".join(f"<br>{_sentence(rule['message'])}" for rule in _rules(field) if "properties" not in inner)
    return _escaped(text) + rules + f'<br><span class="facts">{"; ".join(facts)}</span>'


def _type(field: Mapping[str, Any], inner: Mapping[str, Any]) -> str:
    many = "list of " if inner is not field else ""
    if "enum" in inner:
        return many + " or ".join(f"`{value}`" for value in inner["enum"])
    if inner.get("x-kubernetes-int-or-string"):
        return many + "integer or text"
    if inner.get("format") == "date-time":
        return many + "time"
    if inner.get("x-kubernetes-preserve-unknown-fields"):
        return "any object"
    if "additionalProperties" in inner:
        values = inner["additionalProperties"]
        kind = "integer or text" if values.get("x-kubernetes-int-or-string") else "text"
        return f"map of {kind}"
    return many + SCALARS.get(str(inner.get("type")), "object")


def _bounds(schema: Mapping[str, Any]) -> list[str]:
    low, high = schema.get("minimum"), schema.get("maximum")
    if schema.get("x-kubernetes-int-or-string"):
        low = high = None
    if high == 2**31 - 1:
        high = None
    if low is not None and high is not None:
        return [f"{low} to {high:,}"]
    return [f"at least {low}"] if low is not None else []


def _anchor(path: str) -> str:
    return re.sub(r"[^a-z0-9]", "", path.lower())


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return text if not text or text.endswith((".", "!", "?", ":")) else text + "."


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


# ---------------------------------------------------------------- engine flags


def flags_page() -> str:
    """Every flag of `kvern serve`, and those of vLLM that are refused."""
    from kvern_operator.api.flags import RESERVED_ARGS

    document = json.loads((ROOT / "operator/kvern_operator/api/engine_flags.json").read_text())
    out = [
        "# Engine flags",
        "Flags of `kvern serve`. Each is an environment variable too, and in a manifest an entry of `spec.engine.args` "
        'without the dashes (`block-size: 32`, `enforce-eager: "true"`), unless a field of the spec decides it.',
    ]
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for flag in document["flags"]:
        groups.setdefault(flag["group"], []).append(flag)
    for group, flags in groups.items():
        rows = ["| flag | what it does |", "|---|---|", *(_flag_row(flag, RESERVED_ARGS) for flag in flags)]
        out += [f"## {group}", "\n".join(rows)]
    refused = ["| flag | instead |", "|---|---|"]
    refused += [f"| `--{name}` | {_escaped(_sentence(text))} |" for name, text in sorted(document["refused"].items())]
    out += [
        "## Flags of vLLM that are refused",
        "They are known, and answered with what to do instead.",
        "\n".join(refused),
    ]
    return "\n\n".join(out) + "\n"


def _flag_row(flag: Mapping[str, Any], reserved: Mapping[str, str]) -> str:
    facts = [f"`{flag['env']}`"]
    facts.append(" or ".join(f"`{c}`" for c in flag["choices"]) if flag["choices"] else flag["type"])
    for key, word in (("minimum", "at least"), ("exclusive_minimum", "above"), ("maximum", "at most")):
        if flag[key] is not None:
            facts.append(f"{word} {flag[key]:g}")
    if flag["required"]:
        facts.append("required")
    elif flag["default"] not in (None, [], ""):
        facts.append(f"default `{json.dumps(flag['default'])}`")
    if flag["name"] in reserved:
        owner = reserved[flag["name"]]
        facts.append(f"in a manifest: `spec.{owner}`" if owner else "in a manifest: decided by the operator")
    name = "MODEL" if flag["name"] == "model" else f"--{flag['name']}"
    return f'| `{name}` | {_escaped(_sentence(flag["help"]))}<br><span class="facts">{"; ".join(facts)}</span> |'


# ---------------------------------------------------------------- commands


def commands_page() -> str:
    """`kvern COMMAND --help` of every command that needs no engine."""
    from kvern_cli.main import ENGINE_COMMANDS, make_parser

    parser = make_parser()
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    out = [
        "# Command line",
        "`pip install kvern` brings these; `serve`, `generate`, `inspect`, `bench` and `fetch` come with "
        "`kvern[engine]`.",
        "`status`, `explain` and `logs` look at one of two places and say on standard error which: what `kvern up` "
        "runs on this machine, where it runs what is asked for; else the cluster that kubectl would talk to. "
        "kubectl's own flags (`--context`, `--kubeconfig`, `-A`), or `--cluster`, ask for the cluster, `--local` for "
        "this machine. They need no more rights than the role `view` gives; what may not be seen is named.",
    ]
    for name, command in commands.choices.items():
        out += [f"## kvern {name}", f"```\n{_help(command)}\n```"]
    rows = [f"| `kvern {name}` | {text} |" for name, text in ENGINE_COMMANDS.items()]
    out += ["## Commands of the engine", "\n".join(["| command | what it does |", "|---|---|", *rows])]
    return "\n\n".join(out) + "\n"


def _help(parser: argparse.ArgumentParser) -> str:
    """The help at a fixed width, whatever the terminal."""
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=100, max_help_position=30)
    return parser.format_help().rstrip()


# ---------------------------------------------------------------- reasons


def reasons_part() -> str:
    """Every reason, with its meaning and what to do."""
    from kvern_operator import advice

    parts = (
        ("Containers that end", advice.CRASHES),
        ("Pods that do not start", advice.PODS),
        ("Pods that cannot be made", advice.WORKLOADS),
        ("The service as a whole", advice.SERVICE),
        ("Conditions", advice.CONDITIONS),
        ("Scaling", advice.SCALING),
        ("Events", advice.EVENTS),
    )
    out = []
    for title, reasons in parts:
        fine = {name: known for name, known in reasons.items() if known.kind == "fine" and not known.steps}
        out.append(f"### {title}")
        for name, known in reasons.items():
            if name not in fine:
                out += [f"#### {name}", *_reason(known)]
        if fine:
            rows = [f"| `{name}` | {known.meaning} | {known.where} |" for name, known in fine.items()]
            out += ["As it should be:", "\n".join(["| reason | meaning | where |", "|---|---|---|", *rows])]
    return "\n\n".join(out) + "\n"


def _reason(known: Any) -> Iterator[str]:
    yield f'{known.meaning}\n<br><span class="facts">{_where(known)}</span>'
    steps = [step.format(name="NAME", pod="POD", node="NODE", k="kubectl") for step in known.steps]
    if steps:
        yield "\n".join(f"- {_capital(step)}" for step in steps)


def _where(known: Any) -> str:
    kind = {"fine": "as it should be", "passing": "passes by itself", "trouble": "needs you"}[known.kind]
    return f"{known.where}; {kind}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


# ---------------------------------------------------------------- metrics


def metrics_page() -> str:
    """Names, kinds and meanings as the processes expose them."""
    out = [
        "# Metrics",
        "In Prometheus' text format. `?name[]=NAME` (several times) limits an answer to these.",
        "## Engine",
        "Port 8000 of every engine pod, `/metrics`. Names, types and labels are vLLM's, so that its dashboards work.",
        _metric_table(_engine_metrics()),
        "## Router",
        "Port 8000 of every router pod, `/metrics`.",
        _metric_table(_router_metrics()),
    ]
    out += ["## Operator", "Port 8080 of the operator's pod, `/metrics`.", _metric_table(_operator_metrics())]
    return "\n\n".join(out) + "\n"


def _metric_table(text: str) -> str:
    rows = ["| metric | kind | what it counts |", "|---|---|---|"]
    helps = dict(re.findall(r"^# HELP (\S+) (.*)$", text, re.M))
    kinds = re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M)
    return "\n".join(
        rows
        + [
            f"| `{name}` | {kind} | {_escaped(_sentence(helps.get(name, '')))} |"
            for name, kind in kinds
            if not name.endswith("_created")  # when prometheus_client began to count: beside each counter
        ]
    )


def _engine_metrics() -> str:
    from kvern_engine.ipc import EngineStats
    from kvern_engine.metrics import EngineView, Metrics, PodView

    def view() -> PodView:
        layout = {"dp": 1, "tp": 1, "pp": 1}
        return PodView([EngineView(0, "ready", EngineStats(0))], False, layout, {"block_size": "16"}, 4096)

    with tempfile.TemporaryDirectory() as folder:
        metrics = Metrics(Path(folder), model_name="m", num_engines=1, handlers=["/v1/completions"], view=view)
        metrics.http_request("POST", "/v1/completions", 200, 0.1)
        return metrics.render()[0].decode()


def _router_metrics() -> str:
    from kvern_router.metrics import RouterMetrics

    class Idle:
        def inflight(self) -> list[tuple[str, int]]:
            return [("x", 0)]

        def held(self) -> tuple[int, int]:
            return 0, 0

    return RouterMetrics(Idle()).exposition(b"").decode()


def _operator_metrics() -> str:
    from kvern_operator.metrics import Metrics

    gauges = "".join(f"# HELP {name} {text}\n# TYPE {name} gauge\n" for name, text in _operator_gauges())
    return Metrics().text().decode() + gauges


def _operator_gauges() -> Iterator[tuple[str, str]]:
    """Gauges are added where what they read is: `metrics.gauge("name", "text", ...)` in the operator's main.py."""
    tree = ast.parse((ROOT / "operator/kvern_operator/main.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "gauge":
            name, text = (arg.value for arg in node.args[:2] if isinstance(arg, ast.Constant))
            yield str(name), str(text)


# ---------------------------------------------------------------- chart values


def values_page() -> str:
    """The tables of values in the charts' own READMEs."""
    out = [
        "# Chart values",
        "Checked by each chart's closed `values.schema.json`: a name that does not exist is refused.",
    ]
    for chart in ("kvern", "kvern-crds"):
        text = (ROOT / "charts" / chart / "README.md").read_text()
        table = text.partition("<!-- values: begin -->")[2].partition("<!-- values: end -->")[0].strip()
        out += [f"## {chart}", table]
    return "\n\n".join(out) + "\n"


# ---------------------------------------------------------------- the command


def main() -> int:
    """Write the pages, or with --check say which ones are stale."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 where a page is stale")
    check = parser.parse_args().check
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if check:
            print(f"{path.relative_to(ROOT)} is stale: make generate", file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(pages()[path])
    return 1 if check and stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
