"""Objects as the API server gives them, for tests of `kvern status`, `logs` and `explain`: one function a state."""

from datetime import UTC, datetime, timedelta
from typing import Any

NOW = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)

Object = dict[str, Any]


def ago(seconds: float) -> str:
    """A time before NOW, as the API server writes it."""
    return (NOW - timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def condition(type_: str, status: str, reason: str, message: str = "", seconds: float = 60) -> Object:
    return {
        "type": type_,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": ago(seconds),
        "observedGeneration": 1,
    }


def service(*conditions: Object, spec: Object | None = None, created: float = 300, **status: Any) -> Object:
    """An InferenceService with the API server's defaults. Keyword arguments go into its status."""
    whole = {
        "model": {"uri": "builtin://smollm2-135m"},
        "replicas": 1,
        "resources": {"gpusPerPod": 0, "nodesPerReplica": 1},
        "autoscaling": {"mode": "Off"},
        "rollout": {"drainTimeoutSeconds": 300},
        "router": {"mode": "Embedded", "replicas": 2},
        "suspend": False,
        **(spec or {}),
    }
    replicas = whole["replicas"]
    found = {
        "observedGeneration": 1,
        "replicas": replicas,
        "readyReplicas": 0,
        "desiredReplicas": replicas,
        "url": "http://smol.team-a.svc.cluster.local/v1",
        "model": "smollm2-135m",
        "parallelism": {"target": 1},
        "capacity": {"gpus": 0},
        "autoscaling": {
            "lastDecision": {
                "time": ago(240),
                "from": 0,
                "to": replicas,
                "reason": f"spec.replicas is {replicas}",
                "inputs": {},
            }
        },
        "revision": {"updated": "rev1"},
        "conditions": list(conditions),
        **status,
    }
    return {
        "apiVersion": "kvern.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {
            "name": "smol",
            "namespace": "team-a",
            "uid": "u-1",
            "generation": 1,
            "creationTimestamp": ago(created),
        },
        "spec": whole,
        "status": found if conditions else {},
    }


def pod(name: str, status: Object, *, node: str = "node-1", created: float = 240, component: str = "engine") -> Object:
    """A pod of the service smol; `name` is smol-r0-0 or smol-router-5d8-x."""
    owner = name.rpartition("-")[0] if component == "engine" else ""
    labels = {"kvern.dev/service": "smol", "app.kubernetes.io/component": component, "kvern.dev/revision": "rev1"}
    if owner:
        labels["kvern.dev/replica"] = owner
    status = {**status, "containerStatuses": [{**c, "name": component} for c in status.get("containerStatuses", ())]}
    spec: Object = {
        "containers": [{"name": component, "startupProbe": {"periodSeconds": 2, "failureThreshold": 62}}],
        "terminationGracePeriodSeconds": 330,
    }
    if node:
        spec["nodeName"] = node
    metadata = {"name": name, "namespace": "team-a", "uid": f"uid-{name}", "labels": labels}
    return {"metadata": {**metadata, "creationTimestamp": ago(created)}, "spec": spec, "status": status}


def _status(phase: str, ready: bool, container: Object) -> Object:
    return {
        "phase": phase,
        "conditions": [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": str(ready)}],
        "containerStatuses": [{"name": "engine", "ready": ready, "restartCount": 0, **container}],
    }


def running(ready: bool = True, seconds: float = 200, restarts: int = 0) -> Object:
    state = {"running": {"startedAt": ago(seconds)}}
    return _status("Running", ready, {"started": ready, "state": state, "restartCount": restarts})


def waiting(reason: str, message: str = "") -> Object:
    return _status("Pending", False, {"state": {"waiting": {"reason": reason, "message": message}}})


def unschedulable(message: str) -> Object:
    found = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"phase": "Pending", "conditions": [found]}


def crashed(code: int, restarts: int, log: str = "", reason: str = "Error", state: Object | None = None) -> Object:
    """Waits for the kubelet's back-off after `restarts` restarts; `state` instead: what it does now."""
    ended = {"exitCode": code, "reason": reason, "message": log, "finishedAt": ago(20)}
    back_off = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s restarting failed container=engine"}}
    container = {"state": state or back_off, "lastState": {"terminated": ended}, "restartCount": restarts}
    return _status("Running", False, {**container, "started": False})


def replica(name: str, existing: int = 1, draining: float | None = None, revision: str = "rev1") -> Object:
    annotations = {"kvern.dev/layout": "tp1pp1dp1"}
    if draining is not None:
        annotations["kvern.dev/draining-since"] = ago(draining)
    return {
        "kind": "StatefulSet",
        "metadata": {"name": name, "labels": {"kvern.dev/revision": revision}, "annotations": annotations},
        "spec": {"replicas": 1},
        "status": {"replicas": existing},
    }


def routers(wanted: int = 2, existing: int = 2) -> Object:
    return {
        "kind": "Deployment",
        "metadata": {"name": "smol-router"},
        "spec": {"replicas": wanted},
        "status": {"replicas": existing},
    }


def router_pods(ready: int = 2) -> list[Object]:
    return [
        pod(f"smol-router-5d8-{i}", running(ready=i < ready), component="router", node=f"node-{i + 1}")
        for i in range(2)
    ]


def event(kind: str, name: str, reason: str, message: str, seconds: float = 30, type_: str = "Warning") -> Object:
    return {
        "metadata": {"name": f"{name}.{reason}", "uid": f"{name}-{reason}-{seconds}"},
        "involvedObject": {"kind": kind, "name": name},
        "reason": reason,
        "message": message,
        "type": type_,
        "lastTimestamp": ago(seconds),
        "count": 3,
    }


def lease(renewed: float, holder: str = "kvern-operator-7c9-abc_1234") -> Object:
    stamp = (NOW - timedelta(seconds=renewed)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return {"spec": {"holderIdentity": holder, "leaseDurationSeconds": 15, "renewTime": stamp}}
