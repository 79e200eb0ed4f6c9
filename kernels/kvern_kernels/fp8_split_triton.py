# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"
"""Products of few rows in 16 bits with a weight in FP8 in Triton, bound by reading the weight.

A decode step's rows come from attention and from SwiGLU, each made by many programs: to quantize a row, one more
kernel has to look for its largest element. Here the weights become float16, which holds every E4M3 number, and the rows
stay in 16 bits: no such kernel, and no error of the rows. Two neighbouring weights are read as one 16-bit word, as
`paged_triton.py` reads an FP8 cache, so that the even and the odd inner elements have products of their own; the rows
come in that form (`fp8.SplitRows`). As in `small_gemm_triton.py`, the inner dimension is split, and what follows adds
the parts up. The reference is `torch.nn.functional.linear` of the restored weight.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .decode_attention_triton import sm_count
from .fp8 import Fp8Weight, SplitRows
from .launch_triton import bring_to_l2, early_launch, release_next, wait_for_previous
from .paged_triton import fp8_numbers

MOST_ROWS = 32  # up to here rows in 16 bits are faster than quantizing them (`choose_tiles`)
_PIECE = tl.constexpr(256)  # bytes of a weight row that are asked for ahead


@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    out_ptr,
    rows,
    columns,
    WORDS: tl.constexpr,
    WORDS_EACH: tl.constexpr,
    EVEN: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    split = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = split * WORDS_EACH + tl.arange(0, BLOCK_W)
    inside_n, inside_m = n < columns, m < rows
    if AHEAD:
        bring_to_l2((w_ptr + n.to(tl.int64) * WORDS + split * WORDS_EACH).to(tl.int64), _PIECE)
    wait_for_previous()
    w = w_ptr + n.to(tl.int64)[:, None] * WORDS + k[None, :]
    x = x_ptr + m[None, :] * WORDS + k[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in range(0, WORDS_EACH, BLOCK_W):
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
        w_even, w_odd = fp8_numbers(tile)
        acc = tl.dot(w_even, even, acc)
        acc = tl.dot(w_odd, odd, acc)
    release_next()
    acc *= tl.load(scale_ptr)
    out = out_ptr + (split * rows + m).to(tl.int64)[None, :] * columns + n[:, None]
    tl.store(out, acc, mask=inside_n[:, None] & inside_m[None, :])


@dataclass(frozen=True)
class SplitTiles:
    """Columns (weight rows) and inner words a tile, splits of the inner dimension, and pipeline stages. Programs have 4
    warps: Triton 3.6 gives wrong sums for some tiles that two groups of 4 share (`int8_triton.HeadTiles`)."""

    block_n: int
    block_w: int
    splits: int
    num_stages: int


def choose_tiles(columns: int, sm_count: int) -> SplitTiles:
    """Tiles of a product with a weight of `columns` rows."""
    splits = 1
    while splits < 4 and triton.cdiv(columns, 64) * splits < 1.4 * sm_count:
        splits *= 2
    return SplitTiles(64, 64, splits, 4)


def takes(rows: int, weight: Fp8Weight) -> bool:
    """`rows` rows are to be multiplied in 16 bits."""
    return 0 < rows <= MOST_ROWS and weight.values.shape[1] % 2 == 0


def linear_parts(x: SplitRows, weight: Fp8Weight, tiles: SplitTiles | None = None) -> Tensor:
    """`x` [M, K], M at most MOST_ROWS, times `weight` [N, K] transposed, its rows' own scales aside: [splits, M, N]
    float32 that add up to the product."""
    _, rows, words = x.values.shape
    columns, device = weight.values.shape[0], x.values.device
    tiles = tiles or choose_tiles(columns, sm_count(device))
    out = torch.empty(tiles.splits, rows, columns, dtype=torch.float32, device=device)
    each = triton.cdiv(triton.cdiv(words, tiles.block_w), tiles.splits) * tiles.block_w
    even = columns % tiles.block_n == 0 and each * tiles.splits == words
    _product_kernel[(triton.cdiv(columns, tiles.block_n), tiles.splits)](
        x.values,
        weight.values.view(torch.int16),
        weight.scale,
        out,
        rows,
        columns,
        WORDS=words,
        WORDS_EACH=each,
        EVEN=even,
        AHEAD=bool(early_launch()) and even and _PIECE.value <= 2 * each,
        BLOCK_M=max(16, triton.next_power_of_2(rows)),
        BLOCK_N=tiles.block_n,
        BLOCK_W=tiles.block_w,
        num_warps=4,
        num_stages=tiles.num_stages,
        **early_launch(),
    )
    return out
