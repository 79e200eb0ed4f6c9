"""The operator scales a service: from a load to replicas, and what status, Events and metrics say of it."""

import pytest
from scaled import KEY, SERVICE_PATH, Scaled

INTERNAL = {
    "mode": "Internal",
    "minReplicas": 1,
    "maxReplicas": 4,
    "scaleDownStabilizationSeconds": 60,
    "idleSeconds": 60,
}


@pytest.fixture
async def scaled(api):
    played = Scaled(api)
    yield played
    await played.close()


async def test_a_step_of_load_brings_replicas_and_its_end_takes_them_away(scaled):
    await scaled.create(autoscaling=INTERNAL)
    assert (scaled.desired, scaled.replicas) == (1, ["smol-r0"])
    assert scaled.scaling["mode"] == "Internal" and scaled.scaling["desired"] == 1
    scaled.demand = 30_000.0  # 3.75 replicas at a usage of 0.8; what one holds is all that is seen of it
    scaled.waiting = 800.0
    await scaled.step(2)
    assert scaled.desired == 4, scaled.scaling["lastDecision"]  # within ten seconds
    last = scaled.scaling["history"][-1]
    assert (last["from"], last["to"], last["kind"]) == (1, 4, "up") and last["terms"] and last["inputs"]["ready"] == "1"
    assert scaled.replicas == ["smol-r0", "smol-r1", "smol-r2", "smol-r3"]
    up = [note for reason, note in scaled.events() if reason == "ScaledUp"]
    assert len(up) == 1 and up[0].startswith("1 -> 4 replicas: "), scaled.events()
    scaled.waiting = 0.0
    await scaled.step(8)
    assert scaled.bench.status["readyReplicas"] == 4
    text = scaled.metrics.text().decode()
    assert 'kvern_operator_autoscale_desired{name="smol",namespace="team-a"} 4.0' in text
    assert 'kvern_operator_autoscale_ready{name="smol",namespace="team-a"} 4.0' in text
    assert "kvern_operator_autoscale_ready_seconds_count 2.0" in text  # the first one, and the first of those asked for
    assert 'kvern_operator_autoscale_decisions_total{cause="kv",kind="up"}' in text
    spec = scaled.api.objects[SERVICE_PATH]["spec"]
    assert "replicas" not in spec  # never written there: no drift for whoever applies the manifest
    scaled.demand = 500.0
    seen = []
    for _ in range(60):
        await scaled.step()
        seen.append(scaled.desired)
    assert seen[0] == 4 and seen[-1] == 1 and sorted(seen, reverse=True) == seen, seen  # one at a time, and no way back
    assert scaled.replicas == ["smol-r0"]
    assert [r for r, _ in scaled.events()].count("ScaledDown") == 3
    assert [d["to"] for d in scaled.scaling["history"]][-4:] == [4, 3, 2, 1]


async def test_the_same_manifest_again_changes_nothing(scaled):
    await scaled.create(autoscaling=INTERNAL)
    scaled.demand, scaled.waiting = 30_000.0, 800.0
    await scaled.step(3)
    assert scaled.desired == 4
    before = scaled.bench.status["autoscaling"]["history"]
    scaled.bench.create(
        {"rollout": {"drainTimeoutSeconds": 0}, "router": {"replicas": 1}, "autoscaling": INTERNAL}, generation=1
    )
    await scaled.step(2)
    assert scaled.desired == 4 and scaled.bench.status["autoscaling"]["history"] == before


async def test_it_writes_only_what_has_changed(scaled):
    await scaled.create(autoscaling=INTERNAL)
    await scaled.step(4)
    before = len(scaled.api.writes("/leases/"))
    await scaled.step(20)
    assert len(scaled.api.writes("/leases/")) - before <= 2, scaled.api.writes()[-5:]


async def test_from_zero_by_a_held_request_and_back_when_idle(scaled):
    await scaled.create(autoscaling={**INTERNAL, "minReplicas": 0})
    await scaled.step(20)
    assert (scaled.desired, scaled.replicas) == (0, []), scaled.scaling["lastDecision"]
    assert scaled.scaling["lastDecision"]["cause"] in ("idleSeconds", "noLoad")
    assert "ScaledToZero" in [r for r, _ in scaled.events()]
    assert scaled.bench.condition("Ready") == ("True", "ScaledToZero")
    await scaled.step(3)
    assert scaled.desired == 0
    scaled.held = 2.0
    await scaled.step()
    assert (scaled.desired, scaled.replicas) == (1, ["smol-r0"])
    assert scaled.scaling["lastDecision"]["cause"] == "held"
    assert ("WokenUp", "0 -> 1 replicas: 2 requests are held at the router") in scaled.events()


async def test_zero_comes_when_the_window_ends_and_no_resync_is_waited_for(scaled):
    """idleSeconds of 300 are less than any resync: the cycles decide, and have a pass made."""
    await scaled.create(autoscaling={**INTERNAL, "minReplicas": 0, "idleSeconds": 300})
    scaled.demand = 2_000.0
    await scaled.step(4)
    last_seen = scaled.now
    scaled.demand = 0.0
    while scaled.desired and scaled.now < last_seen + 600:
        await scaled.step()
    assert 300 <= scaled.now - last_seen <= 310
    await scaled.step()
    assert scaled.replicas == []
    assert scaled.bench.condition("Ready") == ("True", "ScaledToZero")


async def test_missing_metrics_hold(scaled):
    await scaled.create(autoscaling=INTERNAL)
    scaled.demand, scaled.waiting = 30_000.0, 800.0
    await scaled.step(10)
    assert scaled.bench.status["readyReplicas"] == 4
    scaled.demand, scaled.waiting = 0.0, 0.0
    scaled.silent = {"smol-r2-0"}
    await scaled.step(40)
    assert scaled.desired == 4 and scaled.scaling["lastDecision"]["limitedBy"] == "missingMetrics"
    assert scaled.bench.condition("ScalingActive") == ("False", "MissingMetrics")
    assert [r for r, _ in scaled.events()].count("MissingMetrics") == 1
    scaled.silent = set()
    await scaled.step(40)
    assert scaled.desired == 1 and scaled.bench.condition("ScalingActive")[0] == "True"


async def test_recommend_writes_status_and_nothing_else(scaled):
    await scaled.create(autoscaling={**INTERNAL, "mode": "Recommend"}, replicas=1)
    scaled.demand, scaled.waiting = 30_000.0, 800.0
    before = len(scaled.api.writes("/leases/"))
    await scaled.step(6)
    assert (scaled.desired, scaled.replicas) == (1, ["smol-r0"])
    assert scaled.scaling["recommended"] == 4 and scaled.scaling["lastDecision"]["to"] == 4
    written = {p for _, p in scaled.api.writes("/leases/")[before:]}
    assert all(p.endswith("/status") or p.endswith("/events") for p in written), written
    assert any(reason == "Recommended" for reason, _ in scaled.events())
    assert "4 replicas would be right" in scaled.bench.message("ScalingActive")


async def test_external_follows_the_scale_subresource_alone(scaled):
    external = {**INTERNAL, "mode": "External"}
    await scaled.create(autoscaling=external, replicas=2)
    scaled.demand, scaled.waiting = 30_000.0, 800.0
    await scaled.step(4)
    assert scaled.desired == 2 and scaled.scaling.get("desired") is None
    old = scaled.api.objects[SERVICE_PATH]
    scaled.bench.create({**old["spec"], "replicas": 3}, generation=2)  # as /scale writes it
    await scaled.step(3)
    assert scaled.desired == 3 and len(scaled.replicas) == 3
    assert scaled.scaling["lastDecision"]["inputs"]["ready"]  # what-if has figures to reckon with
    assert not [r for r, _ in scaled.events() if r.startswith("Scaled")]


async def test_bounds_of_the_spec_hold_at_once(scaled):
    await scaled.create(autoscaling=INTERNAL)
    scaled.demand, scaled.waiting = 60_000.0, 1500.0
    await scaled.step(3)
    assert scaled.desired == 4 and scaled.bench.condition("ScalingLimited") == ("True", "MaxReplicas")
    assert "ScalingLimited" in [r for r, _ in scaled.events()]
    old = scaled.api.objects[SERVICE_PATH]
    scaled.bench.create({**old["spec"], "autoscaling": {**INTERNAL, "maxReplicas": 2}}, generation=2)
    await scaled.step(2)
    assert scaled.desired == 2 and scaled.scaling["lastDecision"]["kind"] == "bounds"


async def test_a_load_about_a_bound_is_no_news_every_few_seconds(scaled):
    await scaled.create(autoscaling=INTERNAL)
    scaled.demand = 31_000.0
    await scaled.step(40)
    assert scaled.desired == 4
    before = len(scaled.api.writes("/leases/"))
    causes = set()
    for step in range(120):  # ten minutes: 3.9 replicas are needed, then 4.1
        scaled.demand = 33_000.0 if step % 4 < 2 else 31_000.0
        await scaled.step()
        causes.add(scaled.autoscaler._made[KEY].both.replicas.limited_by)
    assert causes == {None, "maxReplicas"}
    told = [note for reason, note in scaled.events() if reason == "ScalingLimited"]
    assert 1 <= len(told) <= 12, told
    assert len(scaled.api.writes("/leases/")) - before <= 60


async def test_a_new_leader_goes_on_where_the_old_one_died(scaled):
    """Killed after the decision was written and before anything was done for it."""
    await scaled.create(autoscaling=INTERNAL)
    scaled.demand, scaled.waiting = 30_000.0, 800.0
    refuse = scaled.api.refuse

    def before_acting(method: str, where: str, body: dict | None) -> tuple[int, str] | None:
        made = "/statefulsets/" in where and method == "PATCH" and not where.endswith("smol-r0")
        return (503, "the operator has died") if made else None

    scaled.api.refuse, scaled.failing = before_acting, True
    await scaled.step(3)
    assert scaled.scaling["desired"] == 4 and scaled.replicas == ["smol-r0"]
    scaled.api.refuse, scaled.failing = refuse, False
    await scaled.close()
    scaled.begin()
    scaled.demand = scaled.waiting = 0.0  # it sees no load, and must not undo what was decided a moment ago
    await scaled.step(4)
    assert scaled.desired == 4 and len(scaled.replicas) == 4
    assert [d["to"] for d in scaled.scaling["history"]].count(4) == 1


async def test_two_leaders_for_a_moment(scaled, api):
    await scaled.create(autoscaling=INTERNAL)
    other = Scaled(api, now=scaled.now)
    other._born, other._counted = scaled._born, scaled._counted
    try:
        for one in (scaled, other):
            one.demand, one.waiting = 30_000.0, 800.0
        for _ in range(6):
            await scaled.step()
            other.now = scaled.now - 5.0
            await other.step()
        assert scaled.desired == 4 and len(scaled.replicas) == 4
        assert [d["to"] for d in scaled.scaling["history"]].count(4) == 1
        assert [r for r, _ in scaled.events()].count("ScaledUp") == 1
    finally:
        await other.close()


async def test_the_api_server_is_away_for_a_minute_of_a_burst(scaled):
    await scaled.create(autoscaling=INTERNAL)
    scaled.api.down = True
    scaled.demand, scaled.waiting = 30_000.0, 800.0
    for _ in range(12):
        scaled.now += 5.0
        await scaled.autoscaler.cycle()
    assert scaled.changed
    scaled.api.down = False
    await scaled.step(10)
    assert scaled.desired == 4 and scaled.bench.status["readyReplicas"] == 4
    assert [d["to"] for d in scaled.scaling["history"]][-1:] == [4]


async def test_pods_without_a_node_do_not_pile_up(scaled):
    await scaled.create(autoscaling=INTERNAL)
    scaled.nodes = 2
    scaled.demand, scaled.waiting = 30_000.0, 800.0
    await scaled.step(60)
    assert scaled.desired == 2, str(scaled.scaling["lastDecision"])
    assert scaled.scaling["lastDecision"]["limitedBy"] == "unschedulable"
    assert scaled.bench.condition("ScalingLimited") == ("True", "Unschedulable")


async def test_suspend_and_back(scaled):
    await scaled.create(autoscaling=INTERNAL)
    scaled.demand, scaled.waiting = 30_000.0, 800.0
    await scaled.step(3)
    spec = scaled.api.objects[SERVICE_PATH]["spec"]
    scaled.bench.create({**spec, "suspend": True}, generation=2)
    await scaled.step(3)
    assert scaled.replicas == [] and scaled.desired == 0
    scaled.bench.create(spec, generation=3)
    await scaled.step(3)
    assert scaled.desired == 4


# ---------------------------------------------------------------- the layout

AUTO = {
    "engine": {"args": {"data-parallel-size": "2"}},
    "parallelism": {
        "tensor": {
            "mode": "Auto",
            "size": 1,
            "max": 2,
            "raiseAfterSeconds": 10,
            "dwellSeconds": 0,
            "verifySeconds": 20,
        }
    },
    "replicas": 2,
    "autoscaling": {"slo": {"itlP95Ms": 1000}},
}
KV = ((1, 1000), (2, 1600))  # of two engines 500 each: too few for requests of 600


@pytest.fixture
async def laid(api):
    played = Scaled(api, kv=KV)
    yield played
    await played.close()


def layouts(played: Scaled) -> set[str]:
    return {o["metadata"]["annotations"]["kvern.dev/layout"] for o in played.api.of("statefulsets").values()}


async def test_the_planner_changes_the_layout_in_the_pods_one_after_the_other(laid):
    await laid.create(**AUTO)
    pods = set(laid._engines())
    assert layouts(laid) == {"tp1pp1dp2"} and laid.told == []
    laid.demand = 400.0
    for _ in range(12):
        await laid.step()
        if laid.told:
            break
    plan = laid.bench.status["parallelism"]["plan"]
    assert (plan["phase"], plan["size"], plan["before"]) == ("Changing", 2, 1)
    await laid.step(2)
    assert laid.told == [("smol-r0-0", 2), ("smol-r1-0", 2)] and set(laid._engines()) == pods
    assert layouts(laid) == {"tp2pp1dp1"}  # what a container that crashes boots
    assert laid.api.of("configmaps")["smol-r0-layout"]["data"]["KVERN_TENSOR_PARALLEL_SIZE"] == "2"
    await laid.step(8)
    status = laid.bench.status["parallelism"]
    assert (status["plan"]["phase"], status["current"], status["target"]) == ("Stable", 2, 2), status
    assert status["plan"]["proven"] == [1, 2] and len(status["plan"]["changes"]) == 1
    assert [(d["from"], d["to"]) for d in status["history"]] == [(1, 2)]
    seen = [r for r, _ in laid.events()]
    assert [r for r in seen if r.startswith("Layout")] == ["LayoutChange", "LayoutVerifying", "LayoutStable"]
    assert laid.bench.condition("ParallelismStable") == ("True", "AsWanted")
    assert len(laid.told) == 2  # and nothing more


async def test_a_layout_that_fails_is_taken_back_and_banned(laid):
    laid.refusing = {"smol-r1-0": "a worker has too little memory"}
    await laid.create(**AUTO)
    laid.demand = 400.0
    await laid.step(25)
    status = laid.bench.status["parallelism"]
    assert laid.told == [("smol-r0-0", 2), ("smol-r1-0", 2), ("smol-r0-0", 1)]
    assert (status["plan"]["phase"], status["plan"]["size"], status["current"]) == ("Stable", 1, 1), status
    assert [ban["size"] for ban in status["plan"]["bans"]] == [2]
    assert layouts(laid) == {"tp1pp1dp2"} and len(laid.replicas) == 2
    (back,) = [note for reason, note in laid.events() if reason == "LayoutTakenBack"]
    assert "smol-r1-0: a worker has too little memory" in back


async def test_a_new_leader_ends_a_change_that_the_old_one_began(laid):
    laid.most_told = 1
    await laid.create(**AUTO)
    laid.demand = 400.0
    while not laid.told:
        await laid.step()
    await laid.step()
    assert laid.told == [("smol-r0-0", 2)] and layouts(laid) == {"tp2pp1dp1", "tp1pp1dp2"}
    await laid.close()
    laid.begin()
    laid.most_told = 1000
    await laid.step(14)
    status = laid.bench.status["parallelism"]
    assert laid.told == [("smol-r0-0", 2), ("smol-r1-0", 2)]
    assert (status["plan"]["phase"], status["current"]) == ("Stable", 2), status
    assert len(status["plan"]["changes"]) == 1


async def test_recommend_says_the_size_and_changes_nothing(laid):
    spec = {**AUTO, "parallelism": {"tensor": {**AUTO["parallelism"]["tensor"], "mode": "Recommend"}}}
    await laid.create(**spec)
    laid.demand = 400.0
    await laid.step(12)
    status = laid.bench.status["parallelism"]
    assert (status["recommended"], status["target"], laid.told) == (2, 1, [])
    assert "mode Recommend" in status["lastDecision"]["reason"]
    # Somebody does as it says: the next recommendation starts from there.
    tensor = {**spec["parallelism"]["tensor"], "size": 2}
    old, devices = laid.api.objects[SERVICE_PATH]["spec"], {"args": {"data-parallel-size": "1"}}
    laid.bench.create({**old, "engine": devices, "parallelism": {"tensor": tensor}}, generation=2)
    await laid.step(60)
    status = laid.bench.status["parallelism"]
    assert (status["current"], status["target"], status["recommended"], status["plan"]["size"]) == (2, 2, 2, 2), status
    assert laid.autoscaler._made[KEY].both.layout.reason == "nothing calls for another size"
    assert not [r for r, _ in laid.events() if r.startswith("LayoutCh")]
