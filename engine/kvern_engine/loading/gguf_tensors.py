"""Turns the stored tensors of GGUF files, or parts of them, into float32 NumPy arrays."""

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from kvern_engine.loading.gguf import TensorInfo
from kvern_engine.loading.gguf_blocks import FORMATS, Format
from kvern_engine.loading.parts import WeightPart

_CHUNK_ELEMENTS = 1 << 17  # float32 chunks of 512 kB: the scale and offset passes hit the cache, not memory


def dequantize(data: mmap.mmap, info: TensorInfo, part: WeightPart) -> npt.NDArray[np.float32]:
    """The `part` of a tensor (of a type in FORMATS) of the file mapped as `data`, float32 of the part's shape.

    F32 is a view of the mapping; everything else a fresh array.
    """
    fmt = FORMATS[info.type_name]
    *outer, (first, last) = part.ranges or ((0, 1),)
    width = (info.shape or (1,))[-1] // fmt.block  # blocks a row
    items = np.frombuffer(data, fmt.dtype, info.nbytes // fmt.dtype.itemsize, info.offset)
    items = items.reshape(*info.shape[:-1], width)[tuple(slice(start, stop) for start, stop in outer)]
    begin, end = first // fmt.block, -(-last // fmt.block)
    items = items[..., begin:end]
    if info.type_name == "F32":
        return items.reshape(part.part_shape)
    out = np.empty((*items.shape[:-1], (end - begin) * fmt.block), np.float32)
    _decode(fmt, np.ascontiguousarray(items).reshape(-1), out.reshape(-1, fmt.block))
    return out[..., first - begin * fmt.block : last - begin * fmt.block].reshape(part.part_shape)


def _decode(fmt: Format, items: npt.NDArray[Any], out: npt.NDArray[np.float32]) -> None:
    step = max(1, _CHUNK_ELEMENTS // fmt.block)
    for start in range(0, len(items), step):
        fmt.decode(items[start : start + step], out[start : start + step])
