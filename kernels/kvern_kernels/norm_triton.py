# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"
"""RMSNorm and residual + RMSNorm in Triton: one program a row. The reference is `norm.py`.

The input may come in parts that are added while they are read (`small_gemm_triton.py`). Then a product stands directly
in front, and what does not come from it is read while it computes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch_triton import early_launch, release_then_wait


@triton.jit
def load_parts(pointers, mask, part_stride, PARTS: tl.constexpr, DTYPE: tl.constexpr):
    """The sum of PARTS tensors `part_stride` apart, rounded to DTYPE as a stored product would be; float32."""
    total = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(pointers + part * part_stride, mask=mask, other=0.0).to(tl.float32)
    return total.to(DTYPE).to(tl.float32)


@triton.jit(do_not_specialize=["part_stride"])
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    residual_stride,
    part_stride,
    width,
    eps,
    ADD: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < width
    dtype = out_ptr.dtype.element_ty
    target = residual_ptr + row * residual_stride + offsets
    weight = tl.load(weight_ptr + offsets, mask=inside, other=0.0)
    if PARTS == 1:
        release_then_wait()
    if ADD:
        before = tl.load(target, mask=inside, other=0.0, cache_modifier=".cg")
    if PARTS > 1:
        release_then_wait()
    x = load_parts(x_ptr + row * x_stride + offsets, inside, part_stride, PARTS, dtype)
    if ADD:
        total = (x + before.to(tl.float32)).to(dtype)
        # The sum is rounded before it is squared, as where it is stored and read back.
        tl.store(target, total, mask=inside)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
    tl.store(out_ptr + row * width + offsets, (x * scale * weight.to(tl.float32)).to(dtype), mask=inside)


def _launch(parts: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """`parts` [P, T, H], added up; `residual` [T, H]."""
    count, rows, width = parts.shape
    out = torch.empty(rows, width, dtype=parts.dtype if residual is None else residual.dtype, device=parts.device)
    if rows:
        block = triton.next_power_of_2(width)
        added = parts[0] if residual is None else residual
        _rms_norm_kernel[(rows,)](
            parts,
            added,
            weight,
            out,
            parts.stride(1),
            added.stride(0),
            parts.stride(0),
            width,
            eps,
            ADD=residual is not None,
            PARTS=count,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
            **early_launch(),
        )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `norm.rms_norm` for `x` [..., H] whose last dimension is contiguous; float32 inside."""
    if x.dim() != 2:
        return _launch(x.reshape(1, -1, x.shape[-1]), None, weight, eps).view(x.shape)
    return _launch(x.unsqueeze(0), None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `norm.add_rms_norm` for `x` and `residual` [T, H]; the sum overwrites `residual`."""
    return _launch(x.unsqueeze(0), residual, weight, eps), residual


def add_rms_norm_parts(parts: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` of the sum of `parts` [P, T, H] float32, which is rounded to residual's dtype first."""
    return _launch(parts, residual, weight, eps), residual
