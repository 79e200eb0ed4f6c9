# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"
"""FP8 activations on a GPU: quantization by rows inside RMSNorm and SwiGLU (a program a row), and the vendor's product.
The reference is `fp8.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import large_products
from .fp8 import FP8, Fp8Weight, ScaledRows
from .launch_triton import early_launch, release_then_wait
from .norm_triton import load_parts


@triton.jit
def _store_quantized(row, values, inside, offsets, out_ptr, out_scales_ptr, width, factor):
    """Write one row, float32, times `factor`, by its largest element. What is not `inside` must be 0."""
    scale = tl.maximum(tl.max(tl.abs(values), axis=0) / 448.0, 1e-12 / factor)
    quantized = tl.minimum(tl.maximum(values * (1.0 / scale), -448.0), 448.0)
    tl.store(out_ptr + row * width + offsets, quantized.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out_scales_ptr + row, scale * factor)


@triton.jit(do_not_specialize=["part_stride"])
def _norm_kernel(
    x_ptr,
    scales_ptr,
    columns_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    out_scales_ptr,
    x_stride,
    residual_stride,
    part_stride,
    width,
    eps,
    SCALED: tl.constexpr,
    COLUMNS: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    QUANTIZE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < width
    target = residual_ptr + row * residual_stride + offsets
    if NORM:
        weight = tl.load(weight_ptr + offsets, mask=inside, other=0.0)
    if COLUMNS:
        columns = tl.load(columns_ptr + offsets, mask=inside, other=0.0)
    if PARTS == 1:
        release_then_wait()
    if SCALED:
        row_scale = tl.load(scales_ptr + row, cache_modifier=".cg")
    if ADD:
        before = tl.load(target, mask=inside, other=0.0, cache_modifier=".cg")
    if PARTS > 1:
        release_then_wait()
    x = load_parts(x_ptr + row * x_stride + offsets, inside, part_stride, PARTS, x_ptr.dtype.element_ty)
    if SCALED:
        x *= row_scale
    if COLUMNS:
        x *= columns
    if ADD:
        dtype = residual_ptr.dtype.element_ty
        total = (x.to(dtype).to(tl.float32) + before.to(tl.float32)).to(dtype)
        tl.store(target, total, mask=inside)
        x = total.to(tl.float32)
    if NORM:
        x *= tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
        x *= weight.to(tl.float32)
    if QUANTIZE:
        _store_quantized(row, x, inside, offsets, out_ptr, out_scales_ptr, width, 1.0)
    else:
        tl.store(out_ptr + row * width + offsets, x.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _silu_kernel(
    x_ptr,
    scales_ptr,
    columns_ptr,
    out_ptr,
    out_scales_ptr,
    x_stride,
    width,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    release_then_wait()
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < width
    scale = tl.load(scales_ptr + row)
    gate = tl.load(x_ptr + row * x_stride + offsets, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + width + offsets, mask=inside, other=0.0).to(tl.float32)
    if COLUMNS:
        gate *= tl.load(columns_ptr + offsets, mask=inside, other=0.0)
        up *= tl.load(columns_ptr + width + offsets, mask=inside, other=0.0)
    # silu(gate s) (up s) = s^2 gate up / (1 + e^(-gate s)), and s^2 goes into the row's scale: arithmetic is what takes
    # the time here, since a row is one program's.
    values = gate * up / (1.0 + tl.exp2(gate * (scale * -1.4426950408889634)))
    _store_quantized(row, values, inside, offsets, out_ptr, out_scales_ptr, width, scale * scale)


def _launch(
    x: Tensor,
    scaled: ScaledRows | None,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> ScaledRows:
    """The result of `x` [T, K], the values of `scaled` where that is given (then maybe in parts), in `dtype`; its
    scales are set where that is E4M3."""
    rows, width = x.shape[-2:]
    scales = None if scaled is None else scaled.scales
    columns = None if scaled is None else scaled.columns
    out = torch.empty(rows, width, dtype=dtype, device=x.device)
    out_scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(width)
        added = x if residual is None else residual
        _norm_kernel[(rows,)](
            x,
            x if scales is None else scales,
            x if columns is None else columns,
            added,
            x if weight is None else weight,
            out,
            out_scales,
            x.stride(-2),
            added.stride(0),
            x.stride(0),
            width,
            eps,
            SCALED=scales is not None,
            COLUMNS=columns is not None,
            ADD=residual is not None,
            NORM=weight is not None,
            QUANTIZE=dtype == FP8,
            PARTS=x.shape[0] if x.dim() == 3 else 1,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
            **early_launch(),
        )
    return ScaledRows(out, out_scales)


def quantize_rows(x: Tensor) -> ScaledRows:
    """As `fp8.quantize_rows` for `x` [T, K] whose last dimension is contiguous."""
    return _launch(x, None, None, None, 0.0, FP8)


def rms_norm_fp8(x: Tensor, weight: Tensor, eps: float) -> ScaledRows:
    """As `fp8.rms_norm_fp8`."""
    return _launch(x, None, None, weight, eps, FP8)


def add_rms_norm_fp8(x: ScaledRows, residual: Tensor, weight: Tensor, eps: float) -> tuple[ScaledRows, Tensor]:
    """As `fp8.add_rms_norm_fp8`."""
    return _launch(x.values, x, residual, weight, eps, FP8), residual


def add_rms_norm_scaled(x: ScaledRows, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `fp8.add_rms_norm_scaled`."""
    return _launch(x.values, x, residual, weight, eps, residual.dtype).values, residual


def silu_and_mul_fp8(x: ScaledRows) -> ScaledRows:
    """As `fp8.silu_and_mul_fp8`."""
    rows, width = x.values.shape[0], x.values.shape[1] // 2
    out = torch.empty(rows, width, dtype=FP8, device=x.values.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.values.device)
    if rows:
        block = triton.next_power_of_2(width)
        _silu_kernel[(rows,)](
            x.values, x.scales, x.values if x.columns is None else x.columns, out, scales, x.values.stride(0), width,
            COLUMNS=x.columns is not None, BLOCK=block, num_warps=min(8 if rows >= 1024 else 16, max(1, block // 512)),
            **early_launch(),
        )  # fmt: skip
    return ScaledRows(out, scales)


@triton.jit
def _restore_kernel(x_ptr, scales_ptr, columns_ptr, out_ptr, width, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < width
    x = tl.load(x_ptr + row * width + offsets, mask=inside, other=0.0).to(tl.float32) * tl.load(scales_ptr + row)
    if COLUMNS:
        x *= tl.load(columns_ptr + offsets, mask=inside, other=0.0)
    tl.store(out_ptr + row * width + offsets, x.to(out_ptr.dtype.element_ty), mask=inside)


def restore_rows(x: ScaledRows, dtype: torch.dtype) -> Tensor:
    """As `fp8.restore_rows` for contiguous values; those of `dtype` are overwritten."""
    rows, width = x.values.shape
    out = x.values if x.values.dtype == dtype else torch.empty(rows, width, dtype=dtype, device=x.values.device)
    if rows:
        columns = x.values if x.columns is None else x.columns
        grid = (triton.cdiv(width, 2048), rows)
        _restore_kernel[grid](x.values, x.scales, columns, out, width, COLUMNS=x.columns is not None, BLOCK=2048)
    return out


_ones: dict[torch.device, Tensor] = {}


def fp8_linear(x: ScaledRows, weight: Fp8Weight, dtype: torch.dtype) -> ScaledRows:
    """As `fp8.fp8_linear`, by cuBLAS. Measured on an H200, a layer's four products at 32, 256 and 8,000 rows: 69, 104
    and 2,435 us, where bf16 takes 126, 182 and 5,073."""
    values = x.values
    if not values.shape[0]:
        none = torch.empty(0, weight.values.shape[0], dtype=dtype, device=values.device)
        return ScaledRows(none, x.scales, weight.columns)
    product = large_products.linear(values, weight.values, dtype, weight.scale)
    if product is not None:
        return ScaledRows(product, x.scales, weight.columns)
    one = _ones.get(values.device)
    if one is None:
        one = _ones[values.device] = torch.ones((), dtype=torch.float32, device=values.device)
    product = torch._scaled_mm(
        values, weight.values.t(), scale_a=one, scale_b=weight.scale, out_dtype=dtype, use_fast_accum=True
    )
    return ScaledRows(product, x.scales, weight.columns)
