"""A layout that changes in the pods that run: who is told, in which order, and what happens where a pod cannot."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from fake_cluster import FakeCluster, service
from hypothesis import given
from hypothesis import strategies as st

from kvern_operator.api.status import LayoutPlan
from kvern_operator.desired import meta
from kvern_operator.desired.layout import Layout
from kvern_operator.observed import Pod
from kvern_operator.relayout import failure, has_layout, read_layout, to_switch, trying_for

FOUR = "resources: {gpusPerPod: 4}, parallelism: {tensor: {size: %d}}"
SIZES = ((1, 1000), (2, 2500), (4, 6000))


def serving(replicas: int = 1, size: int = 4, **said: Any) -> FakeCluster:
    """A cluster whose engines say what they could be."""
    cluster = FakeCluster()
    cluster.settle(service(f"replicas: {replicas}, {FOUR % size}"))
    for name in [n for n, p in cluster.pods.items() if p.component == meta.ENGINE]:
        cluster.change(name, **{"tensor": size, "feasible": SIZES, **said})
    return cluster


def layout_of(cluster: FakeCluster, name: str) -> str:
    return str(cluster.objects["ConfigMap", f"{name}-layout"]["data"]["KVERN_TENSOR_PARALLEL_SIZE"])


def changed(size: int, replicas: int = 1, more: str = "") -> Any:
    return service(f"replicas: {replicas}, {FOUR % size}{more}", generation=2)


def test_the_pod_is_told_and_nothing_is_restarted():
    cluster = serving()
    uid = cluster.pods["smol-r0-0"].uid
    plan = cluster.step(changed(2))
    assert plan.switch == (("smol-r0-0", 2),) and not plan.delete and not plan.drain
    assert plan.notes == ("changing pod smol-r0-0 from tensor size 4 to 2 while it serves",)
    assert layout_of(cluster, "smol-r0") == "4", "a container that crashes meanwhile boots what it had"
    state = cluster.status.condition("ParallelismStable")
    assert (state.status, state.message) == ("False", "tensor size 4, wanted 2")
    assert cluster.step(changed(2)).switch == (), "it is at it"
    cluster.change("smol-r0-0", tensor=2, switching=False)
    cluster.step(changed(2))
    assert layout_of(cluster, "smol-r0") == "2" and cluster.step(changed(2)).empty
    assert cluster.pods["smol-r0-0"].uid == uid and cluster.deleted == []
    assert cluster.status.condition("ParallelismStable").status == "True"
    assert (cluster.status.parallelism.current, cluster.status.parallelism.target) == (2, 2)


def test_one_after_the_other():
    cluster = serving(replicas=3)
    told = []
    for _ in range(3):
        cluster.step(changed(1, 3))
        assert cluster.step(changed(1, 3)).switch == ()
        told.append(cluster.told[-1][0])
        cluster.change(cluster.told[-1][0], tensor=1, switching=False)
    assert told == ["smol-r0-0", "smol-r1-0", "smol-r2-0"] and len(cluster.told) == 3
    cluster.step(changed(1, 3))
    assert cluster.step(changed(1, 3)).empty


@pytest.mark.parametrize(
    "said",
    [
        {"feasible": ((4, 6000),)},
        {"tensor": None},
        {"refused": ((2, "no"),)},
        {"switch_failed": (2, "no")},
    ],
    ids=["not feasible", "does not say", "refused before", "tried before"],
)
def test_what_a_pod_cannot_do_is_a_rollout(said):
    cluster = serving(**said)
    plan = cluster.step(changed(2))
    assert plan.switch == () and len([o for o in plan.apply if o["kind"] == "StatefulSet"]) >= 1
    cluster.settle(changed(2))
    assert cluster.told == []
    (name,) = cluster.replicas
    assert name != "smol-r0" and layout_of(cluster, name) == "2"


def after_failure(spec: Any) -> tuple[FakeCluster, list[str]]:
    """A cluster whose pod tried the size of `spec` and went back; notes of the passes that follow."""
    cluster, notes = serving(), []
    cluster.step(spec)
    cluster.change("smol-r0-0", switching=False, switch_failed=(2, "worker 1 has too little memory"))
    for _ in range(10):
        notes += cluster.step(spec).notes
        cluster.let_start()
        cluster.tick(3)
        for name in [n for n, p in cluster.pods.items() if p.draining]:
            cluster.change(name, in_flight=0)
    return cluster, notes


def test_a_switch_that_failed_is_a_rollout_that_says_why():
    cluster, notes = after_failure(changed(2))
    said = "it cannot change to tensor size 2 while it serves: worker 1 has too little memory"
    assert [n for n in notes if n.startswith("draining replica smol-r0") and n.endswith(said)], notes
    (name,) = cluster.replicas
    assert name != "smol-r0" and layout_of(cluster, name) == "2" and cluster.told == [("smol-r0-0", 2)]


def test_what_the_planner_wanted_in_vain_is_left_to_the_planner():
    spec = "replicas: 1, resources: {gpusPerPod: 4}, parallelism: {tensor: {mode: Auto, size: 2}}"
    cluster, notes = after_failure(service(spec, generation=2))
    assert notes == [] and cluster.replicas == ["smol-r0"] and cluster.told == [("smol-r0-0", 2)]


def test_back_to_what_it_has():
    cluster = serving()
    cluster.step(changed(2))
    cluster.change("smol-r0-0", switching=False)  # it had not begun
    assert cluster.step(service(f"replicas: 1, {FOUR % 4}", generation=3)).empty


def test_what_somebody_else_told_a_pod_is_taken_back():
    cluster = serving()
    cluster.change("smol-r0-0", tensor=1)
    assert cluster.step(service(f"replicas: 1, {FOUR % 4}")).switch == (("smol-r0-0", 4),)


def test_a_paused_rollout_changes_no_layout():
    cluster = serving()
    plan = cluster.step(changed(2, more=", rollout: {paused: true}"))
    assert plan.switch == () and layout_of(cluster, "smol-r0") == "4"


def test_a_revision_that_changes_too_is_a_rollout():
    cluster = serving()
    both = service(f"replicas: 1, {FOUR % 2}, engine: {{maxModelLen: 512}}", generation=2)
    assert cluster.step(both).switch == ()
    cluster.settle(both)
    assert cluster.told == [] and cluster.replicas != ["smol-r0"]


def test_what_a_pod_says():
    answer = {
        "current": 2,
        "target": 4,
        "generation": 7,
        "phase": "MovingKV",
        "feasible": [{"size": 2, "kvTokens": 10}],
        "last": [
            {"to": 4, "outcome": "RolledBack", "reason": "worker 3 died", "secondsAgo": 12.5},
            {"to": 1, "outcome": "RolledBack", "reason": "long ago"},
        ],
    }
    said = read_layout(answer)
    assert said is not None
    assert (said.tensor, said.switching, said.feasible) == (2, True, ((2, 10),))
    assert (said.failed, said.failed_ago) == ((4, "worker 3 died"), 12.5)
    assert (said.generation_for(4), said.generation_for(2)) == (7, 8)
    loading = read_layout({**answer, "phase": "Loading", "last": []})
    assert loading is not None and (loading.tensor, loading.switching, loading.failed) == (None, False, None)
    endless = {"size": 2, "kvTokens": float("inf")}  # JSON as Python reads it has Infinity
    for broken in (
        None,
        [],
        {},
        {**answer, "feasible": [{}]},
        {**answer, "feasible": [endless]},
        {**answer, "last": [1]},
    ):
        assert read_layout(broken) is None


POD = Pod("a-r0-0", "u", "a-r0", meta.ENGINE, created=FakeCluster().now, running=True, ready=True, feasible=SIZES)
layouts = st.builds(Layout, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]))


def test_what_failed_before_a_size_was_wanted_is_tried_once_more():
    """The planner comes back to a size when its ban is over: what the pod said six hours ago is no news."""
    now = FakeCluster().now
    pod = replace(POD, tensor=1, switch_failed=(2, "worker 3 died"), switch_failed_ago=21600.0)
    plan = LayoutPlan(size=2, phase="Changing", before=1, since=now - timedelta(seconds=5))
    tried = trying_for(plan, now)
    wanted = Layout(2, 1, 1)
    assert to_switch(wanted, ["a-r0"], [pod], tried) == ((pod.name, 2),)
    assert failure(pod, 2, tried) == ""
    again = replace(pod, switch_failed_ago=2.0)
    assert to_switch(wanted, ["a-r0"], [again], tried) == ()
    assert failure(again, 2, tried) == "worker 3 died"
    for other in (None, LayoutPlan(size=2), LayoutPlan(size=2, phase="Verifying", since=now)):
        assert to_switch(wanted, ["a-r0"], [pod], trying_for(other, now)) == (), "nobody else tries in vain twice"


@given(layouts, layouts, st.sampled_from([None, 1, 2, 4]), st.booleans(), st.sampled_from([(), ((2, "x"),)]))
def test_only_what_a_pod_offers_is_asked_of_it(made, wanted, tensor, ready, refused):
    pod = replace(POD, tensor=tensor, ready=ready, refused=refused)
    workload = {"kind": "StatefulSet", "metadata": {"name": "a-r0", "annotations": {meta.LAYOUT: str(made)}}}
    counts = has_layout(workload, wanted, [pod])
    if counts and made != wanted:
        assert made.ranks == wanted.ranks and made.pipeline == wanted.pipeline == 1
        assert tensor == wanted.tensor or wanted.tensor not in dict(refused)
    for name, size in to_switch(wanted, ["a-r0"] if counts else [], [pod]):
        assert (name, size) == (pod.name, wanted.tensor) and ready
        assert tensor not in (None, size) and size not in dict(refused)
    assert to_switch(wanted, ["a-r0"], [replace(pod, switching=True)]) == ()
    assert counts == (made == wanted) or tensor is not None
