"""How every process of the engine logs: short lines for a person at a terminal, key=value or JSON for a collector.

Everything goes to standard error. Requests, prompts and keys are never logged. Use the standard `logging`; fields go
into `extra=fields(...)`.
"""

import contextlib
import json
import logging
import sys
import threading
import time
from collections import deque
from typing import Any, TextIO


def fields(**values: Any) -> dict[str, dict[str, Any]]:
    """`extra` of a log call: `log.info("ready", extra=fields(url=url))` writes `... msg=ready url=http://...`."""
    return {"fields": values}


def _quoted(value: Any) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return text if text and not any(c in text for c in ' "=\n') else json.dumps(text, ensure_ascii=False)


class KeyValueFormatter(logging.Formatter):
    """`time=2026-01-31T12:00:00.123Z level=info process=core-0 msg="..." key=value`"""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        return " ".join(f"{key}={_quoted(value)}" for key, value in self.pairs(record).items())

    def pairs(self, record: logging.LogRecord) -> dict[str, Any]:
        """All that a line says, in its order."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        pairs = {"time": stamp, "level": record.levelname.lower(), "process": self._process, "msg": record.getMessage()}
        pairs |= getattr(record, "fields", {})
        if record.exc_info:
            pairs["exception"] = self.formatException(record.exc_info)
        return pairs


class JsonFormatter(KeyValueFormatter):
    """The same as one JSON object a line; numbers stay numbers."""

    def format(self, record: logging.LogRecord) -> str:
        pairs = {k: round(v, 6) if isinstance(v, float) else v for k, v in self.pairs(record).items()}
        return json.dumps(pairs, ensure_ascii=False, separators=(",", ":"), default=str)


class HumanFormatter(logging.Formatter):
    """`warning: message (key value, ...)`; the level is left out for info."""

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        extra = ", ".join(f"{key} {_quoted(value)}" for key, value in getattr(record, "fields", {}).items())
        trace = "\n" + self.formatException(record.exc_info) if record.exc_info else ""
        return f"{level}{record.getMessage()}{f' ({extra})' if extra else ''}{trace}"


class BackgroundHandler(logging.Handler):
    """Lines are written by a thread: who logs never waits for whoever reads them, and a server that logs every request
    makes one write of many lines. What does not fit while nobody reads is dropped, and its number said afterwards."""

    MOST = 10_000  # lines that wait
    PAUSE = 0.02  # seconds between two writes
    END = 1.0  # seconds that the end of the process waits for the last lines

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._lines: deque[str] = deque()
        self._dropped = 0
        self._some, self._idle = threading.Event(), threading.Event()
        self._idle.set()
        threading.Thread(target=self._run, name="logs", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        if len(self._lines) >= self.MOST:
            self._dropped += 1
            return
        self._lines.append(line)
        self._idle.clear()
        self._some.set()

    def _run(self) -> None:
        while True:
            self._some.wait()
            self._some.clear()
            with contextlib.suppress(OSError, ValueError):  # nobody will ever read
                self._write()
            if not self._lines:
                self._idle.set()
                if self._lines:  # came in between
                    self._idle.clear()
            time.sleep(self.PAUSE)

    def _write(self) -> None:
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        self._stream.write("\n".join([*lines, ""]))
        self._stream.flush()
        dropped, self._dropped = self._dropped, 0
        if dropped:
            text = "%d lines are missing here: standard error was read too slowly"
            made = logging.LogRecord(__name__, logging.WARNING, "", 0, text, (dropped,), None)
            self._stream.write(self.format(made) + "\n")
            self._stream.flush()

    def flush(self) -> None:
        """Wait a moment until all is written; the end of the process does."""
        self._idle.wait(self.END)


def setup(level: str, process: str, human: bool | None = None, form: str = "text", *, background: bool = False) -> None:
    """Send the logs of this process to stderr; `human` None: short lines where stderr is a terminal. `form` is text or
    json (which comes before `human`). `background`: by a thread, for a process that must not wait."""
    human = sys.stderr.isatty() if human is None else human
    handler: logging.Handler = BackgroundHandler(sys.stderr) if background else logging.StreamHandler(sys.stderr)
    if form == "json":
        handler.setFormatter(JsonFormatter(process))
    else:
        handler.setFormatter(HumanFormatter() if human else KeyValueFormatter(process))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)  # libraries: warnings only
    logging.getLogger("kvern_engine").setLevel(level.upper())
