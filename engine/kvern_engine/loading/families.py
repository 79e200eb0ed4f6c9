"""What a config.json says of each architecture that Kvern runs, as a ModelConfig: one reader a family.

A reader names the fields that its family has, with the defaults that transformers gives them where a file may leave
them out. Values are checked as they are read (`fields.py`), what they mean together in `config.py`.
"""

from collections.abc import Callable
from typing import Any

from kvern_engine.loading.fields import Fields, ModelConfigError
from kvern_engine.loading.rope_config import Rope, read_rope, read_rope_by_layer
from kvern_engine.model_config import Experts, ModelConfig

# Far above every model there is; a hostile file's billions are refused before anybody loops over them.
MOST = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 22,
    "num_hidden_layers": 4096,
    "num_attention_heads": 4096,
    "head_dim": 4096,
    "max_position_embeddings": 1 << 24,
    "num_experts": 4096,
}
DTYPES = ("float32", "float16", "bfloat16")
_SILU = {"silu": "silu", "swish": "silu"}
_GELU = {"gelu": "gelu", **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), "gelu_tanh")}

Eos = tuple[int, ...]
Reader = Callable[[Fields, Eos], ModelConfig]


def _llama(fields: Fields, eos: Eos) -> ModelConfig:
    bias = fields.flag("attention_bias")
    return _decoder(
        fields,
        eos,
        "LlamaForCausalLM",
        attention_bias=bias,
        attention_out_bias=bias,
        mlp_bias=fields.flag("mlp_bias"),
    )


def _mistral(fields: Fields, eos: Eos) -> ModelConfig:
    return _decoder(fields, eos, "MistralForCausalLM", sliding_window=_window(fields))


def _qwen2(fields: Fields, eos: Eos) -> ModelConfig:
    return _decoder(fields, eos, "Qwen2ForCausalLM", attention_bias=True, **_windows_from(fields))


def _qwen3(fields: Fields, eos: Eos) -> ModelConfig:
    bias = fields.flag("attention_bias")
    return _decoder(
        fields,
        eos,
        "Qwen3ForCausalLM",
        default_head_dim=128,
        qk_norm=True,
        attention_bias=bias,
        attention_out_bias=bias,
        **_windows_from(fields),
    )


def _qwen3_moe(fields: Fields, eos: Eos) -> ModelConfig:
    layers = fields.count("num_hidden_layers", most=MOST["num_hidden_layers"])
    step, bias = fields.count("decoder_sparse_step", 1), fields.flag("attention_bias")
    only = _layer_list(fields, "mlp_only_layers", layers)
    name = "num_experts" if "num_experts" in fields.content else "num_local_experts"  # what transformers 5 writes
    experts = fields.count(name, most=MOST["num_experts"])
    return _decoder(
        fields,
        eos,
        "Qwen3MoeForCausalLM",
        qk_norm=True,
        attention_bias=bias,
        attention_out_bias=bias,
        sliding_window=_window(fields) if fields.flag("use_sliding_window") else None,
        experts=Experts(
            num_experts=experts,
            per_token=fields.count("num_experts_per_tok", most=experts),
            intermediate_size=fields.count("moe_intermediate_size", most=MOST["intermediate_size"]),
            renormalize=fields.flag("norm_topk_prob"),
            dense_layers=tuple(layer for layer in range(layers) if layer in only or (layer + 1) % step),
        ),
    )


def _mixtral(fields: Fields, eos: Eos) -> ModelConfig:
    experts = fields.count("num_local_experts", most=MOST["num_experts"])
    return _decoder(
        fields,
        eos,
        "MixtralForCausalLM",
        default_theta=1e6,
        sliding_window=_window(fields),
        experts=Experts(
            num_experts=experts,
            per_token=fields.count("num_experts_per_tok", 2, most=experts),
            intermediate_size=fields.count("intermediate_size", most=MOST["intermediate_size"]),
        ),
    )


def _phi3(fields: Fields, eos: Eos) -> ModelConfig:
    return _decoder(fields, eos, "Phi3ForCausalLM", sliding_window=_window(fields))


def _gemma2(fields: Fields, eos: Eos) -> ModelConfig:
    return _decoder(
        fields,
        eos,
        "Gemma2ForCausalLM",
        window_pattern=2,
        attention_softcap=_softcap(fields, "attn_logit_softcapping", 50.0),
        logit_softcap=_softcap(fields, "final_logit_softcapping", 30.0),
        **_gemma(fields),
    )


def _gemma3(fields: Fields, eos: Eos) -> ModelConfig:
    """Its text model; a file of the multimodal one may leave out what is as in the 2B."""
    defaults = {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    }
    given = {name: value for name, value in fields.content.items() if value is not None}
    fields = Fields({**defaults, **given}, fields.path, fields.prefix)
    if fields.flag("use_bidirectional_attention"):
        raise fields.fail("use_bidirectional_attention", "false: it is an embedding model")
    positions = fields.count("max_position_embeddings", most=MOST["max_position_embeddings"])
    rope, local = read_rope_by_layer(fields, positions, fields.count("head_dim", most=MOST["head_dim"]))
    return _decoder(
        fields,
        eos,
        "Gemma3ForCausalLM",
        rope=rope,
        local_rope_theta=local,
        qk_norm=True,
        window_pattern=fields.count("sliding_window_pattern", 6),
        attention_softcap=_softcap(fields, "attn_logit_softcapping", None),
        logit_softcap=_softcap(fields, "final_logit_softcapping", None),
        **_gemma(fields),
    )


def _gemma(fields: Fields) -> dict[str, Any]:
    bias = fields.flag("attention_bias")
    return {
        "hidden_act": _GELU[fields.text("hidden_activation", "gelu_pytorch_tanh", _GELU)],
        "tied": True,
        "attention_bias": bias,
        "attention_out_bias": bias,
        "attention_scale": fields.number("query_pre_attn_scalar", 256) ** -0.5,
        "embedding_scale": fields.count("hidden_size", most=MOST["hidden_size"]) ** 0.5,
        "sliding_window": _window(fields),
    }


def _gpt2(fields: Fields, eos: Eos) -> ModelConfig:
    if not fields.flag("scale_attn_weights", True):
        raise fields.fail("scale_attn_weights", "true")
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if fields.flag(name):
            raise fields.fail(name, "false")
    hidden, heads = fields.count("n_embd", most=MOST["hidden_size"]), fields.count("n_head", most=4096)
    if hidden % heads:
        raise fields.fail("n_embd", f"a multiple of n_head ({heads})")
    return ModelConfig(
        architecture="GPT2LMHeadModel",
        vocab_size=fields.count("vocab_size", most=MOST["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=fields.count("n_inner", 4 * hidden, most=MOST["intermediate_size"]),
        num_layers=fields.count("n_layer", most=MOST["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_position_embeddings=fields.count("n_positions", most=1 << 20),
        rms_norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        attention_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        hidden_act=_GELU[fields.text("activation_function", "gelu_new", _GELU)],
        dtype=_dtype(fields),
        bos_token_id=fields.token("bos_token_id"),
        eos_token_ids=eos,
    )


def read_plugin(fields: Fields, eos: Eos, architecture: str) -> ModelConfig:
    """An architecture that an installed package brings: the usual fields, and all the others in `extra`."""
    bias = fields.flag("attention_bias")
    return _decoder(
        fields,
        eos,
        architecture,
        attention_bias=bias,
        attention_out_bias=bias,
        mlp_bias=fields.flag("mlp_bias"),
        extra={name: value for name, value in fields.content.items() if name not in _COMMON},
    )


_COMMON = frozenset(
    (
        *("architectures", "dtype", "torch_dtype", "quantization_config", "bos_token_id", "eos_token_id"),
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings"),
        *("num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias", "mlp_bias", "hidden_act"),
        *("rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "tie_word_embeddings"),
    )
)


def _decoder(
    fields: Fields,
    eos: Eos,
    architecture: str,
    *,
    default_head_dim: int | None = None,
    default_theta: float = 10000.0,
    rope: Rope | None = None,
    tied: bool = False,
    window_pattern: int | None = None,
    **more: Any,
) -> ModelConfig:
    """The fields that all families after GPT-2 share. `window_pattern` n: every n-th layer has no window, unless
    layer_types says otherwise. `more` are fields of ModelConfig."""
    hidden = fields.count("hidden_size", most=MOST["hidden_size"])
    heads = fields.count("num_attention_heads", most=MOST["num_attention_heads"])
    layers = fields.count("num_hidden_layers", most=MOST["num_hidden_layers"])
    positions = fields.count("max_position_embeddings", most=MOST["max_position_embeddings"])
    head_dim = _head_dim(fields, hidden, heads, default_head_dim)
    rope = rope or read_rope(fields, positions, head_dim, default_theta)
    rotary_dim = int(head_dim * rope.rotary)
    if more.get("sliding_window") is not None:
        sliding = more.pop("sliding_layers", None) or _sliding_layers(fields, layers, window_pattern)
        more |= _shorter_window(more["sliding_window"], positions, sliding)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size", most=MOST["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=fields.count("intermediate_size", most=MOST["intermediate_size"]),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=fields.count("num_key_value_heads", heads, most=MOST["num_attention_heads"]),
        head_dim=head_dim,
        max_position_embeddings=positions,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        rotary_dim=None if rotary_dim == head_dim else rotary_dim,
        tie_word_embeddings=fields.flag("tie_word_embeddings", tied),
        hidden_act=more.pop("hidden_act", None) or _SILU[fields.text("hidden_act", "silu", _SILU)],
        dtype=_dtype(fields),
        bos_token_id=fields.token("bos_token_id"),
        eos_token_ids=eos,
        **more,
    )


def _head_dim(fields: Fields, hidden: int, heads: int, default: int | None) -> int:
    if fields.content.get("head_dim") is None and default is None and hidden % heads:
        raise ModelConfigError(
            f"{fields.path}: head_dim is missing and hidden_size {hidden} is not a multiple of "
            f"num_attention_heads {heads}"
        )
    return fields.count("head_dim", default or max(1, hidden // heads), most=MOST["head_dim"])


def _dtype(fields: Fields) -> str:
    field = "dtype" if fields.content.get("dtype") is not None else "torch_dtype"
    value = fields.text(field, "float32").removeprefix("torch.")
    if value not in DTYPES:
        raise fields.fail(field, "one of " + ", ".join(DTYPES))
    return value


def _softcap(fields: Fields, name: str, default: float | None) -> float | None:
    """A null says that there is none; what is missing has the family's default."""
    if name not in fields.content:
        return default
    return None if fields.content[name] is None else fields.number(name)


# ---------------------------------------------------------------- windows


def _window(fields: Fields) -> int | None:
    """`sliding_window`; None where it is missing, null or 0."""
    if fields.content.get("sliding_window") in (None, 0):
        return None
    return fields.count("sliding_window", most=MOST["max_position_embeddings"])


def _windows_from(fields: Fields) -> dict[str, Any]:
    """Qwen 2 and 3: a window where `use_sliding_window` says so, from layer `max_window_layers` on."""
    if not fields.flag("use_sliding_window") or (window := _window(fields)) is None:
        return {}
    layers = fields.count("num_hidden_layers", most=MOST["num_hidden_layers"])
    first = fields.count("max_window_layers", 28, least=0)
    sliding = _layer_types(fields, layers) or tuple(layer >= first for layer in range(layers))
    return {"sliding_window": window, "sliding_layers": sliding}


def _sliding_layers(fields: Fields, layers: int, pattern: int | None) -> tuple[bool, ...]:
    given = _layer_types(fields, layers)
    if given is not None:
        return given
    return tuple((layer + 1) % pattern != 0 for layer in range(layers)) if pattern is not None else ()


def _layer_types(fields: Fields, layers: int) -> tuple[bool, ...] | None:
    """Whether each layer has a window, from `layer_types`; None where the file has none."""
    types = fields.content.get("layer_types")
    if types is None:
        return None
    names = {"sliding_attention": True, "full_attention": False}
    if not isinstance(types, list) or len(types) != layers:
        raise fields.fail("layer_types", f"a list of {layers} types, one a layer")
    for kind in types:
        if not isinstance(kind, str) or kind not in names:
            raise fields.fail("layer_types", f"a list of {' and '.join(names)}")
    return tuple(names[kind] for kind in types)


def _shorter_window(window: int, positions: int, sliding: tuple[bool, ...]) -> dict[str, Any]:
    """Without a window that no sequence fills, without a pattern that says the same of all layers."""
    if window >= positions or (sliding and not any(sliding)):
        return {"sliding_window": None, "sliding_layers": ()}
    return {"sliding_window": window, "sliding_layers": () if all(sliding) else sliding}


def _layer_list(fields: Fields, name: str, layers: int) -> frozenset[int]:
    values = fields.content.get(name) or []
    if not isinstance(values, list) or not all(type(v) is int and 0 <= v < layers for v in values):
        raise fields.fail(name, f"a list of layers from 0 to {layers - 1}")
    return frozenset(values)


READERS: dict[str, Reader] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "MixtralForCausalLM": _mixtral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "Phi3ForCausalLM": _phi3,
    "GPT2LMHeadModel": _gpt2,
}

# Of a file that names no architecture.
MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}

# Models of text and images of which the text part runs: architecture -> that part's.
TEXT_PARTS = {"Gemma3ForConditionalGeneration": "Gemma3ForCausalLM"}
