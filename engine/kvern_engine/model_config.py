"""The architecture of a model, read from a `config.json` or a GGUF header into one neutral form.

It holds shapes and constants, no weights and no torch, so that planner, core and server may use it.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Fp8Checkpoint:
    """A checkpoint whose linear layers come in FP8 (E4M3): each weight has a `weight_scale` beside it, one number or,
    `per_channel`, one an output. `head`: the LM head too. `kv_scales`: attention layers bring `k_scale` and `v_scale`
    for a KV cache in FP8.
    """

    per_channel: bool = False
    head: bool = False
    kv_scales: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of a decoder-only transformer. Sizes are counts; `rope_theta` is the base of RoPE
    (Su et al., arXiv 2104.09864); `rope_scaling` is the `rope_scaling` object of a config.json or None.
    """

    architecture: str  # e.g. "LlamaForCausalLM": the key of the model registry
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    dtype: str = "float32"  # the checkpoint's own: float32 | float16 | bfloat16
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    fp8: Fp8Checkpoint | None = None  # None: the weights are not quantized
    extra: dict[str, Any] = field(default_factory=dict)  # what only one family knows, by its config.json name

    @property
    def kv_bytes_per_token_at_2_bytes(self) -> int:
        """Bytes of K and V a token takes over all layers in a 2-byte dtype."""
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_dim
