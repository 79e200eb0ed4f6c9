"""The shape of a JSON body before it is parsed: how many values it has and how deep they nest. Pure.

A parser makes Python objects of every value in one call that nothing can interrupt: sixteen megabytes of `{},` take it
a second, and nobody is served meanwhile. So what would make too many objects is refused before, by looking at the
bytes: at once where the body is small, else piece by piece, in a thread that rests between two of them.
"""

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

SMALL_BYTES = 64 << 10  # a body that is parsed in two milliseconds whatever it is
# What a parser takes a tenth of a second for: the ids of the longest prompts fit, and conversations of 65,536 messages.
MAX_VALUES = 1_200_000
MAX_CONTAINERS = 200_000
MAX_MEMBERS = 300_000
_PIECE = 16 << 10  # bytes looked at in one go: a tenth of a millisecond, in which no other thread has its turn
_FEW = 2048  # brackets in one go
_BRACKETS = bytes(b for b in range(256) if b not in b"[]{}")
_STEP = [1 if b in b"[{" else -1 for b in range(256)]  # how much deeper it is behind each bracket


@dataclass(slots=True)
class Shape:
    """What was counted so far. `values` are at most one too few, `depth` is exact."""

    values: int = 0
    containers: int = 0
    members: int = 0
    depth: int = 0
    deepest: int = 0

    def problem(self, most_depth: int) -> str | None:
        """The first limit that is passed, as a sentence; None where there is none."""
        for count, limit, what in (
            (self.values, MAX_VALUES, "values"),
            (self.containers, MAX_CONTAINERS, "objects and arrays"),
            (self.members, MAX_MEMBERS, "members of objects"),
        ):
            if count > limit:
                return f"The body has more than {limit} {what}, the most that is taken."
        if self.deepest > most_depth:
            return too_deep(most_depth)
        return None


def too_deep(most: int) -> str:
    return f"The body is nested more than {most} levels deep (max_json_depth)."


def scan(body: Iterable[bytes], most_depth: int) -> Generator[None, None, str | None]:
    """Look at all of a body, which comes in parts; returns the limit that it passes as a sentence, or None. Yields
    after each piece; stops as soon as it is known."""
    shape = Shape(values=1)
    inside = False  # a string, at the end of the piece before
    carry = b""  # a backslash whose second half is in the next piece
    looked_at = 0  # since it yielded last: parts may be as small as a byte
    for piece in _pieces(body):
        looked_at += len(piece)
        piece = carry + piece
        carry = b""
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"")  # from the left, as escapes are read
            if piece.endswith(b"\\"):
                piece, carry = piece[:-1], b"\\"
            piece = piece.replace(b'\\"', b"")
        parts = piece.split(b'"')
        outside = b"".join(parts[1 if inside else 0 :: 2])
        inside ^= len(parts) % 2 == 0
        _count(shape, outside)
        if (problem := shape.problem(most_depth)) is not None:
            return problem
        if looked_at >= _PIECE:
            looked_at = 0
            yield
    return None


def _pieces(body: Iterable[bytes]) -> Iterable[bytes]:
    for part in body:
        for at in range(0, len(part), _PIECE):
            yield part[at : at + _PIECE]


def _count(shape: Shape, outside: bytes) -> None:
    shape.values += outside.count(b",")
    shape.members += outside.count(b":")
    brackets = outside.translate(None, _BRACKETS)
    shape.containers += brackets.count(b"[") + brackets.count(b"{")
    for at in range(0, len(brackets), _FEW):
        levels = [*accumulate(map(_STEP.__getitem__, brackets[at : at + _FEW]), initial=shape.depth)]
        shape.depth, shape.deepest = levels[-1], max(shape.deepest, *levels)


def is_flat(body: bytes, most_depth: int) -> bool:
    """Whether it cannot nest too deep, by a count that takes microseconds: characters within strings count as well."""
    return body.count(b"{") + body.count(b"[") <= most_depth


def depth_of(content: Any, most: int) -> int:
    """How deep parsed JSON nests: 1 for a list of numbers; `most` + 1 as soon as it is more than that."""
    level, depth = [content], 0
    while level:
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
            if isinstance(inner, dict | list)
        ]
        depth += 1
        if depth > most:
            break
    return depth
