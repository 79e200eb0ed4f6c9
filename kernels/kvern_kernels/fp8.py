"""FP8 (E4M3) products with one scale a weight tensor or output channel and one scale a row of activations: torch
reference.

Rows are quantized by their own largest element where they are made (by the norm, by SwiGLU), so that a row's result
does not depend on the rows beside it. The product itself takes a single scale: `fp8_linear` returns rows that are still
to be multiplied by their scales, and by those of their columns where each output channel has its own; the operation
that reads them does that. So the vendor's per-tensor kernels serve both ways of scaling, which are 1.6 times faster
than its row-wise ones at few rows. The Triton kernels are in `fp8_triton.py`.

Where a kernel makes but a part of each row, rows are quantized by blocks of 128 columns instead (`BlockScaledRows`), in
decode steps on Hopper: a head of attention, the columns of SwiGLU that one block of threads has. So no kernel looks at
whole rows in between; the product scales what it adds up (`hopper_stream.py`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .norm import rms_norm

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
BLOCK = 128  # columns of a scale of `BlockScaledRows`
ROWS_APART = 8  # scales of a block begin a multiple of so many behind those of the one before
TINY = 1e-12  # so that a row of zeros stays zeros


@dataclass
class ScaledRows:
    """Row i is `values[i]` * `scales[i]` * `columns`: `values` [T, K] in E4M3, or a wider product; `scales` [T] and
    `columns` [K] float32 (None: all 1)."""

    values: Tensor
    scales: Tensor
    columns: Tensor | None = None

    def index_select(self, index: Tensor) -> "ScaledRows":
        """The rows at `index` [S] int64."""
        return ScaledRows(self.values.index_select(0, index), self.scales.index_select(0, index), self.columns)

    def restore(self, dtype: torch.dtype) -> Tensor:
        """[T, K] in `dtype`, scaled."""
        wide = self.values.float() * self.scales.unsqueeze(1)
        return (wide if self.columns is None else wide * self.columns).to(dtype)


@dataclass
class BlockScaledRows:
    """Column c of row i is `values[i, c]` * `scales[i, c // BLOCK]`: `values` [T, K] in E4M3, `scales` [T, K / BLOCK]
    float32. Scales lie block by block, so that those of a few blocks of all rows are one line of memory."""

    values: Tensor
    scales: Tensor

    @classmethod
    def empty(cls, rows: int, columns: int, device: torch.device) -> "BlockScaledRows":
        """Room for `rows` rows of `columns` columns, a multiple of BLOCK."""
        padded = -(-rows // ROWS_APART) * ROWS_APART
        scales = torch.empty(columns // BLOCK, padded, dtype=torch.float32, device=device)
        return cls(torch.empty(rows, columns, dtype=FP8, device=device), scales.t()[:rows])

    def restore(self, dtype: torch.dtype) -> Tensor:
        """[T, K] in `dtype`, scaled."""
        wide = self.values.float() * self.scales.repeat_interleave(BLOCK, dim=1)
        return wide.to(dtype)


@dataclass
class Fp8Weight:
    """A weight: `values` [N, K] E4M3 times `scale` (float32, no dimensions), row n also times `columns[n]` ([N]
    float32, at most 1, so that products by `scale` alone stay within 16 bits; None: all 1)."""

    values: Tensor
    scale: Tensor
    columns: Tensor | None = None

    @classmethod
    def quantize(cls, weight: Tensor, per_channel: bool = False, largest: Tensor | None = None) -> "Fp8Weight":
        """`weight` [N, K] of any float type, by its largest element or by that of each row (output channel); 256 MB at
        a time need float32. `largest`: what `largest_of` gives of the whole weight, where this is a part of it."""
        if largest is None:
            largest = largest_of(weight, per_channel)
        scales = (largest / FP8_MAX).clamp(min=TINY).expand(weight.shape[0])
        values = torch.empty(weight.shape, dtype=FP8, device=weight.device)
        step = max(1, (1 << 26) // weight.shape[1])
        for first in range(0, weight.shape[0], step):
            part = weight[first : first + step].float() / scales[first : first + step, None]
            values[first : first + step] = part.clamp_(-FP8_MAX, FP8_MAX).to(FP8)
        return cls.of(values, scales)

    @classmethod
    def of(cls, values: Tensor, scales: Tensor) -> "Fp8Weight":
        """From `values` [N, K] in E4M3 and the scale of each row, `scales` [N] float32."""
        scale = scales.amax()
        same = bool((scales == scale).all())
        return cls(values, scale, None if same else scales / scale)

    def restore(self) -> Tensor:
        """[N, K] float32."""
        wide = self.values.float() * self.scale
        return wide if self.columns is None else wide * self.columns.unsqueeze(1)


def largest_of(weight: Tensor, per_channel: bool = False) -> Tensor:
    """The largest absolute element of `weight` [N, K], [1] float32, or that of each row, [N]."""
    return (weight.abs().amax(dim=1) if per_channel else weight.abs().amax().view(1)).float()


_ones: dict[torch.device, list[Tensor]] = {}  # all that were made: graphs hold their addresses
_LEAST_ONES = 1024


def unscaled(values: Tensor) -> ScaledRows:
    """`values` [T, K], or in parts to add up [P, T, K], as rows whose scales are 1."""
    rows, kept = values.shape[-2], _ones.setdefault(values.device, [])
    if not kept or len(kept[-1]) < rows:
        kept.append(torch.ones(max(rows, _LEAST_ONES), dtype=torch.float32, device=values.device))
    return ScaledRows(values, kept[-1][:rows])


def quantize_rows(x: Tensor) -> ScaledRows:
    """`x` [T, K] of any float type, each row by its largest element."""
    wide = x.float()
    scales = (wide.abs().amax(dim=-1) / FP8_MAX).clamp(min=TINY)
    return ScaledRows((wide / scales.unsqueeze(1)).clamp(-FP8_MAX, FP8_MAX).to(FP8), scales)


def quantize_blocks(x: Tensor) -> BlockScaledRows:
    """`x` [T, K] of any float type, each BLOCK columns of a row by their largest element."""
    rows, columns = x.shape
    wide, out = x.float(), BlockScaledRows.empty(rows, columns, x.device)
    largest = wide.view(rows, columns // BLOCK, BLOCK).abs().amax(dim=-1)
    out.scales.copy_((largest / FP8_MAX).clamp(min=TINY))
    quotient = wide / out.scales.repeat_interleave(BLOCK, dim=1)
    out.values.copy_(quotient.clamp(-FP8_MAX, FP8_MAX).to(FP8))
    return out


def restore_rows(x: ScaledRows, dtype: torch.dtype) -> Tensor:
    """`x` [T, K] in `dtype`, multiplied by its scales."""
    return x.restore(dtype)


def rms_norm_fp8(x: Tensor, weight: Tensor, eps: float) -> ScaledRows:
    """The norm of `x` [T, H], quantized by rows."""
    return quantize_rows(rms_norm(x.float(), weight.float(), eps))


def add_rms_norm_fp8(x: ScaledRows, residual: Tensor, weight: Tensor, eps: float) -> tuple[ScaledRows, Tensor]:
    """(norm of x + residual, quantized by rows; x + residual). `x` and `residual` [T, H]; the sum overwrites
    `residual`."""
    residual.add_(x.restore(residual.dtype))
    return rms_norm_fp8(residual, weight, eps), residual


def add_rms_norm_scaled(x: ScaledRows, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of x + residual in residual's dtype, x + residual); the sum overwrites `residual`."""
    residual.add_(x.restore(residual.dtype))
    return rms_norm(residual, weight, eps), residual


def silu_and_mul_fp8(x: ScaledRows) -> ScaledRows:
    """silu(gate) * up of `x` [T, 2F] = gate | up, quantized by rows: [T, F]."""
    gate, up = x.restore(torch.float32).chunk(2, dim=-1)
    return quantize_rows(torch.nn.functional.silu(gate) * up)


def silu_and_mul_blocks(x: ScaledRows) -> BlockScaledRows:
    """silu(gate) * up of `x` [T, 2F] = gate | up, quantized by blocks: [T, F]."""
    gate, up = x.restore(torch.float32).chunk(2, dim=-1)
    return quantize_blocks(torch.nn.functional.silu(gate) * up)


def fp8_block_linear(x: BlockScaledRows, weight: Fp8Weight, dtype: torch.dtype) -> ScaledRows:
    """The product of `x` [T, K] with `weight` [N, K] transposed, its values in `dtype`: [T, N] with the scales of the
    weight's rows."""
    product = x.restore(torch.float32) @ weight.values.float().t() * weight.scale
    rows = unscaled(product.to(dtype))
    return ScaledRows(rows.values, rows.scales, weight.columns)


def fp8_linear(x: ScaledRows, weight: Fp8Weight, dtype: torch.dtype) -> ScaledRows:
    """The product of `x` [T, K] with `weight` [N, K] transposed, its values in `dtype`: [T, N] with the scales of x and
    of the weight's rows."""
    product = x.values.float() @ weight.values.float().t() * weight.scale
    return ScaledRows(product.to(dtype), x.scales, weight.columns)
