# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"
"""Products of few rows with a weight in INT8 in Triton, bound by reading the weight. The reference is `int8.py`.

Two neighbouring int8 numbers are read as one 16-bit word, as `paged_triton.py` reads an FP8 cache: the even and the odd
inner elements have products of their own. They become float16, which holds them exactly; the rows of x are brought into
that form, even and odd apart, by a small kernel first.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .int8 import Int8Weight
from .launch_triton import early_launch, release_next, wait_for_previous
from .paged_triton import COMPILED


@triton.jit
def int8_numbers(words):
    """(the low bytes, the high bytes) of int16 `words`, int8 each, as float16."""
    if COMPILED:  # 1024 + n is a float16 whose low byte is n: no conversions, two words at once
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 bits, low, high;
            .reg .b32 bias;
            mov.b32 bias, 0x64806480;
            xor.b32 bits, $2, 0x80808080;
            prmt.b32 low, bits, 0x64646464, 0x4240;
            prmt.b32 high, bits, 0x64646464, 0x4341;
            sub.rn.f16x2 $0, low, bias;
            sub.rn.f16x2 $1, high, bias;
            }""",
            "=r,=r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    low = (words << 8) >> 8
    return low.to(tl.float16), (words >> 8).to(tl.float16)


@triton.jit
def _split_kernel(x_ptr, out_ptr, x_stride, rows, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """One row of x as float16, its even elements and, `rows` further on, its odd ones."""
    wait_for_previous()
    release_next()
    row = tl.program_id(0).to(tl.int64)
    words = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    for part in tl.static_range(2):
        x = tl.load(x_ptr + row * x_stride + 2 * words + part, mask=words < WORDS, other=0.0).to(tl.float32)
        x = tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16)
        tl.store(out_ptr + (part * rows + row) * WORDS + words, x, mask=words < WORDS)


@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
    x_ptr,
    w_ptr,
    scales_ptr,
    out_ptr,
    rows,
    columns,
    WORDS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    wait_for_previous()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_W)
    inside_n, inside_m = n < columns, m < rows
    w = w_ptr + n.to(tl.int64)[:, None] * WORDS + k[None, :]
    x = x_ptr + m[None, :] * WORDS + k[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in range(0, WORDS, BLOCK_W):
        if EVEN:
            even = tl.load(x + step, mask=inside_m[None, :], other=0.0)
            odd = tl.load(x + rows * WORDS + step, mask=inside_m[None, :], other=0.0)
            tile = tl.load(w + step, eviction_policy="evict_first")
        else:
            inside_k = k + step < WORDS
            mask = inside_m[None, :] & inside_k[:, None]
            even = tl.load(x + step, mask=mask, other=0.0)
            odd = tl.load(x + rows * WORDS + step, mask=mask, other=0.0)
            tile = tl.load(w + step, mask=inside_n[:, None] & inside_k[None, :], other=0, eviction_policy="evict_first")
        w_even, w_odd = int8_numbers(tile)
        acc = tl.dot(w_even, even, acc)
        acc = tl.dot(w_odd, odd, acc)
    release_next()
    acc *= tl.load(scales_ptr + n, mask=inside_n, other=0.0)[:, None]
    out = out_ptr + m.to(tl.int64)[None, :] * columns + n[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=inside_n[:, None] & inside_m[None, :])


@dataclass(frozen=True)
class HeadTiles:
    """Columns (weight rows) and inner words a tile, and pipeline stages.

    Programs have 4 warps: of tiles that two groups of 4 warps shared (Triton 3.6, 128 columns x 32 rows) some results
    were wrong by 3 %, whatever the data.
    """

    block_n: int
    block_w: int
    num_stages: int


def choose_tiles(rows: int) -> HeadTiles:
    """Tiles of a product of `rows` rows.

    Measured on an H200 for 128,256 x 4,096, us against cuBLAS in bf16: 1 row 123.5 / 238.1, 16 127.1 / 244.3, 32 133.6
    / 256.4, 64 152.5 / 272.4 (179.4 with tiles of 64 columns); the bytes alone take 120.
    """
    return HeadTiles(64 if rows <= 32 else 128, 64, 4)


def int8_linear(x: Tensor, weight: Int8Weight, tiles: HeadTiles | None = None) -> Tensor:
    """As `int8.int8_linear`; the last dimension of x is contiguous."""
    rows, inner = x.shape
    columns = weight.values.shape[0]
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    tiles = tiles or choose_tiles(rows)
    words = inner // 2
    split = torch.empty(2, rows, words, dtype=torch.float16, device=x.device)
    _split_kernel[(rows, triton.cdiv(words, 1024))](
        x, split, x.stride(0), rows, WORDS=words, BLOCK=min(1024, triton.next_power_of_2(words)), **early_launch()
    )
    block_m = max(16, min(64, triton.next_power_of_2(rows)))
    _product_kernel[(triton.cdiv(columns, tiles.block_n), triton.cdiv(rows, block_m))](
        split,
        weight.values.view(torch.int16),
        weight.scales,
        out,
        rows,
        columns,
        WORDS=words,
        EVEN=columns % tiles.block_n == 0 and words % tiles.block_w == 0,
        BLOCK_M=block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_W=tiles.block_w,
        num_warps=4,
        num_stages=tiles.num_stages,
        **early_launch(),
    )
    return out
