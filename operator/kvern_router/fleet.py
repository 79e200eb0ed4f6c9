"""The replicas as they are now: connections, health, load; who may get a request; and the requests held meanwhile.

policy.py decides among those that `Fleet.choose` finds available. The list itself comes from a file (replicas.py) by
`update`, and from DNS (lookup.py) by `found`, where the file has no address of a replica or one that does not answer;
whatever may let a held request go (a new list, a good probe, a skip that is over) wakes the held ones.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from kvern_router.errors import RouterError
from kvern_router.health import Health, Probe
from kvern_router.policy import choose, replica_seed
from kvern_router.replicas import FOUND, HostSpec, ReplicaList, ReplicaSpec
from kvern_router.settings import Settings
from kvern_router.upstream import ConnectionPool

log = logging.getLogger("kvern.router")


class Movable(Protocol):
    """An attempt under way on a replica (relay.py)."""

    def move(self, why: str) -> None: ...


class Replica:
    """A listed replica and what this router has to do with it."""

    def __init__(self, spec: ReplicaSpec, connect_timeout: float) -> None:
        self.spec = spec
        self.seed = replica_seed(spec.name)
        self.health = Health()
        self.pool = ConnectionPool(spec.host, spec.port, connect_timeout)
        self.inflight = 0
        self.attempts: set[Movable] = set()
        self.says_name = False  # in the answers to its probes
        self.listed = True
        host = f"[{spec.host}]" if ":" in spec.host else spec.host
        self.authority = f"{host}:{spec.port}".encode()

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def weight(self) -> float:
        return self.spec.weight

    def available(self, now: float) -> bool:
        """Whether it may get a new request: not draining, with a weight, and ready by its own word."""
        return self.listed and self.spec.state != "draining" and self.spec.weight > 0 and self.health.available(now)

    def condition(self, now: float) -> str:
        """In words for messages: "ready", "draining", "not answering", ..."""
        if self.spec.state == "draining":
            return self.spec.state
        if self.spec.weight <= 0:
            return "of weight 0"
        if now < self.health.skip_until:
            return "failing"
        return str(self.health.probe)


class HeldRequests:
    """Requests that wait for a replica: bounded, counted, woken all at once (each then chooses anew)."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: set[asyncio.Future[None]] = set()
        self.requests = 0
        self.input_tokens = 0

    @contextmanager
    def place(self, tokens: int) -> Iterator[bool]:
        """Hold a place while the block runs; False where none is free."""
        if self.requests >= self._limit:
            yield False
            return
        self.requests += 1
        self.input_tokens += tokens
        try:
            yield True
        finally:
            self.requests -= 1
            self.input_tokens -= tokens

    async def changed(self, timeout: float) -> None:
        """Wait until something changed, `timeout` seconds at most."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await asyncio.wait((future,), timeout=timeout)
        finally:
            self._waiting.discard(future)

    def wake(self) -> None:
        """Something changed."""
        for future in self._waiting:
            if not future.done():
                future.set_result(None)


class Fleet:
    """All replicas of the service."""

    def __init__(self, settings: Settings, on_added: Callable[[Replica], asyncio.Task[None]]) -> None:
        """on_added: starts the task that probes a new replica; it is cancelled when the replica leaves."""
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._on_added = on_added
        self._probes: dict[Replica, asyncio.Task[None]] = {}
        self._leaving: set[Replica] = set()
        self._listed = ReplicaList()
        self._addresses: dict[str, str] = {}  # where the DNS names of `_listed.hosts` led to last
        self.replicas: tuple[Replica, ...] = ()
        self.queue = HeldRequests(settings.max_held)
        self.looked = asyncio.Event()  # every replica of the first list has said whether it is ready
        self.model = settings.model

    def update(self, listed: ReplicaList) -> None:
        """Take over a new list. A replica of the same identity keeps its connections, health and load."""
        self._listed = listed
        names = {host.name for host in listed.hosts}
        self._addresses = {name: address for name, address in self._addresses.items() if name in names}
        self.model = self._settings.model or listed.model
        self._take_over()

    def found(self, host: HostSpec, address: str) -> None:
        """A replica's DNS name leads to this address."""
        if self._addresses.get(host.name) != address and host in self._listed.hosts:
            self._addresses[host.name] = address
            self._take_over()

    def to_look_up(self) -> list[HostSpec]:
        """The replicas of which none is known to answer."""
        now = self._loop.time()
        known = {r.name for r in self.replicas if r.available(now) or r.spec.state == "draining"}
        return [host for host in self._listed.hosts if host.name not in known]

    def _specs(self) -> Iterator[ReplicaSpec]:
        """What is listed, then what was found elsewhere than it is listed."""
        yield from self._listed.replicas
        listed = {(r.name, r.host) for r in self._listed.replicas}
        for host in self._listed.hosts:
            address = self._addresses.get(host.name)
            if address is not None and (host.name, address) not in listed:
                yield host.at(address)

    def _take_over(self) -> None:
        old = {replica.spec.identity: replica for replica in self.replicas}
        found = {(r.name, r.spec.host, r.spec.port): r.spec.identity for r in self.replicas if r.spec.state == FOUND}
        new: list[Replica] = []
        for spec in self._specs():
            replica = old.pop(spec.identity, None)
            if replica is None and (same := found.get((spec.name, spec.host, spec.port))) is not None:
                replica = old.pop(same, None)  # the file has caught up with what was found already
            if replica is None:
                replica = Replica(spec, self._settings.connect_timeout)
                self._probes[replica] = self._on_added(replica)
            replica.spec = spec
            new.append(replica)
        for replica in old.values():
            replica.listed = False
            replica.pool.close()
            self._probes.pop(replica).cancel()
            if replica.inflight:
                self._leaving.add(replica)
                if replica.health.probe in (Probe.HUNG, Probe.UNREACHABLE):
                    self._move(replica, "it is gone")  # nobody would probe it any more, and tell these
        self.replicas = tuple(new)
        said = ", ".join(f"{r.name} ({r.spec.state})" for r in new) or "none"
        log.info("replicas: %s", said)
        self._look()
        self.queue.wake()

    def choose(self, key: int | None, tried: frozenset[Replica] | set[Replica]) -> Replica | None:
        """The replica for a request among the available ones that it has not tried yet, or None."""
        now = self._loop.time()
        candidates = [r for r in self.replicas if r not in tried and r.available(now)]
        return choose(self._settings.policy, candidates, key, secrets.randbits(64), self._settings.load_factor - 1.0)

    def has_available(self, beside: Replica | None = None) -> bool:
        """Whether any replica (but `beside`) may get a request now."""
        now = self._loop.time()
        return any(r is not beside and r.available(now) for r in self.replicas)

    def failed(self, replica: Replica, began: float, why: str) -> None:
        """A request to the replica failed, or its connection was lost under a stream."""
        now = self._loop.time()
        before = replica.health.failures
        replica.health.failed(began, now)
        if replica.health.failures != before:
            seconds = replica.health.skip_until - now
            log.warning("replica %s: %s; passed over for up to %.1f s", replica.name, why, seconds)
            self._loop.call_at(replica.health.skip_until + 0.001, self.queue.wake)

    def probed(self, replica: Replica) -> None:
        """The replica's probe changed its state: wake held requests, move those that wait for a hung one."""
        self._look()
        if replica.available(self._loop.time()):
            self.queue.wake()
        elif replica.health.probe is Probe.HUNG and self.has_available(beside=replica):
            self._move(replica, "it stopped answering")

    def _look(self) -> None:
        if all(replica.health.probe is not Probe.UNKNOWN for replica in self.replicas):
            self.looked.set()

    def _move(self, replica: Replica, why: str) -> None:
        """Requests that wait for the replica's first byte go elsewhere."""
        for attempt in list(replica.attempts):
            attempt.move(why)

    @contextmanager
    def using(self, replica: Replica) -> Iterator[None]:
        """Count a request as in flight on a replica while the block runs."""
        replica.inflight += 1
        try:
            yield
        finally:
            replica.inflight -= 1
            if not replica.inflight:
                self._leaving.discard(replica)

    def no_replica(self, why: str, code: str) -> RouterError:
        """503 that says what is wrong with each replica."""
        now = self._loop.time()
        known = [f"{r.name} is {r.condition(now)}" for r in self.replicas]
        names = {r.name for r in self.replicas}
        known += [f"{host.name} has no address yet" for host in self._listed.hosts if host.name not in names]
        states = "; ".join(known[:8]) or "none is listed"
        if len(known) > 8:
            states += f"; and {len(known) - 8} more"
        model = f" of {self.model}" if self.model else ""
        retry = max(1, min(30, round(self._settings.hold_timeout / 4)))
        return RouterError(
            503, f"No replica{model} is ready ({states}) and {why}. Try again later.", code=code, retry_after=retry
        )

    def inflight(self) -> Sequence[tuple[str, int]]:
        """Requests in flight by replica name, those included that are no longer listed but still serve some."""
        counts: dict[str, int] = {}
        for replica in (*self.replicas, *self._leaving):
            counts[replica.name] = counts.get(replica.name, 0) + replica.inflight
        return list(counts.items())

    def held(self) -> tuple[int, int]:
        """Held requests and their estimated input tokens."""
        return self.queue.requests, self.queue.input_tokens

    def describe(self) -> list[dict[str, Any]]:
        """For /-/replicas."""
        now = self._loop.time()
        return [
            {
                "name": r.name,
                "address": r.authority.decode(),
                "state": r.spec.state,  # of the file; "found": by its DNS name
                "condition": r.condition(now),
                "available": r.available(now),
                "weight": r.weight,
                "inflight": r.inflight,
                "uid": r.spec.uid,
            }
            for r in self.replicas
        ]

    def expire_idle(self) -> None:
        """Close connections that nobody has used for a while."""
        now = self._loop.time()
        for replica in self.replicas:
            replica.pool.expire(now)

    def close(self) -> None:
        """Stop probing and close idle connections."""
        for task in self._probes.values():
            task.cancel()
        for replica in self.replicas:
            replica.pool.close()
