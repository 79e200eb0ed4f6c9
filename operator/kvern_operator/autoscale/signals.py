"""From scrapes of pods to what the decisions look at. State, but no effects and no clock: times come with the scrapes.

A pod is known by its UID: one of the same name is another pod, and what is gone is forgotten with its counters.
Counters that fall belong to a process that began again. Sizes: a minute of scrapes a pod.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvern_operator.autoscale.arrivals import Arrivals
from kvern_operator.autoscale.latency import Fit
from kvern_operator.autoscale.terms import Held, Load, Step, Traffic

STALE = 15.0  # seconds after which a scrape says nothing of now
WINDOW = 60.0  # of rates and percentiles
RECENT = 30.0  # seconds in which a preemption counts
SPEED = 12.0  # seconds over which the tokens computed a second are taken
SHORTEST = 30.0  # a rate is taken over at least this: what a pod gets in its first seconds is no rate
HALF_LIFE = 120.0  # of what requests are like
LONG_HALF_LIFE = 1800.0  # of how long the longest ones are

Buckets = tuple[tuple[float, float], ...]  # (upper bound, cumulative count), as in Prometheus' text format


@dataclass(frozen=True)
class Scrape:
    """One answer of one pod at `at` seconds. `preemptions` .. `itl_count` are counters."""

    uid: str
    at: float
    kv_tokens: float
    used_tokens: float
    running: float
    waiting: float
    preemptions: float = 0.0
    step_tokens: float = 0.0
    finished: float = 0.0
    input_tokens: float = 0.0
    output_tokens: float = 0.0
    prefix_queries: float = 0.0
    prefix_hits: float = 0.0
    prefill_seconds: float = 0.0
    itl_seconds: float = 0.0
    itl_count: float = 0.0
    itl: Buckets = ()
    ttft: Buckets = ()
    inputs: Buckets = ()
    outputs: Buckets = ()
    step: Step = field(default_factory=Step)


def quantile(q: float, buckets: Sequence[tuple[float, float]]) -> float | None:
    """As Prometheus' histogram_quantile: interpolated within a bucket; None where nothing was counted. What lies above
    the last finite bound is that bound."""
    total = buckets[-1][1] if buckets else 0.0
    if total <= 0:
        return None
    rank, below, lower = q * total, 0.0, 0.0
    for bound, count in buckets:
        if count >= rank:
            if math.isinf(bound):
                return lower
            inside = count - below
            return lower + (bound - lower) * ((rank - below) / inside if inside > 0 else 1.0)
        below, lower = count, bound
    return lower


def _less(new: Buckets, old: Buckets) -> list[tuple[float, float]]:
    if len(new) != len(old):
        return list(new)
    found = [(bound, count - before) for (bound, count), (_, before) in zip(new, old, strict=True)]
    return found if all(count >= 0 for _, count in found) else list(new)


def _summed(parts: Iterable[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    total: dict[float, float] = {}
    for part in parts:
        for bound, count in part:
            total[bound] = total.get(bound, 0.0) + count
    return sorted(total.items())


class _Fading:
    """Sums that lose half of their weight every `half_life` seconds."""

    def __init__(self, half_life: float) -> None:
        self._half_life, self._at = half_life, -math.inf
        self.values: dict[str | tuple[str, float], float] = {}

    def add(self, at: float, **amounts: float) -> None:
        self.fade(at)
        for name, amount in amounts.items():
            self.values[name] = self.values.get(name, 0.0) + amount

    def fade(self, at: float) -> None:
        """Bring everything to the time `at`."""
        if at > self._at:
            factor = 0.5 ** ((at - self._at) / self._half_life) if self.values else 1.0
            self.values = {k: v * factor for k, v in self.values.items()}
            self._at = at

    def get(self, name: str) -> float:
        return self.values.get(name, 0.0)


class Signals:
    """What is known of one service's pods."""

    def __init__(self) -> None:
        self._pods: dict[str, deque[Scrape]] = {}
        self._shape = _Fading(HALF_LIFE)
        self._lengths = _Fading(LONG_HALF_LIFE)
        self._arrivals = Arrivals(WINDOW, SHORTEST)
        self.fit = Fit()

    def add(self, scrape: Scrape) -> None:
        """One more answer; one that is older than the pod's last is dropped."""
        past = self._pods.setdefault(scrape.uid, deque())
        if past and scrape.at <= past[-1].at:
            return
        if past and scrape.finished < past[-1].finished:
            past.clear()
        if past:
            self._learn(past[-1], scrape)
        past.append(scrape)
        while len(past) > 2 and past[1].at <= scrape.at - WINDOW:
            past.popleft()

    def keep(self, uids: Iterable[str]) -> None:
        """Forget all other pods."""
        known = frozenset(uids)
        for uid in [uid for uid in self._pods if uid not in known]:
            del self._pods[uid]

    def forget_latency(self) -> None:
        """The layout has changed: ITL at a batch size is another one now."""
        self.fit = Fit()

    def _learn(self, old: Scrape, new: Scrape) -> None:
        count = new.finished - old.finished
        if new.at - old.at <= STALE:  # what came while nothing was seen did not come just now
            came = count + (new.running + new.waiting) - (old.running + old.waiting)
            self._arrivals.add(new.uid, old.at, new.at, max(came, 0.0))
        if count > 0:
            self._shape.add(
                new.at,
                count=count,
                input=max(new.input_tokens - old.input_tokens, 0.0),
                output=max(new.output_tokens - old.output_tokens, 0.0),
                queries=max(new.prefix_queries - old.prefix_queries, 0.0),
                hits=max(new.prefix_hits - old.prefix_hits, 0.0),
                prefill=max(new.prefill_seconds - old.prefill_seconds, 0.0),
            )
            self._lengths.fade(new.at)
            for name, parts in (("in", _less(new.inputs, old.inputs)), ("out", _less(new.outputs, old.outputs))):
                for bound, more in parts:
                    key = (name, bound)
                    self._lengths.values[key] = self._lengths.values.get(key, 0.0) + more
        outputs = new.itl_count - old.itl_count
        steady = min(old.running, new.running) > 0 and new.waiting <= new.running
        if outputs > 0 and steady:
            running = (old.running + new.running) / 2 / max(new.step.engines, 1)
            self.fit = self.fit.add(running, (new.itl_seconds - old.itl_seconds) / outputs, new.at)

    # -- what is read -------------------------------------------------------------------------------------------------

    def load(self, uid: str, now: float) -> Load | None:
        """The pod's load; None where it has not answered lately."""
        past = self._pods.get(uid)
        if not past or not 0 <= now - past[-1].at <= STALE:
            return None
        latest = [s for s in list(past)[-2:] if now - s.at <= STALE]
        since = next((s for s in past if now - s.at <= RECENT), past[-1])
        more = max(past[-1].preemptions - since.preemptions, 0.0)
        begin = next((s for s in past if now - s.at <= SPEED), past[-1])
        between = past[-1].at - begin.at
        waiting = sum(s.waiting for s in latest) / len(latest)
        return Load(
            kv_tokens=past[-1].kv_tokens,
            used_tokens=sum(s.used_tokens for s in latest) / len(latest),
            waiting=waiting,
            running=sum(s.running for s in latest) / len(latest),
            preempted=min(more, waiting),
            preempting=more > 0,
            speed=max(past[-1].step_tokens - begin.step_tokens, 0.0) / between if between > 0 else 0.0,
        )

    def step(self, now: float) -> Step:
        """The limits of a step, as the pod that answered last says."""
        latest = max((past[-1] for past in self._pods.values() if past), key=lambda s: s.at, default=None)
        return latest.step if latest is not None else Step()

    def traffic(self, now: float) -> Traffic | None:
        """What requests are like; None before one has ended."""
        shape, count = self._shape, self._shape.get("count")
        if count <= 0:
            return None
        fresh = [past for past in self._pods.values() if past and now - past[-1].at <= STALE]
        silent = frozenset(uid for uid, past in self._pods.items() if past and now - past[-1].at > STALE)
        return Traffic(
            input_tokens=shape.get("input") / count,
            output_tokens=shape.get("output") / count,
            rate=self._arrivals.rate(now, silent),
            recent=self._arrivals.sure(now, silent),
            quiet=self._arrivals.quiet(now),
            prefix_hits=min(shape.get("hits") / shape.get("queries"), 1.0) if shape.get("queries") > 0 else 0.0,
            prefill_seconds=shape.get("prefill") / count,
            itl=quantile(0.95, _summed(_less(past[-1].itl, past[0].itl) for past in fresh)),
            ttft=quantile(0.95, _summed(_less(past[-1].ttft, past[0].ttft) for past in fresh)),
            longest=self._longest(),
        )

    def attainment(self, itl_slo: float | None, ttft_slo: float | None, now: float) -> float | None:
        """Share of the last minute's tokens and first tokens that came within the SLO, of the two the smaller one; None
        where there is no SLO, or nothing came."""
        fresh = [past for past in self._pods.values() if past and now - past[-1].at <= STALE]
        shares = []
        if itl_slo is not None:
            shares.append(_within(_summed(_less(p[-1].itl, p[0].itl) for p in fresh), itl_slo))
        if ttft_slo is not None:
            shares.append(_within(_summed(_less(p[-1].ttft, p[0].ttft) for p in fresh), ttft_slo))
        return min((share for share in shares if share is not None), default=None)

    def preempted(self, now: float) -> float:
        """Preemptions a request that ended, over the last minute."""
        fresh = [past for past in self._pods.values() if past and now - past[-1].at <= STALE]
        lost = sum(max(past[-1].preemptions - past[0].preemptions, 0.0) for past in fresh)
        ended = sum(past[-1].finished - past[0].finished for past in fresh)
        return lost / max(ended, 1.0)

    def _longest(self) -> float:
        """The 99.9th percentile of input plus that of output tokens: no request is likely to be longer."""
        found = 0.0
        for name in ("in", "out"):
            buckets = sorted(
                (k[1], v) for k, v in self._lengths.values.items() if isinstance(k, tuple) and k[0] == name
            )
            found += quantile(0.999, buckets) or 0.0
        return found


def _within(buckets: Sequence[tuple[float, float]], limit: float) -> float | None:
    """Share of what was counted that lies at or below the limit, interpolated within its bucket."""
    total = buckets[-1][1] if buckets else 0.0
    if total <= 0:
        return None
    below, lower = 0.0, 0.0
    for bound, count in buckets:
        if limit < bound:
            inside = 0.0 if math.isinf(bound) else (limit - lower) / (bound - lower)
            return (below + (count - below) * inside) / total
        below, lower = count, bound
    return 1.0


def held_of(answers: Iterable[tuple[float, float] | None]) -> Held | None:
    """What all routers hold together, from each one's (requests, input tokens); None where one gave no answer."""
    known = list(answers)
    if any(answer is None for answer in known):
        return None
    present = [answer for answer in known if answer is not None]
    return Held(sum(a[0] for a in present), sum(a[1] for a in present))
