"""Phi-3 (arXiv 2404.14219): Llama whose checkpoints hold q, k and v as one matrix and gate and up as another, as they
are kept here anyway. Some of its models rotate only the first `rotary_dim` dimensions of a head, some see a window,
and long contexts come by LongRoPE in `rope_scaling`."""

from kvern_engine.layers.build import Build
from kvern_engine.layers.mlp import GatedMLP
from kvern_engine.layers.parameters import Destinations, fused_outputs, split_by_inputs
from kvern_engine.layers.rotary import rotary_order
from kvern_engine.layers.self_attention import SelfAttention
from kvern_engine.models.llama import LlamaDecoderLayer, LlamaForCausalLM


class Phi3Attention(SelfAttention):
    def destinations(self, prefix: str) -> Destinations:
        config, head_dim = self._config, self._config.head_dim
        q, kv = config.num_heads * head_dim, config.num_kv_heads * head_dim
        rotated = config.rotary_dim or head_dim
        order = rotary_order(head_dim, rotated) if rotated < head_dim else None
        parts = [(self._q, q), (self._kv, kv), (self._kv, kv)]
        rows = config.fp8 is not None and config.fp8.per_channel
        return fused_outputs(f"{prefix}qkv_proj", self.qkv_proj, parts, order, scales_of_rows=rows) | split_by_inputs(
            prefix, self.o_proj, "o_proj", self._q, q, rows
        )


class Phi3MLP(GatedMLP):
    def destinations(
        self, prefix: str, names: tuple[str, str, str] = ("gate_up_proj", "", "down_proj")
    ) -> Destinations:
        merged, _, down = names
        parts, rows = [(self.inner, self.total)] * 2, self._scales_of_rows
        return fused_outputs(f"{prefix}{merged}", self.gate_up_proj, parts, scales_of_rows=rows) | split_by_inputs(
            prefix, self.down_proj, down, self.inner, self.total, rows
        )


class Phi3DecoderLayer(LlamaDecoderLayer):
    attention_class = Phi3Attention

    def make_mlp(self, build: Build, index: int) -> GatedMLP:
        return Phi3MLP(build)


class Phi3ForCausalLM(LlamaForCausalLM):
    layer_class = Phi3DecoderLayer
