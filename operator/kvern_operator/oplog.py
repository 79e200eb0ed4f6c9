"""The operator's log on stderr: a line a record, as text for people or as JSON for collectors."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


class _Noise(logging.Filter):
    """kopf's remarks that say nothing here: PodMonitors are optional, and we stop it by its flag."""

    _WORDS = ("Unresolved resources cannot be served", "Stop-flag is ", "OS signals are ignored")

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self._WORDS)


def set_up(format_: str, level: str, stream: TextIO | None = None) -> None:
    """Replace the root logger's handlers. `format_`: text | json; `level`: debug | info | warning | error."""
    handler = logging.StreamHandler(stream or sys.stderr)
    text = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    handler.setFormatter(_Json() if format_ == "json" else logging.Formatter(text))
    handler.addFilter(_Noise())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # kopf tells of every request that it tries again, and of each event at the level of debug.
    logging.getLogger("kopf").setLevel(max(logging.WARNING, root.level))
    logging.getLogger("kubernetes").setLevel(logging.WARNING)
    logging.getLogger("aiohttp").setLevel(logging.WARNING)
