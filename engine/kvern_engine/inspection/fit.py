"""Where a model fits: for a card and a tensor parallel size, what is left for the KV cache, and what that holds.

Pure. Weights and KV cache are computed exactly; what a running engine takes beside them (`overhead`) is an estimate,
made to agree with what was measured of Llama-3-8B on an H200 (docs/howto/inspect.md has both numbers).
"""

from dataclasses import dataclass

from kvern_engine.config import EngineConfig
from kvern_engine.inspection.cards import GIB, Card
from kvern_engine.inspection.sizes import kv_bytes_per_token, rank_elements
from kvern_engine.model_config import ModelConfig
from kvern_engine.parallel.layout import Layout
from kvern_engine.worker.limits import StepLimits, shared_window, step_limits

_FIXED = int(1.5 * GIB)  # the driver's context, libraries, graphs
_SAMPLING_BYTES = 16  # a row and entry of the vocabulary: logits in several forms


@dataclass(frozen=True)
class Needs:
    """What an engine with `config` is asked to hold. `element_bytes` and `kv_bytes` are bytes of a number in weights
    and KV cache, `max_model_len` the longest sequence in tokens."""

    model: ModelConfig
    config: EngineConfig
    element_bytes: int
    kv_bytes: int
    max_model_len: int

    @property
    def fp8(self) -> bool:
        return self.config.quantization is not None or self.model.fp8 is not None

    @property
    def fp8_head(self) -> bool:
        return self.model.fp8 is not None and self.model.fp8.head


@dataclass(frozen=True)
class Fit:
    """A model on `tensor` (times pipeline) cards. Bytes are those of the rank that has least room: `weights`,
    `overhead`, and `room` for its KV cache (0: it does not fit). `tokens` the KV cache holds, `longest` is the longest
    sequence in tokens, `at_once` how many of max_model_len run at once; 0 where not even one does."""

    card: str
    tensor: int
    weights: int
    overhead: int
    room: int
    tokens: int
    longest: int
    at_once: float


def fit(needs: Needs, card: Card, tensor: int) -> Fit:
    """Raises ValueError where the model cannot be split over `tensor` ranks."""
    config, model = needs.config, needs.model
    layout = Layout(1, tensor, config.pipeline_parallel_size)
    limits = step_limits(config, "cuda", card.name, needs.max_model_len)
    tightest: tuple[int, int, int, int] | None = None  # tokens, weights, overhead, room
    for stage in range(layout.pipeline):
        weights = rank_elements(model, layout, stage).nbytes(needs.element_bytes, needs.fp8, needs.fp8_head)
        taken = overhead(needs, limits, tensor)
        room = max(0, int(card.memory * config.gpu_memory_utilization) - weights - taken)
        if config.kv_cache_memory_bytes is not None:
            room = min(room, config.kv_cache_memory_bytes)
        per_block = kv_bytes_per_token(model, needs.kv_bytes, layout, stage) * config.block_size
        tokens = room // per_block * config.block_size
        if tightest is None or tokens < tightest[0]:
            tightest = tokens, weights, taken, room
    assert tightest is not None
    tokens, weights, taken, room = tightest
    whole = tokens >= held_tokens(needs, needs.max_model_len)
    return Fit(
        card=card.name,
        tensor=tensor,
        weights=weights,
        overhead=taken,
        room=room,
        tokens=tokens,
        longest=needs.max_model_len if whole else tokens,
        at_once=tokens / held_tokens(needs, needs.max_model_len) if whole else 0.0,
    )


def held_tokens(needs: Needs, length: int) -> int:
    """Tokens of KV cache that a sequence of `length` holds on to: of a model with a window in all layers no more than
    the window and one block."""
    window = shared_window(needs.model, length)
    return length if window is None else min(length, window + needs.config.block_size)


def overhead(needs: Needs, limits: StepLimits, tensor: int) -> int:
    """Estimated bytes beside weights and KV cache: what the driver and graphs take, the activations of the largest
    step, and sampling."""
    model = needs.model
    experts = model.experts
    inner = max(model.intermediate_size, experts.intermediate_size * experts.per_token if experts else 0)
    heads = (model.num_heads + 2 * max(model.num_kv_heads, tensor)) * model.head_dim
    width = 4 * model.hidden_size + (3 * inner + heads) // tensor
    activations = limits.max_num_batched_tokens * width * needs.element_bytes
    return _FIXED + activations + limits.max_num_seqs * model.vocab_size * _SAMPLING_BYTES
