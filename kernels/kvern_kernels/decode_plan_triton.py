# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"
"""What each program of decode attention reads, worked out on the device once a step. The reference is `split_kv.plan`,
to which this is equal entry by entry.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import split_kv
from .launch_triton import after_previous, early_launch

_MAX_PIECES = tl.constexpr(split_kv.MAX_PIECES)
_CANDIDATES = tl.constexpr(len(split_kv.CANDIDATES))
_PIECE_PRICE = tl.constexpr(split_kv.PIECE_PRICE)
_MERGE_PRICE = tl.constexpr(split_kv.MERGE_PRICE)
_TAIL_SHIFT = tl.constexpr(split_kv.TAIL_SHIFT)
_ROWS_EACH = 16  # of a program, which looks at all others to know how many pieces come before its own


@dataclass(frozen=True)
class DecodePlan:
    """`pieces` [capacity, 4] int32: row (-1: none), first token, the one behind the last, how many pieces the row has.
    `merges` [1 + at most R, 3] int32: how many rows have several pieces (in the first entry), then for each of them the
    row, its first piece and how many it has. None where no row can have several."""

    cut: split_kv.Cut
    pieces: Tensor
    merges: Tensor | None


@triton.jit
def _cut_rows(lengths, piece, TILE: tl.constexpr):
    """`split_kv.cut_row`."""
    wanted = tl.minimum(tl.maximum(tl.cdiv(lengths, piece), 1), _MAX_PIECES)
    each = tl.cdiv(tl.cdiv(lengths, wanted), TILE) * TILE
    return tl.maximum(tl.cdiv(lengths, tl.maximum(each, 1)), 1), each


@triton.jit
def _choose_piece(
    lengths,
    inside,
    rows,
    candidates_ptr,
    capacity,
    resident,
    kv_heads,
    TILE: tl.constexpr,
):
    """`split_kv.choose_piece`."""
    candidates = tl.load(candidates_ptr + tl.arange(0, _CANDIDATES))
    pieces, each = _cut_rows(lengths[None, :], candidates[:, None], TILE)
    count = tl.sum(tl.where(inside[None, :], pieces, 0), axis=1)
    longest = tl.max(tl.where(inside[None, :], each, 0), axis=1).to(tl.int64)
    load = (tl.sum(lengths.to(tl.int64), axis=0) + _PIECE_PRICE * count) * kv_heads
    took = tl.maximum(load, (longest + _PIECE_PRICE) * resident) + ((longest * resident) >> _TAIL_SHIFT)
    took += tl.where(count > rows, _MERGE_PRICE * resident, 0)
    took = tl.where(count <= capacity, took, 1 << 62)
    best = tl.min(took, axis=0)
    return tl.min(tl.where(took == best, candidates, 1 << 30), axis=0)


@triton.jit(do_not_specialize=["rows", "capacity", "resident", "kv_heads", "given"])
def _plan_kernel(
    lengths_ptr,
    candidates_ptr,
    pieces_ptr,
    merges_ptr,
    rows,
    capacity,
    resident,
    kv_heads,
    given,
    GIVEN: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    EACH: tl.constexpr,
):
    after_previous()
    others = tl.arange(0, ROWS)
    lengths = tl.load(lengths_ptr + others, mask=others < rows, other=0)
    if GIVEN:
        piece = given
    else:
        piece = _choose_piece(
            lengths,
            others < rows,
            rows,
            candidates_ptr,
            capacity,
            resident,
            kv_heads,
            TILE,
        )
    counts, lasts = _cut_rows(lengths, piece, TILE)
    counts = tl.where(others < rows, counts, 0)

    own = tl.program_id(0) * EACH + tl.arange(0, EACH)
    length = tl.load(lengths_ptr + own, mask=own < rows, other=0)
    count, each = _cut_rows(length, piece, TILE)
    earlier = others[None, :] < own[:, None]
    before = (lasts[None, :] > each[:, None]) | ((lasts[None, :] == each[:, None]) & earlier)
    first = tl.sum(tl.where(before, counts[None, :], 0), axis=1)
    at = tl.arange(0, _MAX_PIECES)[None, :]
    target = pieces_ptr + (first[:, None] + at) * 4
    written = (at < count[:, None]) & (own < rows)[:, None]
    begin = at * each[:, None]
    tl.store(target, own[:, None] + 0 * at, mask=written)
    tl.store(target + 1, begin, mask=written)
    tl.store(target + 2, tl.minimum(begin + each[:, None], length[:, None]), mask=written)
    tl.store(target + 3, count[:, None] + 0 * at, mask=written)

    rank = tl.sum(tl.where(earlier & (counts > 1)[None, :], 1, 0), axis=1)
    entry = merges_ptr + 3 + rank * 3
    merged = (own < rows) & (count > 1)
    tl.store(entry, own, mask=merged)
    tl.store(entry + 1, first, mask=merged)
    tl.store(entry + 2, count, mask=merged)

    if tl.program_id(0) == 0:
        for start in range(tl.sum(counts, axis=0), capacity, ROWS):
            tl.store(pieces_ptr + (start + others) * 4, -1, mask=start + others < capacity)
        tl.store(merges_ptr, tl.sum((counts > 1).to(tl.int32), axis=0))


@functools.cache
def _candidates(device: torch.device) -> Tensor:
    return torch.tensor(split_kv.CANDIDATES, dtype=torch.int32, device=device)


def plan_decode(lengths: Tensor, rows: int, cut: split_kv.Cut) -> DecodePlan:
    """The plan of a launch over the first `rows` of `lengths` [R] int32, read on the device."""
    most_merges = min(rows, cut.capacity - rows)
    ints = torch.empty(cut.capacity * 4 + (1 + most_merges) * 3, dtype=torch.int32, device=lengths.device)
    pieces, merges = ints[: cut.capacity * 4].view(-1, 4), ints[cut.capacity * 4 :].view(-1, 3)
    _plan_kernel[(split_kv.ceil_div(rows, _ROWS_EACH),)](
        lengths,
        _candidates(lengths.device),
        pieces,
        merges,
        rows,
        cut.capacity,
        cut.resident,
        cut.kv_heads,
        cut.piece or 0,
        GIVEN=cut.piece is not None,
        TILE=cut.tile,
        ROWS=max(_ROWS_EACH, triton.next_power_of_2(rows)),
        EACH=_ROWS_EACH,
        num_warps=4 if rows <= 64 else 8,
        **early_launch(),
    )
    if early_launch():
        # A copy waits for all before it, and is waited for: what comes behind it may read the plan before it waits for
        # the kernel before it.
        ints[:1].clone()
    return DecodePlan(cut, pieces, merges if most_merges else None)
