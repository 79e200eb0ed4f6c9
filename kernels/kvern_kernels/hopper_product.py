"""Products of long prompts by our own kernel on Hopper, with SwiGLU or the residual's sum in it (`hopper_product.cu`).

Measured on an H200 at its power limit, 16,384 rows of Llama-3-8B's shapes, us (cuBLAS's best kernel and what follows it
/ ours): gate_up with SwiGLU 5,882 / 5,497, in FP8 with SwiGLU and the rows' quantization 3,239 / 3,113; down added to
the residual 2,857 / 2,763. The plain product takes as long as cuBLAS's (5,530 / 5,510), so that only what is left out
is gained. `prepare` compiles it at start; products are computed where `gates` or `adds` say so.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from . import hopper_source
from .nvrtc import CudaError, Kernel, TensorMap, compiled, kept_map, on_hopper

log = logging.getLogger(__name__)

FP8 = torch.float8_e4m3fn
THREADS = 384
ROW_PAIR, COLUMNS, STEP_BYTES = 256, 256, 128  # of a cluster's tile, as in the .cu file
_BOX_ROWS, _OUT_BOX_ROWS = 128, 64
_STAGES, _STAGE_BYTES, _OUT_BYTES = 4, 384 * STEP_BYTES, 2 * 16384
SHARED_BYTES = 1024 + _STAGES * _STAGE_BYTES + _OUT_BYTES + 16 * _STAGES
# From here on it is faster in the engine: 8,000 rows 3 %, 16,384 2 %. Steps of 5,100 rows (prefix_256) took longer with
# it, 1.23 s for 1.17 and in E4M3 1.01 for 0.94, though the product alone gains there too.
_LEAST_ROWS = 6144
# The part of the multiprocessors' time that must go to rows and tiles that are there, measured on an H200: gate_up in
# bfloat16 gains 7 % at 1,024 and 16,384 rows (97 and 99.6 % of the time useful), 3 % at 8,000 (96 %) and loses 8 % at
# 1,536 (93 %), where E4M3 still gains 6 %. down and o gain 1 to 3 % at 16,384 rows (97 %) and lose that at 16,000 and
# 8,000 (95 %).
_GATED_SHARE, _GATED_FP8_SHARE, _ADDING_SHARE = 0.955, 0.92, 0.965


@dataclass(frozen=True)
class Variant:
    """What is compiled: E4M3 operands, SwiGLU behind the product, the product added to what is there."""

    fp8: bool = False
    gated: bool = False
    add: bool = False


_kernels: dict[tuple[torch.device, Variant], Kernel] = {}
_clusters: dict[torch.device, int] = {}


def source() -> str:
    """The kernel's text."""
    return hopper_source.source("hopper_product.cu", registers=128)


def options(variant: Variant) -> list[str]:
    """NVRTC's."""
    return hopper_source.options(FP8=int(variant.fp8), GATED=int(variant.gated), ADD=int(variant.add))


def fits(columns: int, inner: int, dtype: torch.dtype) -> bool:
    """Whether the kernel computes products with a weight of this shape, `columns` being gate and up together."""
    item = 1 if dtype == FP8 else 2
    return dtype in (FP8, torch.bfloat16) and columns % COLUMNS == 0 and inner * item % STEP_BYTES == 0


def useful_share(rows: int, columns: int, clusters: int) -> float:
    """The part of the time of `clusters` pairs of multiprocessors that goes to rows that are there: the last tiles of
    256 rows may be part empty, and the last round may not have a tile for everyone."""
    pairs = -(-rows // ROW_PAIR)
    tiles = pairs * (columns // COLUMNS)
    rounds = -(-tiles // clusters)
    return rows / (pairs * ROW_PAIR) * tiles / (rounds * clusters)


def prepare(device: torch.device, dtype: torch.dtype, folder: Path) -> None:
    """Compile (or find in `folder`) and load what products of `dtype`, bfloat16 or E4M3, on `device` need. Does nothing
    elsewhere than on Hopper; where it fails, the vendor's kernels go on computing everything, and the log says why."""
    if not on_hopper(device):
        return
    fp8 = dtype == FP8
    variants = [Variant(fp8, gated=True)] if fp8 else [Variant(gated=True), Variant(add=True)]
    try:
        for variant in variants:
            load(device, variant, folder)
    except (CudaError, OSError) as error:
        log.warning("long prompts use the vendor's products only: %s", error)


def load(device: torch.device, variant: Variant, folder: Path) -> None:
    """One variant. Raises CudaError or OSError where the compiler or the driver cannot be used."""
    if (device, variant) not in _kernels:
        with torch.cuda.device(device):
            torch.zeros(1, device=device)  # torch's context is current from now on
            code = compiled(source(), options(variant), folder)
            _kernels[device, variant] = Kernel(code, "hopper_product", SHARED_BYTES)
        _clusters[device] = torch.cuda.get_device_properties(device).multi_processor_count // 2


def _pays(x: Tensor, weight: Tensor, variant: Variant, share: float) -> bool:
    rows, columns = x.shape[0], weight.shape[0]
    return (
        rows >= _LEAST_ROWS
        and (x.device, variant) in _kernels
        and x.is_contiguous()
        and weight.is_contiguous()
        and fits(columns, weight.shape[1], x.dtype)
        and useful_share(rows, columns, _clusters[x.device]) >= share
    )


def gates(x: Tensor, weight: Tensor) -> bool:
    """Whether `gated_linear` is the fastest for `x` [M, K] and `weight` [2F, K]."""
    fp8 = x.dtype == FP8
    return _pays(x, weight, Variant(fp8, gated=True), _GATED_FP8_SHARE if fp8 else _GATED_SHARE)


def adds(x: Tensor, weight: Tensor, residual: Tensor) -> bool:
    """Whether `add_linear` is the fastest for these."""
    return residual.is_contiguous() and _pays(x, weight, Variant(add=True), _ADDING_SHARE)


def _launch(
    x: Tensor, weight: Tensor, y: Tensor, variant: Variant, row_scales: Tensor | None, scale: Tensor | None
) -> Tensor:
    if not fits(weight.shape[0], weight.shape[1], x.dtype):
        raise ValueError(f"no product of {tuple(x.shape)} and {tuple(weight.shape)} in {x.dtype}")
    pairs, tiles = -(-x.shape[0] // ROW_PAIR), weight.shape[0] // COLUMNS
    blocks = 2 * min(_clusters[x.device], pairs * tiles)
    steps = x.shape[1] * x.element_size() // STEP_BYTES
    second_half = weight.shape[0] // 2 if variant.gated else COLUMNS // 2
    boxes = (x, _BOX_ROWS), (weight, _BOX_ROWS), (y, _OUT_BOX_ROWS)
    maps = [kept_map(TensorMap.of_rows, *box) for box in boxes]
    sizes = x.shape[0], pairs, tiles, steps, second_half
    _kernels[x.device, variant].launch(blocks, THREADS, [*maps, *sizes, row_scales, scale])
    return y


def linear(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
    """`x` [M, K] times `weight` [N, K] transposed (times `scale`, float32, in FP8): [M, N] bfloat16; all contiguous,
    M > 0, and the variant loaded."""
    y = torch.empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16, device=x.device)
    return _launch(x, weight, y, Variant(x.dtype == FP8), None, scale)


def add_linear(x: Tensor, weight: Tensor, residual: Tensor) -> None:
    """Adds `x` [M, K] times `weight` [N, K] transposed, rounded to bfloat16, to `residual` [M, N]."""
    _launch(x, weight, residual, Variant(add=True), None, None)


def gated_linear(x: Tensor, weight: Tensor, row_scales: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    """silu(gate) * up of `x` [M, K] times `weight` [2F, K] = gate | up transposed: [M, F] bfloat16. In FP8 row m of the
    product is multiplied by `row_scales[m]` and `scale` before (float32 all)."""
    y = torch.empty(x.shape[0], weight.shape[0] // 2, dtype=torch.bfloat16, device=x.device)
    return _launch(x, weight, y, Variant(x.dtype == FP8, gated=True), row_scales, scale)
