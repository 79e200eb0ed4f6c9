"""A model in GGUF: one file, or the files that it is split into, as one set of metadata and tensors.

Files are mapped, never read whole. The API server reads a tokenizer from them with neither torch nor NumPy:
`gguf_tensors.py`, which turns tensors into NumPy arrays, is loaded with the first of them. What the metadata means for
Kvern stands elsewhere: shapes in `gguf_config.py`, Hugging Face names in `gguf_names.py`, the vocabulary in
`gguf_tokenizer.py`. Writing GGUF files is not offered.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvern_engine.loading.gguf_header import BLOCKS, SUPPORTED_TYPES, GGUFError, Header, TensorInfo
from kvern_engine.loading.gguf_split import split_name
from kvern_engine.loading.parts import WeightPart

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["BLOCKS", "SUPPORTED_TYPES", "GGUFError", "GGUFFile", "TensorInfo"]

_MAX_PARTS = 4096


class GGUFFile:
    """A mapped GGUF model. `metadata` maps keys to values; `tensors` maps names to `TensorInfo`.

    Of a split model any part may be given: `path` is that of the first, which holds the metadata.
    Raises GGUFError (not GGUF, wrong version, truncated, damaged, a part missing) and OSError (cannot be opened).
    """

    def __init__(self, path: Path | str) -> None:
        first = Header(Path(path))
        if _split_count(first) > 1 and _split_number(first):
            first = Header(_part_path(first, 0))
        self.path, self.version, self.metadata = first.path, first.version, first.metadata
        self._parts = [first, *_other_parts(first)]
        self.tensors: dict[str, TensorInfo] = {}
        for part in self._parts:
            for name, info in part.tensors.items():
                if name in self.tensors:
                    other = self._parts[self.tensors[name].part]
                    raise GGUFError(f"{part.path}: tensor {name!r} stands in {other.path.name} too")
                self.tensors[name] = info
        claimed = self.metadata.get("split.tensors.count")
        if len(self._parts) > 1 and claimed is not None and claimed != len(self.tensors):
            raise GGUFError(
                f"{self.path}: its {len(self._parts)} parts hold {len(self.tensors)} tensors, but split.tensors.count "
                f"is {claimed}; download them again"
            )

    def require_supported(self, name: str) -> TensorInfo:
        """The entry of tensor `name`; raises GGUFError where it is of a type that cannot be dequantized."""
        info = self.tensors[name]
        if info.type_name not in BLOCKS:
            raise GGUFError(
                f"{self._parts[info.part].path}: tensor {name!r} is stored as {info.type_name}, which is not "
                f"supported; supported are {', '.join(SUPPORTED_TYPES)}"
            )
        return info

    def dequantize(self, name: str, part: WeightPart | None = None) -> "npt.NDArray[np.float32]":
        """Tensor `name`, or a part of it, as float32 of its row-major shape. F32 tensors are views of the mapped file
        (copy-on-write); all others are fresh arrays. Of a part, nothing else is read but the rest of the quantization
        blocks that it begins or ends in.

        Raises KeyError for an unknown name, GGUFError for a type that Kvern does not read.
        """
        info = self.require_supported(name)
        from kvern_engine.loading.gguf_tensors import dequantize

        return dequantize(self._parts[info.part].data, info, part or WeightPart.whole(*info.shape))


def _split_count(part: Header) -> int:
    count: Any = part.metadata.get("split.count", 0)
    if not isinstance(count, int) or not 0 <= count <= _MAX_PARTS:
        raise GGUFError(f"{part.path}: split.count must be a number of files up to {_MAX_PARTS}, got {count!r}")
    return count


def _split_number(part: Header) -> int:
    number: Any = part.metadata.get("split.no", 0)
    if not isinstance(number, int) or not 0 <= number < max(1, _split_count(part)):
        raise GGUFError(f"{part.path}: split.no must be below split.count ({_split_count(part)}), got {number!r}")
    return number


def _part_path(part: Header, index: int) -> Path:
    named, count = split_name(part.path.name), _split_count(part)
    if named is None or named[2] != count:
        raise GGUFError(
            f"{part.path}: it is a part of a model in {count} files, which are found by their names; "
            f"it must be called NAME-{1 + _split_number(part):05}-of-{count:05}.gguf"
        )
    path = part.path.with_name(f"{named[0]}-{index + 1:05}-of-{count:05}{part.path.suffix}")
    if not path.is_file():
        raise GGUFError(f"{part.path}: the model has {count} files and {path.name} is missing; download it too")
    return path


def _other_parts(first: Header) -> list[Header]:
    count = _split_count(first)
    paths = [_part_path(first, index) for index in range(count)][1:]  # all are looked for before any is read
    parts = [Header(path, index) for index, path in enumerate(paths, start=1)]
    for index, part in enumerate(parts, start=1):
        if part.metadata.get("split.no") != index or part.metadata.get("split.count") != count:
            raise GGUFError(
                f"{part.path}: its split.no and split.count are {part.metadata.get('split.no')!r} and "
                f"{part.metadata.get('split.count')!r}; they must be {index} and {count}: is it of another model?"
            )
    return parts
