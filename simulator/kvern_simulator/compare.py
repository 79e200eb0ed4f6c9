"""Kvern against its baselines over all traces: `python -m kvern_simulator`, or `make simulate`.

The targets of the HorizontalPodAutoscalers are the best of a grid on the training traces: the one that keeps the SLO
most often there, and of those within half a percent of it the cheapest. Both halves are reported apart. `static` is the
cheapest fixed number that keeps the SLO as often as Kvern does, chosen for each trace in hindsight.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvern_engine.worker.sim_profile import load_profile
from kvern_simulator.controllers import Hpa, Kvern, Static
from kvern_simulator.traces import Trace, all_traces
from kvern_simulator.world import Controller, Result, Setting, World

GRIDS = {"queue": (0.25, 0.5, 1.0, 2.0), "kv": (0.02, 0.03, 0.035, 0.04, 0.05, 0.06, 0.08)}
CLOSE = 0.005  # attainments that count as equal


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
    return World(trace, replace(setting, maximum=trace.maximum), controller, name).run()


@dataclass(frozen=True)
class Task:
    """One run, as another process gets it. `kind`: Kvern, queue or kv (HPAs with `target`), static (`target` many)."""

    trace: Trace
    setting: Setting
    kind: str
    target: float = 0.0

    @property
    def name(self) -> str:
        return {"Kvern": "Kvern", "static": "static"}.get(self.kind, f"HPA {self.kind} {self.target:g}")

    def run(self) -> Result:
        """The run."""
        setting = replace(self.setting, maximum=self.trace.maximum)
        if self.kind == "static":
            setting = replace(setting, replicas=int(self.target))
            return run(self.trace, setting, self.name, Static(int(self.target)))
        if self.kind == "Kvern":
            return run(self.trace, setting, self.name, Kvern(setting, self.trace.start_seconds))
        return run(self.trace, setting, self.name, Hpa(setting, self.kind, self.target))


Runner = Callable[..., Iterable[Any]]  # map, or that of several processes


def run_all(traces: list[Trace], setting: Setting, kind: str, target: float = 0.0, each: Runner = map) -> list[Result]:
    """One controller on all of them."""
    return list(each(Task.run, [Task(trace, setting, kind, target) for trace in traces]))


def tuned(
    metric: str, traces: list[Trace], setting: Setting, say: Callable[[str], None], each: Runner = map
) -> tuple[str, list[Result], list[Score]]:
    """An HPA with the target that is best on the training traces; its runs on all of them, and the scores of all
    targets on all traces: what it could be at another attainment."""
    training, scores, every = [t for t in traces if t.training] or traces, [], []
    for target in GRIDS[metric]:
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


def best_static(trace: Trace, setting: Setting, wanted: float, fewest: int) -> Result:
    """The fewest replicas, from `fewest` on, that keep the SLO as often as `wanted`, or the most there may be."""
    result = None
    for n in range(max(setting.minimum, fewest, 1), trace.maximum + 1):
        result = Task(trace, setting, "static", n).run()
        if result.attainment >= wanted - CLOSE:
            return result
    assert result is not None
    return result


def _best_static(asked: tuple[Trace, Setting, float, int]) -> Result:
    return best_static(*asked)


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
    """All runs, by controller; scores of each HPA at all of its targets, over all traces."""

    found: dict[str, list[Result]]
    grids: dict[str, list[Score]]


def compare(setting: Setting, traces: list[Trace], say: Callable[[str], None], each: Runner = map) -> Comparison:
    """All of it. `each`: map, or that of a pool of processes."""
    found = {"Kvern": run_all(traces, setting, "Kvern", each=each)}
    say(_line(score("Kvern", found["Kvern"], traces)))
    grids = {}
    for metric in GRIDS:
        name, results, grids[metric] = tuned(metric, traces, setting, say, each)
        found[name] = results
        say(_line(score(name, results, traces)))
    # Fewer than the mean that Kvern used cannot keep up.
    asked = [
        (trace, setting, kvern.attainment, int(kvern.gpu_seconds / trace.seconds / setting.gpus))
        for trace, kvern in zip(traces, found["Kvern"], strict=True)
    ]
    found["static"] = list(each(_best_static, asked))
    return Comparison(found, grids)


def verdict(made: Comparison, traces: list[Trace]) -> list[str]:
    """What the measure asks, in sentences: against the targets that were best on the training half, and at equal
    attainment, over all traces."""
    ours = score("Kvern", made.found["Kvern"], traces)
    lines = [f"Kvern keeps the SLO of {ours.attainment:.2%} of all requests with {ours.gpu_hours:.2f} GPU-hours."]
    for metric, every in made.grids.items():
        chosen = next(s for s in every if s.name in made.found)
        nearest = max(every, key=lambda s: s.attainment)
        hours = at_attainment(every, ours.attainment)
        lines.append(f"HPA on {metric}, its best target on the training half: {_beside(ours, chosen)}.")
        if hours is not None:
            fewer = 1 - ours.gpu_hours / hours
            lines.append(
                f"At Kvern's attainment the HPA on {metric} needs {hours:.2f} GPU-hours, Kvern {fewer:.0%} fewer."
            )
        elif nearest is chosen:
            lines.append(f"No target of the HPA on {metric} keeps more.")
        else:
            lines.append(f"No target of the HPA on {metric} keeps as much as Kvern; nearest: {_beside(ours, nearest)}.")
    return lines


def _beside(ours: Score, other: Score) -> str:
    fewer = 1 - ours.gpu_hours / other.gpu_hours
    return f"{other.attainment:.2%} with {other.gpu_hours:.2f} GPU-hours at {other.name}, Kvern {fewer:.0%} fewer"


def grid_table(made: Comparison) -> str:
    """Markdown: what the HPAs do at each of their targets, over all traces."""
    lines = ["| HPA | kept the SLO | GPU-hours | changes an hour |", "|---|---|---|---|"]
    for scores in made.grids.values():
        for s in scores:
            name = f"**{s.name}** (best on the training half)" if s.name in made.found else s.name
            lines.append(f"| {name} | {s.attainment:.2%} | {s.gpu_hours:.2f} | {s.changes_an_hour:.1f} |")
    return "\n".join(lines)


def _line(s: Score) -> str:
    return f"{s.name:14} {s.attainment:8.4f} {s.gpu_hours:8.2f} {s.changes_an_hour:8.1f}"


def table(found: dict[str, list[Result]], traces: list[Trace]) -> str:
    """Markdown: each trace, then both halves and the whole."""
    names = list(found)
    lines = ["| trace | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for i, trace in enumerate(traces):
        cells = [f"{r[i].attainment:.2%}, {r[i].gpu_seconds / 3600:.2f} h, {r[i].changes}" for r in found.values()]
        lines.append(f"| {trace.name}{'' if trace.training else ' (held out)'} | " + " | ".join(cells) + " |")
    parts = (("training", True), ("held out", False), ("all", None))
    for title, which in parts:
        chosen = [i for i, t in enumerate(traces) if which is None or t.training == which]
        cells = []
        for name, results in found.items():
            s = score(name, [results[i] for i in chosen], [traces[i] for i in chosen])
            cells.append(f"**{s.attainment:.2%}, {s.gpu_hours:.2f} h**, {s.changes_an_hour:.1f}/h")
        lines.append(f"| **{title}** | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run, print, and with --out write table, figures and plots there."""
    parser = argparse.ArgumentParser(prog="python -m kvern_simulator", description=__doc__)
    parser.add_argument("--hours", type=float, default=1.0, help="length of each trace")
    parser.add_argument("--only", default="", help="traces whose name begins so")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a CPU)")
    parser.add_argument("--out", type=Path, help="folder for table.md, replicas.svg and totals.svg")
    args = parser.parse_args(argv)
    setting = Setting(load_profile("h200-llama3-8b"))
    traces = [t for t in all_traces(args.hours) if t.name.startswith(args.only)]
    begin = time.perf_counter()

    def say(text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    with ProcessPoolExecutor(args.jobs) as pool:
        made = compare(setting, traces, say, pool.map)
    found = made.found
    text = "\n\n".join([table(found, traces), grid_table(made), *verdict(made, traces)])
    say(text)
    say(f"reversals within 300 s: { ({n: sum(map(reversals, r)) for n, r in found.items()}) }")
    say(f"{time.perf_counter() - begin:.0f} s")
    if args.out is not None:
        from kvern_simulator.plots import draw  # matplotlib is wanted only here

        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "table.md").write_text(text + "\n")
        draw(made, traces, args.out)
    return 0
