"""The access log: one JSON line a finished request on stdout, without any content of request or response; and the form
of all other lines where they are to be JSON as well.

Lines are written by a thread behind a bounded queue: a reader that stops reading (a full pipe) must not stop the
streams. Lines that do not fit are counted and the count is written with the next line that does.
"""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
import time
from typing import Any, TextIO


class JsonFormatter(logging.Formatter):
    """`{"time":"2026-01-31T12:00:00Z","level":"info","logger":"kvern.router","msg":"..."}`, one line an event."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, separators=(",", ":"))


class AccessLog:
    """`write` never blocks; `close` waits a moment for what is queued."""

    def __init__(self, stream: TextIO | None = None, capacity: int = 10_000) -> None:
        self._stream = stream or sys.stdout
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(capacity)
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
        self._thread.start()

    def write(self, entry: dict[str, Any]) -> None:
        """Queue one line; `entry` is JSON's kind of values."""
        try:
            if self._dropped:
                entry = {**entry, "lines_dropped_before": self._dropped}
            self._queue.put_nowait({"time": time.time(), **entry})
            self._dropped = 0
        except queue.Full:
            self._dropped += 1

    def close(self, timeout: float = 1.0) -> None:
        """Write out what is queued, for at most `timeout` seconds."""
        try:
            self._queue.put(None, timeout=timeout)
        except queue.Full:
            return
        self._thread.join(timeout)

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            entry["time"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(entry["time"]))
            try:
                self._stream.write(json.dumps(entry, separators=(",", ":")) + "\n")
                if self._queue.empty():
                    self._stream.flush()
            except (OSError, ValueError):
                return  # stdout is gone: serving goes on without a log
