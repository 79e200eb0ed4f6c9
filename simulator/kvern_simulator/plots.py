"""The plots of a comparison. matplotlib is in the extra `simulate`, and imported only here."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

from kvern_simulator.compare import Comparison, Score, score
from kvern_simulator.traces import Trace

_BLUE, _RED, _ORANGE, _GREY, _GREEN = "#1f5fbf", "#d1495b", "#e8962e", "#6f6f6f", "#3a9a6b"
_LINES: dict[str, dict[str, Any]] = {  # by the first two words of a controller's name, from back to front
    "HPA queue": {"color": _RED, "linewidth": 0.8, "alpha": 0.45},
    "HPA kv": {"color": _ORANGE, "linewidth": 1.2},
    "static": {"color": _GREY, "linewidth": 1.0, "linestyle": (0, (4, 3))},
    "clairvoyant": {"color": _GREEN, "linewidth": 1.2},
    "Kvern": {"color": _BLUE, "linewidth": 2.0},
}
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


def draw(made: Comparison, traces: list[Trace], folder: Path, suffix: str = "", *, panels: bool = True) -> list[Path]:
    """Writes replicas.svg (ready replicas over time, by trace; with `panels`) and totals.svg (attainment against
    GPU-hours), `suffix` before the dot."""
    with pyplot.rc_context(_STYLE):
        drawn = [_totals(made, traces, folder / f"totals{suffix}.svg")]
        return [*drawn, _replicas(made, traces, folder / f"replicas{suffix}.svg")] if panels else drawn


def _line(name: str) -> dict[str, Any]:
    found = next((key for key in _LINES if name.startswith(key)), None)
    return _LINES[found] if found else {"color": _GREY, "linewidth": 1.0}


def _front_last(names: Iterable[str]) -> list[str]:
    order = list(_LINES)
    return sorted(names, key=lambda name: next((i for i, key in enumerate(order) if name.startswith(key)), -1))


def _replicas(made: Comparison, traces: list[Trace], path: Path) -> Path:
    """A panel a trace: replicas as steps, arrivals as a shade behind them."""
    columns = 3 if len(traces) == 6 else min(_COLUMNS, len(traces))
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
    title = "grey area: requests a second, its peak at the right; red: GPUs or metrics are lost"
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
    for name in _front_last(made.found):
        curve = [p for p in made.found[name][place].curve if p[0] <= trace.seconds]
        panel.step([p[0] / 60 for p in curve], [p[2] for p in curve], where="post", label=name, **_line(name))
    for at in made.found["Kvern"][place].layouts if "Kvern" in made.found else ():
        panel.axvline(at / 60, color=_BLUE, linewidth=0.9, linestyle=":")
        panel.annotate(
            "layout", (at / 60, 0.0), xycoords=("data", "axes fraction"), xytext=(2, 3), textcoords="offset points",
            fontsize=7, color=_BLUE,
        )  # fmt: skip
    panel.set_ylim(0, panel.get_ylim()[1] * 1.03)
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
    for metric, scores in made.grids.items():
        _grid(panel, metric, sorted(scores, key=lambda s: s.gpu_hours), made)
    knows = "each trace known beforehand"
    for name, label in (
        ("Kvern", "Kvern"),
        ("static", f"a fixed number, {knows}"),
        ("clairvoyant", f"clairvoyant, {knows}"),
    ):
        if name in made.found:
            s = score(name, made.found[name], traces)
            marker, size = ("*", 240) if name == "Kvern" else ("s", 42) if name == "static" else ("D", 42)
            colour = _line(name)["color"]
            panel.scatter(s.gpu_hours, s.attainment * 100, marker=marker, color=colour, s=size, zorder=5, label=label)
    least = sum(made.least)
    panel.axvline(least, color=_GREEN, linewidth=1.0, linestyle=":", label="least that all requests take")
    panel.set_xlabel("GPU-hours")
    panel.set_ylabel("requests that kept the SLO, %")
    panel.set_title("up and to the left is better; the numbers are the HPAs' targets", color="#666666")
    panel.grid(alpha=0.25)
    panel.margins(y=0.14)
    panel.set_xlim(0, panel.get_xlim()[1] * 1.05)
    panel.legend(frameon=False, loc="lower left", bbox_to_anchor=(0.2, 0.02), fontsize=8.5)
    figure.tight_layout()
    return _save(figure, path)


def _grid(panel: Any, metric: str, ordered: list[Score], made: Comparison) -> None:
    """One HPA at all of its targets; the best one on the training half is filled."""
    colour = _line(f"HPA {metric}")["color"]
    hours, kept = [s.gpu_hours for s in ordered], [s.attainment * 100 for s in ordered]
    panel.plot(hours, kept, color=colour, linewidth=1.2, zorder=2)
    best = [s.name in made.found for s in ordered]
    faces = [colour if chosen else "white" for chosen in best]
    label = f"HPA on {metric} (filled: best on the training half)"
    panel.scatter(hours, kept, edgecolors=colour, facecolors=faces, s=24, zorder=3, label=label)
    for place, s in enumerate(ordered):
        side = (7, -3) if metric == "queue" else (0, -13) if place % 2 else (0, 7)
        panel.annotate(
            s.name.rpartition(" ")[2], (s.gpu_hours, s.attainment * 100), xytext=side, textcoords="offset points",
            ha="left" if metric == "queue" else "center", fontsize=7.5, color=colour,
        )  # fmt: skip


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path
