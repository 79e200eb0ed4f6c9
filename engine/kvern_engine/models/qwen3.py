"""Qwen3 (arXiv 2505.09388): Llama whose queries and keys are normed head by head before they are rotated (QK-norm) in
place of Qwen2's biases. Its mixtures of experts take the best k experts by the softmax over all of them; all models
that were published scale those k weights to add up to one (`Experts.renormalize`)."""

from kvern_engine.layers.build import Build
from kvern_engine.layers.experts import MixtureOfExperts
from kvern_engine.layers.mlp import GatedMLP
from kvern_engine.models.llama import LlamaDecoderLayer, LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    pass


class Qwen3MoeDecoderLayer(LlamaDecoderLayer):
    """Some layers may have a plain MLP (`Experts.dense_layers`)."""

    def make_mlp(self, build: Build, index: int) -> GatedMLP | MixtureOfExperts:
        experts = build.config.experts
        dense = experts is None or index in experts.dense_layers
        return GatedMLP(build) if dense else MixtureOfExperts(build)


class Qwen3MoeForCausalLM(LlamaForCausalLM):
    layer_class = Qwen3MoeDecoderLayer
    quantizable = False
