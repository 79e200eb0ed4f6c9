"""Tables for rotary position embeddings (RoPE, Su et al., arXiv 2104.09864), with the scalings that long-context models
use.

Only the tables: rotating and writing the cache is one kernel (`kvern_kernels.rope_and_cache`). It always rotates whole
heads, dimension i with dimension i + head_dim / 2. Where a model rotates only a part of a head, the pairs of the others
have an angle of zero here, and the rows of its projections are stored in the order that makes the pairs fit
(`rotary_order`): scores do not depend on the order of a head's dimensions.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kvern_engine.model_config import ModelConfig

Scaling = Mapping[str, Any]


def rope_table(config: ModelConfig, max_positions: int, device: torch.device, local: bool = False) -> Tensor:
    """The model's `cos_sin_table`; `local`: that of its layers with a window."""
    theta, scaling = config.rope_theta, config.rope_scaling
    if local and config.local_rope_theta is not None:
        theta, scaling = config.local_rope_theta, None
    return cos_sin_table(config.head_dim, max_positions, theta, scaling, device, config.rotary_dim)


def cos_sin_table(
    head_dim: int,
    max_positions: int,
    theta: float,
    scaling: Scaling | None,
    device: torch.device,
    rotary_dim: int | None = None,
) -> Tensor:
    """[max_positions, head_dim] float32: cos of the head_dim/2 angles of a position, then sin. `rotary_dim`: how many
    dimensions of a head are rotated (None: all)."""
    rotated = rotary_dim or head_dim
    freqs, magnitude = frequencies(rotated, theta, scaling, max_positions)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float64), freqs)
    still = torch.ones(max_positions, (head_dim - rotated) // 2, dtype=torch.float64)
    parts = angles.cos() * magnitude, still, angles.sin() * magnitude, 0 * still
    return torch.cat(parts, dim=-1).to(device, torch.float32)


def rotary_order(head_dim: int, rotary_dim: int) -> Tensor:
    """[head_dim] int64: which dimension of the checkpoint's heads comes at each place, so that its rotated pairs
    (i, i + rotary_dim / 2) are head_dim / 2 apart."""
    half, rest = rotary_dim // 2, (head_dim - rotary_dim) // 2
    first, second = torch.arange(half), torch.arange(half, rotary_dim)
    still = torch.arange(rotary_dim, head_dim)
    return torch.cat((first, still[:rest], second, still[rest:]))


def frequencies(dim: int, theta: float, scaling: Scaling | None, longest: int) -> tuple[Tensor, float]:
    """Rotation a position of each of the dim/2 pairs, float64, and what cos and sin are multiplied by.

    `longest` is the longest sequence there will be: the scalings that depend on a sequence's length take it for all of
    them, so that what the cache holds is right for whoever reads it. Raises ValueError for a type of scaling that is
    not known, a field that it lacks, or numbers that make no sense together.
    """
    kind = "default" if scaling is None else str(scaling.get("rope_type", "default"))
    if scaling is None or kind == "default":
        return _plain(dim, theta), 1.0
    if kind not in _SCALINGS:
        known = ", ".join(("default", *_SCALINGS))
        raise ValueError(f"rope_scaling.rope_type {kind!r} is not supported; supported: {known}")
    try:
        freqs, magnitude = _SCALINGS[kind](dim, theta, scaling, longest)
    except ArithmeticError:
        freqs, magnitude = torch.tensor(math.inf), math.inf
    if not (freqs.isfinite().all() and math.isfinite(magnitude)):
        raise ValueError(f"rope_theta {theta:g} and the fields of rope_scaling ({kind}) give no finite frequencies")
    return freqs, magnitude


def _plain(dim: int, theta: float) -> Tensor:
    return theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def _number(scaling: Scaling, field: str, default: float | None = None) -> float:
    value = scaling.get(field)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        kind = scaling.get("rope_type")
        raise ValueError(f"rope_scaling.{field} must be a number above 0 where rope_type is {kind!r}, got {value!r}")
    return float(value)


def _linear(dim: int, theta: float, scaling: Scaling, longest: int) -> tuple[Tensor, float]:
    """All frequencies divided by `factor` (position interpolation, Chen et al., arXiv 2306.15595)."""
    return _plain(dim, theta) / _number(scaling, "factor"), 1.0


def _dynamic(dim: int, theta: float, scaling: Scaling, longest: int) -> tuple[Tensor, float]:
    """Dynamic NTK (bloc97, emozilla; section 3.3 of YaRN, arXiv 2309.00071): a larger base for sequences longer than
    the original context, here as `longest` needs it."""
    factor, original = _number(scaling, "factor"), _number(scaling, "original_max_position_embeddings")
    stretch = factor * max(longest, original) / original - (factor - 1)
    return _plain(dim, theta * stretch ** (dim / (dim - 2))), 1.0


def _yarn(dim: int, theta: float, scaling: Scaling, longest: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al., arXiv 2309.00071): pairs that turn more than `beta_fast` times within the original context
    stay, those that turn less than `beta_slow` times are interpolated, with a ramp between; attention becomes a little
    sharper, by the square of the magnitude."""
    factor, original = _number(scaling, "factor"), _number(scaling, "original_max_position_embeddings")

    def pair_with(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_with(_number(scaling, "beta_fast", 32.0))
    high = pair_with(_number(scaling, "beta_slow", 1.0))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    interpolated = ((torch.arange(dim // 2, dtype=torch.float64) - low) / width).clamp(0, 1)
    freqs = _plain(dim, theta)
    return freqs * (1 - interpolated + interpolated / factor), _yarn_magnitude(scaling, factor)


def _yarn_magnitude(scaling: Scaling, factor: float) -> float:
    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        return _number(scaling, "attention_factor")
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return magnitude(_number(scaling, "mscale")) / magnitude(_number(scaling, "mscale_all_dim"))
    return magnitude(1.0)


def _llama3(dim: int, theta: float, scaling: Scaling, longest: int) -> tuple[Tensor, float]:
    """Wavelengths beyond the original context divided by `factor`, short ones left alone, a blend between (Llama 3.1's
    model card)."""
    factor, original = _number(scaling, "factor"), _number(scaling, "original_max_position_embeddings")
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    freqs = _plain(dim, theta)
    turns = original * freqs / (2 * math.pi)  # full turns within the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return freqs * (keep + (1 - keep) / factor), 1.0


def _longrope(dim: int, theta: float, scaling: Scaling, longest: int) -> tuple[Tensor, float]:
    """LongRoPE (Ding et al., arXiv 2402.13753): a divisor for each frequency found by search, one list for sequences
    within the original context and one for longer ones. `longest` decides which: see `frequencies`."""
    original = _number(scaling, "original_max_position_embeddings")
    field = "long_factor" if longest > original else "short_factor"
    divisors = scaling.get(field)
    if not isinstance(divisors, list) or len(divisors) != dim // 2:
        given = f"{len(divisors)} of them" if isinstance(divisors, list) else repr(divisors)
        raise ValueError(f"rope_scaling.{field} must be a list of {dim // 2} numbers (one a rotated pair), got {given}")
    factor = _number(scaling, "factor", 1.0)
    magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    if scaling.get("attention_factor") is not None:
        magnitude = _number(scaling, "attention_factor")
    return _plain(dim, theta) / torch.tensor(divisors, dtype=torch.float64), magnitude


_SCALINGS: dict[str, Callable[[int, float, Scaling, int], tuple[Tensor, float]]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}
