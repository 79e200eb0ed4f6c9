"""Rotary embeddings in a config.json: every spelling of base and scaling, as ModelConfig has them.

Old files have `rope_theta` beside `rope_scaling`, new ones `rope_parameters` holding both, or one such object for each
type of layer. What the scalings compute is in `layers/rotary.py`; here their fields are checked, so that a bad one is
refused by its name before torch is loaded.
"""

from dataclasses import dataclass
from typing import Any

from kvern_engine.loading.fields import Fields

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
_ALIASES = {"su": "longrope"}
_MOST_POSITIONS = 1 << 24
_YARN_NUMBERS = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")


@dataclass(frozen=True)
class Rope:
    """The fields of ModelConfig of the same names; `rotary` is the share of each head that is rotated."""

    theta: float
    scaling: dict[str, Any] | None
    rotary: float = 1.0


def read_rope(fields: Fields, max_positions: int, head_dim: int, default_theta: float = 10000.0) -> Rope:
    """Base and scaling of a config.json with one for all layers. Raises ModelConfigError."""
    parameters = fields.inner("rope_parameters") or fields.inner("rope_scaling")
    return _rope(fields, parameters, max_positions, head_dim, default_theta)


def read_rope_by_layer(fields: Fields, max_positions: int, head_dim: int) -> tuple[Rope, float]:
    """Gemma 3: what its full layers have, and the base of the sliding ones, which have no scaling."""
    parameters = fields.inner("rope_parameters")
    full = parameters.inner("full_attention") if parameters is not None else None
    sliding = parameters.inner("sliding_attention") if parameters is not None else None
    if full is None and sliding is None:
        rope = read_rope(fields, max_positions, head_dim, 1e6)
        return rope, fields.number("rope_local_base_freq", 1e4)
    local = 1e4
    if sliding is not None:
        if sliding.text("rope_type", "default") != "default":
            raise sliding.fail("rope_type", "default")
        local = sliding.number("rope_theta", 1e4)
    return _rope(fields, full, max_positions, head_dim, 1e6), local


def _rope(fields: Fields, found: Fields | None, max_positions: int, head_dim: int, default_theta: float) -> Rope:
    parameters = found or Fields({}, fields.path)
    if parameters.content.get("rope_theta") is not None:
        theta = parameters.number("rope_theta")
    else:
        theta = fields.number("rope_theta", default_theta)
    share = parameters if parameters.content.get("partial_rotary_factor") is not None else fields
    rotary = share.number("partial_rotary_factor", 1.0)
    if rotary > 1:
        raise share.fail("partial_rotary_factor", "above 0 and at most 1")
    field = "rope_type" if parameters.content.get("rope_type") is not None else "type"
    kind = parameters.text(field, "default", (*ROPE_TYPES, *_ALIASES))
    kind = _ALIASES.get(kind, kind)
    if kind == "default":
        return Rope(theta, None, rotary)
    return Rope(
        theta, {"rope_type": kind, **_scaling(kind, fields, parameters, max_positions, head_dim, rotary)}, rotary
    )


def _scaling(
    kind: str, fields: Fields, parameters: Fields, max_positions: int, head_dim: int, rotary: float
) -> dict[str, Any]:
    if kind == "linear":
        return {"factor": parameters.number("factor")}
    if kind == "dynamic":
        return {"factor": parameters.number("factor"), "original_max_position_embeddings": max_positions}
    original = _original(fields, parameters, max_positions)
    if kind == "llama3":
        found = {name: parameters.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor")}
        if found["high_freq_factor"] <= found["low_freq_factor"]:
            raise parameters.fail("high_freq_factor", f"above low_freq_factor ({found['low_freq_factor']})")
        return {**found, "original_max_position_embeddings": original}
    if kind == "longrope":
        return _longrope(parameters, original, max_positions, int(head_dim * rotary) // 2)
    yarn: dict[str, Any] = {"factor": parameters.number("factor"), "original_max_position_embeddings": original}
    yarn |= {name: parameters.number(name) for name in _YARN_NUMBERS if parameters.content.get(name) is not None}
    if parameters.content.get("truncate") is not None:
        yarn["truncate"] = parameters.flag("truncate")
    return yarn


def _original(fields: Fields, parameters: Fields, max_positions: int) -> int:
    name = "original_max_position_embeddings"
    place = fields if fields.content.get(name) is not None else parameters  # Phi-3 has it outside
    return place.count(name, max_positions, most=_MOST_POSITIONS)


def _longrope(parameters: Fields, original: int, max_positions: int, pairs: int) -> dict[str, Any]:
    for name in ("short_mscale", "long_mscale"):
        if parameters.content.get(name) is not None:
            raise parameters.fail(name, "absent: it is not supported")
    scaling: dict[str, Any] = {name: _factors(parameters, name, pairs) for name in ("short_factor", "long_factor")}
    scaling |= {"original_max_position_embeddings": original, "factor": max_positions / original}
    if parameters.content.get("attention_factor") is not None:
        scaling["attention_factor"] = parameters.number("attention_factor")
    return scaling


def _factors(parameters: Fields, name: str, pairs: int) -> list[float]:
    """One divisor for each of the `pairs` of numbers that are rotated."""
    rule = f"a list of {pairs} numbers above 0, one for each rotated pair of a head"
    values = parameters.content.get(name)
    if not isinstance(values, list) or len(values) != pairs:
        raise parameters.fail(name, rule)
    for index, value in enumerate(values):
        Fields({str(index): value}, parameters.path, f"{parameters.prefix}{name}.").number(str(index))
    return [float(value) for value in values]
