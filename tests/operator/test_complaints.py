"""What users of other operators suffer from, a test a line: those complaints that touch rollout, drain and failure.

Each names where it was reported. What is tested at length elsewhere is named at the end.
"""

from dataclasses import replace

import pytest
from effects import SERVICE_PATH, path
from fake_cluster import FakeCluster, service
from hypothesis import given
from hypothesis import strategies as st
from slow_cluster import SlowCluster

from kvern_operator.api.types import InferenceService
from kvern_operator.desired import engine, meta
from kvern_operator.observed import Notice
from kvern_operator.reconcile import reconcile
from kvern_operator.settings import Settings

NEW = "replicas: 2, engine: {maxModelLen: 512}"


async def test_nobody_fights_over_replicas(bench, api):
    """LLMKube 484: operator and HPA reset each other 41 times in 14 minutes. The operator never writes spec."""
    bench.create({"replicas": 1, "autoscaling": {"mode": "External"}})
    await bench.settle()
    for n in (3, 2, 0, 4):
        bench.create({"replicas": n, "autoscaling": {"mode": "External"}}, generation=n + 2)
        await bench.settle()
        assert api.objects[SERVICE_PATH]["spec"]["replicas"] == n
    written = {p for _, p in api.writes() if "inferenceservices" in p}
    assert written == {f"{SERVICE_PATH}/status"}


def test_pods_that_find_no_node_freeze_nothing():
    """Dynamo 14251: while a pod is unschedulable nothing else is planned."""
    cluster = SlowCluster(gpus=2)
    cluster.settle(service("replicas: 2"))
    for _ in range(3):
        cluster.work(service("replicas: 4", generation=2))
        cluster.controllers()
    assert sum(p.reason == "Unschedulable" for p in cluster.pods.values()) == 2
    cluster.settle(service("replicas: 1", generation=3))
    assert len(cluster.available()) == 1 == len(cluster.replicas)
    cluster.settle(service("replicas: 2, engine: {maxModelLen: 512}", generation=4))
    assert len(cluster.available()) == 2


def test_one_bad_pod_blocks_no_scaling_and_goes_first():
    """AIBrix 1032."""
    cluster = FakeCluster()
    cluster.settle(service("replicas: 2"))
    down = {"ready": False, "running": False, "served": False, "in_flight": None}
    cluster.change("smol-r0-0", reason="CrashLoopBackOff", exit_code=1, **down)
    cluster.step(service("replicas: 3", generation=2))
    assert "smol-r2" in cluster.replicas
    cluster.let_start("smol-r2-0")
    cluster.step(service("replicas: 2", generation=3))
    cluster.step(service("replicas: 2", generation=3))
    assert cluster.replicas == ["smol-r1", "smol-r2"]


def test_a_scale_down_ends_no_stream():
    """Dynamo 13559, vLLM 24885: what is in flight finishes, and until then the replica is there."""
    cluster, one = FakeCluster(), service("replicas: 1", generation=2)
    cluster.settle(service("replicas: 2"))
    for name in ("smol-r0-0", "smol-r1-0"):
        cluster.change(name, in_flight=4)
    for _ in range(20):
        cluster.step(one)
        cluster.tick(10)
        assert cluster.replicas == ["smol-r0", "smol-r1"]
    (leaving,) = [
        n for n in cluster.replicas if meta.annotation(cluster.objects["StatefulSet", n], meta.DRAINING_SINCE)
    ]
    cluster.change(f"{leaving}-0", in_flight=0)
    cluster.step(one)
    assert leaving not in cluster.replicas


@pytest.mark.parametrize("sees_nodes", [True, False])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_a_rollout_without_a_spare_gpu_ends(replicas, sees_nodes):
    """LLMKube 192, KServe 4618: a surge waits for ever for a GPU that the old replica holds."""
    cluster = SlowCluster(gpus=replicas, sees_nodes=sees_nodes)
    cluster.settle(service(f"replicas: {replicas}"))
    cluster.settle(service(f"replicas: {replicas}, engine: {{maxModelLen: 512}}", generation=2))
    assert len(cluster.available()) == replicas
    assert cluster.status.revision.current == cluster.status.revision.updated


def test_a_rollout_in_a_quota_that_allows_no_pod_more_ends():
    """The same with a quota for a scheduler: the StatefulSet may make no pod, and there is no pod to look at."""
    cluster = FakeCluster(spare=None)
    cluster.settle(service("replicas: 2"))
    changed = service(NEW, generation=2)
    cluster.step(changed)
    assert cluster.replicas == ["smol-r0", "smol-r1", "smol-r2"]
    del cluster.pods["smol-r2-0"]
    words = 'pods "smol-r2-0" is forbidden: exceeded quota: gpus, requested: 1, used: 2, limited: 2'
    observed = replace(
        cluster.observed(), notices=(Notice("StatefulSet", "smol-r2", "FailedCreate", words),), spare_replicas=0
    )
    plan = reconcile(changed, observed, cluster.now, cluster.settings)
    assert len([n for n in plan.notes if n.startswith("draining")]) == 1  # one old replica gives its quota
    assert plan.status.condition("Ready").reason == "QuotaExceeded"


def test_an_upgrade_of_the_operator_and_its_rollback_restart_no_pod(monkeypatch):
    """KServe PR 5085: a new version builds other pods from the same spec. Templates stay what they were made as."""
    cluster, svc = FakeCluster(), service("replicas: 2")
    cluster.settle(svc)
    sets = {k: v for k, v in cluster.objects.items() if k[0] in ("StatefulSet", "Deployment")}
    built = engine.pod_template

    def newer(service: InferenceService, name: str, own: dict, settings: Settings) -> dict:
        template = built(service, name, own, settings)
        return {**template, "spec": {**template["spec"], "priorityClassName": "new", "containers": []}}

    old_settings = cluster.settings
    for version in range(4):
        monkeypatch.setattr(engine, "pod_template", newer if version % 2 == 0 else built)
        images = {"engine_image": f"engine:{version}", "operator_image": f"operator:{version}"}
        cluster.settings = replace(old_settings, **(images if version % 2 == 0 else {}))
        if version % 2 == 0:
            monkeypatch.setattr(engine, "wanted_image", lambda *_, v=version: f"engine:{v}")
        cluster.settle(svc)
        assert {k: v for k, v in cluster.objects.items() if k[0] in ("StatefulSet", "Deployment")} == sets
        assert cluster.deleted == []


async def test_nothing_keeps_a_service_or_a_namespace_from_being_deleted(bench, api):
    """KServe 4710, kopf 75: stuck Terminating. No finalizer anywhere, so nobody has to be there; and no webhook."""
    bench.create({"replicas": 2, "cache": {"pvc": {"size": "1Gi"}}})
    await bench.settle()
    for obj in api.objects.values():
        assert not obj["metadata"].get("finalizers"), obj["metadata"]["name"]
        assert obj["kind"] not in ("ValidatingWebhookConfiguration", "MutatingWebhookConfiguration")


def test_ready_is_not_said_of_what_crashes():
    """KServe 1859, 2260: Ready while its pods are in a crash loop, and the cause hidden in a pod."""
    cluster, svc = FakeCluster(), service()
    cluster.settle(svc)
    down = {"ready": False, "running": False, "served": False, "in_flight": None}
    words = {"reason": "CrashLoopBackOff", "exit_code": 1, "restarts": 4, "last_log": "ValueError: no such file"}
    cluster.change("smol-r0-0", **down, **words)
    cluster.step(svc)
    found = {c.type: c for c in cluster.status.conditions}
    for type_ in ("Ready", "Available"):
        assert found[type_].status == "False" and "ValueError: no such file" in found[type_].message


@given(st.integers(0, 3600))
def test_a_pod_has_the_time_to_drain_that_the_service_gives_it(drain):
    """Its kubelet kills it later than the engine gives up, and a router later than an engine."""
    made = service(f"rollout: {{drainTimeoutSeconds: {drain}}}")
    spec = engine.pod_template(made, "smol-r0", {}, Settings())["spec"]
    args = spec["containers"][0]["args"]
    assert args[args.index("--drain-timeout-seconds") + 1] == str(drain)
    assert spec["terminationGracePeriodSeconds"] >= drain + engine.GRACE_BEYOND_DRAIN


async def test_an_operator_that_is_away_is_not_needed_by_what_runs(bench, api):
    """Pods mount no token and ask nothing of the API server; the router's list and the engines' layout are files."""
    bench.create({"replicas": 2})
    await bench.settle()
    for kind in ("statefulsets", "deployments"):
        for obj in api.of(kind).values():
            assert obj["spec"]["template"]["spec"]["automountServiceAccountToken"] is False
    assert "data" in api.objects[path("ConfigMap", "smol-router")]


# Elsewhere: a missed DELETE (production-stack 1091) in test_operator.py; two leaders (KubeAI 67) in test_leader.py and
# test_controller.py; metrics of dead pods (llm-d-autoscaling 368) in test_admin.py; traffic to loading or terminating
# pods (production-stack 601, 619) and zero replicas (AIBrix 476) in test_reconcile.py; the new pod before the old has
# released its GPU (serving-progressive-rollout 204) in test_rollout.py; probes that kill a loading model (KServe 5062),
# /dev/shm (production-stack 899) in test_desired.py; a CRD over 262 kB (KServe 3487) in test_schema.py.
