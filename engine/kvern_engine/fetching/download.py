"""The files of a listing -> a folder: several at once, resumed where they broke off, checked against their digests.

A file is NAME.part until its last byte is checked and on disk. What is left of a killed run is used: finished files as
they are, a part after its bytes have gone through the digest again. A part that is begun anew is a new file, so that
one who was taken for dead and still writes does so into the old one.
"""

import errno
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from kvern_engine.fetching.errors import PassingError, SourceError
from kvern_engine.fetching.files import Listing, RemoteFile, human_bytes
from kvern_engine.fetching.lock import LockLostError
from kvern_engine.fetching.meter import Meter
from kvern_engine.fetching.source import Source
from kvern_engine.fetching.store import PART

T = TypeVar("T")

AT_ONCE = 4
_CHUNK = 1 << 20
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Patience:
    """A download is given up after `tries` failures in a row without a byte between them; the wait before the next try
    doubles from `first` to `longest` seconds."""

    tries: int = 7
    first: float = 1.0
    longest: float = 30.0

    def pause(self, failures: int, asked: float | None) -> float:
        """Seconds to wait after so many failures in a row; `asked`: what the server wants."""
        return asked if asked is not None else min(self.first * 2 ** (failures - 1), self.longest)


class StoppedError(Exception):
    """Another file has failed, or somebody wants it to end."""


def present_bytes(listing: Listing, folder: Path) -> int:
    """What is here of a listing, finished files and parts."""
    total = 0
    for file in listing.files:
        for path in (folder / file.name, folder / (file.name + PART)):
            try:
                total += min(path.stat().st_size, file.size)
                break
            except OSError:
                continue
    return total


def fetch_files(
    source: Source,
    listing: Listing,
    folder: Path,
    meter: Meter,
    lost: Callable[[], bool],
    patience: Patience | None = None,
) -> None:
    """Bring all files of a listing into `folder`. `lost` says that another one has taken over.

    Raises SourceError, LockLostError and OSError (of the disk, but for a full one, which is a SourceError).
    """
    folder.mkdir(parents=True, exist_ok=True)
    _forget_others(listing, folder)
    meter.expect(present_bytes(listing, folder), listing.size)
    stop = threading.Event()
    job = _Job(source, listing, folder, meter, lost, stop, patience or Patience())
    # The largest first: the end then waits for none of them alone.
    files = sorted(listing.files, key=lambda file: -file.size)
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="fetch") as pool:
        futures = [pool.submit(job.fetch, file) for file in files]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()  # also where a signal ends the wait
    failures = [error for future in done if (error := future.exception()) is not None]
    real = [error for error in failures if not isinstance(error, StoppedError)]
    for error in real or failures:
        raise error
    for future in futures:
        future.result()


def _forget_others(listing: Listing, folder: Path) -> None:
    """Files that are no longer part of what is wanted, of an older version of this program."""
    names = {file.name for file in listing.files}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and str(path.relative_to(folder)).removesuffix(PART) not in names:
            path.unlink()


class _Job:
    """What the threads share."""

    def __init__(
        self,
        source: Source,
        listing: Listing,
        folder: Path,
        meter: Meter,
        lost: Callable[[], bool],
        stop: threading.Event,
        patience: Patience,
    ) -> None:
        self._source, self._listing, self._folder, self._meter = source, listing, folder, meter
        self._lost, self._stop, self._patience = lost, stop, patience

    def fetch(self, file: RemoteFile) -> None:
        """One file, until it is here or there is no hope."""
        target, part = self._folder / file.name, self._folder / (file.name + PART)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            if target.stat().st_size == file.size:
                return
            self._meter.add(-min(target.stat().st_size, file.size))
            target.unlink()
        failures = corrupt = restarts = 0
        while True:
            before = part.stat().st_size if part.exists() else 0
            try:
                if self._once(file, part):
                    break
                corrupt += 1
                if corrupt > 1:
                    text = f"{file.name} does not have the digest that the source gives for it, twice in a row"
                    raise SourceError("Failed", self._listing.uri, text)
            except PassingError as error:
                if error.restart:
                    self._discard(part)
                    before, restarts = 0, restarts + 1
                failures = 1 if part.exists() and part.stat().st_size > before else failures + 1
                if max(failures, restarts) >= self._patience.tries:
                    raise SourceError("Failed", self._listing.uri, f"{file.name}: {error}") from None
                self._meter.say(f"{error}; trying again")
                if self._stop.wait(self._patience.pause(failures, error.wait)):
                    raise StoppedError from None
            except OSError as error:
                if error.errno in NO_SPACE:
                    raise self._full(file, part) from None
                raise
        part.rename(target)

    def _once(self, file: RemoteFile, part: Path) -> bool:
        """Add to the part what is missing of it. False where all of it is here and it is not what it should be."""
        offset = part.stat().st_size if part.exists() else 0
        if offset > file.size:
            self._discard(part)
            self._meter.add(offset - file.size)  # of which only the file's size had been counted
            offset = 0
        digest: Any = file.digest.new(file.size) if file.digest else None
        with part.open("ab") as output:
            if offset and digest is not None:
                _feed(digest, part, offset)
            if offset < file.size:
                with self._source.open(file, offset) as stream:
                    if stream.start != offset:
                        if stream.start != 0:
                            raise PassingError(f"the server sends {file.name} from byte {stream.start:,} on")
                        raise PassingError(f"the server does not resume {file.name}", 0.0, restart=True)
                    offset += self._write(stream.chunks, output, digest, file.size - offset)
                self._meter.say("")
            output.flush()
            os.fsync(output.fileno())
        if offset < file.size:
            raise PassingError(f"the server ended {file.name} at byte {offset:,} of {file.size:,}")
        if file.digest is not None and digest.hexdigest() != file.digest.value:
            self._discard(part)
            return False
        return True

    def _write(self, chunks: Any, output: BinaryIO, digest: Any, missing: int) -> int:
        written = 0
        for chunk in chunks:
            if self._stop.is_set():
                raise StoppedError
            if self._lost():
                raise LockLostError("another download has taken over the lock of the cache folder")
            taken = chunk[: missing - written]
            output.write(taken)
            if digest is not None:
                digest.update(taken)
            written += len(taken)
            self._meter.add(len(taken))
            if len(taken) < len(chunk):
                raise PassingError("the server sends more than the file has", restart=True)
        return written

    def _discard(self, part: Path) -> None:
        if part.exists():
            self._meter.add(-part.stat().st_size)
            part.unlink()

    def _full(self, file: RemoteFile, part: Path) -> SourceError:
        missing = self._listing.size - present_bytes(self._listing, self._folder)
        return no_room(self._listing.uri, missing, free_bytes(self._folder), self._folder)


def _feed(digest: Any, part: Path, size: int) -> None:
    """What is here already goes through the digest again: a part may come from a run that ended in mid-write."""
    with part.open("rb") as file:
        left = size
        while left and (chunk := file.read(min(_CHUNK, left))):
            digest.update(chunk)
            left -= len(chunk)


def free_bytes(folder: Path) -> int:
    """What this user can still write there."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def no_room(uri: str, missing: int, free: int, folder: Path, kept: str = "") -> SourceError:
    """The disk is full; `kept` says what holds the rest of it."""
    text = f"{human_bytes(missing)} are needed and {human_bytes(free)} are free in {folder}{kept}"
    return SourceError("NoRoom", uri, f"{text} ({missing} and {free} bytes)")


def ask(work: Callable[[], T], uri: str, meter: Meter, patience: Patience) -> T:
    """Do something that may fail in passing; a SourceError in the end where it goes on doing so."""
    for failures in range(1, patience.tries + 1):
        try:
            return work()
        except PassingError as error:
            if failures == patience.tries:
                raise SourceError("Failed", uri, str(error)) from None
            meter.say(f"{error}; trying again")
            time.sleep(patience.pause(failures, error.wait))
    raise AssertionError("unreachable")
