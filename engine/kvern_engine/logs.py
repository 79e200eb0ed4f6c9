"""How every process of the engine logs: short lines for a person at a terminal, key=value or JSON for a collector.

Everything goes to standard error. Requests, prompts and keys are never logged. Use the standard `logging`; fields go
into `extra=fields(...)`.
"""

import json
import logging
import sys
import time
from typing import Any


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


def setup(level: str, process: str, human: bool | None = None, form: str = "text") -> None:
    """Send the logs of this process to stderr; `human` None: short lines where stderr is a terminal. `form` is text or
    json (which comes before `human`)."""
    human = sys.stderr.isatty() if human is None else human
    handler = logging.StreamHandler(sys.stderr)
    if form == "json":
        handler.setFormatter(JsonFormatter(process))
    else:
        handler.setFormatter(HumanFormatter() if human else KeyValueFormatter(process))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)  # libraries: warnings only
    logging.getLogger("kvern_engine").setLevel(level.upper())
