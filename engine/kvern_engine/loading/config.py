"""Reads a model's shapes and defaults from `config.json`, `generation_config.json` or a GGUF header.

Each architecture has one reader a format, found by its name; weights are not touched. Everything is checked here, so
that a broken or unsupported model is refused with its field named before anything is allocated.
"""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvern_engine.loading.gguf import GGUFFile
from kvern_engine.loading.quantized import QuantizationError, read_quantization
from kvern_engine.loading.resolve import ModelFiles
from kvern_engine.model_config import ModelConfig
from kvern_engine.request import SamplingParams

_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_DTYPES = ("float32", "float16", "bfloat16")


class ModelConfigError(ValueError):
    """The model's description is missing something, contradicts itself or is of a kind that Kvern does not run."""


def read_model_config(files: ModelFiles) -> ModelConfig:
    """Shapes and constants of the model. Raises ModelConfigError, GGUFError or OSError."""
    if files.kind == "gguf":
        return gguf_model_config(GGUFFile(files.path))
    config = read_json(files.path / "config.json")
    try:
        fp8 = read_quantization(config, files.path / "config.json")
    except QuantizationError as error:
        raise ModelConfigError(str(error)) from error
    architectures = config.get("architectures") or []
    name = architectures[0] if architectures else config.get("model_type")
    reader = _from_json.get(str(name))
    if reader is None:
        raise ModelConfigError(
            f"{files.path / 'config.json'}: architecture {name!r} is not supported; supported: {', '.join(_from_json)}"
        )
    found = reader(_Fields(config, files.path / "config.json"), json_eos(files.path, config))
    if fp8 is not None and found.tie_word_embeddings:
        fp8 = replace(fp8, head=False)
    return replace(found, fp8=fp8)


def gguf_model_config(file: GGUFFile) -> ModelConfig:
    """The same from an open GGUF file."""
    name = file.metadata.get("general.architecture")
    reader = _from_gguf.get(str(name))
    if reader is None:
        raise ModelConfigError(
            f"{file.path}: GGUF architecture {name!r} is not supported; supported: {', '.join(_from_gguf)}"
        )
    return reader(file)


def read_generation_config(files: ModelFiles) -> dict[str, Any]:
    """The model's own sampling defaults, by the names of SamplingParams: any of temperature, top_p, top_k, min_p and
    repetition_penalty. Empty where the model brings none. Raises ModelConfigError for a value out of range."""
    path = files.path / "generation_config.json"
    if files.kind == "gguf" or not path.is_file():
        return {}
    content = read_json(path)
    defaults = {name: content[name] for name in _SAMPLING_DEFAULTS if content.get(name) is not None}
    try:
        SamplingParams(**defaults)
    except (ValueError, TypeError) as error:
        raise ModelConfigError(f"{path}: {error}") from error
    return defaults


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from `path`; raises ModelConfigError where the file is missing or is not one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelConfigError(f"{path}: no such file") from error
    except ValueError as error:
        raise ModelConfigError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelConfigError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


class _Fields:
    """Typed access to a config object: an error names the file, the field and the value."""

    def __init__(self, content: dict[str, Any], path: Path) -> None:
        self.content = content
        self.path = path

    def fail(self, field: str, rule: str) -> ModelConfigError:
        if field not in self.content:
            return ModelConfigError(f"{self.path}: {field} is missing; it must be {rule}")
        return ModelConfigError(f"{self.path}: {field} must be {rule}, got {self.content[field]!r}")

    def count(self, field: str, default: int | None = None) -> int:
        value = self.content.get(field)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.fail(field, "a whole number above 0")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        value = self.content.get(field)
        value = default if value is None else value
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self.fail(field, "a number above 0")
        return float(value)


def _checked(config: ModelConfig, path: Path) -> ModelConfig:
    if config.num_heads % config.num_kv_heads:
        raise ModelConfigError(
            f"{path}: {config.num_heads} attention heads cannot be shared by {config.num_kv_heads} KV heads; "
            "the first must be a multiple of the second"
        )
    if config.head_dim % 2:
        raise ModelConfigError(f"{path}: head_dim must be even for rotary embeddings, got {config.head_dim}")
    if config.hidden_act != "silu":
        raise ModelConfigError(f"{path}: hidden_act {config.hidden_act!r} is not supported; supported: silu")
    return config


def _head_dim(fields: _Fields, hidden: int, heads: int) -> int:
    if fields.content.get("head_dim") is None and hidden % heads:
        raise ModelConfigError(
            f"{fields.path}: head_dim is missing and hidden_size {hidden} is not a multiple of "
            f"num_attention_heads {heads}"
        )
    return fields.count("head_dim", hidden // heads)


def _rope(fields: _Fields) -> tuple[float, dict[str, Any] | None]:
    """(base, scaling) from either spelling: rope_theta beside rope_scaling, or rope_parameters holding both."""
    parameters = dict(fields.content.get("rope_parameters") or fields.content.get("rope_scaling") or {})
    theta = parameters.pop("rope_theta", None) or fields.content.get("rope_theta")
    kind = parameters.pop("type", None)
    kind = parameters.pop("rope_type", kind) or "default"
    scaling = None if kind == "default" else {"rope_type": kind, **parameters}
    return _Fields({"rope_theta": theta}, fields.path).number("rope_theta", 10000.0), scaling


def _dtype(fields: _Fields) -> str:
    value = str(fields.content.get("dtype") or fields.content.get("torch_dtype") or "float32").removeprefix("torch.")
    if value not in _DTYPES:
        raise fields.fail("dtype" if "dtype" in fields.content else "torch_dtype", "one of " + ", ".join(_DTYPES))
    return value


def _llama_from_json(fields: _Fields, eos: tuple[int, ...]) -> ModelConfig:
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    theta, scaling = _rope(fields)
    content = fields.content
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=fields.count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=fields.count("num_key_value_heads", heads),
        head_dim=_head_dim(fields, hidden, heads),
        max_position_embeddings=fields.count("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=bool(content.get("tie_word_embeddings", False)),
        attention_bias=bool(content.get("attention_bias", False)),
        attention_out_bias=bool(content.get("attention_bias", False)),
        mlp_bias=bool(content.get("mlp_bias", False)),
        hidden_act=content.get("hidden_act", "silu"),
        dtype=_dtype(fields),
        bos_token_id=content.get("bos_token_id"),
        eos_token_ids=eos,
    )
    return _checked(config, fields.path)


def json_eos(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """End-of-sequence ids of config.json and generation_config.json together (each is an id or a list of ids)."""
    ids: dict[int, None] = {}
    path = folder / "generation_config.json"
    for content in (config, read_json(path) if path.is_file() else {}):
        value = content.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if token is None:
                continue
            if not isinstance(token, int):
                raise ModelConfigError(f"{folder}: eos_token_id must be a token id or a list of them, got {value!r}")
            ids[token] = None
    return tuple(ids)


def _llama_from_gguf(file: GGUFFile) -> ModelConfig:
    meta = file.metadata
    prefix = f"{meta['general.architecture']}."
    fields = _Fields({key.removeprefix(prefix): value for key, value in meta.items()}, file.path)
    hidden, heads = fields.count("embedding_length"), fields.count("attention.head_count")
    if "token_embd.weight" not in file.tensors:
        raise ModelConfigError(f"{file.path}: tensor 'token_embd.weight' is missing; is this a language model?")
    head_dim = fields.count("attention.key_length", fields.content.get("rope.dimension_count") or hidden // heads)
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=fields.count("feed_forward_length"),
        num_layers=fields.count("block_count"),
        num_heads=heads,
        num_kv_heads=fields.count("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=fields.count("context_length"),
        # Stored as float32: the shortest decimal that reads the same is the number its author wrote.
        rms_norm_eps=_short_float(fields.number("attention.layer_norm_rms_epsilon")),
        rope_theta=fields.number("rope.freq_base", 10000.0),
        rope_scaling=_gguf_rope_scaling(file, fields, head_dim),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        attention_out_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        dtype="float32",
        bos_token_id=meta.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=gguf_eos(meta),
    )
    if fields.count("rope.dimension_count", head_dim) != head_dim:
        raise fields.fail("rope.dimension_count", f"the head size ({head_dim}): partial rotary is not supported")
    if fields.content.get("expert_count"):
        raise fields.fail("expert_count", "absent: mixtures of experts are not supported")
    return _checked(config, file.path)


def _short_float(value: float) -> float:
    return float(f"{value:.7g}")


def gguf_eos(metadata: dict[str, Any]) -> tuple[int, ...]:
    """Ids that end an answer: end of sequence, of turn and of message, as far as the file names them."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(int(metadata[key]) for key in keys if key in metadata))


def _gguf_rope_scaling(file: GGUFFile, fields: _Fields, head_dim: int) -> dict[str, Any] | None:
    kind = fields.content.get("rope.scaling.type", "none")
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, fields, head_dim)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise fields.fail("rope.scaling.type", "none, linear or yarn")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": fields.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = fields.count("rope.scaling.original_context_length")
    return scaling


def _llama3_scaling(file: GGUFFile, fields: _Fields, head_dim: int) -> dict[str, Any]:
    """GGUF keeps only the divisor of each rotary frequency that Llama 3.1's scaling rule gave. The rule's constants
    are the same in all models that use it except the factor, which is the largest divisor: compute the divisors
    again and accept the file if they agree."""
    stored = file.dequantize("rope_freqs.weight").tolist()
    base, factor = fields.number("rope.freq_base", 10000.0), max(stored)
    low, high, original = 1.0, 4.0, 8192
    for index, divisor in enumerate(stored):
        turns = original / (2 * math.pi * base ** (2 * index / head_dim))  # of this frequency in the original context
        blend = min(max((turns - low) / (high - low), 0.0), 1.0)
        if not math.isclose(1 / ((1 - blend) / factor + blend), divisor, rel_tol=1e-4):
            raise ModelConfigError(
                f"{file.path}: rope_freqs.weight holds frequency factors of an unknown rule (entry {index} is "
                f"{divisor}); Llama 3.1's rule is supported"
            )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


_from_json: dict[str, Callable[[_Fields, tuple[int, ...]], ModelConfig]] = {"LlamaForCausalLM": _llama_from_json}
_from_gguf: dict[str, Callable[[GGUFFile], ModelConfig]] = {"llama": _llama_from_gguf}
