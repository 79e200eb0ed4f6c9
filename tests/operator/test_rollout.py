"""Rollouts: the strategies' bounds, then whole histories in a cluster where everything takes its time, with an operator
that is killed between two writes, or that is two for a moment."""

import json
import os
from dataclasses import replace
from datetime import timedelta

import pytest
from fake_cluster import service
from hypothesis import example, given, settings
from hypothesis import strategies as st
from slow_cluster import BAD, SlowCluster

from kvern_operator.api.types import Rollout
from kvern_operator.desired import meta
from kvern_operator.reconcile import reconcile
from kvern_operator.rollout import Bounds, Moves, Replica, bounds_of, plan_moves


def spec(n: int, length: object = 256, strategy: str = "Auto", surge: int = 1, away: int = 0, more: str = "") -> str:
    rollout = f"strategy: {strategy}, maxSurge: {surge}, maxUnavailable: {away}, drainTimeoutSeconds: 20{more}"
    return f"replicas: {n}, engine: {{maxModelLen: {length}}}, rollout: {{{rollout}}}"


def running(n: int, gpus: int, sees_nodes: bool = True, strategy: str = "Auto") -> SlowCluster:
    cluster = SlowCluster(gpus=gpus, sees_nodes=sees_nodes)
    cluster.settle(service(spec(n, strategy=strategy)))
    assert len(cluster.available()) == n
    return cluster


def conditions(cluster: SlowCluster) -> dict[str, tuple[str, str, str]]:
    return {c.type: (c.status, c.reason, c.message) for c in cluster.status.conditions}


# ---------------------------------------------------------------- bounds


@pytest.mark.parametrize(
    ("strategy", "spare", "holding", "wanted"),
    [
        ("Surge", 0, 3, Bounds(1, 0)),
        ("DrainSwap", 5, 3, Bounds(0, 1)),
        ("Recreate", 5, 3, Bounds(0, 3, recreate=True)),
        ("Auto", None, 3, Bounds(1, 0)),  # not known: try, and see whether the pod finds a node
        ("Auto", 1, 3, Bounds(1, 0)),
        ("Auto", 0, 3, Bounds(0, 1)),
        ("Auto", 0, 4, Bounds(1, 0)),  # its surge is there already: the place that it holds can be used again
    ],
)
def test_a_strategy_stands_for_bounds(strategy, spare, holding, wanted):
    assert bounds_of(Rollout(strategy=strategy), 3, holding, spare) == wanted


def test_auto_surges_by_no_more_than_there_is_room():
    assert bounds_of(Rollout(max_surge=4), 4, 4, 2) == Bounds(2, 0)
    assert bounds_of(Rollout(max_surge="100%"), 4, 4, 9) == Bounds(4, 0)
    assert bounds_of(Rollout(max_surge=0, max_unavailable=2), 4, 4, 9) == Bounds(0, 2)


def test_auto_surges_into_what_the_wanted_number_leaves():
    """Scaled up and changed at once: two places are free, and both are for replicas that are wanted anyway."""
    assert bounds_of(Rollout(), 3, 1, 2) == Bounds(0, 1)
    assert bounds_of(Rollout(), 3, 1, 3) == Bounds(1, 0)
    old = Replica("a", 0, current=False)
    assert plan_moves([old], 3, Rollout(), spare=2).add == 2
    assert plan_moves([old], 3, Rollout(), spare=3).add == 3


def test_of_several_that_end_as_many_are_replaced_at_once_as_fit():
    staying = Replica("a", 0, current=True, ready=True, served=True, running=True)
    assert plan_moves([staying], 3, Rollout(), spare=1, ending=2).add == 1
    assert plan_moves([staying], 3, Rollout(), spare=2, ending=2).add == 2
    assert plan_moves([staying], 3, Rollout(strategy="Surge"), spare=1, ending=2).add == 2
    # What nothing of the service stands in the way of is asked for whether it fits or not: nodes may be added for it.
    assert plan_moves([staying], 5, Rollout(), spare=1).add == 4


def test_what_ends_of_an_old_revision_counts_against_the_surge_until_it_has_ended():
    """Its StatefulSet is gone, its pods have their GPUs: two more would be one too many."""
    new = Replica("a", 0, current=True, ready=True, served=True, running=True)
    surge = Rollout(strategy="Surge")
    assert plan_moves([new], 3, surge, ending=3, outdated=True).add == 0
    assert plan_moves([new], 3, surge, ending=2, outdated=True).add == 1
    assert plan_moves([new], 3, surge, ending=2).add == 2  # of the present revision: evicted, and replaced at once
    # The same through a whole cluster: it never holds more than desired + maxSurge, seen or not seen.
    cluster, changed = SlowCluster(gpus=9, sees_nodes=False), service(spec(3, 512, "Surge", away=2), generation=2)
    cluster.settle(service(spec(3, strategy="Surge", away=2)))
    most = 0
    for turn in range(60):
        cluster.work(changed)
        cluster.controllers()
        most = max(most, cluster.held())
        for name in list(cluster.pods):
            cluster.load(name)
            if turn % 4 == 3:
                cluster.gone(name)
        cluster.tick(1.5)
    assert most == 4 and conditions(cluster)["Ready"][0] == "True"


def test_a_replica_whose_pod_ends_is_replaced_while_it_ends():
    going = Replica("a", 0, current=True, served=True, running=True, going=True, in_flight=3)
    moves = plan_moves([going], 1, Rollout(strategy="Surge"))
    assert (moves.delete, moves.replaced, moves.add) == (("a",), {"a"}, 1)
    # Where nothing more fits, once it has ended.
    assert plan_moves([going], 1, Rollout(), spare=0).add == 0
    assert plan_moves([], 1, Rollout(), spare=0, ending=1).add == 0
    assert plan_moves([], 1, Rollout(), spare=1, ending=0).add == 1


def test_a_replica_of_an_old_revision_comes_back_as_it_was_while_the_new_one_is_bad():
    """Only its StatefulSet knows the template that served: it is left to make the pod again."""
    old = Replica("a", 0, current=False, served=True, running=True, going=True)
    bad = Replica("b", 1, current=True)
    moves = plan_moves([old, bad], 1, Rollout(strategy="Surge"))
    assert moves.delete == () and moves.drain == ()


def test_a_replica_is_told_to_drain_once_the_routers_have_left_it():
    """Told before, it would refuse what they still send, and they would know no other place for it."""

    def moves(seconds: float, routed: bool) -> Moves:
        since = timedelta(seconds=seconds)
        old = Replica("a", 0, current=False, ready=True, served=True, running=True, leaving_for=since, in_flight=0)
        return plan_moves([replace(old, routed=routed)], 1, Rollout(drain_timeout_seconds=600))

    assert (moves(0.5, routed=False).tell, moves(1, routed=False).tell) == ((), ("a",))
    assert moves(2, routed=False).delete == ("a",)
    late = moves(30, routed=True)
    assert (late.tell, late.delete, late.wait) == ((), (), timedelta(seconds=60))
    # But not for ever: a router that does not get its list has a kubelet that hangs.
    given_up = moves(90, routed=True)
    assert given_up.delete == ("a",) and moves(89, routed=True).delete == ()


def test_a_kubelet_that_brings_the_list_late_does_not_leave_the_routers_without_a_replica():
    cluster, changed = running(2, gpus=4), service(spec(2, 512, surge=2), generation=2)
    routers = [name for name, pod in cluster.pods.items() if pod.component == meta.ROUTER]
    assert routers
    for name in routers:
        cluster.change(name, sends_to=frozenset({"smol-r0-0", "smol-r1-0"}))
    for _ in range(6):  # the new ones are ready, the old ones marked
        cluster.work(changed)
        cluster.controllers()
        for name in list(cluster.pods):
            cluster.load(name)
        cluster.tick(2)
    assert {"smol-r0", "smol-r1"} <= set(cluster.replicas) and cluster.leaving("smol-r0") and cluster.leaving("smol-r1")
    assert not any(cluster.pods[f"smol-r{i}-0"].draining for i in (0, 1)) and cluster.plan(changed).drain == ()
    for name in routers:
        cluster.change(name, sends_to=frozenset({"smol-r2-0", "smol-r3-0"}))
    cluster.settle(changed)
    assert cluster.replicas == ["smol-r2", "smol-r3"]


# ---------------------------------------------------------------- one place a GPU


@pytest.mark.parametrize("strategy", ["Auto", "DrainSwap", "Recreate"])
def test_where_nothing_is_spare_the_new_pod_is_made_when_the_old_ones_object_is_gone(strategy):
    cluster = running(1, gpus=1, strategy=strategy)
    changed = service(spec(1, 512, strategy), generation=2)
    cluster.work(changed)
    assert cluster.replicas == ["smol-r0"] and cluster.leaving("smol-r0")
    said = "no room for another one: an old one goes first" in conditions(cluster)["Progressing"][2]
    assert said == (strategy == "Auto")
    cluster.tick(2)
    cluster.work(changed)  # in flight: 0
    cluster.controllers()
    assert cluster.replicas == [] and cluster.pods["smol-r0-0"].terminating
    for _ in range(5):  # it ends, and holds its GPU meanwhile
        cluster.tick(10)
        cluster.work(changed)
        assert cluster.replicas == []
    assert conditions(cluster)["Progressing"][2] == "1 replicas to start once smol-r0-0 has ended"
    cluster.gone("smol-r0-0")
    cluster.work(changed)
    assert len(cluster.replicas) == 1


def test_a_node_that_is_lost_is_not_waited_for_for_ever():
    cluster = running(1, gpus=1)
    cluster.end("smol-r0-0")
    svc = service(spec(1))
    cluster.work(svc)
    assert cluster.replicas == []
    plan = cluster.work(svc)
    assert plan.requeue_after == 330 + 60
    cluster.tick(391)
    cluster.work(svc)
    assert cluster.replicas == ["smol-r1"]  # not its name: that one is still there


def test_auto_surges_into_the_one_free_gpu_and_never_falls_below_the_wanted_number():
    cluster = running(2, gpus=3)
    changed, least, most = service(spec(2, 512), generation=2), 2, 2
    for _ in range(60):
        cluster.work(changed)
        least, most = min(least, len(cluster.available())), max(most, cluster.held())
        cluster.controllers()
        for name in list(cluster.pods):
            cluster.load(name)
            cluster.gone(name)
        cluster.tick(1.5)
    assert (least, most) == (2, 3) and conditions(cluster)["Ready"][0] == "True"


def test_without_a_view_of_the_nodes_auto_tries_and_then_swaps():
    cluster = running(2, gpus=2, sees_nodes=False)
    changed = service(spec(2, 512), generation=2)
    cluster.work(changed)
    cluster.controllers()
    assert cluster.pods["smol-r2-0"].reason == "Unschedulable"
    cluster.work(changed)
    assert len(cluster.available()) == 1  # one has to make room
    cluster.settle(changed)
    assert len(cluster.available()) == 2 == len(cluster.replicas)


# ---------------------------------------------------------------- paused, bad, rolled back, changed again


def test_a_rollout_paused_half_way_goes_on_as_it_was():
    cluster = running(3, gpus=4)
    changed = spec(3, 512)
    for _ in range(3):
        cluster.work(service(changed, generation=2))
        cluster.controllers()
    cluster.load("smol-r3-0")
    cluster.work(service(changed, generation=2))
    assert len(cluster.available()) == 3 and len(cluster.replicas) == 4
    held = service(spec(3, 512, more=", paused: true"), generation=3)
    cluster.settle(held)
    assert len(cluster.available()) == 4  # the one that drained is taken back: nothing of the old ones goes
    assert conditions(cluster)["Progressing"][:2] == ("False", "RolloutPaused")
    before = set(cluster.replicas)
    cluster.tick(1000)
    assert cluster.work(held).empty and set(cluster.replicas) == before
    cluster.settle(service(changed, generation=4))
    assert len(cluster.available()) == 3 == len(cluster.replicas)
    assert cluster.status.revision.current == cluster.status.revision.updated


def test_a_paused_service_scales_with_what_it_runs():
    """Paused before the change was applied: nothing of it starts, more replicas and lost ones neither."""
    cluster = running(1, gpus=4)
    cluster.settle(service(spec(3, BAD, more=", paused: true"), generation=2))
    assert len(cluster.available()) == 3 and cluster.replicas == ["smol-r0", "smol-r1", "smol-r2"]
    first, third = (cluster.objects["StatefulSet", n] for n in ("smol-r0", "smol-r2"))
    assert third["metadata"]["labels"]["kvern.dev/revision"] == first["metadata"]["labels"]["kvern.dev/revision"]
    assert "smol-r0" not in str(third) and cluster.objects["ConfigMap", "smol-r2-layout"]["data"]
    assert json.loads(json.dumps(third["spec"]).replace("smol-r2", "smol-r0")) == first["spec"]
    assert conditions(cluster)["Progressing"][:2] == ("False", "RolloutPaused")
    cluster.settle(service(spec(2, 512), generation=3))
    assert len(cluster.available()) == 2 and cluster.status.revision.current == cluster.status.revision.updated


@pytest.mark.parametrize("away", [0, 1])
def test_a_bad_revision_stops_and_applying_the_old_spec_restarts_no_pod_that_still_runs_it(away):
    cluster = running(3, gpus=5)
    good, uids = service(spec(3, away=away), generation=3), {n: p.uid for n, p in cluster.pods.items()}
    bad = service(spec(3, BAD, away=away), generation=2)
    for _ in range(40):
        cluster.work(bad)
        cluster.controllers()
        for name in list(cluster.pods):
            cluster.load(name)
            cluster.gone(name)
        cluster.tick(5)
    assert len(cluster.available()) == 3 - away
    found = conditions(cluster)
    assert found["Available"][:2] == ("True", "Answering")
    assert found["Ready"][:2] == ("False", "CrashLoopBackOff")
    assert found["Degraded"][:2] == ("True", "CrashLoopBackOff") and found["Progressing"][2].startswith("stalled: ")
    kept = cluster.available()
    cluster.settle(good)
    assert kept <= cluster.available() and len(cluster.replicas) == 3
    assert all(cluster.pods[f"{n}-0"].uid == uids[f"{n}-0"] for n in kept)


def test_a_change_while_another_is_under_way_leaves_the_unfinished_revision_out():
    cluster = running(2, gpus=3)
    cluster.work(service(spec(2, 512), generation=2))
    cluster.controllers()
    assert cluster.replicas == ["smol-r0", "smol-r1", "smol-r2"]  # r2 loads
    third = service(spec(2, 1024), generation=3)
    cluster.work(third)
    assert cluster.leaving("smol-r2") and len(cluster.available()) == 2
    cluster.settle(third)
    sets = [o for (kind, _), o in cluster.objects.items() if kind == "StatefulSet"]
    assert len(sets) == 2 and all("1024" in o["spec"]["template"]["spec"]["containers"][0]["args"] for o in sets)


def test_an_evicted_replica_is_replaced_at_once_where_there_is_room():
    cluster, svc = running(2, gpus=3), service(spec(2))
    cluster.change("smol-r0-0", in_flight=7)
    cluster.end("smol-r0-0")
    plan = cluster.work(svc)
    text = "replacing replica smol-r0: its pod has been evicted or deleted, or its node is lost"
    assert text in plan.notes and cluster.replicas == ["smol-r1", "smol-r2"]
    cluster.controllers()
    assert cluster.pods["smol-r0-0"].in_flight == 7  # it finishes what it has
    cluster.settle(svc)
    assert len(cluster.available()) == 2


def test_a_drain_says_until_when():
    cluster = running(2, gpus=2)
    for name in ("smol-r0-0", "smol-r1-0"):
        cluster.change(name, in_flight=3)
    cluster.work(service(spec(1), generation=2))
    cluster.work(service(spec(1), generation=2))
    until = f"{cluster.now + timedelta(seconds=20):%H:%M:%S}"
    assert conditions(cluster)["Progressing"][2] == f"1 draining (smol-r1 until {until}Z at the latest)"


@pytest.mark.parametrize("jump", [-3600, 3600])
def test_a_mark_of_another_clock_neither_holds_a_drain_for_ever_nor_cuts_it(jump):
    """The observer's own clock counts (Observed.leaving_for); without one, a mark of the future begins now."""
    cluster, fewer = running(2, gpus=2), service(spec(1), generation=2)
    cluster.change("smol-r0-0", in_flight=9)
    cluster.change("smol-r1-0", in_flight=3)
    cluster.work(fewer)
    cluster.tick(jump)
    observed = replace(cluster.observed(), leaving_for={"smol-r1": timedelta(seconds=5)})
    plan = reconcile(fewer, observed, cluster.now, cluster.settings)
    assert plan.delete == () and plan.requeue_after == 15
    if jump < 0:
        assert cluster.plan(fewer).delete == () and cluster.plan(fewer).requeue_after <= 20


# ---------------------------------------------------------------- restored from a backup


def test_without_a_status_nothing_goes_before_one_is_written_from_what_there_is():
    cluster, fewer = running(3, gpus=4), service(spec(1, 512), generation=2)
    cluster.status = None
    plan = cluster.work(fewer)
    assert plan.notes == () and plan.drain == () and "StatefulSet" not in dict(plan.delete)
    assert len(cluster.available()) == 3
    assert cluster.status.replicas == 3 and cluster.status.autoscaling.last_decision.from_ == 3
    cluster.settle(fewer)
    assert len(cluster.replicas) == 1


# ---------------------------------------------------------------- histories

FULL = os.environ.get("KVERN_TEST_FULL") == "1"
STRATEGIES = ["Auto", "Surge", "DrainSwap", "Recreate"]
GPUS = 4
specs = st.builds(
    spec,
    st.integers(0, GPUS - 1),
    st.sampled_from([256, 512, BAD]),
    st.sampled_from(STRATEGIES),
    st.integers(1, 2),
    st.integers(0, 1),
    st.sampled_from(["", "", "", ", paused: true"]),
)
which = st.integers(0, 7)
events = st.lists(
    st.one_of(
        st.tuples(st.just("spec"), specs),
        st.tuples(st.just("work"), st.none()),
        st.tuples(st.just("work"), st.none()),
        st.tuples(st.just("killed"), st.integers(0, 8)),
        st.tuples(st.just("controllers"), st.none()),
        st.tuples(st.just("controllers"), st.none()),
        st.tuples(st.just("load"), which),
        st.tuples(st.just("busy"), which),
        st.tuples(st.just("crash"), which),
        st.tuples(st.just("end"), which),
        st.tuples(st.just("gone"), which),
        st.tuples(st.just("tick"), st.integers(0, 25)),
        st.tuples(st.just("lost status"), st.none()),
    ),
    max_size=40,
)


STARTED = [("work", None), ("controllers", None), ("load", 0), ("load", 1), ("load", 2)]


class Story:
    """A cluster, the spec that holds now, and what must be true of each pass."""

    def __init__(self, first: str, gpus: int, sees_nodes: bool) -> None:
        self.cluster = SlowCluster(gpus=gpus, sees_nodes=sees_nodes)
        self.generation, self.text = 1, first
        self.svc = service(first)

    def happens(self, event: str, value: object) -> None:
        cluster, names = self.cluster, sorted(self.cluster.pods)
        name = names[value % len(names)] if names and isinstance(value, int) else ""
        if event == "spec":
            self.generation += 1
            self.svc = service(value, generation=self.generation)
        elif event == "work":
            self.work(None)
        elif event == "killed":
            self.work(value)
        elif event == "controllers":
            cluster.controllers()
        elif event == "tick":
            cluster.tick(value)
        elif event == "lost status":
            cluster.status = None
        elif name and cluster.pods[name].component == meta.ENGINE:
            if event == "busy" and cluster.pods[name].served:
                cluster.change(name, in_flight=value)
            elif event != "busy":
                getattr(cluster, event)(name)

    def work(self, writes: int | None) -> None:
        cluster, desired, rollout = self.cluster, self.svc.spec.replicas, self.svc.spec.rollout
        before, held = cluster.available(), cluster.held()
        old = {n for n in cluster.replicas if not self.is_current(n)}
        existing = set(cluster.replicas)
        plan = cluster.work(self.svc, writes)
        added = set(cluster.replicas) - existing
        # Available: the pass takes away no more than the strategy may.
        away = {"Surge": rollout.max_unavailable, "Recreate": desired}.get(
            rollout.strategy, max(rollout.max_unavailable, 1)
        )
        if rollout.strategy == "Auto" and cluster.sees_nodes and cluster.gpus > max(desired, held):
            away = rollout.max_unavailable
        if not rollout.paused:
            floor = min(len(before), desired - away)
            assert len(cluster.available()) >= floor, (before, cluster.available(), plan.notes)
        # Held: while a revision replaces another, no more than desired + maxSurge.
        surge = 0 if rollout.strategy in ("DrainSwap", "Recreate") else rollout.max_surge
        if added and (surge == 0 or (old and not rollout.paused)):
            assert cluster.held() <= desired + surge, (added, cluster.held(), plan.notes)
        # Placed: nothing is started where no place is free.
        careful = rollout.strategy in ("DrainSwap", "Recreate") or (rollout.strategy == "Auto" and cluster.sees_nodes)
        if added and careful and held <= cluster.gpus:
            assert cluster.held() <= cluster.gpus, (added, plan.notes)
        # A replica that answers goes only after it was told to.
        gone = {n for n in existing - set(cluster.replicas) if n in before}
        assert not gone, f"deleted without a drain: {gone}"

    def is_current(self, name: str) -> bool:
        arguments = self.cluster.objects["StatefulSet", name]["spec"]["template"]["spec"]["containers"][0]["args"]
        return str(self.svc.spec.engine.max_model_len) in arguments

    def ends_well(self) -> None:
        """Once the spec is a good one and nothing else happens, it is fulfilled."""
        n, strategy = self.svc.spec.replicas, self.svc.spec.rollout.strategy
        if strategy == "Surge" and self.cluster.gpus <= n:
            strategy = "Auto"  # to insist on a surge where there is no place for it is to wait for one
        self.happens("spec", spec(n, 512, strategy))
        self.cluster.settle(self.svc)
        assert len(self.cluster.available()) == self.svc.spec.replicas == len(self.cluster.replicas)
        assert all(self.is_current(n) for n in self.cluster.replicas)
        ready = conditions(self.cluster)["Ready"]
        assert ready[0] == "True" or ready[1] == "ScaledToZero"


@settings(max_examples=2000 if FULL else 60, deadline=None)
@given(specs, st.integers(GPUS - 1, GPUS + 2), st.booleans(), events)
@example(spec(1, 512), 3, True, [("work", None), ("spec", spec(3)), ("work", None)])  # scaled up and changed at once
@example(spec(3), 4, True, [*STARTED, ("end", 0), ("end", 1), ("work", None)])  # two evicted, one place
@example(spec(3), 3, True, [*STARTED, ("end", 0), ("end", 1), ("lost status", None), ("work", None)])
@example(spec(2, 512), 3, False, [*STARTED[:2], ("spec", spec(1, away=1)), ("work", None), ("work", None)])
def test_any_history_keeps_the_promises_and_ends_well(first, gpus, sees_nodes, history):
    story = Story(first, gpus, sees_nodes)
    for event, value in history:
        story.happens(event, value)
    story.ends_well()


@settings(max_examples=500 if FULL else 25, deadline=None)
@given(specs, st.integers(0, 10), events)
def test_a_second_leader_with_an_old_view_does_no_lasting_harm(first, at, history):
    story, seen = Story(first, GPUS, True), None
    for i, (event, value) in enumerate(history):
        if i == at:
            seen = (story.cluster.observed(), dict(story.cluster.versions), story.svc, story.cluster.now)
        story.happens(event, value)
        if seen is not None and i == at + 6:
            observed, versions, svc, now = seen
            story.cluster.carry_out_stale(reconcile(svc, observed, now, story.cluster.settings), versions)
    story.ends_well()
