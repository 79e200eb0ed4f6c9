"""The tenants' meters: whose request may go on, what it is charged, and what answers say of it.

limits.py has the arithmetic, usage.py reads what an answer cost; peers.py tells the meters what the other routers of
the service charged, so that a tenant has its limit once and not once a router.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping
from typing import Any

from kvern_router.errors import RouterError
from kvern_router.http1 import Headers, ResponseHead
from kvern_router.limits import Limits, Meter, duration
from kvern_router.metrics import RouterMetrics
from kvern_router.usage import Usage

_FIELDS = {"requests": "requestsPerMinute", "tokens": "tokensPerMinute"}
ACTIVE_SECONDS = 300.0  # the other routers hear of a tenant for so long after its last request


class Use:
    """One request that was let in: charged as its answer comes, settled at its end."""

    def __init__(self, meter: Meter, estimate: int) -> None:
        self._meter = meter
        self._loop = asyncio.get_running_loop()
        self._estimate = estimate
        self._charged = estimate
        self.usage: Usage | None = None

    @property
    def charged(self) -> int:
        """Tokens so far."""
        return self._charged

    @property
    def counts(self) -> bool:
        """Whether there is a limit for tokens."""
        return self._meter.tokens is not None

    def answer(self, head: ResponseHead) -> Usage:
        """An answer begins."""
        self.usage = Usage(head.is_sse, strip=head.length is None)
        return self.usage

    def generated(self) -> None:
        """More of the answer came: charge it now, or a tenant could start any number of streams at once."""
        if self.usage is not None:
            self._charge(self._estimate + self.usage.counted)

    def settle(self, status: int) -> None:
        """The request has ended: what it really cost. One that failed before its first token costs no tokens."""
        self._charge(0 if self.usage is None else self.usage.total(status, self._estimate))

    def _charge(self, total: int) -> None:
        if total != self._charged:
            self._meter.charge(self._loop.time(), total - self._charged)
            self._charged = total


class Tenants:
    """All meters of this router. `limits` may change at any time."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._meters: dict[str, Meter] = {}
        self._last: dict[str, float] = {}  # when a tenant's last request came
        self._peers: dict[str, dict[str, tuple[float, float]]] = {}  # by boot: what each tenant had been charged there
        self.limits = Limits()

    def limit(self, limits: Limits) -> None:
        """Take over new limits; what was used stays used."""
        if limits == self.limits:
            return
        now, self.limits = self._loop.time(), limits
        for meter in self._meters.values():
            meter.limit(limits, now)

    def keep(self, names: Iterable[str]) -> None:
        """These are the tenants now; the others are forgotten."""
        names = frozenset(names)
        for gone in [name for name in self._meters if name not in names]:
            del self._meters[gone]
            self._last.pop(gone, None)

    def admit(self, name: str, size: int) -> tuple[Use | None, Headers]:
        """Let a request of `size` bytes in, with the headers for its answer. Raises RouterError (429)."""
        if not self.limits.any:
            return None, []
        now = self._loop.time()
        meter, estimate = self._meter(name, now), max(1, size // 4)
        self._last[name] = now
        refusal = meter.admit(now, estimate)
        headers = meter.headers(now)
        if refusal is None:
            return Use(meter, estimate), headers
        self._metrics.limited[refusal.which].inc()
        whose = f"tenant {name}" if name else "this service"
        raise RouterError(
            429,
            f"Rate limit reached for {whose}: {refusal.limit} {refusal.which} a minute "
            f"(router.limits.{_FIELDS[refusal.which]}). Please try again in {duration(refusal.wait)}.",
            kind=refusal.which,
            code="rate_limit_exceeded",
            headers=((b"retry-after-ms", b"%d" % max(1, math.ceil(refusal.wait * 1000))), *headers),
            retry_after=max(1, math.ceil(refusal.wait)),
        )

    def _meter(self, name: str, now: float) -> Meter:
        meter = self._meters.get(name)
        if meter is None:
            meter = self._meters[name] = Meter.new(self.limits, now)
        return meter

    # with the other routers

    def charged(self) -> dict[str, list[float]]:
        """For another router: of each tenant that was here lately, requests and tokens charged here since the start of
        this router, and how far its buckets are from full."""
        now = self._loop.time()
        return {
            name: [meter.charged_requests, round(meter.charged_tokens, 3), *(round(m, 3) for m in meter.missing(now))]
            for name, meter in self._meters.items()
            if now - self._last.get(name, now) < ACTIVE_SECONDS or not meter.idle(now)
        }

    def elsewhere(self, boot: str, said: Mapping[str, Any]) -> None:
        """What another router said (see `charged`); `boot` is another one after each of its restarts.

        Of a tenant that it speaks of for the first time it is taken over how empty the buckets are there, where they
        are emptier than here: how much of what was charged is long refilled is not known, and whoever was there longer
        knows more. Later on, what it has charged since is charged here.
        """
        now, known = self._loop.time(), self._peers.setdefault(boot, {})
        for name, (requests, tokens, missing_requests, missing_tokens) in said.items():
            before, known[name] = known.get(name), (requests, tokens)
            meter = self._meter(name, now)
            if before is None:
                meter.lower(now, missing_requests, missing_tokens)
            elif (requests, tokens) != before:
                meter.elsewhere(now, requests - before[0], tokens - before[1])

    def forget_peers(self, boots: Iterable[str]) -> None:
        """Only these other routers are still there."""
        boots = frozenset(boots)
        for gone in [boot for boot in self._peers if boot not in boots]:
            del self._peers[gone]
