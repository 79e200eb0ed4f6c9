"""Fake replicas, a router in this process, and a plain HTTP/1.1 client that shows what is on the wire."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvloop

from kvern_router.accesslog import AccessLog
from kvern_router.router import Router
from kvern_router.settings import Settings


@pytest.fixture(scope="session")
def event_loop_policy() -> uvloop.EventLoopPolicy:
    """What the router runs on."""
    return uvloop.EventLoopPolicy()


@dataclass
class Seen:
    """A request as a replica got it."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> list[str]:
        return [v for n, v in self.headers if n == name]


@dataclass
class Answer:
    """A response as the client got it."""

    status: int
    headers: dict[str, str]
    body: bytes
    chunks: list[bytes] = field(default_factory=list)
    whole: bool = True  # its framing was complete

    def json(self) -> Any:
        return json.loads(self.body)


async def read_head(reader: asyncio.StreamReader) -> tuple[str, list[tuple[str, str]]]:
    raw = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = raw.split("\r\n")
    return first, [(n.lower(), v.strip()) for n, _, v in (line.partition(":") for line in lines if line)]


Handler = Callable[[Seen, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Replica:
    """A fake engine. `handler` answers everything but /ready; `ready` is /ready's status, None: no answer at all."""

    def __init__(self, name: str, host: str = "127.0.0.1", port: int = 0) -> None:
        self.name = name
        self.host = host
        self.says_name: str | None = None  # in the answers to probes
        self.probes = 0
        self.ready: int | None = 200
        self.handler: Handler = self.answer
        self.seen: list[Seen] = []
        self.connections = 0  # but for probes
        self.disconnects = 0  # clients that went away before their answer was complete
        self.port = port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> Replica:
        self._server = await asyncio.start_server(self._serve, self.host, self.port, limit=1 << 26)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def kill(self) -> None:
        """Like SIGKILL: every connection is reset, nobody listens."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()

    async def answer(self, seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = json.dumps({"replica": self.name, "bytes": len(seen.body)}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body))
        writer.write(b"" if seen.method == "HEAD" else body)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        first_request = True
        try:
            while True:
                first, headers = await read_head(reader)
                method, target, _ = first.split(" ")
                length = next((int(v) for n, v in headers if n == "content-length"), 0)
                assert not [v for n, v in headers if n == "transfer-encoding"]
                seen = Seen(method, target, headers, await reader.readexactly(length))
                if target == "/ready":
                    self.probes += 1
                    if self.ready is None:
                        await reader.read()
                        return
                    said = f"x-kvern-pod: {self.says_name}\r\n".encode() if self.says_name else b""
                    writer.write(b"HTTP/1.1 %d x\r\n%bcontent-length: 0\r\n\r\n" % (self.ready, said))
                    return
                self.connections += first_request
                first_request = False
                self.seen.append(seen)
                await self._handle(seen, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _handle(self, seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        work = asyncio.ensure_future(self.handler(seen, reader, writer))
        gone = asyncio.ensure_future(reader.read(1))
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            assert gone.exception() or gone.result() == b"", "the router pipelined, or sent more than it announced"
            self.disconnects += 1
            work.cancel()
            await asyncio.wait((work,))
            if not work.cancelled():
                work.exception()
            raise ConnectionResetError
        gone.cancel()
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            await gone
        await work


def sse(*, events: list[bytes] | None = None, count: int = 5, gap: float = 0.0, die: bool = False) -> Handler:
    """A handler that streams events, each a chunk of its own; `die`: reset instead of the end."""

    async def handle(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for data in events if events is not None else [b"data: %d\n\n" % i for i in range(count)]:
            writer.write(b"%x\r\n%b\r\n" % (len(data), data))
            await writer.drain()
            await asyncio.sleep(gap)
        if die:
            await asyncio.sleep(0.05)  # what was written reaches the router first
            writer.transport.abort()
            raise ConnectionResetError
        writer.write(b"0\r\n\r\n")

    return handle


def status(code: int, *, retry_after: int | None = None, body: bytes = b'{"error": {"message": "m"}}') -> Handler:
    """A handler that answers with a status."""

    async def handle(seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        extra = b"" if retry_after is None else b"retry-after: %d\r\n" % retry_after
        writer.write(b"HTTP/1.1 %d x\r\n%bcontent-length: %d\r\n\r\n%b" % (code, extra, len(body), body))

    return handle


class Client:
    """One connection to the router."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> None:
        fields = {"host": "kvern", **(headers or {})}
        if body is not None:
            fields["content-length"] = str(len(body))
        head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{n}: {v}\r\n" for n, v in fields.items())
        self.writer.write(head.encode() + b"\r\n" + (body or b""))

    async def head(self) -> Answer:
        """The next response's head."""
        async with asyncio.timeout(60):
            first, headers = await read_head(self.reader)
        return Answer(int(first.split(" ")[1]), dict(headers), b"")

    async def chunk(self) -> bytes:
        """The next chunk, b"" for the last."""
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        return (await self.reader.readexactly(size + 2))[:-2]

    async def receive(self, *, to_head: bool = False) -> Answer:
        """The next response."""
        answer = await self.head()
        try:
            if to_head or answer.status in (204, 304):
                pass
            elif answer.headers.get("transfer-encoding") == "chunked":
                async with asyncio.timeout(60):
                    while chunk := await self.chunk():
                        answer.chunks.append(chunk)
            elif "content-length" in answer.headers:
                answer.body = await self.reader.readexactly(int(answer.headers["content-length"]))
            else:
                answer.body = await self.reader.read()
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            answer.whole = False
            answer.body = getattr(error, "partial", b"")
        answer.body = b"".join(answer.chunks) or answer.body
        return answer

    async def closed(self) -> bool:
        """Whether the router closes the connection."""
        try:
            async with asyncio.timeout(30):
                return await self.reader.read(1) == b""
        except ConnectionError:
            return True
        except TimeoutError:
            return False

    def close(self) -> None:
        self.writer.close()


class Bench:
    """A router with its replicas and clients; everything is closed at the end of the test."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "replicas.json"
        self.more: dict[str, Any] = {}  # what the file says beside the replicas
        self.replicas: list[Replica] = []
        self.router: Router = None  # type: ignore[assignment]
        self._clients: list[Client] = []

    async def replica(self, name: str | None = None, handler: Handler | None = None, **place: Any) -> Replica:
        """A running replica; `place`: its host and port."""
        replica = await Replica(name or f"r{len(self.replicas)}", **place).start()
        if handler is not None:
            replica.handler = handler
        self.replicas.append(replica)
        return replica

    def list_replicas(self, entries: list[dict[str, Any]] | None = None, **states: str) -> None:
        """Write the file as an operator does, atomically. `states`: by replica name."""
        if entries is None:
            entries = [{"name": r.name, "url": r.url, "state": states.get(r.name, "ready")} for r in self.replicas]
        temporary = self.file.with_suffix(".new")
        temporary.write_text(json.dumps({"model": "tiny", "replicas": entries, **self.more}))
        temporary.replace(self.file)

    async def start(self, count: int = 0, access_log: AccessLog | None = None, **settings: Any) -> Router:
        for _ in range(count):
            await self.replica()
        if not self.file.exists():
            self.list_replicas()
        chosen = {
            "listen": ("127.0.0.1", 0),
            "probe_interval": 0.1,
            "probe_timeout": 5.0,
            "hold_timeout": 20.0,
            **settings,
        }
        self.router = Router(Settings(replicas_file=self.file, **chosen), access_log)
        await self.router.start()
        return self.router

    async def client(self, limit: int = 1 << 26) -> Client:
        """A connection; `limit`: bytes that are read ahead of the test."""
        host, port = self.router.address.rsplit(":", 1)
        client = Client(*await asyncio.open_connection(host, int(port), limit=limit))
        self._clients.append(client)
        return client

    async def ask(
        self, method: str = "POST", path: str = "/v1/completions", body: bytes | None = b"{}", **kw: Any
    ) -> Answer:
        """One request on a connection of its own."""
        client = await self.client()
        client.send(method, path, body, **kw)
        answer = await client.receive(to_head=method == "HEAD")
        client.close()
        return answer

    async def until(self, condition: Callable[[], Any], seconds: float = 60.0) -> None:
        """Wait until a condition holds; fails when it does not in time."""
        deadline = asyncio.get_running_loop().time() + seconds
        while not condition():
            assert asyncio.get_running_loop().time() < deadline, "the condition did not come true in time"
            await asyncio.sleep(0.01)

    def metric(self, name: str) -> float:
        """A series' value as it is exported, such as 'kvern_router_requests_total{status="200"}'."""
        for line in self.router.metrics.exposition(b"").decode().splitlines():
            if line.rpartition(" ")[0] == name:
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"{name} is not exported")

    def probe_of(self, replica: Replica) -> str:
        return next(r["condition"] for r in self.router.fleet.describe() if r["name"] == replica.name)

    async def close(self) -> None:
        for client in self._clients:
            client.close()
        if self.router is not None:
            await self.router.close()
        for replica in self.replicas:
            replica.kill()
        await asyncio.sleep(0.01)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path)
    yield made
    await made.close()


@pytest.fixture
def fake() -> Any:
    """The ready-made handlers: fake.sse(...), fake.status(...)."""

    class Handlers:
        pass

    Handlers.sse = staticmethod(sse)  # type: ignore[attr-defined]
    Handlers.status = staticmethod(status)  # type: ignore[attr-defined]
    return Handlers
