"""How many requests a second come to a service, counted over all its pods together: pods come and go, and what each one
got in its own few seconds is no rate of the service. Pure.

A jump must be seen within seconds, and chance must not look like one: of short spans only so much counts as is beyond
chance (a Poisson process has a deviation of sqrt(count)).
"""

import math
from collections import deque
from collections.abc import Collection

SPANS = (5.0, 10.0, 15.0, 30.0)  # seconds
DEVIATIONS = 2.5  # beyond which a count is no chance: eight spans a minute are looked at

_Came = tuple[float, float, float, str]  # begin, end, requests, pod


class Arrivals:
    """Requests that came between two looks, for the last `kept` seconds."""

    def __init__(self, kept: float, shortest: float) -> None:
        self._kept, self._shortest = kept, shortest
        self._came: deque[_Came] = deque()
        self._last = -math.inf

    def add(self, pod: str, begin: float, end: float, requests: float) -> None:
        """So many came to one pod in between."""
        self._came.append((begin, end, requests, pod))
        if requests > 0:
            self._last = max(self._last, end)
        while self._came[0][1] <= end - self._kept - 5.0:
            self._came.popleft()

    def quiet(self, now: float) -> float:
        """Seconds since the last look that saw a request come; infinite where none did."""
        return max(now - self._last, 0.0)

    def rate(self, now: float, without: Collection[str] = ()) -> float:
        """Requests a second over the time that is kept, or since the first look; 0 where none is known. What pods
        `without` metrics got before is left out: they count otherwise."""
        fresh = self._since(now - self._kept, without)
        if not fresh:
            return 0.0
        end = max(came[1] for came in fresh)
        span = min(end - min(came[0] for came in fresh), self._kept)
        return _count(fresh, end - span, end) / max(span, self._shortest)

    def sure(self, now: float, without: Collection[str] = ()) -> float:
        """Requests a second that came of late beyond all chance, over the span that says most."""
        fresh = self._since(now - SPANS[-1], without)
        end = max((came[1] for came in fresh), default=now)
        best = 0.0
        for span in SPANS:
            count = _count(fresh, end - span, end)
            best = max(best, (count - DEVIATIONS * math.sqrt(count)) / span)
        return best

    def _since(self, begin: float, without: Collection[str]) -> list[_Came]:
        return [came for came in self._came if came[1] > begin and came[3] not in without]


def _count(came: list[_Came], begin: float, end: float) -> float:
    """What came between the two, where looks overlap it in part that part."""
    found = 0.0
    for first, last, requests, _ in came:
        inside = min(last, end) - max(first, begin)
        if inside > 0:
            found += requests * inside / (last - first)
    return found
