"""A service in a cluster, in simulated time: pods that take a while to start or find no GPU, a router that sends each
request to the least loaded engine, drains, scrapes that may be lost. Whoever decides is a `Controller`.

A trace of `scale` k holds each k-th request, and one simulated pod stands for k like ones: a router that evens load out
keeps them alike. Controllers see all k (`Twin`), and each figure is that of the whole; replicas that run are a multiple
of k, rounded up, which is what the smaller simulation costs in exactness. Tests hold it to the whole one.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from heapq import heapify, heapreplace
from typing import Protocol

from kvern_engine.parallel.layout import Layout
from kvern_engine.worker.sim_profile import SimProfile
from kvern_operator.autoscale.signals import Buckets, Scrape
from kvern_operator.autoscale.terms import Held, Step
from kvern_simulator.fluid import ITL_BOUNDS, LENGTH_BOUNDS, TTFT_BOUNDS, FluidEngine, Request, kv_capacity
from kvern_simulator.real import RealEngine
from kvern_simulator.traces import Trace

Engine = FluidEngine | RealEngine
TICK = 0.5  # seconds between two looks of router and cluster
SCRAPES = 5.0


@dataclass
class Pod:
    """One replica, or as many as the trace's scale says. `ready_at` None: it has no GPU yet."""

    uid: str
    created: float
    gpus: int
    engines: list[Engine] = field(default_factory=list)
    ready_at: float | None = None
    draining: bool = False
    away_until: float = 0.0  # while its layout is changed
    twins: "tuple[Twin, ...]" = ()

    def ready(self, now: float) -> bool:
        """It answers."""
        return self.ready_at is not None and self.ready_at <= now and self.away_until <= now

    @property
    def in_flight(self) -> int:
        return sum(e.in_flight for e in self.engines)


@dataclass(frozen=True)
class Twin:
    """One of the replicas that a pod stands for, as controllers see it."""

    uid: str
    pod: Pod

    @property
    def created(self) -> float:
        return self.pod.created

    @property
    def ready_at(self) -> float | None:
        return self.pod.ready_at

    def ready(self, now: float) -> bool:
        """It answers."""
        return self.pod.ready(now)


@dataclass(frozen=True)
class Seen:
    """What a controller gets to see. `scrapes`: pods that are ready and gave metrics."""

    now: float
    current: int
    pods: tuple[Twin, ...]
    scrapes: dict[str, Scrape]
    held: Held
    size: int | None
    kv: tuple[tuple[int, int], ...]
    attainment: float | None
    preempted: float


@dataclass(frozen=True)
class Wanted:
    """What a controller wants; `size` None: as it is."""

    replicas: int
    size: int | None = None


class Controller(Protocol):
    """Decides every `period` seconds."""

    period: float

    def decide(self, seen: Seen) -> Wanted: ...


@dataclass(frozen=True)
class Setting:
    """The service: GPUs of a replica, tensor size at the beginning, bounds, SLO in seconds. `change_seconds`: how long
    a pod is away while its layout changes (measured on two H200s: 0.7 to 0.9 s). `exact`: with the real scheduler and
    block pool in each engine."""

    profile: SimProfile
    gpus: int = 1
    size: int = 1
    sizes: tuple[int, ...] = (1,)
    replicas: int = 2
    minimum: int = 1
    maximum: int = 8
    cluster_gpus: int = 64
    itl_slo: float = 0.025
    ttft_slo: float = 2.0
    max_num_seqs: int = 256
    change_seconds: float = 2.0
    exact: bool = False

    def of(self, trace: Trace) -> "Setting":
        """With what the trace asks of its service."""
        one, memory = trace.service, trace.service.memory_bytes
        return replace(
            self,
            profile=self.profile if memory is None else replace(self.profile, memory_bytes=memory),
            gpus=one.gpus,
            size=one.size,
            sizes=one.sizes,
            itl_slo=one.itl_slo,
            replicas=trace.replicas,
            maximum=trace.maximum,
            cluster_gpus=max(self.cluster_gpus, 2 * trace.maximum * one.gpus),
        )


@dataclass
class Result:
    """What came of a run. `curve`: (time, wanted, ready, in flight) every SCRAPES seconds."""

    trace: str
    controller: str
    requests: int = 0
    kept: int = 0
    gpu_seconds: float = 0.0
    changes: int = 0
    layouts: list[float] = field(default_factory=list)
    moves: list[tuple[float, int, int]] = field(default_factory=list)
    given_up: list[float] = field(default_factory=list)  # times at which only pods without a GPU were removed
    curve: list[tuple[float, int, int, int]] = field(default_factory=list)

    @property
    def attainment(self) -> float:
        """Share of all requests that kept the SLO."""
        return self.kept / max(self.requests, 1)


def keeps_slo(request: Request, setting: Setting) -> bool:
    """First token in time, and the mean time between its tokens as well."""
    if request.end == float("inf") or request.first - request.arrival > setting.ttft_slo:
        return False
    return (request.end - request.first) / max(request.outputs - 1, 1) <= setting.itl_slo


def _cumulative(bounds: tuple[float, ...], counts: list[float]) -> Buckets:
    total, found = 0.0, []
    for bound, count in zip(bounds, counts, strict=True):
        total += count
        found.append((bound, total))
    return tuple(found)


class World:
    """One run of a trace."""

    def __init__(self, trace: Trace, setting: Setting, controller: Controller, name: str) -> None:
        self.trace, self.setting, self.controller = trace, setting, controller
        self.result = Result(trace.name, name)
        self._pods: list[Pod] = []
        self._size, self._wanted, self._number = setting.size, setting.replicas, 0
        self._coming = deque(trace.fresh())
        self._all = list(self._coming)
        self.result.requests = len(self._all) * trace.scale
        self._held: deque[Request] = deque()
        self._ended: deque[tuple[float, bool]] = deque()
        self._open: list[Request] = []
        self._preempted: deque[tuple[float, int, int]] = deque()

    # -- time ---------------------------------------------------------------------------------------------------------

    def run(self) -> Result:
        """From the first request until all have ended, at most ten minutes after the last."""
        ticks = int((self.trace.seconds + 600) / TICK)
        for _ in range(self._groups(self.setting.replicas)):
            self._start(-1e6)
        period, scrapes = round(self.controller.period / TICK), round(SCRAPES / TICK)
        for tick in range(ticks):
            now = tick * TICK
            over = now >= self.trace.seconds
            if over and not self._held and not any(p.in_flight for p in self._pods):
                break
            self._schedule(now)
            self._relay(now)
            if tick % scrapes == 0:
                ready = sum(p.ready(now) and not p.draining for p in self._pods)
                flying = sum(p.in_flight for p in self._pods) + len(self._held)
                scale = self.trace.scale
                self.result.curve.append((now, self._wanted, ready * scale, flying * scale))
            if tick % period == 0 and not over:
                self._obey(self.controller.decide(self._seen(now)), now)
            self._route(now + TICK)
            for pod in self._pods:
                if pod.ready(now):
                    for engine in pod.engines:
                        engine.advance(now + TICK)
            if not over:
                self.result.gpu_seconds += TICK * sum(p.gpus for p in self._pods if p.ready_at is not None)
            self._pods = [p for p in self._pods if not (p.draining and p.in_flight == 0)]
        self.result.kept = sum(keeps_slo(r, self.setting) for r in self._all) * self.trace.scale
        return self.result

    def _groups(self, replicas: int) -> int:
        """Pods that so many replicas are."""
        return -(-replicas // self.trace.scale)

    def _trouble(self, now: float) -> tuple[int, float]:
        gpus, lost = self.setting.cluster_gpus, 0.0
        for t in self.trace.trouble:
            if t.begin <= now < t.end:
                gpus, lost = gpus if t.gpus is None else t.gpus, max(lost, t.lost)
        return gpus, lost

    def _start(self, created: float) -> None:
        pod = Pod(f"pod-{self._number}", created, self.setting.gpus * self.trace.scale)
        pod.twins = tuple(Twin(f"{pod.uid}.{i}", pod) for i in range(self.trace.scale))
        self._pods.append(pod)
        self._number += 1

    def _schedule(self, now: float) -> None:
        """Pods without a GPU get one, if one is free."""
        room = self._trouble(now)[0] - sum(p.gpus for p in self._pods if p.ready_at is not None)
        for pod in self._pods:
            if pod.ready_at is None and room >= pod.gpus:
                room -= pod.gpus
                pod.ready_at = max(now, pod.created) + (self.trace.start_seconds if pod.created >= 0 else 0.0)
                self._form(pod, pod.ready_at)

    def _form(self, pod: Pod, now: float) -> None:
        setting, layout = self.setting, Layout(tensor=self._size)
        kind: type[Engine] = RealEngine if setting.exact else FluidEngine
        pod.engines = [
            kind(setting.profile, layout, now, setting.max_num_seqs) for _ in range(setting.gpus // self._size)
        ]

    def _route(self, until: float) -> None:
        """Each request to the engine with the least in flight; held where there is none."""
        open_ = [e for p in self._pods if p.ready(until - TICK) and not p.draining for e in p.engines]
        while self._coming and self._coming[0].arrival < until:
            self._held.append(self._coming.popleft())
        if open_ and self._held:
            least = [(e.in_flight, place) for place, e in enumerate(open_)]
            heapify(least)
            while self._held:
                request = self._held.popleft()
                self._open.append(request)
                flying, place = least[0]
                open_[place].add(request)
                heapreplace(least, (flying + 1, place))

    # -- decisions ----------------------------------------------------------------------------------------------------

    def _seen(self, now: float) -> Seen:
        lost = self._trouble(now)[1]
        staying, scale = tuple(p for p in self._pods if not p.draining), self.trace.scale
        twins, scrapes = tuple(t for p in staying for t in p.twins)[: self._wanted], {}
        said = {
            id(pod): self._scrape(pod, now)
            for place, pod in enumerate(staying)
            if pod.ready(now) and not (lost and place < lost * len(staying))
        }
        for twin in twins:
            if id(twin.pod) in said:
                scrapes[twin.uid] = replace(said[id(twin.pod)], uid=twin.uid)
        done = [r for r in self._open if r.end <= now]
        self._open = [r for r in self._open if r.end > now]
        self._ended.extend((r.end, keeps_slo(r, self.setting)) for r in done)
        while self._ended and self._ended[0][0] < now - 60:
            self._ended.popleft()
        ready = [p for p in staying if p.ready(now)]
        sizes = {p.engines[0].layout.tensor for p in ready}
        return Seen(
            now,
            self._wanted,
            twins,
            scrapes,
            Held(float(len(self._held) * scale), float(sum(r.inputs for r in self._held) * scale)),
            sizes.pop() if len(sizes) == 1 else None,
            self._feasible(),
            sum(kept for _, kept in self._ended) / len(self._ended) if self._ended else None,
            self._preemptions(now),
        )

    def _preemptions(self, now: float) -> float:
        """A finished request, over the last minute."""
        engines = [e for p in self._pods for e in p.engines]
        counted = (now, sum(e.counters.preemptions for e in engines), sum(e.counters.finished for e in engines))
        self._preempted.append(counted)
        while self._preempted[0][0] < now - 60:
            self._preempted.popleft()
        first = self._preempted[0]
        return max(counted[1] - first[1], 0) / max(counted[2] - first[2], 1)

    def _feasible(self) -> tuple[tuple[int, int], ...]:
        found = []
        for size in self.setting.sizes:
            tokens = kv_capacity(self.setting.profile, Layout(tensor=size))
            if tokens > 0:
                found.append((size, tokens * (self.setting.gpus // size)))
        return tuple(found)

    def _scrape(self, pod: Pod, now: float) -> Scrape:
        engines = pod.engines

        def summed(read: Callable[[Engine], float]) -> float:
            return float(sum(read(e) for e in engines))

        def buckets(bounds: tuple[float, ...], name: str) -> Buckets:
            rows = [getattr(e.counters, name) for e in engines]
            return _cumulative(bounds, [sum(column) for column in zip(*rows, strict=True)])

        return Scrape(
            uid=pod.uid,
            at=now,
            kv_tokens=summed(lambda e: e.kv_tokens),
            used_tokens=summed(lambda e: e.used_tokens),
            running=summed(lambda e: e.running),
            waiting=summed(lambda e: e.waiting),
            preemptions=summed(lambda e: e.counters.preemptions),
            step_tokens=summed(lambda e: e.counters.step_tokens),
            finished=summed(lambda e: e.counters.finished),
            input_tokens=summed(lambda e: e.counters.inputs),
            output_tokens=summed(lambda e: e.counters.outputs),
            prefill_seconds=summed(lambda e: e.counters.prefill),
            itl_seconds=summed(lambda e: e.counters.itl_seconds),
            itl_count=summed(lambda e: e.counters.itl_count),
            itl=buckets(ITL_BOUNDS, "itl"),
            ttft=buckets(TTFT_BOUNDS, "ttft"),
            inputs=buckets(LENGTH_BOUNDS, "input_lengths"),
            outputs=buckets(LENGTH_BOUNDS, "output_lengths"),
            step=Step(engines[0].max_num_seqs, engines[0].max_num_batched_tokens, len(engines)),
        )

    def _obey(self, wanted: Wanted, now: float) -> None:
        if wanted.size is not None and wanted.size != self._size:
            self._size = wanted.size
            self.result.layouts.append(now)
        staying = [p for p in self._pods if not p.draining]
        if wanted.replicas != self._wanted:
            self.result.changes += 1
            self.result.moves.append((now, self._wanted, wanted.replicas))
            self._wanted = wanted.replicas
        groups = self._groups(wanted.replicas)
        for _ in range(groups - len(staying)):
            self._start(now)
        surplus = sorted(staying, key=lambda p: (p.ready(now), p.in_flight))[: max(len(staying) - groups, 0)]
        if surplus and all(pod.ready_at is None for pod in surplus):
            self.result.given_up.append(now)
        for pod in surplus:
            pod.draining = True
            if not pod.ready(now):
                self._pods.remove(pod)

    def _relay(self, now: float) -> None:
        """One pod after the other gets the size that is wanted, as in the operator; one that loads boots with it. What
        was in its engines begins again in those that follow, which is more than a switch costs that moves their KV."""
        if len(self.setting.sizes) == 1 or any(p.away_until > now for p in self._pods):
            return
        for pod in self._pods:
            if pod.ready_at is None or pod.draining or pod.engines[0].layout.tensor == self._size:
                continue
            loads = pod.ready_at > now
            requests = sorted((r for e in pod.engines for r in e.take_all()), key=lambda r: r.arrival)
            if not loads:
                pod.away_until = now + self.setting.change_seconds
            self._form(pod, pod.ready_at if loads else pod.away_until)
            for place, request in enumerate(requests):
                pod.engines[place % len(pod.engines)].add(request)
            if not loads:
                return
