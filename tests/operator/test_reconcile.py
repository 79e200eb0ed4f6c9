"""reconcile: examples with exact plans, then properties over random histories."""

import json
from dataclasses import replace
from datetime import timedelta

import pytest
from fake_cluster import START, FakeCluster, service
from hypothesis import given, settings
from hypothesis import strategies as st

from kvern_operator.desired import meta
from kvern_operator.reconcile import reconcile
from kvern_operator.settings import Settings


def conditions(plan) -> dict[str, tuple[str, str]]:
    return {c.type: (c.status, c.reason) for c in plan.status.conditions}


def replicas_file(cluster: FakeCluster) -> dict:
    return json.loads(cluster.objects["ConfigMap", "smol-router"]["data"]["replicas.json"])


def test_first_pass_makes_everything_in_creation_order():
    plan = FakeCluster().plan(service())
    assert [meta.key(o) for o in plan.apply] == [
        ("Secret", "smol-admin-55d89d"),
        ("ServiceAccount", "smol-pods"),
        ("ConfigMap", "smol-r0-layout"),
        ("ConfigMap", "smol-router"),
        ("Service", "smol"),
        ("Service", "smol-engines"),
        ("NetworkPolicy", "smol-engines"),
        ("NetworkPolicy", "smol-router"),
        ("PodDisruptionBudget", "smol-router"),
        ("StatefulSet", "smol-r0"),
        ("Deployment", "smol-router"),
    ]
    assert plan.delete == () and plan.drain == () and plan.requeue_after is None
    assert len(plan.notes) == 1 and plan.notes[0].startswith("starting replica smol-r0, revision ")
    assert conditions(plan)["Ready"] == ("False", "Loading")
    assert conditions(plan)["Progressing"] == ("True", "Starting")
    assert plan.status.url == "http://smol.team-a.svc.cluster.local/v1"
    assert plan.status.selector == "kvern.dev/service=smol,app.kubernetes.io/component=engine"


def test_every_child_is_owned_and_labelled():
    for obj in FakeCluster().plan(service("replicas: 2")).apply:
        (owner,) = obj["metadata"]["ownerReferences"]
        assert owner["uid"] == "u-1" and owner["controller"] is True
        assert obj["metadata"]["labels"]["kvern.dev/service"] == "smol"
        assert obj["metadata"]["namespace"] == "team-a"


def test_ready_when_replica_and_router_answer():
    cluster, svc = FakeCluster(), service()
    cluster.step(svc)
    cluster.let_start("smol-r0-0")
    plan = cluster.step(svc)
    assert conditions(plan)["Ready"] == ("False", "RouterNotReady")
    cluster.let_start()
    plan = cluster.step(svc)
    assert conditions(plan) == {
        "Ready": ("True", "AllReplicasReady"),
        "Available": ("True", "Answering"),
        "Progressing": ("False", "Complete"),
        "ModelCached": ("True", "Loaded"),
        "MetricsAvailable": ("True", "MetricsRead"),
        "ScalingActive": ("False", "Off"),
        "ScalingLimited": ("False", "WithinBounds"),
        "ParallelismStable": ("True", "AsWanted"),
        "Degraded": ("False", "AsExpected"),
    }
    assert (plan.status.ready_replicas, plan.status.desired_replicas, plan.status.capacity.gpus) == (1, 1, 1)
    assert replicas_file(cluster)["replicas"] == [
        {"name": "smol-r0-0", "uid": "p-1", "url": "http://10.0.0.1:8000", "weight": 1, "state": "ready"}
    ]


def test_the_router_never_hears_of_loading_or_terminating_pods():
    cluster, svc = FakeCluster(), service("replicas: 2")
    cluster.step(svc)
    cluster.let_start("smol-r0-0")
    cluster.change("smol-r1-0", running=True, address="10.0.0.2:8000")  # loads
    cluster.step(svc)
    assert [r["name"] for r in replicas_file(cluster)["replicas"]] == ["smol-r0-0"]
    cluster.change("smol-r0-0", terminating=True)
    cluster.step(svc)
    assert replicas_file(cluster)["replicas"] == []


def test_scale_up_starts_all_missing_replicas_at_once():
    cluster = FakeCluster()
    cluster.settle(service())
    cluster.step(service("replicas: 4", generation=2))
    assert cluster.replicas == ["smol-r0", "smol-r1", "smol-r2", "smol-r3"]
    assert cluster.status.autoscaling.last_decision.from_ == 1
    assert cluster.status.autoscaling.last_decision.to == 4
    assert cluster.status.autoscaling.last_decision.reason == "spec.replicas is 4"


def test_scale_down_drains_the_replica_with_the_least_in_flight_then_deletes_it():
    cluster = FakeCluster()
    cluster.settle(service("replicas: 3"))
    for name, load in (("smol-r0-0", 5), ("smol-r1-0", 1), ("smol-r2-0", 7)):
        cluster.change(name, in_flight=load)
    smaller = service("replicas: 2", generation=2)
    plan = cluster.step(smaller)
    assert plan.notes == ("draining replica smol-r1 (1 in flight): 2 replicas are wanted",)
    assert plan.delete == ()
    assert {r["name"]: r["state"] for r in replicas_file(cluster)["replicas"]}["smol-r1-0"] == "draining"
    assert plan.drain == () and plan.requeue_after == 1  # routers first: nobody is to send to what refuses
    cluster.tick(0.9)
    assert cluster.step(smaller).drain == ()
    cluster.tick(0.1)
    plan = cluster.step(smaller)
    assert plan.drain == ("smol-r1-0",) and plan.requeue_after == 1
    assert "smol-r1" in cluster.replicas
    cluster.change("smol-r1-0", in_flight=0)
    assert cluster.step(smaller).delete == ()  # a request may still be on its way from the router
    cluster.tick(1)
    plan = cluster.step(smaller)
    assert plan.delete == (("StatefulSet", "smol-r1"), ("ConfigMap", "smol-r1-layout"))
    assert plan.notes == ("stopping replica smol-r1: nothing is in flight",)
    assert cluster.replicas == ["smol-r0", "smol-r2"]


def test_a_drain_ends_at_its_deadline():
    cluster, smaller = FakeCluster(), service("rollout: {drainTimeoutSeconds: 60}", generation=2)
    cluster.settle(service("replicas: 2, rollout: {drainTimeoutSeconds: 60}"))
    cluster.change("smol-r0-0", in_flight=9)
    cluster.change("smol-r1-0", in_flight=3)
    cluster.step(smaller)
    cluster.tick(30)
    plan = cluster.step(smaller)
    assert plan.delete == () and plan.requeue_after == 30
    cluster.tick(30)
    plan = cluster.step(smaller)
    assert ("StatefulSet", "smol-r1") in plan.delete
    assert plan.notes == ("cutting off replica smol-r1 with 3 in flight: drainTimeoutSeconds (60) is over",)


def test_a_drain_is_taken_back_when_more_replicas_are_wanted_again():
    cluster = FakeCluster()
    cluster.settle(service("replicas: 2"))
    cluster.change("smol-r0-0", in_flight=9)
    cluster.change("smol-r1-0", in_flight=3)
    cluster.step(service("", generation=2))
    cluster.tick(1)
    cluster.step(service("", generation=2))
    assert cluster.pods["smol-r1-0"].draining
    plan = cluster.step(service("replicas: 2", generation=3))
    assert plan.notes == ("taking replica smol-r1 back: 2 replicas are wanted",)
    cluster.step(service("replicas: 2", generation=3))
    assert cluster.replicas == ["smol-r0", "smol-r1"] and not cluster.pods["smol-r1-0"].draining


def test_a_changed_template_replaces_replicas_one_by_one_and_never_below_the_wanted_number():
    cluster = FakeCluster()
    cluster.settle(service("replicas: 3"))
    changed = service("replicas: 3, engine: {maxModelLen: 512}", generation=2)
    least, most = 3, 3
    for _ in range(40):
        cluster.step(changed)
        least, most = min(least, cluster.ready_engines()), max(most, len(cluster.replicas))
        cluster.let_start()
        cluster.tick(3)
    assert (least, most) == (3, 4)
    revisions = {
        o["metadata"]["labels"][meta.REVISION_LABEL] for (k, _), o in cluster.objects.items() if k == "StatefulSet"
    }
    assert revisions == {cluster.status.revision.updated} == {cluster.status.revision.current}
    assert len(cluster.replicas) == 3


def test_a_bad_revision_stops_with_the_old_one_serving_and_says_why():
    cluster = FakeCluster()
    cluster.settle(service("replicas: 2"))
    changed = service("replicas: 2, engine: {maxModelLen: 512}", generation=2)
    cluster.step(changed)
    cluster.change(
        "smol-r2-0",
        reason="CrashLoopBackOff",
        message="restarted in 20s",
        exit_code=1,
        restarts=3,
        last_log="ValueError: too long",
    )
    for _ in range(10):
        plan = cluster.step(changed)
        cluster.tick(30)
    assert cluster.ready_engines() == 2 and cluster.replicas == ["smol-r0", "smol-r1", "smol-r2"]
    assert conditions(plan)["Available"] == ("True", "Answering")
    assert conditions(plan)["Ready"] == ("False", "CrashLoopBackOff")
    ready = plan.status.condition("Ready").message
    assert ready == 'engine smol-r2-0: restarted in 20s, exit code 1, 3 restarts; last line: "ValueError: too long"'
    assert plan.status.condition("Progressing").message == f"stalled: {ready}"


def test_a_model_is_not_called_loaded_because_the_one_before_it_is():
    cluster, svc = FakeCluster(), service()
    old = svc.spec.model.model_copy(update={"uri": "hf://org/name-Instruct"})
    new = svc.spec.model.model_copy(update={"uri": "hf://org/name"})
    cluster.settle(svc.model_copy(update={"spec": svc.spec.model_copy(update={"model": old})}))
    assert cluster.status.condition("ModelCached").message == "hf://org/name-Instruct has been loaded"
    changed = svc.model_copy(update={"spec": svc.spec.model_copy(update={"model": new})})
    assert conditions(cluster.step(changed))["ModelCached"] == ("Unknown", "NotLoadedYet")
    cluster.settle(changed)
    assert cluster.status.condition("ModelCached").message == "hf://org/name has been loaded"


def test_rolling_back_removes_the_bad_replica_only():
    cluster = FakeCluster()
    cluster.settle(service("replicas: 2"))
    cluster.step(service("replicas: 2, engine: {maxModelLen: 512}", generation=2))
    cluster.change("smol-r2-0", reason="CrashLoopBackOff", exit_code=1)
    cluster.settle(service("replicas: 2", generation=3))
    assert cluster.replicas == ["smol-r0", "smol-r1"]
    assert [n for n in cluster.deleted if n.startswith("smol-r2")] == ["smol-r2", "smol-r2-layout"]


def test_drain_swap_takes_one_out_before_the_new_one_starts():
    cluster = FakeCluster()
    cluster.settle(service("replicas: 2"))
    changed = service("replicas: 2, engine: {maxModelLen: 512}, rollout: {strategy: DrainSwap}", generation=2)
    most = 0
    for _ in range(40):
        cluster.step(changed)
        most = max(most, len(cluster.replicas))
        cluster.let_start()
        cluster.tick(3)
    assert most == 2 and cluster.status.condition("Ready").status == "True"


def test_auto_swaps_where_nothing_more_fits():
    cluster = FakeCluster(spare=0)
    cluster.settle(service("replicas: 2"))
    changed = service("replicas: 2, engine: {maxModelLen: 512}", generation=2)
    plan = cluster.step(changed)
    assert not [o for o in plan.apply if o["kind"] == "StatefulSet" and o["metadata"]["name"] == "smol-r2"]
    assert len([n for n in plan.notes if n.startswith("draining")]) == 1


def test_auto_does_not_take_an_old_replica_while_its_surge_loads_in_the_last_free_place():
    cluster = FakeCluster(spare=1)
    cluster.settle(service())
    changed = service("engine: {maxModelLen: 512}", generation=2)
    cluster.step(changed)
    cluster.spare = 0
    for _ in range(5):
        plan = cluster.step(changed)
        assert plan.drain == () and plan.delete == ()
        cluster.tick(60)


def test_recreate_starts_nothing_before_all_old_ones_are_gone():
    cluster = FakeCluster()
    cluster.settle(service("replicas: 2"))
    changed = service("replicas: 2, engine: {maxModelLen: 512}, rollout: {strategy: Recreate}", generation=2)
    cluster.step(changed)
    assert cluster.replicas == ["smol-r0", "smol-r1"]
    cluster.settle(changed)
    assert cluster.replicas == ["smol-r0", "smol-r1"] and cluster.deleted[0].startswith("smol-r")


def test_a_paused_rollout_leaves_old_replicas_alone_and_says_so():
    cluster = FakeCluster()
    cluster.settle(service("replicas: 2"))
    changed = service("replicas: 2, engine: {maxModelLen: 512}, rollout: {paused: true}", generation=2)
    plan = cluster.step(changed)
    assert plan.apply == () and plan.delete == ()
    assert conditions(plan)["Progressing"] == ("False", "RolloutPaused")


def test_suspend_drains_engines_first_and_the_router_last():
    cluster = FakeCluster()
    cluster.settle(service("replicas: 2"))
    stopped = service("replicas: 2, suspend: true", generation=2)
    cluster.change("smol-r0-0", in_flight=1)
    cluster.step(stopped)
    cluster.step(stopped)
    assert cluster.objects["Deployment", "smol-router"]["spec"]["replicas"] == 2
    cluster.settle(stopped)
    assert cluster.replicas == [] and cluster.pods == {}
    assert cluster.objects["Deployment", "smol-router"]["spec"]["replicas"] == 0
    assert ("Service", "smol") in cluster.objects
    ready = cluster.status.condition("Ready")
    assert (ready.status, ready.reason) == ("False", "Suspended")
    assert ready.message == "spec.suspend is true; set it to false to start"
    cluster.settle(service("replicas: 2", generation=3))
    assert cluster.status.condition("Ready").status == "True"


def test_zero_replicas_keep_the_router_for_held_requests():
    cluster = FakeCluster()
    cluster.settle(service("replicas: 0"))
    assert cluster.status.condition("Ready").reason == "ScaledToZero"
    assert cluster.objects["Deployment", "smol-router"]["spec"]["replicas"] == 2


def test_a_new_layout_replaces_replicas_though_the_template_is_the_same():
    cluster = FakeCluster()
    cluster.settle(service("resources: {gpusPerPod: 4}, parallelism: {tensor: {size: 4}}"))
    before = cluster.objects["StatefulSet", "smol-r0"]
    changed = service("resources: {gpusPerPod: 4}, parallelism: {tensor: {size: 2}}", generation=2)
    cluster.settle(changed)
    (name,) = cluster.replicas
    after = cluster.objects["StatefulSet", name]
    assert before["metadata"]["labels"][meta.REVISION_LABEL] == after["metadata"]["labels"][meta.REVISION_LABEL]
    assert cluster.objects["ConfigMap", f"{name}-layout"]["data"] == {
        "KVERN_TENSOR_PARALLEL_SIZE": "2",
        "KVERN_PIPELINE_PARALLEL_SIZE": "1",
        "KVERN_DATA_PARALLEL_SIZE": "2",
    }
    assert (cluster.status.parallelism.current, cluster.status.parallelism.target) == (2, 2)
    assert cluster.status.parallelism.last_change_time is not None


def test_an_upgrade_of_the_operator_restarts_no_pod():
    cluster = FakeCluster()
    cluster.settle(service("replicas: 2"))
    cluster.settings = Settings(operator_key=b"test", engine_image="new/engine:9", operator_image="new/operator:9")
    plan = cluster.plan(service("replicas: 2"))
    assert plan.apply == () and plan.delete == ()


def test_drift_is_repaired_and_what_others_added_is_left_alone():
    cluster, svc = FakeCluster(), service()
    cluster.settle(svc)
    public = cluster.objects["Service", "smol"]
    cluster.objects["Service", "smol"] = {**public, "status": {"loadBalancer": {}}}
    assert cluster.plan(svc).empty
    cluster.objects["Service", "smol"] = {**public, "spec": {**public["spec"], "ports": []}}
    assert [meta.key(o) for o in cluster.plan(svc).apply] == [("Service", "smol")]


def test_the_name_of_a_replica_that_still_ends_is_not_reused():
    cluster = FakeCluster()
    cluster.settle(service())
    lost = replace(cluster.pods["smol-r0-0"], terminating=True)
    del cluster.objects["StatefulSet", "smol-r0"]
    plan = reconcile(service(), replace(cluster.observed(), pods=(lost,)), cluster.now, cluster.settings)
    assert [o["metadata"]["name"] for o in plan.apply if o["kind"] == "StatefulSet"] == ["smol-r1"]


def test_fields_that_nothing_acts_upon_yet_are_named():
    spec = "autoscaling: {mode: Internal, maxReplicas: 3}, parallelism: {tensor: {mode: Auto}}"
    plan = FakeCluster(settings=Settings(ignored=("spec.cache: no claims here",))).plan(service(spec))
    found = plan.status.condition("FieldsIgnored")
    assert (found.status, found.reason) == ("True", "NotSupportedHere")
    assert found.message == (
        "spec.autoscaling.mode: Internal needs a cluster; replicas follow spec.replicas; "
        "spec.parallelism.tensor.mode: Auto needs a cluster; the size stays as it is; spec.cache: no claims here"
    )
    assert FakeCluster().plan(service()).status.condition("FieldsIgnored") is None


def test_a_bound_without_a_mode_that_keeps_it_is_named():
    """Off is the default: who gives maxReplicas and forgets the mode would wait for scaling in vain."""
    for said, mode in (("", "Off"), ("mode: External,", "External")):
        plan = FakeCluster().plan(service(f"autoscaling: {{{said} maxReplicas: 3}}"))
        message = plan.status.condition("FieldsIgnored").message
        assert message.startswith(
            f"spec.autoscaling.maxReplicas: in mode {mode} replicas follow spec.replicas; Internal is"
        )
    scaled = FakeCluster(settings=Settings(autoscales=True)).plan(
        service("autoscaling: {mode: Internal, maxReplicas: 3}")
    )
    assert scaled.status.condition("FieldsIgnored") is None


def test_transition_times_move_only_with_the_status_of_a_condition():
    cluster, svc = FakeCluster(), service()
    cluster.settle(svc)
    since = cluster.status.condition("Ready").last_transition_time
    cluster.tick(500)
    assert cluster.plan(svc).status == cluster.status
    cluster.change("smol-r0-0", ready=False, running=False, served=False, reason="CrashLoopBackOff", exit_code=137)
    cluster.step(svc)
    assert cluster.status.condition("Ready").last_transition_time == cluster.now.replace(microsecond=0) != since
    assert cluster.status.condition("ModelCached").last_transition_time == since
    assert cluster.status.condition("ScalingActive").last_transition_time == START


def test_history_keeps_the_last_ten_decisions():
    cluster = FakeCluster()
    for i in range(14):
        cluster.settle(service(f"replicas: {1 + i % 2}", generation=i + 1))
    history = cluster.status.autoscaling.history
    assert len(history) == 10 and history[-1] == cluster.status.autoscaling.last_decision


# ---------------------------------------------------------------- properties

specs = st.builds(
    lambda n, length, strategy, surge, unavailable, suspend: (
        f"replicas: {n}, suspend: {str(suspend).lower()}, engine: {{maxModelLen: {length}}}, "
        f"rollout: {{strategy: {strategy}, maxSurge: {surge}, maxUnavailable: {unavailable}, drainTimeoutSeconds: 20}}"
    ),
    st.integers(0, 4),
    st.sampled_from([256, 512]),
    st.sampled_from(["Auto", "Surge", "DrainSwap", "Recreate"]),
    st.integers(1, 2),
    st.integers(0, 1),
    st.sampled_from([False, False, False, True]),
)
events = st.lists(
    st.one_of(
        st.tuples(st.just("spec"), specs),
        st.tuples(st.just("start"), st.integers(0, 5)),
        st.tuples(st.just("crash"), st.integers(0, 5)),
        st.tuples(st.just("load"), st.integers(0, 9)),
        st.tuples(st.just("tick"), st.integers(0, 25)),
    ),
    max_size=25,
)


def world(cluster: FakeCluster, event: str, value: int) -> None:
    names = sorted(cluster.pods)
    if event == "tick":
        cluster.tick(value)
    elif names:
        name = names[value % len(names)]
        if event == "start":
            cluster.let_start(name)
        elif event == "load" and cluster.pods[name].served:
            cluster.change(name, in_flight=value)
        elif event == "crash":
            down = {"ready": False, "running": False, "served": False, "draining": False, "in_flight": None}
            cluster.change(name, reason="CrashLoopBackOff", exit_code=1, **down)


@settings(max_examples=80, deadline=None)
@given(first=specs, history=events)
def test_any_history_keeps_the_promises_and_converges(first, history):
    cluster, svc, generation = FakeCluster(), service(first), 1
    for event, value in history:
        if event == "spec":
            generation += 1
            svc = service(value, generation=generation)
        else:
            world(cluster, event, value)
        before = cluster.observed()
        plan = cluster.plan(svc)
        assert plan == cluster.plan(svc), "not deterministic"
        check_promises(svc, before, plan)
        cluster.step(svc)
        # What was just applied needs no second write, and the status it gave stays as it is.
        again = cluster.plan(svc)
        created = {meta.key(o) for o in plan.apply if o["kind"] == "StatefulSet"}
        assert not [o for o in again.apply if meta.key(o) in created], "wrote the same StatefulSet twice"
    for name in list(cluster.pods):
        cluster.change(name, reason="", exit_code=None)
    cluster.settle(svc)
    wanted = 0 if svc.spec.suspend else svc.spec.replicas
    assert len(cluster.replicas) == wanted == cluster.ready_engines()
    assert cluster.plan(svc).empty and cluster.plan(svc).status == cluster.status


def check_promises(svc, before, plan) -> None:
    leaving = {
        o["metadata"]["name"]
        for o in before.children
        if o["kind"] == "StatefulSet" and meta.annotation(o, meta.DRAINING_SINCE)
    }
    deleted = {name for kind, name in plan.delete if kind == "StatefulSet"}
    assert deleted <= leaving, "deleted a replica that was never drained"
    drained_now = {
        o["metadata"]["name"]
        for o in plan.apply
        if o["kind"] == "StatefulSet" and meta.annotation(o, meta.DRAINING_SINCE)
    } - leaving
    live = {o["metadata"]["name"] for o in before.children if o["kind"] == "StatefulSet"} - leaving
    ready = {p.owner for p in before.pods if p.ready and p.owner in live}
    wanted = 0 if svc.spec.suspend else svc.spec.replicas
    rollout = svc.spec.rollout
    if rollout.strategy in ("Auto", "Surge"):
        floor = min(wanted - rollout.max_unavailable, len(ready))
        assert len(ready - drained_now) >= floor, "took away more than maxUnavailable"
        total = len(live | leaving) + sum(
            o["kind"] == "StatefulSet" and o["metadata"]["name"] not in live | leaving for o in plan.apply
        )
        assert total <= max(wanted + rollout.max_surge, len(live | leaving), wanted + len(leaving)), "surged too far"


@pytest.mark.parametrize("seconds", [0, 1.999, 2, 400])
def test_the_clock_is_an_argument(seconds):
    svc = service()
    assert reconcile(svc, FakeCluster().observed(), START + timedelta(seconds=seconds)).status.conditions
