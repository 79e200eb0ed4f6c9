"""RMSNorm (Zhang and Sennrich, arXiv 1910.07467), fused with the residual addition before it."""

import torch
from torch import Tensor

from kvern_kernels import ScaledRows, add_rms_norm, add_rms_norm_fp8, add_rms_norm_scaled, rms_norm, rms_norm_fp8


class RMSNorm:
    """`weight` [hidden_size]; uninitialized until loaded."""

    __slots__ = ("eps", "weight")

    def __init__(self, hidden_size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight: Tensor = torch.empty(hidden_size, dtype=dtype, device=device)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of `x` [T, hidden_size]."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual), both [T, hidden_size]. May overwrite `residual`. `x` may come in parts
        (`Linear.parts`) or be None: nothing to add."""
        if x is None:
            return self(residual), residual
        return add_rms_norm(x, residual, self.weight, self.eps)

    def fp8(self, x: Tensor) -> ScaledRows:
        """The norm of `x` [T, hidden_size] in FP8."""
        return rms_norm_fp8(x, self.weight, self.eps)

    def add_fp8(self, x: ScaledRows, residual: Tensor) -> tuple[ScaledRows, Tensor]:
        """As `add` for an `x` that is still to be multiplied by its rows' scales; the norm in FP8."""
        return add_rms_norm_fp8(x, residual, self.weight, self.eps)

    def add_scaled(self, x: ScaledRows, residual: Tensor) -> tuple[Tensor, Tensor]:
        """As `add` for an `x` that is still to be multiplied by its rows' scales."""
        return add_rms_norm_scaled(x, residual, self.weight, self.eps)
