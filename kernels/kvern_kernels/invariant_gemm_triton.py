# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"
"""Matrix products of one order of sums in Triton; see `invariant_gemm.py`.

Tiles are the same for every shape and a tile goes through the inner dimension alone, from the first element to the
last: neither the number of rows nor that of outputs has a say in the order. A library would choose by both.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .invariant_gemm import piece_size

_ROWS = 128  # the tokens of a tile in batch-invariant steps


@triton.jit(do_not_specialize=["rows", "columns"])
def _product_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    rows,
    columns,
    x_stride,
    INNER: tl.constexpr,
    PIECES: tl.constexpr,
    SIZE: tl.constexpr,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_m, inside_n = (m < rows)[:, None], (n < columns)[None, :]
    k = tl.arange(0, BLOCK_K)
    x = x_ptr + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    w = w_ptr + n.to(tl.int64)[None, :] * INNER + k[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for piece in tl.static_range(PIECES):
        end = tl.minimum((piece + 1) * SIZE, INNER)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in range(piece * SIZE, end, BLOCK_K):
            if EVEN:
                x_tile = tl.load(x + step, mask=inside_m, other=0.0)
                w_tile = tl.load(w + step, mask=inside_n, other=0.0)
            else:
                x_tile = tl.load(x + step, mask=inside_m & (k < end - step)[None, :], other=0.0)
                w_tile = tl.load(w + step, mask=inside_n & (k < end - step)[:, None], other=0.0)
            acc = tl.dot(x_tile, w_tile, acc, input_precision=PRECISION)
        if BIAS and piece == 0:
            acc += tl.load(bias_ptr + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
        total += acc.to(out_ptr.dtype.element_ty).to(tl.float32)
    out = out_ptr + m.to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=inside_m & inside_n)


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None, pieces: int) -> Tensor:
    """As `invariant_gemm.invariant_linear`; `weight` is contiguous, as are the elements of a row of `x`."""
    (rows, inner), columns = x.shape, weight.shape[0]
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    single, size = x.element_size() == 4, piece_size(inner, pieces)
    block_n, block_k = (32, 32) if single else (64, 64)
    _product_kernel[(triton.cdiv(columns, block_n), triton.cdiv(rows, _ROWS))](
        x,
        weight,
        x if bias is None else bias,
        out,
        rows,
        columns,
        x.stride(0),
        INNER=inner,
        PIECES=pieces,
        SIZE=size,
        EVEN=size * pieces == inner and size % block_k == 0,
        BIAS=bias is not None,
        PRECISION="ieee" if single else "tf32",
        BLOCK_M=_ROWS,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=8 if single else 4,
        num_stages=2 if single else 4,
    )
    return out
