"""The figures of a download as a person or a collector of logs sees them."""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from kvern_engine.fetching.meter import Figures, Meter

log = logging.getLogger("kvern_engine.fetching")

LOG_SECONDS = 10.0


class Lines:
    """Figures as one line that is rewritten (a terminal), or as a log line now and then (a collector)."""

    def __init__(
        self, terminal: bool, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._terminal, self._stream, self._clock = terminal, stream or sys.stderr, clock
        self._logged, self._phase, self._open = -LOG_SECONDS, "", False

    def show(self, figures: Figures) -> None:
        """Called by a Meter."""
        if self._terminal:
            if figures.phase not in ("Ready", "Failed"):
                self._stream.write(f"\r\x1b[K  {figures.sentence()}")
                self._stream.flush()
                self._open = True
        elif figures.phase != self._phase or self._clock() - self._logged >= LOG_SECONDS:
            self._logged, self._phase = self._clock(), figures.phase
            log.info("%s", figures.sentence())

    def end(self) -> None:
        """Leave the terminal's line empty for what comes next."""
        if self._open:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._open = False


@contextlib.contextmanager
def shown(terminal: bool) -> Iterator[Meter]:
    """A meter whose figures a person or a collector sees."""
    lines = Lines(terminal)
    try:
        yield Meter(lines.show)
    finally:
        lines.end()
