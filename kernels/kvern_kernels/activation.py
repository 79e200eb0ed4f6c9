"""SwiGLU's gate (Shazeer, arXiv 2002.05202): torch reference. The Triton kernel is in `activation_triton.py`."""

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up for `x` [..., 2F] = gate | up; returns [..., F] in x's dtype."""
    half = x.shape[-1] // 2
    return F.silu(x[..., :half]).mul_(x[..., half:])
