"""A comparison in words and in Markdown. Pure."""

from kvern_simulator.compare import HINDSIGHT, Comparison, Score, at_attainment, most_layouts, reversals, score
from kvern_simulator.traces import Trace
from kvern_simulator.world import Result

LONGEST = 40  # traces that have a row each


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
    for name in HINDSIGHT:
        if name in made.found:
            other = score(name, made.found[name], traces)
            lines.append(
                f"Knowing each trace beforehand, {name}: {other.attainment:.2%} with {other.gpu_hours:.2f} GPU-hours."
            )
    least = sum(made.least)
    lines.append(
        f"Nobody can keep all of them with less than {least:.2f} GPU-hours; Kvern takes "
        f"{ours.gpu_hours / least:.2f} times that."
    )
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


def table(made: Comparison, traces: list[Trace]) -> str:
    """Markdown: each trace (of a set that is not too long to be read), then both halves and the whole. The last column
    are the GPU-hours that nobody can go below."""
    found = made.found
    lines = ["| trace | " + " | ".join(found) + " | least |", "|---|" + "---|" * (len(found) + 1)]
    for i, trace in enumerate(traces if len(traces) <= LONGEST else ()):
        cells = [_cell(results[i]) for results in found.values()]
        name = trace.name + ("" if trace.training else " (held out)")
        lines.append(f"| {name} | {' | '.join(cells)} | {made.least[i]:.2f} h |")
    for title, which in (("training", True), ("held out", False), ("all", None)):
        chosen = [i for i, t in enumerate(traces) if which is None or t.training == which]
        if not chosen:
            continue
        cells = []
        for name, results in found.items():
            s = score(name, [results[i] for i in chosen], [traces[i] for i in chosen])
            cells.append(f"**{s.attainment:.2%}, {s.gpu_hours:.2f} h**, {s.changes_an_hour:.1f}/h")
        lines.append(f"| **{title}** | {' | '.join(cells)} | {sum(made.least[i] for i in chosen):.2f} h |")
    return "\n".join(lines)


def _cell(result: Result) -> str:
    sizes = f", {count(len(result.layouts), 'layout')}" if result.layouts else ""
    return f"{result.attainment:.2%}, {result.gpu_seconds / 3600:.2f} h, {result.changes}{sizes}"


def count(number: int, thing: str) -> str:
    """ "1 layout", "2 layouts"."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def held_to(made: Comparison, traces: list[Trace]) -> list[str]:
    """What must never be more, and how far Kvern's peaks are above those of one who knew the load."""
    back = {name: sum(map(reversals, results)) for name, results in made.found.items() if name not in HINDSIGHT}
    lines = [f"Removals within 300 s after an addition: {', '.join(f'{name} {n}' for name, n in back.items())}."]
    most = max(map(most_layouts, made.found["Kvern"]))
    if any(len(t.service.sizes) > 1 for t in traces):
        lines.append(f"Changes of the layout within two hours: at most {most}.")
    if "clairvoyant" in made.found:
        pairs = zip(made.found["Kvern"], made.found["clairvoyant"], strict=True)
        peaks = sorted(((peak(ours) / peak(other), ours, other) for ours, other in pairs), key=lambda entry: entry[0])
        mid, (ratio, ours, other) = peaks[len(peaks) // 2][0], peaks[-1]
        lines.append(
            f"Kvern's highest number of replicas is {mid:.2f} times that of the clairvoyant (median of the traces), at "
            f"most {ratio:.2f} times ({ours.trace}: {peak(ours)} and {peak(other)})."
        )
    return lines


def peak(result: Result) -> int:
    """The most replicas that were wanted."""
    return max((wanted for _, wanted, _, _ in result.curve), default=1)


def text_of(made: Comparison, traces: list[Trace]) -> str:
    """All of it."""
    return "\n\n".join([table(made, traces), grid_table(made), *verdict(made, traces), *held_to(made, traces)])
