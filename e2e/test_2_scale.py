"""More replicas: by kubectl scale, by an HPA, on both nodes; and one replica over several (fake) GPUs."""

import time
from collections.abc import Callable

import kit
from kit import Client, Service, eventually, kubectl

Make = Callable[..., Service]


def test_kubectl_scale_spreads_over_both_nodes(service: Make, client: Client) -> None:
    """1 -> 3 -> 1 -> 0 -> 1 through /scale; three replicas are not all on one node; a request at zero is held."""
    one = service("tiny")
    one.wait_ready()
    kubectl("-n", one.namespace, "scale", "infs/tiny", "--replicas=3")
    eventually("three replicas ready", lambda: one.object()["status"]["readyReplicas"] == 3, 120)
    one.wait_ready(30)
    nodes = {pod["spec"]["nodeName"] for pod in one.pods()}
    assert len(nodes) == 2, nodes
    answers = client.complete(one.url, "--requests", "12", "--parallel", "4")
    assert (answers["answers"], answers["errors"]) == (12, 0), answers

    kubectl("-n", one.namespace, "scale", "infs/tiny", "--replicas=1")
    eventually("one engine pod left", lambda: len(one.pods()) == 1, 90)
    one.wait_ready(30)
    kubectl("-n", one.namespace, "scale", "infs/tiny", "--replicas=0")
    one.wait_reason("ScaledToZero", seconds=60)
    eventually("no engine pod left", lambda: not one.pods(), 90)
    kubectl("-n", one.namespace, "scale", "infs/tiny", "--replicas=1")
    answer = client.complete(one.url)  # held until the replica answers
    assert answer["errors"] == 0 and answer["chunks"] > 0, answer


HPA = """
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata: {name: tiny}
spec:
  scaleTargetRef: {apiVersion: kvern.dev/v1alpha1, kind: InferenceService, name: tiny}
  minReplicas: 1
  maxReplicas: 2
  metrics:
  - type: Resource
    resource: {name: cpu, target: {type: AverageValue, averageValue: 150m}}
  behavior:
    scaleDown: {stabilizationWindowSeconds: 0}
"""


def test_hpa_scales_up_and_down(service: Make, client: Client) -> None:
    """An HPA reads CPU from metrics-server by the selector in /scale, writes spec.replicas, and nobody fights it."""
    one = service("tiny", autoscaling={"mode": "External"}, resources={"cpu": "100m"})
    one.wait_ready()
    kubectl("-n", one.namespace, "apply", "-f", "-", stdin=HPA)
    eventually(
        "the HPA sees the pod's CPU",
        lambda: kit.get("hpa", "tiny", one.namespace)["status"]["currentMetrics"][0]["resource"]["current"],  # type: ignore[index]
        120,
        every=2,
    )
    hard = ("--parallel", "4", "--requests", "4", "--seconds", "45", "--max-tokens", "200")
    load = client.complete(one.url, *hard)
    assert load["errors"] == 0, load
    eventually("two replicas wanted", lambda: one.object()["spec"]["replicas"] == 2, 60, every=2)
    eventually("two replicas ready", lambda: one.object()["status"]["readyReplicas"] == 2, 90)
    eventually("one replica again", lambda: one.object()["spec"]["replicas"] == 1, 150, every=2)
    eventually("one engine pod left", lambda: len(one.pods()) == 1, 90)
    assert one.condition("ScalingActive")["reason"] == "External"


def test_tensor_parallel_replica_on_fake_gpus(service: Make, client: Client) -> None:
    """Two fake GPUs, tensor size 2: two ranks in one pod, which compute on the CPU and say so."""
    one = service("wide", resources={"gpusPerPod": 2}, parallelism={"tensor": {"size": 2}})
    one.wait_ready()
    pod = one.pods()[0]
    assert pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "2"
    status = one.object()["status"]
    assert status["parallelism"]["current"] == 2 and status["capacity"]["gpus"] == 2, status
    answer = client.complete(one.url)
    assert answer["errors"] == 0 and answer["chunks"] > 0, answer
    found = one.wait_reason("ComputesOnCPU", condition="Degraded", seconds=30)
    assert "spec.resources.gpusPerPod is 2" in found["message"], found


def test_suspend_and_resume(service: Make, client: Client) -> None:
    """spec.suspend stops all pods and keeps the Service; taking it back starts them again."""
    one = service("tiny")
    one.wait_ready()
    kubectl("-n", one.namespace, "patch", "infs", "tiny", "--type=merge", "-p", '{"spec": {"suspend": true}}')
    one.wait_reason("Suspended", seconds=30)
    eventually("no pod left", lambda: not one.pods() and not one.pods("router"), 90)
    assert kit.get("service", "tiny", one.namespace) is not None
    kubectl("-n", one.namespace, "patch", "infs", "tiny", "--type=merge", "-p", '{"spec": {"suspend": false}}')
    one.wait_ready()
    started = time.monotonic()
    assert client.complete(one.url)["errors"] == 0
    assert time.monotonic() - started < 30
