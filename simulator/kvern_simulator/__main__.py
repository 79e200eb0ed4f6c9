"""`python -m kvern_simulator`, or `make simulate`: Kvern against its baselines over a set of traces."""

import argparse
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvern_engine.worker.sim_profile import load_profile
from kvern_simulator import sets
from kvern_simulator.compare import COARSE, GRIDS, compare
from kvern_simulator.report import text_of
from kvern_simulator.traces import Trace
from kvern_simulator.world import Setting


@dataclass(frozen=True)
class Set:
    """Traces of so many hours; what its files are called beside those of the usual set; whether the HPAs' targets are
    few, and each trace is drawn."""

    make: Callable[[float], list[Trace]]
    hours: float
    suffix: str = ""
    coarse: bool = False
    draws: bool = True


SETS = {
    "usual": Set(sets.usual, 1.0),
    "large": Set(sets.large, 0.2, "-large", coarse=True),
    "layouts": Set(sets.layouts, 2.0, "-layouts", coarse=True),
    "fleet": Set(lambda hours: sets.fleet(1_000, hours), 0.2, "-fleet", coarse=True, draws=False),
}


def main(argv: list[str] | None = None) -> int:
    """Run, print, and with --out write table, figures and plots there."""
    parser = argparse.ArgumentParser(prog="python -m kvern_simulator", description=__doc__)
    parser.add_argument("--set", choices=list(SETS), default="usual", help="which traces (default: usual)")
    parser.add_argument("--hours", type=float, help="length of each trace (default: the set's)")
    parser.add_argument("--only", default="", help="traces whose name begins so")
    parser.add_argument(
        "--exact", action="store_true", help="the real scheduler in each engine: a hundred times slower"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a CPU)")
    parser.add_argument("--out", type=Path, help="folder for table.md, replicas.svg and totals.svg (table-SET.md, ...)")
    args = parser.parse_args(argv)
    chosen = SETS[args.set]
    setting = Setting(load_profile("h200-llama3-8b"), exact=args.exact)
    traces = [t for t in chosen.make(args.hours or chosen.hours) if t.name.startswith(args.only)]
    if not traces:
        parser.error(f"no trace of the set {args.set} begins with {args.only!r}")
    begin = time.perf_counter()

    def say(text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    with ProcessPoolExecutor(args.jobs) as pool:
        made = compare(setting, traces, say, pool.map, COARSE if chosen.coarse else GRIDS)
    text = text_of(made, traces)
    say(text)
    say(f"{time.perf_counter() - begin:.0f} s")
    if args.out is not None:
        from kvern_simulator.plots import draw  # matplotlib is wanted only here

        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"table{chosen.suffix}.md").write_text(text + "\n")
        draw(made, traces, args.out, chosen.suffix, panels=chosen.draws)
    return 0


if __name__ == "__main__":
    sys.exit(main())
