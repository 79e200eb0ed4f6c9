# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"
"""Paged causal attention for many query tokens a row in Triton: fresh prompts, and chunks against a cached prefix.
The reference is `attention.py`.

A program takes a tile of query tokens of one row with all query heads of one KV head, and walks the row's context:
first the tiles that all of its tokens see, without masks, then those on the diagonal (FlashAttention-2, Dao 2023).
Programs find their row by bisection over `query_start`, so that nothing is read back to the host; the last tiles of a
row, which see the most, start first.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kv_cache import checked_scales
from .metadata import AttentionMetadata
from .paged_triton import LOG2E, kv_pointers


@triton.jit
def _find_row(query_start_ptr, number, first_row, num_rows, TOKENS: tl.constexpr):
    """The row of tile `number`, where a row of n tokens owns at least ceil(n / TOKENS) tile numbers."""
    origin = tl.load(query_start_ptr + first_row)
    low = first_row
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        start = (tl.load(query_start_ptr + middle) - origin) // TOKENS + middle - first_row
        low = tl.where(start <= number, middle, low)
        high = tl.where(start <= number, high, middle)
    start = (tl.load(query_start_ptr + low) - origin) // TOKENS + low - first_row
    return low, number - start


@triton.jit
def _attend(
    acc,
    total,
    top,
    q,
    k_base,
    v_base,
    table_ptr,
    begin,
    end,
    visible,
    dims,
    scale_log2,
    MASKED: tl.constexpr,
    D: tl.constexpr,
    D_BLOCK: tl.constexpr,
    BS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FP8: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend to the context tokens begin..end-1; `begin` is a multiple of BLOCK_N."""
    for start in range(begin, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        inside_n = positions < end
        offsets = kv_pointers(0, table_ptr, positions, inside_n, dims, D, BS, False)
        if MASKED:
            mask = inside_n[:, None] & (dims < D)[None, :]
            k = tl.load(k_base + offsets, mask=mask, other=0.0)
        elif D == D_BLOCK:
            k = tl.load(k_base + offsets)
        else:
            k = tl.load(k_base + offsets, mask=(dims < D)[None, :], other=0.0)
        if FP8:
            k = k.to(tl.float16)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if MASKED:
            seen = (positions[None, :] <= visible[:, None]) & inside_n[None, :]
            scores = tl.where(seen, scores, float("-inf"))
        # Every tile row sees position 0 in its first tile, so that no maximum stays -inf.
        new_top = tl.maximum(top, tl.max(scores, axis=1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_top[:, None])
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weights, axis=1)
        acc = acc * decay[:, None]
        if MASKED:
            v = tl.load(v_base + offsets, mask=inside_n[:, None] & (dims < D)[None, :], other=0.0)
        elif D == D_BLOCK:
            v = tl.load(v_base + offsets)
        else:
            v = tl.load(v_base + offsets, mask=(dims < D)[None, :], other=0.0)
        if FP8:
            v = v.to(tl.float16)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
        top = new_top
    return acc, total, top


@triton.jit(do_not_specialize=["first_row", "num_rows", "table_stride"])
def _prefill_kernel(
    q_ptr,
    kv_ptr,
    out_ptr,
    table_ptr,
    query_start_ptr,
    seq_lens_ptr,
    scale_log2,
    q_stride,
    kv_stride,
    head_stride,
    table_stride,
    first_row,
    num_rows,
    first_row_ptr,
    kv_scales_ptr,
    ON_DEVICE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    D: tl.constexpr,
    D_BLOCK: tl.constexpr,
    BS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FP8: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(0)
    number = tl.num_programs(1) - 1 - tl.program_id(1)
    if ON_DEVICE:
        num_rows = tl.minimum(tl.load(first_row_ptr) + num_rows, first_row)
        first_row = tl.load(first_row_ptr)
        if first_row >= num_rows:
            return
    row, tile = _find_row(query_start_ptr, number, first_row, num_rows, TOKENS)
    first_token = tl.load(query_start_ptr + row)
    query_len = tl.load(query_start_ptr + row + 1) - first_token
    seq_len = tl.load(seq_lens_ptr + row)
    begin = tile * TOKENS
    if begin >= query_len:
        return
    tile_rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, D_BLOCK)
    tokens = begin + tile_rows // GROUP
    mask = ((tile_rows < TOKENS * GROUP) & (tokens < query_len))[:, None] & (dims < D)[None, :]
    heads = head * GROUP + tile_rows % GROUP
    q_offsets = (first_token + tokens).to(tl.int64) * q_stride + heads * D
    q = tl.load(q_ptr + q_offsets[:, None] + dims[None, :], mask=mask, other=0.0)
    visible = seq_len - query_len + tokens
    if FP8:  # float16 holds all of the cache's numbers; the scales of a head come in with the scores and the result
        q = tl.minimum(tl.maximum(q.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
        scale_log2 *= tl.load(kv_scales_ptr + head)

    k_base = kv_ptr + head.to(tl.int64) * head_stride
    v_base = k_base + kv_stride
    row_table = table_ptr + row.to(tl.int64) * table_stride
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_BLOCK], tl.float32)
    seen_by_all = seq_len - query_len + begin + 1
    diagonal = tl.maximum(seen_by_all, 0) // BLOCK_N * BLOCK_N
    end = tl.minimum(seq_len, seen_by_all + TOKENS - 1)
    acc, total, top = _attend(
        acc, total, top, q, k_base, v_base, row_table, 0, diagonal, visible, dims, scale_log2,
        False, D, D_BLOCK, BS, BLOCK_N, FP8, PRECISION,
    )  # fmt: skip
    acc, total, top = _attend(
        acc, total, top, q, k_base, v_base, row_table, diagonal, end, visible, dims, scale_log2,
        True, D, D_BLOCK, BS, BLOCK_N, FP8, PRECISION,
    )  # fmt: skip
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    if FP8:
        result *= tl.load(kv_scales_ptr + KV_HEADS + head)
    out_offsets = (first_token + tokens).to(tl.int64) * (KV_HEADS * GROUP * D) + heads * D
    tl.store(out_ptr + out_offsets[:, None] + dims[None, :], result.to(out_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class PrefillTiles:
    """Tile and launch parameters: query rows (tokens x heads of a group) and context tokens a tile, warps, stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def choose_tiles(head_dim: int, element_size: int, group: int, max_context: int) -> PrefillTiles:
    """Tiles by head dimension and element size, within a multiprocessor's shared memory and registers.

    Measured on an H200 at head dimension 128: 8k tokens 398 TFLOP/s with 128 x 128 and 379 with 64 x 64 (two programs a
    multiprocessor), but 64 x 1k tokens 258 and 273.
    """
    if element_size > 2:
        warps, stages = (4, 2) if head_dim <= 128 else (8, 1)
        return PrefillTiles(max(16, triton.next_power_of_2(group)), 16, warps, stages)
    if head_dim > 128:
        return PrefillTiles(128, 64, 8, 2)
    if element_size == 1:  # registers hold what is converted: 717 us where 128 x 128 takes 743 (2k after 6k, H200)
        return PrefillTiles(128, 64, 4, 3)
    return PrefillTiles(128, 128, 8, 2) if max_context > 2048 else PrefillTiles(64, 64, 4, 3)


def prefill_attention(
    q: Tensor,
    kv: Tensor,
    meta: AttentionMetadata,
    scale: float,
    out: Tensor,
    first_row: int,
    tiles: PrefillTiles | None = None,
    tokens_of_rows: int | None = None,
    kv_scales: Tensor | None = None,
) -> None:
    """Attention of rows `first_row`.. (any number of query tokens each) into `out` [T, Hq, D].

    With `meta.device_rows` the rows are those from its `first_prompt` on. `tokens_of_rows`: how many query tokens these
    rows have at most (None: as many as q without earlier rows). `kv_scales` [2, Hkv]: of a cache in FP8.
    """
    kv_scales = checked_scales(kv, kv_scales)
    on_device = meta.device_rows
    rows = meta.num_rows - first_row if on_device is None else on_device.max_prompts
    if rows == 0:
        return
    heads, dim = q.shape[1], q.shape[2]
    kv_heads, block_size = kv.shape[1], kv.shape[3]
    group = heads // kv_heads
    # A captured step serves any context; most chunks beside decodes are short.
    context = meta.max_seq_len if on_device is None else 0
    tiles = tiles or choose_tiles(dim, kv.element_size(), group, context)
    tokens = tiles.block_m // group
    # Rows before first_row have at least one token each, so that this bounds the tiles without reading anything back.
    most = q.shape[0] - first_row if tokens_of_rows is None else tokens_of_rows
    numbers = most // tokens + rows
    _prefill_kernel[(kv_heads, numbers)](
        q,
        kv,
        out,
        meta.block_tables,
        meta.query_start,
        meta.seq_lens,
        scale * LOG2E,
        q.stride(0),
        kv.stride(0),
        kv.stride(1),
        meta.block_tables.stride(0),
        # Where the first row is on the device, these are the number of all rows and of those with prompts.
        first_row if on_device is None else meta.num_rows,
        meta.num_rows if on_device is None else on_device.max_prompts,
        meta.seq_lens if on_device is None else on_device.first_prompt,
        meta.seq_lens if kv_scales is None else kv_scales,
        ON_DEVICE=on_device is not None,
        KV_HEADS=kv_heads,
        GROUP=group,
        TOKENS=tokens,
        D=dim,
        D_BLOCK=triton.next_power_of_2(dim),
        BS=block_size,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        FP8=kv_scales is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
