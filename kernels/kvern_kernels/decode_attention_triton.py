# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"
"""Paged attention for few query tokens a row (decode, verification) in Triton. The reference is `attention.py`.

A program reads one row, one KV head and one piece of the context (flash-decoding, Dao et al. 2023). The query heads of
the KV head and the row's 1..8 query tokens are the rows of its tile, so K and V are read once. A second, small kernel
merges the pieces of rows that were cut. Which program reads what is worked out on the device once a step
(`decode_plan_triton.py`), so that a captured graph serves any lengths.

A head of a token is whole in one program: where the product behind takes rows quantized by blocks of a head's size
(`fp8.BlockScaledRows`), whichever kernel is last for it writes it in E4M3, with its scale.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import split_kv
from .decode_fp8_triton import decode_fp8_kernel
from .decode_plan_triton import DecodePlan, plan_decode
from .kv_cache import checked_scales
from .launch_triton import after_previous, early_launch, release_then_wait
from .metadata import AttentionMetadata, DecodeWorkspace
from .paged_triton import (
    LOG2E,
    e4m3,
    head_offsets,
    hide,
    kv_pointers,
    online_softmax,
    piece_of,
    queries_of,
    scale_pointers,
    store_stats,
    to_448,
)
from .split_kv import Cut

MAX_QUERY_LEN = 8
_MERGED_AT_ONCE = 32  # rows
_FEW_ROWS = 8


@triton.jit(do_not_specialize=["table_stride", "scales_stride"])
def _decode_kernel(
    q_ptr,
    kv_ptr,
    out_ptr,
    partial_ptr,
    stats_ptr,
    pieces_ptr,
    table_ptr,
    query_start_ptr,
    seq_lens_ptr,
    scale_log2,
    q_stride,
    kv_stride,
    head_stride,
    table_stride,
    out_scales_ptr,
    scales_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MAX_Q: tl.constexpr,
    D: tl.constexpr,
    D_BLOCK: tl.constexpr,
    BS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    QUANTIZE: tl.constexpr,
):
    row, begin, end, pieces = piece_of(pieces_ptr, tl.program_id(1))
    after_previous()
    head = tl.program_id(0)
    if row < 0:
        return
    first_token, query_len, seq_len = queries_of(row, query_start_ptr, seq_lens_ptr, end, MAX_Q)

    tile_rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, D_BLOCK)
    inside_d = dims < D
    inside = (tile_rows < query_len * GROUP)[:, None] & inside_d[None, :]
    q_offsets = head_offsets(first_token, tile_rows, head, q_stride, GROUP, D)
    q = tl.load(q_ptr + q_offsets[:, None] + dims[None, :], mask=inside, other=0.0)
    visible = seq_len - query_len + tile_rows // GROUP  # the last position each tile row sees

    k_base = kv_ptr + head.to(tl.int64) * head_stride
    v_base = k_base + kv_stride
    row_table = table_ptr + row.to(tl.int64) * table_stride
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_BLOCK], tl.float32)
    for start in range(begin, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        inside_n = positions < end
        offsets = kv_pointers(0, row_table, positions, inside_n, dims, D, BS, BS % BLOCK_N == 0)
        mask = inside_n[:, None] & inside_d[None, :]
        k = tl.load(k_base + offsets, mask=mask, other=0.0)
        scores = hide(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2, positions, visible, end, MAX_Q)
        weights, decay, top, total = online_softmax(scores, top, total)
        v = tl.load(v_base + offsets, mask=mask, other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)

    out_offsets = head_offsets(first_token, tile_rows, head, KV_HEADS * GROUP * D, GROUP, D)
    if pieces == 1:
        result = acc / tl.where(total > 0, total, 1.0)[:, None]
        target = out_ptr + out_offsets[:, None] + dims[None, :]
        if QUANTIZE:
            scales, by = to_448(tl.max(tl.abs(result), axis=1))
            tl.store(target, e4m3(result * by[:, None]), mask=inside)
            places = scale_pointers(out_scales_ptr, first_token, tile_rows, head, scales_stride, GROUP)
            tl.store(places, scales, mask=tile_rows < query_len * GROUP)
        else:
            tl.store(target, result.to(out_ptr.dtype.element_ty), mask=inside)
        return

    piece = tl.program_id(1).to(tl.int64) * KV_HEADS + head
    part = partial_ptr + piece * (MAX_Q * GROUP * D) + tile_rows[:, None] * D + dims[None, :]
    tl.store(part, acc, mask=inside)
    store_stats(stats_ptr, piece, tile_rows, top, total, MAX_Q * GROUP)


@triton.jit(do_not_specialize=["scales_stride"])
def _merge_kernel(
    out_ptr,
    out_scales_ptr,
    partial_ptr,
    stats_ptr,
    merges_ptr,
    query_start_ptr,
    scales_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MAX_Q: tl.constexpr,
    D: tl.constexpr,
    D_BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    QUANTIZE: tl.constexpr,
):
    """Merge the pieces of the rows that have several, PIECES at a time, for one query token and head, by their maxima
    and sums. There are programs for some rows at a time only: mostly few rows were cut, and programs without work are
    not free."""
    count = tl.load(merges_ptr)
    release_then_wait()
    if tl.program_id(0) >= count:
        return
    head = tl.program_id(1)
    token = tl.program_id(2)
    dims = tl.arange(0, D_BLOCK)
    tile_row = token * GROUP + head % GROUP
    kv_heads: tl.constexpr = HEADS // GROUP
    rows: tl.constexpr = MAX_Q * GROUP
    for number in range(tl.program_id(0), count, tl.num_programs(0)):
        entry = merges_ptr + 3 + 3 * number
        row, first, used = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        out_token = row
        asked = True
        if MAX_Q > 1:
            out_token = tl.load(query_start_ptr + row) + token
            asked = out_token < tl.load(query_start_ptr + row + 1)
        if asked:
            top = float("-inf")
            total = 0.0
            acc = tl.zeros([D_BLOCK], tl.float32)
            for start in range(0, used, PIECES):
                pieces = start + tl.arange(0, PIECES)
                inside = pieces < used
                owner = (first + pieces).to(tl.int64) * kv_heads + head // GROUP
                parts = partial_ptr + owner[:, None] * (rows * D) + tile_row * D + dims[None, :]
                stats = stats_ptr + owner * (2 * rows) + tile_row
                values = tl.load(parts, mask=inside[:, None] & (dims < D)[None, :], other=0.0)
                tops = tl.load(stats, mask=inside, other=float("-inf"))
                totals = tl.load(stats + rows, mask=inside, other=0.0)
                new_top = tl.maximum(top, tl.max(tops, axis=0))
                weights = tl.exp2(tops - new_top)
                decay = tl.exp2(top - new_top)
                acc = acc * decay + tl.sum(values * weights[:, None], axis=0)
                total = total * decay + tl.sum(totals * weights, axis=0)
                top = new_top
            target = out_ptr + (out_token.to(tl.int64) * HEADS + head) * D + dims
            result = acc / total
            if QUANTIZE:
                head_scale, by = to_448(tl.max(tl.abs(result), axis=0))
                tl.store(target, e4m3(result * by), mask=dims < D)
                tl.store(out_scales_ptr + head * scales_stride + out_token, head_scale)
            else:
                tl.store(target, result.to(out_ptr.dtype.element_ty), mask=dims < D)


@dataclass(frozen=True)
class DecodeTiles:
    """Tile and launch parameters: context tokens a tile, warps and pipeline stages."""

    block_n: int
    num_warps: int
    num_stages: int


def choose_tiles(head_dim: int, element_size: int, rows: int, few: bool) -> DecodeTiles:
    """Tiles for `rows` tile rows (query tokens x heads of a group) of `head_dim` elements of `element_size` bytes.

    `few`: at most one program a multiprocessor runs before splitting. Then tiles of 128 tokens are faster, fewer
    iterations hide more latency (H200, 1 row of 216: 5.1 us against 6.0); with more, tiles of 64 are, of which two
    programs fit a multiprocessor (32 rows of 384: 17.9 us against 18.6, of 4,088 131 against 134; 128 rows of 384 54.6
    against 55.3).
    """
    if element_size > 2:
        return DecodeTiles(16, 8 if rows > 32 else 4, 2)
    if element_size == 1:
        return DecodeTiles(64, 8, 3) if rows > 32 else DecodeTiles(64 if head_dim > 128 else 128, 4, 2)
    if rows > 32:
        return DecodeTiles(32, 8, 3)
    if head_dim > 128:
        return DecodeTiles(32, 4, 3)
    return DecodeTiles(128 if few else 64, 4, 3)


_workspaces: dict[torch.device, DecodeWorkspace] = {}


def _workspace(meta: AttentionMetadata, q: Tensor, pieces: int, query_len: int) -> DecodeWorkspace:
    sizes = (pieces, q.shape[1], q.shape[2], query_len)
    given = meta.workspace
    if given is not None:
        if not given.holds(*sizes):
            raise ValueError(
                f"the decode workspace is too small for {pieces} pieces x {q.shape[1]} heads x {query_len} query "
                f"tokens of head_dim {q.shape[2]}; allocate it with DecodeWorkspace.allocate"
            )
        return given
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        # From the graph's own pool: shared memory could be replaced by a larger piece while the graph lives.
        return DecodeWorkspace.allocate(*sizes, q.device)
    kept = _workspaces.get(q.device)
    if kept is None or not kept.holds(*sizes):
        kept = _workspaces[q.device] = DecodeWorkspace.allocate(*sizes, q.device)
    return kept


@functools.cache
def sm_count(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; that of a small one where there is none (interpreted tests)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


def _kernel_for(
    q: Tensor, kv: Tensor, out: Tensor, kv_scales: Tensor | None, out_scales: Tensor | None
) -> tuple[Any, Tensor, list[Tensor], dict[str, Any]]:
    """(kernel, the cache as it takes it, its further tensors, what else is its own, by name)."""
    d_block = triton.next_power_of_2(q.shape[2])
    if kv_scales is None:
        own = {
            "out_scales_ptr": out if out_scales is None else out_scales,
            "scales_stride": 0 if out_scales is None else out_scales.stride(1),
            "QUANTIZE": out_scales is not None,
            "D_BLOCK": d_block,
            "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        }
        return _decode_kernel, kv, [], own
    if out_scales is not None:
        raise ValueError("attention over a cache in FP8 does not write E4M3 (out_scales must be None)")
    words = max(16, d_block // 2)  # the least that a product can be made of
    return decode_fp8_kernel, kv.view(torch.int16), [kv_scales], {"WORDS": words}


def _cut(meta: AttentionMetadata, rows: int, kv_heads: int, tile: int, device: torch.device, piece: int | None) -> Cut:
    multiprocessors = sm_count(device)
    if meta.each_alone and piece is None:
        piece = split_kv.fixed_piece(rows, multiprocessors)
    padded = meta.device_rows is not None
    capacity = split_kv.most_pieces(rows, meta.max_seq_len, kv_heads, multiprocessors, piece, padded)
    return Cut(tile, capacity, split_kv.PROGRAMS * multiprocessors, kv_heads, piece)


def _plan(meta: AttentionMetadata, seq_lens: Tensor, rows: int, cut: Cut) -> DecodePlan:
    """The plan of a launch, worked out by the first of the layers that have this metadata."""
    key = ("decode", rows, cut)
    plan: DecodePlan | None = meta.plan_cache.get(key)
    if plan is None:
        plan = meta.plan_cache[key] = plan_decode(seq_lens, rows, cut)
    return plan


def decode_attention(
    q: Tensor,
    kv: Tensor,
    meta: AttentionMetadata,
    scale: float,
    out: Tensor,
    rows: int,
    query_len: int,
    piece: int | None = None,
    tiles: DecodeTiles | None = None,
    seq_lens: Tensor | None = None,
    kv_scales: Tensor | None = None,
    out_scales: Tensor | None = None,
) -> None:
    """Attention of the first `rows` rows, each with at most `query_len` (<= 8) query tokens, into `out` [T, Hq, D].

    With `query_len` 1 row i's token is token i. `piece` (tokens of a piece of a context) and `tiles` default to the
    measured choice; `seq_lens` [R] int32 stands in for that of `meta`, in all calls of a step; `kv_scales` [2, Hkv] are
    those of a cache in FP8. With `out_scales` [T, Hq] float32, of which those of a head are contiguous, `out` is in
    E4M3; not over such a cache. Raises ValueError where `query_len` is over 8 or the given workspace is too small.
    """
    if query_len > MAX_QUERY_LEN:
        raise ValueError(f"query_len must be at most {MAX_QUERY_LEN}, got {query_len}")
    if rows == 0:
        return
    seq_lens = meta.seq_lens if seq_lens is None else seq_lens
    heads, dim = q.shape[1], q.shape[2]
    kv_heads, block_size = kv.shape[1], kv.shape[3]
    group = heads // kv_heads
    # How a context is cut must not follow from how many heads this rank has.
    few = (rows if meta.each_alone else rows * kv_heads) <= sm_count(q.device)
    tiles = tiles or choose_tiles(dim, kv.element_size(), group * query_len, few)
    cut = _cut(meta, rows, kv_heads, tiles.block_n, q.device, piece)
    work = _workspace(meta, q, cut.capacity, query_len)
    plan = _plan(meta, seq_lens, rows, cut)
    kernel, stored, extra, own = _kernel_for(q, kv, out, checked_scales(kv, kv_scales), out_scales)
    kernel[(kv_heads, cut.capacity)](
        q,
        stored,
        out,
        work.partial,
        work.stats,
        plan.pieces,
        meta.block_tables,
        meta.query_start,
        seq_lens,
        *extra,
        scale * LOG2E,
        q.stride(0),
        stored.stride(0),
        stored.stride(1),
        meta.block_tables.stride(0),
        KV_HEADS=kv_heads,
        GROUP=group,
        MAX_Q=query_len,
        D=dim,
        BS=block_size,
        BLOCK_M=max(16, triton.next_power_of_2(group * query_len)),
        BLOCK_N=tiles.block_n,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **own,
        **early_launch(),
    )
    if plan.merges is not None:
        _merge(out, out_scales, work, meta, plan.merges, rows, group, query_len)


def _merge(
    out: Tensor,
    out_scales: Tensor | None,
    work: DecodeWorkspace,
    meta: AttentionMetadata,
    merges: Tensor,
    rows: int,
    group: int,
    query_len: int,
) -> None:
    heads, dim = out.shape[1], out.shape[2]
    most = merges.shape[0] - 1
    # Of few rows all pieces at once; of many rows, which have few pieces each, a warp merges them.
    few = rows <= _FEW_ROWS
    _merge_kernel[(min(most, _MERGED_AT_ONCE), heads, query_len)](
        out,
        out if out_scales is None else out_scales,
        work.partial,
        work.stats,
        merges,
        meta.query_start,
        0 if out_scales is None else out_scales.stride(1),
        HEADS=heads,
        GROUP=group,
        MAX_Q=query_len,
        D=dim,
        D_BLOCK=triton.next_power_of_2(dim),
        PIECES=split_kv.MAX_PIECES if few else 8,
        QUANTIZE=out_scales is not None,
        num_warps=4 if few else 1,
        **early_launch(),
    )
