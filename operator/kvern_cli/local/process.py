"""One child process: its own process group, its output in a file, dead with its parent. An effect; decides nothing."""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

from kvern_cli.local.launch import Launch, environment_for

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
LARGEST_LOG = 64 << 20  # bytes; beyond it the file starts over and the old one is kept as FILE.1


def _die_with(parent: int) -> None:
    """In the child, before exec: SIGTERM when the parent is gone, however it went."""
    if _libc is not None:
        # Until exec the parent's handlers are here too, and would note the signal for a program that is about to go.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it went before prctl
            os._exit(1)


class ChildProcess:
    """A started process. `terminate` asks, `kill` ends the whole group; both do nothing when it has ended."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    @classmethod
    async def start(cls, plan: Launch, log: Path) -> "ChildProcess":
        """Start it with output appended to `log`. Raises OSError."""
        log.parent.mkdir(parents=True, exist_ok=True)
        _rotate(log)
        parent = os.getpid()
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *plan.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment_for(plan),
                start_new_session=True,  # Ctrl-C in the terminal reaches the parent only, which drains
                preexec_fn=lambda: _die_with(parent),
            )
        return cls(process)

    @property
    def exit_code(self) -> int | None:
        """None while it runs; 128 + N after signal N, as shells and kubelets say it."""
        code = self._process.returncode
        return None if code is None else code if code >= 0 else 128 - code

    async def wait(self) -> int:
        """Until it has ended; then ends whatever it left behind in its group. Returns the exit code."""
        await self._process.wait()
        self._signal_group(signal.SIGKILL)
        code = self.exit_code
        assert code is not None
        return code

    def terminate(self) -> None:
        """SIGTERM to the process itself: it drains, and ends its own children."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        """SIGKILL to the whole group."""
        if self._process.returncode is None:
            self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: int) -> None:
        # The group outlives its leader while a member lives, so the number cannot have been given away.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def _rotate(log: Path) -> None:
    with contextlib.suppress(OSError):
        if log.stat().st_size > LARGEST_LOG:
            log.replace(log.with_name(log.name + ".1"))
