"""The plots of a comparison. matplotlib is in the extra `simulate`, and imported only here."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

from kvern_simulator.compare import score
from kvern_simulator.traces import Trace
from kvern_simulator.world import Result

_COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:gray")


def draw(found: dict[str, list[Result]], traces: list[Trace], folder: Path) -> list[Path]:
    """Writes replicas.svg (replicas over time, by trace) and totals.svg (attainment against GPU-hours) to `folder`."""
    return [_replicas(found, traces, folder / "replicas.svg"), _totals(found, traces, folder / "totals.svg")]


def _replicas(found: dict[str, list[Result]], traces: list[Trace], path: Path) -> Path:
    """Ready replicas of each controller beside the rate of arrivals, a panel a trace."""
    rows = -(-len(traces) // 2)
    figure, panels = pyplot.subplots(rows, 2, figsize=(13, 2.6 * rows), squeeze=False)
    for place, trace in enumerate(traces):
        panel = panels[place // 2][place % 2]
        for (name, results), colour in zip(found.items(), _COLOURS, strict=False):
            curve = results[place].curve
            panel.step([p[0] / 60 for p in curve], [p[2] for p in curve], where="post", label=name, color=colour)
        for trouble in trace.trouble:
            panel.axvspan(trouble.begin / 60, trouble.end / 60, color="tab:red", alpha=0.12)
        panel.set_title(trace.name + ("" if trace.training else " (held out)"), fontsize=9)
        panel.set_ylabel("ready replicas", fontsize=8)
        rate = panel.twinx()
        rate.plot(*_rate(trace), color="black", alpha=0.25, linewidth=1)
        rate.set_ylabel("requests/s", fontsize=8)
    for place in range(len(traces), rows * 2):
        panels[place // 2][place % 2].set_axis_off()
    panels[0][0].legend(fontsize=7)
    for panel in panels[-1]:
        panel.set_xlabel("minutes", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path


def _rate(trace: Trace, window: float = 60.0) -> tuple[list[float], list[float]]:
    counts = [0] * (int(trace.seconds // window) + 1)
    for request in trace.requests:
        counts[int(request.arrival // window)] += 1
    whole = counts[: int(trace.seconds // window)]
    return [(i + 0.5) * window / 60 for i in range(len(whole))], [c / window for c in whole]


def _totals(found: dict[str, list[Result]], traces: list[Trace], path: Path) -> Path:
    """Attainment against GPU-hours, of all traces together and of those held out."""
    figure, panel = pyplot.subplots(figsize=(7, 4.5))
    parts = (("o", [True] * len(traces)), ("^", [not t.training for t in traces]))
    for (name, results), colour in zip(found.items(), _COLOURS, strict=False):
        for marker, chosen in parts:
            picked = [i for i, wanted in enumerate(chosen) if wanted]
            if not picked:
                continue
            made = score(name, [results[i] for i in picked], [traces[i] for i in picked])
            label = name if marker == "o" else None
            panel.scatter(made.gpu_hours, made.attainment * 100, marker=marker, color=colour, label=label, s=60)
    panel.set_xlabel("GPU-hours")
    panel.set_ylabel("requests that kept the SLO, %")
    panel.set_title("circles: all traces, triangles: those held out", fontsize=9)
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path
