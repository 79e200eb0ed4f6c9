"""How many tokens of KV cache a pod holds at each tensor parallel size it could have, from what it holds at the present
one: what `GET /admin/layout` reports and the operator plans with.

Arithmetic only, but for `model_shape`, which reads the model's configuration. The present size is measured; the others
are computed from its bytes, and leave out what a larger engine saves or wastes in work buffers.
"""

from dataclasses import dataclass

from kvern_engine.config import EngineConfig
from kvern_engine.core.plan import WorkerReady
from kvern_engine.loading.config import read_model_config
from kvern_engine.loading.resolve import resolve_model
from kvern_engine.model_config import ModelConfig
from kvern_engine.parallel.layout import Layout, possible_sizes


def model_shape(config: EngineConfig) -> ModelConfig:
    """The model whose heads are split: that of the simulated device's profile, where there is no real one. Raises
    ValueError."""
    if config.device == "sim":
        from kvern_engine.worker.sim_profile import load_profile

        return load_profile(config.sim_profile).shape
    return read_model_config(resolve_model(config.model, config.revision))


@dataclass(frozen=True)
class Memory:
    """What bounds the KV cache of a rank. `together`: bytes for weights and KV cache (a GPU); `kv`: bytes for the KV
    cache alone, whatever the weights take (a CPU, or a size that was asked for); one of them is None.
    """

    together: int | None
    kv: int | None


def rank_memory(config: EngineConfig, layout: Layout, ready: WorkerReady, host_kv: int | None) -> Memory:
    """From what an engine's ranks have reported (`worker_client.merge_ready`). `host_kv`: bytes that a rank on a CPU
    may take for its KV cache."""
    if config.kv_cache_memory_bytes is not None:
        return Memory(None, config.kv_cache_memory_bytes)
    if ready.device.startswith("cpu"):
        return Memory(None, host_kv if host_kv is not None else ready.kv_bytes // layout.engine_size)
    return Memory((ready.kv_bytes + ready.weight_bytes) // layout.engine_size, None)


def replication(model: ModelConfig, size: int) -> float:
    """How many times each KV head is held where `size` ranks share the attention."""
    return max(1.0, size / model.num_kv_heads)


def engine_tokens(
    model: ModelConfig, layout: Layout, size: int, ready: WorkerReady, memory: Memory, max_sequences: int
) -> int:
    """Tokens that an engine of `size` tensor parallel ranks would hold, in whole blocks. On a CPU never more than
    `max_sequences` of the longest length, which is all that could be used."""
    now = ready.num_blocks * ready.block_size
    per_token = ready.kv_bytes / now / replication(model, layout.tensor) * replication(model, size)
    ranks = size * layout.pipeline
    if memory.together is not None:
        room = ranks * memory.together - ready.weight_bytes
    else:
        room = ranks * (memory.kv or 0)
    blocks = int(max(0, room) / (per_token * ready.block_size))
    if ready.device.startswith("cpu"):
        blocks = min(blocks, max_sequences * -(-ready.max_model_len // ready.block_size))
    return blocks * ready.block_size


def feasible_layouts(
    model: ModelConfig, config: EngineConfig, ready: WorkerReady, host_kv: int | None = None
) -> dict[int, int]:
    """Tensor parallel size -> tokens of KV cache of all engines that the pod's devices would then make up. A size at
    which the longest sequence has no room is not feasible, nor one at which `batch_invariant` would not hold."""
    layout = Layout.of(config)
    memory = rank_memory(config, layout, ready, host_kv)
    found = {}
    for size in possible_sizes(model, layout.world // layout.pipeline, config.batch_invariant):
        engines, rest = divmod(layout.world, size * layout.pipeline)
        if rest:
            continue
        if size == layout.tensor or config.num_gpu_blocks_override is not None:
            tokens = ready.num_blocks * ready.block_size
        else:
            tokens = engine_tokens(model, layout, size, ready, memory, ready.max_num_seqs)
        if tokens >= ready.max_model_len or size == layout.tensor:
            found[size] = engines * tokens
    return found
