"""RMSNorm (Zhang and Sennrich, arXiv 1910.07467), fused with the residual addition before it."""

import torch
from torch import Tensor

from kvern_kernels import add_rms_norm, rms_norm


class RMSNorm:
    """`weight` [hidden_size]; uninitialized until loaded."""

    __slots__ = ("eps", "weight")

    def __init__(self, hidden_size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight: Tensor = torch.empty(hidden_size, dtype=dtype, device=device)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of `x` [T, hidden_size]."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual), both [T, hidden_size]. May overwrite `residual`."""
        return add_rms_norm(x, residual, self.weight, self.eps)
