"""Compares the mirror with lists of its own: has everything come, and is anything still there that is gone?

At the start nothing may be decided before every object that exists has been brought by its watch. And when a watch has
been broken for longer than the API server remembers, it starts over with a list, and what was deleted meanwhile never
gets an event. So whenever a kind has been listed anew, and every ten minutes anyway, its UIDs are compared with a list
of names.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable

from kvern_operator.api.types import API_VERSION, KIND
from kvern_operator.desired import meta
from kvern_operator.kube import PLURALS, ApiError, KubeClient, collection
from kvern_operator.mirror import Mirror
from kvern_operator.queue import Key
from kvern_operator.waiting import wait_or_timeout

log = logging.getLogger("kvern.verify")

EVERY = 600.0  # seconds
ARRIVE = 0.3  # seconds between looks at the start
SOON = 2.0  # seconds after a new list: its own events first
NAMES_ONLY = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io"


def kinds(pod_monitors: bool) -> tuple[str, ...]:
    """All kinds that the operator watches."""
    children = (k for k in meta.KINDS if k != "Secret" and (pod_monitors or k != "PodMonitor"))
    return (KIND, "Pod", *children)


def lists(kind: str, namespaces: Iterable[str]) -> list[str]:
    """The paths of a kind's collections: of all of the cluster where no namespaces are named."""
    version = {KIND: API_VERSION, "Pod": "v1"}.get(kind) or meta.API_VERSIONS[kind]
    plural = "pods" if kind == "Pod" else PLURALS[kind]
    return [collection(version, plural, namespace) for namespace in namespaces] or [collection(version, plural)]


class Verifier:
    """Compares kinds that were listed anew. `changed(key)` is called for the service of each ghost."""

    def __init__(
        self,
        client: KubeClient,
        mirror: Mirror,
        namespaces: Iterable[str],
        pod_monitors: bool,
        changed: Callable[[Key], None],
    ) -> None:
        self._client, self._mirror, self._changed = client, mirror, changed
        self._paths = {kind: lists(kind, namespaces) for kind in kinds(pod_monitors)}
        self._kind_of = {path: kind for kind, paths in self._paths.items() for path in paths}
        self._due: set[str] = set()
        self._more = asyncio.Event()

    def listed(self, path: str) -> None:
        """A collection has been listed anew by a watch."""
        kind = self._kind_of.get(path)
        if kind is not None:
            self._due.add(kind)
            self._more.set()

    async def arrived(self) -> None:
        """Return once the watches have brought everything that exists. The API server being away is waited out."""
        for kind in self._paths:
            missing: set[str] | None = None
            while missing is None or missing:
                try:
                    missing = await self._list(kind) - self._mirror.uids(kind)
                except ApiError as error:
                    log.warning("%s cannot be listed: %s", kind, error)
                    await asyncio.sleep(ARRIVE)
                else:
                    missing = await self._fewer(kind, missing)

    async def _fewer(self, kind: str, missing: set[str]) -> set[str]:
        """Wait while objects arrive. Returns what has not, once none has for a while: it may be gone by now."""
        while missing:
            await asyncio.sleep(ARRIVE)
            left = missing - self._mirror.uids(kind)
            if left == missing:
                break
            missing = left
        return missing

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            if await wait_or_timeout(self._more, EVERY):
                await asyncio.sleep(SOON)
            else:
                self._due.update(self._paths)
            self._more.clear()
            due, self._due = self._due, set()
            for kind in sorted(due):
                try:
                    await self.compare(kind)
                except ApiError as error:
                    log.warning("%s cannot be listed to compare: %s", kind, error)
                    self._due.add(kind)

    async def compare(self, kind: str) -> int:
        """Remove what the API server does not list of a kind. Returns how many there were. Raises ApiError."""
        held = self._mirror.uids(kind)
        ghosts = held - await self._list(kind)
        if ghosts:
            log.warning("%d %s are gone that no watch has said to be", len(ghosts), kind)
            for key in {self._mirror.remove(kind, uid) for uid in ghosts}:
                if key is not None:
                    self._changed(key)
        return len(ghosts)

    async def _list(self, kind: str) -> set[str]:
        query = {} if kind == KIND else {"labelSelector": meta.SERVICE_LABEL}
        found: set[str] = set()
        for path in self._paths[kind]:
            async for page in self._client.pages(path, query, NAMES_ONLY):
                found.update(item["metadata"]["uid"] for item in page)
        return found
