"""Kvern against its baselines over a set of traces.

The targets of the HorizontalPodAutoscalers are the best of a grid on the training traces: the one that keeps the SLO
most often there, and of those within half a percent of it the cheapest. Both halves are reported apart. Two see each
trace beforehand, and are chosen for it in hindsight, the cheapest that keeps the SLO as often as Kvern does: `static`,
a fixed number (and tensor size), and `clairvoyant` (bounds.py).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from kvern_operator.autoscale.layout import Sizes
from kvern_simulator.bounds import SPARE, Clairvoyant, least_hours, needs
from kvern_simulator.controllers import Hpa, Kvern, Static
from kvern_simulator.traces import Trace
from kvern_simulator.world import Controller, Result, Setting, World

Grids = Mapping[str, tuple[float, ...]]  # targets of each HPA's metric
GRIDS: Grids = {"queue": (0.25, 0.5, 1.0, 2.0), "kv": (0.02, 0.03, 0.035, 0.04, 0.05, 0.06, 0.08)}
COARSE: Grids = {"queue": (0.25, 1.0), "kv": (0.02, 0.03, 0.04, 0.06)}  # of sets that take long
HINDSIGHT = ("static", "clairvoyant")
CLOSE = 0.005  # attainments that count as equal
CHANGES_WITHIN = 7200.0  # seconds, in which the planner may change the layout twice


@dataclass(frozen=True)
class Score:
    """Of one controller over several traces."""

    name: str
    attainment: float
    gpu_hours: float
    changes_an_hour: float


def score(name: str, results: list[Result], traces: list[Trace]) -> Score:
    """Requests count alike, whatever their trace."""
    hours = sum(t.seconds for t in traces) / 3600
    requests = sum(r.requests for r in results)
    return Score(
        name,
        sum(r.kept for r in results) / max(requests, 1),
        sum(r.gpu_seconds for r in results) / 3600,
        sum(r.changes for r in results) / hours,
    )


def run(trace: Trace, setting: Setting, name: str, controller: Controller) -> Result:
    """One controller on one trace."""
    return World(trace, setting, controller, name).run()


@dataclass(frozen=True)
class Task:
    """One run, as another process gets it. `kind`: Kvern (the planner has the sizes that the service may have), queue
    or kv (HPAs with `target`), static (`target` many), clairvoyant (`target` times the least work). `size`: another
    tensor size than the one that the service begins with."""

    trace: Trace
    setting: Setting
    kind: str
    target: float = 0.0
    size: int | None = None

    @property
    def name(self) -> str:
        return f"HPA {self.kind} {self.target:g}" if self.kind in GRIDS else self.kind

    def run(self) -> Result:
        """The run."""
        trace, setting = self.trace, self.setting.of(self.trace)
        if self.size is not None:
            setting = replace(setting, size=self.size)
        if self.kind == "static":
            setting = replace(setting, replicas=int(self.target))
            return run(trace, setting, self.name, Static(int(self.target)))
        if self.kind == "clairvoyant":
            one = Clairvoyant.of(trace, setting, self.target)
            return run(trace, replace(setting, replicas=max(one.needed[:1])), self.name, one)
        if self.kind == "Kvern":
            sizes = Sizes("Auto", min(setting.sizes), max(setting.sizes)) if len(setting.sizes) > 1 else None
            return run(trace, setting, self.name, Kvern(setting, trace.start_seconds, sizes))
        return run(trace, setting, self.name, Hpa(setting, self.kind, self.target))


Runner = Callable[..., Iterable[Any]]  # map, or that of several processes


def run_all(traces: list[Trace], setting: Setting, kind: str, target: float = 0.0, each: Runner = map) -> list[Result]:
    """One controller on all of them."""
    return list(each(Task.run, [Task(trace, setting, kind, target) for trace in traces]))


def tuned(
    metric: str,
    targets: Iterable[float],
    traces: list[Trace],
    setting: Setting,
    say: Callable[[str], None],
    each: Runner = map,
) -> tuple[str, list[Result], list[Score]]:
    """An HPA with the target that is best on the training traces; its runs on all of them, and the scores of all
    targets on all traces: what it could be at another attainment."""
    training, scores, every = [t for t in traces if t.training] or traces, [], []
    for target in targets:
        results = run_all(traces, setting, metric, target, each)
        name = f"HPA {metric} {target:g}"
        known = {r.trace: r for r in results}
        made = score(name, [known[t.name] for t in training], training)
        every.append(score(name, results, traces))
        say("  tuning " + _line(made))
        scores.append((made, results))
    best = max(made.attainment for made, _ in scores)
    made, results = min((e for e in scores if e[0].attainment >= best - CLOSE), key=lambda e: e[0].gpu_hours)
    return made.name, results, every


def best_static(trace: Trace, setting: Setting, wanted: float) -> Result:
    """The fewest replicas, of whichever tensor size, that keep the SLO as often as `wanted`; where no number does, the
    one that keeps it most often. More replicas keep it more often, so that the fewest are found by halving, to one in
    a hundred; fewer than the least work of the whole trace takes cannot do."""
    found = []
    for size in setting.of(trace).sizes:
        mean = fmean(needs(trace, setting.of(trace), size))
        low, high = max(setting.minimum, int(min(mean, trace.maximum)), 1), trace.maximum
        best = Task(trace, setting, "static", high, size).run()
        while high - low > high // 100 and best.attainment >= wanted - CLOSE:
            middle = (low + high) // 2
            made = Task(trace, setting, "static", middle, size).run()
            if made.attainment >= wanted - CLOSE:
                best, high = made, middle
            else:
                low = middle + 1
        found.append(best)
    return _cheapest(found, wanted)


def best_clairvoyant(trace: Trace, setting: Setting, wanted: float) -> Result:
    """The cheapest of those that know what comes, of whichever tensor size, that keeps the SLO as often as `wanted`;
    where none does, the one that keeps it most often."""
    found = []
    for size in setting.of(trace).sizes:
        most = Task(trace, setting, "clairvoyant", SPARE[-1], size).run()
        found.append(most)
        for spare in SPARE[:-1] if most.attainment >= wanted - CLOSE else ():
            found.append(Task(trace, setting, "clairvoyant", spare, size).run())
            if found[-1].attainment >= wanted - CLOSE:
                break
    return _cheapest(found, wanted)


def _cheapest(found: list[Result], wanted: float) -> Result:
    kept = [r for r in found if r.attainment >= wanted - CLOSE]
    if kept:
        return min(kept, key=lambda r: r.gpu_seconds)
    return max(found, key=lambda r: r.attainment)


def _in_hindsight(asked: tuple[str, Trace, Setting, float]) -> Result:
    kind, trace, setting, wanted = asked
    return (best_static if kind == "static" else best_clairvoyant)(trace, setting, wanted)


def at_attainment(every: list[Score], wanted: float) -> float | None:
    """GPU-hours that a HorizontalPodAutoscaler needs for an attainment, between the targets beside it; None where none
    of its targets gets there."""
    ordered = sorted(every, key=lambda s: s.gpu_hours)
    before = None
    for made in ordered:
        if made.attainment >= wanted:
            if before is None or made.attainment == before.attainment:
                return made.gpu_hours
            part = (wanted - before.attainment) / (made.attainment - before.attainment)
            return before.gpu_hours + part * (made.gpu_hours - before.gpu_hours)
        before = made if before is None or made.attainment > before.attainment else before
    return None


def reversals(result: Result, window: float = 300.0) -> int:
    """Removals within the window after an addition; pods that never had a GPU are given up, not removed."""
    ups = [t for t, a, b in result.moves if b > a]
    downs = [t for t, a, b in result.moves if b < a and t not in result.given_up]
    return sum(any(0 <= t - up < window for up in ups) for t in downs)


@dataclass
class Comparison:
    """All runs, by controller; scores of each HPA at all of its targets, over all traces; GPU-hours of each trace that
    nobody can go below."""

    found: dict[str, list[Result]]
    grids: dict[str, list[Score]]
    least: list[float]


def compare(
    setting: Setting,
    traces: list[Trace],
    say: Callable[[str], None],
    each: Runner = map,
    targets: Grids = GRIDS,
) -> Comparison:
    """All of it. `each`: map, or that of a pool of processes."""
    found = {"Kvern": run_all(traces, setting, "Kvern", each=each)}
    say(_line(score("Kvern", found["Kvern"], traces)))
    grids = {}
    for metric, of_metric in targets.items():
        name, results, grids[metric] = tuned(metric, of_metric, traces, setting, say, each)
        found[name] = results
        say(_line(score(name, results, traces)))
    for kind in HINDSIGHT:
        asked = [(kind, trace, setting, r.attainment) for trace, r in zip(traces, found["Kvern"], strict=True)]
        found[kind] = list(each(_in_hindsight, asked))
        say(_line(score(kind, found[kind], traces)))
    return Comparison(found, grids, [least_hours(trace, setting.of(trace)) for trace in traces])


def most_layouts(result: Result) -> int:
    """The most changes of the layout within two hours."""
    times = result.layouts
    return max((sum(0 <= t - first < CHANGES_WITHIN for t in times) for first in times), default=0)


def _line(s: Score) -> str:
    return f"{s.name:14} {s.attainment:8.4f} {s.gpu_hours:8.2f} {s.changes_an_hour:8.1f}"
