"""Carries a plan out: server-side apply, telling pods, deleting. Order and fencing; nothing is decided here.

Everything may be cut off at any point and done again: applies name their whole object, deletes name a UID, and a pod is
told by what it says of itself, not by what it was told before.
"""

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

from kvern_operator.admin import Prober
from kvern_operator.api.status import InferenceServiceStatus
from kvern_operator.api.types import API_VERSION, KIND
from kvern_operator.desired import meta
from kvern_operator.kube import PLURALS, ApiError, KubeClient, collection
from kvern_operator.mirror import REFRESHED, Live, Mirror
from kvern_operator.observe import Refresh, Scene
from kvern_operator.observed import Object, Refusal
from kvern_operator.queue import Key
from kvern_operator.reconcile import Plan

log = logging.getLogger("kvern.apply")

WORKLOADS = ("Job", "StatefulSet", "Deployment")
# Decisions that a stale view must not undo: who drains, and whom routers send to.
DECISIONS = ("StatefulSet", "ConfigMap")
NOT_OURS = (
    "one of that name is there already that Kvern has not made for this service; delete it, or give the "
    "InferenceService another name"
)
STILL_THERE = "one of that name is still there, of an earlier service or on its way out; it has to go first"
NAME_TAKEN = 5.0  # seconds after which a name that another object holds is tried again; its deletion is an event anyway


class NamespaceEndingError(Exception):
    """The namespace is being deleted: nothing can be made in it, and everything in it goes by itself."""


@dataclass
class Outcome:
    """`refusals`: what the API server does not take. `taken`: what waits for an object of that name to go."""

    refusals: list[Refusal] = field(default_factory=list)
    taken: list[Refusal] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Everything has been done."""
        return not (self.refusals or self.taken)


class Executor:
    """Writes. Remembers what the API server cannot be asked about: which services have their admin Secret."""

    def __init__(self, client: KubeClient, mirror: Mirror, prober: Prober) -> None:
        self._client, self._mirror, self._prober = client, mirror, prober
        self._secrets: dict[str, bool] = {}  # UID of a service -> made, or to be made again
        self._refreshed: dict[Key, dict[str, str]] = {}  # UID of a pod -> digest
        self._idle: dict[tuple[Key, str, str], tuple[str, int]] = {}

    def has_secret(self, uid: str, has_replicas: bool) -> bool:
        """Whether the admin Secret of the service is there. It is made before the first replica is: where there is a
        replica a restarted operator need not ask."""
        return self._secrets.get(uid, has_replicas)

    def doubt_secret(self, uid: str) -> None:
        """A pod waits for it: make it again if it is gone."""
        self._secrets[uid] = False

    def forget(self, key: Key, uid: str) -> None:
        """The service is gone."""
        self._secrets.pop(uid, None)
        self._refreshed.pop(key, None)
        self._idle = {name: seen for name, seen in self._idle.items() if name[0] != key}

    async def dry_run(self, objects: tuple[Object, ...]) -> list[Refusal]:
        """Ask the API server what it would say. Raises ApiError where it says nothing."""
        refusals = []
        for obj in objects:
            try:
                await self._client.apply(obj, dry_run=True)
            except ApiError as error:
                if not error.refused:
                    raise
                refusals.append(_refusal(obj, error, with_revision=True))
        return refusals

    async def carry_out(self, key: Key, uid: str, plan: Plan, scene: Scene) -> Outcome:
        """All of a plan but its status. Raises ApiError where the API server is away or somebody else was first."""
        outcome = Outcome()
        await self._apply_all(key, uid, [obj for obj in plan.apply if obj["kind"] not in WORKLOADS], scene, outcome)
        if not outcome.refusals:  # else its pods would wait for what could not be made
            await self._apply_all(key, uid, [obj for obj in plan.apply if obj["kind"] in WORKLOADS], scene, outcome)
        pods = {p.name: p.uid for p in scene.observed.pods if not p.terminating}
        tell = [(name, False) for name in plan.resume] + [(name, True) for name in plan.drain]
        await asyncio.gather(
            *(self._prober.tell(key, pods[name], draining=draining) for name, draining in tell if name in pods),
            *(self._prober.switch(key, pods[name], size) for name, size in plan.switch if name in pods),
        )
        if not any(obj["kind"] == "ConfigMap" for obj in plan.apply):
            # A kubelet that hears of the pod before it hears of the ConfigMap mounts the old one: so this comes a pass
            # later, when our own watch has brought the ConfigMap.
            await asyncio.gather(*(self._refresh(key, refresh) for refresh in scene.refresh))
        for kind, name in plan.delete:
            live = scene.live.get((kind, name))
            if live is not None:
                # A replica that was taken back since is another version of it: not deleted, looked at again.
                version = str(live.version) if kind == "StatefulSet" else ""
                await self._client.delete(kind, key[0], name, live.uid, version)
                self._mirror.deleted(key, live)
        return outcome

    async def _apply_all(self, key: Key, uid: str, objects: list[Object], scene: Scene, outcome: Outcome) -> None:
        """At once: a service has a dozen objects, and what each of them takes is the API server's time, not ours."""
        free = []
        for obj in objects:
            if meta.key(obj) in scene.taken:
                outcome.taken.append(Refusal(obj["kind"], "", STILL_THERE, obj["metadata"]["name"]))
            else:
                free.append(obj)
        applies = (self._apply(key, uid, obj, scene.live.get(meta.key(obj))) for obj in free)
        # All of them end before the first failure is told: none goes on behind the back of the next pass.
        for end in await asyncio.gather(*applies, return_exceptions=True):
            if isinstance(end, BaseException):
                raise end
            if end is not None:
                outcome.refusals.append(end)

    async def _refresh(self, key: Key, refresh: Refresh) -> None:
        """Make a pod's kubelet mount its ConfigMaps anew. Where that fails it does so by itself within a minute."""
        told = self._refreshed.setdefault(key, {})
        if told.get(refresh.uid) == refresh.digest:
            return
        told[refresh.uid] = refresh.digest
        try:
            await self._client.annotate_pod(key[0], refresh.name, refresh.uid, {REFRESHED: refresh.digest})
        except ApiError as error:
            if error.status not in (404, 409):
                log.warning("pod %s/%s hears of its replicas late: %s", key[0], refresh.name, error)

    async def _apply(self, key: Key, uid: str, obj: Object, live: Live | None) -> Refusal | None:
        """One object. Returns what is against it; raises ApiError where the API server is away."""
        try:
            if obj["kind"] == "Secret":
                await self._create_secret(uid, obj)
                return None
            return await self._apply_child(key, uid, obj, live)
        except ApiError as error:
            if error.status in (403, 404) and "being terminated" in error.message:
                raise NamespaceEndingError(error.message) from None
            if not error.refused:
                raise
            log.warning("%s %s/%s: %s", obj["kind"], key[0], obj["metadata"]["name"], error)
            return _refusal(obj, error, with_revision=False)

    async def _apply_child(self, key: Key, uid: str, obj: Object, live: Live | None) -> Refusal | None:
        name = (key, *meta.key(obj))
        digest = meta.annotation(obj, meta.APPLIED_HASH)
        if live is not None and self._idle.get(name) == (digest, live.version):
            return None  # the same apply has changed nothing before: the API server writes some values in its own way
        if live is None and await self._is_somebody_elses(obj, uid):
            return Refusal(obj["kind"], "", NOT_OURS, obj["metadata"]["name"])
        sent = obj
        if live is not None and obj["kind"] in DECISIONS:
            # Decisions (to drain, to take back) are taken from one state of the object: of two leaders one loses.
            sent = {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(live.version)}}
        now = self._mirror.applied(key, await self._client.apply(sent))
        if live is not None and now.version == live.version:
            self._idle[name] = (digest, live.version)
        else:
            self._idle.pop(name, None)
        return None

    async def _is_somebody_elses(self, obj: Object, uid: str) -> bool:
        """Applying by force would take over an object that a user has made under this name; only labelled ones are in
        the mirror, so one that is about to be made is looked for first. Raises ApiError 409 where it is this service's
        own, and only its watch is late: another leader has made it, and may have decided more about it since."""
        found = await self._client.find(obj["kind"], obj["metadata"]["namespace"], obj["metadata"]["name"])
        if found is None:
            return False
        owners = {o.get("uid") for o in found["metadata"].get("ownerReferences") or ()}
        if uid in owners and obj["kind"] in DECISIONS:
            raise ApiError(409, f"{obj['kind']} {obj['metadata']['name']} is there already; its watch is late")
        labels = found["metadata"].get("labels") or {}
        kept = obj["kind"] == "PersistentVolumeClaim" and not owners and meta.SERVICE_LABEL in labels
        return uid not in owners and not kept

    async def _create_secret(self, uid: str, obj: Object) -> None:
        path = collection(meta.API_VERSIONS["Secret"], PLURALS["Secret"], obj["metadata"]["namespace"])
        try:
            await self._client.create(obj, path)
        except ApiError as error:
            if error.status != 409:
                raise
        self._secrets[uid] = True

    async def write_status(self, key: Key, document: Object, status: InferenceServiceStatus) -> None:
        """Write the status, if nobody else has changed the resource since it was read (else ApiError 409)."""
        metadata = document["metadata"]
        body = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
                "resourceVersion": metadata["resourceVersion"],
            },
            "status": without_empty_maps(status.to_dict()),
        }
        self._mirror.status_written(key, await self._client.apply(body, status=True))


def without_empty_maps(value: Any) -> Any:
    """Of what is applied server-side: a map whose last entries are taken back by `{}` becomes null there, which the
    CRD's schema refuses; one that is left out goes."""
    if isinstance(value, dict):
        return {name: without_empty_maps(item) for name, item in value.items() if item != {}}
    return [without_empty_maps(item) for item in value] if isinstance(value, list) else value


def _refusal(obj: Object, error: ApiError, *, with_revision: bool) -> Refusal:
    labels = obj["metadata"].get("labels") or {}
    revision = labels.get(meta.REVISION_LABEL, "") if with_revision else ""
    return Refusal(obj["kind"], revision, error.message, obj["metadata"]["name"])
