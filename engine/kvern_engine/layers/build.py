"""What the layers of a model are made from."""

from dataclasses import dataclass, replace

import torch

from kvern_engine.model_config import ModelConfig
from kvern_engine.parallel.groups import TensorGroup
from kvern_engine.parallel.layout import ModelShard


@dataclass(frozen=True)
class Build:
    """`shard` is the part of the model that this rank of `group` holds; `longest` is the longest sequence it will
    see; `invariant`: numbers depend neither on the batch nor on whether there are one or two ranks (on GPUs, also of
    layers whose weights wait in the host's memory)."""

    config: ModelConfig
    shard: ModelShard
    group: TensorGroup
    dtype: torch.dtype
    device: torch.device
    longest: int
    invariant: bool = False

    def on(self, device: torch.device) -> "Build":
        """The same on another device."""
        return replace(self, device=device)

    @property
    def in_parts(self) -> bool:
        """Nobody but the next norm reads what a branch of a layer gives, which may thus come in parts."""
        return self.group.size == 1 and self.shard.is_last and not self.pieces

    @property
    def sums_in_norm(self) -> bool:
        """The same, of ranks: what a branch gives is each rank's own share, which the next norm sums."""
        width, dtype = self.config.hidden_size, self.dtype
        if self.group.size == 1 or not self.shard.is_last or self.pieces:
            return False
        return self.group.sums_in_norm(width, dtype)

    @property
    def pieces(self) -> int:
        """`Linear.pieces` of a layer whose inputs the ranks share, 0 where numbers need not be `invariant`. There are
        two in all, so that one rank adds up what two would."""
        return max(1, 2 // self.group.size) if self.invariant else 0

    @property
    def output_pieces(self) -> int:
        """The same of a layer whose outputs they share."""
        return min(self.pieces, 1)

    def window(self, layer: int) -> int | None:
        """The window of a layer; None too where no sequence is longer."""
        window = self.config.window(layer)
        return None if window is None or window >= self.longest else window
