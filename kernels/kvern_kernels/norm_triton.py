# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"
"""RMSNorm and residual + RMSNorm in Triton: one program a row. The reference is `norm.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    residual_stride,
    width,
    eps,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < width
    raw = tl.load(x_ptr + row * x_stride + offsets, mask=inside, other=0.0)
    if ADD:
        target = residual_ptr + row * residual_stride + offsets
        raw = (raw.to(tl.float32) + tl.load(target, mask=inside, other=0.0).to(tl.float32)).to(raw.dtype)
        # The sum is rounded before it is squared, as where it is stored and read back.
        tl.store(target, raw, mask=inside)
    x = raw.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
    weight = tl.load(weight_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + offsets, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    rows, width = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows:
        block = triton.next_power_of_2(width)
        added = x if residual is None else residual
        _rms_norm_kernel[(rows,)](
            x,
            added,
            weight,
            out,
            x.stride(0),
            added.stride(0),
            width,
            eps,
            ADD=residual is not None,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
        )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `norm.rms_norm` for `x` [..., H] whose last dimension is contiguous; float32 inside."""
    if x.dim() != 2:
        return _launch(x.reshape(-1, x.shape[-1]), None, weight, eps).view(x.shape)
    return _launch(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `norm.add_rms_norm` for `x` and `residual` [T, H]; the sum overwrites `residual`."""
    return _launch(x, residual, weight, eps), residual
