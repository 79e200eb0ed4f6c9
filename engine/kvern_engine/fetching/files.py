"""What lies at a source and which of it a model needs. Pure.

Names come from a server: only such as are plain file names, or lie in the one folder that models have, are ever taken.
"""

import hashlib
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote

from kvern_engine.loading.gguf_split import split_name

# Of a model's folder: configuration, tokenizer, templates. Code (.py) is never run, and so never fetched.
_SMALL = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_PLAIN = re.compile(r"(additional_chat_templates/)?[A-Za-z0-9_][\w.+=@-]{0,200}", re.ASCII)
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


@dataclass(frozen=True)
class Digest:
    """`value` in hex. git-sha1 is that of a git blob: of "blob SIZE\\0" and the content."""

    algorithm: Literal["sha256", "git-sha1"]
    value: str

    def new(self, size: int) -> Any:
        """A hash of hashlib to feed the content to."""
        if self.algorithm == "sha256":
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)


@dataclass(frozen=True)
class RemoteFile:
    """A file at the source; `size` in bytes. `digest` None: the source tells none, and size and `etag` have to do."""

    name: str
    size: int
    digest: Digest | None = None
    etag: str = ""


@dataclass(frozen=True)
class Listing:
    """What is to be fetched. `version` names the content: a commit, or a hash of what a bucket lists."""

    uri: str
    version: str
    files: tuple[RemoteFile, ...]

    @property
    def size(self) -> int:
        """All files together, in bytes."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True)
class Place:
    """An hf:// or s3:// address taken apart. `root`: org/name, or the bucket. `folder`: the prefix in the bucket, ""
    for a repository. `file`: the .gguf file that is meant, "" for the whole model."""

    scheme: Literal["hf", "s3"]
    root: str
    folder: str
    file: str

    @property
    def name(self) -> str:
        """What clients may call the model."""
        if self.file:
            parts = split_name(self.file)
            return parts[0] if parts else self.file.removesuffix(".gguf")
        return self.root if self.scheme == "hf" else (self.folder or self.root).rpartition("/")[2]


def is_remote(spec: str) -> bool:
    """Whether it is an address that is fetched from."""
    return spec.startswith(("hf://", "s3://"))


def parse_place(uri: str) -> Place:
    """Takes an hf:// or s3:// address apart. Raises ValueError with what is right."""
    scheme, _, rest = uri.partition("://")
    rest = rest.strip("/")
    head, _, last = rest.rpartition("/")
    file = last if last.lower().endswith(".gguf") else ""
    if scheme == "hf":
        root = head if file and head.count("/") == 1 else rest
        if not _HUB_ID.fullmatch(root):
            raise ValueError(f"model '{uri}': expected hf://org/name, or hf://org/name/FILE.gguf")
        return Place("hf", root, "", file if root == head else "")
    bucket, _, folder = (head if file else rest).partition("/")
    if not _BUCKET.fullmatch(bucket) or (file and not head):
        raise ValueError(f"model '{uri}': expected s3://bucket/folder, or s3://bucket/folder/FILE.gguf")
    return Place("s3", bucket, folder, file)


def slug(uri: str, endpoint: str = "") -> str:
    """The name of the folder that stands for an address: readable, and different for different addresses."""
    exact = uri.strip("/") + (f"\n{endpoint}" if endpoint else "")
    readable = re.sub(r"[^A-Za-z0-9._-]+", "--", uri.strip("/").replace("://", "--"))[:100]
    return f"{readable}-{hashlib.sha256(exact.encode()).hexdigest()[:8]}"


def ref_name(revision: str | None) -> str:
    """The file that remembers what a branch or tag was: no separator of folders is left in it."""
    return "@" + quote(revision or "main", safe="")


def version_of(files: Iterable[RemoteFile]) -> str:
    """A name for the content of a bucket's folder: the same as long as names, sizes and etags are."""
    lines = sorted(f"{file.name}\t{file.size}\t{file.etag}" for file in files)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:40]


def choose(names: Collection[str], file: str = "") -> list[str]:
    """The files to fetch of those at the source, sorted. Raises ValueError, whose text says what is there instead.

    Safetensors come with everything small; where there are none, a single GGUF model (all its parts) does. `file` is
    the .gguf file that was asked for.
    """
    plain = sorted(name for name in set(names) if _PLAIN.fullmatch(name) and ".." not in name)
    ggufs = _models(name for name in plain if name.lower().endswith(".gguf"))
    if file:
        wanted = next((parts for parts in ggufs if file in parts), None)
        if wanted is None:
            raise ValueError(f"there is no file {file}; {_there_is(plain, ggufs)}")
        return wanted
    safetensors = [name for name in plain if name.endswith(".safetensors") and "/" not in name]
    if any(not name.startswith("consolidated") for name in safetensors):
        # The same weights once more, as their makers' own code reads them.
        safetensors = [name for name in safetensors if not name.startswith("consolidated")]
    if safetensors:
        return sorted([*safetensors, *(name for name in plain if name.endswith(_SMALL))])
    if len(ggufs) == 1:
        return ggufs[0]
    if ggufs:
        raise ValueError(f"it holds several GGUF models; add one to the address: {_some([p[0] for p in ggufs])}")
    raise ValueError(f"there are neither .safetensors nor .gguf files; {_there_is(plain, ggufs)}")


def _models(names: Iterable[str]) -> list[list[str]]:
    """GGUF files by model: the parts of a split one belong together."""
    found: dict[str, list[str]] = {}
    for name in names:
        parts = split_name(name)
        found.setdefault(f"{parts[0]} {parts[2]}" if parts else name, []).append(name)
    return list(found.values())


def _there_is(names: list[str], ggufs: list[list[str]]) -> str:
    if ggufs:
        return f"there are {_some([parts[0] for parts in ggufs])}"
    pickled = [name for name in names if name.endswith(_PICKLED)]
    if pickled:
        return f"there is {pickled[0]}, which may hold code; convert it to safetensors"
    return f"there are {_some(names)}" if names else "it is empty"


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def human_bytes(count: float) -> str:
    """1.5 GB, 23 MB: powers of ten, as disks and downloads are measured."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= limit:
            digits = count / limit
            return f"{digits:.1f} {unit}" if digits < 100 else f"{digits:.0f} {unit}"
    return f"{count:.0f} B"
