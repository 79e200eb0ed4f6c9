"""The folder that holds fetched models, and what is complete in it.

    models/SLUG/refs/@REVISION        the version that a branch, tag or bucket's folder was when it was fetched
    models/SLUG/snapshots/VERSION/    a complete model; it appears by a rename and is never changed
    models/SLUG/partial/VERSION/      one that is being fetched: finished files, and NAME.part
    .kvern/                           the lock and the marks of who uses what (lock.py, uses.py)

A folder without its manifest, or with a file of another size, is no model. Nothing here downloads.
"""

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvern_engine.fetching.files import Digest, Listing, ref_name, slug

MANIFEST = ".kvern.json"
PART = ".part"


@dataclass(frozen=True)
class Snapshot:
    """A complete model in the store. `size` in bytes, `published` in seconds of the file system's clock."""

    path: Path
    uri: str
    size: int
    published: float


def endpoint_of(uri: str) -> str:
    """The server that makes an address another one: two S3 servers differ, the hub's mirrors hold what it holds."""
    if not uri.startswith("s3://"):
        return ""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""


class Store:
    """A folder of models. Methods that change it are for whoever holds the lock."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.hidden = root / ".kvern"

    def folder(self, uri: str) -> Path:
        """Everything of one address."""
        return self.root / "models" / slug(uri, endpoint_of(uri))

    def partial(self, listing: Listing) -> Path:
        """Where the files of a listing are gathered."""
        return self.folder(listing.uri) / "partial" / listing.version

    def place(self, listing: Listing) -> Path:
        """Where they lie once all are there."""
        return self.folder(listing.uri) / "snapshots" / listing.version

    # ------------------------------------------------------------ looking

    def find(self, uri: str, revision: str | None) -> Path | None:
        """The complete model that an address was when it was fetched; None where there is none."""
        folder = self.folder(uri)
        try:
            version = (folder / "refs" / ref_name(revision)).read_text().strip()
        except OSError:
            version = revision or ""  # a commit names itself
        if not version.isalnum():
            return None
        path = folder / "snapshots" / version
        return path if self.complete(path) else None

    def complete(self, path: Path) -> bool:
        """Whether a snapshot has all its files, each of its size."""
        manifest = _manifest(path)
        if manifest is None:
            return False
        try:
            return all((path / file["name"]).stat().st_size == file["size"] for file in manifest["files"])
        except OSError:
            return False

    def size(self, path: Path) -> int:
        """Bytes of a snapshot's files; 0 where it is none."""
        manifest = _manifest(path)
        return sum(int(file["size"]) for file in manifest["files"]) if manifest else 0

    def snapshots(self) -> list[Snapshot]:
        """All models, damaged ones too: they take room."""
        found = []
        for path in sorted(self.root.glob("models/*/snapshots/*")):
            manifest = _manifest(path)
            if manifest is not None:
                with contextlib.suppress(OSError):
                    found.append(Snapshot(path, str(manifest["uri"]), self.size(path), path.stat().st_mtime))
        return found

    def partials(self) -> list[Path]:
        """Downloads that have begun and not ended."""
        return sorted(self.root.glob("models/*/partial/*"))

    def used_bytes(self) -> int:
        """What lies in the folder, in bytes, whoever put it there."""
        return tree_bytes(self.root)

    # ------------------------------------------------------------ changing

    def publish(self, listing: Listing) -> Path:
        """Make a gathered model one that is found, at once and as a whole."""
        partial, target = self.partial(listing), self.place(listing)
        files = [{"name": f.name, "size": f.size, **_digest_entry(f.digest), "etag": f.etag} for f in listing.files]
        manifest = {"uri": listing.uri, "version": listing.version, "files": files}
        write_atomically(partial / MANIFEST, json.dumps(manifest, indent=1))
        _sync(partial)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():  # damaged: a complete one would have been found
            self.remove(target)
        partial.rename(target)
        _sync(target.parent)
        with contextlib.suppress(OSError):
            partial.parent.rmdir()
        return target

    def remember(self, listing: Listing, revision: str | None) -> None:
        """From now on the revision means this version."""
        write_atomically(self.folder(listing.uri) / "refs" / ref_name(revision), listing.version)

    def set_aside(self, path: Path) -> Path:
        """Take a folder out of sight. Returns where it is now; `bring_back` or `remove` it."""
        aside = self.hidden / f"trash-{uuid.uuid4().hex}"
        self.hidden.mkdir(parents=True, exist_ok=True)
        path.rename(aside)
        return aside

    def bring_back(self, aside: Path, path: Path) -> None:
        """Undo `set_aside`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.rename(path)

    def remove(self, path: Path) -> None:
        """Delete a folder; what reads its files goes on reading them where the file system allows it."""
        aside = path if path.parent == self.hidden else self.set_aside(path)
        shutil.rmtree(aside, ignore_errors=True)
        with contextlib.suppress(OSError):
            path.parent.rmdir()

    def sweep(self) -> None:
        """Delete what somebody was deleting when they were killed."""
        for aside in self.hidden.glob("trash-*"):
            shutil.rmtree(aside, ignore_errors=True)


def _digest_entry(digest: Digest | None) -> dict[str, str]:
    return {digest.algorithm: digest.value} if digest else {}


def _manifest(path: Path) -> dict[str, Any] | None:
    """What `publish` wrote; None where that is not what lies there."""
    try:
        found = json.loads((path / MANIFEST).read_text())
        whole = all(isinstance(file["name"], str) and isinstance(file["size"], int) for file in found["files"])
        return found if whole and isinstance(found["uri"], str) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def tree_bytes(folder: Path) -> int:
    """Bytes of all files in a folder; what goes away meanwhile does not count."""
    total = 0
    for path in _walk(folder):
        with contextlib.suppress(OSError):
            total += path.lstat().st_size
    return total


def _walk(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        yield from (Path(parent) / name for name in names)


def write_atomically(path: Path, text: str) -> None:
    """Others see the old text or the new one, never a part. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _sync(folder: Path) -> None:
    """A rename outlives a crash of the node only once its folder is on disk; not every file system can say so."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
