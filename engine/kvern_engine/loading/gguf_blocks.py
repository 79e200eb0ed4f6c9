"""How each GGUF tensor type packs its elements, and what turns packed blocks into float32. NumPy arrays only: where the
blocks lie in a file is `gguf.py`'s business, which part of a tensor is wanted `gguf_tensors.py`'s.

The formats: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. In every decoder the float operations are
those of ggml's reference, in its order, so that results are equal bit for bit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Items = npt.NDArray[Any]  # [n] records of a format's dtype
Floats = npt.NDArray[np.float32]  # [n, block]
Bytes = npt.NDArray[np.uint8]

_K = 256  # elements in a block of the K types


@dataclass(frozen=True)
class Format:
    """How a tensor type is stored: `block` elements take one item of `dtype`; `decode(items, out)` writes them as
    float32 into `out[len(items), block]`."""

    block: int
    dtype: np.dtype[Any]
    decode: Callable[[Items, Floats], None]


def _float(items: Items, out: Floats) -> None:
    out[:, 0] = items


def _bf16(items: Items, out: Floats) -> None:
    np.left_shift(items, 16, out=out.view(np.uint32)[:, 0], dtype=np.uint32)


def _scale(items: Items, field: str) -> Floats:
    return items[field].astype(np.float32)[:, None]


def _nibbles(packed: Bytes) -> Bytes:
    """[n, groups * size] bytes -> [n, groups, 2, size] values 0..15: of a group all low ones come first."""
    values = np.empty((*packed.shape[:-1], 2, packed.shape[-1]), np.uint8)
    np.bitwise_and(packed, 15, out=values[..., 0, :])
    np.right_shift(packed, 4, out=values[..., 1, :])
    return values


def _spread(packed: Bytes, bits: int) -> Bytes:
    """[..., size] bytes -> [..., 8 // bits, size] values of `bits` bits, the lowest of all bytes first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (packed[..., None, :] >> shifts) & np.uint8((1 << bits) - 1)


# Blocks of 32


def _q4_0(items: Items, out: Floats) -> None:
    q = _nibbles(items["q"]).reshape(-1, 32)
    np.multiply(q.view(np.int8) - np.int8(8), _scale(items, "d"), out=out)


def _q4_1(items: Items, out: Floats) -> None:
    np.multiply(_nibbles(items["q"]).reshape(-1, 32), _scale(items, "d"), out=out)
    out += _scale(items, "m")


def _five_bits(items: Items) -> Bytes:
    """The fifth bits of all 32 elements stand together."""
    q = _nibbles(items["q"]).reshape(-1, 32)
    q |= np.unpackbits(items["h"], axis=-1, bitorder="little") << np.uint8(4)
    return q


def _q5_0(items: Items, out: Floats) -> None:
    np.multiply(_five_bits(items).view(np.int8) - np.int8(16), _scale(items, "d"), out=out)


def _q5_1(items: Items, out: Floats) -> None:
    np.multiply(_five_bits(items), _scale(items, "d"), out=out)
    out += _scale(items, "m")


def _q8_0(items: Items, out: Floats) -> None:
    np.multiply(items["q"], _scale(items, "d"), out=out)


_IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)  # what the 16 codes of IQ4 stand for


def _iq4_nl(items: Items, out: Floats) -> None:
    np.multiply(_IQ4_VALUES[_nibbles(items["q"]).reshape(-1, 32)], _scale(items, "d"), out=out)


# Blocks of 256, in sub-blocks whose scales are quantized themselves


def _q2_k(items: Items, out: Floats) -> None:
    scales = items["scales"]
    dl = (_scale(items, "d") * (scales & 15))[..., None]  # [n, 16, 1]
    ml = (_scale(items, "dmin") * (scales >> 4))[..., None]
    q = _spread(items["q"].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    shaped = out.reshape(-1, 16, 16)
    np.multiply(q, dl, out=shaped)
    shaped -= ml


def _q3_k(items: Items, out: Floats) -> None:
    packed = items["scales"]  # 16 scales of 6 bits: 8 bytes of low nibbles, 4 bytes of pairs of high bits
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=-1)
    scales = low | (_spread(packed[:, 8:], 2).reshape(-1, 16) << np.uint8(4))
    dl = (_scale(items, "d") * (scales.view(np.int8) - np.int8(32)))[..., None]
    q = _spread(items["q"].reshape(-1, 2, 32), 2).reshape(-1, _K)
    clear = _spread(items["hmask"], 1).reshape(-1, _K) ^ np.uint8(1)  # the offset applies where the bit is 0
    signed = q.view(np.int8) - (clear << np.uint8(2)).view(np.int8)
    np.multiply(signed.reshape(-1, 16, 16), dl, out=out.reshape(-1, 16, 16))


def _scales_and_mins(packed: Bytes) -> tuple[Bytes, Bytes]:
    """[n, 12] bytes -> 8 scales and 8 minimums of 6 bits each."""
    d, m, both = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([d & 63, (both & 15) | ((d >> 2) & 48)], axis=-1)
    return scales, np.concatenate([m & 63, (both >> 4) | ((m >> 2) & 48)], axis=-1)


def _affine(items: Items, q: Bytes, out: Floats) -> None:
    """Q4_K and Q5_K: `q` [n, 256] by the scales and minimums of 8 sub-blocks."""
    scales, mins = _scales_and_mins(items["scales"])
    shaped = out.reshape(-1, 8, 32)
    np.multiply(q.reshape(-1, 8, 32), (_scale(items, "d") * scales)[..., None], out=shaped)
    shaped -= (_scale(items, "dmin") * mins)[..., None]


def _q4_k(items: Items, out: Floats) -> None:
    _affine(items, _nibbles(items["q"].reshape(-1, 4, 32)), out)


def _q5_k(items: Items, out: Floats) -> None:
    q = _nibbles(items["q"].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    q |= _spread(items["h"], 1) << np.uint8(4)
    _affine(items, q, out)


def _q6_k(items: Items, out: Floats) -> None:
    dl = (_scale(items, "d") * items["scales"])[..., None]
    low = _nibbles(items["ql"].reshape(-1, 2, 64)).reshape(-1, _K)
    high = _spread(items["qh"].reshape(-1, 2, 32), 2).reshape(-1, _K)
    q = (low | (high << np.uint8(4))).view(np.int8) - np.int8(32)
    np.multiply(q.reshape(-1, 16, 16), dl, out=out.reshape(-1, 16, 16))


def _record(*fields: tuple[Any, ...]) -> np.dtype[Any]:
    return np.dtype(list(fields))


_D, _DMIN, _M = ("d", "<f2"), ("dmin", "<f2"), ("m", "<f2")
_Q16, _H4 = ("q", "u1", 16), ("h", "u1", 4)

FORMATS: dict[str, Format] = {
    "F32": Format(1, np.dtype("<f4"), _float),
    "F16": Format(1, np.dtype("<f2"), _float),
    "BF16": Format(1, np.dtype("<u2"), _bf16),
    "Q4_0": Format(32, _record(_D, _Q16), _q4_0),
    "Q4_1": Format(32, _record(_D, _M, _Q16), _q4_1),
    "Q5_0": Format(32, _record(_D, _H4, _Q16), _q5_0),
    "Q5_1": Format(32, _record(_D, _M, _H4, _Q16), _q5_1),
    "Q8_0": Format(32, _record(_D, ("q", "i1", 32)), _q8_0),
    "Q2_K": Format(_K, _record(("scales", "u1", 16), ("q", "u1", 64), _D, _DMIN), _q2_k),
    "Q3_K": Format(_K, _record(("hmask", "u1", 32), ("q", "u1", 64), ("scales", "u1", 12), _D), _q3_k),
    "Q4_K": Format(_K, _record(_D, _DMIN, ("scales", "u1", 12), ("q", "u1", 128)), _q4_k),
    "Q5_K": Format(_K, _record(_D, _DMIN, ("scales", "u1", 12), ("h", "u1", 32), ("q", "u1", 128)), _q5_k),
    "Q6_K": Format(_K, _record(("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), _D), _q6_k),
    "IQ4_NL": Format(32, _record(_D, _Q16), _iq4_nl),
}
