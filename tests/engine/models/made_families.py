"""Random tiny models of each family, written by transformers, and its logits for them.

Sizes are such that nothing is what it is elsewhere (odd vocabularies and MLPs, heads that are not hidden / heads), so
that a confusion shows; weights are large enough that every part of a layer matters to the logits.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

LONGEST = 128  # tokens of the longest sequence that the tests run


def _decoder(rng: random.Random, *, own_head_dim: bool = True) -> dict[str, Any]:
    heads, kv_heads = rng.choice([(4, 4), (4, 2), (8, 2), (8, 4), (4, 1)])
    head_dim = rng.choice([8, 12, 16])
    sizes = {
        "vocab_size": rng.randrange(90, 140),
        "hidden_size": heads * (rng.choice([6, 10]) if own_head_dim else head_dim),
        "intermediate_size": rng.randrange(40, 80),
        "num_hidden_layers": rng.choice([2, 3]),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 2 * LONGEST,
        "rms_norm_eps": rng.choice([1e-5, 1e-6]),
        "tie_word_embeddings": rng.random() < 0.5,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    }
    return sizes | ({"head_dim": head_dim} if own_head_dim else {})


def _rope(rng: random.Random) -> dict[str, Any]:
    theta = rng.choice([100.0, 10000.0])
    return rng.choice(
        [
            {"rope_type": "default", "rope_theta": theta},
            {"rope_type": "linear", "rope_theta": theta, "factor": 2.5},
            {"rope_type": "dynamic", "rope_theta": theta, "factor": 2.0},  # no sequence is longer than the original
            {"rope_type": "yarn", "rope_theta": theta, "factor": 4.0, "original_max_position_embeddings": 64},
            {
                "rope_type": "llama3",
                "rope_theta": theta,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 40,
            },
        ]
    )


def _llama(rng: random.Random) -> Any:
    bias = rng.random() < 0.5
    return transformers.LlamaConfig(
        **_decoder(rng), rope_parameters=_rope(rng), attention_bias=bias, mlp_bias=rng.random() < 0.5
    )


def _mistral(rng: random.Random) -> Any:
    return transformers.MistralConfig(**_decoder(rng), rope_parameters=_rope(rng), sliding_window=rng.randrange(6, 30))


def _qwen2(rng: random.Random) -> Any:
    window: dict[str, Any] = rng.choice([{}, {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}])
    return transformers.Qwen2Config(**_decoder(rng, own_head_dim=False), rope_parameters=_rope(rng), **window)


def _qwen3(rng: random.Random) -> Any:
    return transformers.Qwen3Config(**_decoder(rng), rope_parameters=_rope(rng), attention_bias=rng.random() < 0.3)


def _gemma2(rng: random.Random) -> Any:
    sizes = _decoder(rng) | {"num_hidden_layers": 3, "pad_token_id": 0, "tie_word_embeddings": True}
    return transformers.Gemma2Config(
        **sizes,
        sliding_window=rng.randrange(6, 30),
        query_pre_attn_scalar=rng.choice([8, 24]),
        attn_logit_softcapping=rng.choice([1.5, 5.0, None]),
        final_logit_softcapping=rng.choice([2.0, None]),
        hidden_activation="gelu_pytorch_tanh",
    )


def _gemma3(rng: random.Random) -> Any:
    sizes = _decoder(rng) | {"num_hidden_layers": 4, "pad_token_id": 0, "tie_word_embeddings": True}
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
    return transformers.Gemma3TextConfig(
        **sizes,
        sliding_window=rng.randrange(6, 30),
        sliding_window_pattern=3,
        query_pre_attn_scalar=rng.choice([8, 24]),
        rope_parameters=rope,
    )


def _phi3(rng: random.Random) -> Any:
    sizes = _decoder(rng, own_head_dim=False) | {"pad_token_id": 0}
    head_dim = sizes["hidden_size"] // sizes["num_attention_heads"]
    part = rng.choice([1.0, 0.5])
    pairs = int(head_dim * part) // 2
    more = rng.choice([{}, {"sliding_window": rng.randrange(6, 30)}])
    original = rng.choice([4, LONGEST])  # all sequences are longer than it, or none
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": part,
        "short_factor": [1 + 0.1 * i for i in range(pairs)],
        "long_factor": [1 + 1.5 * i for i in range(pairs)],
        "original_max_position_embeddings": original,
    }
    plain = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": part}
    return transformers.Phi3Config(
        **sizes, original_max_position_embeddings=original, rope_parameters=rng.choice([longrope, plain]), **more
    )


def _gpt2(rng: random.Random) -> Any:
    heads = rng.choice([4, 8])
    return transformers.GPT2Config(
        vocab_size=rng.randrange(90, 140),
        n_positions=2 * LONGEST,
        n_embd=heads * rng.choice([6, 8]),
        n_layer=rng.choice([2, 3]),
        n_head=heads,
        n_inner=rng.choice([None, 70]),
        activation_function=rng.choice(["gelu_new", "gelu"]),
        tie_word_embeddings=rng.random() < 0.7,
        bos_token_id=0,
        eos_token_id=1,
    )


def _mixtral(rng: random.Random) -> Any:
    return transformers.MixtralConfig(
        **_decoder(rng),
        rope_parameters=_rope(rng),
        num_local_experts=rng.choice([3, 6]),
        num_experts_per_tok=rng.choice([1, 2]),
        sliding_window=rng.choice([None, 11]),
    )


def _qwen3_moe(rng: random.Random) -> Any:
    return transformers.Qwen3MoeConfig(
        **_decoder(rng),
        rope_parameters=_rope(rng),
        num_experts=rng.choice([4, 7]),
        num_experts_per_tok=rng.choice([2, 3]),
        moe_intermediate_size=rng.randrange(15, 40),
        norm_topk_prob=rng.random() < 0.5,
        mlp_only_layers=rng.choice([[], [1]]),
        decoder_sparse_step=1,
    )


FAMILIES: dict[str, Callable[[random.Random], Any]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "gpt2": _gpt2,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
}


def make_family(name: str, seed: int, folder: Path) -> Any:
    """Writes a model to `folder`; returns transformers' one."""
    config = FAMILIES[name](random.Random(f"{name} {seed}"))
    plain: dict[str, str] = {"attn_implementation": "eager"}
    if name in ("mixtral", "qwen3_moe"):
        plain["experts_implementation"] = "eager"  # the default's products want sizes that are multiples of 16 bytes
    model = transformers.AutoModelForCausalLM.from_config(config, **plain).float().eval()
    generator = torch.Generator().manual_seed(seed)
    centered = name.startswith("gemma")
    with torch.no_grad():
        for key, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            if value.dim() > 1:
                # Conv1D has its inputs first, experts have two dimensions before theirs end.
                inputs = value.shape[0] if name == "gpt2" and ".c_" in key else value.shape[-1]
                value.copy_(noise * (1.0 if "embed" in key or "wte" in key else 1.5 / inputs**0.5))
            elif key.endswith("bias"):
                value.copy_(0.3 * noise)
            else:
                value.copy_(0.2 * noise + (0.0 if centered else 1.0))
    model.save_pretrained(folder)
    return model


def reference_logits(model: Any, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Logits after each token of each sequence, [n, V] float32."""
    width = max(map(len, sequences))
    padded = torch.zeros(len(sequences), width, dtype=torch.int64)
    for row, tokens in enumerate(sequences):
        padded[row, : len(tokens)] = torch.tensor(tokens)
    with torch.inference_mode():
        logits = model(padded, attention_mask=torch.ones_like(padded)).logits
    return [logits[row, : len(tokens)] for row, tokens in enumerate(sequences)]
