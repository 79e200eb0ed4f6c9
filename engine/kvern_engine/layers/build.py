"""What the layers of a model are made from."""

from dataclasses import dataclass, replace

import torch

from kvern_engine.model_config import ModelConfig
from kvern_engine.parallel.groups import TensorGroup
from kvern_engine.parallel.layout import ModelShard


@dataclass(frozen=True)
class Build:
    """`shard` is the part of the model that this rank of `group` holds; `longest` is the longest sequence it will
    see."""

    config: ModelConfig
    shard: ModelShard
    group: TensorGroup
    dtype: torch.dtype
    device: torch.device
    longest: int

    def on(self, device: torch.device) -> "Build":
        """The same on another device."""
        return replace(self, device=device)

    @property
    def in_parts(self) -> bool:
        """Nobody but the next norm reads what a branch of a layer gives, which may thus come in parts."""
        return self.group.size == 1 and self.shard.is_last

    @property
    def sums_in_norm(self) -> bool:
        """The same, of ranks: what a branch gives is each rank's own share, which the next norm sums."""
        width, dtype = self.config.hidden_size, self.dtype
        return self.group.size > 1 and self.shard.is_last and self.group.sums_in_norm(width, dtype)

    def window(self, layer: int) -> int | None:
        """The window of a layer; None too where no sequence is longer."""
        window = self.config.window(layer)
        return None if window is None or window >= self.longest else window
