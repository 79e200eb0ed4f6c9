"""Llama (Touvron et al., arXiv 2302.13971): a decoder of RMSNorm, rotary grouped-query attention and SwiGLU.

    x = x + attention(norm(x))
    x = x + mlp(norm(x))

over a flat batch of tokens of many sequences. Q, K and V are one matrix, gate and up another: fewer and larger
products. Each branch is added to the residual stream by the norm behind it.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from kvern_engine.layers.attention import Wanted
from kvern_engine.layers.build import Build
from kvern_engine.layers.experts import MixtureOfExperts
from kvern_engine.layers.linear import Linear
from kvern_engine.layers.mlp import GatedMLP
from kvern_engine.layers.norm import RMSNorm
from kvern_engine.layers.parameters import Destinations
from kvern_engine.layers.self_attention import SelfAttention
from kvern_engine.models.decoder import DecoderLM
from kvern_engine.parallel.groups import OwnShare
from kvern_kernels import AttentionMetadata, ScaledRows


class LlamaDecoderLayer:
    """Attention and MLP, each after a norm that also adds the branch before it to the residual stream."""

    attention_class: ClassVar[type[SelfAttention]] = SelfAttention
    mlp_name: ClassVar[str] = "mlp."

    def __init__(self, build: Build, index: int) -> None:
        hidden, eps = build.config.hidden_size, build.config.rms_norm_eps
        self.input_norm = RMSNorm(hidden, eps, dtype=build.dtype, device=build.device)
        self.attention = self.attention_class(build, index)
        self.post_attention_norm = RMSNorm(hidden, eps, dtype=build.dtype, device=build.device)
        self.mlp = self.make_mlp(build, index)

    def make_mlp(self, build: Build, index: int) -> GatedMLP | MixtureOfExperts:
        return GatedMLP(build)

    def __call__(
        self,
        x: Tensor | OwnShare | None,
        residual: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        kv: Tensor,
        meta: AttentionMetadata,
        wanted: Wanted | None = None,
    ) -> tuple[Tensor | OwnShare | None, Tensor]:
        """See `DecoderLayer`."""
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
        if wanted is not None:
            # Not behind the product: a norm of what comes in parts reads the residual before the kernel in front ends.
            residual = residual.index_select(0, wanted.index)
        x = self.attention.fp8(rows, positions, cos_sin, kv, meta, wanted)
        rows, residual = self.post_attention_norm.add_fp8(x, residual)
        assert isinstance(self.mlp, GatedMLP), "mixtures of experts are not quantized"
        return self.mlp.fp8(rows), residual

    @property
    def capturable(self) -> bool:
        return self.attention.capturable and isinstance(self.mlp, GatedMLP)

    def linears(self) -> list[Linear]:
        return [self.attention.qkv_proj, self.attention.o_proj, *self.mlp.linears()]

    def destinations(self, prefix: str) -> Destinations:
        return {
            **self.input_norm.destinations(f"{prefix}input_layernorm"),
            **self.post_attention_norm.destinations(f"{prefix}post_attention_layernorm"),
            **self.attention.destinations(f"{prefix}self_attn."),
            **self.mlp.destinations(f"{prefix}{self.mlp_name}"),
        }


class LlamaForCausalLM(DecoderLM):
    layer_class = LlamaDecoderLayer
    quantizable = True
    layers: Sequence[LlamaDecoderLayer]
    is_fp8 = False

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[Tensor],
        meta: AttentionMetadata,
        wanted: Wanted | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """See `DecoderLM`."""
        if not self.is_fp8:
            return super().forward(token_ids, positions, kv_caches, meta, wanted, residual)
        if residual is None:
            residual = self.embed(token_ids, positions)
        x, last = None, self.layers[-1] if self.norm is not None else None
        for layer, cos_sin, kv in zip(self.layers, self.tables(), kv_caches, strict=True):
            only = wanted if layer is last else None
            x, residual = layer.fp8(x, residual, positions, cos_sin, kv, meta, only)
        assert x is not None, "a stage has layers"
        if self.norm is None:
            # The sum as the next layer's first norm would make it, so that stages change nothing; its norm is not used.
            return self.layers[-1].input_norm.add_scaled(x, residual)[1]
        assert isinstance(self.norm, RMSNorm)
        return self.norm.add_scaled(x, residual)[0]

    def quantize_fp8(self, per_channel: bool = False) -> int:
        """After loading: keep the layers' weights in FP8 with one scale a matrix or, `per_channel`, one an output;
        bytes that are saved. Of a checkpoint in FP8 all is kept as it came.

        The embedding stays as it is. So does the LM head, of which a GPU keeps a copy in INT8 for steps of few rows: in
        FP8 it would change 8 % of a small model's greedy tokens (docs/performance-h200.md)."""
        self.is_fp8 = True
        saved = 0
        for layer in self.layers:
            for linear in layer.linears():
                # An output whose inputs are shared out has one scale at every layout, as a whole matrix has.
                by_inputs = linear in (layer.attention.o_proj, layer.mlp.linears()[-1])
                saved += linear.quantize_fp8(per_channel, self._group if by_inputs or not per_channel else None)
        if self.lm_head is not None and self.lm_head.scales is not None:
            saved += self.lm_head.quantize_fp8()
        elif self.lm_head is not None and self.device.type == "cuda" and self.dtype != torch.float32:
            saved -= self.lm_head.add_int8()
        return saved
