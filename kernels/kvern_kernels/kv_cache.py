"""A KV cache in FP8 (E4M3): torch reference of what is written to it and read from it.

K and V of each KV head have a scale of their own, `scales` [2, Hkv] float32: the cache holds x / scale. A cache in
another type has none (None). Whatever reads the cache sees the rounded values, also those of the step that wrote them,
so that a result does not depend on how a prompt was cut or what was cached.
"""

import torch
from torch import Tensor

from .fp8 import FP8, FP8_MAX


def is_fp8(kv: Tensor) -> bool:
    return kv.dtype == FP8


def as_bytes(kv: Tensor) -> Tensor:
    """The same memory, as bytes where it is FP8: few of torch's operations move that type."""
    return kv.view(torch.uint8) if is_fp8(kv) else kv


def quantize(x: Tensor, scales: Tensor) -> Tensor:
    """`x` [T, Hkv, D] in FP8 by `scales` [Hkv]; what is too large becomes the largest number there is."""
    return (x.float() / scales.view(1, -1, 1)).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def checked_scales(kv: Tensor, scales: Tensor | None) -> Tensor | None:
    """The scales of a cache `kv` [2, Hkv, N, bs, D]: None where it is not in FP8. Raises ValueError where it is and
    none are given."""
    if not is_fp8(kv):
        return None
    if scales is None or scales.shape != (2, kv.shape[1]):
        given = "none" if scales is None else str(tuple(scales.shape))
        raise ValueError(f"a KV cache in FP8 needs kv_scales of shape (2, {kv.shape[1]}), got {given}")
    return scales
