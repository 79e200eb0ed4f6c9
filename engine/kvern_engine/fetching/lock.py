"""The lock on a folder of models: one downloader at a time, also among nodes that share a network file system.

A lease, not flock: many network file systems keep flock to one node, or refuse it. Generations are files lock-N, made
with O_EXCL; the highest one counts. Its holder writes into it every few seconds. One that has not been written to for
`stale` seconds *of the waiter's own clock* is taken over by making N+1, which only one waiter can; so no clocks are
compared. A holder that was only suspended finds N+1 at its next beat, and stops. Where the holder's process can be
looked up (the same machine and PID namespace), its end is seen at once.
"""

import contextlib
import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvern_engine.fetching.store import write_atomically

_NAME = re.compile(r"lock-(\d{1,12})")


class LockLostError(Exception):
    """Another downloader has taken over: this one was silent for too long."""


@dataclass(frozen=True)
class Holder:
    """Who holds the lock, and what it says of its work."""

    owner: str
    what: str
    text: str


def _proc(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def here() -> str:
    """The same for processes that can look each other up by PID, "" where that is not known."""
    try:
        namespace = Path("/proc/self/ns/pid").readlink()
    except OSError:
        return ""
    return f"{_proc('/proc/sys/kernel/random/boot_id')} {namespace}"


def started(pid: int) -> str:
    """When a process started, in its kernel's ticks; "" where there is none: PIDs are used again."""
    return _proc(f"/proc/{pid}/stat").rpartition(")")[2].split(" ")[20:21][0] if Path(f"/proc/{pid}").exists() else ""


class FolderLock:
    """Use `acquire`, then `check` before anything that others see, and `release`. Times in seconds."""

    def __init__(
        self,
        folder: Path,
        what: str,
        *,
        beat: float = 5.0,
        stale: float = 40.0,
        poll: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._what = folder, what
        self._beat, self._stale, self._poll, self._clock = beat, stale, poll, clock
        self._owner = uuid.uuid4().hex
        self._generation = 0
        self._beats = 0
        self._text: Callable[[], str] = lambda: ""
        self._lost, self._stop = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------ taking it

    def acquire(self, waiting: Callable[[Holder], None], text: Callable[[], str]) -> None:
        """Wait until it is ours. `waiting` is called now and then with who has it; `text` is what the record says of
        our work while we have it. Raises OSError where the folder cannot be written."""
        self._text = text
        self._folder.mkdir(parents=True, exist_ok=True)
        seen, since = "", self._clock()
        while True:
            generation, record = self._latest()
            if record != seen:
                seen, since = record, self._clock()
            if generation == 0 or _free(record) or self._clock() - since > self._stale:
                if self._take(generation + 1):
                    return
                continue
            waiting(_holder(record))
            time.sleep(self._poll)

    def _latest(self) -> tuple[int, str]:
        """The highest generation and its record; (0, "") where nobody ever had it."""
        while True:
            highest = max(self._generations(), default=0)
            if highest == 0:
                return 0, ""
            try:
                return highest, (self._folder / f"lock-{highest}").read_text()
            except FileNotFoundError:
                continue  # taken over and tidied up just now

    def _generations(self) -> list[int]:
        found = (_NAME.fullmatch(path.name) for path in self._folder.iterdir())
        return [int(match[1]) for match in found if match]

    def _take(self, generation: int) -> bool:
        path = self._folder / f"lock-{generation}"
        try:
            with path.open("x") as file:
                file.write(self._record())
        except FileExistsError:
            return False
        if max(self._generations()) > generation:  # we had looked long ago: it has gone round since
            path.unlink(missing_ok=True)
            return False
        for old in self._generations():
            if old < generation:
                (self._folder / f"lock-{old}").unlink(missing_ok=True)
        self._generation = generation
        self._thread = threading.Thread(target=self._keep, name="keep the lock", daemon=True)
        self._thread.start()
        return True

    def _record(self, released: bool = False) -> str:
        self._beats += 1
        record = {
            "owner": self._owner,
            "host": socket.gethostname(),
            "here": here(),
            "pid": os.getpid(),
            "started": started(os.getpid()),
            "what": self._what,
            "text": self._text(),
            "beat": self._beats,
            "released": released,
        }
        return json.dumps(record)

    # ------------------------------------------------------------ having it

    def _keep(self) -> None:
        last = self._clock()
        while not self._stop.wait(self._beat):
            try:
                if max(self._generations()) != self._generation:
                    self._lost.set()
                    return
                write_atomically(self._path, self._record())
                last = self._clock()
            except (OSError, ValueError):
                # A server that does not answer for a while; when we can no longer be sure, we no longer have it.
                if self._clock() - last > self._stale / 2:
                    self._lost.set()
                    return

    @property
    def _path(self) -> Path:
        return self._folder / f"lock-{self._generation}"

    def lost(self) -> bool:
        """Whether somebody has taken over, as far as the last beat knows."""
        return self._lost.is_set()

    def check(self) -> None:
        """Look again. Raises LockLostError."""
        with contextlib.suppress(OSError, ValueError):
            if max(self._generations()) != self._generation:
                self._lost.set()
        if self._lost.is_set():
            raise LockLostError("another download has taken over the lock of the cache folder")

    def release(self) -> None:
        """Let the next one have it. Doing so twice, or without having it, does no harm."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            if not self._lost.is_set():
                with contextlib.suppress(OSError):
                    write_atomically(self._path, self._record(released=True))


def _parsed(record: str) -> dict[str, Any]:
    try:
        found = json.loads(record)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _holder(record: str) -> Holder:
    found = _parsed(record)
    return Holder(str(found.get("host", "?")), str(found.get("what", "")), str(found.get("text", "")))


def _free(record: str) -> bool:
    """Given back, or held by a process that we can see is gone."""
    found = _parsed(record)
    if found.get("released"):
        return True
    place, pid = found.get("here"), found.get("pid")
    if not place or place != here() or not isinstance(pid, int):
        return False
    return started(pid) != found.get("started")
