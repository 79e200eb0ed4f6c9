"""How long something has lasted that began at a written time, by this process's own clock from the first look on.

Wall clocks jump and differ between machines: a mark of the future must not hold a drain for ever, and a clock that is
put forward must not cut streams off.
"""

import time
from collections.abc import Iterable
from datetime import datetime, timedelta

from kvern_operator.queue import Clock


class Stopwatch:
    """By name and beginning. Only the first look reads the wall clock, and a beginning in the future counts as now."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[tuple[str, datetime], tuple[timedelta, float]] = {}

    def elapsed(self, name: str, began: datetime, now: datetime) -> timedelta:
        """How long since `began`; `now` is the wall clock's, aware."""
        already, at = self._seen.setdefault((name, began), (max(now - began, timedelta(0)), self._clock()))
        return already + timedelta(seconds=self._clock() - at)

    def keep(self, names: Iterable[str]) -> None:
        """Forget all others."""
        kept = frozenset(names)
        self._seen = {key: seen for key, seen in self._seen.items() if key[0] in kept}
