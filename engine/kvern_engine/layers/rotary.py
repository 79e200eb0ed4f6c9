"""Tables for rotary position embeddings (Su et al., arXiv 2104.09864), with the scalings that long-context models use.

Only the tables: rotating and writing the cache is one kernel (`kvern_kernels.rope_and_cache`).
"""

import math
from typing import Any

import torch
from torch import Tensor

SCALINGS = ("default", "linear", "llama3")


def inverse_frequencies(head_dim: int, theta: float, scaling: dict[str, Any] | None) -> Tensor:
    """Rotation a position of each of the head_dim/2 pairs, float64.

    `linear` divides all by `factor` (Chen et al., arXiv 2306.15595). `llama3` divides wavelengths beyond the original
    context by `factor`, leaves short ones alone and blends between (Llama 3.1's model card). Raises ValueError for
    others.
    """
    freqs = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    kind = (scaling or {}).get("rope_type", "default")
    if scaling is None or kind == "default":
        return freqs
    if kind not in SCALINGS:
        raise ValueError(f"rope_scaling.rope_type {kind!r} is not supported; supported: {', '.join(SCALINGS)}")
    factor = float(scaling["factor"])
    if kind == "linear":
        return freqs / factor
    original = float(scaling["original_max_position_embeddings"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = original * freqs / (2 * math.pi)  # full turns within the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return freqs * (keep + (1 - keep) / factor)


def cos_sin_table(
    head_dim: int, max_positions: int, theta: float, scaling: dict[str, Any] | None, device: torch.device
) -> Tensor:
    """[max_positions, head_dim] float32: cos of the head_dim/2 angles of a position, then sin."""
    angles = torch.outer(
        torch.arange(max_positions, dtype=torch.float64), inverse_frequencies(head_dim, theta, scaling)
    )
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(device, torch.float32)
