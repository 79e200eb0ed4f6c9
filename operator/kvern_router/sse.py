"""Server-sent events as far as a proxy must know them: pure, no sockets.

Lines are passed on whole, so that a stream whose replica dies can be ended with an event of the router's own: half a
line followed by that event would be read as one broken event. Bytes are otherwise untouched.
"""

from __future__ import annotations

import json
from typing import Any

MAX_LINE = 64 * 1024  # a longer line is passed on in pieces: the gate's memory is bounded


class LineGate:
    """Lets whole lines through and keeps the begun one back."""

    __slots__ = ("last", "tail")

    def __init__(self) -> None:
        self.tail = b""
        self.last = b""  # what went through last

    def feed(self, data: bytes) -> bytes:
        """The bytes that may go on now, possibly none."""
        if self.tail:
            data = self.tail + data
            self.tail = b""
        if data[-1:] != b"\n":
            cut = data.rfind(b"\n") + 1
            if len(data) - cut <= MAX_LINE:
                self.tail = data[cut:]
                data = data[:cut]
                if not data:
                    return b""
        self.last = data
        return data

    @property
    def finished(self) -> bool:
        """Whether the stream said all it had to say: OpenAI's last event went through."""
        return self.last.rstrip().endswith((b"data: [DONE]", b"data:[DONE]"))


def error_event(error: dict[str, Any]) -> bytes:
    """`error` as an event. It begins with a line break: a line of the event before may still be open (an extra blank
    line is no event)."""
    return b"\ndata: " + json.dumps({"error": error}).encode() + b"\n\n"


def opening_error(data: bytes) -> dict[str, Any] | None:
    """The error object when a stream's first event is an error that is not the client's fault, else None.

    The engine validates before it opens a stream, so an error that comes first tells of an engine that died or stopped
    between the two; nothing was generated yet and another replica can serve the request.
    """
    if data[:1] not in (b"d", b"e") or b'"error"' not in data[:256]:
        return None
    for line in data.split(b"\n"):
        if line.startswith(b"data:"):
            try:
                event = json.loads(line[5:])
            except ValueError:
                return None
            error = event.get("error") if isinstance(event, dict) else None
            if not isinstance(error, dict) or str(error.get("type", "")).startswith("invalid_request"):
                return None
            return error
    return None
