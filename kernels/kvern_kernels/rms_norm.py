"""RMSNorm (Zhang and Sennrich, arXiv 1910.07467), alone and with the residual addition before it: torch reference.

The Triton kernel is in `rms_norm_triton.py`; `dispatch.py` chooses.
"""

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension of `x` [..., H]; `weight` [H]; float32 inside."""
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), both [..., H]. The sum overwrites `residual`."""
    residual.add_(x)
    return F.rms_norm(residual, weight.shape, weight, eps), residual
