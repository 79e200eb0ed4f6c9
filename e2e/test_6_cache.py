"""A model of a hub that runs in the cluster: fetched once into a claim by a Job, served from it, told in status."""

import json
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from kit import Client, Object, Service, condition_of, eventually, get, items, kubectl

FAKE_HUB = Path(__file__).parents[1] / "tests" / "engine" / "fetching" / "fake_hub.py"
# tiny-kjv as the engine's image carries it, under the name of a repository; nothing is in large-file storage, whose
# address only the hub's own pod would know. PAUSE: seconds before each 64 KiB, so that a download can be watched.
MAIN = """
import pathlib, fake_hub
from http.server import ThreadingHTTPServer
fake_hub.LARGE = 1 << 40
hub = fake_hub.FakeHub()
folder = pathlib.Path("/opt/kvern-models/tiny-kjv")
hub.add("org/kjv", {p.name: p.read_bytes() for p in folder.iterdir()})
hub.repositories["org/kjv"].private = True
hub.tokens.add("secret")
hub.faults.pause = 0.3
ThreadingHTTPServer(("", 8000), hub.handler(store=False)).serve_forever()
"""
HUB = """
apiVersion: v1
kind: Pod
metadata: {name: hub, labels: {app: hub}}
spec:
  terminationGracePeriodSeconds: 0
  automountServiceAccountToken: false
  securityContext: {runAsNonRoot: true, runAsUser: 65532, seccompProfile: {type: RuntimeDefault}}
  containers:
  - name: hub
    image: kvern/engine:e2e
    imagePullPolicy: IfNotPresent
    command: [python3, /hub/main.py]
    readinessProbe: {tcpSocket: {port: 8000}, periodSeconds: 1}
    securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
    volumeMounts: [{name: code, mountPath: /hub}]
  volumes: [{name: code, configMap: {name: hub}}]
---
apiVersion: v1
kind: Service
metadata: {name: hub}
spec: {selector: {app: hub}, ports: [{port: 80, targetPort: 8000}]}
"""

pytestmark = pytest.mark.full  # a download slow enough to be watched


def start_hub(namespace: str) -> None:
    files = {"fake_hub.py": FAKE_HUB.read_text(), "main.py": textwrap.dedent(MAIN)}
    made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "hub"}, "data": files}
    kubectl("-n", namespace, "apply", "-f", "-", stdin=json.dumps(made))
    kubectl("-n", namespace, "apply", "-f", "-", stdin=HUB)
    kubectl("-n", namespace, "wait", "--for=condition=Ready", "pod/hub", "--timeout=90s")


def jobs(service: Service) -> list[Object]:
    return items("jobs", service.namespace, f"kvern.dev/service={service.name}")


def test_a_private_model_is_fetched_once_and_served_from_its_claim(
    service: Callable[..., Service],
    namespace: str,
    client: Client,
    measure: Callable[[str, float], None],
) -> None:
    start_hub(namespace)
    made = service(
        "kjv",
        "hf://org/kjv",
        model={"name": "tiny-kjv", "endpoint": "http://hub", "secretRef": {"name": "token"}},
        cache={"pvc": {"size": "1Gi", "accessMode": "ReadWriteOnce"}},
    )
    # The Secret is not there yet: said, and put right without a restart of anything.
    seen = made.wait_reason("CreateContainerConfigError", seconds=120)
    assert "token" in seen["message"] and not made.pods()
    kubectl("-n", namespace, "create", "secret", "generic", "token", "--from-literal=HF_TOKEN=typo")
    seen = made.wait_reason("ModelAccessDenied", seconds=180)
    assert "does not know the token" in seen["message"]
    token = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "token"}, "stringData": {"HF_TOKEN": "secret"}}
    kubectl("-n", namespace, "apply", "-f", "-", stdin=json.dumps(token))

    made.wait_reason("Downloading", condition="ModelCached", seconds=240)
    cache = eventually("figures", lambda: (made.object()["status"].get("cache") or {}).get("total"), 60)
    assert cache > 2_000_000 and not made.pods()  # no replica before its model
    made.wait_ready(240)
    condition = made.condition("ModelCached")
    assert (condition["status"], condition["reason"]) == ("True", "Cached")
    status = made.object()["status"]["cache"]
    assert status["phase"] == "Ready" and status["bytes"] == status["total"] == cache
    answer = client.complete(made.url)
    assert answer["text"]

    # The hub goes: replicas that start now have all they need.
    kubectl("-n", namespace, "delete", "pod", "hub", "--wait=true")
    (old,) = made.pods()
    kubectl("-n", namespace, "delete", "pod", old["metadata"]["name"], "--wait=true", timeout=180)

    def another() -> bool:
        fresh = [p for p in made.pods() if p["metadata"]["uid"] != old["metadata"]["uid"]]
        return [condition_of(p, "Ready") for p in fresh] == ["True"]

    eventually("another pod is ready", another, 240)
    made.wait_ready(60)
    assert client.complete(made.url)["text"] == answer["text"]
    (job,) = jobs(made)
    assert job["status"]["succeeded"] == 1
    assert get("pvc", "kjv-cache", namespace) is not None
