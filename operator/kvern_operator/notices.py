"""Warning Events about the objects of services in trouble: what only an event says (quota, volumes, admission).

Nobody watches the cluster's events: they are read while a service is not ready, a namespace at a time, ever less often.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvern_operator.kube import ApiError, KubeClient, collection
from kvern_operator.observed import Notice, Object
from kvern_operator.queue import Clock, Key
from kvern_operator.waiting import wait_or_timeout

log = logging.getLogger("kvern.notices")

FIRST, LONGEST = 2.0, 60.0  # seconds before the first look at a service in trouble, and between looks in the end
KINDS = ("Job", "StatefulSet", "ReplicaSet", "Deployment", "Pod", "PersistentVolumeClaim")


@dataclass(frozen=True)
class Subject:
    """Whose events count: objects with these names, and ReplicaSets of the router."""

    names: frozenset[str]
    router: str

    def covers(self, kind: str, name: str) -> bool:
        """Whether an event about this object is one about the service."""
        if kind == "ReplicaSet":
            return name.rpartition("-")[0] == self.router
        return kind in KINDS and name in self.names


def newest(events: Iterable[Object], subject: Subject) -> tuple[Notice, ...]:
    """The newest Warning of each object and reason, in a fixed order."""
    found: dict[tuple[str, str, str], tuple[str, Notice]] = {}
    for event in events:
        about = event.get("involvedObject") or {}
        kind, name = str(about.get("kind", "")), str(about.get("name", ""))
        if event.get("type") != "Warning" or not subject.covers(kind, name):
            continue
        reason, at = str(event.get("reason", "")), _when(event)
        key = (kind, name, reason)
        if key not in found or at >= found[key][0]:
            notice = Notice(kind, name, reason, str(event.get("message") or ""), str(about.get("uid", "")))
            found[key] = (at, notice)
    return tuple(notice for _, (_, notice) in sorted(found.items()))


def _when(event: Object) -> str:
    series = event.get("series") or {}
    return str(series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime") or "")


@dataclass
class _Wanted:
    subject: Subject
    due: float
    wait: float = FIRST
    found: tuple[Notice, ...] = field(default=())


class NoticeReader:
    """Reads the events of services that want it. `changed(key)` is called when there is something new."""

    def __init__(self, client: KubeClient, changed: Callable[[Key], None], clock: Clock = time.monotonic) -> None:
        self._client, self._changed, self._clock = client, changed, clock
        self._wanted: dict[Key, _Wanted] = {}
        self._more = asyncio.Event()

    def want(self, key: Key, subject: Subject) -> None:
        """The service is in trouble, or may be."""
        wanted = self._wanted.get(key)
        if wanted is None:
            self._wanted[key] = _Wanted(subject, self._clock() + FIRST)
            self._more.set()
        elif wanted.subject != subject:
            wanted.subject, wanted.wait = subject, FIRST
            wanted.due = min(wanted.due, self._clock() + FIRST)
            self._more.set()

    def drop(self, key: Key) -> None:
        """All is well with the service, or it is gone."""
        self._wanted.pop(key, None)

    def of(self, key: Key) -> tuple[Notice, ...]:
        """What was found last."""
        wanted = self._wanted.get(key)
        return wanted.found if wanted else ()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._more.clear()
            now = self._clock()
            due = {key for key, wanted in self._wanted.items() if wanted.due <= now}
            for namespace in sorted({key[0] for key in due}):
                await self._read(namespace, [key for key in due if key[0] == namespace])
            times = [wanted.due for wanted in self._wanted.values()]
            wait = max(min(times) - self._clock(), 0.05) if times else None
            await wait_or_timeout(self._more, wait)

    async def _read(self, namespace: str, keys: list[Key]) -> None:
        try:
            events = await self._client.list(collection("v1", "events", namespace), {"fieldSelector": "type=Warning"})
        except ApiError as error:
            log.warning("the events of namespace %s cannot be read: %s", namespace, error)
            events = None
        for key in keys:
            wanted = self._wanted.get(key)
            if wanted is None:
                continue
            wanted.wait = min(wanted.wait * 2, LONGEST)
            wanted.due = self._clock() + wanted.wait
            found = wanted.found if events is None else newest(events, wanted.subject)
            if found != wanted.found:
                wanted.found = found
                self._changed(key)
