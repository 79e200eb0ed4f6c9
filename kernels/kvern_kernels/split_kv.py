"""Into which pieces a decode step cuts its contexts, so that all of a GPU reads until the end: pure arithmetic.

One program reads one row, one KV head and one piece of the context (flash-decoding, Dao et al. 2023). A step lasts as
long as the program that ends last. Few rows must be cut, or most multiprocessors stand idle; many rows of unequal
length as well, or one long row is still being read when all others have ended. But a piece has a price, and all pieces
of a row have to be merged. So the length of a piece follows from the lengths of the whole batch: of some candidates,
the one whose step is over first by the estimate of list scheduling, where pieces are begun longest first on as many
programs as the card holds at once (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969: no later than the
average load plus the longest piece).

Lengths are known on the device only, where a captured graph serves any of them: `decode_plan_triton.py` computes this
there, once a step. What is fixed for a launch is the number of programs (`most_pieces`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

MAX_PIECES = 64  # of one row; where rows are few, the merge holds all of them at once
LEAST_PIECE = 128  # tokens; less is not worth a program even where the card is idle
# Lengths of pieces that are tried, a power of two of them, the last of which cuts nothing.
CANDIDATES = (*(LEAST_PIECE << shift for shift in range(15)), 1 << 30)
# Prices in tokens that a program could have read meanwhile, fitted to measurements (docs/performance-kernels.md).
PIECE_PRICE = 50
MERGE_PRICE = 120
TAIL_SHIFT = 3  # what is left over at the end of a step: this part of the longest piece, 1 / 8
PROGRAMS = 2  # of a multiprocessor at once, each of which then reads as fast as one that is alone
_FULL = 4  # programs a multiprocessor with which the card reads at full speed whatever their lengths
# Programs a launch has for pieces beyond one a row, as multiples of what the card holds at once: so many with the rows
# themselves, within bounds. Those without a piece end at once, but 264 of them take 0.7 us.
_TOTAL, _LEAST_EXTRA, _MOST_EXTRA = 4, 0.5, 3


@dataclass(frozen=True)
class Cut:
    """How a launch cuts contexts: whole tiles of `tile` tokens, programs for `capacity` pieces a KV head, of which
    `resident` / `kv_heads` are on the card at once. `piece`: the tokens of a piece where they may not depend on other
    rows."""

    tile: int
    capacity: int
    resident: int
    kv_heads: int
    piece: int | None = None


@dataclass(frozen=True)
class Piece:
    """Tokens `begin` to `end` of a row's context, one of `pieces`."""

    row: int
    begin: int
    end: int
    pieces: int


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def most_pieces(
    rows: int, max_context: int, kv_heads: int, sm_count: int, piece: int | None = None, padded: bool = False
) -> int:
    """Pieces a KV head that a launch of `rows` rows of at most `max_context` tokens has programs for, on a card with
    `sm_count` multiprocessors; `piece` as in `Cut`. `padded`: many rows may have no token, which are nearly free."""
    most = rows * min(MAX_PIECES, max(1, ceil_div(max_context, piece or LEAST_PIECE)))
    held = PROGRAMS * sm_count / kv_heads
    extra = max(_LEAST_EXTRA * held, min(_MOST_EXTRA * held, _TOTAL * held - (0 if padded else rows)))
    return most if piece else min(most, rows + math.ceil(extra))


def fixed_piece(rows: int, sm_count: int) -> int:
    """The tokens of a piece that follow from the number of rows alone: where a row's result must not depend on how long
    the others are, and every step has as many rows."""
    share = max(1, ceil_div(_FULL * rows, sm_count))
    return LEAST_PIECE << (share - 1).bit_length()


def cut_row(context: int, piece: int, tile: int) -> tuple[int, int]:
    """(pieces, tokens of each) of one row: equal but for the last one, whole tiles, at most MAX_PIECES."""
    wanted = min(max(ceil_div(context, piece), 1), MAX_PIECES)
    each = ceil_div(ceil_div(context, wanted), tile) * tile
    return (ceil_div(context, each) if each else 1), each


def estimate(contexts: Sequence[int], piece: int, cut: Cut) -> int | None:
    """How long a step takes, in tokens that one program reads times `cut.resident`; None where that many pieces do not
    fit."""
    rows = [cut_row(context, piece, cut.tile) for context in contexts]
    count = sum(pieces for pieces, _ in rows)
    if count > cut.capacity:
        return None
    longest = max(each for _, each in rows)
    load = (sum(contexts) + PIECE_PRICE * count) * cut.kv_heads
    step = max(load, (longest + PIECE_PRICE) * cut.resident) + (longest * cut.resident >> TAIL_SHIFT)
    return step + MERGE_PRICE * cut.resident * (count > len(contexts))


def choose_piece(contexts: Sequence[int], cut: Cut) -> int:
    """The tokens of a piece: the candidate whose step is over first, the smaller one of equals."""
    if cut.piece is not None:
        return cut.piece
    found = [(took, piece) for piece in CANDIDATES if (took := estimate(contexts, piece, cut)) is not None]
    return min(found)[1]


def plan(contexts: Sequence[int], cut: Cut) -> list[Piece]:
    """The pieces of a step in the order in which programs take them: rows with longer pieces first."""
    piece = choose_piece(contexts, cut)
    rows = [(*cut_row(context, piece, cut.tile), row) for row, context in enumerate(contexts)]
    return [
        Piece(row, at * each, min((at + 1) * each, contexts[row]), pieces)
        for pieces, each, row in sorted(rows, key=lambda cut_row: (-cut_row[1], cut_row[2]))
        for at in range(pieces)
    ]
