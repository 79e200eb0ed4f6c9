"""What the operator knows of the cluster without asking: kopf's indexes of trimmed objects, corrected in two ways.

Own writes are seen at once: an index lags behind by a watch event, and a second pass on old facts would, say, drain a
second replica. And ghosts are left out: after a break a watch starts with a new list, and kopf then keeps what was
deleted in between for ever; `verify.py` finds those.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvern_operator.api.types import API_VERSION, KIND
from kvern_operator.desired import meta
from kvern_operator.observed import Object
from kvern_operator.queue import Clock, Key

Index = Mapping[Any, Iterable[Any]]

LONGEST_LAG = 120.0  # seconds after which the index is believed, whatever was written


@dataclass(frozen=True)
class Live:
    """One child as it is. `obj` is without managedFields."""

    kind: str
    name: str
    uid: str
    version: int  # resourceVersion: a number that grows with each change
    owners: frozenset[str]  # UIDs
    deleting: bool
    obj: Object


def _version(metadata: Mapping[str, Any]) -> int:
    text = str(metadata.get("resourceVersion") or "")
    return int(text) if text.isdigit() else 0


def service_of(metadata: Mapping[str, Any]) -> Key | None:
    """The service that a child or pod is labelled with."""
    name = (metadata.get("labels") or {}).get(meta.SERVICE_LABEL)
    return (metadata["namespace"], name) if name else None


def trim_service(body: Mapping[str, Any]) -> Object:
    """The resource without managedFields and what kubectl keeps in annotations."""
    kept = {k: v for k, v in body["metadata"].items() if k not in ("managedFields", "annotations", "finalizers")}
    annotations = dict(body["metadata"].get("annotations") or {})
    annotations.pop("kubectl.kubernetes.io/last-applied-configuration", None)
    document: Object = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {**kept, "annotations": annotations},
        "spec": _plain(body.get("spec") or {}),
    }
    if body.get("status"):
        document["status"] = _plain(body["status"])
    return document


def trim_child(body: Mapping[str, Any]) -> Live:
    """A child without managedFields; a status only where it says something that is used."""
    metadata = {k: _plain(v) for k, v in body["metadata"].items() if k != "managedFields"}
    kind = str(body["kind"])
    dropped = (
        ("metadata", "status") if kind not in ("StatefulSet", "Deployment", "PersistentVolumeClaim") else ("metadata",)
    )
    obj = {**{k: _plain(v) for k, v in body.items() if k not in dropped}, "metadata": metadata}
    owners = frozenset(str(o["uid"]) for o in metadata.get("ownerReferences") or ())
    uid, deleting = str(metadata.get("uid", "")), bool(metadata.get("deletionTimestamp"))
    return Live(kind, str(metadata["name"]), uid, _version(metadata), owners, deleting, obj)


_POD_METADATA = ("name", "namespace", "uid", "labels", "ownerReferences", "creationTimestamp", "deletionTimestamp")
_CONTAINER = ("name", "image", "ports", "resources")


def trim_pod(body: Mapping[str, Any]) -> Object:
    """What is read of a pod: who it is, its ports, its status."""
    spec = body.get("spec") or {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {k: _plain(v) for k, v in body["metadata"].items() if k in _POD_METADATA},
        "spec": {
            "nodeName": spec.get("nodeName"),
            "terminationGracePeriodSeconds": spec.get("terminationGracePeriodSeconds"),
            "initContainers": [_some(c, _CONTAINER) for c in spec.get("initContainers") or ()],
            "containers": [_some(c, _CONTAINER) for c in spec.get("containers") or ()],
        },
        "status": _plain(body.get("status") or {}),
    }


def _some(value: Mapping[str, Any], names: tuple[str, ...]) -> Object:
    return {k: _plain(value[k]) for k in names if k in value}


def _plain(value: Any) -> Any:
    """Plain dicts and lists, of kopf's views as well."""
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class _Write:
    """`live` None: deleted."""

    live: Live | None
    uid: str
    at: float


class Mirror:
    """The indexes with own writes on top. Keys are (namespace, name of the service)."""

    def __init__(self, services: Index, children: Index, pods: Index, clock: Clock = time.monotonic) -> None:
        self._services, self._children, self._pods, self._clock = services, children, pods, clock
        self._writes: dict[Key, dict[tuple[str, str], _Write]] = {}
        self._statuses: dict[Key, Object] = {}
        self._ghosts: set[str] = set()

    def keys(self) -> Iterator[Key]:
        """All services."""
        return (key for key in list(self._services) if self.service(key) is not None)

    def service(self, key: Key) -> Object | None:
        """The resource; None where there is none."""
        found: Object | None = None
        for document in self._services.get(key) or ():
            if document["metadata"]["uid"] not in self._ghosts and (
                found is None or _version(document["metadata"]) > _version(found["metadata"])
            ):
                found = document
        written = self._statuses.get(key)
        if found is None or written is None or written["metadata"]["uid"] != found["metadata"]["uid"]:
            self._statuses.pop(key, None)
            return found
        if _version(found["metadata"]) >= _version(written["metadata"]):
            del self._statuses[key]
            return found
        return written

    def children(self, key: Key) -> list[Live]:
        """Everything that is labelled with the service, whoever owns it and also while it is being deleted."""
        found = {(c.kind, c.name): c for c in self._children.get(key) or () if c.uid not in self._ghosts}
        writes = self._writes.get(key, {})
        for name, write in list(writes.items()):
            seen = found.get(name)
            if self._clock() - write.at > LONGEST_LAG:
                del writes[name]
            elif write.live is None:
                if seen is not None and seen.uid == write.uid:
                    del found[name]
                else:
                    del writes[name]
            elif seen is not None and (seen.version >= write.live.version):
                del writes[name]
            else:
                found[name] = write.live
        return list(found.values())

    def pods(self, key: Key) -> list[Object]:
        """All pods that are labelled with the service."""
        return [p for p in self._pods.get(key) or () if p["metadata"]["uid"] not in self._ghosts]

    # ------------------------------------------------------------ own writes

    def applied(self, key: Key, answer: Object) -> Live:
        """Take over what the API server answered to an apply."""
        live = trim_child(answer)
        self._writes.setdefault(key, {})[live.kind, live.name] = _Write(live, live.uid, self._clock())
        return live

    def deleted(self, key: Key, live: Live) -> None:
        """A child was told to go."""
        self._writes.setdefault(key, {})[live.kind, live.name] = _Write(None, live.uid, self._clock())

    def status_written(self, key: Key, answer: Object) -> None:
        """Take over what the API server answered to a status."""
        self._statuses[key] = trim_service(answer)

    # ------------------------------------------------------------ what is gone

    def saw_deleted(self, key: Key, uid: str) -> None:
        """The watch has said that an object is gone."""
        self._ghosts.discard(uid)
        writes = self._writes.get(key, {})
        for name in [n for n, w in writes.items() if w.uid == uid]:
            del writes[name]

    def forget(self, key: Key) -> None:
        """The service is gone."""
        self._writes.pop(key, None)
        self._statuses.pop(key, None)

    def uids(self, kind: str) -> dict[str, Key]:
        """UID -> service of everything of a kind (Pod, a child's kind, the resource's) that the indexes hold."""
        if kind == KIND:
            return {d["metadata"]["uid"]: key for key in list(self._services) for d in self._services[key]}
        if kind == "Pod":
            return {p["metadata"]["uid"]: key for key in list(self._pods) for p in self._pods[key]}
        return {c.uid: key for key in list(self._children) for c in self._children[key] if c.kind == kind}

    def bury(self, uids: Iterable[str]) -> None:
        """Leave these out from now on: they are gone, though no watch has said so."""
        self._ghosts.update(uids)
