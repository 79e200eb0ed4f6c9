"""ITL against the number of running requests, fitted from what engines report. Pure.

Samples are kept as a mean a bin of similar batch sizes, so that hours at one load do not drown what was learned at
another; a bin that nothing has refreshed is forgotten. Least squares over the bins' relative errors.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvern_operator.autoscale.terms import Line

KEPT = 1800.0  # seconds after which a bin's mean says nothing of today's requests
_WEIGHT = 0.2  # of a new sample in the mean of its bin
_SPREAD = 1.4  # largest and smallest batch must differ by this factor: else a slope would be noise


@dataclass(frozen=True)
class _Bin:
    running: float
    itl: float
    at: float


@dataclass(frozen=True)
class Fit:
    """Means by bin; immutable, `add` gives another."""

    bins: Mapping[int, _Bin] = field(default_factory=dict)

    def add(self, running: float, itl: float, now: float) -> "Fit":
        """With one more sample: the mean ITL in seconds while `running` requests ran on one engine."""
        if not (running > 0 and itl > 0 and math.isfinite(running) and math.isfinite(itl)):
            return self
        place = round(3 * math.log2(running + 1))
        old = self.bins.get(place)
        if old is None or now - old.at > KEPT:
            new = _Bin(running, itl, now)
        else:
            new = _Bin(
                old.running + _WEIGHT * (running - old.running), old.itl + _WEIGHT * (itl - old.itl), max(now, old.at)
            )
        kept = {k: b for k, b in self.bins.items() if now - b.at <= KEPT}
        return Fit({**kept, place: new})

    def line(self) -> Line | None:
        """The fitted line, base and slope not negative; None while the batches seen are too much alike."""
        bins = list(self.bins.values())
        if len(bins) < 2 or max(b.running for b in bins) < _SPREAD * min(b.running for b in bins):
            return None
        weights = [1 / (b.itl * b.itl) for b in bins]
        total = sum(weights)
        mean_x = sum(w * b.running for w, b in zip(weights, bins, strict=True)) / total
        mean_y = sum(w * b.itl for w, b in zip(weights, bins, strict=True)) / total
        spread = sum(w * (b.running - mean_x) ** 2 for w, b in zip(weights, bins, strict=True))
        slope = sum(w * (b.running - mean_x) * (b.itl - mean_y) for w, b in zip(weights, bins, strict=True)) / spread
        slope = min(max(slope, 0.0), mean_y / mean_x)
        return Line(mean_y - slope * mean_x, slope)
