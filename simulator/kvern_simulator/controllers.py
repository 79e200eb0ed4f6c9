"""Who decides: the operator's own code, unchanged; HorizontalPodAutoscalers on one metric; a fixed number."""

import math
from collections import deque
from dataclasses import dataclass, field, replace

from kvern_operator.autoscale import cycle
from kvern_operator.autoscale.layout import Look, Sizes, State
from kvern_operator.autoscale.signals import Signals
from kvern_operator.autoscale.terms import Limits, Memory, Replica, View
from kvern_simulator.world import Seen, Setting, Wanted


@dataclass
class Static:
    """Always the same number."""

    replicas: int
    period: float = 60.0

    def decide(self, seen: Seen) -> Wanted:
        return Wanted(self.replicas)


class Kvern:
    """`autoscale.cycle.decide` over `autoscale.signals`, as the operator's loop calls them. `reasons` are its words."""

    period = 5.0

    def __init__(self, setting: Setting, start_seconds: float, sizes: Sizes | None = None) -> None:
        self._setting, self._start = setting, start_seconds
        self._limits = Limits(
            minimum=setting.minimum,
            maximum=setting.maximum,
            gpus=setting.gpus,
            itl_slo=setting.itl_slo,
            ttft_slo=setting.ttft_slo,
        )
        self._sizes = sizes or Sizes("Fixed")
        self._signals, self._memory = Signals(), Memory.new(0.0)
        self._state, self._size = State(setting.size), setting.size
        self.reasons: list[tuple[float, str]] = []

    def decide(self, seen: Seen) -> Wanted:
        signals = self._signals
        if seen.size not in (None, self._size):
            signals.forget_latency()
            self._memory = replace(self._memory, full=())
        self._size = seen.size or self._size
        signals.keep(p.uid for p in seen.pods)
        for scrape in seen.scrapes.values():
            signals.add(scrape)
        view = View(
            now=seen.now,
            current=seen.current,
            replicas=tuple(
                Replica(
                    uid=p.uid,
                    ready=p.ready(seen.now),
                    since=seen.now - (p.ready_at if p.ready_at is not None and p.ready(seen.now) else p.created),
                    unschedulable=p.ready_at is None,
                    load=signals.load(p.uid, seen.now) if p.ready(seen.now) else None,
                )
                for p in seen.pods
            ),
            held=seen.held,
            traffic=signals.traffic(seen.now),
            line=signals.fit.line(),
            step=signals.step(seen.now),
            start_seconds=self._start,
        )
        look = Look(seen.now, seen.size, self._setting.gpus, seen.kv, 1, seen.attainment, seen.preempted)
        both = cycle.decide(self._limits, view, self._memory, self._sizes, look, self._state)
        self._memory, self._state = both.memory, both.state
        if both.layout.changed:
            signals.forget_latency()
            self.reasons.append((seen.now, f"tensor size {both.layout.target}: {both.layout.reason}"))
        if both.replicas.target != seen.current:
            self.reasons.append((seen.now, f"{seen.current} -> {both.replicas.target}: {both.replicas.reason}"))
        return Wanted(both.replicas.target, both.layout.target)


@dataclass
class Hpa:
    """A HorizontalPodAutoscaler (autoscaling/v2) with its defaults: every 15 s, tolerance 10 %, down after 300 s to the
    most of what was recommended, up by at most 4 pods or double in 15 s; pods without metrics count as empty on the way
    up and as at their target on the way down, pods that are not ready as empty."""

    setting: Setting
    metric: str  # "queue": waiting requests a pod; "kv": usage of the KV cache
    target: float
    period: float = 15.0
    _past: deque[tuple[float, int]] = field(default_factory=deque)

    def decide(self, seen: Seen) -> Wanted:
        values = [self._value(scrape) for scrape in seen.scrapes.values()]
        wanted = self._recommended(values, len(seen.pods), seen)
        wanted = min(max(wanted, self.setting.minimum), self.setting.maximum)
        self._past.append((seen.now, wanted))
        while self._past[0][0] < seen.now - 300:
            self._past.popleft()
        wanted = min(wanted, seen.current + max(4, seen.current))
        if wanted < seen.current:
            wanted = min(max(n for _, n in self._past), seen.current)
        return Wanted(max(wanted, 1))

    def _value(self, scrape: object) -> float:
        if self.metric == "queue":
            return float(scrape.waiting)  # type: ignore[attr-defined]
        return float(scrape.used_tokens / scrape.kv_tokens)  # type: ignore[attr-defined]

    def _recommended(self, values: list[float], pods: int, seen: Seen) -> int:
        if not values:
            return seen.current
        unready = sum(not p.ready(seen.now) for p in seen.pods)
        missing = pods - unready - len(values)
        ratio = sum(values) / len(values) / self.target
        if not missing and not unready:
            return seen.current if abs(ratio - 1) <= 0.1 else math.ceil(ratio * len(values) - 1e-9)
        fill = 0.0 if ratio > 1 else self.target
        count = len(values) + missing + (unready if ratio > 1 else 0)
        new = (sum(values) + fill * missing) / count / self.target
        if abs(new - 1) <= 0.1 or (ratio > 1) != (new > 1):
            return seen.current
        return math.ceil(new * count - 1e-9)
