"""Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115): Llama with a bias in the projections of q, k and v, which helps it
with contexts longer than those it was trained on, and with a window in its upper layers where the configuration asks
for one. Long contexts come by YaRN in `rope_scaling`."""

from kvern_engine.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    pass
