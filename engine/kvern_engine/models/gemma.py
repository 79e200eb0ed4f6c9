"""Gemma 2 (arXiv 2408.00118) and Gemma 3 (arXiv 2503.19786): norms before and behind each branch, GeGLU, embeddings
scaled by the square root of their size, norms that multiply by one plus their weight.

    x = x + norm(attention(norm(x)))
    x = x + norm(mlp(norm(x)))

Layers with a window alternate with layers that see everything: one by one in Gemma 2, five to one in Gemma 3, whose
windows have a rotary base of their own. Gemma 2 caps scores and logits softly; Gemma 3 norms the heads of q and k
instead.
"""

import torch
from torch import Tensor

from kvern_engine.layers.attention import Wanted
from kvern_engine.layers.build import Build
from kvern_engine.layers.linear import Linear
from kvern_engine.layers.mlp import GatedMLP
from kvern_engine.layers.norm import CenteredRMSNorm
from kvern_engine.layers.parameters import Destinations
from kvern_engine.layers.self_attention import SelfAttention
from kvern_engine.models.decoder import DecoderLM
from kvern_engine.parallel.groups import OwnShare
from kvern_kernels import AttentionMetadata


class GemmaAttention(SelfAttention):
    norm_class = CenteredRMSNorm


class GemmaDecoderLayer:
    def __init__(self, build: Build, index: int) -> None:
        def norm() -> CenteredRMSNorm:
            config = build.config
            return CenteredRMSNorm(config.hidden_size, config.rms_norm_eps, dtype=build.dtype, device=build.device)

        self.input_norm, self.post_attention_norm = norm(), norm()
        self.pre_mlp_norm, self.post_mlp_norm = norm(), norm()
        self.attention = GemmaAttention(build, index)
        self.mlp = GatedMLP(build)

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
        x = self.post_attention_norm(self.attention.project(heads))
        x, residual = self.pre_mlp_norm.add(x, residual)
        return self.post_mlp_norm(self.mlp.project(x)), residual

    @property
    def capturable(self) -> bool:
        return self.attention.capturable

    def linears(self) -> list[Linear]:
        return [self.attention.qkv_proj, self.attention.o_proj, *self.mlp.linears()]

    def destinations(self, prefix: str) -> Destinations:
        return {
            **self.input_norm.destinations(f"{prefix}input_layernorm"),
            **self.attention.destinations(f"{prefix}self_attn."),
            **self.post_attention_norm.destinations(f"{prefix}post_attention_layernorm"),
            **self.pre_mlp_norm.destinations(f"{prefix}pre_feedforward_layernorm"),
            **self.mlp.destinations(f"{prefix}mlp."),
            **self.post_mlp_norm.destinations(f"{prefix}post_feedforward_layernorm"),
        }


class Gemma2ForCausalLM(DecoderLM):
    layer_class = GemmaDecoderLayer
    norm_class = CenteredRMSNorm

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        scale = torch.tensor(self.config.embedding_scale, dtype=self.dtype).item()  # rounded, as it was in training
        return super().embed(token_ids, positions) * scale


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    pass
