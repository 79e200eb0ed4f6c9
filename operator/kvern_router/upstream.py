"""Connections to one replica: an asyncio Protocol around httptools' response parser, and a pool of idle ones.

A connection carries one request at a time and tells its sink what comes back. It knows nothing of retries, clients or
events; relay.py is the sink of a client's request and probe.py's of a probe.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Protocol, cast

import httptools

from kvern_router.http1 import Headers, ResponseHead

IDLE_SECONDS = 30.0  # an idle connection is used again for so long; a server that closes it earlier is noticed
MAX_IDLE = 256


class BadAnswerError(ConnectionError):
    """What came back is not an HTTP/1.x response."""


class Sink(Protocol):
    """Who gets a response. Exactly one of on_complete and on_lost is called, last."""

    def on_head(self, head: ResponseHead) -> None: ...
    def on_body(self, data: bytes) -> None: ...
    def on_complete(self) -> None: ...
    def on_lost(self, error: Exception) -> None: ...


class UpstreamConnection(asyncio.Protocol):
    """One TCP connection to a replica."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._loop = pool.loop
        self._transport: asyncio.Transport | None = None
        self._sink: Sink | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._paused = False
        self.last_data = 0.0  # loop time of the last byte received
        self.idle_since = 0.0
        self.reused = False
        self.answered = False  # a byte of the current response has come
        self._bodiless = False
        self._reset()

    def _reset(self) -> None:
        self._status = 0
        self._reason = b""
        self._headers: Headers = []
        self._head: ResponseHead | None = None
        self._pieces: list[bytes] = []
        self._done = False
        self._reusable = False

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop's is one without deriving from it
        _notice_dead_peers(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        sink = self._sink
        if sink is None:
            self.close()  # nobody asked
            return
        self.last_data = self._loop.time()
        self.answered = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._lose(BadAnswerError(f"not an HTTP response: {error}"))
            return
        head = self._head
        if head is not None and self._status:
            self._status = 0  # delivered
            sink.on_head(head)
        if self._pieces:
            pieces = self._pieces
            body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            self._pieces = []
            if self._sink is sink:
                sink.on_body(body)
        if self._done and self._sink is sink:
            self._finish()

    def eof_received(self) -> bool:
        return False  # close; connection_lost follows

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        head = self._head
        if head is not None and not self._done and exc is None and head.length is None and not head.chunked:
            self._finish()  # a body that ends with its connection
        else:
            self._lose(exc or ConnectionResetError("the replica closed the connection"))

    # httptools' side

    def on_status(self, status: bytes) -> None:
        self._reason += status

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head is None:  # trailers come after it, and are dropped
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        if self._status < 200:
            return
        self._reusable = self._parser.should_keep_alive()
        head = ResponseHead(self._status, self._reason, self._headers)
        for name, value in self._headers:
            if name == b"content-length":
                head.length = int(value)
            elif name == b"transfer-encoding":
                head.chunked = True
        self._head = head
        if self._bodiless:
            self._done, self._reusable = True, False  # the parser waits for a body that does not come

    def on_body(self, data: bytes) -> None:
        if not self._bodiless:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        if self._head is None:  # 1xx: the answer proper follows
            self._reset()
        else:
            self._done = True

    # the router's side

    def send(self, sink: Sink, head: bytes, body: bytes = b"", *, bodiless: bool = False) -> None:
        """Send a request. bodiless: its response has no body whatever its headers say (HEAD)."""
        assert self._transport is not None and self._sink is None
        self._reset()
        self._sink = sink
        self._bodiless = bodiless
        self.answered = False
        if len(body) <= 16384:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)

    # A sink may call these at any time: once its response is complete the connection is another's, and they do nothing.

    def pause(self, sink: Sink) -> None:
        """Stop reading: the client is slower than the replica."""
        if self._sink is sink and not self._paused and self._transport is not None and self.usable:
            self._paused = True
            self._transport.pause_reading()

    def resume(self, sink: Sink) -> None:
        """Read again."""
        if self._sink is sink:
            self._resume()

    def drop(self, sink: Sink) -> None:
        """Close at once and tell the sink nothing; the replica sees it as its client going away."""
        if self._sink is sink:
            self.close()

    def close(self) -> None:
        """Close, whoever uses it."""
        self._sink = None
        self._pool.forget(self)
        if self._transport is not None:
            self._transport.abort()

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def _resume(self) -> None:
        if self._paused and self._transport is not None and self.usable:
            self._paused = False
            self._transport.resume_reading()

    def _finish(self) -> None:
        """The response is complete: back to the pool if another request can follow, then tell the sink."""
        sink, self._sink = self._sink, None
        transport = self._transport
        if self._reusable and transport is not None and transport.get_write_buffer_size() == 0 and self.usable:
            self._resume()
            self._pool.give_back(self)
        else:
            self.close()
        if sink is not None:
            sink.on_complete()

    def _lose(self, error: Exception) -> None:
        sink, self._sink = self._sink, None
        self.close()
        if sink is not None:
            sink.on_lost(error)


class ConnectionPool:
    """Connections to one address, the last used first."""

    def __init__(self, host: str, port: int, connect_timeout: float) -> None:
        self.loop = asyncio.get_running_loop()
        self._address = (host, port)
        self._connect_timeout = connect_timeout
        self._idle: list[UpstreamConnection] = []
        self._closed = False

    async def acquire(self, *, fresh: bool = False) -> UpstreamConnection:
        """An idle connection, or a new one. fresh: a new one in any case. Raises OSError (TimeoutError too)."""
        while self._idle and not fresh:
            connection = self._idle.pop()
            if connection.usable and self.loop.time() - connection.idle_since < IDLE_SECONDS:
                connection.reused = True
                return connection
            connection.close()
        async with asyncio.timeout(self._connect_timeout):
            _, protocol = await self.loop.create_connection(lambda: UpstreamConnection(self), *self._address)
        return protocol

    def give_back(self, connection: UpstreamConnection) -> None:
        """Keep a connection whose response is complete."""
        if self._closed or len(self._idle) >= MAX_IDLE:
            connection.close()
            return
        connection.idle_since = self.loop.time()
        self._idle.append(connection)

    def forget(self, connection: UpstreamConnection) -> None:
        """The connection is closed."""
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)

    def expire(self, now: float) -> None:
        """Close what has been idle for too long."""
        while self._idle and now - self._idle[0].idle_since >= IDLE_SECONDS:
            self._idle[0].close()

    def close(self) -> None:
        """Close the idle ones; those in use are closed when their responses are complete."""
        self._closed = True
        for connection in list(self._idle):
            connection.close()


def _notice_dead_peers(sock: socket.socket | None) -> None:
    """A node that is gone sends no reset: ask every 5 s after 15 s of silence, give up after 3 unanswered."""
    if sock is None:
        return
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
