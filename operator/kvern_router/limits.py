"""How much a tenant may ask: token buckets for requests and for tokens. Pure: amounts and times are passed in.

A bucket holds one minute's worth and refills continuously, so that after a pause a tenant may use a minute's worth at
once and from then on what the limit says. A request is let in where the bucket for requests holds one and the one for
tokens holds its prompt (estimated; a prompt larger than the bucket needs a full one). What its answer turns out to cost
is charged as it becomes known and may leave the bucket in debt: nobody knows the length of an answer beforehand, and a
tenant in debt waits until it is paid. What is refused costs nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MINUTE = 60.0
_DUST = 1e-6  # what adding and subtracting may lose: a wait that is over must not be found to last a microsecond longer


@dataclass(frozen=True, slots=True)
class Limits:
    """What a tenant may use a minute; None: as much as it likes. The values of spec.router.limits."""

    requests: int | None = None
    tokens: int | None = None

    @property
    def any(self) -> bool:
        return self.requests is not None or self.tokens is not None


@dataclass(slots=True)
class Bucket:
    """`level` is what is there at time `at` (seconds of one monotonic clock); below 0 it is debt."""

    capacity: float
    level: float
    at: float

    @classmethod
    def full(cls, per_minute: float, now: float) -> Bucket:
        """A bucket that nobody has used."""
        return cls(per_minute, per_minute, now)

    def refill(self, now: float) -> float:
        """The level at `now`. A clock that goes back neither gives nor takes."""
        if now > self.at:
            self.level = min(self.capacity, self.level + (now - self.at) * self.capacity / MINUTE)
            self.at = now
        return self.level

    def wait(self, now: float, amount: float) -> float:
        """Seconds until the bucket holds `amount`, or all that it can hold; 0: it does."""
        missing = min(amount, self.capacity) - self.refill(now)
        return missing * MINUTE / self.capacity if missing > _DUST else 0.0

    def charge(self, now: float, amount: float) -> None:
        """Take `amount`, into debt if need be; below 0: give it back (never above the capacity)."""
        self.level = min(self.capacity, self.refill(now) - amount)

    def resize(self, now: float, capacity: float) -> None:
        """Another limit from now on; what was used stays used."""
        self.refill(now)
        self.capacity, self.level = capacity, min(self.level, capacity)

    def lower_to(self, now: float, level: float) -> None:
        """No more than `level` is left: somebody else who counts for the same tenant says so."""
        self.level = min(self.refill(now), level)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Which limit stands against a request (`requests` or `tokens`), what it is, and for how many seconds still."""

    which: str
    limit: int
    wait: float


@dataclass(slots=True)
class Meter:
    """What one tenant has used; `charged` counts everything charged here, for the other routers (peers.py)."""

    requests: Bucket | None
    tokens: Bucket | None
    charged_requests: float = 0.0
    charged_tokens: float = 0.0

    @classmethod
    def new(cls, limits: Limits, now: float) -> Meter:
        """Of a tenant that comes for the first time."""
        meter = cls(None, None)
        meter.limit(limits, now)
        return meter

    def limit(self, limits: Limits, now: float) -> None:
        """Take over new limits."""
        self.requests = _limited(self.requests, limits.requests, now)
        self.tokens = _limited(self.tokens, limits.tokens, now)

    def admit(self, now: float, tokens: float) -> Refusal | None:
        """Charge one request and its estimated `tokens`, or say what stands against it (the longer wait of the two)."""
        found = [
            Refusal(which, round(bucket.capacity), wait)
            for which, bucket, amount in (("requests", self.requests, 1.0), ("tokens", self.tokens, tokens))
            if bucket is not None and (wait := bucket.wait(now, amount)) > 0
        ]
        if found:
            return max(found, key=lambda refusal: refusal.wait)
        if self.requests is not None:
            self.requests.charge(now, 1.0)
        self.charged_requests += 1.0
        self.charge(now, tokens)
        return None

    def charge(self, now: float, tokens: float) -> None:
        """Tokens beyond what was estimated, or below 0: fewer."""
        if self.tokens is not None:
            self.tokens.charge(now, tokens)
        self.charged_tokens += tokens

    def elsewhere(self, now: float, requests: float, tokens: float) -> None:
        """The tenant used so much at another router."""
        if self.requests is not None:
            self.requests.charge(now, requests)
        if self.tokens is not None:
            self.tokens.charge(now, tokens)

    def missing(self, now: float) -> tuple[float, float]:
        """How far the buckets are from full: requests, tokens."""
        requests, tokens = self.requests, self.tokens
        return (
            requests.capacity - requests.refill(now) if requests is not None else 0.0,
            tokens.capacity - tokens.refill(now) if tokens is not None else 0.0,
        )

    def lower(self, now: float, missing_requests: float, missing_tokens: float) -> None:
        """Another router, met for the first time, counts so much as missing: it is missing here, too."""
        if self.requests is not None:
            self.requests.lower_to(now, self.requests.capacity - missing_requests)
        if self.tokens is not None:
            self.tokens.lower_to(now, self.tokens.capacity - missing_tokens)

    def idle(self, now: float) -> bool:
        """Whether forgetting it would change nothing."""
        return not any(self.missing(now))

    def headers(self, now: float) -> list[tuple[bytes, bytes]]:
        """OpenAI's x-ratelimit-* headers: limit, what remains, and how long until all of it is there again."""
        out: list[tuple[bytes, bytes]] = []
        for name, bucket in ((b"requests", self.requests), (b"tokens", self.tokens)):
            if bucket is not None:
                reset = bucket.wait(now, bucket.capacity)
                out += [
                    (b"x-ratelimit-limit-" + name, b"%d" % bucket.capacity),
                    (b"x-ratelimit-remaining-" + name, b"%d" % max(0, math.floor(bucket.level + _DUST))),
                    (b"x-ratelimit-reset-" + name, duration(reset).encode()),
                ]
        return out


def _limited(bucket: Bucket | None, per_minute: int | None, now: float) -> Bucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return Bucket.full(per_minute, now)
    bucket.resize(now, per_minute)
    return bucket


def duration(seconds: float) -> str:
    """As OpenAI writes it: "0s", "20ms", "1.5s", "6m0s"; never shorter than the truth."""
    millis = math.ceil(seconds * 1000 - _DUST)
    if millis <= 0:
        return "0s"
    if millis < 1000:
        return f"{millis}ms"
    if millis < 60_000:
        return f"{millis / 1000:g}s"
    whole = math.ceil(millis / 1000)
    return f"{whole // 60}m{whole % 60}s"
