"""The first thing a user does: install the chart, apply the example, wait, ask."""

import json
import time
from collections.abc import Callable

import kit
from kit import Client, Service, Watch, condition_of, eventually, kubectl

Measure = Callable[[str, float], None]


def test_helm_install_apply_wait_ask(operator: None, namespace: str, client: Client, measure: Measure) -> None:
    """`kubectl apply -f examples/smollm2.yaml`, `kubectl wait`, and an application in another namespace gets "Paris",
    streamed, by the Service's DNS name."""
    with Watch("pods", namespace) as pods, Watch("infs", namespace) as services:
        time.sleep(1)  # both watches stand
        start = time.monotonic()
        kubectl("-n", namespace, "apply", "-f", "examples/smollm2.yaml")
        kubectl("-n", namespace, "wait", "--for=condition=Ready", "infs/smollm2", "--timeout=180s", timeout=200)
        ready = time.monotonic() - start
        # `kubectl wait` has seen it; this watch may be a moment behind.
        eventually("Ready, watched", lambda: services.first(lambda s: condition_of(s, "Ready") == "True"), 10)
        _parts(start, pods, services, measure)
    measure("apply to Ready, as kubectl wait sees it", ready)
    assert ready < 120

    service = Service("smollm2", namespace)
    status = service.object()["status"]
    assert status["url"] == f"http://smollm2.{namespace}.svc.cluster.local/v1", status["url"]
    answer = client.ask(service.url, status["model"], "What is the capital of France?")
    measure("first token of the first answer", answer["first_token"])
    measure("all of the first answer", answer["total"])
    assert "Paris" in answer["text"], answer
    assert answer["chunks"] > 3 and answer["finish_reason"] == "stop", answer

    status_said, explained, log = (
        kit.kvern(word, "smollm2", "-n", namespace) for word in ("status", "explain", "logs")
    )
    assert "AllReplicasReady" in status_said and service.url in status_said, status_said
    assert "smollm2 answers: 1 of 1 replica" in explained and "1 engine pod ready: smollm2-r0-0" in explained, explained
    assert "smollm2-r0-0" in log and "ready" in log, log


def _parts(start: float, pods: Watch, services: Watch, measure: Measure) -> None:
    """Names the parts of the time from apply to Ready."""

    def engine(check: Callable[[kit.Object], object]) -> Callable[[kit.Object], object]:
        labels = "app.kubernetes.io/component"
        return lambda pod: pod["metadata"]["labels"].get(labels) == "engine" and check(pod)

    steps: list[tuple[str, float | None]] = [
        ("apply to engine pod created", pods.first(engine(lambda p: True))),
        ("pod created to scheduled", pods.first(engine(lambda p: p["spec"].get("nodeName")))),
        (
            "scheduled to container running (volumes, sandbox)",
            pods.first(engine(lambda p: p["status"]["containerStatuses"][0]["state"].get("running"))),
        ),
        (
            "container running to pod ready (engine starts)",
            pods.first(engine(lambda p: condition_of(p, "Ready") == "True")),
        ),
        ("pod ready to service Ready", services.first(lambda s: condition_of(s, "Ready") == "True")),
    ]
    before = start
    for what, when in steps:
        assert when is not None, what
        measure(what, when - before)
        before = when


def test_what_kubectl_get_shows(operator: None, service: Callable[..., Service]) -> None:
    """The columns, the short name and the category, of a service that answers."""
    one = service("tiny")
    one.wait_ready()
    head, row = kubectl("-n", one.namespace, "get", "infs").strip().splitlines()
    assert head.split() == ["NAME", "MODEL", "TP", "READY", "DESIRED", "GPUS", "REASON", "SCALING", "URL", "AGE"]
    assert "AllReplicasReady" in row and "tiny" in row, row
    for category in ("kvern", "all"):
        assert "inferenceservice.kvern.dev/tiny" in kubectl("-n", one.namespace, "get", category, "-o", "name")
    for field in ("spec.model.uri", "spec.parallelism.tensor", "spec.autoscaling.mode", "status.conditions"):
        explained = kubectl("explain", f"inferenceservices.{field}")
        assert "DESCRIPTION:" in explained and "<empty>" not in explained, explained
    scale = json.loads(
        kubectl("get", "--raw", f"/apis/kvern.dev/v1alpha1/namespaces/{one.namespace}/inferenceservices/tiny/scale")
    )
    assert scale["spec"]["replicas"] == 1 and scale["status"]["replicas"] == 1
    assert "kvern.dev/service=tiny" in scale["status"]["selector"]


def test_pods_are_restricted_and_have_no_token(operator: None, service: Callable[..., Service]) -> None:
    """The namespace enforces `restricted`; beyond that: read-only root, no ServiceAccount token."""
    one = service("tiny")
    one.wait_ready()
    for component in ("engine", "router"):
        for pod in one.pods(component):
            spec, container = pod["spec"], pod["spec"]["containers"][0]
            assert spec["automountServiceAccountToken"] is False
            assert spec["securityContext"]["runAsUser"] == 65532
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
            assert "/var/run/secrets/kubernetes.io/serviceaccount" not in mounts
