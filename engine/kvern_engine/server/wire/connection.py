"""A client's connection: an asyncio Protocol around httptools' request parser. One request is answered at a time.

Pipelined requests wait in a short queue, in order. A client that has shut its sending side still gets its answers: its
end-of-file looks like that of a client that is gone, so it is sent `100 Continue`, which every client of HTTP/1.1 must
be able to skip and which the system of one that is gone answers with a reset.
"""

import asyncio
import contextlib
import logging
import select
import socket
from collections import deque
from typing import TYPE_CHECKING, Any, cast

import httptools

from kvern_engine.logs import fields
from kvern_engine.server.errors import ApiError
from kvern_engine.server.wire.exchange import Exchange
from kvern_engine.server.wire.head import (
    CONTINUE,
    Head,
    check_head,
    head_too_large,
    head_too_slow,
    invalid,
    scope_of,
    too_many_headers,
)

if TYPE_CHECKING:
    from kvern_engine.server.wire.server import HttpServer

log = logging.getLogger(__name__)

MAX_PIPELINED = 8
PIECE = 16 << 10  # bytes that are parsed at once: requests of a few bytes each must not become thousands of objects
WRITE_HIGH = 128 << 10  # bytes of answers that wait for a slow client before its app has to
LINGER_SECONDS = 2.0  # a client that is still sending gets to read its refusal before the connection is closed
LINGER_BYTES = 256 << 20
MUCH_BYTES = 64 << 10  # in one read of what is thrown away
REST_BETWEEN_READS = 0.005
REST_BYTES = 1 << 20  # of a body that nobody wants, read and thrown away so that the connection can be used again
REST_SECONDS = 5.0
PROBE_SECONDS = 15.0  # at most between questions whether a client that sends nothing more is still there
FIRST_LOOKS = (0.01, 0.1)
_TCP_CLOSE = 7  # Linux's number of the state


def was_reset(sock: Any) -> bool:
    """Whether the other side has reset a TCP connection: known here before anything is read or written again."""
    option = getattr(socket, "TCP_INFO", None)
    if sock is None or option is None or sock.family == socket.AF_UNIX:
        return False
    try:
        return bool(sock.getsockopt(socket.IPPROTO_TCP, option, 1)[0] == _TCP_CLOSE)
    except (OSError, IndexError):
        return False


def has_unread(sock: Any) -> bool:
    """Whether bytes have come that the loop has not read yet, or an end: closing now would be the answer to them."""
    if sock is None or sock.fileno() < 0:
        return False
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def hold_back(sock: Any) -> None:
    """What is written from now on leaves with the end of the connection, in one segment (TCP_CORK). Who reads it can
    see that the connection has ended; sent one after the other, a client could send its next request between them."""
    option = getattr(socket, "TCP_CORK", None)  # Linux
    if option is not None and sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, option, 1)


class Connection(asyncio.Protocol):
    """One connection; `server` has the app, the limits and all other connections."""

    def __init__(self, server: "HttpServer") -> None:
        self._server = server
        self._limits = server.limits
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._socket: Any = None
        self._parser = httptools.HttpRequestParser(self)
        self._head: Head | None = None  # being received
        self._head_fed = 0  # bytes received since the read in which it began
        self._receiving: Exchange | None = None  # its body is being received
        self._upgrading: Head | None = None  # asks for another protocol, and has a body
        self._active: Exchange | None = None
        self._queue: deque[Exchange] = deque()
        self._unread = b""  # received, and left until somebody wants it
        self._last = False  # no further request is read
        self._reading = True
        self._gone = False
        self._eof = False
        self._probed = 0.0
        self._patience = 0.5  # until it is asked again, in seconds
        self._idle_since = self._loop.time()
        self._closing_since: float | None = None
        self._paused_since: float | None = None
        self._writable: asyncio.Future[None] | None = None
        self._lingered = 0  # bytes thrown away while closing

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop's is one without deriving from it
        transport.set_write_buffer_limits(high=WRITE_HIGH)
        self._socket = transport.get_extra_info("socket")
        if not self._server.connected(self):
            self._last = True
            limit = self._limits.connections
            error = ApiError(f"This server has {limit} connections, the most it takes (max_connections).", status=503)
            self._start_refusal(error)

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            self._throw_away(len(data))
            return
        self._unread += data
        self._parse()

    def _parse(self) -> None:
        """Go on in what has come, until nobody wants more of it for now."""
        data, self._unread, at = self._unread, b"", 0
        while at < len(data) and self._reading and not self._deaf:
            self._feed(data[at : at + PIECE])
            at += PIECE
        if not self._deaf:
            self._unread = data[at:]

    def _feed(self, data: bytes) -> None:
        before = self._head
        while data and not self._deaf:
            try:
                self._parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self._ignore_upgrade()
            except httptools.HttpParserError as error:
                if not self._deaf:
                    self._refuse(invalid(f"This is not a valid HTTP/1.1 request: {error}."))
                return
        head = self._head
        if head is not None and head is before:
            # A header that is still incomplete is in the parser, where it cannot be counted: count what was fed.
            self._head_fed += len(data)
            if self._head_fed > self._limits.head_bytes:
                self._refuse(head_too_large(self._limits))

    @property
    def _deaf(self) -> bool:
        """What comes now is nobody's: it follows a last request."""
        return self._last and self._receiving is None

    def eof_received(self) -> bool:
        """The client sends no more: answers under way go on, unless it turns out to be gone altogether."""
        self._eof = self._last = True
        unfinished, self._receiving, self._head = self._receiving, None, None
        if unfinished is not None:
            unfinished.disconnect()
            if unfinished in self._queue:
                self._queue.remove(unfinished)
        active = self._active
        if active is None or active.gone:
            return False
        if active.head.version != "1.1":
            active.leave()  # it has no interim answers to ask with; proxies that speak it never close one side
            return True
        self._probe()
        for seconds in FIRST_LOOKS:
            self._loop.call_later(seconds, self._look)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone = self._last = True
        self._server.disconnected(self)
        self._queue.clear()
        self._unread = b""
        self._resume()
        for exchange in (self._active, self._receiving):
            if exchange is not None:
                exchange.disconnect()
        self._receiving = None

    def pause_writing(self) -> None:
        self._paused_since = self._loop.time()

    def resume_writing(self) -> None:
        self._resume()

    def _resume(self) -> None:
        self._paused_since = None
        waiter, self._writable = self._writable, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _ignore_upgrade(self) -> None:
        """Upgrades are ignored, as RFC 9110 (7.8) allows. The parser takes a message to end with the head that asks for
        one: its body would be read as the next request. So another parser gets the framing without the question."""
        if self._upgrading is None:
            return
        framing = self._upgrading.framing()
        parser = httptools.HttpRequestParser(self)
        parser.feed_data(b"POST / HTTP/1.1\r\nhost: x\r\n" + framing + b"\r\n")
        self._parser, self._upgrading = parser, None

    # httptools' side; while `_upgrading` is set it says again what is known

    def on_message_begin(self) -> None:
        if not self._last and self._upgrading is None:
            self._head = Head(self._loop.time())
            self._head_fed = 0

    def on_url(self, url: bytes) -> None:
        if self._head is not None:
            self._head.target += url
            self._head.size += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        head = self._head
        if head is None:  # trailers are dropped, and what is said again
            return
        head.size += len(name) + len(value) + 4
        if len(head.headers) <= self._limits.headers:
            head.headers.append((name.lower(), value))
        elif not self._last:
            self._refuse(too_many_headers(self._limits))

    def on_headers_complete(self) -> None:
        head, self._head = self._head, None
        if head is None:
            return
        head.method = self._parser.get_method().decode("ascii")
        head.version = self._parser.get_http_version()
        error = check_head(head, self._limits)
        if error is not None:
            self._head = head
            self._refuse(error)
            return
        if self._parser.should_upgrade() and head.framing():
            self._upgrading = head
        keep_alive = head.version == "1.1" and self._parser.should_keep_alive()
        self._last = not keep_alive
        scope = scope_of(head, self._address("peername"), self._address("sockname"))
        self._receiving = Exchange(self, head, scope, keep_alive)
        self._enqueue(self._receiving)

    def on_body(self, data: bytes) -> None:
        exchange = self._receiving
        if exchange is not None and not exchange.feed(data):
            self._pause_reading()

    def on_message_complete(self) -> None:
        if self._upgrading is not None:
            return
        exchange, self._receiving = self._receiving, None
        if exchange is None:
            return
        exchange.end()
        if exchange is self._active and exchange.finished:
            return  # its app is about to end, and what follows it waits for that
        if self._active is None:
            self._idle_since = self._loop.time()

    # requests

    def _address(self, which: str) -> tuple[str, int] | None:
        name = self._transport.get_extra_info(which) if self._transport else None
        return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None

    def _refuse(self, error: ApiError) -> None:
        """The request that is being received gets an error in its turn, and nothing is read after it."""
        head, self._head = self._head or Head(self._loop.time()), None
        self._last = True
        receiving, self._receiving = self._receiving, None
        if receiving is not None:  # bad framing in the middle of its body: its app cannot get the rest
            if receiving.started:  # it has its answer, or a part of it
                receiving.keep_alive = False
                if receiving is not self._active:
                    self._close()
                return
            receiving.disconnect()
            head = receiving.head
            if receiving is self._active:
                self._active = None  # its app ends without an answer: the refusal is the answer
            else:
                self._queue.remove(receiving)
        self._start_refusal(error, head)

    def _start_refusal(self, error: ApiError, head: Head | None = None) -> None:
        head = head or Head(self._loop.time())
        if not head.target.startswith(b"/"):
            head.target = b"/"
        head.method = head.method or "GET"
        scope = scope_of(head, self._address("peername"), self._address("sockname"))
        scope["kvern.refusal"] = error
        self._enqueue(Exchange(self, head, scope, keep_alive=False))

    def _enqueue(self, exchange: Exchange) -> None:
        if self._active is None:
            self._start(exchange)
            return
        self._queue.append(exchange)
        if len(self._queue) >= MAX_PIPELINED:
            self._pause_reading()

    def _start(self, exchange: Exchange) -> None:
        self._active = exchange
        self._server.run(exchange)

    def exchange_done(self, exchange: Exchange) -> None:
        """Its app has ended."""
        if exchange is not self._active or self._gone:
            return
        self._active = None
        self._idle_since = self._loop.time()
        if not exchange.finished:
            self.abort()  # the client must not take what it has for a whole answer
        elif not exchange.keep_alive or not self._may_read_rest(exchange):
            self._close(unread=not exchange.received)
        elif self._queue:
            self._start(self._queue.popleft())
        elif self._last or self._is_parting:
            self._close(unread=not exchange.received)
        self.read_on()

    def _may_read_rest(self, exchange: Exchange) -> bool:
        """Whether the next request can follow one whose body was not wanted."""
        if exchange.received:
            return True
        length = exchange.head.content_length
        return length is not None and length <= REST_BYTES and not exchange.unanswered_continue

    # reading and writing

    def _pause_reading(self) -> None:
        if self._reading and self._transport is not None and not self._transport.is_closing():
            self._reading = False
            self._transport.pause_reading()

    def read_on(self) -> None:
        """The app wants more, or has ended."""
        if self._reading or self._gone or self._eof or len(self._queue) >= MAX_PIPELINED:
            return
        if self._transport is not None and not self._transport.is_closing():
            self._reading = True
            self._parse()
            if self._reading:
                self._transport.resume_reading()

    def write(self, data: bytes, last: bool = False) -> None:
        """Send bytes; a client that is gone gets none. `last`: of an answer."""
        if not self._gone and self._transport is not None:
            if last and self._is_parting:
                hold_back(self._socket)
            self._transport.write(data)

    @property
    def _is_parting(self) -> bool:
        """The connection ends with this answer, though that may not have been said."""
        return self._server.stopping and not self._queue and self._head is None

    async def writable(self) -> None:
        """Wait while the client has too much of its answer before it."""
        while self._paused_since is not None and not self._gone:
            if self._writable is None:
                self._writable = self._loop.create_future()
            await asyncio.shield(self._writable)

    @property
    def leaving(self) -> bool:
        return self._server.stopping or self._server.leaving()

    def date(self) -> bytes:
        return self._server.date()

    def abort(self) -> None:
        """Cut the connection."""
        if self._transport is not None:
            self._transport.abort()

    def _close(self, unread: bool = False) -> None:
        """Close once everything is written. unread: the client is still sending; closing at once would reset the
        connection and lose the answer, so read on for a moment and throw it away."""
        self._last = True
        if self._transport is None or self._transport.is_closing() or self._closing_since is not None:
            return
        self._closing_since = self._loop.time()
        if not unread or self._eof:
            # At once: `close` comes when the loop has its next turn, and until then a client could take the connection
            # for one that is kept.
            with contextlib.suppress(OSError, RuntimeError, NotImplementedError):
                self._transport.write_eof()
            self._transport.close()
            return
        self._receiving = None
        with contextlib.suppress(OSError, RuntimeError, NotImplementedError):
            self._transport.write_eof()
        self.read_on()
        self._loop.call_later(LINGER_SECONDS, self.abort)

    def _throw_away(self, size: int) -> None:
        """Bytes that are nobody's: only so many."""
        self._lingered += size
        if self._lingered > LINGER_BYTES:
            self.abort()
        elif size >= MUCH_BYTES:
            # One socket that always has more is read thirty times over before another has its turn.
            self._pause_reading()
            self._loop.call_later(REST_BETWEEN_READS, self.read_on)

    # the server's sweep

    @property
    def busy(self) -> bool:
        """Whether a request is under way, waiting or being received."""
        return self._active is not None or bool(self._queue) or self._head is not None

    def close_if_idle(self, seconds: float = 0.0) -> None:
        """Close a connection that has been without a request for so long; one that has just come is not overlooked."""
        if not self.busy and self._loop.time() - self._idle_since >= seconds and not has_unread(self._socket):
            self._close()

    def check(self, now: float) -> None:
        """End what takes too long. Called every second."""
        limits = self._limits
        slow = self._paused_since if self._paused_since is not None else self._closing_since
        if slow is not None and now - slow > limits.slow_client_seconds:
            extra = fields(seconds=round(now - slow), paused=self._paused_since is not None)
            log.info("a client took too little of its answer: its connection is cut", extra=extra)
            self.abort()
        elif self._head is not None and now - self._head.began > limits.head_seconds:
            self._refuse(head_too_slow(limits))
        elif self._active is not None:
            if self._eof or not self._reading:
                self._look()
        elif self._receiving is not None:
            if now - self._idle_since > REST_SECONDS:
                self._close(unread=True)
        else:
            self.close_if_idle(limits.keep_alive_seconds)

    # clients that send nothing more

    def _probe(self) -> None:
        active = self._active
        if active is not None and not active.started:
            self._probed = self._loop.time()
            self.write(CONTINUE)

    def _look(self) -> None:
        """Is a client that cannot be heard any more still there?"""
        if self._gone or self._transport is None:
            return
        if was_reset(self._socket):
            self.abort()
        elif self._eof and self._loop.time() - self._probed > self._patience:
            self._patience = min(2 * self._patience, PROBE_SECONDS)
            self._probe()
