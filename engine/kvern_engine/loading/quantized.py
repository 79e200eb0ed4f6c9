"""Checkpoints that come quantized: which of them Kvern runs (FP8), and how their tensors are called; no torch.

Two layouts are read. "compressed-tensors" (format float-quantized, as llm-compressor writes it) and "fp8" (as Hugging
Face and AutoFP8 write it, without weight blocks): weights in E4M3, each with a `weight_scale` beside it. Activations
are quantized by rows while the model runs, so that scales of inputs (`input_scale`) are left aside.
"""

import re
from pathlib import Path
from typing import Any

from kvern_engine.loading.fields import shown
from kvern_engine.model_config import Fp8Checkpoint

_KV_SCALE = re.compile(r"(.*\.self_attn\.)(?:attn\.|[kqv]+_proj\.)?([kv])_scale")
_OLD_KV_SCALE = re.compile(r"(.*\.self_attn\.)([kv])_proj\.output_scale")
_HEAD_NAMES = ["lm_head", "re:.*lm_head", "re:.*lm_head.*"]
_NOT_NEEDED = ("input_scale", "q_scale", "prob_scale")


class QuantizationError(ValueError):
    """A checkpoint is quantized in a way that Kvern does not run; the text names field and value."""


def read_quantization(config: dict[str, Any], path: Path) -> Fp8Checkpoint | None:
    """What `quantization_config` of a config.json (its content, `path` for errors) says; None where there is none.
    Raises QuantizationError."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return None
    where = f"{path}: quantization_config"
    if not isinstance(quantization, dict):
        raise QuantizationError(f"{where} must be an object, got {shown(quantization)}")
    method = quantization.get("quant_method", "unknown")
    if method == "compressed-tensors":
        return _compressed_tensors(quantization, where)
    if method == "fp8":
        return _native_fp8(quantization, where)
    raise QuantizationError(
        f"{where}.quant_method is {shown(method)}, which is not supported; use the unquantized model, a checkpoint in "
        "FP8 (compressed-tensors or fp8) or a GGUF file"
    )


def _compressed_tensors(quantization: dict[str, Any], where: str) -> Fp8Checkpoint:
    layout = quantization.get("format", "float-quantized")
    if layout != "float-quantized":
        raise QuantizationError(
            f"{where}.format is {shown(layout)}, which is not supported; supported: 'float-quantized'"
        )
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        count = len(groups) if isinstance(groups, dict) else 0
        raise QuantizationError(f"{where}.config_groups must hold one group for all linear layers, got {count}")
    name, group = next(iter(groups.items()))
    where_group = f"{where}.config_groups.{name}"
    group = _object(group, where_group)
    if group.get("targets") != ["Linear"]:
        raise QuantizationError(f"{where_group}.targets must be ['Linear'], got {shown(group.get('targets'))}")
    weights = _object(group.get("weights") or {}, f"{where_group}.weights")
    for field, wanted in (("num_bits", 8), ("type", "float"), ("symmetric", True)):
        if weights.get(field, wanted) != wanted:
            raise QuantizationError(f"{where_group}.weights.{field} must be {wanted!r}, got {shown(weights[field])}")
    strategy = weights.get("strategy", "tensor")
    if strategy not in ("tensor", "channel"):
        raise QuantizationError(
            f"{where_group}.weights.strategy is {shown(strategy)}, which is not supported; supported: 'tensor', "
            "'channel'"
        )
    kv_scheme = quantization.get("kv_cache_scheme")
    if kv_scheme is not None:
        kv_scheme = _object(kv_scheme, f"{where}.kv_cache_scheme")
        for field, wanted in (("num_bits", 8), ("type", "float"), ("strategy", "tensor"), ("dynamic", False)):
            if kv_scheme.get(field, wanted) != wanted:
                raise QuantizationError(
                    f"{where}.kv_cache_scheme.{field} must be {wanted!r}, got {shown(kv_scheme[field])}"
                )
    head = _head_is_quantized(quantization.get("ignore") or [], f"{where}.ignore")
    return Fp8Checkpoint(strategy == "channel", head, kv_scheme is not None)


def _native_fp8(quantization: dict[str, Any], where: str) -> Fp8Checkpoint:
    if quantization.get("weight_block_size") is not None:
        raise QuantizationError(
            f"{where}.weight_block_size is {shown(quantization['weight_block_size'])}: scales of blocks are not "
            "supported; use a checkpoint with one scale a weight or an output channel"
        )
    ignored = quantization.get("ignored_layers") or quantization.get("modules_to_not_convert") or []
    head = _head_is_quantized(ignored, f"{where}.ignored_layers")
    return Fp8Checkpoint(False, head, quantization.get("kv_cache_scheme") is not None)


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise QuantizationError(f"{where} must be an object, got {shown(value)}")
    return value


def _head_is_quantized(ignored: Any, where: str) -> bool:
    if not isinstance(ignored, list):
        raise QuantizationError(f"{where} must be a list of layers, got {shown(ignored)}")
    others = [name for name in ignored if name not in _HEAD_NAMES]
    if others:
        raise QuantizationError(
            f"{where} names {shown(others[0])}: decoder layers that stay unquantized are not supported; only "
            "'lm_head' is"
        )
    return not ignored


def canonical_name(name: str) -> str | None:
    """The name of a quantized checkpoint's tensor as Kvern's models know it; None for one that is not needed."""
    if name.rpartition(".")[2] in _NOT_NEEDED:
        return None
    for pattern in (_KV_SCALE, _OLD_KV_SCALE):
        if match := pattern.fullmatch(name):
            return f"{match[1]}{match[2]}_scale"
    return name


def canonical_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Scales are stored as [], [1], [N] or [N, 1]: without dimensions of 1 where `name` is that of a scale."""
    return tuple(size for size in shape if size > 1) if name.endswith("_scale") else shape
