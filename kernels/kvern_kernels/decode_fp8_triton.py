# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"
"""The decode kernel over a KV cache in FP8; everything around it is in `decode_attention_triton.py`.

Tiles are words of two dimensions (`paged_triton.py`): the even and the odd ones have products of their own, whose sum
is that over all. Products are in float16, exact for K and V. The scales of a head's K and V multiply the scores and the
result, not the tiles.
"""

import triton
import triton.language as tl

from .launch_triton import after_previous
from .paged_triton import (
    fp8_numbers,
    head_offsets,
    hide,
    kv_pointers,
    online_softmax,
    piece_of,
    queries_of,
    store_stats,
)


@triton.jit
def _load_query(pointers, mask):
    """Query elements as float16; bfloat16 reaches further, infinity would make NaN of a whole row."""
    q = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    return tl.minimum(tl.maximum(q, -65504.0), 65504.0).to(tl.float16)


@triton.jit
def _numbers(pointers, inside, WHOLE: tl.constexpr):
    """The even and the odd numbers of the words at `pointers`; those that are not `inside` are 0 where not the WHOLE
    tile is."""
    if WHOLE:
        return fp8_numbers(tl.load(pointers))
    else:
        return fp8_numbers(tl.load(pointers, mask=inside, other=0))


@triton.jit
def _store_words(target, even, odd, inside):
    """The numbers of words side by side, in target's type."""
    tl.store(target, even.to(target.dtype.element_ty), mask=inside)
    tl.store(target + 1, odd.to(target.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["table_stride"])
def decode_fp8_kernel(
    q_ptr,
    kv_ptr,
    out_ptr,
    partial_ptr,
    stats_ptr,
    pieces_ptr,
    table_ptr,
    query_start_ptr,
    seq_lens_ptr,
    kv_scales_ptr,
    scale_log2,
    q_stride,
    kv_stride,
    head_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MAX_Q: tl.constexpr,
    D: tl.constexpr,
    WORDS: tl.constexpr,
    BS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """As `_decode_kernel` over a cache of int16 words, of which a tile is WORDS wide and strides consist."""
    row, begin, end, pieces = piece_of(pieces_ptr, tl.program_id(1))
    after_previous()
    head = tl.program_id(0)
    if row < 0:
        return
    first_token, query_len, seq_len = queries_of(row, query_start_ptr, seq_lens_ptr, end, MAX_Q)
    tile_rows = tl.arange(0, BLOCK_M)
    words = tl.arange(0, WORDS)
    inside_w = (words < D // 2)[None, :]
    inside = (tile_rows < query_len * GROUP)[:, None] & inside_w
    q_offsets = head_offsets(first_token, tile_rows, head, q_stride, GROUP, D)
    q_even = _load_query(q_ptr + q_offsets[:, None] + 2 * words[None, :], inside)
    q_odd = _load_query(q_ptr + q_offsets[:, None] + 2 * words[None, :] + 1, inside)
    visible = seq_len - query_len + tile_rows // GROUP  # the last position each tile row sees
    scale_log2 *= tl.load(kv_scales_ptr + head)

    k_base = kv_ptr + head.to(tl.int64) * head_stride
    row_table = table_ptr + row.to(tl.int64) * table_stride
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    even = tl.zeros([BLOCK_M, WORDS], tl.float32)
    odd = tl.zeros([BLOCK_M, WORDS], tl.float32)
    for start in range(begin, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        # Behind the end the last token is read again: cheaper than a mask for each load, and never seen.
        read = tl.minimum(positions, end - 1)
        offsets = kv_pointers(0, row_table, read, True, words, D // 2, BS, BS % BLOCK_N == 0)
        k_even, k_odd = _numbers(k_base + offsets, inside_w, D == 2 * WORDS)
        scores = tl.dot(q_even, tl.trans(k_even))
        scores = tl.dot(q_odd, tl.trans(k_odd), scores) * scale_log2
        scores = hide(scores, positions, visible, end, MAX_Q)
        weights, decay, top, total = online_softmax(scores, top, total)
        weights = weights.to(tl.float16)
        v_even, v_odd = _numbers(k_base + kv_stride + offsets, inside_w, D == 2 * WORDS)
        even = tl.dot(weights, v_even, even * decay[:, None])
        odd = tl.dot(weights, v_odd, odd * decay[:, None])

    v_scale = tl.load(kv_scales_ptr + KV_HEADS + head)
    even, odd = even * v_scale, odd * v_scale
    out_offsets = head_offsets(first_token, tile_rows, head, KV_HEADS * GROUP * D, GROUP, D)
    if pieces == 1:
        share = 1.0 / tl.where(total > 0, total, 1.0)[:, None]
        _store_words(out_ptr + out_offsets[:, None] + 2 * words[None, :], even * share, odd * share, inside)
        return

    piece = tl.program_id(1).to(tl.int64) * KV_HEADS + head
    part = partial_ptr + piece * (MAX_Q * GROUP * D) + tile_rows[:, None] * D + 2 * words[None, :]
    _store_words(part, even, odd, inside)
    store_stats(stats_ptr, piece, tile_rows, top, total, MAX_Q * GROUP)
