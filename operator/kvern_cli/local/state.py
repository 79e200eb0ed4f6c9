"""The state folder of a local service: who runs it, what `kvern status` reads, its logs.

~/.local/state/kvern/<namespace>_<name>/   ($XDG_STATE_HOME/kvern/...)
  lock         held while `kvern up` runs
  state.json   the service with its status, its pods; replaced as a whole
  logs/        a file a pod           volumes/   ConfigMaps and Secrets as files
"""

import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from kvern_cli.local.files import write_atomically


class AlreadyRunning(Exception):
    """Another `kvern up` has the service; the text says which."""


def state_root() -> Path:
    """The folder of all local services."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "kvern"


def service_folder(namespace: str, name: str) -> Path:
    """The folder of one service. "_" cannot occur in either name, so no two services share a folder."""
    return state_root() / f"{namespace}_{name}"


class StateFolder:
    """Held by one `kvern up` at a time. Use as a context manager; raises AlreadyRunning."""

    def __init__(self, namespace: str, name: str) -> None:
        self.path = service_folder(namespace, name)
        self._name = f"{namespace}/{name}"
        self._lock: TextIO | None = None
        self._written = ""

    def __enter__(self) -> "StateFolder":
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = (self.path / "lock").open("a+")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            found = read_state(self.path)
            pid = f" (pid {found.pid})" if found else ""
            raise AlreadyRunning(f"{self._name} is already up{pid}; edit its file, or stop it: kvern down") from None
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.close()

    def write(self, document: dict[str, Any]) -> None:
        """Replace state.json, where it differs from what was written last."""
        text = json.dumps({"pid": os.getpid(), **document}, indent=1)
        if text != self._written:
            write_atomically(self.path / "state.json", text)
            self._written = text


@dataclass(frozen=True)
class LocalState:
    """What a `kvern up` wrote last. `running`: it is still there."""

    folder: Path
    running: bool
    pid: int
    document: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.document["service"]["metadata"]["name"])

    @property
    def namespace(self) -> str:
        return str(self.document["service"]["metadata"]["namespace"])


def _locked(folder: Path) -> bool:
    try:
        with (folder / "lock").open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except OSError:
        return True


def read_state(folder: Path) -> LocalState | None:
    """The state in a folder; None where there is none that this version can read."""
    try:
        document = json.loads((folder / "state.json").read_text())
        return LocalState(folder, _locked(folder), int(document["pid"]), document)
    except (OSError, ValueError, KeyError):
        return None


def read_all() -> Iterator[LocalState]:
    """The states of all local services, by name."""
    root = state_root()
    for folder in sorted(root.iterdir()) if root.is_dir() else []:
        found = read_state(folder)
        if found is not None:
            yield found
