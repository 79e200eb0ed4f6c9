"""One request and its response: ASGI's `receive` and `send` over a connection."""

import asyncio
import logging
from enum import Enum
from typing import TYPE_CHECKING, Any

from kvern_engine.logs import fields
from kvern_engine.server.wire.head import CONTINUE, LAST_CHUNK, Head, Headers, response_head

if TYPE_CHECKING:
    from kvern_engine.server.wire.connection import Connection

log = logging.getLogger(__name__)

# Bytes of a body that wait for the app before the client is not read any further.
BODY_AHEAD = 64 << 10


class _Framing(Enum):
    """How the client knows where the body ends."""

    NONE = 0
    LENGTH = 1
    CHUNKED = 2
    CLOSE = 3


class Exchange:
    """Filled by its connection (`feed`, `end`, `disconnect`), read and answered by the app (`receive`, `send`)."""

    __slots__ = (
        "_body",
        "_connection",
        "_continue",
        "_end_told",
        "_framing",
        "_left",
        "_pending",
        "_promised",
        "_waiter",
        "finished",
        "gone",
        "head",
        "keep_alive",
        "received",
        "scope",
        "started",
    )

    def __init__(self, connection: "Connection", head: Head, scope: dict[str, Any], keep_alive: bool) -> None:
        self._connection = connection
        self.head = head
        self.scope = scope
        self.keep_alive = keep_alive
        self.received = False  # the whole request is here
        self.gone = False  # the client is: nothing more is sent
        self._left = False  # the app is told that it is
        self.started = False  # the head went out, or is about to
        self.finished = False  # the response is complete
        self._body = bytearray()
        self._end_told = False
        self._continue = head.expects_continue
        self._waiter: asyncio.Future[None] | None = None
        self._framing = _Framing.NONE
        self._promised = 0  # bytes of the body that Content-Length still promises
        self._pending = b""  # the head, which goes out with the first bytes of the body

    # the connection's side

    def feed(self, data: bytes) -> bool:
        """More of the body; returns whether the client should be read further."""
        self._continue = False  # it did not wait
        if self.finished or self.gone:
            return True
        self._body += data
        self._wake()
        return len(self._body) <= BODY_AHEAD

    def end(self) -> None:
        """The request is complete."""
        self.received = True
        self._wake()

    def disconnect(self) -> None:
        """The client is gone."""
        self.gone = True
        self.leave()

    def leave(self) -> None:
        """The client seems to be gone: the app is told so, and may answer nevertheless."""
        self._left = True
        self._wake()

    @property
    def unanswered_continue(self) -> bool:
        """The client still waits for a word whether to send its body: whether it will is not known."""
        return self._continue

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # the app's side

    async def run(self, app: Any) -> None:
        """Call the app; the connection is told when it has ended, whatever ended it."""
        try:
            await app(self.scope, self.receive, self.send)
        except Exception:  # the gateway has answered what can be answered
            log.exception("a response was cut off", extra=fields(method=self.head.method))
        finally:
            self._connection.exchange_done(self)

    async def receive(self) -> dict[str, Any]:
        """The next part of the body, then, once the client is gone or has its answer, `http.disconnect`."""
        while True:
            if self._left or self.finished:
                return {"type": "http.disconnect"}
            if self._body or (self.received and not self._end_told):
                data, self._body = bytes(self._body), bytearray()
                self._end_told = self.received
                self._connection.read_on()  # may feed what comes next at once, up to the end
                return {"type": "http.request", "body": data, "more_body": not self._end_told}
            if self._continue and not self.started:
                self._continue = False
                self._connection.write(CONTINUE)
            waiter = self._waiter = asyncio.get_running_loop().create_future()
            self._connection.read_on()
            await waiter

    async def send(self, message: Any) -> None:
        """Part of the response; waits while the client takes nothing. Does nothing once the client is gone."""
        if self.gone:
            return
        if not self.started:
            if message["type"] != "http.response.start":
                raise RuntimeError(f"a response begins with http.response.start, not with {message['type']}")
            self._start(message["status"], list(message.get("headers", ())))
            return
        if message["type"] != "http.response.body" or self.finished:
            raise RuntimeError(f"{message['type']} cannot follow here: the response has begun or is complete")
        data, more = message.get("body", b""), message.get("more_body", False)
        self._write(data, last=not more)
        if not more:
            self.finished = True
            self._wake()
        await self._connection.writable()

    def _start(self, status: int, headers: Headers) -> None:
        named = dict(headers)
        length = named.get(b"content-length")
        if self.head.method == "HEAD" or status in (204, 304):
            self._framing = _Framing.NONE
        elif length is not None:
            self._framing, self._promised = _Framing.LENGTH, int(length)
        elif self.head.version == "1.1":
            self._framing = _Framing.CHUNKED
            headers.append((b"transfer-encoding", b"chunked"))
        else:
            self._framing, self.keep_alive = _Framing.CLOSE, False
        if b"close" in named.get(b"connection", b"").lower():
            self.keep_alive = False
        elif not self.keep_alive or self._connection.leaving:
            self.keep_alive = False
            headers.append((b"connection", b"close"))
        headers.append((b"date", self._connection.date()))
        self._pending = response_head(status, headers)
        self.started = True

    def _write(self, data: bytes, *, last: bool) -> None:
        if self._framing is _Framing.CHUNKED:
            if data:
                data = b"%x\r\n%b\r\n" % (len(data), data)
            data = data + LAST_CHUNK if last else data
        elif self._framing is _Framing.LENGTH:
            self._promised -= len(data)
            if self._promised < 0 or (last and self._promised):
                raise RuntimeError(f"the body is {abs(self._promised)} bytes off its Content-Length")
        elif self._framing is _Framing.NONE:
            data = b""
        if self._pending:
            data, self._pending = self._pending + data, b""
        if data:
            self._connection.write(data, last=last)
