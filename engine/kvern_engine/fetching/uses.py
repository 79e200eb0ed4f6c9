"""Who uses which model of a folder, and which may go when room is needed.

A user (an engine) keeps a mark in .kvern/uses/ and touches it once a minute; a mark that nobody has touched for ten
minutes is that of a dead one. Ages are differences of times that the same file system has set, so that no clocks are
compared. A mark is made before the model is looked at, and looked for again once the model has been set aside: so
whoever starts meanwhile either keeps the model or does not find it.
"""

import contextlib
import os
import socket
import threading
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvern_engine.fetching.store import Snapshot, Store

TOUCH = 60.0  # seconds
DEAD = 600.0


@dataclass(frozen=True)
class Kept:
    """A model that takes room. Times in seconds of the file system's clock, size in bytes."""

    snapshot: Snapshot
    last_used: float
    in_use: bool


def to_evict(kept: Iterable[Kept], lacking: int) -> list[Kept]:
    """The least recently used models that nobody uses, as few as give `lacking` bytes; all of them where all do not.
    Pure."""
    chosen: list[Kept] = []
    for each in sorted(kept, key=lambda k: (k.last_used, str(k.snapshot.path))):
        if lacking <= 0:
            break
        if not each.in_use:
            chosen.append(each)
            lacking -= each.snapshot.size
    return chosen


class Use:
    """A mark that lasts until `end`. A folder that cannot be written to is used without one."""

    def __init__(self, store: Store, snapshot: Path, touch: float = TOUCH) -> None:
        folder = _marks(store, snapshot)
        self._path = folder / f"{socket.gethostname()[:100]}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._stop = threading.Event()
        self._touch = touch
        self._thread: threading.Thread | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._path.touch()
        except OSError:
            return
        self._thread = threading.Thread(target=self._run, name="mark the model as used", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._touch):
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.touch()

    def end(self) -> None:
        """The model is not used any more. Twice does no harm."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            with contextlib.suppress(OSError):
                self._path.unlink()  # which the folder's own time remembers


def _marks(store: Store, snapshot: Path) -> Path:
    return store.hidden / "uses" / f"{snapshot.parent.parent.name}@{snapshot.name}"


def now_of(store: Store) -> float:
    """The present by the clock of the file system. Raises OSError."""
    store.hidden.mkdir(parents=True, exist_ok=True)
    probe = store.hidden / f"now-{uuid.uuid4().hex[:8]}"
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def in_use(store: Store, snapshot: Path, now: float) -> bool:
    """Whether a mark is fresh."""
    return any(now - touched < DEAD for touched in _touched(_marks(store, snapshot)))


def last_used(store: Store, snapshot: Snapshot) -> float:
    """When it was last in use, or else published."""
    folder = _marks(store, snapshot.path)
    times = [snapshot.published, *_touched(folder)]
    with contextlib.suppress(OSError):
        times.append(folder.stat().st_mtime)
    return max(times)


def _touched(folder: Path) -> list[float]:
    found = []
    with contextlib.suppress(OSError):
        for mark in folder.iterdir():
            with contextlib.suppress(OSError):
                found.append(mark.stat().st_mtime)
    return found


def kept(store: Store) -> list[Kept]:
    """Every model of a folder. Raises OSError."""
    now = now_of(store)
    return [Kept(s, last_used(store, s), in_use(store, s.path, now)) for s in store.snapshots()]


def evict(store: Store, chosen: Iterable[Kept]) -> list[Snapshot]:
    """Delete models, but for those that somebody has begun to use meanwhile. Returns what is gone."""
    gone = []
    for each in chosen:
        path = each.snapshot.path
        aside = store.set_aside(path)
        if in_use(store, path, now_of(store)):
            store.bring_back(aside, path)
            continue
        store.remove(aside)
        with contextlib.suppress(OSError):
            path.parent.rmdir()
        for mark in _marks(store, path).glob("*"):
            mark.unlink(missing_ok=True)
        gone.append(each.snapshot)
    return gone
