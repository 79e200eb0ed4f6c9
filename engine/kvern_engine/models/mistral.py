"""Mistral (Jiang et al., arXiv 2310.06825): Llama in which a token sees no more than `sliding_window` tokens, itself
included. What lies further back reaches it through the layers between. The configuration has the window; later Mistral
models have none."""

from kvern_engine.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    pass
