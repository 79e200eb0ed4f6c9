# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"
"""SwiGLU's gate in Triton: a program a row and a piece of the columns. The reference is `activation.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch_triton import after_previous, early_launch


@triton.jit
def _silu_and_mul_kernel(x_ptr, out_ptr, x_stride, width, BLOCK: tl.constexpr):
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < width
    gate = tl.load(x_ptr + row * x_stride + offsets, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + width + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + offsets, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=inside)


def silu_and_mul(x: Tensor) -> Tensor:
    """As `activation.silu_and_mul` for `x` [T, 2F] whose last dimension is contiguous; float32 inside."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if rows:
        block = min(1024, triton.next_power_of_2(width))
        _silu_and_mul_kernel[(rows, triton.cdiv(width, block))](
            x, out, x.stride(0), width, BLOCK=block, num_warps=4, **early_launch()
        )
    return out
