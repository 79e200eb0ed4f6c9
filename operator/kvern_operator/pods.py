"""A Pod object of the API server -> what reconcile sees of it. Pure.

What only the pod itself knows (its load, its layout, its device) is added by whoever asks it (see observe.py).
"""

import json
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Literal

from kvern_operator.api.base import parse_time
from kvern_operator.desired import meta
from kvern_operator.desired.engine import ADMIN_PORT, HTTP_PORT
from kvern_operator.loglines import telling_line
from kvern_operator.observed import MODEL_SHAPE, Fetch, Object, Pod
from kvern_operator.trouble import restarts, trouble

EPOCH = datetime.fromisoformat("1970-01-01T00:00:00+00:00")
MOMENT = timedelta(seconds=5)


def read_pod(obj: Object) -> Pod:
    """A v1 Pod that carries Kvern's labels. Never raises: what is missing or malformed counts as not known."""
    metadata, status = obj.get("metadata") or {}, obj.get("status") or {}
    labels = metadata.get("labels") or {}
    component = str(labels.get(meta.COMPONENT_LABEL, ""))
    main = _main_container(obj, component)
    running = (main.get("state") or {}).get("running")
    over = status.get("phase") in ("Failed", "Succeeded")
    found = trouble(obj)
    ip, name = str(status.get("podIP") or ""), str(metadata.get("name", ""))
    return Pod(
        name=name,
        uid=str(metadata.get("uid", "")),
        owner=_owner(labels, component),
        component=component,
        created=_time(metadata.get("creationTimestamp")) or EPOCH,
        revision=str(labels.get(meta.REVISION_LABEL, "")),
        running=running is not None and not over,
        ready=_condition(status, "Ready").get("status") == "True",
        # The startup probe asks /ready: `started` says that it has been ready since the container last started.
        served=bool(running is not None and main.get("started")) and not over and component != meta.FETCH,
        terminating=metadata.get("deletionTimestamp") is not None,
        ends=_time(metadata.get("deletionTimestamp")),
        address=_address(ip, HTTP_PORT),
        admin_address=_address(ip, ADMIN_PORT) if _has_admin_port(component, name) else "",
        restarts=restarts(obj),
        reason=found.reason if found else "",
        message=found.message if found else "",
        exit_code=found.exit_code if found else None,
        last_log=telling_line(found.log_tail) if found and found.log_tail else "",
        fetch=_summary(main) if component == meta.FETCH else None,
        stage=_stage(status, running is not None or over or found is not None),
        scheduled=_since(status, "PodScheduled"),
        started=_time((running or {}).get("startedAt")),
        ready_since=_since(status, "Ready"),
        unready_since=_unready_since(status),
    )


def _has_admin_port(component: str, name: str) -> bool:
    return component == meta.FETCH or (component == meta.ENGINE and meta.leads(name))


def read_fetch(answer: Any) -> Fetch | None:
    """What a download says of itself (GET /admin/fetch, or its last words); None where that is none."""
    if not isinstance(answer, dict):
        return None
    done, total = answer.get("bytes"), answer.get("total")
    if not isinstance(done, int) or not isinstance(total, int):
        return None
    return Fetch(max(done, 0), max(total, 0), str(answer.get("text") or "")[:300], _shape(answer.get("shape")))


def _shape(said: Any) -> tuple[tuple[str, int], ...]:
    """The model's shape; nothing where not all of it is said in numbers that a model can have."""
    if not isinstance(said, dict):
        return ()
    numbers = [n for n in map(said.get, MODEL_SHAPE) if type(n) is int and 0 < n < 2**31]
    return tuple(zip(MODEL_SHAPE, numbers, strict=True)) if len(numbers) == len(MODEL_SHAPE) else ()


def _summary(container: Mapping[str, Any]) -> Fetch | None:
    """The last words of a download that has ended well."""
    ended = (container.get("state") or {}).get("terminated") or {}
    if ended.get("exitCode") != 0:
        return None
    try:
        return read_fetch(json.loads(ended.get("message") or ""))
    except ValueError:
        return None


def _main_container(obj: Object, component: str) -> Mapping[str, Any]:
    """The status of the container that serves: overrides may add others beside it."""
    found = (obj.get("status") or {}).get("containerStatuses") or ()
    return next((c for c in found if c.get("name") == component), {})


def _owner(labels: Mapping[str, str], component: str) -> str:
    """A router's pods belong to a ReplicaSet; the Deployment is found by the label of the service."""
    if component == meta.ROUTER:
        return f"{labels.get(meta.SERVICE_LABEL, '')}-router"
    if component == meta.FETCH:
        return str(labels.get("batch.kubernetes.io/job-name", ""))
    return str(labels.get(meta.REPLICA_LABEL, ""))


def _condition(status: Mapping[str, Any], type_: str) -> Mapping[str, Any]:
    return next((c for c in status.get("conditions") or () if c.get("type") == type_), {})


def _since(status: Mapping[str, Any], type_: str) -> datetime | None:
    found = _condition(status, type_)
    return _time(found.get("lastTransitionTime")) if found.get("status") == "True" else None


def _unready_since(status: Mapping[str, Any]) -> datetime | None:
    """When a pod that is not ready ceased to be. A kubelet that takes a pod on notes that it is not ready in the same
    moment (startTime): where that is noted later, it has been ready in between."""
    found, taken_on = _condition(status, "Ready"), _time(status.get("startTime"))
    since = _time(found.get("lastTransitionTime")) if found.get("status") != "True" else None
    return since if since and taken_on and since - taken_on > MOMENT else None


def _stage(status: Mapping[str, Any], past: bool) -> Literal["", "scheduling", "creating"]:
    if past:
        return ""
    return "creating" if _condition(status, "PodScheduled").get("status") == "True" else "scheduling"


def _time(value: Any) -> datetime | None:
    try:
        return parse_time(value)
    except ValueError:
        return None


def _address(ip: str, port: int) -> str:
    if not ip:
        return ""
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
