"""Models of every family that are a config.json and nothing else: for weights that are made up."""

import json
from pathlib import Path
from typing import Any

VOCAB = 200
_DECODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "eos_token_id": 1,
    "bos_token_id": 0,
}
BARE: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"attention_bias": True, "mlp_bias": True},
    "MistralForCausalLM": {"sliding_window": 8},
    "MixtralForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": True},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {"tie_word_embeddings": True},
    "Qwen3MoeForCausalLM": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "Gemma2ForCausalLM": {"sliding_window": 8},
    "Gemma3ForCausalLM": {"sliding_window": 8},
    "Phi3ForCausalLM": {},
    "GPT2LMHeadModel": {"n_embd": 64, "n_layer": 5, "n_head": 4, "n_positions": 128},
}


def write_bare(architecture: str, folder: Path) -> str:
    """Writes the config.json of a family; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"architectures": [architecture], **_DECODER, **BARE[architecture]}
    (folder / "config.json").write_text(json.dumps(content))
    return str(folder)
