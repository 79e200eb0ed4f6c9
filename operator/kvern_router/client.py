"""A client's connection: an asyncio Protocol around httptools' request parser. One request is served at a time.

Pipelined requests wait in a short queue, in order. Bad requests, limits, keys and the router's own endpoints are dealt
with here; everything else becomes an Exchange.

A client that has shut its sending side still gets its answers: its end-of-file looks like that of a client that is
gone, so it is sent `100 Continue`, which every client of HTTP/1.1 must be able to skip and which the system of one that
is gone answers with a reset.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from typing import TYPE_CHECKING, Any, cast

import httptools

from kvern_router.errors import RouterError, bad_request
from kvern_router.exchange import Exchange
from kvern_router.http1 import CONTINUE, Request, check_head, reason, response_head, too_large
from kvern_router.listener import has_unread, hold_back

if TYPE_CHECKING:
    from kvern_router.router import Router

MAX_PIPELINED = 8
PIECE = 16 * 1024  # bytes that are parsed at once: requests of a few bytes each must not become thousands of objects
# Connections above the most that are taken, and their seconds: kubelets ask by them whether the router lives, and would
# end it with all its streams for having too many clients.
SPARE, SPARE_SECONDS = 64, 2.0
LINGER_SECONDS = 2.0  # a client that is still sending gets to read its refusal before the connection is closed
WRITE_HIGH = 256 * 1024  # bytes of answer waiting for a slow client before its replica is paused
PROBE_SECONDS = 15.0  # at most between questions whether a client that sends nothing more is still there
FIRST_LOOKS = (0.01, 0.1)
_TCP_CLOSE = 7  # Linux's number of the state


def was_reset(sock: Any) -> bool:
    """Whether the other side has reset a TCP connection: known here before anything is read or written again."""
    option = getattr(socket, "TCP_INFO", None)
    if sock is None or option is None:
        return False
    try:
        return bool(sock.getsockopt(socket.IPPROTO_TCP, option, 1)[0] == _TCP_CLOSE)
    except (OSError, IndexError):
        return False


class ClientConnection(asyncio.Protocol):
    """One TCP connection of a client. `admin`: the router's own endpoints only."""

    def __init__(self, router: Router, admin: bool = False) -> None:
        self._router = router
        self.admin = admin
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._current: Request | None = None  # being received
        self._upgrading = b""  # the framing of a request that asks for another protocol, and has a body
        self._head_bytes = 0  # of the complete headers so far
        self._head_fed = 0  # received since the read in which the head began
        self._queue: deque[Request] = deque()
        self._unread = b""  # received, and left until fewer requests wait
        self._resting = False  # others have their turn
        self._surplus = False  # one connection too many: to ask for the router's health, and for nothing else
        self._exchange: Exchange | None = None
        self._last_request = False  # no further request is read
        self._reading = True
        self._gone = False
        self._eof = False  # the client sends no more
        self._probed = 0.0
        self._patience = 0.5  # until it is asked again, in seconds
        self._last_data = self._idle_since = self._loop.time()
        self._stalled_since: float | None = None
        self._stalled_bytes = 0
        self._buffered = 0  # bytes of request bodies that this connection keeps
        self.peer = b""

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop's is one without deriving from it
        transport.set_write_buffer_limits(high=WRITE_HIGH)
        peer = transport.get_extra_info("peername")
        self.peer = str(peer[0]).encode() if isinstance(peer, tuple) else b""
        self._router.clients.add(self)
        above = len(self._router.clients) - self._router.settings.max_connections
        self._surplus = above > 0
        if above > SPARE:
            self._reject(self._too_many_connections())

    def data_received(self, data: bytes) -> None:
        self._last_data = self._loop.time()
        self._unread += data
        self._parse()

    def _parse(self) -> None:
        """Read on in what has come, as long as not too many requests wait for their turn."""
        data, self._unread, at = self._unread, b"", 0
        while at < len(data) and not self._last_request and len(self._queue) < MAX_PIPELINED:
            self._feed(data[at : at + PIECE])
            at += PIECE
        if not self._last_request:  # what follows one is nobody's
            self._unread = data[at:]

    def _feed(self, data: bytes) -> None:
        before = self._current
        while data and not self._last_request:
            try:
                self._parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self._ignore_upgrade()
            except httptools.HttpParserError as error:
                if not self._last_request:
                    self._reject(bad_request(f"This is not a valid HTTP/1.1 request: {error}"))
                return
        request = self._current
        if request is not None and request is before and not request.head_done:
            # A header that is still incomplete is in the parser, where it cannot be counted: count what was fed.
            self._head_fed += len(data)
            if self._head_fed > self._router.settings.max_header_bytes:
                self._reject(self._head_too_large())

    def eof_received(self) -> bool:
        """The client sends no more: answers under way go on, unless it turns out to be gone altogether."""
        self._eof = self._last_request = True
        if self._current is not None:  # nobody will complete it
            self._forget_body(self._current)
            self._current = None
        if self._exchange is None:
            return bool(self._queue)
        if self._exchange.request.version != "1.1":
            return False  # HTTP/1.0 has no interim answers to ask with; proxies that speak it never close one side
        self._probe()
        for seconds in FIRST_LOOKS:
            self._loop.call_later(seconds, self._look)
        return True

    def _probe(self) -> None:
        if self._exchange is not None and self._exchange.writer.head is None:
            self._probed = self._loop.time()
            self.write(CONTINUE)

    def _look(self) -> None:
        """Is a client that cannot be heard any more still there?"""
        if self._gone or self._transport is None:
            return
        if was_reset(self._transport.get_extra_info("socket")):
            self.abort()
        elif self._eof and self._loop.time() - self._probed > self._patience:
            self._patience = min(2 * self._patience, PROBE_SECONDS)
            self._probe()

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone = True
        self._router.clients.discard(self)
        self._release(self._buffered)
        self._queue.clear()
        self._unread = b""
        if self._exchange is not None:
            self._exchange.client_gone()

    def pause_writing(self) -> None:
        self._stalled_since = self._loop.time()
        self._stalled_bytes = self._transport.get_write_buffer_size() if self._transport else 0
        if self._exchange is not None:
            self._exchange.pause()

    def resume_writing(self) -> None:
        self._stalled_since = None
        if self._exchange is not None:
            self._exchange.resume()
        self._advance()

    def _ignore_upgrade(self) -> None:
        """Upgrades are ignored, as RFC 9110 (7.8) allows. The parser takes a message to end with the head that asks for
        one: its body would be read as the next request. So another parser gets the framing without the question."""
        if not self._upgrading:
            return
        parser = httptools.HttpRequestParser(self)
        parser.feed_data(b"POST / HTTP/1.1\r\nhost: x\r\n" + self._upgrading + b"\r\n")
        self._parser, self._upgrading = parser, b""

    # httptools' side; while `_upgrading` is set it says again what is known

    def on_message_begin(self) -> None:
        if not self._last_request and not self._upgrading:
            self._current = Request(began=self._loop.time())
            self._head_bytes = self._head_fed = 0

    def on_url(self, url: bytes) -> None:
        if self._current is not None and not self._current.head_done:
            self._current.target += url
            self._head_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        request = self._current
        if request is not None and not request.head_done:  # trailers are dropped
            self._head_bytes += len(name) + len(value) + 4
            if len(request.headers) < self._router.settings.max_headers:
                request.headers.append((name.lower(), value))
            else:
                limit = self._router.settings.max_headers
                message = f"The request has too many headers: at most {limit} are accepted (max-headers)"
                self._reject(bad_request(message, status=431, code="too_many_headers"))

    def on_headers_complete(self) -> None:
        request = self._current
        if request is None or request.head_done:
            return
        request.head_done = True
        request.method = self._parser.get_method()
        request.version = self._parser.get_http_version()
        request.keep_alive = self._parser.should_keep_alive()
        if (error := self._wrong_with(request)) is not None:
            self._reject(error)
        else:
            if self._parser.should_upgrade():
                self._upgrading = request.framing()
            self._continue()

    def _wrong_with(self, request: Request) -> RouterError | None:
        """Why a request is refused at its head."""
        if self._head_bytes > self._router.settings.max_header_bytes:
            return self._head_too_large()
        if self._surplus and request.target != b"/health":
            return self._too_many_connections()
        error = check_head(request, self._router.settings.max_body_bytes)
        return error or self._router.identify(request, self.admin)

    def on_body(self, data: bytes) -> None:
        request = self._current
        if request is None:
            return
        request.size += len(data)
        if request.size > self._router.settings.max_body_bytes:
            self._reject(too_large(self._router.settings.max_body_bytes))
            return
        request.parts += data
        request.kept += len(data)
        self._buffered += len(data)
        self._router.buffered_bytes += len(data)
        if self._router.buffered_bytes > self._router.settings.max_buffered_bytes:
            message = "The router holds as many request bodies as it may (max-buffered-bytes); try again later"
            self._reject(RouterError(503, message, code="router_overloaded", retry_after=1))

    def on_message_complete(self) -> None:
        request = self._current
        if request is None or self._upgrading:
            return
        self._current = None
        request.complete = True
        request.received = self._loop.time()
        self._last_request = not request.keep_alive
        self._enqueue(request)

    # requests

    def _reject(self, error: RouterError) -> None:
        """The request that is being received gets an error in its turn, and nothing is read after it."""
        request = self._current or Request(began=self._loop.time(), version="1.1")
        self._current = None
        self._last_request = True
        self._forget_body(request)
        request.keep_alive, request.rejection = False, error
        request.received = self._loop.time()
        self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        self._queue.append(request)
        self._advance()
        if len(self._queue) >= MAX_PIPELINED and self._reading and self._transport is not None:
            self._reading = False
            self._transport.pause_reading()

    def _advance(self) -> None:
        """Serve what is next, unless something takes time or the client takes no more. Of the router's own answers it
        is one at a time, and then the others' turn: a connection may ask for thousands at once."""
        held_up = self._gone or self._resting or self._stalled_since is not None
        if self._queue and self._exchange is None and not held_up:
            self._serve(self._queue.popleft())
        self._continue()

    def _serve(self, request: Request) -> None:
        try:
            if request.rejection is not None:
                raise request.rejection
            answer = self._router.local_answer(request, self.admin)
            if answer is None:
                self._router.admit(request)
                self._exchange = Exchange(self._router, self, request)
                self._exchange.start()
                return
        except RouterError as error:
            self._answer_at_once(request, error)
        else:
            self._respond(request, *answer)
            self._done_with(request, self.may_keep_alive(request))
        self._resting = True
        self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._resting = False
        self._advance()

    def _continue(self) -> None:
        """Let a client send the body that it asked about, when it is that request's turn."""
        request = self._current
        if request is not None and request.expects_continue and not self.busy:
            request.expects_continue = False
            if not request.size:
                self.write(CONTINUE)

    def _answer_at_once(self, request: Request, error: RouterError) -> None:
        keep_alive = self.answer_error(request, error)
        self._router.account(request, self.peer, error.status, {"error": error.code})
        self._done_with(request, keep_alive)

    def exchange_done(self, exchange: Exchange, keep_alive: bool) -> None:
        """The exchange under way has ended."""
        self._exchange = None
        self._done_with(exchange.request, keep_alive)
        if not self._gone:
            self._advance()

    def _done_with(self, request: Request, keep_alive: bool) -> None:
        self._forget_body(request)
        if self._gone or self._transport is None:
            return
        self._idle_since = self._loop.time()
        if not keep_alive or (self._eof and not self._queue) or self._is_parting:
            self._close(unread=not request.complete)
        elif not self._reading and len(self._queue) < MAX_PIPELINED:
            self._loop.call_soon(self._read_on)  # we may be in the middle of parsing

    def _read_on(self) -> None:
        self._parse()
        if self._gone or self._transport is None or self._transport.is_closing() or self._reading:
            return
        if len(self._queue) < MAX_PIPELINED:
            self._reading = True
            self._transport.resume_reading()

    def begun(self, request: Request) -> None:
        """The answer has begun: its request is not sent again."""
        self._forget_body(request)

    def _forget_body(self, request: Request) -> None:
        self._release(request.forget_body())

    def _release(self, size: int) -> None:
        size = min(size, self._buffered)
        self._buffered -= size
        self._router.buffered_bytes -= size

    # answers

    def may_keep_alive(self, request: Request) -> bool:
        """Whether another request may follow on this connection."""
        return request.keep_alive and not self._router.draining and not self._surplus

    def answer_error(self, request: Request, error: RouterError) -> bool:
        """Answer with an error of the router's own; returns whether the connection stays."""
        headers = [*error.headers]
        if error.retry_after is not None:
            headers.append((b"retry-after", b"%d" % error.retry_after))
        return self._respond(request, error.status, b"application/json", error.body(), headers)

    def _respond(
        self,
        request: Request,
        status: int,
        content_type: bytes,
        body: bytes,
        headers: list[tuple[bytes, bytes]] | None = None,
    ) -> bool:
        keep_alive = self.may_keep_alive(request)
        fields = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *(headers or [])]
        if request.request_id:
            fields.append((b"x-request-id", request.request_id))
        fields += request.extra
        connection = (b"" if request.version == "1.1" else b"keep-alive") if keep_alive else b"close"
        head = response_head(status, reason(status), fields, connection)
        self.write(head if request.method == b"HEAD" else head + body)
        return keep_alive

    def write(self, data: bytes, last: bool = False) -> None:
        """Send bytes; a client that is gone gets none. `last`: of an answer."""
        if not self._gone and self._transport is not None:
            if last and self._is_parting:
                hold_back(self._transport.get_extra_info("socket"))
            self._transport.write(data)

    @property
    def _is_parting(self) -> bool:
        """The connection ends with this answer, though that may not have been said."""
        return self._router.parting and not self._queue and self._current is None

    def abort(self) -> None:
        """Cut the connection: the client must not take what it got for a whole answer."""
        if self._transport is not None:
            self._transport.abort()

    def _close(self, unread: bool = False) -> None:
        """Close once everything is written. unread: the client is still sending; closing at once would reset the
        connection and lose the answer, so read on for a moment and throw it away."""
        self._last_request = True
        self._queue.clear()
        if self._transport is None or self._transport.is_closing():
            return
        if not unread or self._eof:
            # At once: `close` comes when the loop has its next turn, and until then a client could take the connection
            # for one that is kept.
            with contextlib.suppress(OSError, RuntimeError, NotImplementedError):
                self._transport.write_eof()
            self._transport.close()
            return
        if not self._reading:
            self._reading = True
            self._transport.resume_reading()
        with contextlib.suppress(OSError, RuntimeError, NotImplementedError):
            self._transport.write_eof()
        self._loop.call_later(LINGER_SECONDS, self._transport.abort)

    # the router's sweep

    @property
    def busy(self) -> bool:
        """Whether a request is under way or waiting."""
        return self._exchange is not None or bool(self._queue)

    @property
    def unfinished(self) -> bool:
        """Whether a request is under way, waiting, or being received: what a drain waits for."""
        return self.busy or self._current is not None

    @property
    def exchange(self) -> Exchange | None:
        return self._exchange

    def check(self, now: float) -> None:
        """End what has been idle for too long. Called every second or so."""
        settings = self._router.settings
        if self._surplus and not self.busy and not self._last_request and now - self._idle_since > SPARE_SECONDS:
            self._reject(self._too_many_connections())
        elif self._stalled_since is not None and self._transport is not None:
            waiting = self._transport.get_write_buffer_size()
            if waiting < self._stalled_bytes:
                self._stalled_bytes, self._stalled_since = waiting, now
            elif now - self._stalled_since > settings.idle_timeout:
                self.abort()
        elif self._exchange is not None:
            if self._eof or not self._reading:
                self._look()
            if self._exchange.idle_for(now) > settings.idle_timeout:
                message = f"The replica sent nothing for {settings.idle_timeout:g} s (idle-timeout)"
                self._exchange.interrupt(RouterError(504, message, code="idle_timeout"))
        elif self._current is not None:
            began = self._current.began
            since = self._last_data if self._current.head_done else began
            if now - since > settings.upload_timeout or now - began > settings.body_timeout:
                limit = f"{settings.upload_timeout:g} s without a byte, {settings.body_timeout:g} s in all"
                self._reject(bad_request(f"The request did not arrive in time ({limit})", status=408))
        else:
            self.close_if_idle(settings.keep_alive)

    def close_if_idle(self, seconds: float = 0.0) -> None:
        """Close a connection that has been without a request for so long; one that has just come is not overlooked."""
        idle = not self.unfinished and self._loop.time() - self._idle_since >= seconds
        if idle and self._transport is not None and not has_unread(self._transport.get_extra_info("socket")):
            self._close()

    def _too_many_connections(self) -> RouterError:
        limit = self._router.settings.max_connections
        message = f"The router has {limit} connections, the most it takes (max-connections); try again later"
        return RouterError(503, message, code="router_overloaded", retry_after=1)

    def _head_too_large(self) -> RouterError:
        limit = self._router.settings.max_header_bytes
        return bad_request(f"The request's headers are too large: at most {limit} bytes are accepted", status=431)
