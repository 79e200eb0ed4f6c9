"""The router as a whole: listeners, watched files, the sweep of idle connections, its own endpoints, and the drain."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from typing import Any

from kvern_router.accesslog import AccessLog
from kvern_router.auth import ApiKeys
from kvern_router.client import ClientConnection
from kvern_router.ending import Ending
from kvern_router.errors import RouterError, bad_request
from kvern_router.exchange import Exchange
from kvern_router.fleet import Fleet, Replica
from kvern_router.http1 import Request
from kvern_router.listener import close_listener
from kvern_router.lookup import Lookup
from kvern_router.metrics import CONTENT_TYPE, RouterMetrics
from kvern_router.peers import PATH as PEERS_PATH
from kvern_router.peers import Peers
from kvern_router.probe import probe_forever
from kvern_router.replicas import WatchedFile, parse_replicas
from kvern_router.settings import Settings
from kvern_router.tenants import Tenants

log = logging.getLogger("kvern.router")
BACKLOG = 4096
SWEEP_SECONDS = 1.0
DRAIN_POLL_SECONDS = 0.05
FIRST_LOOK_SECONDS = 0.5  # at most, for the listed replicas to say whether they are ready, before clients are let in
Answer = tuple[int, bytes, bytes]  # status, content type, body


class Router:
    """Create it in a running loop, `await start()`, later `await drain()`."""

    def __init__(self, settings: Settings, access_log: AccessLog | None = None) -> None:
        self.settings = settings
        self.clients: set[ClientConnection] = set()
        self.buffered_bytes = 0
        self.draining = False
        self.parting = False  # draining, and what begins now might not end in time: connections end with their answers
        self.fleet = Fleet(settings, self._probe)
        self.metrics = RouterMetrics(self.fleet)
        self._access_log = access_log
        self._keys = ApiKeys() if settings.api_keys_file is not None else None
        self._tenants = Tenants(self.metrics)
        self._peers = Peers(self._tenants, self._keys, settings.connect_timeout)
        self._server: asyncio.Server | None = None
        self._admin_server: asyncio.Server | None = None
        self._last_arrival = 0.0  # of a request for a replica, loop time
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Read the files and listen. Raises OSError (address in use) and ValueError (no API key in the file)."""
        loop = asyncio.get_running_loop()
        keys_file = self.settings.api_keys_file
        if keys_file is not None:
            try:
                self._load_keys(keys_file.read_text())
            except OSError as error:
                why = f"the API keys file {keys_file} cannot be read ({error.strerror})"
                raise ValueError(f"{why}; in a cluster it is the entry {keys_file.name!r} of a Secret") from None
            self._tasks.append(loop.create_task(WatchedFile(keys_file, self._load_keys).watch()))
        self._tasks.append(loop.create_task(WatchedFile(self.settings.replicas_file, self._load_replicas).watch()))
        self._tasks.append(loop.create_task(self._sweep()))
        self._tasks.append(loop.create_task(self._peers.ask_forever()))
        await asyncio.sleep(0)  # the files are read before the first request is
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LOOK_SECONDS):
                await self.fleet.looked.wait()
        self._tasks.append(loop.create_task(Lookup(self.fleet).run()))
        host, port = self.settings.listen
        self._server = await loop.create_server(self._client, host, port, backlog=BACKLOG)
        if self.settings.metrics_listen is not None:
            host, port = self.settings.metrics_listen
            self._admin_server = await loop.create_server(lambda: ClientConnection(self, admin=True), host, port)

    @property
    def address(self) -> str:
        """Where clients connect, HOST:PORT."""
        return _address(self._server)

    @property
    def metrics_address(self) -> str:
        """Where metrics are, HOST:PORT."""
        return _address(self._admin_server or self._server)

    async def drain(self) -> bool:
        """Finish what runs and what still comes, close, as ending.py decides. Returns whether everything finished
        within the drain timeout. From now on every answer says Connection: close."""
        settings, time = self.settings, asyncio.get_running_loop().time
        ending = Ending(settings.shutdown_delay, settings.drain_timeout, settings.drain_idle)
        self.draining = True
        began = self._last_arrival = time()
        log.info("draining: %d requests under way, up to %g s", len(self._exchanges()), settings.drain_timeout)
        await asyncio.sleep(DRAIN_POLL_SECONDS)  # what is on its way already is answered in any case
        while not ending.over(time() - began, time() - self._last_arrival, sum(not c.admin for c in self.clients)):
            if not ending.accepts(time() - began):
                self.parting = True
                await close_listener(self._server, self._client)
            for client in list(self.clients):
                client.close_if_idle(ending.idle_seconds)
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        left = self._exchanges()
        if left:
            log.warning("drain timeout: %d requests are ended", len(left))
            message = f"The router is shutting down and waited {settings.drain_timeout:g} s (drain-timeout)"
            for exchange in left:
                exchange.interrupt(RouterError(503, message, code="draining", retry_after=1))
        await self.close()
        return not left

    async def close(self) -> None:
        """Close everything; answers that are written get a moment to reach their clients."""
        await close_listener(self._server, self._client)
        for _ in range(50):
            for client in list(self.clients):
                client.close_if_idle()
            if not self.clients:
                break
            await asyncio.sleep(0.02)
        for client in list(self.clients):
            client.abort()
        if self._admin_server is not None:
            self._admin_server.close()
        self.fleet.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.sleep(0)

    # what connections ask for

    def local_answer(self, request: Request, admin: bool) -> Answer | None:
        """The answer to a request that is the router's own, or None for one that is to be proxied."""
        path = request.path
        probe = path in (b"/health", b"/ready")
        shown = admin or self.settings.metrics_listen is None
        if not (probe or (_is_own(path) and shown and not path.startswith(b"/admin/"))):
            if admin or _is_own(path):
                raise bad_request(f"There is nothing at {path[:200].decode('latin-1')}", status=404, code="not_found")
            return None
        if request.method not in (b"GET", b"HEAD"):
            raise bad_request(f"{path.decode('latin-1')} answers GET only", status=405)
        if path == b"/metrics":
            return 200, CONTENT_TYPE, self.metrics.exposition(request.query)
        if path == b"/health":
            return _json(200, {"status": "ok"})
        if path == b"/ready":
            return self._ready()
        if path == b"/-/replicas":
            return _json(200, {"model": self.fleet.model, "replicas": self.fleet.describe()})
        if path == PEERS_PATH.encode():
            return _json(200, self._peers.answer(request))
        raise bad_request(f"There is nothing at {path[:200].decode('latin-1')}", status=404, code="not_found")

    def identify(self, request: Request, admin: bool) -> RouterError | None:
        """Say whose a request is, from its head: of who has no key no body is kept, which would take the room of
        others. Returns what is wrong with it (401), None: nothing. A browser asks without a key what it may send."""
        asks = request.method == b"OPTIONS" and not request.framing()
        if self._keys is None or admin or asks or _is_own(request.path):
            return None
        try:
            request.tenant = self._keys.tenant(request)
        except RouterError as error:
            return error
        return None

    def admit(self, request: Request) -> None:
        """Whether the request may go on to a replica. Raises RouterError (429)."""
        self._last_arrival = asyncio.get_running_loop().time()
        if request.method == b"POST":
            request.use, request.extra = self._tenants.admit(request.tenant, request.size)

    def account(self, request: Request, peer: bytes, status: int, summary: dict[str, Any]) -> None:
        """Count and log a request that has ended."""
        self.metrics.finished(status)
        if self._access_log is None:
            return
        now = asyncio.get_running_loop().time()
        self._access_log.write(
            {
                "id": request.request_id.decode("latin-1"),
                "client": peer.decode(),
                "method": request.method.decode("latin-1"),
                "path": request.path[:200].decode("latin-1"),
                "status": status,
                "seconds": round(now - request.began, 4),
                "bytes_in": request.size,
                **({"tenant": request.tenant} if request.tenant else {}),
                **summary,
            }
        )

    # inside

    def _client(self) -> ClientConnection:
        return ClientConnection(self)

    def _ready(self) -> Answer:
        if self.draining:
            return _json(503, {"status": "draining"})
        if self.fleet.has_available():
            return _json(200, {"status": "ready"})
        if self.settings.max_held > 0:
            return _json(200, {"status": "holding"})  # it must get requests, or nothing would wake the service
        return _json(503, {"status": "no replica is ready"})

    def _load_replicas(self, text: str) -> None:
        listed = parse_replicas(text)
        self.fleet.update(listed)
        self._tenants.limit(listed.limits)
        self._peers.addresses = listed.routers

    def _load_keys(self, text: str) -> None:
        assert self._keys is not None
        self._keys.load(text)
        self._tenants.keep(self._keys.tenants)

    def _probe(self, replica: Replica) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(probe_forever(self.fleet, replica, self.settings))

    def _exchanges(self) -> list[Exchange]:
        return [client.exchange for client in self.clients if client.exchange is not None]

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            now = loop.time()
            for client in list(self.clients):
                client.check(now)
            self.fleet.expire_idle()
            await asyncio.sleep(SWEEP_SECONDS)


def _is_own(path: bytes) -> bool:
    """Whether the router itself answers a path, if only that there is nothing at it."""
    return path in (b"/health", b"/ready", b"/metrics") or path.startswith((b"/-/", b"/admin/"))


def _json(status: int, value: Any) -> Answer:
    return status, b"application/json", json.dumps(value).encode()


def _address(server: asyncio.Server | None) -> str:
    if server is None or not server.sockets:
        return ""
    sock = server.sockets[0]
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if sock.family == socket.AF_INET6 else f"{host}:{port}"
