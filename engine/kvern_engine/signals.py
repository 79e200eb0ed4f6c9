"""SIGTERM and SIGINT as events of a loop that polls: they are noted, and a socket wakes the loop."""

import contextlib
import select
import signal
import socket
from types import FrameType, TracebackType
from typing import Any


class Signals:
    """Context manager for the main thread; the handlers before it come back at its end. `received`: in order."""

    def __enter__(self) -> "Signals":
        self.received: list[int] = []
        self._receiver, self._sender = socket.socketpair()
        for end in (self._receiver, self._sender):
            end.setblocking(False)
        self._before: dict[int, Any] = {s: signal.signal(s, self._note) for s in (signal.SIGTERM, signal.SIGINT)}
        self._old_fd = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        return self

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.received.append(signum)

    def fileno(self) -> int:
        """Readable when a signal has come; `clear` it afterwards."""
        return self._receiver.fileno()

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._receiver.recv(4096)

    def wait(self, seconds: float) -> None:
        """Sleep, but not longer than until a signal comes."""
        select.select([self._receiver], [], [], seconds)
        self.clear()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._old_fd)
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._receiver.close()
        self._sender.close()
