"""GPT-2 (Radford et al., 2019): learned positions, LayerNorm, multi-head attention with biases, an MLP with GELU.

    x = x + attention(norm(x))
    x = x + mlp(norm(x))

Its checkpoints hold matrices transposed ([inputs, outputs]) and q, k and v as one of them.
"""

from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import Tensor

from kvern_engine.layers.attention import Wanted
from kvern_engine.layers.build import Build
from kvern_engine.layers.linear import Linear
from kvern_engine.layers.mlp import PlainMLP
from kvern_engine.layers.norm import LayerNorm
from kvern_engine.layers.parameters import (
    Destinations,
    fused_outputs,
    transposed_by_inputs,
    whole,
)
from kvern_engine.layers.self_attention import SelfAttention
from kvern_engine.model_config import ModelConfig
from kvern_engine.models.decoder import DecoderLM
from kvern_engine.parallel.groups import OwnShare, ParallelContext
from kvern_kernels import AttentionMetadata


class GPT2Attention(SelfAttention):
    def destinations(self, prefix: str) -> Destinations:
        size = self._config.hidden_size
        parts = [(self._q, size), (self._kv, size), (self._kv, size)]
        return fused_outputs(f"{prefix}c_attn", self.qkv_proj, parts, transposed=True) | transposed_by_inputs(
            f"{prefix}c_proj", self.o_proj, self._q, size
        )


class GPT2MLP(PlainMLP):
    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self._total = build.config.intermediate_size

    def destinations(self, prefix: str) -> Destinations:
        parts = [(self.inner, self._total)]
        return fused_outputs(f"{prefix}c_fc", self.up_proj, parts, transposed=True) | transposed_by_inputs(
            f"{prefix}c_proj", self.down_proj, self.inner, self._total
        )


class GPT2DecoderLayer:
    def __init__(self, build: Build, index: int) -> None:
        hidden, eps = build.config.hidden_size, build.config.rms_norm_eps
        self.input_norm = LayerNorm(hidden, eps, dtype=build.dtype, device=build.device)
        self.attention = GPT2Attention(build, index)
        self.pre_mlp_norm = LayerNorm(hidden, eps, dtype=build.dtype, device=build.device)
        self.mlp = GPT2MLP(build)

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
        x, residual = self.pre_mlp_norm.add(self.attention.project(heads), residual)
        return self.mlp(x), residual

    @property
    def capturable(self) -> bool:
        return self.attention.capturable

    def linears(self) -> list[Linear]:
        return [self.attention.qkv_proj, self.attention.o_proj, self.mlp.up_proj, self.mlp.down_proj]

    def destinations(self, prefix: str) -> Destinations:
        return {
            **self.input_norm.destinations(f"{prefix}ln_1"),
            **self.attention.destinations(f"{prefix}attn."),
            **self.pre_mlp_norm.destinations(f"{prefix}ln_2"),
            **self.mlp.destinations(f"{prefix}mlp."),
        }


class GPT2LMHeadModel(DecoderLM):
    layer_class = GPT2DecoderLayer
    norm_class = LayerNorm
    embedding_name = "transformer.wte.weight"
    layer_prefix = "transformer.h."
    norm_name = "transformer.ln_f"

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        parallel: ParallelContext | None = None,
        host_layers: Collection[int] = (),
        invariant: bool = False,
    ) -> None:
        super().__init__(
            config,
            max_positions=max_positions,
            dtype=dtype,
            device=device,
            parallel=parallel,
            host_layers=host_layers,
            invariant=invariant,
        )
        if self.shard.is_first:
            shape = config.max_position_embeddings, config.hidden_size
            self.embed_positions = torch.empty(shape, dtype=dtype, device=device)

    def make_tables(self, max_positions: int) -> None:
        """Nothing is rotated: angles of zero."""
        size = max_positions, self.config.head_dim // 2
        table = torch.cat((torch.ones(size), torch.zeros(size)), dim=-1)
        self.cos_sin = self.local_cos_sin = table.to(self.device)

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        return super().embed(token_ids, positions) + F.embedding(positions, self.embed_positions)

    def destinations(self) -> Destinations:
        found = super().destinations()
        if self.shard.is_first:
            found["transformer.wpe.weight"] = whole(self.embed_positions)
        return found
