"""The plain values that the autoscaler decides from and answers with. Tokens are of KV cache, times are seconds of one
monotonic clock; nothing here computes a decision."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Literal

Mode = Literal["Off", "Recommend", "Internal", "External"]
Kind = Literal["hold", "up", "down", "wake", "zero", "bounds", "given"]


@dataclass(frozen=True)
class Limits:
    """What the spec allows and asks for. `gpus`: of one replica, all its pods together; 0: it runs on CPUs, and no
    budget bounds it. `granted`: replicas that a namespace's budget leaves (see budget.py); None: there is none.
    `unknown`: why that cannot be told, and nothing is decided; "" where it can."""

    mode: Mode = "Internal"
    replicas: int = 1  # spec.replicas
    minimum: int = 1
    maximum: int = 1
    gpus: int = 1
    gpu_budget: int | None = None
    granted: int | None = None
    unknown: str = ""
    kv_target: float = 0.8
    queue_target: float = 5.0
    itl_slo: float | None = None
    ttft_slo: float | None = None
    idle: float = 900.0
    stabilization: float = 300.0

    def most(self) -> tuple[int, str]:
        """The most replicas there may be, and which field says so. A budget wins over a minimum."""
        bounds = [(self.maximum, "maxReplicas")]
        if self.gpu_budget is not None and self.gpus:
            bounds.append((self.gpu_budget // self.gpus, "gpuBudget"))
        if self.granted is not None:
            bounds.append((self.granted, "namespaceBudget"))
        return min(bounds)

    def least(self) -> int:
        """The fewest replicas there may be."""
        return min(self.minimum, self.most()[0])


@dataclass(frozen=True)
class Load:
    """What a replica's metrics say, over its latest samples. `preempted`: requests that lost their place within the
    window and are in the queue again, part of `waiting`; `preempting`: the counter rose within the window. `speed`:
    tokens computed a second, prompts and answers together; 0: not known."""

    kv_tokens: float
    used_tokens: float
    waiting: float
    running: float
    preempted: float = 0.0
    preempting: bool = False
    speed: float = 0.0


@dataclass(frozen=True)
class Full:
    """What a replica did while requests waited for it: tokens held, mean tokens of a request, tokens computed a second
    (0: not known)."""

    tokens: float
    mean_tokens: float
    speed: float = 0.0


@dataclass(frozen=True)
class Replica:
    """One replica that is to stay. `since`: how long it has been ready, or has existed without being so.
    `load` None: it is not ready, or its metrics are missing or stale."""

    uid: str
    ready: bool
    since: float
    unschedulable: bool = False
    load: Load | None = None


@dataclass(frozen=True)
class Traffic:
    """What requests are like, of the whole service. `itl`, `ttft`: 95th percentiles over the last window; None: no
    token came. `longest`: the 99.9th percentile of input + output tokens."""

    input_tokens: float
    output_tokens: float
    rate: float = 0.0  # requests a second, of the last minute
    recent: float = 0.0  # the same of the last seconds, as far as it is no chance
    quiet: float = inf  # seconds since one was seen to come
    prefix_hits: float = 0.0  # share of input tokens
    prefill_seconds: float = 0.0
    itl: float | None = None
    ttft: float | None = None
    longest: float = 0.0

    @property
    def mean_tokens(self) -> float:
        """What a request holds on average while it runs."""
        return self.input_tokens + self.output_tokens / 2

    @property
    def computed_tokens(self) -> float:
        """What steps compute for a request."""
        return max(self.input_tokens * (1 - self.prefix_hits) + self.output_tokens, 1.0)


@dataclass(frozen=True)
class Held:
    """Requests that routers hold since no replica is ready."""

    requests: float = 0.0
    input_tokens: float = 0.0


@dataclass(frozen=True)
class Step:
    """The limits of a step of one engine, and how many engines a replica has."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    engines: int = 1


@dataclass(frozen=True)
class Line:
    """ITL = base + slope x running requests of an engine, seconds."""

    base: float
    slope: float

    def at(self, running: float) -> float:
        """ITL with so many running."""
        return self.base + self.slope * running

    def running_at(self, itl: float) -> float:
        """The inverse: how many may run. Infinite where the number does not matter."""
        if self.slope <= 0:
            return float("inf") if itl >= self.base else 0.0
        return max((itl - self.base) / self.slope, 0.0)


@dataclass(frozen=True)
class View:
    """All that one decision looks at. `current`: replicas wanted so far. `held` None: some router did not answer.
    `start_seconds`: moving average of the time from a pod's creation to ready. `changing`: a change of layout is on its
    way, or being watched."""

    now: float
    current: int
    replicas: tuple[Replica, ...] = ()
    held: Held | None = field(default_factory=Held)
    traffic: Traffic | None = None
    line: Line | None = None
    step: Step = Step()
    start_seconds: float = 120.0
    changing: bool = False


@dataclass(frozen=True)
class Term:
    """One reason for a number of replicas: `wanted` by it, and its arithmetic in words."""

    name: str
    wanted: int
    words: str


@dataclass(frozen=True)
class Decision:
    """`target` replicas from now on. `wanted` is what the strongest term asked for before bounds, `reason` says why in
    words, `limited_by` what kept target from wanted. `inputs` are the numbers, as status.autoscaling shows them."""

    time: float
    current: int
    target: int
    wanted: int
    kind: Kind
    reason: str
    limited_by: str | None = None
    terms: tuple[Term, ...] = ()
    inputs: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Memory:
    """What one decision leaves to the next. Lost with its process: then `seen_since` is young, and nothing goes down
    before a whole stabilization window has been seen again.

    `seen_since`, `seen_at`: since when, and when last, every replica's load was known. `calm`: (time, replicas that a
    removal would have to leave), falling: a window's maximum is its first entry. `demand`:
    (time, tokens) of the last minute. `full`: the latest replicas that were saturated.
    `rates`: (time, requests a second) of the last two minutes. `foreseen`: (time, requests a second that were expected
    for a start later). `jumps`: (time, requests a second that came beyond what had been foreseen), falling, of the last
    hour. `overdue_until`: until when no more is started after pods that did not become ready.
    """

    seen_since: float
    active_at: float
    seen_at: float = float("-inf")
    calm: tuple[tuple[float, int], ...] = ()
    demand: tuple[tuple[float, float], ...] = ()
    full: tuple[Full, ...] = ()
    rates: tuple[tuple[float, float], ...] = ()
    foreseen: tuple[tuple[float, float], ...] = ()
    jumps: tuple[tuple[float, float], ...] = ()
    queued: int = 0  # samples in a row with a queue above its target
    slow: int = 0  # samples in a row with a TTFT above the SLO
    panic_until: float = float("-inf")
    last_up: float = float("-inf")
    last_down: float = float("-inf")
    overdue_until: float = float("-inf")

    @classmethod
    def new(cls, now: float) -> "Memory":
        """Of a process that begins to decide."""
        return cls(seen_since=now, active_at=now, seen_at=now)
