"""The plots of a comparison. matplotlib is in the extra `simulate`, and imported only here."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

from kvern_simulator.compare import Comparison, score
from kvern_simulator.traces import Trace

_COLOURS = ("#1f5fbf", "#d1495b", "#e8962e", "#7a7a7a")
_STYLE: Any = {
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#999999",
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "svg.fonttype": "none",
    "svg.hashsalt": "kvern",
}
_COLUMNS = 4


def draw(made: Comparison, traces: list[Trace], folder: Path) -> list[Path]:
    """Writes replicas.svg (ready replicas over time, by trace) and totals.svg (attainment against GPU-hours)."""
    with pyplot.rc_context(_STYLE):
        return [_replicas(made, traces, folder / "replicas.svg"), _totals(made, traces, folder / "totals.svg")]


def _colours(made: Comparison) -> dict[str, str]:
    return dict(zip(made.found, _COLOURS, strict=False))


def _replicas(made: Comparison, traces: list[Trace], path: Path) -> Path:
    """A panel a trace: replicas as steps, arrivals as a shade behind them."""
    columns = min(_COLUMNS, len(traces))
    rows = -(-len(traces) // columns)
    figure, panels = pyplot.subplots(rows, columns, figsize=(3.9 * columns, 2.35 * rows + 0.6), squeeze=False)
    places = [panel for row in panels for panel in row]
    for place, (panel, trace) in enumerate(zip(places, traces, strict=False)):
        _panel(panel, made, place, trace)
    for panel in places[len(traces) :]:
        panel.set_axis_off()
    for row in panels:
        row[0].set_ylabel("ready replicas")
    for panel in panels[-1]:
        panel.set_xlabel("minutes")
    handles, labels = places[0].get_legend_handles_labels()
    title = "shade: requests a second, its peak at the right"
    figure.legend(
        handles[::-1],
        labels[::-1],
        loc="upper center",
        ncols=len(labels),
        frameon=False,
        fontsize=10,
        title=title,
        title_fontsize=8.5,
    )
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.6 / figure.get_figheight()))
    return _save(figure, path)


def _panel(panel: Any, made: Comparison, place: int, trace: Trace) -> None:
    times, rates = _rate(trace)
    shade = panel.twinx()
    shade.fill_between(times, rates, color="#cfd8e3", alpha=0.7, linewidth=0)
    shade.set_ylim(0, max(rates, default=1.0) * 1.15 or 1.0)
    shade.set_yticks([round(max(rates, default=0.0))])
    shade.tick_params(length=0, labelsize=7, labelcolor="#8a97a8")
    shade.spines["right"].set_visible(False)
    panel.set_zorder(shade.get_zorder() + 1)
    panel.patch.set_visible(False)
    for trouble in trace.trouble:
        panel.axvspan(trouble.begin / 60, trouble.end / 60, color="#d1495b", alpha=0.10, linewidth=0)
    for name, colour in reversed(_colours(made).items()):
        curve = [p for p in made.found[name][place].curve if p[0] <= trace.seconds]
        width, style = (2.0, "-") if name == "Kvern" else (1.1, "--" if name == "static" else "-")
        panel.step(
            [p[0] / 60 for p in curve],
            [p[2] for p in curve],
            where="post",
            label=name,
            color=colour,
            linewidth=width,
            linestyle=style,
        )
    panel.set_ylim(0, None)
    panel.set_xlim(0, trace.seconds / 60)
    panel.yaxis.get_major_locator().set_params(integer=True, nbins=5)
    panel.set_title(trace.name + ("" if trace.training else " (held out)"))


def _rate(trace: Trace, window: float = 30.0) -> tuple[list[float], list[float]]:
    counts = [0] * (int(trace.seconds // window) + 1)
    for request in trace.requests:
        counts[int(request.arrival // window)] += 1
    whole = counts[: int(trace.seconds // window)]
    return [(i + 0.5) * window / 60 for i in range(len(whole))], [c / window for c in whole]


def _totals(made: Comparison, traces: list[Trace], path: Path) -> Path:
    """Attainment against GPU-hours over all traces: for the HPAs at every target of their grids."""
    figure, panel = pyplot.subplots(figsize=(8, 4.6))
    colours = _colours(made)
    for metric, scores in made.grids.items():
        colour = next(c for name, c in colours.items() if f"HPA {metric} " in name)
        ordered = sorted(scores, key=lambda s: s.gpu_hours)
        hours, kept = [s.gpu_hours for s in ordered], [s.attainment * 100 for s in ordered]
        panel.plot(hours, kept, color=colour, marker="o", markersize=4, linewidth=1.2, label=f"HPA on {metric}")
        for place, s in enumerate(ordered):
            at, shift = (s.gpu_hours, s.attainment * 100), (0, -13 if place % 2 else 7)
            text = s.name.rpartition(" ")[2] + (" (best)" if s.name in made.found else "")
            panel.annotate(text, at, xytext=shift, textcoords="offset points", ha="center", fontsize=7.5, color=colour)
    for name in (n for n in colours if "HPA" not in n):
        s = score(name, made.found[name], traces)
        marker, size = ("*", 220) if name == "Kvern" else ("s", 50)
        label = name if name == "Kvern" else "best fixed number of each trace, in hindsight"
        panel.scatter(
            s.gpu_hours, s.attainment * 100, marker=marker, color=colours[name], s=size, zorder=5, label=label
        )
    panel.set_xlabel("GPU-hours")
    panel.set_ylabel("requests that kept the SLO, %")
    panel.set_title("up and to the left is better; at HPAs their targets", color="#666666")
    panel.grid(alpha=0.25)
    panel.margins(x=0.08, y=0.14)
    panel.legend(frameon=False, loc="center right")
    figure.tight_layout()
    return _save(figure, path)


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path
