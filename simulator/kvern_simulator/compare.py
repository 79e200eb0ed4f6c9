"""Kvern against its baselines over all traces: `python -m kvern_simulator`, or `make simulate`.

The targets of the HorizontalPodAutoscalers are the best of a grid on the training traces: the one that keeps the SLO
most often there, and of those within half a percent of it the cheapest. Both halves are reported apart. `static` is the
cheapest fixed number that keeps the SLO as often as Kvern does, chosen for each trace in hindsight.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from kvern_engine.worker.sim_profile import load_profile
from kvern_simulator.controllers import Hpa, Kvern, Static
from kvern_simulator.traces import Trace, all_traces
from kvern_simulator.world import Controller, Result, Setting, World

GRIDS = {"queue": (0.25, 0.5, 1.0, 2.0), "kv": (0.02, 0.035, 0.05, 0.08, 0.12)}
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
    return World(trace, setting, controller, name).run()


def run_all(traces: list[Trace], setting: Setting, name: str, make: Callable[[Trace], Controller]) -> list[Result]:
    """One controller on all of them."""
    return [run(trace, setting, name, make(trace)) for trace in traces]


def _hpa(setting: Setting, metric: str, target: float) -> Callable[[Trace], Controller]:
    return lambda _: Hpa(setting, metric, target)


def tuned(metric: str, traces: list[Trace], setting: Setting, say: Callable[[str], None]) -> tuple[str, list[Result]]:
    """An HPA with the target that is best on the training traces; its runs on all of them."""
    training, scores = [t for t in traces if t.training] or traces, []
    for target in GRIDS[metric]:
        name = f"HPA {metric} {target:g}"
        results = run_all(training, setting, name, _hpa(setting, metric, target))
        made = score(name, results, training)
        say("  tuning " + _line(made))
        scores.append((made, target, results))
    best = max(made.attainment for made, _, _ in scores)
    made, target, results = min(
        (entry for entry in scores if entry[0].attainment >= best - CLOSE), key=lambda e: e[0].gpu_hours
    )
    known = {r.trace: r for r in results}
    rest = [t for t in traces if t.name not in known]
    known |= {r.trace: r for r in run_all(rest, setting, made.name, _hpa(setting, metric, target))}
    return made.name, [known[t.name] for t in traces]


def best_static(trace: Trace, setting: Setting, wanted: float, fewest: int) -> Result:
    """The fewest replicas, from `fewest` on, that keep the SLO as often as `wanted`, or the most there may be."""
    result = None
    for n in range(max(setting.minimum, fewest, 1), setting.maximum + 1):
        result = run(trace, replace(setting, replicas=n), "static", Static(n))
        if result.attainment >= wanted - CLOSE:
            return result
    assert result is not None
    return result


def reversals(result: Result, window: float = 300.0) -> int:
    """Removals within the window after an addition."""
    ups = [t for t, a, b in result.moves if b > a]
    return sum(any(0 <= t - up < window for up in ups) for t, a, b in result.moves if b < a)


def compare(setting: Setting, traces: list[Trace], say: Callable[[str], None]) -> dict[str, list[Result]]:
    """All runs, by controller."""
    found = {"Kvern": run_all(traces, setting, "Kvern", lambda t: Kvern(setting, t.start_seconds))}
    say(_line(score("Kvern", found["Kvern"], traces)))
    for metric in GRIDS:
        name, results = tuned(metric, traces, setting, say)
        found[name] = results
        say(_line(score(name, results, traces)))
    # Fewer than the mean that Kvern used cannot keep up.
    statics = []
    for trace, kvern in zip(traces, found["Kvern"], strict=True):
        fewest = int(kvern.gpu_seconds / trace.seconds / setting.gpus)
        statics.append(best_static(trace, setting, kvern.attainment, fewest))
    found["static"] = statics
    return found


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
    parser.add_argument("--out", type=Path, help="folder for table.md, replicas.svg and totals.svg")
    args = parser.parse_args(argv)
    setting = Setting(load_profile("h200-llama3-8b"))
    traces = [t for t in all_traces(args.hours) if t.name.startswith(args.only)]
    begin = time.perf_counter()

    def say(text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    found = compare(setting, traces, say)
    text = table(found, traces)
    say(text)
    say(f"reversals within 300 s: { ({n: sum(map(reversals, r)) for n, r in found.items()}) }")
    say(f"{time.perf_counter() - begin:.0f} s")
    if args.out is not None:
        from kvern_simulator.plots import draw  # matplotlib is wanted only here

        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "table.md").write_text(text + "\n")
        draw(found, traces, args.out)
    return 0
