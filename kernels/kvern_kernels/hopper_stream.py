"""Products of few rows (decode) on Hopper whose weights stream through shared memory (`hopper_stream.cu`).

The launch is early (`launch_triton.py`): a block asks for as much of its weights as its ring holds before the kernel in
front of it has ended, so that the memory does not idle at the seams between a step's kernels. Sums of pieces of the
inner dimension are added up by the operation behind, as those of `small_gemm_triton.py`, which stays for other cards
and shapes. `prepare` compiles it at start. The reference is torch.nn.functional.linear.

In FP8 the rows of a product may be quantized by blocks (`fp8.BlockScaledRows`): the gated product gives such rows, the
others take them, so that nothing stands between gate_up and down, nor between attention and o.

Measured on an H200, a layer of a decode step at 1 row of 216 tokens, 32 of 216, 32 of 4,088 and 40 chats, us, with
Triton's or cuBLAS's products / with these: bf16 124, 143, 258, 163 / 114, 132, 247, 147; FP8 78, 97, 213, 112 / 66, 87,
204, 102. At 96 and 128 rows the vendor's are faster, in FP8 by a tenth.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from . import hopper_source
from .fp8 import BLOCK, FP8, ROWS_APART, BlockScaledRows, Fp8Weight, ScaledRows, unscaled
from .nvrtc import CudaError, Kernel, TensorMap, compiled, kept_map, on_hopper

log = logging.getLogger(__name__)

KINDS = {torch.bfloat16: 0, FP8: 1, torch.float16: 2}
MAX_ROWS = 64
GROUPS = (4, 2, 1)
BOX_BYTES = 128
_STEP_BOXES = 4  # groups times boxes: a step takes 32 KB of the weight
_PACE = 2  # steps; of 1 (32 KB a block) the memory is not busy, of 3 the norm in front takes longer
_RING_BYTES = 200 * 1024  # of the 227 KB a block may have: small kernels before and behind are to fit beside it
_MOST_PIECES, _LEAST_STEPS = 8, 2


@dataclass(frozen=True)
class Variant:
    """What is compiled: the operands' type, SwiGLU behind the product, 64 weight rows times `groups` a block, rows of
    x up to `tokens`, a multiple of 8. `blocks`: x, or y of a gated product, is quantized by blocks."""

    dtype: torch.dtype
    gated: bool
    groups: int
    tokens: int
    blocks: bool = False

    @property
    def boxes(self) -> int:
        """Pieces of 128 bytes of a row that a step takes."""
        return _STEP_BOXES // self.groups

    @property
    def stage_bytes(self) -> int:
        return (64 * self.groups + self.tokens) * BOX_BYTES * self.boxes

    @property
    def stages(self) -> int:
        """Steps that the ring holds."""
        return _RING_BYTES // self.stage_bytes

    @property
    def shared_bytes(self) -> int:
        """With room to align the ring, three barriers a stage and a flag; scales of x a stage, or a block's tile of y
        and the largest of each of its rows, twice."""
        extra = 0
        if self.blocks:
            extra = self.tokens * (BLOCK + 8) if self.gated else self.stages * self.tokens * self.boxes * 4
        return 1024 + self.stages * (self.stage_bytes + 24) + 8 + extra

    @property
    def threads(self) -> int:
        """With a warp that asks for weights and one that asks for x."""
        return self.groups * 128 + 64


@dataclass(frozen=True)
class Split:
    """Warp groups a block, 64 rows of the weight each, and pieces of the inner dimension."""

    groups: int
    pieces: int


def choose_split(columns: int, inner_bytes: int, gated: bool, multiprocessors: int) -> Split | None:
    """How a weight of `columns` rows (gate and up together, where `gated`) of `inner_bytes` bytes is divided; None
    where the kernel does not fit it.

    The more rows a block has, the less of x it reads, but half the multiprocessors must have a block: so few can still
    ask for all that the memory gives. A sum in two pieces is added up in no time, one in four costs the norm 1 us.
    """
    if inner_bytes % 16 or columns % 64:
        return None
    enough = multiprocessors // 2
    most = 1 if gated else 2
    fitting = [groups for groups in (GROUPS if gated else GROUPS[1:]) if columns % (64 * groups) == 0]
    groups = next((groups for groups in fitting if columns // (64 * groups) * most >= enough), 1)
    if gated:
        return Split(groups, 1)
    tiles = columns // (64 * groups)
    steps = -(-inner_bytes // (BOX_BYTES * _STEP_BOXES // groups))
    wanted = 2 if 2 * tiles >= enough else _MOST_PIECES
    return Split(groups, max(1, min(wanted, multiprocessors // tiles, steps // _LEAST_STEPS)))


def goes_by_blocks(columns: int, inner: int, gated: bool, multiprocessors: int) -> bool:
    """Whether a product in FP8 with a weight of `columns` rows of `inner` takes rows quantized by blocks, where those
    fill its steps, or, `gated`, gives such rows, where a block of threads makes all columns of a scale."""
    split = choose_split(columns, inner, gated, multiprocessors)
    if split is None:
        return False
    if gated:
        return 32 * split.groups == BLOCK
    return inner % (BLOCK * (_STEP_BOXES // split.groups)) == 0


def source(tokens: int) -> str:
    """The kernel's text for `tokens` rows."""
    count = tokens // 2  # accumulators of a thread, in front of the other operands
    return hopper_source.source("hopper_stream.cu", count, W=count, X=count + 1, MORE=count + 2, TOKENS=tokens)


def options(variant: Variant) -> list[str]:
    """NVRTC's."""
    return hopper_source.options(
        KIND=KINDS[variant.dtype],
        GATED=int(variant.gated),
        BLOCKS=int(variant.blocks),
        GROUPS=variant.groups,
        BOXES=variant.boxes,
        TOKENS=variant.tokens,
        STAGES=variant.stages,
        PACE=_PACE,
    )


_kernels: dict[tuple[torch.device, Variant], Kernel] = {}


def variants(dtype: torch.dtype) -> list[Variant]:
    """All that products with weights in `dtype` may need."""
    shapes = [(False, 1), (False, 2), *((True, groups) for groups in GROUPS)]
    sizes = range(8, MAX_ROWS + 1, 8)
    found = [Variant(dtype, *shape, tokens) for tokens in sizes for shape in shapes]
    if dtype == FP8:
        by_blocks = [(False, 1), (False, 2), (True, BLOCK // 32)]
        found += [Variant(dtype, *shape, tokens, blocks=True) for tokens in sizes for shape in by_blocks]
    return found


def prepare(device: torch.device, dtype: torch.dtype, folder: Path) -> None:
    """Compile (or find in `folder`) and load what products with weights in `dtype` on `device` need. Does nothing
    elsewhere than on Hopper; where it fails, Triton's kernels go on computing everything, and the log says why."""
    if not on_hopper(device) or dtype not in KINDS:
        return
    missing = [variant for variant in variants(dtype) if (device, variant) not in _kernels]
    try:
        with ThreadPoolExecutor() as pool:  # the compiler takes 0.15 s for each
            codes = list(pool.map(lambda one: compiled(source(one.tokens), options(one), folder), missing))
        with torch.cuda.device(device):
            torch.zeros(1, device=device)  # torch's context is current from now on
            for variant, code in zip(missing, codes, strict=True):
                _kernels[device, variant] = Kernel(code, "hopper_stream", variant.shared_bytes)
    except (CudaError, OSError) as error:
        log.warning("decode uses Triton's products only: %s", error)


def _choice(x: Tensor, weight: Tensor, gated: bool, blocks: bool) -> tuple[Variant, Split] | None:
    rows, item = x.shape[0], x.element_size()
    if not x.is_cuda or x.dtype != weight.dtype or not 0 < rows <= MAX_ROWS:
        return None
    if x.stride(1) != 1 or x.stride(0) * item % 16 or x.data_ptr() % 16 or not weight.is_contiguous():
        return None
    return _variant(weight, rows, gated, blocks)


def _variant(weight: Tensor, rows: int, gated: bool, blocks: bool) -> tuple[Variant, Split] | None:
    """How `weight` is multiplied by `rows` rows, where that kernel was loaded."""
    from .decode_attention_triton import sm_count  # a CPU does without Triton

    columns, inner, multiprocessors = *weight.shape, sm_count(weight.device)
    if blocks and not goes_by_blocks(columns, inner, gated, multiprocessors):
        return None
    split = choose_split(columns, inner * weight.element_size(), gated, multiprocessors)
    if split is None:
        return None
    variant = Variant(weight.dtype, gated, split.groups, -(-rows // ROWS_APART) * ROWS_APART, blocks)
    return (variant, split) if (weight.device, variant) in _kernels else None


def takes_blocks(rows: int, weight: Fp8Weight) -> bool:
    """Whether `fp8_block_linear_parts` computes the product of `rows` rows with `weight`."""
    values = weight.values
    if not values.is_cuda or not 0 < rows <= MAX_ROWS or not values.is_contiguous():
        return False
    return _variant(values, rows, False, True) is not None


def _launch(
    choice: tuple[Variant, Split], x: Tensor, weight: Tensor, y: Tensor, half: bool, scales: Sequence[Tensor | None]
) -> None:
    """`y`: [P, M, N] with room for the sums of each piece, or [M, N]. `scales`: of the weight, of x's rows, of the
    weight's rows, of blocks."""
    variant = choice[0]
    steps, each, pieces = _pieces(weight, choice)
    tiles = weight.shape[0] // (64 * variant.groups)
    w_map = kept_map(TensorMap.of_gate_and_up if variant.gated else TensorMap.of_rows, weight, 64 * variant.groups)
    x_map = kept_map(TensorMap.of_rows, x, variant.tokens)
    sizes = x.shape[0], y.shape[-1], tiles, tiles * pieces, steps, each, int(half)
    from .decode_attention_triton import sm_count
    from .launch_triton import early_launch

    blocks, kernel = min(tiles * pieces, sm_count(x.device)), _kernels[x.device, variant]
    kernel.launch(blocks, variant.threads, [w_map, x_map, y, *sizes, *scales], early=bool(early_launch()))


def _pieces(weight: Tensor, choice: tuple[Variant, Split]) -> tuple[int, int, int]:
    """(steps of the inner dimension, steps of a piece, pieces)."""
    variant, split = choice
    steps = -(-weight.shape[1] * weight.element_size() // (BOX_BYTES * variant.boxes))
    each = -(-steps // split.pieces)
    return steps, each, -(-steps // each)


def _parts(x: Tensor, weight: Tensor, *scales: Tensor | None, blocks: bool = False) -> Tensor | None:
    """The sums in pieces."""
    choice = _choice(x, weight, False, blocks)
    if choice is None:
        return None
    pieces = _pieces(weight, choice)[2]
    y = torch.empty((pieces, x.shape[0], weight.shape[0]), dtype=torch.float32, device=x.device)
    _launch(choice, x, weight, y, False, scales)
    return y


def _gated(x: Tensor, weight: Tensor, dtype: torch.dtype, *scales: Tensor | None) -> Tensor | None:
    """The gated product in `dtype`."""
    choice = _choice(x, weight, True, False)
    if choice is None or dtype not in (torch.bfloat16, torch.float16):
        return None
    y = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=dtype, device=x.device)
    _launch(choice, x, weight, y, dtype == torch.float16, scales)
    return y


def linear_parts(x: Tensor, weight: Tensor) -> Tensor | None:
    """`x` [M, K] times `weight` [N, K] transposed, as [P, M, N] float32 that add up to the product. None, here and
    below, where this is not computed here: no kernel was loaded, too many rows, an odd shape."""
    return _parts(x, weight, None, None, None, None)


def gated_linear(x: Tensor, weight: Tensor) -> Tensor | None:
    """silu(x Wg^T) * (x Wu^T) for `x` [M, K] and `weight` [2F, K] = gate | up; returns [M, F] in x's dtype."""
    return _gated(x, weight, x.dtype, None, None, None, None)


def fp8_linear_parts(x: ScaledRows, weight: Fp8Weight) -> ScaledRows | None:
    """`fp8.fp8_linear` in parts that add up to it, [P, M, N] float32."""
    out = _parts(x.values, weight.values, weight.scale, None, None, None)
    return None if out is None else ScaledRows(out, x.scales, weight.columns)


def fp8_block_linear_parts(x: BlockScaledRows, weight: Fp8Weight) -> ScaledRows | None:
    """`fp8.fp8_block_linear` in parts that add up to it, [P, M, N] float32."""
    if x.scales.stride() != (1, -(-x.scales.shape[0] // ROWS_APART) * ROWS_APART):
        return None
    # Before the product: what adds up its parts reads scales ahead, which the kernel in front may not have written.
    ones = unscaled(x.values).scales
    out = _parts(x.values, weight.values, weight.scale, None, None, x.scales, blocks=True)
    return None if out is None else ScaledRows(out, ones, weight.columns)


def fp8_gated_linear(x: ScaledRows, weight: Fp8Weight, dtype: torch.dtype) -> Tensor | None:
    """`gated_linear` of rows in FP8, scaled; returns [M, F] in `dtype`, bfloat16 or float16."""
    return _gated(x.values, weight.values, dtype, weight.scale, x.scales, weight.columns, None)


def fp8_gated_blocks(x: ScaledRows, weight: Fp8Weight) -> BlockScaledRows | None:
    """`gated_linear` of rows in FP8, scaled; its rows quantized by blocks, [M, F]."""
    choice = _choice(x.values, weight.values, True, True)
    if choice is None:
        return None
    y = BlockScaledRows.empty(x.values.shape[0], weight.values.shape[0] // 2, x.values.device)
    scales = weight.scale, x.scales, weight.columns, y.scales
    _launch(choice, x.values, weight.values, y.values, False, scales)
    return y
