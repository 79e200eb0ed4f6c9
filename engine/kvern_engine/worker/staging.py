"""Small host arrays to the device: one pinned buffer and one copy a step, or no copy at all on a CPU.

The device buffer has a fixed address: arrays of the same sizes land at the same places each time, which is what a
captured CUDA graph needs.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ALIGN = 16
_RING = 4  # pinned buffers in turn: the copy of a step may not have happened when the next one is packed

_TORCH_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


def offsets(sizes: Sequence[int]) -> list[int]:
    """Where arrays of `sizes` bytes begin in the buffer; the last entry is its length."""
    places = [0]
    for size in sizes:
        places.append(places[-1] + -(-size // _ALIGN) * _ALIGN)
    return places


def to_device(array: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """One array to new memory on `device`, without waiting for the device; on a CPU it shares the array's memory."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class Staging:
    """Uploads to `device`. Up to `capacity` bytes go through the fixed buffer, more through memory allocated for it."""

    def __init__(self, device: torch.device, capacity: int) -> None:
        self._device, self._capacity = device, capacity
        self._turn = 0
        if device.type == "cpu":
            return
        self._pinned = [torch.empty(capacity, dtype=torch.uint8, pin_memory=True) for _ in range(_RING)]
        self._done = [torch.cuda.Event() for _ in range(_RING)]  # type: ignore[no-untyped-call]
        self._target = torch.empty(capacity, dtype=torch.uint8, device=device)

    def upload(self, *arrays: np.ndarray[Any, Any]) -> list[Tensor]:
        """The arrays (C-contiguous; int32, int64, float32 or float64) as device tensors of the same shapes, valid until
        the next call. On a CPU they share the arrays' memory."""
        if self._device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        places = offsets([array.nbytes for array in arrays])
        if places[-1] > self._capacity:
            pinned = torch.empty(places[-1], dtype=torch.uint8, pin_memory=True)
            _pack(pinned, arrays, places)
            return _views(pinned.to(self._device, non_blocking=True), arrays, places)
        turn = self._turn = (self._turn + 1) % _RING
        self._done[turn].synchronize()  # four steps back: long over
        _pack(self._pinned[turn], arrays, places)
        self._target[: places[-1]].copy_(self._pinned[turn][: places[-1]], non_blocking=True)
        self._done[turn].record()
        return _views(self._target, arrays, places)


def _pack(buffer: Tensor, arrays: Sequence[np.ndarray[Any, Any]], places: Sequence[int]) -> None:
    raw = buffer.numpy()
    for array, place in zip(arrays, places, strict=False):
        raw[place : place + array.nbytes] = array.reshape(-1).view(np.uint8)


def _views(buffer: Tensor, arrays: Sequence[np.ndarray[Any, Any]], places: Sequence[int]) -> list[Tensor]:
    return [
        buffer[place : place + array.nbytes].view(_TORCH_DTYPES[array.dtype]).view(array.shape)
        for array, place in zip(arrays, places, strict=False)
    ]
