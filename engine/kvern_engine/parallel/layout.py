"""Which rank computes what: data, tensor and pipeline parallel sizes, and the part of a model that a rank holds.

Pure: no torch, no processes. How ranks talk is in `groups.py`, how weights reach them in `loading/weights.py`.

A rank is one device. Ranks of an engine are neighbours, those of a stage next to each other, so that the busiest
traffic (tensor parallel) stays between the nearest devices: rank = (engine * pipeline + stage) * tensor + tensor_rank.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvern_engine.model_config import ModelConfig

if TYPE_CHECKING:
    from kvern_engine.config import EngineConfig


@dataclass(frozen=True)
class Layout:
    """`data` engines of `pipeline` stages of `tensor` ranks each. Raises ValueError for a size below 1."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        for name in ("data", "tensor", "pipeline"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}_parallel_size must be at least 1, got {getattr(self, name)}")

    @classmethod
    def of(cls, config: "EngineConfig") -> "Layout":
        return cls(config.data_parallel_size, config.tensor_parallel_size, config.pipeline_parallel_size)

    @property
    def world(self) -> int:
        """Ranks of all engines: the devices that the layout takes."""
        return self.data * self.engine_size

    @property
    def engine_size(self) -> int:
        """Ranks of one engine."""
        return self.tensor * self.pipeline

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(engine, stage, tensor rank) of a rank; raises ValueError where there is no such rank."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank must be within 0..{self.world - 1} (data x pipeline x tensor), got {rank}")
        engine, within = divmod(rank, self.engine_size)
        stage, tensor_rank = divmod(within, self.tensor)
        return engine, stage, tensor_rank

    def rank_of(self, engine: int, stage: int, tensor_rank: int) -> int:
        """The inverse of `coordinates`."""
        return (engine * self.pipeline + stage) * self.tensor + tensor_rank

    def ranks_of(self, engine: int) -> list[int]:
        """The ranks of an engine, first stage first."""
        return list(range(engine * self.engine_size, (engine + 1) * self.engine_size))

    def stage_ranks(self, engine: int, stage: int) -> list[int]:
        """The ranks of a stage, which share its layers."""
        first = self.rank_of(engine, stage, 0)
        return list(range(first, first + self.tensor))

    def answering_rank(self, engine: int) -> int:
        """The rank whose StepResults count: the first of the last stage."""
        return self.rank_of(engine, self.pipeline - 1, 0)

    def __str__(self) -> str:
        return f"dp {self.data} x tp {self.tensor} x pp {self.pipeline}"


@dataclass(frozen=True)
class Slice:
    """Indices [start, stop) of a dimension; `size` of them are held, the last `size - (stop - start)` being padding."""

    start: int
    stop: int
    size: int

    @property
    def count(self) -> int:
        """Indices that are no padding."""
        return self.stop - self.start

    def times(self, unit: int) -> "Slice":
        """The same part where each index stands for `unit` neighbouring rows or columns."""
        return Slice(self.start * unit, self.stop * unit, self.size * unit)


@dataclass(frozen=True)
class ModelShard:
    """What one rank holds of a model: `layers` of it, and of each layer the given heads, inner units and rows of the
    vocabulary. The padded sizes are equal on all ranks of a stage.
    """

    layers: range
    heads: Slice
    kv_heads: Slice
    inner: Slice  # of the MLP's intermediate_size
    vocab: Slice
    is_first: bool  # holds the embedding
    is_last: bool  # holds the final norm and the LM head

    @classmethod
    def whole(cls, model: ModelConfig) -> "ModelShard":
        """All of it, on one rank."""
        return model_shard(model, Layout(), 0, 0)

    @property
    def num_layers(self) -> int:
        return len(self.layers)


def model_shard(model: ModelConfig, layout: Layout, stage: int, tensor_rank: int) -> ModelShard:
    """The part of `model` that the rank at (stage, tensor_rank) of any engine holds. Raises ValueError as
    `check_layout` does."""
    check_layout(model, layout)
    size = layout.tensor
    if size > model.num_kv_heads:  # each KV head is held by size / num_kv_heads neighbours
        held = tensor_rank * model.num_kv_heads // size
        kv_heads = Slice(held, held + 1, 1)
    else:
        kv_heads = even_slice(model.num_kv_heads, size, tensor_rank)
    return ModelShard(
        layers=stage_layers(model.num_layers, layout.pipeline, stage),
        heads=even_slice(model.num_heads, size, tensor_rank),
        kv_heads=kv_heads,
        inner=even_slice(model.intermediate_size, size, tensor_rank),
        vocab=even_slice(model.vocab_size, size, tensor_rank),
        is_first=stage == 0,
        is_last=stage == layout.pipeline - 1,
    )


def even_slice(total: int, parts: int, index: int) -> Slice:
    """Part `index` of `total` indices cut into `parts` of equal size, rounded up: the last ones are padded."""
    size = -(-total // parts)
    start = min(total, index * size)
    return Slice(start, min(total, start + size), size)


def stage_layers(num_layers: int, pipeline: int, stage: int) -> range:
    """The layers of a stage. What does not divide goes one each to the first stages: the last one has the LM head."""
    each, more = divmod(num_layers, pipeline)
    first = stage * each + min(stage, more)
    return range(first, first + each + (stage < more))


def feasible_tensor_sizes(model: ModelConfig, devices: int) -> list[int]:
    """The tensor parallel sizes up to `devices` that a model can be split into, rising."""
    return [size for size in range(1, devices + 1) if _why_not(model, size) is None]


def possible_sizes(model: ModelConfig, devices: int, batch_invariant: bool) -> list[int]:
    """Those that a pod can change to. More than two ranks add up in an order that depends on the place in a step."""
    return [size for size in feasible_tensor_sizes(model, devices) if size <= 2 or not batch_invariant]


def check_layout(model: ModelConfig, layout: Layout) -> None:
    """Raises ValueError where a model cannot be split in this way, naming the sizes that can be chosen.

    Attention heads are split whole; KV heads whole or held by several ranks. The vocabulary and the MLP's units are
    padded, so that any size divides them.
    """
    reason = _why_not(model, layout.tensor)
    if reason is not None:
        sizes = feasible_tensor_sizes(model, model.num_heads)
        raise ValueError(
            f"tensor_parallel_size={layout.tensor} {reason}; sizes that work for this model: "
            f"{', '.join(map(str, sizes))}"
        )
    if layout.pipeline > model.num_layers:
        raise ValueError(
            f"pipeline_parallel_size={layout.pipeline} is more than the model's {model.num_layers} layers; "
            f"use 1 to {model.num_layers}"
        )


def _why_not(model: ModelConfig, size: int) -> str | None:
    """Why `size` ranks cannot share the attention of a layer; None where they can."""
    if model.num_heads % size:
        return f"does not divide the model's {model.num_heads} attention heads"
    if model.num_kv_heads % size and size % model.num_kv_heads:
        return f"neither divides the model's {model.num_kv_heads} KV heads nor is a multiple of them"
    return None
