"""A load to simulate: who asks when for how much, and what goes wrong in the cluster meanwhile. sets.py has them."""

import math
import random
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

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
class Service:
    """What a trace asks of its service where that is not the usual: see world.Setting. `memory_bytes`: of a device."""

    gpus: int = 1
    size: int = 1
    sizes: tuple[int, ...] = (1,)
    itl_slo: float = 0.025
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Trace:
    """`seconds` of load. `training`: used to tune the baselines; the others are held out. `maximum`: most replicas;
    `replicas`: those that run at its beginning. `scale`: of so many requests one is in `requests`, and a simulated pod
    stands for so many as well (see world.py)."""

    name: str
    seconds: float
    requests: tuple[Request, ...]
    start_seconds: float = 60.0
    trouble: tuple[Trouble, ...] = ()
    training: bool = False
    maximum: int = 8
    replicas: int = 2
    scale: int = 1
    service: Service = Service()

    def fresh(self) -> list[Request]:
        """The requests, nothing of them done yet."""
        return [Request(r.arrival, r.inputs, r.outputs) for r in self.requests]

    def __getstate__(self) -> dict[str, Any]:
        """Requests as three columns: another process gets many of them."""
        kept = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "requests"}
        columns = (
            array("d", (r.arrival for r in self.requests)),
            array("q", (r.inputs for r in self.requests)),
            array("q", (r.outputs for r in self.requests)),
        )
        return {**kept, "requests": columns}

    def __setstate__(self, state: dict[str, Any]) -> None:
        requests = tuple(Request(*row) for row in zip(*state["requests"], strict=True))
        for name, value in {**state, "requests": requests}.items():
            object.__setattr__(self, name, value)


def _poisson(rng: random.Random, seconds: float, rate: Rate, most: float) -> Iterator[float]:
    """Arrivals of a Poisson process whose rate changes (thinning)."""
    at = 0.0
    while (at := at + rng.expovariate(most)) < seconds:
        if rng.random() * most < rate(at):
            yield at


def _every(rng: random.Random, seconds: float, rate: Rate, scale: int) -> Iterator[float]:
    """Each `scale`-th arrival of such a process: a gap is the sum of `scale` exponential ones, so that counts fluctuate
    as those of the whole do. The rate must not change much within a gap."""
    at = 0.0
    while (at := at + rng.gammavariate(scale, 1.0) / max(rate(at), 1e-3)) < seconds:
        yield at


def _length(rng: random.Random, mean: float, most: int) -> int:
    """Lognormal, as lengths of prompts and answers are; `mean` is its mean."""
    sigma = 0.7
    return max(min(int(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)), most), 2)


def requests_of(
    seed: str, seconds: float, rate: Rate, most: float, lengths: Callable[[float], Lengths], scale: int = 1
) -> list[Request]:
    """Requests whose rate and mean lengths change with time; `most` is the highest rate. Of `scale` of them one."""
    rng = random.Random(seed)
    found = []
    for at in _poisson(rng, seconds, rate, most) if scale == 1 else _every(rng, seconds, rate, scale):
        inputs, outputs = lengths(at)
        found.append(Request(at, _length(rng, inputs, 7000), _length(rng, outputs, 1100)))
    return found
