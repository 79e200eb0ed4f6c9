"""What reconcile makes of a spec, on a real API server: every object is taken by it, restricted Pod Security warns of
none, and what it gives back needs no second write.

Needs no node, as test_7_bad_manifests.py, and no operator: one that runs would write the same objects.
"""

import json
import secrets
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from kit import RESTRICTED, kubectl

from kvern_operator.api.load import parse_service
from kvern_operator.desired import meta
from kvern_operator.observed import Observed
from kvern_operator.reconcile import reconcile
from kvern_operator.settings import Settings

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SETTINGS = Settings(
    operator_key=b"k" * 32,
    namespace="kvern-system",
    image_pull_policy="IfNotPresent",
    image_pull_secrets=("registry",),
)
SPECS: dict[str, dict[str, Any]] = {
    "smallest": {},
    "cpu": {"resources": {"gpusPerPod": 0, "cpu": "0.5", "memory": "1024Mi"}, "replicas": 2},
    "gpus": {
        "resources": {
            "gpusPerPod": 4,
            "nodesPerReplica": 2,
            "cpu": 8,
            "memory": "64.5Gi",
            "gpuType": "NVIDIA-H200",
            "nodeSelector": {"zone": "a"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "runtimeClassName": "nvidia",
        },
        "parallelism": {"tensor": {"size": 2}},
    },
    "claims": {
        "model": {"uri": "pvc://models/llama", "secretRef": {"name": "token"}},
        "cache": {"pvc": {"size": "1000Mi", "storageClassName": "fast"}},
        "router": {"apiKeysSecretRef": {"name": "keys"}, "resources": {"cpu": "1500m", "memory": 536870912}},
    },
    "overridden": {
        "overrides": {
            "podTemplate": {
                "metadata": {"annotations": {"a": "b"}},
                "spec": {
                    "affinity": {},
                    "nodeSelector": {},
                    "priorityClassName": "high",
                    "containers": [
                        {
                            "name": "engine",
                            "env": [{"name": "EMPTY", "value": ""}],
                            "resources": {"requests": {"cpu": "0.25", "ephemeral-storage": "1e3"}},
                        }
                    ],
                },
            },
            "routerPodTemplate": {"spec": {"hostname": "router"}},
        },
    },
    "without-router": {"router": {"mode": "None"}},
    "suspended": {"suspend": True},
}


def service_of(name: str, namespace: str, spec: dict[str, Any], uid: str = "") -> Any:
    manifest = {
        "apiVersion": "kvern.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name, "namespace": namespace, **({"uid": uid} if uid else {})},
        "spec": {"model": {"uri": "builtin://tiny-kjv"}, **spec},
    }
    return manifest, parse_service(manifest)


@pytest.mark.parametrize("name", SPECS)
def test_the_api_server_takes_every_object_and_none_needs_a_second_write(crds: None, name: str) -> None:
    namespace = f"kvern-objects-{name}-{secrets.token_hex(3)}"
    head = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": RESTRICTED}}
    kubectl("apply", "-f", "-", stdin=json.dumps(head))
    kubectl("-n", namespace, "create", "quota", "none", "--hard=pods=0")  # objects alone: nothing is to start
    try:
        manifest, _ = service_of(name, namespace, SPECS[name])
        kubectl("-n", namespace, "apply", "-f", "-", stdin=json.dumps(manifest))
        live = json.loads(kubectl("-n", namespace, "get", "infs", name, "-o", "json"))
        _, service = service_of(name, namespace, live["spec"], live["metadata"]["uid"])
        plan = reconcile(service, Observed(), NOW, SETTINGS)
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(plan.apply)})
        said = kubectl("apply", "--server-side", "--field-manager=kvern", "-f", "-", stdin=text, check=False)
        assert said.count("serverside-applied") == len(plan.apply), said
        assert "would violate PodSecurity" not in said, said

        # The admin Secret is written once and never read.
        stored = tuple(_get(obj) for obj in plan.apply if obj["kind"] != "Secret")
        seen = Observed(children=stored, status=plan.status, admin_secret=True)
        again = reconcile(service, seen, NOW, SETTINGS)
        assert [meta.key(obj) for obj in again.apply] == []
        assert again.delete == ()
        assert [o["kind"] for o in again.dry_run if name != "suspended"] == []
        steady = reconcile(service, replace(seen, status=again.status), NOW, SETTINGS)
        assert steady.empty and steady.status == again.status

        status = json.dumps({**manifest, "status": again.status.to_dict()})
        kubectl("-n", namespace, "apply", "--server-side", "--subresource=status", "-f", "-", stdin=status)
        row = kubectl("-n", namespace, "get", "infs", name).splitlines()[1].split()
        ready = again.status.condition("Ready")
        assert ready is not None and ready.reason in row
        kept = json.loads(kubectl("-n", namespace, "get", "infs", name, "-o", "json"))["status"]
        assert kept == again.status.to_dict(), "the schema drops something of the status"
    finally:
        kubectl("delete", "namespace", namespace, "--wait=false", check=False)


def _get(obj: dict[str, Any]) -> dict[str, Any]:
    kind = f"{obj['kind']}.{obj['apiVersion'].rpartition('/')[0]}".rstrip(".")
    name, namespace = obj["metadata"]["name"], obj["metadata"]["namespace"]
    found: dict[str, Any] = json.loads(kubectl("-n", namespace, "get", kind, name, "-o", "json"))
    return found


def test_scale_reads_and_writes_replicas(crds: None) -> None:
    """What kubectl scale and an HPA use."""
    namespace = f"kvern-objects-scale-{secrets.token_hex(3)}"
    kubectl("create", "namespace", namespace)
    kubectl("-n", namespace, "create", "quota", "none", "--hard=pods=0")
    try:
        manifest, service = service_of("scaled", namespace, {"replicas": 2})
        kubectl("-n", namespace, "apply", "-f", "-", stdin=json.dumps(manifest))
        status = reconcile(service, Observed(), NOW, SETTINGS).status.to_dict()
        written = json.dumps({**manifest, "status": status})
        kubectl("-n", namespace, "apply", "--server-side", "--subresource=status", "-f", "-", stdin=written)
        kubectl("-n", namespace, "scale", "infs/scaled", "--replicas=5")
        path = f"/apis/kvern.dev/v1alpha1/namespaces/{namespace}/inferenceservices/scaled/scale"
        scale = json.loads(kubectl("get", "--raw", path))
        assert scale["spec"]["replicas"] == 5
        assert scale["status"]["selector"] == "kvern.dev/service=scaled,app.kubernetes.io/component=engine"
        columns = kubectl("-n", namespace, "get", "kvern").splitlines()[0].split()
        assert columns == ["NAME", "MODEL", "TP", "READY", "DESIRED", "GPUS", "REASON", "SCALING", "URL", "AGE"]
    finally:
        kubectl("delete", "namespace", namespace, "--wait=false", check=False)
