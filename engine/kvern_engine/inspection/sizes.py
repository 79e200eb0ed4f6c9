"""How many parameters each rank of a layout holds, and how many bytes they and the KV cache take: arithmetic on a
ModelConfig, no files and no torch."""

from dataclasses import dataclass

from kvern_engine.model_config import ModelConfig
from kvern_engine.parallel.layout import Layout, even_slice, model_shard


@dataclass(frozen=True)
class Elements:
    """Numbers that a rank holds: in the matrices of its layers, in its LM head where that is not the embedding, and in
    everything else (embedding, norms, biases, routers)."""

    layers: int
    head: int
    rest: int

    @property
    def total(self) -> int:
        return self.layers + self.head + self.rest

    def nbytes(self, element_bytes: int, fp8: bool = False, fp8_head: bool = False) -> int:
        """Bytes in a type of `element_bytes`; `fp8`: the layers' matrices, and with `fp8_head` the head, take one byte
        an element. (Scales are a thousandth of that.)"""
        layers = self.layers * (1 if fp8 else element_bytes)
        head = self.head * (1 if fp8_head else element_bytes)
        return layers + head + self.rest * element_bytes


def parameters(model: ModelConfig) -> int:
    """All parameters of the model."""
    return rank_elements(model, Layout(), 0).total


def active_parameters(model: ModelConfig) -> int:
    """Parameters that a token meets: of a mixture of experts those of the experts it takes."""
    experts = model.experts
    if experts is None:
        return parameters(model)
    layers = model.num_layers - len(experts.dense_layers)
    idle = experts.num_experts - experts.per_token
    return parameters(model) - layers * idle * 3 * model.hidden_size * experts.intermediate_size


def rank_elements(model: ModelConfig, layout: Layout, stage: int) -> Elements:
    """What the first rank of a stage holds, which holds most, with its padding. Raises ValueError where the model
    cannot be split in this way."""
    shard = model_shard(model, layout, stage, 0)
    hidden, head_dim = model.hidden_size, model.head_dim
    q, kv = shard.heads.size * head_dim, shard.kv_heads.size * head_dim
    is_gpt2 = model.architecture == "GPT2LMHeadModel"
    norm = hidden * (2 if is_gpt2 else 1)  # LayerNorm has a bias
    norms = 4 if model.architecture.startswith("Gemma") else 2
    matrices = 2 if is_gpt2 else 3  # of an MLP
    layers = rest = 0
    for layer in shard.layers:
        layers += hidden * (q + 2 * kv) + q * hidden
        rest += norms * norm
        rest += (q + 2 * kv) * model.attention_bias + hidden * model.attention_out_bias
        rest += 2 * head_dim * model.qk_norm
        experts = model.experts
        if experts is not None and layer not in experts.dense_layers:
            inner = even_slice(experts.intermediate_size, layout.tensor, 0).size
            layers += experts.num_experts * matrices * hidden * inner
            rest += experts.num_experts * hidden
        else:
            layers += matrices * hidden * shard.inner.size
            rest += ((matrices - 1) * shard.inner.size + hidden) * model.mlp_bias
    head = 0
    if shard.is_first:
        rest += shard.vocab.size * hidden
        rest += model.max_position_embeddings * hidden if is_gpt2 else 0
    if shard.is_last:
        rest += norm
        if not (model.tie_word_embeddings and shard.is_first):
            head = shard.vocab.size * hidden
    return Elements(layers, head, rest)


def kv_bytes_per_token(model: ModelConfig, element_bytes: int, layout: Layout | None = None, stage: int = 0) -> int:
    """Bytes of K and V that a token takes on the first rank of a stage; by default of the whole model on one."""
    shard = model_shard(model, layout or Layout(), stage, 0)
    return 2 * shard.num_layers * shard.kv_heads.size * model.head_dim * element_bytes
