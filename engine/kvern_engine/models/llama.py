"""Llama (Touvron et al., arXiv 2302.13971) and what has its shape: a decoder of RMSNorm, rotary grouped-query
attention and SwiGLU. Weights, and the forward pass over a flat batch of tokens of many sequences; nothing else.

Q, K and V are one matrix, gate and up another: fewer and larger products. Tensors are plain attributes, not modules:
at batch 1 on a GPU or a small model on a CPU, the time between kernels counts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvern_engine.layers.attention import Attention, Wanted
from kvern_engine.layers.embedding import Embedding
from kvern_engine.layers.linear import Linear
from kvern_engine.layers.norm import RMSNorm
from kvern_engine.layers.rotary import cos_sin_table
from kvern_engine.model_config import ModelConfig
from kvern_kernels import AttentionMetadata, ScaledRows, quantize_rows, silu_and_mul, silu_and_mul_fp8


class LlamaAttention:
    """Projections around attention; `qkv_proj` holds the rows of q, k and v in this order."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.q_size = config.num_heads * config.head_dim
        self.kv_size = config.num_kv_heads * config.head_dim
        bias = config.attention_bias
        self.qkv_proj = Linear(
            config.hidden_size, self.q_size + 2 * self.kv_size, bias=bias, dtype=dtype, device=device
        )
        self.o_proj = Linear(self.q_size, config.hidden_size, bias=bias, dtype=dtype, device=device)
        self.attention = Attention(config.num_heads, config.num_kv_heads, config.head_dim)

    def __call__(
        self,
        x: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        kv: Tensor,
        meta: AttentionMetadata,
        wanted: Wanted | None = None,
    ) -> Tensor:
        return self.o_proj(self.attention(self.qkv_proj(x), positions, cos_sin, kv, meta, wanted))

    def fp8(
        self,
        x: ScaledRows,
        positions: Tensor,
        cos_sin: Tensor,
        kv: Tensor,
        meta: AttentionMetadata,
        wanted: Wanted | None = None,
    ) -> ScaledRows:
        qkv = self.qkv_proj.scaled(x)
        out = self.attention(qkv.values, positions, cos_sin, kv, meta, wanted, qkv.scales)
        return self.o_proj.scaled(quantize_rows(out))

    def destinations(self, prefix: str) -> dict[str, Tensor]:
        found = _parts(f"{prefix}self_attn.", self.qkv_proj, ("q_proj", "k_proj", "v_proj"), self._sizes)
        return found | _parts(f"{prefix}self_attn.", self.o_proj, ("o_proj",), (self.o_proj.out_features,))

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return self.q_size, self.kv_size, self.kv_size


class LlamaMLP:
    """SwiGLU (Shazeer, arXiv 2002.05202); `gate_up_proj` holds the rows of gate, then those of up."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = Linear(hidden, 2 * inner, bias=bias, dtype=dtype, device=device)
        self.down_proj = Linear(inner, hidden, bias=bias, dtype=dtype, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down_proj(silu_and_mul(self.gate_up_proj(x)))

    def fp8(self, x: ScaledRows) -> ScaledRows:
        return self.down_proj.scaled(silu_and_mul_fp8(self.gate_up_proj.scaled(x)))

    def destinations(self, prefix: str) -> dict[str, Tensor]:
        inner, hidden = self.down_proj.in_features, self.down_proj.out_features
        found = _parts(f"{prefix}mlp.", self.gate_up_proj, ("gate_proj", "up_proj"), (inner, inner))
        return found | _parts(f"{prefix}mlp.", self.down_proj, ("down_proj",), (hidden,))


class LlamaDecoderLayer:
    """Attention and MLP, each after a norm that also adds the branch before it to the residual stream."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.attention = LlamaAttention(config, dtype, device)
        self.post_attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.mlp = LlamaMLP(config, dtype, device)

    def __call__(
        self,
        x: Tensor | None,
        residual: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        kv: Tensor,
        meta: AttentionMetadata,
        wanted: Wanted | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`x` [T, H]: what the layer before computed and has not yet added to `residual` [T, H] (None: nothing).

        Of the tokens that are not `wanted` only K and V are computed; the results are then [S, H]."""
        if x is None:
            x = self.input_norm(residual)
        else:
            x, residual = self.input_norm.add(x, residual)
        x = self.attention(x, positions, cos_sin, kv, meta, wanted)
        if wanted is not None:
            residual = residual.index_select(0, wanted.index)
        x, residual = self.post_attention_norm.add(x, residual)
        return self.mlp(x), residual

    def fp8(
        self,
        x: ScaledRows | None,
        residual: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        kv: Tensor,
        meta: AttentionMetadata,
        wanted: Wanted | None = None,
    ) -> tuple[ScaledRows, Tensor]:
        """The layer after `quantize_fp8`: the norms quantize, what reads a product applies the scales of its rows."""
        if x is None:
            rows = self.input_norm.fp8(residual)
        else:
            rows, residual = self.input_norm.add_fp8(x, residual)
        x = self.attention.fp8(rows, positions, cos_sin, kv, meta, wanted)
        if wanted is not None:
            residual = residual.index_select(0, wanted.index)
        rows, residual = self.post_attention_norm.add_fp8(x, residual)
        return self.mlp.fp8(rows), residual

    def destinations(self, prefix: str) -> dict[str, Tensor]:
        return {
            f"{prefix}input_layernorm.weight": self.input_norm.weight,
            f"{prefix}post_attention_layernorm.weight": self.post_attention_norm.weight,
            **self.attention.destinations(prefix),
            **self.mlp.destinations(prefix),
        }


class LlamaForCausalLM:
    """The whole model on one device. `max_positions` is the longest sequence it will see."""

    def __init__(self, config: ModelConfig, *, max_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self.is_fp8 = False
        self.cos_sin = cos_sin_table(
            config.head_dim, max_positions, config.rope_theta, config.rope_scaling, device
        )  # first: it refuses what it does not know before memory is taken
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = [LlamaDecoderLayer(config, dtype, device) for _ in range(config.num_layers)]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        if config.tie_word_embeddings:
            self.lm_head = Linear.sharing(self.embed_tokens.weight)
        else:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype=dtype, device=device)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[Tensor],
        meta: AttentionMetadata,
        wanted: Wanted | None = None,
    ) -> Tensor:
        """Hidden states after the last norm, [T, hidden_size], or [S, hidden_size] of the S tokens that are `wanted`.

        `token_ids` [T] int32, `positions` [T] int64, `kv_caches` one [2, Hkv, N, bs, D] a layer: K and V of the tokens
        are written to it at `meta.slots`.
        """
        residual, cos_sin = self.embed_tokens(token_ids), self.cos_sin
        if self.is_fp8:
            return self._forward_fp8(residual, positions, kv_caches, meta, wanted)
        x = None
        last = self.layers[-1]
        for layer, kv in zip(self.layers, kv_caches, strict=True):
            only = wanted if layer is last else None
            x, residual = layer(x, residual, positions, cos_sin, kv, meta, only)
        if x is None:
            return self.norm(residual)
        return self.norm.add(x, residual)[0]

    def _forward_fp8(
        self,
        residual: Tensor,
        positions: Tensor,
        kv_caches: Sequence[Tensor],
        meta: AttentionMetadata,
        wanted: Wanted | None,
    ) -> Tensor:
        x, last = None, self.layers[-1]
        for layer, kv in zip(self.layers, kv_caches, strict=True):
            only = wanted if layer is last else None
            x, residual = layer.fp8(x, residual, positions, self.cos_sin, kv, meta, only)
        assert x is not None
        return self.norm.add_scaled(x, residual)[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """`hidden` [R, hidden_size] -> [R, vocab_size] in the model's dtype."""
        return self.lm_head(hidden)

    def destinations(self) -> dict[str, Tensor]:
        """Checkpoint name -> the part of a parameter that it is copied to (views; all parameters are covered)."""
        found = {"model.embed_tokens.weight": self.embed_tokens.weight}
        for index, layer in enumerate(self.layers):
            found |= layer.destinations(f"model.layers.{index}.")
        found["model.norm.weight"] = self.norm.weight
        if not self.config.tie_word_embeddings:
            found["lm_head.weight"] = self.lm_head.weight
        return found

    def quantize_fp8(self) -> int:
        """After loading: keep the layers' weights in FP8, one scale a matrix (embedding and LM head stay as they are);
        bytes that are saved."""
        self.is_fp8 = True
        saved = 0
        for layer in self.layers:
            for linear in (
                layer.attention.qkv_proj,
                layer.attention.o_proj,
                layer.mlp.gate_up_proj,
                layer.mlp.down_proj,
            ):
                saved += linear.quantize_fp8()
        return saved

    def add_cpu_layouts(self) -> None:
        """After loading, on a CPU: keep the weights as they multiply fastest, at the price of memory (`Linear`)."""
        for layer in self.layers:
            layer.attention.qkv_proj.add_cpu_layouts()
            layer.mlp.gate_up_proj.add_cpu_layouts()
        self.lm_head.add_cpu_layouts()


def _parts(prefix: str, layer: Linear, names: Sequence[str], sizes: Sequence[int]) -> dict[str, Tensor]:
    """The rows of each of `names` within a merged layer, weights and biases."""
    found = {}
    for name, weight in zip(names, torch.split(layer.weight, list(sizes)), strict=True):
        found[f"{prefix}{name}.weight"] = weight
    if layer.bias is not None:
        for name, bias in zip(names, torch.split(layer.bias, list(sizes)), strict=True):
            found[f"{prefix}{name}.bias"] = bias
    return found
