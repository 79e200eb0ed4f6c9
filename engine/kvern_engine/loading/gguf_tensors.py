"""Turns the stored tensors of GGUF files into float32 NumPy arrays. Where they lie in a file is `gguf.py`'s business.

The block formats: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

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


def dequantize(data: mmap.mmap, offset: int, nbytes: int, type_name: str) -> npt.NDArray[np.float32]:
    """The elements of a tensor of `type_name` (one of FORMATS), `nbytes` from `offset` on: [elements] float32.

    F32 is a view of the mapping; everything else a fresh array.
    """
    fmt = FORMATS[type_name]
    items = np.frombuffer(data, fmt.dtype, nbytes // fmt.dtype.itemsize, offset)
    if type_name == "F32":
        return items
    out = np.empty((len(items), fmt.block), np.float32)
    step = _CHUNK_ELEMENTS // fmt.block
    for start in range(0, len(items), step):
        fmt.decode(items[start : start + step], out[start : start + step])
    return out.reshape(-1)
