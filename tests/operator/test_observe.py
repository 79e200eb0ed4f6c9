"""Observed from objects as an API server gives them: whose they are, what pods say, room for more."""

import pytest
from fake_cluster import service
from hypothesis import given
from hypothesis import strategies as st

from kvern_operator.admin import Report
from kvern_operator.api.status import InferenceServiceStatus
from kvern_operator.mirror import trim_child, trim_pod
from kvern_operator.observe import observe, read_status
from kvern_operator.observed import Notice

LABELS = {"kvern.dev/service": "smol"}


def child(name, kind="StatefulSet", owner="u-1", uid="c-1", **metadata):
    owners = [{"uid": owner, "controller": True}] if owner else []
    common = {"name": name, "namespace": "team-a", "uid": uid, "resourceVersion": "1", "labels": LABELS}
    return trim_child({"kind": kind, "metadata": {**common, "ownerReferences": owners, **metadata}, "spec": {}})


def pod(name="smol-r0-0", uid="p-1", owner="c-1", component="engine", scheduled=True, **status):
    labels = {**LABELS, "app.kubernetes.io/component": component, "kvern.dev/replica": name.rpartition("-")[0]}
    running = [{"name": component, "started": True, "restartCount": 0, "state": {"running": {}}}]
    condition = {"type": "PodScheduled", "status": "True"}
    if not scheduled:
        condition = {
            **condition,
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/2 nodes: Insufficient gpu",
        }
        running = []
    return trim_pod(
        {
            "metadata": {
                "name": name,
                "namespace": "team-a",
                "uid": uid,
                "labels": labels,
                "creationTimestamp": "2026-01-01T00:00:00Z",
                "ownerReferences": [{"uid": owner, "controller": True}],
            },
            "spec": {"containers": [{"name": component}]},
            "status": {"podIP": "10.0.0.7", "conditions": [condition], "containerStatuses": running, **status},
        }
    )


def scene(children=(), pods=(), reports=None, **more):
    return observe(service(), children, pods, reports or {}, token="t", **more)


def test_only_what_this_service_owns_is_its_own():
    found = scene(
        [
            child("smol-r0"),
            child("smol-r1", owner="u-0", uid="c-2"),  # of the service that had the name before
            child("smol-r2", uid="c-3", deletionTimestamp="2026-01-01T00:00:00Z"),
            child("smol-cache", "PersistentVolumeClaim", owner=None, uid="c-4"),  # kept on purpose
            child("smol", "Service", owner=None, uid="c-5"),  # somebody's
        ]
    )
    assert set(found.live) == {("StatefulSet", "smol-r0"), ("PersistentVolumeClaim", "smol-cache")}
    assert found.taken == {("StatefulSet", "smol-r1"), ("StatefulSet", "smol-r2"), ("Service", "smol")}
    assert len(found.observed.children) == 2


def test_what_a_pod_says_itself_is_added():
    report = Report(3, True, ((1, 4096),), "cpu")
    found = scene([child("smol-r0")], [pod()], {"p-1": report})
    (seen,) = found.observed.pods
    assert (seen.in_flight, seen.draining, seen.feasible, seen.device) == (3, True, ((1, 4096),), "cpu")
    (target,) = found.targets
    assert (target.uid, target.address, target.token) == ("p-1", "10.0.0.7:8001", "t")
    assert found.leaving == frozenset()


def test_a_pod_that_does_not_run_says_nothing_and_is_not_asked():
    waiting = [{"name": "engine", "state": {"waiting": {"reason": "ContainerCreating"}}}]
    found = scene([child("smol-r0")], [pod(containerStatuses=waiting)], {"p-1": Report(3)})
    assert found.observed.pods[0].in_flight is None and found.targets == ()


MARK = {"kvern.dev/draining-since": "2026-01-01T00:00:00+00:00"}


def test_routers_are_asked_while_a_replica_leaves_and_see_no_token():
    router = pod("smol-router-x", "p-9", component="router")
    assert scene([child("smol-r0")], [pod(), router]).targets[1:] == ()
    said = Report(sends_to=frozenset({"smol-r0-0"}))
    found = scene([child("smol-r0", annotations=MARK)], [pod(), router], {"p-9": said})
    asked = found.targets[1]
    assert (asked.uid, asked.address, asked.token, asked.routing) == ("p-9", "10.0.0.7:8000", "", True)
    assert found.leaving == {"p-1", "p-9"}  # both often
    assert found.observed.pods[1].sends_to == {"smol-r0-0"}


def test_pods_of_a_draining_replica_are_leaving():
    assert scene([child("smol-r0", annotations=MARK)], [pod()]).leaving == {"p-1"}


@pytest.mark.parametrize("children", [[], [child("smol-r0", uid="another")]])
def test_a_pod_of_a_replica_that_is_gone_is_on_its_way_out(children):
    found = scene(children, [pod()])
    assert found.observed.pods[0].terminating and found.targets == ()


def test_there_is_no_room_while_a_pod_fits_nowhere():
    assert scene([child("smol-r0")], [pod()]).observed.spare_replicas is None
    stuck = scene([child("smol-r0")], [pod(scheduled=False)])
    assert stuck.observed.spare_replicas == 0
    assert stuck.observed.pods[0].message == "0/2 nodes: Insufficient gpu"  # the scheduler's words


def test_there_is_no_room_while_a_quota_keeps_pods_away():
    words = (
        'create Pod smol-r0-0 in StatefulSet smol-r0 failed error: pods "smol-r0-0" is forbidden: exceeded quota: gpus'
    )
    quota = (Notice("StatefulSet", "smol-r0", "FailedCreate", words),)
    assert scene([child("smol-r0")], [], notices=quota).observed.spare_replicas == 0
    assert scene([child("smol-r0")], [pod()], notices=quota).observed.spare_replicas is None  # it has its pod by now


def test_what_a_later_version_has_written_into_a_status_is_left_out():
    """Of an operator that was upgraded and rolled back: the rest of the record stays."""
    known = {"type": "Ready", "status": "True", "reason": "Fine", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    status = {
        "replicas": 2,
        "fromTheFuture": {"a": 1},
        "revision": {"current": "abc", "future": True},
        "conditions": [{**known, "type": "FutureCondition"}, known, {**known, "futureField": 1, "type": "Available"}],
        "capacity": {"gpus": "many"},
    }
    found = read_status({"status": status})
    assert (found.replicas, found.revision.current, found.capacity.gpus) == (2, "abc", 0)
    assert [c.type for c in found.conditions] == ["Ready"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*InferenceServiceStatus().to_dict(), "url", "startup", "x"]), json_values))
def test_no_status_stops_the_operator(status):
    found = read_status({"status": status})
    assert found is None or isinstance(found, InferenceServiceStatus)


def test_a_status_that_cannot_be_read_is_none():
    assert read_status({}) is None
    assert read_status({"status": {"fromTheFuture": 1}}) is None
    assert read_status({"status": {"replicas": 2}}).replicas == 2
