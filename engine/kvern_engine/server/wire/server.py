"""The listener: connections of one app, a sweep that ends what takes too long, and an orderly end."""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from email.utils import formatdate
from typing import Any

from kvern_engine.server.wire.connection import Connection
from kvern_engine.server.wire.exchange import Exchange
from kvern_engine.server.wire.head import WireLimits

log = logging.getLogger(__name__)

BACKLOG = 4096
SWEEP_SECONDS = 1.0
_CLOSE_SECONDS = 2.0  # for the last bytes of answers, once nothing is in flight any more
_POLL_SECONDS = 0.02


class HttpServer:
    """Serves an ASGI app on listening sockets until `stop`. Create it in the running loop. While `leaving()`, every
    answer that begins says that its connection will be closed."""

    def __init__(self, app: Any, limits: WireLimits | None = None, leaving: Callable[[], bool] = lambda: False) -> None:
        self.app = app
        self.limits = limits or WireLimits()
        self.connections: set[Connection] = set()
        self.leaving = leaving
        self.stopping = False  # connections are closed, whatever their answers said
        self._listeners: list[asyncio.Server] = []
        self._stop = asyncio.Event()
        self._date = (0, b"")
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, sockets: Sequence[socket.socket]) -> None:
        """Accept on `sockets` until `stop`, then let answers under way finish for a moment."""
        self._listeners = [await self._listen(sock) for sock in sockets]
        sweep = asyncio.ensure_future(self._sweep())
        try:
            await self._stop.wait()
        finally:
            await self.take_no_more()
            sweep.cancel()
        await self._end()

    def stop(self) -> None:
        self._stop.set()

    async def take_no_more(self) -> None:
        """No new connections but those that wait to be taken, which closing alone would reset; and no new requests on
        those that are there, once what runs on them has ended."""
        self.stopping = True
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            waiting = [socket.socket(fileno=os.dup(each.fileno())) for each in listener.sockets]
            listener.close()
            for each in waiting:
                await self._take_all(each)

    async def _take_all(self, listening: socket.socket) -> None:
        """What its backlog holds. Another API server of the pod may listen there, too: either takes it."""
        loop = asyncio.get_running_loop()
        with listening:
            listening.setblocking(False)
            while True:
                try:
                    taken = listening.accept()[0]
                except ConnectionAbortedError:
                    continue
                except OSError:  # BlockingIOError: nobody is left; or this process can open no more files
                    return
                taken.setblocking(False)
                try:
                    await loop.connect_accepted_socket(lambda: Connection(self), taken)
                except OSError:
                    taken.close()

    def let_go(self, idle_seconds: float) -> bool:
        """Close what no request has used for so long. Returns whether no connection is left."""
        for connection in list(self.connections):
            connection.close_if_idle(idle_seconds)
        return not self.connections

    async def _listen(self, sock: socket.socket) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        if sock.family == socket.AF_UNIX:
            return await loop.create_unix_server(lambda: Connection(self), sock=sock, backlog=BACKLOG)
        return await loop.create_server(lambda: Connection(self), sock=sock, backlog=BACKLOG)

    async def _end(self) -> None:
        deadline = time.monotonic() + _CLOSE_SECONDS
        while self.connections and time.monotonic() < deadline:
            self.let_go(0.0)
            await asyncio.sleep(_POLL_SECONDS)
        for connection in list(self.connections):
            connection.abort()
        await asyncio.sleep(0)

    # what connections ask for

    def run(self, exchange: Exchange) -> None:
        """Call the app for a request, in a task of its own."""
        task = asyncio.get_running_loop().create_task(exchange.run(self.app))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def connected(self, connection: Connection) -> bool:
        """Take a new connection into the books; False where there are too many."""
        self.connections.add(connection)
        return len(self.connections) <= self.limits.connections

    def disconnected(self, connection: Connection) -> None:
        self.connections.discard(connection)

    def date(self) -> bytes:
        """The Date header's value, made once a second."""
        now = int(time.time())
        if now != self._date[0]:
            self._date = now, formatdate(now, usegmt=True).encode()
        return self._date[1]

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                await asyncio.sleep(SWEEP_SECONDS)
                now = loop.time()
                for connection in list(self.connections):
                    try:
                        connection.check(now)
                    except Exception:  # one odd connection must not keep the others from their limits
                        log.exception("a connection could not be looked at: it is cut")
                        connection.abort()
