# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"
"""Copies the contexts of some rows out of the paged cache, for attention kernels that want K and V in one piece.
The reference is `attention.gather_context`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kv_cache import checked_scales


@triton.jit(do_not_specialize=["table_stride", "length", "first_row"])
def _gather_kernel(
    kv_ptr,
    out_ptr,
    table_ptr,
    seq_lens_ptr,
    kv_scales_ptr,
    kv_stride,
    head_stride,
    table_stride,
    first_row,
    length,
    SCALED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    D_BLOCK: tl.constexpr,
    BS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    positions = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    part = tl.program_id(1)  # K heads, then V heads
    row = tl.program_id(2)
    dims = tl.arange(0, D_BLOCK)
    context = tl.load(seq_lens_ptr + first_row + row)
    table = table_ptr + (first_row + row).to(tl.int64) * table_stride
    blocks = tl.load(table + positions // BS, mask=positions < context, other=0).to(tl.int64)
    source = kv_ptr + (part // KV_HEADS).to(tl.int64) * kv_stride + (part % KV_HEADS).to(tl.int64) * head_stride
    source += (blocks * (BS * D) + (positions % BS) * D)[:, None] + dims[None, :]
    values = tl.load(source, mask=(positions < context)[:, None] & (dims < D)[None, :], other=0.0)
    if SCALED:
        values = values.to(tl.float32) * tl.load(kv_scales_ptr + part)
    rows = tl.num_programs(2)
    owner = ((part // KV_HEADS).to(tl.int64) * rows + row) * KV_HEADS + part % KV_HEADS
    target = out_ptr + (owner * length + positions)[:, None] * D + dims[None, :]
    tl.store(target, values.to(out_ptr.dtype.element_ty), mask=(positions < length)[:, None] & (dims < D)[None, :])


def gather_contexts(
    kv: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    first_row: int,
    rows: int,
    length: int,
    dtype: torch.dtype | None = None,
    kv_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """K and V of `rows` rows from `first_row` on, each [rows, Hkv, length, D]; zero behind a row's context.

    `kv` [2, Hkv, N, bs, D]; `block_tables` [R, max_blocks] int32; `seq_lens` [R] int32, on the device. Of a cache
    in FP8 with `kv_scales` [2, Hkv] they come in `dtype`.
    """
    _, kv_heads, _, block_size, dim = kv.shape
    kv_scales = checked_scales(kv, kv_scales)
    out = torch.empty(2, rows, kv_heads, length, dim, dtype=dtype or kv.dtype, device=kv.device)
    _gather_kernel[(triton.cdiv(length, 64), 2 * kv_heads, rows)](
        kv,
        out,
        block_tables,
        seq_lens,
        seq_lens if kv_scales is None else kv_scales,
        kv.stride(0),
        kv.stride(1),
        block_tables.stride(0),
        first_row,
        length,
        SCALED=kv_scales is not None,
        KV_HEADS=kv_heads,
        D=dim,
        D_BLOCK=triton.next_power_of_2(dim),
        BS=block_size,
        TOKENS=64,
        num_warps=4,
    )
    return out[0], out[1]
