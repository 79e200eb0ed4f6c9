"""The response to one request as the client gets it: head, framing and end, whichever replica's answers fill it."""

from __future__ import annotations

from enum import Enum
from typing import Any, Protocol

from kvern_router.http1 import LAST_CHUNK, Request, ResponseHead, response_head, response_headers
from kvern_router.sse import error_event


class Out(Protocol):
    """The client's connection (client.py)."""

    def write(self, data: bytes, last: bool = False) -> None: ...


class Framing(Enum):
    """How the client knows where the body ends."""

    NONE = 0
    LENGTH = 1
    CHUNKED = 2
    CLOSE = 3


class ResponseWriter:
    """Written to by one attempt at a time; head and first bytes go out in one write."""

    def __init__(self, out: Out, request: Request) -> None:
        self._out = out
        self._request = request
        self._pending = b""
        self._framing = Framing.NONE
        self.head: ResponseHead | None = None  # what the client was told; None: nothing yet
        self.keep_alive = False
        self.ended = False
        self.bytes_sent = 0  # of body

    def start(self, head: ResponseHead, keep_alive: bool) -> None:
        """Take over a replica's head; it goes out with the first bytes, or with `flush`."""
        request = self._request
        headers = response_headers(head, request.request_id) + request.extra
        if request.method == b"HEAD" or head.status in (204, 304):
            self._framing = Framing.NONE
            if head.length is not None and head.status != 204:
                headers.append((b"content-length", b"%d" % head.length))
        elif head.length is not None:
            self._framing = Framing.LENGTH
            headers.append((b"content-length", b"%d" % head.length))
        elif request.version == "1.1":
            self._framing = Framing.CHUNKED
            headers.append((b"transfer-encoding", b"chunked"))
        else:
            self._framing = Framing.CLOSE
            keep_alive = False
        connection = b"" if request.version == "1.1" else b"keep-alive"
        self._pending = response_head(head.status, head.reason, headers, connection if keep_alive else b"close")
        self.keep_alive = keep_alive
        self.head = head

    def body(self, data: bytes) -> None:
        """Bytes of the body; data is not empty."""
        self.bytes_sent += len(data)
        if self._framing is Framing.CHUNKED:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        elif self._framing is Framing.NONE:
            data = b""
        if self._pending:
            data = self._pending + data
            self._pending = b""
        self._out.write(data)

    def flush(self) -> None:
        """Send the head alone."""
        if self._pending:
            self._out.write(self._pending)
            self._pending = b""

    def end(self, data: bytes = b"") -> None:
        """The last bytes of the body, if any, and its end."""
        self.ended = True
        self.bytes_sent += len(data)
        last = b""
        if self._framing is Framing.CHUNKED:
            last = (b"%x\r\n%b\r\n" % (len(data), data) if data else b"") + LAST_CHUNK
        elif self._framing is not Framing.NONE:
            last = data
        if self._pending or last:
            self._out.write(self._pending + last, last=True)
            self._pending = b""

    def end_with_error(self, error: dict[str, Any]) -> bool:
        """End a begun response with an error that its client can read, where its form has room for one: an event
        stream. False: the connection must be cut, or a truncated body would look whole."""
        if self.head is None or not self.head.is_sse or self._framing not in (Framing.CHUNKED, Framing.CLOSE):
            return False
        self.keep_alive = False
        self.end(error_event(error))
        return True
