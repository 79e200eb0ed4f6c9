"""Parses the header of one GGUF file (versions 2 and 3, little-endian): metadata and tensor table.

A header is untrusted: every length and count is compared with what the file still holds, and with limits that no model
comes near, before anything of that size is made. What several files of a split model are together, and how tensors are
read, stands in `gguf.py`.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import itertools
import math
import mmap
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, str] = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}  # as in `struct`
_MAX_DIMS = 4
_MAX_ARRAY_DEPTH = 4
_MAX_HEADER_BYTES = 1 << 29  # metadata and tensor table; those of the largest vocabularies have 20 MB
_MAX_VALUES = 1 << 23  # in all arrays of a file together; a vocabulary of 260,000 tokens has 1.3 million
_LEAST_KEY, _LEAST_TENSOR = 13, 24  # bytes that an entry takes at least
_MAP_NORESERVE = 0x4000  # Linux; the module mmap has no name for it
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

# Every type that files in the wild use, so that an error can name the one that is not supported.
TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip

# Types that can be dequantized (`gguf_blocks.py`): elements in a block, bytes a block.
BLOCKS: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_NL": (32, 18),
}
SUPPORTED_TYPES = tuple(BLOCKS)


class GGUFError(ValueError):
    """The file is not a GGUF file that Kvern can read; the text says where and why."""


@dataclass(frozen=True)
class TensorInfo:
    """One entry of the tensor table. `shape` is row-major (the slowest dimension first, as in torch), `offset` is in
    bytes from the start of the file; `nbytes` is 0 for types that cannot be dequantized. `part` counts the files of a
    split model."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    nbytes: int
    part: int = 0


class _Cursor:
    """Reads scalars, strings and arrays off the header, and refuses to run past the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.size = len(data)
        self.path = path
        self.pos = 0
        self.values = 0  # in arrays, so far

    def truncated(self, what: str, end: int) -> GGUFError:
        return GGUFError(
            f"{self.path}: truncated GGUF file: {what} ends at byte {end:,}, but the file has {self.size:,}; "
            "download it again"
        )

    def check_room(self, nbytes: int, what: str) -> int:
        """The position `nbytes` further on, which lies in the file and in what a header may be."""
        end = self.pos + nbytes
        if end > self.size:
            raise self.truncated(what, end)
        if end > _MAX_HEADER_BYTES:
            raise GGUFError(
                f"{self.path}: {what} ends at byte {end:,}; a header has at most {_MAX_HEADER_BYTES:,}: is the file "
                "damaged?"
            )
        return end

    def check_count(self, count: int, least: int, what: str) -> None:
        """`count` array items of at least `least` bytes each fit; all of them together are not too many."""
        self.check_room(count * least, what)
        self.values += count
        if self.values > _MAX_VALUES:
            raise GGUFError(
                f"{self.path}: {what} has {count:,} items; all metadata together may have {_MAX_VALUES:,}: is the file "
                "damaged?"
            )

    def _advance(self, nbytes: int, what: str) -> int:
        start, self.pos = self.pos, self.check_room(nbytes, what)
        return start

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.data, self._advance(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.data, self._advance(8, what))[0])

    def string(self, what: str) -> str:
        start = self._advance(self.u64(what), what)
        raw = self.data[start : self.pos]
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise GGUFError(f"{self.path}: {what} is not valid UTF-8: {raw[:40]!r}") from error

    def strings(self, count: int, what: str) -> list[str]:
        """`count` strings in a row: the hot loop of a vocabulary (300,000 of them in large files)."""
        self.check_count(count, 8, what)
        data, pos, unpack = self.data, self.pos, _U64.unpack_from
        size = min(self.size, _MAX_HEADER_BYTES)
        out: list[str] = []
        append = out.append
        try:
            for _ in range(count):
                start = pos + 8
                pos = start + unpack(data, pos)[0]
                if pos > size:
                    self.pos = start
                    self.check_room(pos - start, f"entry {len(out)} of {what}")
                append(str(data[start:pos], "utf-8"))
        except UnicodeDecodeError as error:
            raise GGUFError(
                f"{self.path}: entry {len(out)} of {what} is not valid UTF-8: {data[start : min(pos, start + 40)]!r}"
            ) from error
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
        if type_id != _ARRAY:
            raise GGUFError(f"{self.path}: {what} has unknown value type {type_id}; is the file damaged?")
        if depth >= _MAX_ARRAY_DEPTH:
            raise GGUFError(f"{self.path}: {what} has arrays more than {_MAX_ARRAY_DEPTH} deep; is the file damaged?")
        item_type, count = self.u32(what), self.u64(what)
        if item_type == _STRING:
            return self.strings(count, what)
        if item_type in _SCALARS:
            self.check_count(count, struct.calcsize(_SCALARS[item_type]), what)
            return self.scalars(_SCALARS[item_type], count, what)
        self.check_count(count, 12, what)
        return [self.value(item_type, what, depth + 1) for _ in range(count)]


class Header:
    """One mapped file: `metadata` maps keys to values, `tensors` names to `TensorInfo` (of part `number`).

    Raises GGUFError (not GGUF, wrong version, truncated, damaged) and OSError (cannot be opened).
    """

    def __init__(self, path: Path, number: int = 0) -> None:
        self.path, self._number = path, number
        self.data = _open(path)
        cursor = _Cursor(self.data, path)
        self.version = _check_magic(cursor)
        tensor_count, value_count = cursor.u64("the header"), cursor.u64("the header")
        cursor.check_room(tensor_count * _LEAST_TENSOR, f"the table of {tensor_count:,} tensors")
        cursor.check_room(value_count * _LEAST_KEY, f"the metadata of {value_count:,} keys")
        self.metadata: dict[str, Any] = {}
        for _ in range(value_count):
            key = cursor.string("a metadata key")
            if key in self.metadata:
                raise GGUFError(f"{path}: the metadata key {key!r} stands twice in the file; is it damaged?")
            self.metadata[key] = cursor.value(cursor.u32(key), key)
        self.tensors = self._read_tensor_table(cursor, tensor_count)
        self._check_overlaps()

    def _read_tensor_table(self, cursor: _Cursor, count: int) -> dict[str, TensorInfo]:
        entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(count):
            name = cursor.string("a tensor name")
            if name in entries:
                raise GGUFError(f"{self.path}: tensor {name!r} stands twice in the table; is the file damaged?")
            what = f"the entry of tensor {name!r}"
            dims = cursor.u32(what)
            if dims > _MAX_DIMS:
                raise GGUFError(f"{self.path}: tensor {name!r} has {dims} dimensions; at most {_MAX_DIMS} are allowed")
            shape = tuple(cursor.u64(what) for _ in range(dims))[::-1]
            if 0 in shape:
                raise GGUFError(f"{self.path}: tensor {name!r} has the shape {list(shape)}: no dimension may be 0")
            entries[name] = (shape, cursor.u32(what), cursor.u64(what))
        alignment = self._alignment()
        data_start = -(-cursor.pos // alignment) * alignment
        return {
            name: self._tensor_info(cursor, name, shape, type_id, offset, alignment, data_start)
            for name, (shape, type_id, offset) in entries.items()
        }

    def _alignment(self) -> int:
        value = self.metadata.get("general.alignment", 32)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1 or value & (value - 1):
            raise GGUFError(f"{self.path}: general.alignment must be a power of two above 0, got {value!r}")
        return value

    def _tensor_info(
        self,
        cursor: _Cursor,
        name: str,
        shape: tuple[int, ...],
        type_id: int,
        offset: int,
        alignment: int,
        data_start: int,
    ) -> TensorInfo:
        type_name = TYPE_NAMES.get(type_id, f"type {type_id}")
        if offset % alignment:
            raise GGUFError(
                f"{self.path}: tensor {name!r} lies at offset {offset:,}, which is no multiple of the alignment "
                f"({alignment}); is the file damaged?"
            )
        nbytes = 0
        if type_name in BLOCKS:
            block, size = BLOCKS[type_name]
            if block > 1 and (not shape or shape[-1] % block):
                raise GGUFError(
                    f"{self.path}: tensor {name!r} has rows of {shape[-1] if shape else 1} elements; "
                    f"{type_name} needs a multiple of {block}"
                )
            nbytes = math.prod(shape) // block * size
        if data_start + offset + nbytes > cursor.size:
            raise cursor.truncated(f"tensor {name!r}", data_start + offset + nbytes)
        return TensorInfo(name, shape, type_name, data_start + offset, nbytes, self._number)

    def _check_overlaps(self) -> None:
        in_order = sorted(self.tensors.values(), key=lambda info: (info.offset, info.nbytes))
        for first, second in itertools.pairwise(in_order):
            if first.offset + first.nbytes > second.offset:
                raise GGUFError(
                    f"{self.path}: tensors {first.name!r} (to byte {first.offset + first.nbytes:,}) and "
                    f"{second.name!r} (from byte {second.offset:,}) overlap; is the file damaged?"
                )


def _open(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        if file.seek(0, 2) < 8:
            raise GGUFError(f"{path}: not a GGUF file: it has only {file.tell()} bytes")
        # Copy-on-write: torch wants writable memory, the file stays as it is. Nothing is written, so no memory is to be
        # set aside for it: Linux refuses to map a file larger than the machine's memory otherwise.
        how = mmap.MAP_PRIVATE | (_MAP_NORESERVE if sys.platform == "linux" else 0)
        try:
            return mmap.mmap(file.fileno(), 0, flags=how, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as e:
            raise GGUFError(f"{path}: this file of {file.tell():,} bytes cannot be mapped into memory: {e}") from None


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
