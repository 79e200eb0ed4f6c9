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
class Experts:
    """A mixture of experts in place of an MLP: `num_experts` of `intermediate_size` units, of which each token takes
    the `per_token` that its router likes best. `renormalize`: their weights are scaled to add up to one. The layers in
    `dense_layers` have an MLP of the model's `intermediate_size` all the same.
    """

    num_experts: int
    per_token: int
    intermediate_size: int
    renormalize: bool = True
    dense_layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of a decoder-only transformer. Sizes are counts.

    *Positions*: `rope_theta` is the base of RoPE (Su et al., arXiv 2104.09864), over the first `rotary_dim` numbers of
    a head (None: all). `rope_scaling` is the `rope_scaling` object of a config.json, with `rope_type` and without
    `rope_theta`, or None; `layers/rotary.py` says what each type needs. `local_rope_theta`: the base in layers with a
    window, which then have no scaling (None: as the others).

    *Windows*: a token sees itself and the `sliding_window - 1` tokens before it, in the layers that `sliding_layers`
    says, one entry a layer (empty: in all of them, if there is a window).

    *Attention*: scores are multiplied by `attention_scale` (None: head_dim ** -0.5); `attention_softcap` c and
    `logit_softcap` c turn scores and logits x into c tanh(x / c). `attention_bias` is that of q, k and v,
    `attention_out_bias` that of the projection behind them. `qk_norm`: RMSNorm of each head of q and k.
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
    rms_norm_eps: float = 1e-5  # of LayerNorm in families that have it
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"  # silu | gelu (by the error function) | gelu_tanh
    dtype: str = "float32"  # the checkpoint's own: float32 | float16 | bfloat16
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    fp8: Fp8Checkpoint | None = None  # None: the weights are not quantized
    extra: dict[str, Any] = field(default_factory=dict)  # what only one family knows, by its config.json name
    attention_out_bias: bool = False
    qk_norm: bool = False
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0  # embeddings are multiplied by it
    rotary_dim: int | None = None
    local_rope_theta: float | None = None
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()
    experts: Experts | None = None

    def window(self, layer: int) -> int | None:
        """How many tokens, itself included, a token sees in `layer`; None: all before it."""
        if not self.sliding_layers or self.sliding_layers[layer]:
            return self.sliding_window
        return None

    @property
    def window_of_all(self) -> int | None:
        """The window where every layer has it, so that what lies behind it is never read again; else None."""
        return None if self.sliding_layers and not all(self.sliding_layers) else self.sliding_window
