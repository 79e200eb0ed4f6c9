"""K and V of blocks as a switch of the layout reads them: in the arena, or taken out of it beforehand, where there is
no room for two arenas at once.

Shapes: an arena is [layers, 2, heads, blocks, block_size, head_dim]; numbers are whatever bytes they are.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class KvSource(Protocol):
    """Where K and V of blocks can be had."""

    def take(self, heads: slice, blocks: Sequence[int]) -> Tensor:
        """[layers, 2, heads, len(blocks), block_size, head_dim] of these heads (as the rank counts its own)."""
        ...


def as_integers(arena: Tensor) -> Tensor:
    """torch does not index tensors in FP8."""
    return arena.view(torch.uint8) if arena.itemsize == 1 else arena


class ArenaKv:
    """Blocks that stay where they are."""

    def __init__(self, arena: Tensor) -> None:
        self._arena = as_integers(arena)

    def take(self, heads: slice, blocks: Sequence[int]) -> Tensor:
        """See `KvSource`."""
        return self._arena[:, :, heads].index_select(3, torch.tensor(blocks, device=self._arena.device))


class StagedKv:
    """A copy of some blocks, so that the arena can be freed: on its device as far as `room` bytes go, layer by layer,
    the rest in the host's memory, which is slower and never too small for what requests use."""

    def __init__(self, arena: Tensor, blocks: Sequence[int], room: int) -> None:
        self._place = {block: place for place, block in enumerate(blocks)}
        self._device = arena.device
        index = torch.tensor(blocks, dtype=torch.int64, device=arena.device)
        self._layers: list[Tensor] = []
        self.host_bytes = 0
        for layer in as_integers(arena):
            part = layer.index_select(2, index)
            room -= part.nbytes
            if room < 0:
                part = part.cpu()
                self.host_bytes += part.nbytes
            self._layers.append(part)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._layers)

    def take(self, heads: slice, blocks: Sequence[int]) -> Tensor:
        """See `KvSource`. Raises KeyError for a block that was not taken out."""
        places = torch.tensor([self._place[block] for block in blocks], dtype=torch.int64)
        found = []
        for part in self._layers:
            wanted = part[:, heads].index_select(2, places.to(part.device))
            found.append(wanted.to(self._device))
        return torch.stack(found)

    def put_back(self, arena: Tensor) -> None:
        """Into an arena like the one that they are of, under the same numbers."""
        index = torch.tensor(list(self._place), dtype=torch.int64, device=arena.device)
        for layer, part in zip(as_integers(arena), self._layers, strict=True):
            layer.index_copy_(2, index, part.to(arena.device))
