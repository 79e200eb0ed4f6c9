"""A made-up model whose sizes nothing divides: 8 heads, 4 KV heads, 5 layers, biases, an odd vocabulary, its own head.

Random weights from a fixed seed, large enough that the most likely token is clearly ahead.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 515,
    "hidden_size": 64,
    "intermediate_size": 90,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def make_model(folder: Path, width: int = 1) -> str:
    """Writes config.json and model.safetensors; returns the folder. `width` multiplies hidden and intermediate size."""
    folder.mkdir(parents=True, exist_ok=True)
    hidden, inner, vocab, head_dim = width * CONFIG["hidden_size"], width * CONFIG["intermediate_size"], 515, 16
    (folder / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": hidden, "intermediate_size": inner}))
    generator = torch.Generator().manual_seed(4)
    q, kv = 8 * head_dim, 4 * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    linear = {"self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
              "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
              "mlp.down_proj": (hidden, inner)}  # fmt: skip
    for layer in range(5):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{norm}.weight"] = (hidden,)
        for name, shape in linear.items():
            shapes[f"{prefix}{name}.weight"] = shape
            shapes[f"{prefix}{name}.bias"] = shape[:1]
    weights = {}
    for name, shape in shapes.items():
        if "norm" in name:
            weights[name] = 1 + 0.1 * torch.randn(shape, generator=generator)
        elif name.endswith(".bias"):
            weights[name] = 0.3 * torch.randn(shape, generator=generator)
        else:
            weights[name] = torch.randn(shape, generator=generator) * 1.5 / shape[1] ** 0.5
    save_file(weights, folder / "model.safetensors")
    return str(folder)
