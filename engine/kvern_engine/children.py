"""Starting, watching and ending the supervisor's child processes. What an exit means is decided in `supervisor.py`."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from kvern_engine.child import ChildSpec


@dataclass(eq=False)
class Child:
    """A running process of the engine. `pidfd` becomes readable when it ends; `status` is as subprocess gives it."""

    kind: str  # worker | core | server
    index: int
    engine: int
    process: "subprocess.Popen[bytes]"
    pidfd: int
    status: int | None = field(default=None)

    @property
    def name(self) -> str:
        return {"core": "engine core", "server": "API server"}.get(self.kind, self.kind) + f" {self.index}"

    @property
    def pid(self) -> int:
        return self.process.pid


def how_it_ended(status: int) -> str:
    """`was killed by SIGKILL (kill -9, or out of memory)`, `exited with status 1`."""
    if status >= 0:
        return f"exited with status {status}"
    name = signal.Signals(-status).name
    return f"was killed by {name}" + (" (kill -9, or out of memory)" if name == "SIGKILL" else "")


def start(spec: ChildSpec, pass_fds: Iterable[int] = (), environ: Mapping[str, str] = {}) -> Child:
    """Start a child in a process group of its own (Ctrl-C reaches the supervisor alone); its output goes to stderr.
    `environ` is added to this process's environment.
    """
    # -P: a file in the working directory must not shadow a module.
    command = [sys.executable, "-P", "-m", "kvern_engine.child", f"{spec.kind}-{spec.index}"]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=2,
        stderr=2,
        pass_fds=tuple(pass_fds),
        process_group=0,
        env={**os.environ, **environ},
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it died at once: its exit status will tell
        process.stdin.write(msgspec.json.encode(spec))
        process.stdin.close()
    return Child(spec.kind, spec.index, spec.engine, process, os.pidfd_open(process.pid))


def reap(child: Child) -> int:
    """Exit status of a child whose pidfd is readable; closes the pidfd."""
    child.status = child.process.wait()
    if child.pidfd >= 0:
        os.close(child.pidfd)
        child.pidfd = -1
    return child.status


def send_signal(children: Iterable[Child], signum: int) -> None:
    for child in children:
        if child.status is None:
            with contextlib.suppress(ProcessLookupError):
                child.process.send_signal(signum)


class Ending:
    """Children that are to end while the others go on: SIGTERM, and SIGKILL to those that do not in time."""

    def __init__(self, patience: float = 1.0) -> None:
        self._patience = patience
        self._deadlines: dict[Child, float] = {}

    def __contains__(self, child: Child) -> bool:
        return child in self._deadlines

    def begin(self, children: Iterable[Child]) -> None:
        """A stopped or hanging process does not see SIGTERM: `finish` makes sure."""
        fresh = [child for child in children if child.status is None and child not in self._deadlines]
        send_signal(fresh, signal.SIGTERM)
        self._deadlines |= dict.fromkeys(fresh, time.monotonic() + self._patience)

    def wait(self, otherwise: float) -> float:
        """Seconds until `finish` has something to do; `otherwise` where that is never."""
        due = [at for child, at in self._deadlines.items() if child.status is None]
        return max(0.0, min(due) - time.monotonic()) if due else otherwise

    def finish(self) -> None:
        """SIGKILL to those whose time is over; their exit is seen like any other."""
        now = time.monotonic()
        self._deadlines = {child: at for child, at in self._deadlines.items() if child.status is None}
        send_signal([child for child, at in self._deadlines.items() if at <= now], signal.SIGKILL)


def end_all(children: Iterable[Child], patience: float) -> None:
    """SIGTERM, and SIGKILL to what is left after `patience` seconds. Every child is reaped on return."""
    alive = [child for child in children if child.status is None]
    send_signal(alive, signal.SIGTERM if patience > 0 else signal.SIGKILL)
    deadline = time.monotonic() + patience
    for child in alive:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            send_signal([child], signal.SIGKILL)
        reap(child)
