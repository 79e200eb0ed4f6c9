"""The fixed workloads that every engine is measured on (token ids only, so that no tokenizer is needed).

Each workload is a list of (prompt_token_ids, max_tokens); every request ignores EOS.
"""

import random

VOCAB = 128000

LLAMA3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.02,
    "use_cache": True,
}


def _ids(rng, n):
    return [rng.randrange(1000, VOCAB) for _ in range(n)]


def fixed(n, n_in, n_out, seed=0):
    rng = random.Random(seed)
    return [(_ids(rng, n_in), n_out) for _ in range(n)]


def sharegpt_like(n=1000, seed=1):
    """Log-normal lengths with means of about 215 in and 197 out, cut to 4..2048."""
    rng = random.Random(seed)
    out = []
    for _ in range(n):
        i = min(2048, max(4, int(rng.lognormvariate(4.85, 1.0))))
        o = min(1024, max(4, int(rng.lognormvariate(4.9, 0.85))))
        out.append((_ids(rng, i), o))
    return out


def shared_prefix(n=256, prefix=1500, tail=8, n_out=64, seed=2):
    rng = random.Random(seed)
    head = _ids(rng, prefix)
    return [(head + _ids(rng, tail), n_out) for _ in range(n)]


WORKLOADS = {
    "decode_1": lambda: fixed(1, 128, 256, 10),
    "decode_32": lambda: fixed(32, 128, 512, 11),
    "decode_128": lambda: fixed(128, 128, 512, 12),
    "decode_256": lambda: fixed(256, 128, 512, 13),
    "ctx4k_32": lambda: fixed(32, 4000, 256, 14),
    "prefill_8k": lambda: fixed(1, 8000, 1, 15),
    "prefill_1k_x64": lambda: fixed(64, 1024, 1, 16),
    "sharegpt_1000": lambda: sharegpt_like(),
    "prefix_256": lambda: shared_prefix(),
}
