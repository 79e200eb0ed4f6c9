"""K and V of blocks as a switch of the layout reads them: in the arena, or taken out of it beforehand, where there is
no room for two arenas at once.

Shapes: an arena is a list of layers, [2, heads, blocks, block_size, head_dim] each; numbers are whatever bytes they
are. Both kinds of source are asked layer by layer, for blocks at places that `places` has looked up once.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor


class KvSource(Protocol):
    """Where K and V of blocks can be had."""

    def places(self, blocks: Sequence[int]) -> Tensor:
        """Where these blocks are, for `take`. Raises KeyError for one that is not there."""
        ...

    def take(self, layer: int, heads: slice, places: Tensor) -> Tensor:
        """[2, heads, len(places), block_size, head_dim] of these heads (as the rank counts its own)."""
        ...


def as_integers(layer: Tensor) -> Tensor:
    """torch does not index tensors in FP8."""
    return layer.view(torch.uint8) if layer.itemsize == 1 else layer


class ArenaKv:
    """Blocks that stay where they are."""

    def __init__(self, arena: Sequence[Tensor]) -> None:
        self._layers = [as_integers(layer) for layer in arena]

    def places(self, blocks: Sequence[int]) -> Tensor:
        """See `KvSource`."""
        return torch.tensor(blocks, dtype=torch.int64, device=self._layers[0].device)

    def take(self, layer: int, heads: slice, places: Tensor) -> Tensor:
        """See `KvSource`."""
        return self._layers[layer][:, heads].index_select(2, places)


class StagedKv:
    """A copy of some blocks of an arena that is given up for it.

    The arena is used up: `arena` is empty afterwards, and each of its layers is let go once its blocks are out of it,
    then `release` is called, which gives free memory back to the device. So there must be room for the blocks of one
    layer only: `room` are the bytes that can be taken on the device at the beginning. Blocks of a layer that find none
    go to the host's memory, which is slower and never too small for what requests use.
    """

    def __init__(
        self, arena: list[Tensor], blocks: Sequence[int], room: int, release: Callable[[], None] = lambda: None
    ) -> None:
        self._place = {block: place for place, block in enumerate(blocks)}
        self._device = arena[0].device
        index = torch.tensor(blocks, dtype=torch.int64, device=self._device)
        self._layers: list[Tensor | None] = []
        self.host_bytes = 0
        while arena:
            layer = as_integers(arena.pop(0))
            size = layer.nbytes // max(1, layer.shape[2]) * len(blocks)
            part = _taken(layer, index) if size <= room else None
            if part is None:
                part = _on_the_host(layer, index)
                self.host_bytes += size
            else:
                room -= size
            self._layers.append(part)
            room += layer.nbytes
            del layer, part
            release()

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._layers if part is not None)

    @property
    def device_bytes(self) -> list[int]:
        """What each layer takes on the device."""
        return [0 if part is None or part.device != self._device else part.nbytes for part in self._layers]

    def let_go(self, layer: int) -> None:
        """Nobody will ask for this layer any more: there is no way back."""
        self._layers[layer] = None

    @property
    def is_whole(self) -> bool:
        return all(part is not None for part in self._layers)

    def places(self, blocks: Sequence[int]) -> Tensor:
        """See `KvSource`."""
        return torch.tensor([self._place[block] for block in blocks], dtype=torch.int64, device=self._device)

    def take(self, layer: int, heads: slice, places: Tensor) -> Tensor:
        """See `KvSource`."""
        part = self._layers[layer]
        assert part is not None
        return part[:, heads].index_select(2, places.to(part.device)).to(self._device)

    def put_back(self, make: Callable[[], Tensor], release: Callable[[], None] = lambda: None) -> list[Tensor]:
        """An arena like the one that they are of, of layers that `make` gives, with them under the same numbers. What
        was staged is used up in turn, as the arena was."""
        assert self.is_whole
        index = torch.tensor(list(self._place), dtype=torch.int64, device=self._device)
        arena = []
        for number in range(len(self._layers)):
            layer, part = make(), self._layers[number]
            assert part is not None
            as_integers(layer).index_copy_(2, index, part.to(self._device))
            arena.append(layer)
            del part
            self.let_go(number)
            release()
        return arena


def _taken(layer: Tensor, index: Tensor) -> Tensor | None:
    """The blocks of a layer, on its device; None where there is no room for them after all."""
    try:
        return layer.index_select(2, index)
    except torch.OutOfMemoryError:
        return None


def _on_the_host(layer: Tensor, index: Tensor) -> Tensor:
    """The blocks of a layer, taken a head at a time: there is no room for all of them on the device."""
    part = torch.empty((*layer.shape[:2], len(index), *layer.shape[3:]), dtype=layer.dtype)
    for of_heads, copies in zip(layer, part, strict=True):
        for head, copy in zip(of_heads, copies, strict=True):
            copy.copy_(head.index_select(0, index))
    return part
