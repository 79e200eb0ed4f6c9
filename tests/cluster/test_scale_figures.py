"""The figures of e2e/scale: what counts as a service's child, what as a write, and percentiles."""

import importlib.util
import json
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

SCALE = Path(__file__).resolve().parents[2] / "e2e" / "scale"
OPERATOR = "system:serviceaccount:kvern-system:kvern-operator"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"kvern_scale_{name}", SCALE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


figures = load("figures")


def event(resource, name="", at=0.0, user=OPERATOR, code=201, verb="patch", received=None, **more):
    def stamp(seconds):
        return datetime.fromtimestamp(1_800_000_000 + seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

    return {
        "verb": verb,
        "user": {"username": user},
        "objectRef": {"resource": resource, "name": name, "namespace": "steady", **more},
        "responseStatus": {"code": code},
        "requestReceivedTimestamp": stamp(at if received is None else received),
        "stageTimestamp": stamp(at),
    }


def a_service(name="s0001", at=10.0):
    return event("inferenceservices", name, at + 0.5, "admin", verb="create", received=at)


def test_a_services_time_runs_from_its_receipt_to_the_last_childs_answer():
    log = [
        a_service(),
        event("configmaps", "s0001-r0-layout", 10.1),
        event("statefulsets", "s0001-r0", 10.25),
        event("services", "s0001", 10.2),
        event("services", "s0001", 99.0, code=200),  # changed later: another pass's work
        event("inferenceservices", "s0001", 98.0, subresource="status"),
        event("events", "s0001.abc", 97.0),
        event("pods", "s0001-r0-0", 96.0, "system:serviceaccount:kube-system:statefulset-controller"),
        event("services", "s00010", 95.0),  # another's
        event("services", "s0001", 94.0, namespace="burst"),
    ]
    found = figures.applied(log, OPERATOR, "steady")
    assert set(found) == {"s0001"}
    assert set(found["s0001"].children) == {"configmaps/s0001-r0-layout", "statefulsets/s0001-r0", "services/s0001"}
    assert found["s0001"].seconds == pytest.approx(0.25)


def test_children_that_come_before_their_service_in_the_log_are_found():
    """The log is in the order of answers, and a child may be answered before the service's own creation is logged."""
    found = figures.applied([event("services", "s0001", 10.2), a_service()], OPERATOR, "steady")
    assert list(found["s0001"].children) == ["services/s0001"]


def test_writes_are_counted_but_reads_leases_and_others():
    log = [
        event("configmaps", at=5.0),
        event("inferenceservices", at=6.0, subresource="status", code=409),
        event("leases", at=6.0, verb="update"),
        event("pods", at=6.0, verb="watch"),
        event("configmaps", at=6.0, user="admin"),
        event("configmaps", at=4.0),
        event("configmaps", at=7.0),
    ]
    since = figures.moment(log[0]["stageTimestamp"])
    found = figures.writes(log, OPERATOR, since, since + 2)
    assert found == Counter({"patch configmaps": 1, "patch inferenceservices/status": 1})


def test_the_log_is_read_with_what_was_rotated_away_and_without_a_half_line(tmp_path):
    (tmp_path / "audit-2026-01-01T00-00-00.000.log").write_text(json.dumps({"n": 1}) + "\n")
    (tmp_path / "audit.log").write_text(json.dumps({"n": 2}) + "\n" + '{"n": 3')
    assert [e["n"] for e in figures.read_log(tmp_path)] == [1, 2]


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_a_percentile_is_a_value_that_so_many_do_not_exceed(values, share):
    found = figures.percentile(values, share)
    assert found in values
    assert sum(v <= found for v in values) >= share * len(values) - 1e-9
    assert figures.percentile(values, 1.0) == max(values)


def test_no_values_have_no_percentile():
    with pytest.raises(ValueError, match="no values"):
        figures.percentile([], 0.5)
