"""How far a download is: counted by the threads that do it, shown by whoever wants to know."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvern_engine.fetching.files import human_bytes

Phase = Literal["Waiting", "Listing", "Downloading", "Ready", "Failed"]
SHOW_SECONDS = 0.2  # at most so often
_SPEED_SECONDS = 5.0


@dataclass(frozen=True)
class Figures:
    """`done` of `total` bytes; `total` 0: not known yet. `text` says what is waited for, or went wrong."""

    phase: Phase
    uri: str
    done: int = 0
    total: int = 0
    text: str = ""
    speed: float = 0.0  # bytes a second

    def sentence(self) -> str:
        """For people: `downloading hf://org/name: 35 %, 1.2 of 3.4 GB, 85 MB/s`."""
        if self.phase != "Downloading":
            words = {"Waiting": "waiting for", "Listing": "asking for", "Ready": "have", "Failed": "failed:"}
            return f"{words[self.phase]} {self.text or self.uri}"
        percent = self.done * 100 // self.total if self.total else 0
        speed = f", {human_bytes(self.speed)}/s" if self.speed else ""
        again = f"; {self.text}" if self.text else ""
        figures = f"{percent} %, {human_bytes(self.done)} of {human_bytes(self.total)}"
        return f"downloading {self.uri}: {figures}{speed}{again}"


class Meter:
    """Figures that threads change. `show` is called with them, at most every SHOW_SECONDS and at each new phase."""

    def __init__(self, show: Callable[[Figures], None] | None = None, clock: Callable[[], float] = time.monotonic):
        self._show, self._clock = show, clock
        self._lock = threading.Lock()
        self._phase: Phase = "Listing"
        self._uri = self._text = ""
        self._done = self._total = 0
        self._shown = self._mark_time = 0.0
        self._mark = 0
        self._speed = 0.0

    def figures(self) -> Figures:
        """As they are now."""
        with self._lock:
            return Figures(self._phase, self._uri, self._done, self._total, self._text, self._speed)

    def enter(self, phase: Phase, uri: str, text: str = "") -> None:
        """A new phase, or new words for the same one."""
        with self._lock:
            changed = (phase, uri, text) != (self._phase, self._uri, self._text)
            self._phase, self._uri, self._text = phase, uri, text
        if changed:
            self._tell(at_once=True)

    def expect(self, done: int, total: int) -> None:
        """So much is here already, of so much."""
        with self._lock:
            self._done, self._total = done, total
            self._mark, self._mark_time, self._speed = done, self._clock(), 0.0
        self._tell(at_once=True)

    def add(self, count: int) -> None:
        """Bytes have come (or, below 0, have proved to be none)."""
        with self._lock:
            self._done += count
            passed = self._clock() - self._mark_time
            if passed >= _SPEED_SECONDS:
                self._speed = max(0.0, (self._done - self._mark) / passed)
                self._mark, self._mark_time = self._done, self._clock()
        self._tell()

    def say(self, text: str) -> None:
        """What is the matter at the moment, "" when it is over."""
        with self._lock:
            changed, self._text = text != self._text, text
        self._tell(at_once=changed and bool(text))

    def _tell(self, at_once: bool = False) -> None:
        if self._show is None:
            return
        with self._lock:
            if not at_once and self._clock() - self._shown < SHOW_SECONDS:
                return
            self._shown = self._clock()
        self._show(self.figures())
