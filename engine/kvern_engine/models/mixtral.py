"""Mixtral (Jiang et al., arXiv 2401.04088): Mistral whose MLPs are mixtures of experts. A token takes the best two of
eight, by the softmax over the scores of these two alone, which is the softmax over all scaled to add up to one."""

from kvern_engine.layers.build import Build
from kvern_engine.layers.experts import MixtureOfExperts
from kvern_engine.models.llama import LlamaDecoderLayer, LlamaForCausalLM


class MixtralExperts(MixtureOfExperts):
    names = ("w1", "w3", "w2")


class MixtralDecoderLayer(LlamaDecoderLayer):
    mlp_name = "block_sparse_moe."

    def make_mlp(self, build: Build, index: int) -> MixtureOfExperts:
        return MixtralExperts(build)


class MixtralForCausalLM(LlamaForCausalLM):
    layer_class = MixtralDecoderLayer
    quantizable = False
