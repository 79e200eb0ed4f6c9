"""Who leads: one Lease, the same rules as client-go's. `decide` is pure; `Elector` keeps asking the API server.

Clocks of different machines are never compared: a lease has expired when this process has watched it unchanged for its
whole duration, measured by its own monotonic clock. The holder stops by itself before anybody else may start.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

from kvern_operator.kube import ApiError, KubeClient
from kvern_operator.queue import Clock

log = logging.getLogger("kvern.leader")

LEASES = "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"


@dataclass(frozen=True)
class Terms:
    """Seconds. Whoever cannot renew for `deadline` stops; others may take over after `duration` without a renewal."""

    duration: float = 15.0
    deadline: float = 10.0
    retry: float = 3.0

    def __post_init__(self) -> None:
        if not self.retry < self.deadline < self.duration:
            raise ValueError(f"retry {self.retry} < deadline {self.deadline} < duration {self.duration} must hold")


@dataclass(frozen=True)
class Record:
    """What a Lease says. `renewed` is only compared for being the same, never read as a time."""

    holder: str
    renewed: str
    acquired: str
    transitions: int = 0
    duration: float = 15.0


@dataclass(frozen=True)
class Sighting:
    """A record and since when (own clock, seconds) it has been seen unchanged."""

    record: Record
    since: float


def sight(before: Sighting | None, record: Record, now: float) -> Sighting:
    """The sighting after looking once more."""
    return before if before is not None and before.record == record else Sighting(record, now)


def decide(sighting: Sighting | None, me: str, now: float) -> Literal["create", "renew", "take", "wait"]:
    """What a candidate does about the lease it sees; None: there is no Lease."""
    if sighting is None:
        return "create"
    if sighting.record.holder == me:
        return "renew"
    if not sighting.record.holder or now - sighting.since >= sighting.record.duration:
        return "take"
    return "wait"


def next_record(before: Record | None, me: str, stamp: str, terms: Terms) -> Record:
    """The record that `me` writes."""
    if before is not None and before.holder == me:
        return replace(before, renewed=stamp, duration=terms.duration)
    transitions = before.transitions + 1 if before is not None else 0
    return Record(me, stamp, stamp, transitions, terms.duration)


def from_lease(lease: dict[str, Any]) -> Record:
    """The record in a Lease; missing fields read as "nobody holds it"."""
    spec = lease.get("spec") or {}
    return Record(
        holder=spec.get("holderIdentity") or "",
        renewed=spec.get("renewTime") or "",
        acquired=spec.get("acquireTime") or "",
        transitions=spec.get("leaseTransitions") or 0,
        duration=float(spec.get("leaseDurationSeconds") or 1),
    )


def to_spec(record: Record) -> dict[str, Any]:
    """A Lease's spec."""
    return {
        "holderIdentity": record.holder,
        "leaseDurationSeconds": max(int(record.duration), 1),
        "acquireTime": record.acquired or None,
        "renewTime": record.renewed or None,
        "leaseTransitions": record.transitions,
    }


def awake_or_not() -> float:
    """Seconds of a clock that also runs while the machine sleeps, where there is one: a leader that wakes up must not
    take its lease for a fresh one."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def _stamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Elector:
    """One candidate. `valid()` is asked before every write that only the leader may make."""

    def __init__(
        self,
        client: KubeClient,
        namespace: str,
        name: str,
        me: str,
        terms: Terms | None = None,
        clock: Clock = awake_or_not,
    ) -> None:
        self.me, self._client, self._terms, self._clock = me, client, terms or Terms(), clock
        self._path, self._name, self._namespace = LEASES.format(namespace=namespace), name, namespace
        self._sighting: Sighting | None = None
        self._renewed = float("-inf")  # when the last renewal that succeeded was begun
        self.answered = float("-inf")  # when the API server last answered about the Lease
        self._version = 0  # resourceVersion of the Lease
        self.gone_back = False  # the API server's data are older than they were: etcd has been restored

    @property
    def leader(self) -> str:
        """Who leads, as last seen; "" where nobody does."""
        return self._sighting.record.holder if self._sighting else ""

    def valid(self) -> bool:
        """True while no other can lead."""
        return self._clock() - self._renewed < self._terms.deadline

    def silence(self) -> float:
        """Seconds since the API server has last answered about the Lease."""
        return self._clock() - self.answered

    async def acquire(self, waiting: Callable[[str], None] = lambda _: None) -> None:
        """Return once this candidate leads. `waiting` is called with the leader's name whenever that changes."""
        seen: str | None = None
        while not await self._try():
            if self.leader != seen:
                seen = self.leader
                waiting(self.leader)
            await asyncio.sleep(self._terms.retry)
        self.gone_back = False  # nothing of what was before is known
        log.info("leading as %s", self.me)

    async def keep(self) -> None:
        """Renew until that has failed for too long or somebody else holds the lease; then return."""
        while True:
            await asyncio.sleep(self._terms.retry)
            kept = await self._try()
            if self.gone_back:
                log.error("the API server's data are older than before (etcd restored from a backup?): starting anew")
                self._renewed = float("-inf")
                return
            if not kept and (not self.valid() or self.leader not in ("", self.me)):
                log.error("the lease is lost, %s", f"{self.leader} leads" if self.leader != self.me else "no renewal")
                self._renewed = float("-inf")
                return

    async def release(self) -> None:
        """Let the next candidate start at once. Does nothing where this one does not lead; never raises."""
        if not self.valid() or self._sighting is None or self.leader != self.me:
            return
        self._renewed = float("-inf")
        record = replace(self._sighting.record, holder="", duration=1, renewed=_stamp())
        with contextlib.suppress(ApiError, TimeoutError):
            async with asyncio.timeout(self._terms.retry):
                await self._write(record)
            log.info("the lease is released")

    async def _try(self) -> bool:
        """One attempt to get or renew the lease. False where it is another's or the API server did not agree."""
        began = self._clock()
        try:
            async with asyncio.timeout(self._terms.deadline / 2):
                return await self._attempt(began)
        except (ApiError, TimeoutError) as error:
            if not (isinstance(error, ApiError) and error.status == 409):
                log.warning("the Lease %s/%s: %s", self._namespace, self._name, str(error) or "no answer in time")
            self._lease = None
            return False

    _lease: dict[str, Any] | None = None  # as it was last read or written

    async def _attempt(self, began: float) -> bool:
        if self._lease is None or self.leader != self.me:
            self._lease = await self._read()
            self.answered = began
            self._notice_version()
        if self._lease is None:
            self._sighting = None
        else:
            self._sighting = sight(self._sighting, from_lease(self._lease), began)
        if decide(self._sighting, self.me, began) == "wait":
            return False
        before = self._sighting.record if self._sighting else None
        await self._write(next_record(before, self.me, _stamp(), self._terms))
        self._renewed = self.answered = began
        return True

    def _notice_version(self) -> None:
        """Versions only grow. A restored etcd counts from the backup's on, and watches that were begun before wait in
        silence for versions that may be hours away: all that is known is to be read anew."""
        text = str((self._lease or {}).get("metadata", {}).get("resourceVersion") or "")
        if text.isdigit():
            self.gone_back = self.gone_back or int(text) < self._version
            self._version = int(text)

    async def _read(self) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = await self._client.request("GET", f"{self._path}/{self._name}")
            return found
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def _write(self, record: Record) -> None:
        """Create or replace, with the resourceVersion of what the decision was taken from: of two, one loses."""
        if self._lease is None:
            metadata: dict[str, Any] = {"name": self._name, "namespace": self._namespace}
            method, path = "POST", self._path
        else:
            metadata, method, path = self._lease["metadata"], "PUT", f"{self._path}/{self._name}"
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": to_spec(record),
        }
        self._lease = await self._client.request(method, path, body=body)
        self._notice_version()
        self._sighting = Sighting(from_lease(self._lease), self._clock())
