"""Products of few rows (decode) on Hopper whose weights stream through shared memory (`hopper_stream.cu`).

The launch is early (`launch_triton.py`): a block asks for as much of its weights as its ring holds before the kernel in
front of it has ended, so that the memory does not idle at the seams between a step's kernels. Sums of pieces of the
inner dimension are added up by the operation behind, as those of `small_gemm_triton.py`, which stays for other cards
and shapes. `prepare` compiles it at start. The reference is torch.nn.functional.linear.

Measured on an H200, a layer of a decode step at 1 row of 216 tokens, 32 of 216, 32 of 4,088 and 40 chats, us, with
Triton's or cuBLAS's products / with these: bf16 124, 143, 258, 163 / 114, 132, 247, 147; FP8 78, 97, 213, 112 / 66, 87,
204, 102. At 96 and 128 rows the vendor's are faster, in FP8 by a tenth.
"""

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from . import hopper_source
from .fp8 import FP8, Fp8Weight, ScaledRows
from .nvrtc import CudaError, Kernel, TensorMap, compiled, kept_map

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
    x up to `tokens`, a multiple of 8."""

    dtype: torch.dtype
    gated: bool
    groups: int
    tokens: int

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
        """With room to align the ring, three barriers a stage and a flag."""
        return 1024 + self.stages * (self.stage_bytes + 24) + 8

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


def source(tokens: int) -> str:
    """The kernel's text for `tokens` rows."""
    count = tokens // 2  # accumulators of a thread, in front of the other operands
    return hopper_source.source("hopper_stream.cu", count, W=count, X=count + 1, MORE=count + 2, TOKENS=tokens)


def options(variant: Variant) -> list[str]:
    """NVRTC's."""
    return hopper_source.options(
        KIND=KINDS[variant.dtype],
        GATED=int(variant.gated),
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
    return [Variant(dtype, *shape, tokens) for tokens in range(8, MAX_ROWS + 1, 8) for shape in shapes]


def prepare(device: torch.device, dtype: torch.dtype, folder: Path) -> None:
    """Compile (or find in `folder`) and load what products with weights in `dtype` on `device` need. Does nothing
    elsewhere than on Hopper; where it fails, Triton's kernels go on computing everything, and the log says why."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0) or dtype not in KINDS:
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


def _choice(x: Tensor, weight: Tensor, gated: bool) -> tuple[Variant, Split] | None:
    rows, item = x.shape[0], x.element_size()
    if not x.is_cuda or x.dtype != weight.dtype or not 0 < rows <= MAX_ROWS:
        return None
    if x.stride(1) != 1 or x.stride(0) * item % 16 or x.data_ptr() % 16 or not weight.is_contiguous():
        return None
    from .decode_attention_triton import sm_count  # a CPU does without Triton

    split = choose_split(weight.shape[0], weight.shape[1] * item, gated, sm_count(x.device))
    if split is None:
        return None
    variant = Variant(x.dtype, gated, split.groups, -(-rows // 8) * 8)
    return (variant, split) if (x.device, variant) in _kernels else None


def _product(x: Tensor, weight: Tensor, dtype: torch.dtype | None, *scales: Tensor | None) -> Tensor | None:
    """The sums in pieces, or the gated product in `dtype`."""
    gated = dtype is not None
    choice = _choice(x, weight, gated)
    if choice is None or dtype not in (None, torch.bfloat16, torch.float16):
        return None
    variant, split = choice
    rows, columns = x.shape[0], weight.shape[0] // (2 if gated else 1)
    steps = -(-weight.shape[1] * weight.element_size() // (BOX_BYTES * variant.boxes))
    each = -(-steps // split.pieces)
    pieces, tiles = -(-steps // each), weight.shape[0] // (64 * variant.groups)
    y = torch.empty(
        (rows, columns) if gated else (pieces, rows, columns), dtype=dtype or torch.float32, device=x.device
    )
    w_map = kept_map(TensorMap.of_gate_and_up if gated else TensorMap.of_rows, weight, 64 * variant.groups)
    x_map = kept_map(TensorMap.of_rows, x, variant.tokens)
    sizes = rows, columns, tiles, tiles * pieces, steps, each, int(dtype == torch.float16)
    from .decode_attention_triton import sm_count
    from .launch_triton import early_launch

    blocks, kernel = min(tiles * pieces, sm_count(x.device)), _kernels[x.device, variant]
    kernel.launch(blocks, variant.threads, [w_map, x_map, y, *sizes, *scales], early=bool(early_launch()))
    return y


def linear_parts(x: Tensor, weight: Tensor) -> Tensor | None:
    """`x` [M, K] times `weight` [N, K] transposed, as [P, M, N] float32 that add up to the product. None, here and
    below, where this is not computed here: no kernel was loaded, too many rows, an odd shape."""
    return _product(x, weight, None, None, None, None)


def gated_linear(x: Tensor, weight: Tensor) -> Tensor | None:
    """silu(x Wg^T) * (x Wu^T) for `x` [M, K] and `weight` [2F, K] = gate | up; returns [M, F] in x's dtype."""
    return _product(x, weight, x.dtype, None, None, None)


def fp8_linear_parts(x: ScaledRows, weight: Fp8Weight) -> ScaledRows | None:
    """`fp8.fp8_linear` in parts that add up to it, [P, M, N] float32."""
    out = _product(x.values, weight.values, None, weight.scale, None, None)
    return None if out is None else ScaledRows(out, x.scales, weight.columns)


def fp8_gated_linear(x: ScaledRows, weight: Fp8Weight, dtype: torch.dtype) -> Tensor | None:
    """`gated_linear` of rows in FP8, scaled; returns [M, F] in `dtype`, bfloat16 or float16."""
    return _product(x.values, weight.values, dtype, weight.scale, x.scales, weight.columns)
