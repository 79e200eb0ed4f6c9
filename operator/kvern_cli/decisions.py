"""The tables of `kvern explain` about replicas and tensor sizes: the last decisions, what each term wanted, which sizes
were weighed and why the others lost. Pure: a Picture in, blocks out."""

from collections.abc import Iterator, Mapping
from typing import Any

from kvern_cli.picture import Picture
from kvern_cli.render import Block, Cell, Pairs, Style, Table
from kvern_cli.words import age

Object = Mapping[str, Any]
MOVES: Mapping[str, Style] = {"up": "good", "wake": "good", "down": "busy", "zero": "dim", "bounds": "bad"}
# Numbers of a decision, a line each: (label, words with the names of inputs in braces).
NUMBERS = (
    ("load", "{running} running, {waiting} waiting, {preempted} preempted, {held} held"),
    ("rate", "{requestsPerSecond} requests/s now, {expectedPerSecond} expected in {startSeconds} s (a start)"),
    ("requests", "{inputTokens} + {outputTokens} tokens, prompts take {prefillMs} ms, prefix hits {prefixHits}"),
    ("tokens", "demand {demandTokens}; a replica holds {kvTokensPerReplica}, planned {capacityTokens}; used {kvUsage}"),
    ("serves", "{servedPerSecond} requests/s a replica"),
    ("latency", "ITL p95 {itlP95Ms} ms, TTFT p95 {ttftP95Ms} ms"),
    ("model", "ITL = {itlBaseMs} ms + {itlSlopeMs} ms x running; {engines} engines of {maxNumSeqs} rows a replica"),
    ("replicas", "{ready} ready, {pending} loading, {overdue} overdue, {withoutMetrics} without metrics"),
)


def decision_blocks(picture: Picture) -> list[Block]:
    """What there is to show; nothing where nobody decides."""
    scaling = picture.status.get("autoscaling") or {}
    layout = picture.status.get("parallelism") or {}
    last = scaling.get("lastDecision") or {}
    found: list[Block] = []
    rows = tuple(_decision_rows(scaling, picture))
    if rows and (len(rows) > 1 or last.get("kind", "given") != "given"):
        found.append(Table(("AGO", "REPLICAS", "CAUSE", "LIMITED BY", "WHY"), rows, "Decisions about replicas"))
    terms = tuple(_term_rows(last))
    if terms:
        title = f"What each term wants ({age(last['time'], picture.now)} ago)"
        found.append(Table(("TERM", "WANTS", "", "ARITHMETIC"), terms, title))
    numbers = tuple(_number_rows(last.get("inputs") or {}))
    if numbers:
        found.append(Table(("OF", "NUMBERS"), numbers, "From these numbers"))
    sizes, decided = tuple(_size_rows(layout)), layout.get("lastDecision") or {}
    if decided and not sizes:
        said = Cell(f"{decided.get('reason', '')} ({age(decided['time'], picture.now)} ago)")
        found.append(Pairs((("Tensor size", (said,)),)))
    if sizes:
        title = f"Tensor sizes ({age(decided['time'], picture.now)} ago: {decided.get('reason', '')})"
        found.append(Table(("SIZE", "ENGINES", "REPLICAS NEEDED", "ITL", "WHY NOT"), sizes, title))
    changes = tuple(_change_rows(layout, picture))
    if changes:
        found.append(Table(("AGO", "SIZE", "WHY"), changes, "Changes of the tensor size"))
    return found


def _decision_rows(scaling: Object, picture: Picture) -> Iterator[tuple[Cell, ...]]:
    """Newest first; the last one stands at the top, also where it changed nothing."""
    history = list(scaling.get("history") or ())
    last = scaling.get("lastDecision")
    if last and (not history or history[-1].get("time") != last.get("time")):
        history.append(last)
    for made in reversed(history):
        before, after = made.get("from", 0), made.get("to", 0)
        step = f"{before} -> {after}" if before != after else f"{after}"
        limit = made.get("limitedBy") or ""
        yield (
            Cell(age(made["time"], picture.now), "dim"),
            Cell(step, MOVES.get(made.get("kind", ""), "")),
            Cell(_cause(made)),
            Cell(limit, "busy" if limit else ""),
            Cell(made.get("reason", "")),
        )


def _cause(made: Object) -> str:
    return made.get("cause") or made.get("kind") or ""


def _term_rows(last: Object) -> Iterator[tuple[Cell, ...]]:
    """The term that wins stands first; the others lose because they want fewer."""
    terms = sorted(last.get("terms") or (), key=lambda t: -t.get("wanted", 0))
    for place, term in enumerate(terms):
        wins = place == 0
        said = "decides" if wins else ("as many" if term["wanted"] == terms[0]["wanted"] else "fewer")
        style: Style = "strong" if wins else "dim"
        cells = (term["name"], str(term["wanted"]), said, term.get("words", ""))
        yield tuple(Cell(text, style) for text in cells)


def _number_rows(inputs: Mapping[str, str]) -> Iterator[tuple[Cell, ...]]:
    """Lines whose numbers are known, in part where some are."""
    for label, words in NUMBERS:
        parts = [part for part in _parts(words) if all(name in inputs for name in _names(part))]
        if any(_names(part) for part in parts):
            yield Cell(label, "dim"), Cell("".join(parts).strip(" ,;").format(**inputs))


def _parts(words: str) -> list[str]:
    """Pieces that stand or fall together: up to each comma or semicolon."""
    pieces, piece = [], ""
    for sign in words:
        piece += sign
        if sign in ",;":
            pieces.append(piece)
            piece = ""
    return [*pieces, piece]


def _names(piece: str) -> list[str]:
    return [part.partition("}")[0] for part in piece.split("{")[1:]]


def _size_rows(layout: Object) -> Iterator[tuple[Cell, ...]]:
    made = layout.get("lastDecision") or {}
    for option in made.get("options") or ():
        here = option["size"] == made.get("to")
        needed, itl = option.get("replicas"), option.get("itlMs")
        why = option.get("whyNot") or ""
        said = why or ("runs" if here else "could be chosen")
        style: Style = "strong" if here else "bad" if why else ""
        cells = (str(option["size"]), str(option["engines"]), "-" if needed is None else str(needed))
        yield (
            *(Cell(text, "strong" if here else "") for text in cells),
            Cell(f"{itl} ms" if itl is not None else "-"),
            Cell(said, style),
        )


def _change_rows(layout: Object, picture: Picture) -> Iterator[tuple[Cell, ...]]:
    for made in reversed(layout.get("history") or ()):
        step = f"{made.get('from')} -> {made.get('to')}"
        yield Cell(age(made["time"], picture.now), "dim"), Cell(step), Cell(made.get("reason", ""))
