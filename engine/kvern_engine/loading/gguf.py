"""Reads GGUF files (versions 2 and 3, little-endian): metadata, tensor table and dequantized tensors.

The file is mapped, never read whole. The API server reads a tokenizer from it with neither torch nor NumPy:
`gguf_tensors.py`, which turns tensors into NumPy arrays, is loaded with the first of them. What the metadata means for
Kvern stands elsewhere: shapes in `config.py`, Hugging Face names in `checkpoint.py`, the vocabulary in `tokenizer.py`.
Writing GGUF files is not offered.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvern_engine.loading.parts import WeightPart

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, str] = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}  # as in `struct`
_MAX_DIMS = 4
_MAX_ARRAY_DEPTH = 4
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

# Every type that files in the wild use, so that an error can name the one that is not supported.
TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


class GGUFError(ValueError):
    """The file is not a GGUF file that Kvern can read; the text says where and why."""


@dataclass(frozen=True)
class TensorInfo:
    """One entry of the tensor table. `shape` is row-major (the slowest dimension first, as in torch), `offset` is in
    bytes from the start of the file; `nbytes` is 0 for types that cannot be dequantized."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    nbytes: int


# Types that can be dequantized (`gguf_tensors.py`): elements in a block, bytes a block.
BLOCKS: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q8_0": (32, 34),
}
SUPPORTED_TYPES = tuple(BLOCKS)


class _Cursor:
    """Reads scalars, strings and arrays off the header, and refuses to run past the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.size = len(data)
        self.path = path
        self.pos = 0

    def truncated(self, what: str, end: int) -> GGUFError:
        return GGUFError(
            f"{self.path}: truncated GGUF file: {what} ends at byte {end:,}, but the file has {self.size:,}; "
            "download it again"
        )

    def _advance(self, nbytes: int, what: str) -> int:
        start, end = self.pos, self.pos + nbytes
        if end > self.size:
            raise self.truncated(what, end)
        self.pos = end
        return start

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.data, self._advance(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.data, self._advance(8, what))[0])

    def string(self, what: str) -> str:
        length = self.u64(what)
        start = self._advance(length, what)
        return self._text(self.data[start : self.pos], what)

    def _text(self, raw: bytes, what: str) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise GGUFError(f"{self.path}: {what} is not valid UTF-8: {raw[:40]!r}") from error

    def strings(self, count: int, what: str) -> list[str]:
        """`count` strings in a row: the hot loop of a vocabulary (300,000 of them in large files)."""
        if self.pos + 8 * count > self.size:  # each takes at least its length: fail before looping
            raise self.truncated(what, self.pos + 8 * count)
        data, pos, size, unpack = self.data, self.pos, self.size, _U64.unpack_from
        out: list[str] = []
        append = out.append
        try:
            for _ in range(count):
                start = pos + 8
                pos = start + unpack(data, pos)[0]
                if pos > size:
                    raise self.truncated(what, pos)
                append(str(data[start:pos], "utf-8"))
        except UnicodeDecodeError as error:
            raise GGUFError(f"{self.path}: an entry of {what} is not valid UTF-8") from error
        except struct.error as error:
            raise self.truncated(what, pos + 8) from error
        self.pos = pos
        return out

    def scalars(self, code: str, count: int, what: str) -> list[Any]:
        start = self._advance(count * struct.calcsize(f"<{code}"), what)  # before anything of this size is made
        return list(struct.unpack_from(f"<{count}{code}", self.data, start))

    def value(self, type_id: int, what: str, depth: int = 0) -> Any:
        """A metadata value: int, float, bool, str or a list of them."""
        if type_id == _STRING:
            return self.string(what)
        if type_id in _SCALARS:
            return self.scalars(_SCALARS[type_id], 1, what)[0]
        if type_id != _ARRAY or depth >= _MAX_ARRAY_DEPTH:
            raise GGUFError(f"{self.path}: {what} has unknown value type {type_id}; is the file damaged?")
        item_type, count = self.u32(what), self.u64(what)
        if item_type == _STRING:
            return self.strings(count, what)
        if item_type in _SCALARS:
            return self.scalars(_SCALARS[item_type], count, what)
        return [self.value(item_type, what, depth + 1) for _ in range(count)]


class GGUFFile:
    """A mapped GGUF file. `metadata` maps keys to values; `tensors` maps names to `TensorInfo`.

    Raises GGUFError (not GGUF, wrong version, truncated, damaged) and OSError (cannot be opened).
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._map = self._open(self.path)
        cursor = _Cursor(self._map, self.path)
        self.version = self._check_magic(cursor)
        tensor_count, value_count = cursor.u64("the header"), cursor.u64("the header")
        self.metadata: dict[str, Any] = {}
        for _ in range(value_count):
            key = cursor.string("a metadata key")
            self.metadata[key] = cursor.value(cursor.u32(key), key)
        self.tensors = self._read_tensor_table(cursor, tensor_count)

    @staticmethod
    def _open(path: Path) -> mmap.mmap:
        with path.open("rb") as file:
            if file.seek(0, 2) < 8:
                raise GGUFError(f"{path}: not a GGUF file: it has only {file.tell()} bytes")
            # Copy-on-write: torch wants writable memory, the file stays as it is.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    @staticmethod
    def _check_magic(cursor: _Cursor) -> int:
        magic = cursor.data[:4]
        if magic != MAGIC:
            raise GGUFError(f"{cursor.path}: not a GGUF file: it starts with {magic!r} instead of {MAGIC!r}")
        cursor.pos = 4
        version = cursor.u32("the header")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3)
            why = "it is a big-endian file" if swapped else f"its version is {version}"
            raise GGUFError(f"{cursor.path}: cannot read this GGUF file: {why}; versions 2 and 3, little-endian, work")
        return version

    def _read_tensor_table(self, cursor: _Cursor, count: int) -> dict[str, TensorInfo]:
        entries: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(count):
            name = cursor.string("a tensor name")
            what = f"the entry of tensor {name!r}"
            dims = cursor.u32(what)
            if dims > _MAX_DIMS:
                raise GGUFError(f"{self.path}: tensor {name!r} has {dims} dimensions; at most {_MAX_DIMS} are allowed")
            shape = tuple(cursor.u64(what) for _ in range(dims))[::-1]
            entries.append((name, shape, cursor.u32(what), cursor.u64(what)))
        alignment = int(self.metadata.get("general.alignment", 32))
        if alignment <= 0:
            raise GGUFError(f"{self.path}: general.alignment must be above 0, got {alignment}")
        data_start = -(-cursor.pos // alignment) * alignment
        return {
            name: self._tensor_info(cursor, name, shape, type_id, data_start + offset)
            for name, shape, type_id, offset in entries
        }

    def _tensor_info(self, cursor: _Cursor, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> TensorInfo:
        type_name = TYPE_NAMES.get(type_id, f"type {type_id}")
        nbytes = 0
        if type_name in BLOCKS:
            block, size = BLOCKS[type_name]
            if shape and shape[-1] % block:
                raise GGUFError(
                    f"{self.path}: tensor {name!r} has rows of {shape[-1]} elements; "
                    f"{type_name} needs a multiple of {block}"
                )
            nbytes = math.prod(shape) // block * size
        if offset + nbytes > cursor.size:
            raise cursor.truncated(f"tensor {name!r}", offset + nbytes)
        return TensorInfo(name, shape, type_name, offset, nbytes)

    def dequantize(self, name: str, part: WeightPart | None = None) -> "npt.NDArray[np.float32]":
        """Tensor `name`, or a part of it, as float32 of its row-major shape. F32 tensors are views of the mapped file
        (copy-on-write); all others are fresh arrays. Of a part, nothing else is read but the rest of the quantization
        blocks that it begins or ends in.

        Raises KeyError for an unknown name, GGUFError for a type that Kvern does not read.
        """
        info = self.tensors[name]
        if info.type_name not in BLOCKS:
            raise GGUFError(
                f"{self.path}: tensor {name!r} is stored as {info.type_name}, which is not supported; "
                f"supported are {', '.join(SUPPORTED_TYPES)}"
            )
        from kvern_engine.loading.gguf_tensors import dequantize

        return dequantize(self._map, info, part or WeightPart.whole(*info.shape))
