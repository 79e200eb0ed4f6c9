"""The private folder that holds the unix sockets of one running engine, and what is left of dead ones.

The folder is readable by its owner only. Its owner holds a lock on a file in it, so that a later start can tell a
folder whose supervisor was killed (nobody holds the lock) from a live one, and remove it.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

_PREFIX = "kvern-"
_LOCK = "lock"
MIN_FREE = 1 << 20  # bytes; metrics are mapped memory in the folder, which must not run out of pages later on
# sun_path holds 108 bytes with the final zero; the longest socket name is "worker-9999.out".
_MAX_FOLDER = 107 - len("/worker-9999.out")


def _try_lock(folder: Path) -> int | None:
    """File descriptor of the folder's lock, or None where a live process holds it. Raises OSError."""
    fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def remove_stale(parent: Path) -> list[Path]:
    """Remove the folders in `parent` that belong to this user and whose owner is dead; return what was removed."""
    removed = []
    for folder in parent.glob(_PREFIX + "*"):
        with contextlib.suppress(OSError):  # another start may be removing it too
            if folder.is_symlink() or folder.stat().st_uid != os.getuid() or not (folder / _LOCK).exists():
                continue
            fd = _try_lock(folder)
            if fd is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(fd)
                removed.append(folder)
    return removed


class SocketDir:
    """Context manager: a fresh folder (mode 0700) with a short path, removed at the end.

    Raises OSError naming the folder where no short enough path can be made, or where there is no room.
    """

    def __init__(self, parent: str | None = None) -> None:
        self._parent = Path(parent or tempfile.gettempdir())
        self.path = Path()
        self._lock_fd = -1

    def __enter__(self) -> "SocketDir":
        if len(os.fsencode(self._parent)) + len("/kvern-12345678") > _MAX_FOLDER:
            self._parent = Path("/tmp")  # a long TMPDIR; unix socket paths may not exceed 107 bytes
        remove_stale(self._parent)
        self._check_room()
        try:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._parent))  # mkdtemp: mode 0700
        except OSError as error:
            raise OSError(f"cannot make a folder for sockets in {self._parent}: {error.strerror}") from error
        self._lock_fd = _try_lock(self.path) or -1
        return self

    def _check_room(self) -> None:
        found = os.statvfs(self._parent)
        free = found.f_bavail * found.f_frsize
        if free < MIN_FREE:
            raise OSError(
                f"{self._parent} has {free >> 10} KiB free, and sockets and shared memory need {MIN_FREE >> 10} KiB "
                "there: make room, or choose another folder with TMPDIR"
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
