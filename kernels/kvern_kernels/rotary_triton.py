# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"
"""QK-norm, rotary embedding and the write of K and V in one Triton kernel. The reference is `rotary.py`.

A program takes one token and a few heads of q, k or v. The projection may come in parts that are added while they are
read (`small_gemm_triton.py`); then a product stands directly in front, and what does not come from it is read while it
computes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kv_cache import checked_scales
from .launch_triton import early_launch, release_then_wait
from .norm_triton import load_parts
from .vendor_attention import empty_queries


@triton.jit
def _half_heads(
    pointers,
    columns,
    inside,
    row_scale,
    part_stride,
    SCALED: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """One half of some heads of a token, float32, times the scale of its row and those of its `columns`."""
    values = load_parts(pointers, inside, part_stride, PARTS, DTYPE)
    if SCALED:
        values = values * row_scale
    if COLUMNS:
        values = values * tl.load(columns, mask=inside, other=0.0)
    return values


@triton.jit
def _halves(
    pointers,
    columns,
    inside,
    row_scale,
    part_stride,
    SCALED: tl.constexpr,
    COLUMNS: tl.constexpr,
    HALF: tl.constexpr,
    PARTS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Both halves, see `_half_heads`."""
    first = _half_heads(pointers, columns, inside, row_scale, part_stride, SCALED, COLUMNS, PARTS, DTYPE)
    pointers, columns = pointers + HALF, columns + HALF
    second = _half_heads(pointers, columns, inside, row_scale, part_stride, SCALED, COLUMNS, PARTS, DTYPE)
    return first, second


@triton.jit
def _stored(values, scales, DTYPE: tl.constexpr, QUANTIZE: tl.constexpr, CACHE_DTYPE: tl.constexpr):
    """What the cache takes of `values` [heads, dims]: rounded to DTYPE, and to E4M3 by the heads' `scales`."""
    if QUANTIZE:
        quotient = values.to(DTYPE).to(tl.float32) / scales[:, None]
        values = tl.minimum(tl.maximum(quotient, -448.0), 448.0)
    return values.to(CACHE_DTYPE)


@triton.jit
def _turn(cos_sin_ptr, position_ptr, dims, HALF: tl.constexpr):
    """Cosines and sines of a token's position, [1, dims] each."""
    row = cos_sin_ptr + tl.load(position_ptr, cache_modifier=".cg") * (2 * HALF) + dims
    inside = dims < HALF
    return tl.load(row, mask=inside, other=0.0)[None, :], tl.load(row + HALF, mask=inside, other=0.0)[None, :]


@triton.jit(do_not_specialize=["part_stride"])
def _rope_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    kv_ptr,
    cos_sin_ptr,
    positions_ptr,
    slots_ptr,
    q_norm_ptr,
    k_norm_ptr,
    scales_ptr,
    columns_ptr,
    kv_scales_ptr,
    q_stride,
    k_stride,
    v_stride,
    kv_stride,
    head_stride,
    part_stride,
    eps,
    SCALED: tl.constexpr,
    COLUMNS: tl.constexpr,
    QUANTIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    PARTS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    dims = tl.arange(0, HALF_BLOCK)
    if PARTS == 1:
        release_then_wait()
    cos, sin = _turn(cos_sin_ptr, positions_ptr + token, dims, HALF)
    slot = tl.load(slots_ptr + token, cache_modifier=".cg")
    row_scale = tl.load(scales_ptr + token, cache_modifier=".cg") if SCALED else 1.0
    if PARTS > 1:
        release_then_wait()
    q_pieces: tl.constexpr = (HEADS + HEAD_BLOCK - 1) // HEAD_BLOCK
    kv_pieces: tl.constexpr = (KV_HEADS + HEAD_BLOCK - 1) // HEAD_BLOCK
    dtype = out_ptr.dtype.element_ty
    if piece < q_pieces:
        heads = piece * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
        inside = (heads < HEADS)[:, None] & (dims < HALF)[None, :]
        where = heads[:, None] * (2 * HALF) + dims[None, :]
        source, of = q_ptr + token * q_stride + where, columns_ptr + where
        first, second = _halves(source, of, inside, row_scale, part_stride, SCALED, COLUMNS, HALF, PARTS, dtype)
        first, second = _rotated(first, second, dims, cos, sin, q_norm_ptr, eps, HALF, Q_NORM, dtype)
        target = out_ptr + token * (HEADS * 2 * HALF) + where
        tl.store(target, first.to(dtype), mask=inside)
        tl.store(target + HALF, second.to(dtype), mask=inside)
    else:
        is_key = piece < q_pieces + kv_pieces
        number = tl.where(is_key, piece - q_pieces, piece - q_pieces - kv_pieces)
        heads = number * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
        inside = (heads < KV_HEADS)[:, None] & (dims < HALF)[None, :]
        where = heads[:, None] * (2 * HALF) + dims[None, :]
        cell = kv_ptr + heads[:, None].to(tl.int64) * head_stride + slot * (2 * HALF) + dims[None, :]
        written = inside & (slot >= 0)
        cache_dtype = kv_ptr.dtype.element_ty
        kv_scales = heads
        if QUANTIZE:
            place = tl.where(is_key, heads, heads + KV_HEADS)
            kv_scales = tl.load(kv_scales_ptr + place, mask=heads < KV_HEADS, other=1.0)
        if is_key:
            source, of = k_ptr + token * k_stride + where, columns_ptr + HEADS * 2 * HALF + where
            first, second = _halves(source, of, inside, row_scale, part_stride, SCALED, COLUMNS, HALF, PARTS, dtype)
            first, second = _rotated(first, second, dims, cos, sin, k_norm_ptr, eps, HALF, K_NORM, dtype)
        else:
            source, of = v_ptr + token * v_stride + where, columns_ptr + (HEADS + KV_HEADS) * 2 * HALF + where
            first, second = _halves(source, of, inside, row_scale, part_stride, SCALED, COLUMNS, HALF, PARTS, dtype)
            cell += kv_stride
        tl.store(cell, _stored(first, kv_scales, dtype, QUANTIZE, cache_dtype), mask=written)
        tl.store(cell + HALF, _stored(second, kv_scales, dtype, QUANTIZE, cache_dtype), mask=written)


@triton.jit
def _rotated(
    first,
    second,
    dims,
    cos,
    sin,
    norm_ptr,
    eps,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    DTYPE: tl.constexpr,
):
    inside = dims < HALF
    if NORM:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        first *= scale * tl.load(norm_ptr + dims, mask=inside, other=0.0).to(tl.float32)[None, :]
        second *= scale * tl.load(norm_ptr + HALF + dims, mask=inside, other=0.0).to(tl.float32)[None, :]
        # Rounded between norm and rotation, as the reference's separate operations are.
        first, second = first.to(DTYPE).to(tl.float32), second.to(DTYPE).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


def rope_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    kv: Tensor,
    slots: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    scales: Tensor | None = None,
    columns: Tensor | None = None,
    kv_scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """As `rotary.rope_and_cache`; the heads of a token must be contiguous in q, k and v, tokens may be strided.

    q, k and v may come in parts, [P, T, H, D] float32, whose sums rounded to `dtype` are meant.
    """
    parts, part_stride = 1, 0
    if q.dim() == 4:
        parts, part_stride = q.shape[0], q.stride(0)
        q, k, v = q[0], k[0], v[0]
    out = empty_queries(q.shape, dtype or q.dtype, q.device)
    given = (scales, columns, kv_scales)
    _launch(out, q, k, v, parts, part_stride, cos_sin, positions, kv, slots, q_norm, k_norm, eps, *given)
    return out


def _launch(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parts: int,
    part_stride: int,
    cos_sin: Tensor,
    positions: Tensor,
    kv: Tensor,
    slots: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    scales: Tensor | None = None,
    columns: Tensor | None = None,
    kv_scales: Tensor | None = None,
) -> None:
    tokens, heads, dim = q.shape
    kv_scales = checked_scales(kv, kv_scales)
    kv_heads = k.shape[1]
    if tokens:
        head_block = min(8, triton.next_power_of_2(kv_heads))
        pieces = triton.cdiv(heads, head_block) + 2 * triton.cdiv(kv_heads, head_block)
        _rope_kernel[(tokens, pieces)](
            q,
            k,
            v,
            out,
            kv,
            cos_sin,
            positions,
            slots,
            q if q_norm is None else q_norm,
            k if k_norm is None else k_norm,
            q if scales is None else scales,
            q if columns is None else columns,
            q if kv_scales is None else kv_scales,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            kv.stride(0),
            kv.stride(1),
            part_stride,
            eps,
            SCALED=scales is not None,
            COLUMNS=columns is not None,
            QUANTIZE=kv_scales is not None,
            HEADS=heads,
            KV_HEADS=kv_heads,
            HALF=dim // 2,
            HALF_BLOCK=triton.next_power_of_2(dim // 2),
            HEAD_BLOCK=head_block,
            Q_NORM=q_norm is not None,
            K_NORM=k_norm is not None,
            PARTS=parts,
            num_warps=2,
            **early_launch(),
        )
