"""Fixtures: the installed operator, namespaces that enforce Pod Security, a client pod; what is shown on failure."""

import contextlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import kit
import pytest
from kit import Client, Service, helm, kubectl

NAMESPACES = pytest.StashKey[set[str]]()
SECONDS = "seconds"  # the property of a report that holds rows of the table of times
TABLE = "table"  # the property of a report that holds a table as text
_tables: list[str] = []  # as _measured
_measured: list[tuple[str, float]] = []  # by the test that runs, not yet in a report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes long is left out, unless KVERN_E2E_FULL is set or -m names it."""
    if os.environ.get("KVERN_E2E_FULL"):
        return
    for item in items:
        marks = {"full", "chaos", "scale", "soak"} & {mark.name for mark in item.iter_markers()}
        if marks and not any(mark in config.option.markexpr for mark in marks):
            item.add_marker(pytest.mark.skip(reason=f"{', '.join(sorted(marks))}: make e2e-full"))


@pytest.fixture(scope="session")
def crds() -> None:
    """The resource's definition, from its own chart."""
    if "kvern-crds" not in helm("list", "-n", kit.OPERATOR_NAMESPACE, "-q"):
        make_namespace_of(kit.OPERATOR_NAMESPACE)
        helm("install", "kvern-crds", "charts/kvern-crds", "-n", kit.OPERATOR_NAMESPACE)
    kubectl("wait", "--for=condition=Established", "crd/inferenceservices.kvern.dev", "--timeout=30s")


@pytest.fixture(scope="session")
def operator(crds: None) -> None:
    """The operator, installed from the chart; there already is fine."""
    if "kvern" in helm("list", "-n", kit.OPERATOR_NAMESPACE, "-q").split():
        return
    with measured("helm install to operator ready"):
        space = ("-n", kit.OPERATOR_NAMESPACE)
        helm("install", "kvern", "charts/kvern", *space, *image_values(), "--wait", "--timeout=3m")


def image_values() -> list[str]:
    """helm arguments that name the images of make e2e."""
    values = {
        "images.operator.repository": "kvern/operator",
        "images.operator.tag": "e2e",
        "images.engine.repository": "kvern/engine",
        "images.engine.tag": "e2e",
        "images.pullPolicy": "IfNotPresent",
    }
    return [word for name, value in values.items() for word in ("--set", f"{name}={value}")]


def make_namespace_named(prefix: str) -> str:
    """A new namespace that enforces Pod Security `restricted`, for fixtures that outlive a test."""
    name = f"{prefix}-{secrets.token_hex(3)}"
    make_namespace_of(name)
    return name


def drop_namespace(*names: str) -> None:
    """Away with them, in the background."""
    if names and not os.environ.get("KVERN_E2E_KEEP"):
        kubectl("delete", "namespace", "--ignore-not-found", "--wait=false", *names)


def make_namespace_of(name: str) -> None:
    """A namespace of this name that enforces Pod Security `restricted`; there already is fine."""
    manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": kit.RESTRICTED}}
    kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(manifest))


@pytest.fixture
def make_namespace(request: pytest.FixtureRequest) -> Iterator[Callable[[str], str]]:
    """Makes a namespace that enforces Pod Security `restricted`; it goes after the test."""
    mine = request.node.stash.setdefault(NAMESPACES, set())

    def make(prefix: str) -> str:
        name = make_namespace_named(prefix)
        mine.add(name)
        return name

    yield make
    drop_namespace(*mine)


@pytest.fixture
def namespace(make_namespace: Callable[[str], str], request: pytest.FixtureRequest) -> str:
    """A fresh namespace, named after the test."""
    word = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")
    return make_namespace(word[:40].rstrip("-"))


@pytest.fixture
def service(operator: None, namespace: str) -> Callable[..., Service]:
    """Applies an InferenceService: service(name, uri, **spec)."""

    def make(name: str, uri: str = "builtin://tiny-kjv", **spec: object) -> Service:
        made = Service(name, namespace)
        made.apply(kit.manifest(name, uri, **spec))
        return made

    return make


@pytest.fixture(scope="session")
def client() -> Client:
    """A pod of another namespace with the openai client; it stays until the cluster goes."""
    made = Client("kvern-e2e-client")
    make_namespace_of(made.namespace)
    kubectl("-n", made.namespace, "apply", "--server-side", "-f", "-", stdin=kit.CLIENT_POD)
    kubectl("-n", made.namespace, "wait", "--for=condition=Ready", f"pod/{made.pod}", "--timeout=90s")
    return made


# ---------------------------------------------------------------- measures


@contextlib.contextmanager
def measured(what: str) -> Iterator[None]:
    """Adds a row to the table of times."""
    start = time.monotonic()
    yield
    record(what, time.monotonic() - start)


def record(what: str, seconds: float) -> None:
    """A row of the table of times that pytest's summary shows."""
    _measured.append((what, round(seconds, 2)))


@pytest.fixture
def measure() -> Callable[[str, float], None]:
    """measure(what, seconds) adds a row to the table of times."""
    return record


@pytest.fixture
def show() -> Callable[[str], None]:
    """show(text) has a table shown at the end of the run."""
    return _tables.append


@pytest.fixture
def tell_of(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """tell_of(namespace): on failure of this test, what that namespace has to say."""
    names: set[str] = request.node.stash.setdefault(NAMESPACES, set())
    return names.add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table of times; also as JSON lines at the end of the file that KVERN_E2E_MEASURES names."""
    reports = [r for group in terminalreporter.stats.values() for r in group if isinstance(r, pytest.TestReport)]
    for text in [text for r in reports for key, text in r.user_properties if key == TABLE]:
        terminalreporter.section("events")
        terminalreporter.write_line(str(text))
    rows: list[tuple[str, str, float]] = []
    for report in reports:
        measured: list[Any] = [row for key, row in report.user_properties if key == SECONDS]
        rows += [(report.nodeid.split("::")[-1], what, seconds) for what, seconds in measured]
    if not rows:
        return
    terminalreporter.section("times")
    for name, what, seconds in rows:
        terminalreporter.write_line(f"{seconds:8.2f} s  {what}  ({name})")
    if file := os.environ.get("KVERN_E2E_MEASURES"):
        with Path(file).open("a") as out:
            out.writelines(json.dumps({"test": n, "what": w, "seconds": s}) + "\n" for n, w, s in rows)


# ---------------------------------------------------------------- failures


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # Of this phase alone: a report has the properties of the phases before it too. They travel between processes.
    report.user_properties = [(SECONDS, row) for row in _measured] + [(TABLE, text) for text in _tables]
    _measured.clear()
    _tables.clear()
    if report.failed and call.when in ("setup", "call"):
        names: set[str] = item.stash.setdefault(NAMESPACES, set())
        for name in sorted(names):
            report.sections.append((f"namespace {name}", _story(name)))
        report.sections.append(("operator", _operator_story()))
    return report


def _story(namespace: str) -> str:
    """Pods, conditions, events and the end of each log of a namespace."""

    def ask(*args: str) -> str:
        with contextlib.suppress(Exception):
            return kubectl("-n", namespace, *args, check=False, timeout=20)
        return ""

    conditions = (
        'jsonpath={range .items[*]}{.metadata.name}{"\\n"}{range .status.conditions[*]}'
        '{"  "}{.type}={.status} {.reason}: {.message}{"\\n"}{end}{end}'
    )
    parts = [
        ask("get", "infs,statefulsets,deployments,pods,pvc", "-o", "wide"),
        ask("get", "infs", "-o", conditions),
        ask("get", "events", "--sort-by=.metadata.creationTimestamp"),
    ]
    for pod in ask("get", "pods", "-o", "name").split():
        parts.append(f"-- log of {pod}\n" + ask("logs", pod, "--all-containers", "--prefix", "--tail=25"))
        parts.append(ask("logs", pod, "--all-containers", "--prefix", "--tail=15", "--previous"))
    return "\n".join(part for part in parts if part.strip())


def _operator_story() -> str:
    with contextlib.suppress(Exception):
        space = ("-n", kit.OPERATOR_NAMESPACE)
        pods = kubectl(*space, "get", "pods", "-o", "wide", check=False, timeout=20)
        return pods + kubectl(*space, "logs", kit.OPERATOR, "--tail=60", check=False, timeout=20)
    return ""
