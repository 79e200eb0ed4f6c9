"""What the router believes of one replica's health: a pure state machine, times passed in, no sockets.

Two witnesses: the active probe (`GET /ready` every second) and the requests themselves (passive marking). Either may
take a replica out of the choice; a probe that began after the trouble brings it back, unless the replica has failed
several times in a row while its probe said all was well: then only time does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

FIRST_SKIP = 0.5  # seconds a replica is passed over after its first failure; doubles with each further one
MAX_SKIP = 30.0
TRUST_PROBE = 2  # up to so many failures in a row a good probe re-admits before the skip is over
HUNG_AFTER = 2  # probes in a row without an answer


class Probe(StrEnum):
    """The last verdict; the values are what error messages and /-/replicas say."""

    UNKNOWN = "not probed yet"
    READY = "ready"
    NOT_READY = "not ready"
    UNREACHABLE = "unreachable"
    HUNG = "not answering"
    SOMEBODY_ELSE = "gone (another pod answers at its address)"


@dataclass(slots=True)
class Health:
    """Mutable state of one replica; all times are seconds of one monotonic clock."""

    probe: Probe = Probe.UNKNOWN
    failures: int = 0
    skip_until: float = -math.inf
    last_trouble: float = -math.inf
    silent_probes: int = 0

    def available(self, now: float) -> bool:
        """Whether a new request may go there: by the replica's own word. Lists are late, and addresses go to others."""
        return now >= self.skip_until and self.probe is Probe.READY

    def failed(self, began: float, now: float) -> None:
        """A connection failed or was lost. Attempts that began before the last failure tell nothing new (one crash
        takes many requests with it and is one failure)."""
        if began < self.last_trouble:
            return
        self.failures += 1
        self.last_trouble = now
        self.skip_until = now + min(FIRST_SKIP * 2 ** (self.failures - 1), MAX_SKIP)

    def refused(self, now: float) -> None:
        """The replica answered 503 with Retry-After: draining or loading, and no failure."""
        self.probe = Probe.NOT_READY
        self.last_trouble = now

    def served(self, began: float) -> None:
        """A response began. One that was under way before the last failure does not clear it."""
        if began >= self.last_trouble:
            self.failures = 0

    def probed(self, answer: Probe | None, began: float, now: float) -> None:
        """The verdict of a probe that began at `began`; None: no answer in time."""
        if answer is None:
            self.silent_probes += 1
            if self.silent_probes >= HUNG_AFTER:
                self.probe = Probe.HUNG
            return
        self.silent_probes = 0
        if answer is not Probe.READY:
            self.probe = answer
        elif began >= self.last_trouble:
            self.probe = answer
            if self.failures <= TRUST_PROBE:
                self.skip_until = min(self.skip_until, now)
