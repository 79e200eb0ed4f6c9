"""What nobody can do better than: the least GPU time that a trace's requests take, and one who knows them beforehand.

`least_hours` is arithmetic. A step of `c0 + c1 x tokens + c2 x context` seconds that is to take at most the ITL's SLO
loses at least c0/SLO of the time to c0, and c0 is shared by at most `max_num_seqs` answers; everything else is each
request's own. Replicas may then be fractions, come at once and be told of every request beforehand: no controller can.
`Clairvoyant` is simulated like any other: replicas start in time for what comes, and are never too many for long.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvern_engine.parallel.layout import Layout
from kvern_simulator.fluid import Request, step_cost
from kvern_simulator.traces import Trace
from kvern_simulator.world import Seen, Setting, Wanted

WINDOW = 30.0  # seconds: within so many a request may wait and be answered
SPARE = (0.85, 1.0, 1.15, 1.3, 1.5, 1.75, 2.0)  # times the least work that a clairvoyant may plan for


def work(request: Request, setting: Setting, size: int) -> float:
    """Seconds of a replica of tensor size `size` that a request takes at the least."""
    whole, token, context = step_cost(setting.profile, Layout(tensor=size))
    if whole >= setting.itl_slo:
        return math.inf  # not even one request alone keeps the SLO
    tokens = request.inputs + request.outputs
    own = token * tokens + context * request.outputs * (request.inputs + request.outputs / 2)
    each = max(own / (1 - whole / setting.itl_slo), own + whole * request.outputs / setting.max_num_seqs)
    return each * size / setting.gpus


def needs(trace: Trace, setting: Setting, size: int) -> list[float]:
    """Replicas, not rounded, that are at work in each WINDOW of the trace."""
    found = [0.0] * max(math.ceil(trace.seconds / WINDOW), 1)
    for request in trace.requests:
        found[int(request.arrival / WINDOW)] += work(request, setting, size) * trace.scale
    return [seconds / WINDOW for seconds in found]


def least_hours(trace: Trace, setting: Setting) -> float:
    """GPU-hours below which the SLO of all requests cannot be kept, at the best tensor size; at least `minimum`
    replicas all the time."""
    return min(
        sum(max(n, setting.minimum) for n in needs(trace, setting, size)) * WINDOW * setting.gpus / 3600
        for size in setting.sizes
    )


@dataclass
class Clairvoyant:
    """Knows `needed` replicas of each WINDOW beforehand. What a start takes it begins earlier, and what is needed again
    within a start it keeps."""

    needed: Sequence[int]
    start: float
    period: float = 5.0

    @classmethod
    def of(cls, trace: Trace, setting: Setting, spare: float) -> "Clairvoyant":
        """With `spare` times the least work, of size `setting.size`."""
        plan = [math.ceil(min(n * spare, trace.maximum) - 1e-9) for n in needs(trace, setting, setting.size)]
        return cls([max(n, setting.minimum, 1) for n in plan], trace.start_seconds)

    def decide(self, seen: Seen) -> Wanted:
        """The most that is needed between the window before and a start from now."""
        first = max(int(seen.now / WINDOW) - 1, 0)
        last = int((seen.now + self.start + self.period) / WINDOW)
        return Wanted(max(self.needed[min(first, len(self.needed) - 1) : last + 1]))
