"""What the operator knows of the cluster without asking: what the watches brought, trimmed, with own writes on top.

Own writes are seen at once: a watch lags behind, and a second pass on old facts would, say, drain a second replica.

Objects are kept packed, in a sixth of the memory that they take as dicts, and unpacked for a pass: there are some
twenty a service, and a service at rest is looked at a few times an hour.

kopf's indexes are not used: each object that is listed at the start wakes up everybody who waits for all of them, which
with some thousand objects takes longer than a lease; and they keep for ever what was deleted while a watch was broken.
`verify.py` tells when everything listed is here, and finds what is here and no longer there.
"""

import marshal
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvern_operator.api.types import API_VERSION, KIND
from kvern_operator.desired import meta
from kvern_operator.observed import Object
from kvern_operator.queue import Clock, Key

# On a router's pod: the hash of the list of replicas that its kubelet was last made to mount.
REFRESHED = "kvern.dev/replicas"
LONGEST_LAG = 120.0  # seconds after which the watch is believed, whatever was written


def pack(obj: Object) -> bytes:
    """Plain values (what JSON has) in little space. It is never stored and never sent: only this process reads it."""
    return zlib.compress(marshal.dumps(obj), 1)


def unpack(packed: bytes) -> Object:
    """What was packed, as a copy of its own."""
    obj: Object = marshal.loads(zlib.decompress(packed))
    return obj


@dataclass(frozen=True, slots=True)
class Live:
    """One child as it is. `packed` is the object without managedFields."""

    kind: str
    name: str
    uid: str
    version: int  # resourceVersion: a number that grows with each change
    owners: frozenset[str]  # UIDs
    deleting: bool
    packed: bytes

    @property
    def obj(self) -> Object:
        """The object, unpacked anew at each call."""
        return unpack(self.packed)


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
        "spec": body.get("spec") or {},
    }
    if body.get("status"):
        document["status"] = body["status"]
    return document


_WITH_STATUS = ("StatefulSet", "Deployment", "PersistentVolumeClaim", "Job")


def trim_child(body: Mapping[str, Any]) -> Live:
    """A child without managedFields; a status only where it says something that is used."""
    metadata = {k: v for k, v in body["metadata"].items() if k != "managedFields"}
    kind = str(body["kind"])
    dropped = ("metadata",) if kind in _WITH_STATUS else ("metadata", "status")
    obj = {**{k: v for k, v in body.items() if k not in dropped}, "metadata": metadata}
    owners = frozenset(str(o["uid"]) for o in metadata.get("ownerReferences") or ())
    uid, deleting = str(metadata.get("uid", "")), bool(metadata.get("deletionTimestamp"))
    return Live(kind, str(metadata["name"]), uid, _version(metadata), owners, deleting, pack(obj))


_POD_METADATA = ("name", "namespace", "uid", "labels", "ownerReferences", "creationTimestamp", "deletionTimestamp")
_CONTAINER = ("name", "image", "ports", "resources")


def trim_pod(body: Mapping[str, Any]) -> Object:
    """What is read of a pod: who it is, its ports, its status."""
    spec, annotations = body.get("spec") or {}, body["metadata"].get("annotations") or {}
    metadata = {k: v for k, v in body["metadata"].items() if k in _POD_METADATA}
    if REFRESHED in annotations:
        metadata["annotations"] = {REFRESHED: annotations[REFRESHED]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {
            "nodeName": spec.get("nodeName"),
            "terminationGracePeriodSeconds": spec.get("terminationGracePeriodSeconds"),
            "initContainers": [_some(c, _CONTAINER) for c in spec.get("initContainers") or ()],
            "containers": [_some(c, _CONTAINER) for c in spec.get("containers") or ()],
        },
        "status": body.get("status") or {},
    }


def _some(value: Mapping[str, Any], names: tuple[str, ...]) -> Object:
    return {k: value[k] for k in names if k in value}


@dataclass(frozen=True, slots=True)
class _Service:
    """The resource as it was at some version."""

    uid: str
    version: int
    packed: bytes


def _pack_service(body: Mapping[str, Any]) -> _Service:
    metadata = body["metadata"]
    return _Service(str(metadata["uid"]), _version(metadata), pack(trim_service(body)))


@dataclass(frozen=True)
class _Write:
    """`live` None: deleted."""

    live: Live | None
    uid: str
    at: float


class Mirror:
    """Objects by service and UID. Keys are (namespace, name of the service)."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._services: dict[Key, dict[str, _Service]] = {}
        self._children: dict[Key, dict[str, Live]] = {}
        self._pods: dict[Key, dict[str, bytes]] = {}
        self._kinds: dict[str, dict[str, Key]] = {}  # kind -> UID -> service
        self._writes: dict[Key, dict[tuple[str, str], _Write]] = {}
        self._statuses: dict[Key, _Service] = {}

    # ------------------------------------------------------------ what the watches bring

    def put(self, kind: str, body: Mapping[str, Any]) -> Key | None:
        """Keep an object as it now is. Returns the service it belongs to; None: to none."""
        metadata = body["metadata"]
        key = (metadata["namespace"], metadata["name"]) if kind == KIND else service_of(metadata)
        if key is None:
            return None
        uid = str(metadata["uid"])
        if kind == KIND:
            self._services.setdefault(key, {})[uid] = _pack_service(body)
        elif kind == "Pod":
            self._pods.setdefault(key, {})[uid] = pack(trim_pod(body))
        else:
            self._children.setdefault(key, {})[uid] = trim_child({**body, "kind": kind})
        self._kinds.setdefault(kind, {})[uid] = key
        return key

    def remove(self, kind: str, uid: str) -> Key | None:
        """An object is gone. Returns the service it belonged to, if it was known."""
        key = self._kinds.get(kind, {}).pop(uid, None)
        if key is None:
            return None
        shelves: dict[str, dict[Key, dict[str, Any]]] = {KIND: self._services, "Pod": self._pods}
        held = shelves.get(kind, self._children)
        held[key].pop(uid, None)
        if not held[key]:
            del held[key]
        writes = self._writes.get(key, {})
        for name in [n for n, w in writes.items() if w.uid == uid]:
            del writes[name]
        return key

    def uids(self, kind: str) -> set[str]:
        """Everything of a kind (Pod, a child's kind, the resource's) that is here."""
        return set(self._kinds.get(kind, ()))

    # ------------------------------------------------------------ what reconcile sees

    def keys(self) -> list[Key]:
        """All services."""
        return list(self._services)

    def orphans(self) -> list[Key]:
        """Services that are gone while pods of theirs are still there."""
        return [key for key in self._pods if key not in self._services]

    def service(self, key: Key) -> Object | None:
        """The resource; None where there is none."""
        found = max(self._services.get(key, {}).values(), key=lambda s: s.version, default=None)
        written = self._statuses.get(key)
        if written is not None and (found is None or written.uid != found.uid or written.version <= found.version):
            del self._statuses[key]
            written = None
        newest = written or found
        return None if newest is None else unpack(newest.packed)

    def children(self, key: Key) -> list[Live]:
        """Everything that is labelled with the service, whoever owns it and also while it is being deleted."""
        found = {(c.kind, c.name): c for c in self._children.get(key, {}).values()}
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
            elif seen is not None and seen.version >= write.live.version:
                del writes[name]
            else:
                found[name] = write.live
        return list(found.values())

    def pods(self, key: Key) -> list[Object]:
        """All pods that are labelled with the service."""
        return [unpack(packed) for packed in self._pods.get(key, {}).values()]

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
        self._statuses[key] = _pack_service(answer)

    def forget(self, key: Key) -> None:
        """The service is gone."""
        self._writes.pop(key, None)
        self._statuses.pop(key, None)
