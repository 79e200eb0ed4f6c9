"""What the metadata of a GGUF file says about a model's shapes and constants, one reader an architecture.

GGUF leaves out what llama.cpp knows of an architecture by itself (which layers of Gemma have a window, how Gemma scales
its embeddings); such constants stand here. Everything is checked before anything is allocated.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvern_engine.loading.families import MOST
from kvern_engine.loading.fields import Fields, ModelConfigError, check_heads
from kvern_engine.loading.gguf import GGUFFile
from kvern_engine.model_config import Experts, ModelConfig

_TOKEN_CONTROL, _TOKEN_USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

# Texts of the tokens that end a turn of a chat, for files that name only the end of a text.
_TURN_ENDS = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>", "<end_of_utterance>", "<EOT>", "[EOT]"}
)
# Models whose attention is not scaled by their head's size: (architecture, layers).
_SCALED_BY_HIDDEN = {("gemma2", 46), ("gemma3", 62)}  # both of 27 billion parameters
_GEMMA_PATTERN = {"gemma2": 2, "gemma3": 6}  # every so many-th layer has no window


def gguf_model_config(file: GGUFFile) -> ModelConfig:
    """Shapes and constants of the model in an open GGUF file. Raises ModelConfigError."""
    name = file.metadata.get("general.architecture")
    reader = _READERS.get(str(name))
    if reader is None:
        raise ModelConfigError(
            f"{file.path}: GGUF architecture {name!r} is not supported; supported: {', '.join(_READERS)}"
        )
    prefix = f"{name}."
    content = {key.removeprefix(prefix): _uniform(value) for key, value in file.metadata.items()}
    fields = Fields(content, file.path)
    config = reader(file, fields, _common(file, fields))
    check_heads(config, file.path)
    return config


def gguf_eos(metadata: dict[str, Any]) -> tuple[int, ...]:
    """Ids that end an answer: end of sequence, of turn and of message, as far as the metadata names them. Where it
    names no end of turn and the end of sequence is not one, the vocabulary is searched for a known one."""
    ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    found = [index for index in ids if isinstance(index, int)]
    tokens, kinds = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(kinds, list) and ids[1] is None:
        known = [tokens[index] for index in found if 0 <= index < len(tokens)]
        if not _TURN_ENDS.intersection(known):
            special = (_TOKEN_CONTROL, _TOKEN_USER_DEFINED)
            pairs = enumerate(zip(tokens, kinds, strict=False))
            found += [index for index, (text, kind) in pairs if kind in special and text in _TURN_ENDS]
    return tuple(dict.fromkeys(found))


def _uniform(value: Any) -> Any:
    """Some converters write one number a layer where all are the same."""
    if isinstance(value, list) and value and isinstance(value[0], int) and all(item == value[0] for item in value):
        return value[0] if not isinstance(value[0], bool) else value
    return value


def _common(file: GGUFFile, fields: Fields) -> ModelConfig:
    """What all families state in the same way."""
    meta = file.metadata
    hidden = fields.count("embedding_length", most=MOST["hidden_size"])
    heads = fields.count("attention.head_count", most=MOST["num_attention_heads"])
    if "token_embd.weight" not in file.tensors:
        raise ModelConfigError(f"{file.path}: tensor 'token_embd.weight' is missing; is this a language model?")
    if len(file.tensors["token_embd.weight"].shape) != 2:
        shape = list(file.tensors["token_embd.weight"].shape)
        raise ModelConfigError(f"{file.path}: tensor 'token_embd.weight' must have two dimensions, got {shape}")
    is_llama = meta["general.architecture"] == "llama"
    default = fields.content.get("rope.dimension_count") if is_llama else None
    if default is None and fields.content.get("attention.key_length") is None and hidden % heads:
        raise fields.fail("attention.key_length", f"given: embedding_length {hidden} is no multiple of {heads} heads")
    head_dim = fields.count("attention.key_length", default or hidden // heads, most=MOST["head_dim"])
    if fields.count("attention.value_length", head_dim) != head_dim:
        raise fields.fail("attention.value_length", f"that of keys ({head_dim}): others are not supported")
    eps = "layer_norm_epsilon" if meta["general.architecture"] == "gpt2" else "layer_norm_rms_epsilon"
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=fields.count("feed_forward_length", most=MOST["intermediate_size"]),
        num_layers=fields.count("block_count", most=MOST["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=fields.count("attention.head_count_kv", heads, most=MOST["num_attention_heads"]),
        head_dim=head_dim,
        max_position_embeddings=fields.count("context_length", most=MOST["max_position_embeddings"]),
        # Stored as float32: the shortest decimal that reads the same is the number its author wrote.
        rms_norm_eps=_short_float(fields.number(f"attention.{eps}")),
        rope_theta=_short_float(fields.number("rope.freq_base", 10000.0)),
        rope_scaling=_rope_scaling(file, fields, head_dim),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        attention_out_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        dtype="float32",
        bos_token_id=fields.token("tokenizer.ggml.bos_token_id"),
        eos_token_ids=gguf_eos(meta),
    )


def _llama(file: GGUFFile, fields: Fields, config: ModelConfig) -> ModelConfig:
    """Llama, Mistral and Mixtral all call themselves llama."""
    _refuse_partial_rotary(fields, config)
    if fields.content.get("expert_count"):
        return replace(config, architecture="MixtralForCausalLM", experts=_experts(fields, config.intermediate_size))
    window = _window(fields, config)
    if window is not None:
        return replace(config, architecture="MistralForCausalLM", sliding_window=window)
    return config


def _qwen2(file: GGUFFile, fields: Fields, config: ModelConfig) -> ModelConfig:
    _refuse_partial_rotary(fields, config)
    return replace(config, architecture="Qwen2ForCausalLM")


def _qwen3(file: GGUFFile, fields: Fields, config: ModelConfig) -> ModelConfig:
    _refuse_partial_rotary(fields, config)
    return replace(config, architecture="Qwen3ForCausalLM", qk_norm=True)


def _qwen3_moe(file: GGUFFile, fields: Fields, config: ModelConfig) -> ModelConfig:
    _refuse_partial_rotary(fields, config)
    experts = _experts(fields, fields.count("expert_feed_forward_length", most=MOST["intermediate_size"]))
    return replace(config, architecture="Qwen3MoeForCausalLM", qk_norm=True, experts=experts)


def _experts(fields: Fields, intermediate: int) -> Experts:
    for field, harmless in (
        ("expert_gating_func", (1,)),
        ("expert_shared_count", (0,)),
        ("expert_weights_scale", (1,)),
    ):
        value = fields.content.get(field)
        if value not in (None, *harmless):
            raise fields.fail(field, f"absent or {harmless[0]}: others are not supported")
    count = fields.count("expert_count", most=MOST["num_experts"])
    used = fields.count("expert_used_count", most=count)
    return Experts(count, used, intermediate, fields.flag("expert_weights_norm", True))


def _gemma(file: GGUFFile, fields: Fields, config: ModelConfig) -> ModelConfig:
    """What Gemma 2 and 3 share."""
    _refuse_partial_rotary(fields, config)
    architecture = str(fields.content["general.architecture"])
    scale = None
    if (architecture, config.num_layers) in _SCALED_BY_HIDDEN:
        scale = (config.hidden_size / config.num_heads) ** -0.5
    if fields.content.get("attention.scale") is not None:
        scale = fields.number("attention.scale")
    window = _window(fields, config)
    return replace(
        config,
        hidden_act="gelu_tanh",
        embedding_scale=config.hidden_size**0.5,
        attention_scale=scale,
        attention_softcap=_optional(fields, "attn_logit_softcapping"),
        logit_softcap=_optional(fields, "final_logit_softcapping"),
        sliding_window=window,
        sliding_layers=_sliding_layers(fields, config.num_layers, _GEMMA_PATTERN[architecture]) if window else (),
    )


def _gemma2(file: GGUFFile, fields: Fields, config: ModelConfig) -> ModelConfig:
    return replace(_gemma(file, fields, config), architecture="Gemma2ForCausalLM")


def _gemma3(file: GGUFFile, fields: Fields, config: ModelConfig) -> ModelConfig:
    return replace(
        _gemma(file, fields, config),
        architecture="Gemma3ForCausalLM",
        qk_norm=True,
        rope_theta=_short_float(fields.number("rope.freq_base", 1_000_000.0)),
        local_rope_theta=_short_float(fields.number("rope.freq_base_swa", 10_000.0)),
    )


def _sliding_layers(fields: Fields, layers: int, period: int) -> tuple[bool, ...]:
    pattern = fields.content.get("attention.sliding_window_pattern", period)
    if isinstance(pattern, list):
        if len(pattern) != layers:
            raise fields.fail("attention.sliding_window_pattern", f"a number or one entry for each of {layers} layers")
        return tuple(bool(entry) for entry in pattern)
    period = fields.count("attention.sliding_window_pattern", period)
    return tuple(layer % period < period - 1 for layer in range(layers))


def _phi3(file: GGUFFile, fields: Fields, config: ModelConfig) -> ModelConfig:
    rotary = fields.count("rope.dimension_count", config.head_dim)
    if rotary > config.head_dim or rotary % 2:
        raise fields.fail("rope.dimension_count", f"an even number up to the head size ({config.head_dim})")
    window = _window(fields, config)
    return replace(
        config,
        architecture="Phi3ForCausalLM",
        rotary_dim=rotary if rotary < config.head_dim else None,
        sliding_window=window,
    )


def _gpt2(file: GGUFFile, fields: Fields, config: ModelConfig) -> ModelConfig:
    return replace(
        config,
        architecture="GPT2LMHeadModel",
        num_kv_heads=config.num_heads,
        hidden_act="gelu_tanh",
        attention_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
    )


def _window(fields: Fields, config: ModelConfig) -> int | None:
    """0 and absent mean none, and so does one that nothing leaves."""
    if not fields.content.get("attention.sliding_window"):
        return None
    window = fields.count("attention.sliding_window")
    return window if window < config.max_position_embeddings else None


def _refuse_partial_rotary(fields: Fields, config: ModelConfig) -> None:
    if fields.count("rope.dimension_count", config.head_dim) != config.head_dim:
        raise fields.fail("rope.dimension_count", f"the head size ({config.head_dim}): partial rotary is not supported")


def _optional(fields: Fields, field: str) -> float | None:
    return _short_float(fields.number(field)) if fields.content.get(field) else None


def _short_float(value: float) -> float:
    return float(f"{value:.7g}")


def _rope_scaling(file: GGUFFile, fields: Fields, head_dim: int) -> dict[str, Any] | None:
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, fields, head_dim)
    if "rope_factors_long.weight" in file.tensors:
        return _longrope(file, fields, head_dim)
    # Files of before November 2023 have the factor of a linear scaling alone, under either name.
    old = "rope.scaling.factor" if fields.content.get("rope.scaling.factor") is not None else "rope.scale_linear"
    kind = fields.content.get("rope.scaling.type")
    if kind is None:
        factor = _short_float(fields.number(old, 1.0))
        return None if factor == 1 else {"rope_type": "linear", "factor": factor}
    if kind in ("none", "longrope"):  # of longrope without factors nothing is left
        return None
    if kind not in ("linear", "yarn"):
        raise fields.fail("rope.scaling.type", "none, linear, yarn or longrope")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": _short_float(fields.number("rope.scaling.factor"))}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = fields.count("rope.scaling.original_context_length")
        for name in ("beta_fast", "beta_slow"):
            if fields.content.get(f"rope.scaling.yarn_{name}") is not None:
                scaling[name] = _short_float(fields.number(f"rope.scaling.yarn_{name}"))
    return scaling


def _longrope(file: GGUFFile, fields: Fields, head_dim: int) -> dict[str, Any]:
    """Phi-3's two lists of divisors (LongRoPE, arXiv 2402.13753) are tensors here."""
    size = fields.count("rope.dimension_count", head_dim) // 2
    factors = {}
    for name in ("long", "short"):
        tensor = f"rope_factors_{name}.weight"
        info = file.tensors.get(tensor)
        if info is None or info.shape != (size,) or info.type_name != "F32":
            got = "none" if info is None else f"{list(info.shape)} of {info.type_name}"
            raise ModelConfigError(f"{file.path}: tensor {tensor!r} must hold {size} numbers of F32, got {got}")
        factors[f"{name}_factor"] = [_short_float(value) for value in file.dequantize(tensor).tolist()]
    original = fields.count("rope.scaling.original_context_length")
    scaling = {"rope_type": "longrope", **factors, "original_max_position_embeddings": original}
    scaling["factor"] = fields.count("context_length") / original
    if fields.content.get("rope.scaling.attn_factor") is not None:
        scaling["attention_factor"] = fields.number("rope.scaling.attn_factor")
    return scaling


def _llama3_scaling(file: GGUFFile, fields: Fields, head_dim: int) -> dict[str, Any]:
    """GGUF keeps only the divisor of each rotary frequency that Llama 3.1's scaling rule gave. The rule's constants
    are the same in all models that use it except the factor, which is the largest divisor: compute the divisors
    again and accept the file if they agree."""
    info = file.tensors["rope_freqs.weight"]
    if info.shape != (head_dim // 2,) or info.type_name != "F32":
        raise ModelConfigError(
            f"{file.path}: tensor 'rope_freqs.weight' must hold {head_dim // 2} numbers of F32, got "
            f"{list(info.shape)} of {info.type_name}"
        )
    stored = file.dequantize("rope_freqs.weight").tolist()
    if not all(math.isfinite(divisor) and divisor > 0 for divisor in stored):
        raise ModelConfigError(f"{file.path}: tensor 'rope_freqs.weight' must hold finite numbers above 0")
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


_READERS: dict[str, Callable[[GGUFFile, Fields, ModelConfig], ModelConfig]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "gpt2": _gpt2,
}
