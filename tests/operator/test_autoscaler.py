"""The operator scales a service: from a load to replicas, and what status, Events and metrics say of it."""

import pytest
from scaled import SERVICE_PATH, Scaled

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
