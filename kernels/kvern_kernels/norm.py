"""RMSNorm (Zhang and Sennrich, arXiv 1910.07467), alone and with the residual addition before it: torch reference.

The Triton kernel is in `norm_triton.py`; `dispatch.py` chooses.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension of `x` [..., H]; `weight` [H], in x's dtype or
    float32; float32 inside."""
    if weight.dtype != x.dtype:
        return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
    if x.dtype != torch.float32 or x.is_cuda:
        return F.rms_norm(x, weight.shape, weight, eps)
    # sqrt(mean(x^2) + eps) = hypot(|x|, sqrt(H eps)) / sqrt(H): four small operations, half the time of F.rms_norm on
    # a CPU for a few rows.
    width = x.shape[-1]
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    length = torch.hypot(length, torch.full((), math.sqrt(width * eps)))
    return (x * weight).div_(length.mul_(1 / math.sqrt(width)))


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), both [..., H]. The sum overwrites `residual`."""
    residual.add_(x)
    return rms_norm(residual, weight, eps), residual
