"""Turns the stored tensors of GGUF files into float32 NumPy arrays. Where they lie in a file is `gguf.py`'s business.

The block formats: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvern_engine.loading.gguf import TensorInfo
from kvern_engine.loading.parts import WeightPart

_CHUNK_ELEMENTS = 1 << 17  # float32 chunks of 512 kB: the scale and offset passes hit the cache, not memory


@dataclass(frozen=True)
class Format:
    """How a tensor type is stored: `block` elements take one item of `dtype`; `decode(items, out)` writes them as
    float32 into `out[len(items), block]`."""

    block: int
    dtype: np.dtype[Any]
    decode: Callable[[npt.NDArray[Any], npt.NDArray[np.float32]], None]


def _decode_float(items: npt.NDArray[Any], out: npt.NDArray[np.float32]) -> None:
    out[:, 0] = items


def _decode_bf16(items: npt.NDArray[Any], out: npt.NDArray[np.float32]) -> None:
    np.left_shift(items, 16, out=out.view(np.uint32)[:, 0], dtype=np.uint32)


def _nibbles(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """[n, 16] bytes -> [n, 32] values 0..15: all low nibbles come before all high ones."""
    values = np.empty((len(packed), 32), np.uint8)
    np.bitwise_and(packed, 15, out=values[:, :16])
    np.right_shift(packed, 4, out=values[:, 16:])
    return values


def _scale(items: npt.NDArray[Any], field: str) -> npt.NDArray[np.float32]:
    return items[field].astype(np.float32)[:, None]


def _decode_q4_0(items: npt.NDArray[Any], out: npt.NDArray[np.float32]) -> None:
    np.multiply(_nibbles(items["q"]).view(np.int8) - np.int8(8), _scale(items, "d"), out=out)


def _decode_q4_1(items: npt.NDArray[Any], out: npt.NDArray[np.float32]) -> None:
    np.multiply(_nibbles(items["q"]), _scale(items, "d"), out=out)
    out += _scale(items, "m")


def _decode_q8_0(items: npt.NDArray[Any], out: npt.NDArray[np.float32]) -> None:
    np.multiply(items["q"], _scale(items, "d"), out=out)


FORMATS: dict[str, Format] = {
    "F32": Format(1, np.dtype("<f4"), _decode_float),
    "F16": Format(1, np.dtype("<f2"), _decode_float),
    "BF16": Format(1, np.dtype("<u2"), _decode_bf16),
    "Q4_0": Format(32, np.dtype([("d", "<f2"), ("q", "u1", 16)]), _decode_q4_0),
    "Q4_1": Format(32, np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)]), _decode_q4_1),
    "Q8_0": Format(32, np.dtype([("d", "<f2"), ("q", "i1", 32)]), _decode_q8_0),
}


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
    step = _CHUNK_ELEMENTS // fmt.block
    for start in range(0, len(items), step):
        fmt.decode(items[start : start + step], out[start : start + step])
