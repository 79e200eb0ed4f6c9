"""Norms: RMSNorm (Zhang and Sennrich, arXiv 1910.07467), fused with the residual addition before it; RMSNorm whose
weights are stored as the difference from one (Gemma); LayerNorm (Ba et al., arXiv 1607.06450)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kvern_engine.layers.parameters import Destination, Destinations, whole
from kvern_engine.loading.parts import WeightPart
from kvern_engine.parallel.groups import OwnShare
from kvern_kernels import ScaledRows, add_rms_norm, add_rms_norm_fp8, add_rms_norm_scaled, rms_norm, rms_norm_fp8


class RMSNorm:
    """`weight` [size]; uninitialized until loaded."""

    __slots__ = ("eps", "weight")

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight: Tensor = torch.empty(size, dtype=dtype, device=device)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of `x` [T, size]."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor | OwnShare | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual), both [T, size]. May overwrite `residual`. `x` may come in parts
        (`Linear.parts`), as this rank's share, or be None: nothing to add."""
        if x is None:
            return self(residual), residual
        if isinstance(x, OwnShare):
            return x.group.add_rms_norm(x.x, residual, self.weight, self.eps)
        return add_rms_norm(x, residual, self.weight, self.eps)

    def fp8(self, x: Tensor) -> ScaledRows:
        """The norm of `x` [T, size] in FP8."""
        return rms_norm_fp8(x, self.weight, self.eps)

    def add_fp8(self, x: ScaledRows, residual: Tensor) -> tuple[ScaledRows, Tensor]:
        """As `add` for an `x` that is still to be multiplied by its rows' scales; the norm in FP8."""
        return add_rms_norm_fp8(x, residual, self.weight, self.eps)

    def add_scaled(self, x: ScaledRows, residual: Tensor) -> tuple[Tensor, Tensor]:
        """As `add` for an `x` that is still to be multiplied by its rows' scales."""
        return add_rms_norm_scaled(x, residual, self.weight, self.eps)

    def destinations(self, name: str) -> Destinations:
        return {f"{name}.weight": whole(self.weight)}


class CenteredRMSNorm(RMSNorm):
    """RMSNorm that multiplies by one plus what the checkpoint holds. `weight` is the sum, in float32: in 16 bits small
    differences would be lost."""

    __slots__ = ()

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(size, eps, dtype=torch.float32, device=device)

    def destinations(self, name: str) -> Destinations:
        part = WeightPart.whole(*self.weight.shape)
        return {f"{name}.weight": Destination(self.weight, part, lambda stored: stored.float() + 1)}


class LayerNorm:
    """`weight` and `bias` [size]; uninitialized until loaded."""

    __slots__ = ("bias", "eps", "weight")

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight: Tensor = torch.empty(size, dtype=dtype, device=device)
        self.bias: Tensor = torch.empty(size, dtype=dtype, device=device)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of `x` [T, size]."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def add(self, x: Tensor | OwnShare | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual), both [T, size]. Overwrites `residual`. `x` None: nothing to add."""
        assert not isinstance(x, OwnShare), "summed by RMSNorm alone"
        if x is not None:
            residual.add_(x)
        return self(residual), residual

    def destinations(self, name: str) -> Destinations:
        return {f"{name}.weight": whole(self.weight), f"{name}.bias": whole(self.bias)}
