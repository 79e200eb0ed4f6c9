"""Names, labels, annotations, hashes and owner references of a service's children. Pure."""

import hashlib
import hmac
import json
from collections.abc import Iterable
from typing import Any

from kvern_operator.api.base import parse_quantity
from kvern_operator.api.types import API_VERSION, KIND, InferenceService
from kvern_operator.observed import Object

MANAGER = "kvern"
SERVICE_LABEL = "kvern.dev/service"
REPLICA_LABEL = "kvern.dev/replica"
REVISION_LABEL = "kvern.dev/revision"
COMPONENT_LABEL = "app.kubernetes.io/component"
POD_INDEX_LABEL = "apps.kubernetes.io/pod-index"  # the StatefulSet controller puts it on its pods
APPLIED_HASH = "kvern.dev/applied-hash"
# The object as Kvern applied it: the API server adds defaults to what it stores, and templates must not be rebuilt.
APPLIED = "kvern.dev/applied"
DRAINING_SINCE = "kvern.dev/draining-since"
LAYOUT = "kvern.dev/layout"
GPUS = "kvern.dev/gpus"
GPU = "nvidia.com/gpu"  # the resource that a device plugin gives

ENGINE, ROUTER, FETCH = "engine", "router", "fetch"

API_VERSIONS = {
    "Secret": "v1",
    "ServiceAccount": "v1",
    "ConfigMap": "v1",
    "Service": "v1",
    "PersistentVolumeClaim": "v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "PodDisruptionBudget": "policy/v1",
    "PodMonitor": "monitoring.coreos.com/v1",
    "Job": "batch/v1",
    "StatefulSet": "apps/v1",
    "Deployment": "apps/v1",
}
# Order of creation: what pods mount first, pods last.
KINDS = tuple(API_VERSIONS)
FROZEN = ("Job", "StatefulSet", "Deployment")  # kinds with a pod template that is kept while its revision lasts


def replica_name(service: str, index: int) -> str:
    """smollm2-r0: the StatefulSet of one replica."""
    return f"{service}-r{index}"


def leads(pod_name: str) -> bool:
    """Whether an engine pod answers for its replica: of several, the first one."""
    return pod_name.endswith("-0")


def leader_name(replica: str) -> str:
    """The pod that answers for a replica."""
    return f"{replica}-0"


def replica_index(service: str, name: str) -> int | None:
    """The number in a replica's name; None where the name is not one of this service's replicas."""
    prefix, _, number = name.rpartition("-r")
    return int(number) if prefix == service and number.isdigit() else None


def labels(service: InferenceService, component: str | None = None) -> dict[str, str]:
    """The labels that every child carries."""
    found = {
        "app.kubernetes.io/name": "kvern",
        "app.kubernetes.io/instance": service.metadata.name,
        "app.kubernetes.io/managed-by": MANAGER,
        SERVICE_LABEL: service.metadata.name,
    }
    return {**found, COMPONENT_LABEL: component} if component else found


def selector(service: InferenceService, component: str) -> dict[str, str]:
    """Labels that select the pods of a component."""
    return {SERVICE_LABEL: service.metadata.name, COMPONENT_LABEL: component}


def child(service: InferenceService, kind: str, name: str, component: str | None = None, **body: Any) -> Object:
    """A child object: type, name, namespace, labels, owner, and whatever `body` holds."""
    annotations = body.pop("annotations", {})
    more_labels = body.pop("more_labels", {})
    metadata: Object = {
        "name": name,
        "namespace": service.metadata.namespace,
        "labels": {**labels(service, component), **more_labels},
        "ownerReferences": [
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": service.metadata.name,
                "uid": service.metadata.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }
    if annotations:
        metadata["annotations"] = dict(annotations)
    return {"apiVersion": API_VERSIONS[kind], "kind": kind, "metadata": metadata, **body}


def key(obj: Object) -> tuple[str, str]:
    """(kind, name): what tells the children of one service apart."""
    return obj["kind"], obj["metadata"]["name"]


def annotation(obj: Object, name: str) -> str:
    """An annotation, "" where there is none."""
    return str(obj["metadata"].get("annotations", {}).get(name, ""))


def with_annotations(obj: Object, **changes: str | None) -> Object:
    """A copy with annotations set, or removed where the value is None."""
    annotations = {**obj["metadata"].get("annotations", {}), **changes}
    kept = {name: value for name, value in annotations.items() if value is not None}
    return {**obj, "metadata": {**obj["metadata"], "annotations": kept}}


def digest(value: Any, length: int = 10) -> str:
    """A short stable hash of JSON-ready values."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def account_name(service: InferenceService) -> str:
    """The ServiceAccount that the service's pods run as."""
    return f"{service.metadata.name}-pods"


def admin_secret_name(service: InferenceService) -> str:
    """The Secret with the token of the admin ports. Its name follows the UID: a service that is made again under the
    same name does not meet the Secret of the one before, which nobody may read."""
    return f"{service.metadata.name}-admin-{digest(service.metadata.uid, 6)}"


def stamped(obj: Object) -> Object:
    """With the hash of what Kvern owns in it, so that a removed key is seen as a difference as well; with a copy of
    it, where a later pass is to keep it as it is (see `as_applied`)."""
    bare = with_annotations(obj, **{APPLIED_HASH: None, APPLIED: None})
    copy = json.dumps(bare, sort_keys=True, separators=(",", ":")) if bare["kind"] in FROZEN else None
    return with_annotations(bare, **{APPLIED_HASH: digest(bare, 16), APPLIED: copy})


def as_applied(live: Object) -> Object:
    """What Kvern last applied of a stamped object, without the stamps and without what the API server has added."""
    text = annotation(live, APPLIED)
    try:
        found = json.loads(text) if text else None
    except ValueError:  # somebody has edited it
        found = None
    return found if isinstance(found, dict) else with_annotations(live, **{APPLIED_HASH: None, APPLIED: None})


def differs(wanted: Object, live: Object | None) -> bool:
    """True where `live` lacks something of `wanted` (which is stamped); what others added does not count."""
    if live is None or wanted == live:
        return live is None
    return annotation(wanted, APPLIED_HASH) != annotation(live, APPLIED_HASH) or not _within(wanted, live)


_NOT_STORED: tuple[Any, ...] = (None, "", {}, [])  # the API server leaves such values out of what it stores


def _within(wanted: Any, live: Any) -> bool:
    if isinstance(wanted, dict):
        return isinstance(live, dict) and all(
            _within(v, live[k]) if k in live else v in _NOT_STORED for k, v in wanted.items()
        )
    if isinstance(wanted, list):
        same = isinstance(live, list) and len(wanted) == len(live)
        return same and all(_within(a, b) for a, b in zip(wanted, live, strict=True))
    return bool(wanted == live) or _same_quantity(wanted, live)


def _same_quantity(a: Any, b: Any) -> bool:
    """The API server writes 0.5 back as 500m and 1024Mi as 1Gi."""
    try:
        return not {type(a), type(b)} - {str, int} and parse_quantity(a) == parse_quantity(b)
    except ValueError:
        return False


def admin_token(operator_key: bytes, service: InferenceService) -> str:
    """The bearer token of the service's admin ports."""
    return hmac.new(operator_key, service.metadata.uid.encode(), hashlib.sha256).hexdigest()


def in_creation_order(objects: Iterable[Object]) -> list[Object]:
    """Configuration before the pods that mount it."""
    return sorted(objects, key=lambda o: (KINDS.index(o["kind"]), o["metadata"]["name"]))
