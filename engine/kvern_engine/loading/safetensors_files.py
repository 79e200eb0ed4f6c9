"""The safetensors files of a folder and what their headers say: names, shapes, types, places; no torch, no tensor is
read.

Everything is checked against the files' sizes before it is believed: a header that lies about a length, a shape or a
place is refused with the file and the tensor named, in memory bounded by the limits below. Format:
https://huggingface.co/docs/safetensors
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

MOST_HEADER_BYTES = 100_000_000  # the format's own limit
MOST_TENSORS = 250_000  # in a file; a mixture of 128 experts over 94 layers has 36,000 in all its files together
MOST_INDEX_BYTES = 64 << 20
_MOST_DIMENSIONS = 8
_MOST_SIZE = 1 << 48  # of a dimension
NAMES_IN_ERROR = 4

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.safetensors")

# Bits an element, of every type of the format.
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


class WeightsError(ValueError):
    """A checkpoint is damaged or does not hold the tensors that the model needs; the text names file and tensor."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a checkpoint: in `file`, of `shape` (row-major), stored as `dtype` (the format's name of it), which
    takes `nbytes`."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


_header_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_entry_decoder = msgspec.json.Decoder(_Entry)


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor in the safetensors files of `folder` by its own name. Raises WeightsError where a file is missing or
    damaged, where two files hold the same tensor, or where the index does not fit the files."""
    named = _weight_map(folder)
    found: dict[str, StoredTensor] = {}
    for shard in safetensors_shards(folder):
        for name, tensor in read_header(shard).items():
            other = found.setdefault(name, tensor)
            if other is not tensor:
                raise WeightsError(
                    f"{folder}: tensor {_name(name)} is in two files, {other.file.name} and {shard.name}; delete the "
                    "file that does not belong to the model"
                )
    for name, place in named.items():
        if name not in found:
            raise WeightsError(
                f"{folder / place}: tensor {_name(name)} is missing, which {INDEX} says is in this file; download both "
                "again"
            )
        if found[name].file.name != Path(place).name:
            raise WeightsError(
                f"{folder}: tensor {_name(name)} is in {found[name].file.name}; {INDEX} says it is in {place}: "
                "download both again"
            )
    return found


def safetensors_shards(folder: Path) -> list[Path]:
    """The .safetensors files of a folder: those that its index names, else model.safetensors, else all. Raises
    WeightsError."""
    named = set(_weight_map(folder).values())
    if named:
        return _present(folder, sorted(named), INDEX)
    single = folder / SINGLE
    shards = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not shards:
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        hint = (
            f"; {some(pickled)} may hold pickled code and are not read: convert them to safetensors" if pickled else ""
        )
        raise WeightsError(f"{folder}: no .safetensors file{hint}")
    numbered = [match for match in (_NUMBERED.fullmatch(path.name) for path in shards) if match]
    if len(numbered) == len(shards):
        first = numbered[0]
        count = min(int(first["count"]), 10_000)
        names = [f"{first['stem']}-{i:05}-of-{first['count']}.safetensors" for i in range(1, count + 1)]
        return _present(folder, sorted({*names, *(path.name for path in shards)}), "their numbers")
    return shards


def _present(folder: Path, names: list[str], by: str) -> list[Path]:
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise WeightsError(
            f"{folder}: {len(missing)} of {len(names)} shards named by {by} are missing: {some(missing)}; download the "
            "model again"
        )
    return [folder / name for name in names]


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor -> file name of the folder's index; empty where it has none. Raises WeightsError for a file elsewhere."""
    path = folder / INDEX
    if not path.is_file():
        return {}
    size = path.stat().st_size
    if size > MOST_INDEX_BYTES:
        raise WeightsError(f"{path}: has {size:,} bytes; at most {MOST_INDEX_BYTES:,} are read of an index")
    try:
        named = msgspec.json.decode(path.read_bytes(), type=_Index).weight_map
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise WeightsError(
            f"{path}: must be a JSON object whose weight_map names the file of each tensor: {error}"
        ) from error
    if not named:
        raise WeightsError(f"{path}: weight_map is empty; download it again")
    for name, place in named.items():
        # By the text alone: files of the hub's cache are links that leave the folder.
        inside = place.endswith(".safetensors") and not place.startswith("/") and ".." not in Path(place).parts
        if not inside or "\\" in place or "\0" in place:
            raise WeightsError(
                f"{path}: weight_map.{_name(name)} must be a .safetensors file of this folder, got {_name(place)}"
            )
    return named


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file: 8 bytes of length (little-endian), that many bytes of JSON, then the data, which the
    tensors fill without gaps. Raises WeightsError."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(9)
        length = int.from_bytes(start[:8], "little")
        if not 2 <= length <= min(size - 8, MOST_HEADER_BYTES) or start[8:] != b"{":
            raise WeightsError(
                f"{path}: not a safetensors file or truncated ({size:,} bytes, {length:,} bytes of header); "
                "download it again"
            )
        header = b"{" + file.read(length - 1)
    tensors = _entries(path, header)
    _check_places(path, tensors, size - 8 - length)
    return {
        name: StoredTensor(path, tuple(entry.shape), entry.dtype, entry.data_offsets[1] - entry.data_offsets[0])
        for name, entry in tensors.items()
    }


def _entries(path: Path, header: bytes) -> dict[str, _Entry]:
    if header.count(b"{") > MOST_TENSORS + 2 or header.count(b":") > 16 * MOST_TENSORS:
        raise WeightsError(f"{path}: the safetensors header describes more than {MOST_TENSORS:,} tensors")
    try:
        raw = _header_decoder.decode(header)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise WeightsError(f"{path}: the safetensors header is damaged: {error}") from error
    raw.pop("__metadata__", None)
    entries = {}
    for name, content in raw.items():
        try:
            entry = entries[name] = _entry_decoder.decode(content)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise WeightsError(f"{path}: tensor {_name(name)}: the header is damaged: {error}") from error
        if len(entry.shape) > _MOST_DIMENSIONS or not all(0 <= size <= _MOST_SIZE for size in entry.shape):
            raise WeightsError(f"{path}: tensor {_name(name)} has an impossible shape: {_shape(entry.shape)}")
        if entry.dtype not in _BITS:
            raise WeightsError(f"{path}: tensor {_name(name)} is of the unknown type {_name(entry.dtype)}")
    return entries


def _check_places(path: Path, tensors: dict[str, _Entry], data: int) -> None:
    """Each tensor takes as many bytes as its shape says, and all of them fill the `data` bytes in order."""
    at = 0
    for name, entry in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        nbytes, odd = divmod(math.prod(entry.shape) * _BITS[entry.dtype], 8)
        if odd or end - begin != nbytes:
            raise WeightsError(
                f"{path}: tensor {_name(name)} has {end - begin:,} bytes; {_shape(entry.shape)} of {entry.dtype} takes "
                f"{nbytes:,}"
            )
        if begin != at:
            what = "overlaps the tensor before it" if begin < at else "leaves a gap before it"
            raise WeightsError(
                f"{path}: tensor {_name(name)} {what}: it begins at byte {begin:,} of the data instead of {at:,}"
            )
        at = end
        if at > data:
            raise WeightsError(
                f"{path}: truncated: tensor {_name(name)} ends at byte {at:,} of the data, the file has {data:,}; "
                "download it again"
            )
    if at != data:
        raise WeightsError(f"{path}: the tensors end at byte {at:,} of the data, the file has {data:,}; is it damaged?")


def some(names: Iterable[str]) -> str:
    """The first few of `names`, and how many more there are."""
    names = list(names)
    rest = len(names) - NAMES_IN_ERROR
    text = ", ".join(_name(name) for name in names[:NAMES_IN_ERROR])
    return f"{text} and {rest:,} more" if rest > 0 else text


def _shape(shape: Iterable[int]) -> str:
    sizes = list(shape)
    return "[" + ", ".join(map(str, sizes[: _MOST_DIMENSIONS + 1])) + (", ...]" if len(sizes) > 9 else "]")


def _name(name: str) -> str:
    """A name out of a file, as an error may show it: printable, and not longer than names are."""
    text = "".join(c if c.isprintable() else "?" for c in name[:160])
    return text if len(name) <= 160 else f"{text}... ({len(name):,} characters)"
