"""Loads to simulate: who asks when for how much, and what goes wrong in the cluster meanwhile. Fixed by their names."""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvern_simulator.fluid import Request

Rate = Callable[[float], float]  # requests a second at a time
Lengths = tuple[float, float]  # mean input and output tokens


@dataclass(frozen=True)
class Trouble:
    """Between two times: `gpus` that the cluster has (None: as many as ever), share of pods whose metrics are lost."""

    begin: float
    end: float
    gpus: int | None = None
    lost: float = 0.0


@dataclass(frozen=True)
class Trace:
    """`seconds` of load. `training`: used to tune the baselines; the others are held out. `maximum`: most replicas."""

    name: str
    seconds: float
    requests: tuple[Request, ...]
    start_seconds: float = 60.0
    trouble: tuple[Trouble, ...] = ()
    training: bool = False
    maximum: int = 8

    def fresh(self) -> list[Request]:
        """The requests, nothing of them done yet."""
        return [Request(r.arrival, r.inputs, r.outputs) for r in self.requests]


def _poisson(rng: random.Random, seconds: float, rate: Rate, most: float) -> Iterator[float]:
    """Arrivals of a Poisson process whose rate changes (thinning)."""
    at = 0.0
    while (at := at + rng.expovariate(most)) < seconds:
        if rng.random() * most < rate(at):
            yield at


def _length(rng: random.Random, mean: float, most: int) -> int:
    """Lognormal, as lengths of prompts and answers are; `mean` is its mean."""
    sigma = 0.7
    return max(min(int(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)), most), 2)


def requests_of(
    seed: str, seconds: float, rate: Rate, most: float, lengths: Callable[[float], Lengths]
) -> list[Request]:
    """Requests whose rate and mean lengths change with time; `most` is the highest rate."""
    rng = random.Random(seed)
    found = []
    for at in _poisson(rng, seconds, rate, most):
        inputs, outputs = lengths(at)
        found.append(Request(at, _length(rng, inputs, 7000), _length(rng, outputs, 1100)))
    return found


CHAT, RAG, LONG, WRITE = (1600.0, 400.0), (4500.0, 250.0), (6500.0, 150.0), (600.0, 900.0)


def _wave(low: float, high: float, period: float) -> Rate:
    return lambda t: low + (high - low) * 0.5 * (1 - math.cos(2 * math.pi * t / period))


def _bursts(base: float, high: float, begins: tuple[float, ...], length: float) -> Rate:
    return lambda t: high if any(b <= t < b + length for b in begins) else base


def all_traces(hours: float = 1.0) -> list[Trace]:
    """The whole set: one of each kind to train with, one of each kind held out. Those called large take half of the
    time and have several times the load: how much is to spare depends on how many replicas share the fluctuations."""
    end = hours * 3600.0
    half = end / 2

    def made(
        name: str,
        rate: Rate,
        most: float,
        lengths: Callable[[float], Lengths] | Lengths,
        training: bool,
        start: float = 60.0,
        trouble: tuple[Trouble, ...] = (),
        seconds: float = end,
        maximum: int = 8,
    ) -> Trace:
        length = lengths if callable(lengths) else (lambda _: lengths)
        requests = tuple(requests_of(name, seconds, rate, most, length))
        return Trace(name, seconds, requests, start, trouble, training, maximum)

    return [
        made("diurnal-chat", _wave(1, 22, end), 22, CHAT, True),
        made("diurnal-rag", _wave(0.5, 11, end / 2), 11, RAG, False),
        made("bursts-rag", _bursts(1.5, 11, (0.2 * end, 0.5 * end, 0.8 * end), 420), 11, RAG, True),
        made("bursts-chat", _bursts(4, 22, (0.25 * end, 0.6 * end), 600), 22, CHAT, False),
        made("shift-to-long", lambda t: 6, 6, lambda t: CHAT if t < end / 2 else LONG, False),
        made("shift-to-writing", lambda t: 6, 6, lambda t: RAG if t < end / 2 else WRITE, True),
        made("slow-starts", _wave(1, 10, end), 10, RAG, False, start=240.0),
        made("slow-starts-chat", _wave(1, 18, end / 2), 18, CHAT, True, start=240.0),
        made("no-room", _wave(1, 11, end), 11, RAG, False, trouble=(Trouble(0.2 * end, 0.45 * end, gpus=2),)),
        made("lost-metrics", _wave(1, 18, end), 18, CHAT, False, trouble=(Trouble(0.4 * end, 0.6 * end, lost=1.0),)),
        made("some-metrics-lost", _wave(1, 10, end / 2), 10, RAG, True, trouble=(Trouble(1200, 2400, lost=0.5),)),
        made("steady", lambda t: 5, 5, RAG, True),
        made("large-chat", _wave(8, 90, half), 90, CHAT, True, seconds=half, maximum=24),
        made("large-bursts-rag", _bursts(10, 45, (0.15 * end, 0.35 * end), 300), 45, RAG, False, 60.0, (), half, 24),
        made("large-writing", _wave(10, 80, half), 80, WRITE, False, seconds=half, maximum=24),
        made("large-shift", lambda t: 40, 40, lambda t: RAG if t < half / 2 else CHAT, True, 60.0, (), half, 24),
    ]
