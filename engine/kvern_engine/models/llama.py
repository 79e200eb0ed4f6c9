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
from kvern_engine.layers.parameters import (
    Destination,
    Destinations,
    clear_padding,
    split_by_inputs,
    split_by_outputs,
    vocabulary_rows,
    whole,
)
from kvern_engine.layers.rotary import cos_sin_table
from kvern_engine.loading.parts import WeightPart
from kvern_engine.model_config import ModelConfig
from kvern_engine.parallel.groups import ParallelContext, TensorGroup
from kvern_engine.parallel.layout import ModelShard
from kvern_kernels import AttentionMetadata, Fp8Weight, ScaledRows, quantize_rows, restore_rows


class LlamaAttention:
    """Projections around attention; `qkv_proj` holds the rows of q, k and v in this order, of this rank's heads."""

    def __init__(
        self, config: ModelConfig, shard: ModelShard, group: TensorGroup, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config, self._group = config, group
        self._in_parts = group.size == 1 and shard.is_last  # nobody but the next norm reads what comes out
        self._q, self._kv = shard.heads.times(config.head_dim), shard.kv_heads.times(config.head_dim)
        hidden, bias, fp8 = config.hidden_size, config.attention_bias, config.fp8 is not None
        self.qkv_proj = Linear(hidden, self._q.size + 2 * self._kv.size, bias=bias, dtype=dtype, device=device, fp8=fp8)
        out_bias = config.attention_out_bias and group.rank == 0
        self.o_proj = Linear(self._q.size, hidden, bias=out_bias, dtype=dtype, device=device, fp8=fp8)
        self._kv_scale = torch.ones(2, dtype=torch.float32, device=device)  # of K and V, from the checkpoint
        self.attention = Attention(shard.heads.size, shard.kv_heads.size, config.head_dim, dtype)

    def __call__(
        self,
        x: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        kv: Tensor,
        meta: AttentionMetadata,
        wanted: Wanted | None = None,
    ) -> Tensor:
        """What the heads give, [T, Hq * D]: before `output`."""
        return self.attention(self.qkv_proj.parts(x), positions, cos_sin, kv, meta, wanted)

    def output(self, heads: Tensor, residual: Tensor) -> Tensor | None:
        """The output projection, for the norm that adds it to `residual`; None: it has been added."""
        if self._in_parts:
            return self.o_proj.before_norm(heads, residual)
        return self._group.all_reduce(self.o_proj(heads))

    def fp8(
        self,
        x: ScaledRows,
        positions: Tensor,
        cos_sin: Tensor,
        kv: Tensor,
        meta: AttentionMetadata,
        wanted: Wanted | None = None,
    ) -> ScaledRows:
        qkv = self.qkv_proj.scaled_parts(x)
        out = self.attention(qkv.values, positions, cos_sin, kv, meta, wanted, qkv.scales, qkv.columns)
        return self.o_proj.scaled_parts(quantize_rows(out))

    def destinations(self, prefix: str) -> Destinations:
        prefix, head_dim = f"{prefix}self_attn.", self._config.head_dim
        q, kv = self._config.num_heads * head_dim, self._config.num_kv_heads * head_dim
        merged = [("q_proj", self._q, q), ("k_proj", self._kv, kv), ("v_proj", self._kv, kv)]
        rows = self._config.fp8 is not None and self._config.fp8.per_channel
        found = split_by_outputs(prefix, self.qkv_proj, merged, rows)
        found |= split_by_inputs(prefix, self.o_proj, "o_proj", self._q, q, rows)
        if self._config.fp8 is not None and self._config.fp8.kv_scales:
            found |= {f"{prefix}{name}_scale": whole(self._kv_scale[i]) for i, name in enumerate("kv")}
        return found

    def use_fp8_kv(self) -> None:
        """After loading: K and V are written to a cache in FP8, all heads by the layer's scales."""
        self.attention.kv_scales = self._kv_scale[:, None].expand(2, self.attention.num_kv_heads).contiguous()


class LlamaMLP:
    """SwiGLU (Shazeer, arXiv 2002.05202); `gate_up_proj` holds the rows of gate, then those of up."""

    def __init__(
        self, config: ModelConfig, shard: ModelShard, group: TensorGroup, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._inner, self._total, self._group = shard.inner, config.intermediate_size, group
        self._in_parts = group.size == 1 and shard.is_last
        hidden, inner, bias, fp8 = config.hidden_size, shard.inner.size, config.mlp_bias, config.fp8 is not None
        self._scales_of_rows = config.fp8 is not None and config.fp8.per_channel
        self.gate_up_proj = Linear(hidden, 2 * inner, bias=bias, dtype=dtype, device=device, fp8=fp8)
        self.down_proj = Linear(inner, hidden, bias=bias and group.rank == 0, dtype=dtype, device=device, fp8=fp8)
        clear_padding(self.gate_up_proj, shard.inner)
        clear_padding(self.down_proj, shard.inner)

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor | None:
        """For the norm that adds it to `residual`; None: it has been added."""
        inner = self.gate_up_proj.gated(x)
        if self._in_parts:
            return self.down_proj.before_norm(inner, residual)
        return self._group.all_reduce(self.down_proj(inner))

    def fp8(self, x: ScaledRows) -> ScaledRows:
        return self.down_proj.scaled_parts(self.gate_up_proj.gated_fp8(x))

    def destinations(self, prefix: str) -> Destinations:
        prefix, inner, total = f"{prefix}mlp.", self._inner, self._total
        merged = [("gate_proj", inner, total), ("up_proj", inner, total)]
        rows = self._scales_of_rows
        return split_by_outputs(prefix, self.gate_up_proj, merged, rows) | split_by_inputs(
            prefix, self.down_proj, "down_proj", inner, total, rows
        )


class LlamaDecoderLayer:
    """Attention and MLP, each after a norm that also adds the branch before it to the residual stream."""

    def __init__(
        self, config: ModelConfig, shard: ModelShard, group: TensorGroup, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.attention = LlamaAttention(config, shard, group, dtype, device)
        self.post_attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.mlp = LlamaMLP(config, shard, group, dtype, device)

    def __call__(
        self,
        x: Tensor | None,
        residual: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        kv: Tensor,
        meta: AttentionMetadata,
        wanted: Wanted | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """`x` [T, H], maybe in parts: what the layer before computed and has not yet added to `residual` [T, H] (None:
        nothing).

        Of the tokens that are not `wanted` only K and V are computed; the results are then [S, H]."""
        x, residual = self.input_norm.add(x, residual)
        heads = self.attention(x, positions, cos_sin, kv, meta, wanted)
        if wanted is not None:
            residual = residual.index_select(0, wanted.index)
        x, residual = self.post_attention_norm.add(self.attention.output(heads, residual), residual)
        return self.mlp(x, residual), residual

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

    def destinations(self, prefix: str) -> Destinations:
        return {
            f"{prefix}input_layernorm.weight": whole(self.input_norm.weight),
            f"{prefix}post_attention_layernorm.weight": whole(self.post_attention_norm.weight),
            **self.attention.destinations(prefix),
            **self.mlp.destinations(prefix),
        }


class LlamaForCausalLM:
    """The model, or `shard`, the part of it that this rank of `parallel` holds. `max_positions` is the longest sequence
    it will see. Raises ValueError where the layout does not fit the model."""

    embed_tokens: Embedding | None = None  # of the first stage
    norm: RMSNorm | None = None  # of the last stage, as is the head
    lm_head: Linear | None = None

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        parallel: ParallelContext | None = None,
    ) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self.is_fp8 = False
        self.cos_sin = cos_sin_table(
            config.head_dim, max_positions, config.rope_theta, config.rope_scaling, device
        )  # first: it refuses what it does not know before memory is taken
        parallel = parallel or ParallelContext.single()
        self._group = group = parallel.tensor
        self.shard = shard = parallel.shard(config)
        hidden = config.hidden_size
        if shard.is_first:
            self.embed_tokens = Embedding(shard.vocab, hidden, group, dtype=dtype, device=device)
        self.layers = [LlamaDecoderLayer(config, shard, group, dtype, device) for _ in shard.layers]
        if shard.is_last:
            self.norm = RMSNorm(hidden, config.rms_norm_eps, dtype=dtype, device=device)
            if config.tie_word_embeddings and self.embed_tokens is not None:
                self.lm_head = Linear.sharing(self.embed_tokens.weight)
            else:
                fp8 = config.fp8 is not None and config.fp8.head
                self.lm_head = Linear(hidden, shard.vocab.size, dtype=dtype, device=device, fp8=fp8)
                clear_padding(self.lm_head, shard.vocab)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[Tensor],
        meta: AttentionMetadata,
        wanted: Wanted | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Hidden states after the last norm, [T, hidden_size], or [S, hidden_size] of the S tokens that are `wanted`.

        A stage but the last gives the residual stream of all tokens, which the next one takes as `residual` (None on
        the first one; it may be overwritten).

        `token_ids` [T] int32, `positions` [T] int64, `kv_caches` one [2, Hkv, N, bs, D] a layer of this stage: K and V
        of the tokens are written to it at `meta.slots`.
        """
        if residual is None:
            assert self.embed_tokens is not None, "a later stage takes the residual stream"
            residual = self.embed_tokens(token_ids)
        if self.is_fp8:
            return self._forward_fp8(residual, positions, kv_caches, meta, wanted)
        x: Tensor | None = None
        cos_sin = self.cos_sin
        last = self.layers[-1] if self.norm is not None else None
        for layer, kv in zip(self.layers, kv_caches, strict=True):
            only = wanted if layer is last else None
            x, residual = layer(x, residual, positions, cos_sin, kv, meta, only)
        if self.norm is None:
            return residual if x is None else x + residual
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
        assert x is not None and self.norm is not None, "only models on one rank are quantized"
        return self.norm.add_scaled(x, residual)[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """`hidden` [R, hidden_size] -> [R, vocab_size] in the model's dtype, the same on every rank of the last
        stage."""
        assert self.lm_head is not None, "logits are the last stage's"
        if self.lm_head.is_fp8:
            return restore_rows(self.lm_head.scaled(quantize_rows(hidden)), self.dtype)
        logits = self._group.all_gather(self.lm_head(hidden))
        vocab_size = self.config.vocab_size
        return logits if logits.shape[1] == vocab_size else logits[:, :vocab_size].contiguous()

    def destinations(self) -> Destinations:
        """Checkpoint name -> the part of a parameter that it is copied to (views; all parameters are covered)."""
        config, shard = self.config, self.shard
        found: Destinations = {}
        if self.embed_tokens is not None:
            found["model.embed_tokens.weight"] = vocabulary_rows(
                self.embed_tokens.weight, shard.vocab, config.vocab_size
            )
        for index, layer in zip(shard.layers, self.layers, strict=True):
            found |= layer.destinations(f"model.layers.{index}.")
        if self.norm is not None:
            found["model.norm.weight"] = whole(self.norm.weight)
        if self.lm_head is not None and not (config.tie_word_embeddings and self.embed_tokens is not None):
            name = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
            found[name] = vocabulary_rows(self.lm_head.weight, shard.vocab, config.vocab_size)
            if self.lm_head.scales is not None:
                rows = config.fp8 is not None and config.fp8.per_channel
                part = WeightPart.whole(config.vocab_size) if rows else WeightPart.whole()
                found["lm_head.weight_scale"] = Destination(self.lm_head.scales, part)
        return found

    def products(self) -> list[Tensor | Fp8Weight]:
        """After loading: the weights of one layer, whose shapes are those of all."""
        layer = self.layers[0]
        found = [layer.attention.qkv_proj, layer.attention.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj]
        return [linear.stored for linear in found]

    def use_fp8_kv(self) -> None:
        """After loading: the KV caches are in FP8, scaled as the checkpoint says, or by 1."""
        for layer in self.layers:
            layer.attention.use_fp8_kv()

    def quantize_fp8(self, per_channel: bool = False) -> int:
        """After loading: keep the layers' weights in FP8 with one scale a matrix or, `per_channel`, one an output;
        bytes that are saved. Of a checkpoint in FP8 all is kept as it came.

        The embedding stays as it is. So does the LM head, of which a GPU keeps a copy in INT8 for steps of few rows: in
        FP8 it would change 8 % of a small model's greedy tokens (docs/performance-h200.md)."""
        self.is_fp8 = True
        saved = 0
        for layer in self.layers:
            for linear in (
                layer.attention.qkv_proj,
                layer.attention.o_proj,
                layer.mlp.gate_up_proj,
                layer.mlp.down_proj,
            ):
                saved += linear.quantize_fp8(per_channel)
        if self.lm_head is not None and self.lm_head.scales is not None:
            saved += self.lm_head.quantize_fp8()
        elif self.lm_head is not None and self.device.type == "cuda" and self.dtype != torch.float32:
            saved -= self.lm_head.add_int8()
        return saved

    def add_cpu_layouts(self) -> None:
        """After loading, on a CPU: keep the weights as they multiply fastest, at the price of memory (`Linear`)."""
        for layer in self.layers:
            layer.attention.qkv_proj.add_cpu_layouts()
            layer.mlp.gate_up_proj.add_cpu_layouts()
        if self.lm_head is not None:
            self.lm_head.add_cpu_layouts()
