# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"
"""Matrix products of few rows with a weight matrix (decode) in Triton: bound by reading the weights.

Two things save time against a library's product. The inner dimension is split so that every multiprocessor reads, and
the pieces are not added up here: the operation that follows anyway (residual + RMSNorm, rotary + KV write) adds them
while it reads (`norm_triton.add_rms_norm_parts`, `rotary_triton.rope_and_cache`). And SwiGLU's gate is applied in
the product's epilogue. The weight tile is the left operand (rows of the tensor core's instruction), the few rows of x
the right one. The reference is torch.nn.functional.linear.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .decode_attention_triton import sm_count
from .fp8 import Fp8Weight, ScaledRows
from .launch_triton import bring_to_l2, early_launch, release_next, wait_for_previous

_PIECE = tl.constexpr(256)  # bytes that a thread asks for ahead


@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    w_scale_ptr,
    x_scales_ptr,
    columns_ptr,
    rows,
    columns,
    x_stride,
    INNER: tl.constexpr,
    INNER_EACH: tl.constexpr,
    GATED: tl.constexpr,
    FP8: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    first = tl.program_id(0) * BLOCK_N
    split = tl.program_id(1)
    row_block = tl.program_id(2) * BLOCK_M
    n = first + tl.arange(0, BLOCK_N)
    m = row_block + tl.arange(0, BLOCK_M)
    k = split * INNER_EACH + tl.arange(0, BLOCK_K)
    inside_n = n < columns
    if AHEAD:
        ahead = (w_ptr + n.to(tl.int64) * INNER + split * INNER_EACH).to(tl.int64)[:, None]
        ahead += tl.arange(0, AHEAD // _PIECE)[None, :] * _PIECE
        bring_to_l2(ahead, _PIECE)
        if GATED:
            up = (w_ptr + (columns + n).to(tl.int64) * INNER + split * INNER_EACH).to(tl.int64)[:, None]
            bring_to_l2(up + tl.arange(0, AHEAD // _PIECE)[None, :] * _PIECE, _PIECE)
    wait_for_previous()
    w = w_ptr + n.to(tl.int64)[:, None] * INNER + k[None, :]
    x = x_ptr + m.to(tl.int64)[None, :] * x_stride + k[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    inside_m = (m < rows)[None, :]
    for step in range(0, INNER_EACH, BLOCK_K):
        if EVEN:
            x_tile = tl.load(x + step, mask=inside_m, other=0.0)
            w_tile = tl.load(w + step, eviction_policy="evict_first")
        else:
            inside_k = k + step < INNER
            w_mask = inside_n[:, None] & inside_k[None, :]
            x_tile = tl.load(x + step, mask=inside_m & inside_k[:, None], other=0.0)
            w_tile = tl.load(w + step, mask=w_mask, other=0.0, eviction_policy="evict_first")
        if GATED:
            gate = tl.dot(w_tile, x_tile, gate)
            if EVEN:
                w_tile = tl.load(w + columns * INNER + step, eviction_policy="evict_first")
            else:
                w_tile = tl.load(w + columns * INNER + step, mask=w_mask, other=0.0, eviction_policy="evict_first")
        acc = tl.dot(w_tile, x_tile, acc)
    release_next()
    mask = inside_n[:, None] & (m < rows)[None, :]
    if FP8:
        acc *= tl.load(w_scale_ptr)
    if FP8 and GATED:
        row_scales = tl.load(x_scales_ptr + m, mask=m < rows, other=0.0)[None, :]
        acc *= row_scales
        gate *= row_scales * tl.load(w_scale_ptr)
        if COLUMNS:
            gate *= tl.load(columns_ptr + n, mask=inside_n, other=0.0)[:, None]
            acc *= tl.load(columns_ptr + columns + n, mask=inside_n, other=0.0)[:, None]
    if GATED:
        acc = gate * tl.sigmoid(gate) * acc
    out = out_ptr + (split * rows + m).to(tl.int64)[None, :] * columns + n[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class ProductTiles:
    """Columns (weight rows) and inner elements a tile, splits of the inner dimension, warps and pipeline stages; bytes
    of each weight row that are brought to the L2 cache while the kernel before still computes: 0 or 256 times a power
    of two."""

    block_n: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int
    ahead: int = 0


def choose_tiles(rows: int, columns: int, inner: int, gated: bool, sm_count: int) -> ProductTiles | None:
    """Tiles of a product of `rows` rows with a weight of `columns` rows (of the gate, where `gated`) of `inner`
    elements; None where cuBLAS is faster.

    Measured on an H200, 32 and 64 rows, us against cuBLAS: qkv 6144 x 4096 15.4 and 16.8 / 16.4 and 16.3, o 4096 x 4096
    10.9 and 12.3 / 13.1 and 12.3, gate_up 28672 x 4096 with SwiGLU 60.1 and 62.5 / 61.5 and 66.6, down 4096 x 14336
    31.2 and 33.1 / 33.2 and 35.7; a layer without attention at 1 row 120.8 / 124.9, at 128 rows 216.7 / 147.6.
    """
    if rows > 64 or (rows > 32 and not gated and inner <= 2 * columns):
        return None
    if gated:
        if rows <= 16:
            return ProductTiles(64, 128, 1, 4, 3)
        return ProductTiles(128, 64, 1, 8, 4) if rows <= 32 else ProductTiles(64, 64, 1, 4, 4)
    if rows > 32:
        return ProductTiles(64, 128, 2, 4, 4)
    splits = 1
    while splits < 8 and triton.cdiv(columns, 64) * splits < sm_count:
        splits *= 2
    return ProductTiles(64, 128, splits, 4, 4)


def choose_fp8_tiles(rows: int, columns: int, gated: bool, sm_count: int) -> ProductTiles | None:
    """As `choose_tiles` for products in FP8.

    Measured on an H200, 1 and 32 rows, us against cuBLAS: qkv 7.8 and 8.8 / 9.6 and 9.8, o 5.7 and 6.8 / 7.1 and 7.4,
    down 15.2 and 16.5 / 18.5 and 17.5, gate_up with SwiGLU and quantization 30.8 and 32.6 / 33.5 and 34.6. A layer with
    256 bytes of each weight row brought to the L2 cache ahead 77.6 and 95.8, without 79.4 and 97.0, with 1,024 bytes
    80.4 and 99.2 (bf16: 121.3 and 142.7, without 121.8 and 142.1).
    """
    if rows > 32:
        return None
    if gated:
        return ProductTiles(64, 128, 1, 4, 4, _PIECE.value)
    splits = 1
    while splits < 4 and triton.cdiv(columns, 64) * splits < 1.4 * sm_count:
        splits *= 2
    return ProductTiles(64, 128, splits, 4, 5, _PIECE.value)


def tiles_for(x: Tensor, columns: int, gated: bool) -> ProductTiles | None:
    """The tiles of a product of `x` [M, K] in its type; None where that is the vendor's."""
    rows, inner = x.shape
    if x.element_size() == 1:
        return choose_fp8_tiles(rows, columns, gated, sm_count(x.device))
    return choose_tiles(rows, columns, inner, gated, sm_count(x.device))


def _launch(
    x: Tensor | ScaledRows, weight: Tensor | Fp8Weight, out: Tensor, columns: int, gated: bool, tiles: ProductTiles
) -> None:
    row_scales = scale = column_scales = out  # not read
    values = x.values if isinstance(x, ScaledRows) else x
    stored = weight.values if isinstance(weight, Fp8Weight) else weight
    if isinstance(x, ScaledRows):
        row_scales = x.scales
    if isinstance(weight, Fp8Weight):
        column_scales = out if weight.columns is None else weight.columns
        scale = weight.scale
    rows, inner = values.shape
    block_m = max(16, min(64, triton.next_power_of_2(rows)))
    each = triton.cdiv(triton.cdiv(inner, tiles.block_k), tiles.splits) * tiles.block_k
    even = columns % tiles.block_n == 0 and each * tiles.splits == inner
    _product_kernel[(triton.cdiv(columns, tiles.block_n), tiles.splits, triton.cdiv(rows, block_m))](
        values,
        stored,
        out,
        scale,
        row_scales,
        column_scales,
        rows,
        columns,
        values.stride(0),
        INNER=inner,
        INNER_EACH=each,
        GATED=gated,
        FP8=scale is not out,
        COLUMNS=column_scales is not out,
        EVEN=even,
        AHEAD=tiles.ahead if early_launch() and even and tiles.ahead <= each * stored.element_size() else 0,
        BLOCK_M=block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **early_launch(),
    )


def linear_parts(x: Tensor, weight: Tensor, tiles: ProductTiles) -> Tensor:
    """`x` [M, K] times `weight` [N, K] transposed, as [splits, M, N] float32 that add up to the product."""
    out = torch.empty(tiles.splits, x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    _launch(x, weight, out, weight.shape[0], False, tiles)
    return out


def fp8_linear_parts(x: ScaledRows, weight: Fp8Weight, tiles: ProductTiles) -> ScaledRows:
    """`fp8.fp8_linear` in parts that add up to it, [splits, M, N] float32."""
    rows, columns = x.values.shape[0], weight.values.shape[0]
    out = torch.empty(tiles.splits, rows, columns, dtype=torch.float32, device=x.values.device)
    _launch(x, weight, out, columns, False, tiles)
    return ScaledRows(out, x.scales, weight.columns)


def fp8_gated_linear(x: ScaledRows, weight: Fp8Weight, dtype: torch.dtype, tiles: ProductTiles) -> Tensor:
    """`gated_linear` of rows in FP8, scaled; returns [M, F] in `dtype`."""
    if tiles.splits != 1:
        raise ValueError(f"a gated product cannot be split: tiles.splits must be 1, got {tiles.splits}")
    rows, columns = x.values.shape[0], weight.values.shape[0] // 2
    out = torch.empty(rows, columns, dtype=dtype, device=x.values.device)
    _launch(x, weight, out, columns, True, tiles)
    return out


def gated_linear(x: Tensor, weight: Tensor, tiles: ProductTiles) -> Tensor:
    """silu(x Wg^T) * (x Wu^T) for `x` [M, K] and `weight` [2F, K] = gate | up; returns [M, F] in x's dtype.

    `tiles.splits` must be 1: the gate needs the whole sums.
    """
    if tiles.splits != 1:
        raise ValueError(f"a gated product cannot be split: tiles.splits must be 1, got {tiles.splits}")
    out = torch.empty(x.shape[0], weight.shape[0] // 2, dtype=x.dtype, device=x.device)
    _launch(x, weight, out, weight.shape[0] // 2, True, tiles)
    return out
