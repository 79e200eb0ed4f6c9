"""What a source of models can do, and which one an address has."""

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvern_engine.fetching.files import Listing, RemoteFile, parse_place


@dataclass(frozen=True)
class Stream:
    """The bytes of a file from `start` on: 0 where the source does not resume."""

    start: int
    chunks: Iterator[bytes]


class Source(Protocol):
    """Both methods raise SourceError where asking again will not do, else PassingError."""

    def listing(self, revision: str | None) -> Listing:
        """What is to be fetched."""

    def open(self, file: RemoteFile, offset: int) -> AbstractContextManager[Stream]:
        """A file's content from `offset` on, and never that of another version of it."""

    def close(self) -> None:
        """Give connections back."""


def source_of(uri: str, environ: Mapping[str, str] | None = None) -> Source:
    """The source of an hf:// or s3:// address. Raises ValueError for a malformed one."""
    environ, place = os.environ if environ is None else environ, parse_place(uri)
    if place.scheme == "s3":
        from kvern_engine.fetching.s3 import Bucket

        return Bucket(uri, place)
    from kvern_engine.fetching.hub import Hub

    return Hub(uri, place, environ.get("HF_ENDPOINT") or "https://huggingface.co", hub_token(environ))


def hub_token(environ: Mapping[str, str]) -> str:
    """The token that Hugging Face's own tools would use, "" where there is none."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if token := environ.get(name, "").strip():
            return token
    home = environ.get("HF_HOME") or str(Path(environ.get("HOME") or "/") / ".cache" / "huggingface")
    try:
        return Path(environ.get("HF_TOKEN_PATH") or Path(home).expanduser() / "token").read_text().strip()
    except OSError:
        return ""
