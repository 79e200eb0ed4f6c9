"""Which part of which weight goes from which rank to which when ranks change the part of a model that they hold.

Pure: no torch, no processes. A *piece* is a region of a tensor as a `WeightPart` says; what is held before and wanted
afterwards is given by rank and name (`layers.parameters.pieces`). A rank that holds a number it wants keeps it; all
else is sent to it once, by whoever of those that hold it has sent least so far.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from kvern_engine.loading.parts import WeightPart

Ranges = tuple[tuple[int, int], ...]
Pieces = Mapping[int, Mapping[str, WeightPart]]  # rank -> name -> what it holds


class NobodyHoldsError(ValueError):
    """A part that is wanted is held by no rank; the text names it."""


@dataclass(frozen=True)
class Move:
    """The region `ranges` of the tensor `name` goes from rank `source` to rank `target`, which may be the same."""

    name: str
    source: int
    target: int
    ranges: Ranges

    @property
    def size(self) -> int:
        """Numbers in it."""
        return volume(self.ranges)


def volume(ranges: Ranges) -> int:
    """Numbers in a region; one in that of a tensor without dimensions."""
    return math.prod(stop - start for start, stop in ranges)


def plan_moves(held: Pieces, wanted: Pieces) -> list[Move]:
    """Moves that give every rank what it wants, in the same order whoever plans. Raises NobodyHoldsError."""
    holders: dict[str, dict[int, WeightPart]] = {}
    for rank, parts in held.items():
        for name, part in parts.items():
            holders.setdefault(name, {})[rank] = part
    sent = dict.fromkeys(held, 0)
    moves: list[Move] = []
    for name in sorted({name for parts in wanted.values() for name in parts}):
        for target, parts in sorted(wanted.items()):
            if name in parts:
                moves += _gather(name, target, parts[name], holders.get(name, {}), sent)
    return moves


def _gather(
    name: str, target: int, part: WeightPart, holders: Mapping[int, WeightPart], sent: dict[int, int]
) -> list[Move]:
    """How `target` comes by its part; `sent` counts what each rank has sent to others."""
    found: list[Move] = []
    for cell in _cells(part.ranges, [other.ranges for other in holders.values()]):
        able = [rank for rank, other in holders.items() if _contains(other.ranges, cell)]
        if not able:
            raise NobodyHoldsError(f"no rank holds {_text(cell)} of {name}, which rank {target} needs")
        source = target if target in able else min(able, key=lambda rank: (sent[rank], rank))
        if source != target:
            sent[source] += volume(cell)
        joined = _joined(found[-1].ranges, cell) if found and found[-1].source == source else None
        if joined is None:
            found.append(Move(name, source, target, cell))
        else:
            found[-1] = Move(name, source, target, joined)
    return found


def _cells(ranges: Ranges, others: Iterable[Ranges]) -> Iterable[Ranges]:
    """`ranges` cut wherever one of `others` begins or ends: each cell lies wholly within, or wholly outside of, each of
    them. None where it is empty."""
    others = list(others)
    axes = []
    for dim, (start, stop) in enumerate(ranges):
        cuts = {edge for other in others for edge in other[dim] if start < edge < stop}
        axes.append(list(pairwise(sorted({start, stop} | cuts))))  # nothing where start == stop
    return product(*axes)


def _contains(outer: Ranges, inner: Ranges) -> bool:
    return all(o[0] <= i[0] and i[1] <= o[1] for o, i in zip(outer, inner, strict=True))


def _joined(first: Ranges, second: Ranges) -> Ranges | None:
    """Two regions as one, where the second goes on where the first ends and they are alike otherwise."""
    unlike = [dim for dim, (one, two) in enumerate(zip(first, second, strict=True)) if one != two]
    if len(unlike) != 1 or first[unlike[0]][1] != second[unlike[0]][0]:
        return None
    dim = unlike[0]
    return (*first[:dim], (first[dim][0], second[dim][1]), *first[dim + 1 :])


def _text(ranges: Ranges) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in ranges) + "]"


def cut(move: Move, most: int) -> list[Move]:
    """The move in pieces of at most `most` numbers each, as far as whole rows allow that."""
    if not move.ranges or move.size <= most:
        return [move]
    start, stop = move.ranges[0]
    rows = max(1, most // max(1, volume(move.ranges[1:])))
    return [
        Move(move.name, move.source, move.target, ((at, min(at + rows, stop)), *move.ranges[1:]))
        for at in range(start, stop, rows)
    ]


def rounds(moves: Sequence[Move], most: int) -> list[list[Move]]:
    """Moves between different ranks, in rounds: in each, a pair of ranks exchanges at most about `most` numbers, so
    that buffers stay small. The order is the same whoever plans, so that messages match by order alone."""
    found: list[list[Move]] = []
    filled: dict[tuple[int, int], tuple[int, int]] = {}  # pair -> (round, numbers in it)
    for move in (piece for whole in moves if whole.source != whole.target for piece in cut(whole, most)):
        pair = move.source, move.target
        at, size = filled.get(pair, (0, 0))
        if size and size + move.size > most:
            at, size = at + 1, 0
        filled[pair] = at, size + move.size
        while len(found) <= at:
            found.append([])
        found[at].append(move)
    return found
