"""The end of one of two routers, as clients see it that keep their connections: none meets a closed door."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpcore
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvern_router.ending import ACCEPT_SECONDS, Ending
from kvern_router.listener import close_listener

SECONDS = st.floats(0, 1000)


@given(SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, st.integers(0, 9))
def test_a_router_goes_when_nobody_has_a_reason_to_come(delay, timeout, idle, age, quiet, connections):
    ending = Ending(delay, timeout, idle)
    limit = max(delay, timeout)
    assert ending.over(limit, quiet, connections), "it never outlives its deadline"
    if age < delay:
        assert ending.accepts(age) and not ending.over(age, quiet, connections)
    if age < limit and ending.over(age, quiet, connections):
        assert connections == 0
        assert quiet >= delay or not ending.accepts(age), "a node still sends clients here"
    if ending.accepts(age):
        assert age < max(delay, ACCEPT_SECONDS, timeout / 2)
        assert age < delay or age <= timeout / 2, "what is taken late has time to finish"
    assert delay or not (ending.accepts(age) or ending.idle_seconds)


@contextlib.contextmanager
def router(file: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """`kvern-router` and its port."""
    command = [sys.executable, "-m", "kvern_router.main", "--listen", "127.0.0.1:0", "--replicas-file", str(file)]
    process = subprocess.Popen([*command, "--no-access-log", *flags], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "listening on http://" in line)
        yield process, int(line.split("http://")[1].split(",")[0].rsplit(":", 1)[1])
    finally:
        process.kill()
        process.communicate()


class Service(httpcore.AsyncNetworkBackend):
    """A Service as clients see it: each new connection goes to one of the endpoints, a kept one stays where it is."""

    def __init__(self, ports: list[int]) -> None:
        self.ports = ports
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(self, host: str, port: int, *more: Any, **named: Any) -> httpcore.AsyncNetworkStream:
        return await self._backend.connect_tcp("127.0.0.1", random.choice(self.ports), *more, **named)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def client(self, keep_alive: float) -> httpx.AsyncClient:
        """One that never tries again and keeps idle connections for so long, in seconds."""
        transport = httpx.AsyncHTTPTransport(retries=0)
        transport._pool = httpcore.AsyncConnectionPool(
            network_backend=self, max_connections=None, keepalive_expiry=keep_alive, retries=0
        )
        return httpx.AsyncClient(transport=transport, base_url="http://service", timeout=30)


def paced(fake: Any) -> Any:
    """A replica's handler: streams as long as their prompts say."""

    async def handle(seen: Any, reader: Any, writer: Any) -> None:
        events = json.loads(seen.body)["max_tokens"]
        await fake.sse(count=events, gap=0.05)(seen, reader, writer)

    return handle


async def asked_again(client: httpx.AsyncClient, until: asyncio.Event, chance: random.Random) -> list[str]:
    """One stream after the other, at once or after a pause around what a connection is kept for. What failed."""
    wrong: list[str] = []
    while not until.is_set():
        tokens = chance.choice((1, 1, 4, 40))
        try:
            answer = await client.post("/v1/completions", json={"max_tokens": tokens})
            if answer.status_code != 200 or answer.content.count(b"data:") != tokens:
                wrong.append(f"{answer.status_code}: {answer.text[:200]}")
        except httpx.HTTPError as error:
            wrong.append(repr(error))
        await asyncio.sleep(chance.choice((0, 0, 0.001, 0.01, chance.uniform(0, 1.2))))
    return wrong


@pytest.mark.parametrize("late", [0.3, 1.5], ids=["endpoints in time", "endpoints late"])
async def test_no_request_fails_while_one_router_of_two_ends(bench: Any, fake: Any, late: float) -> None:
    """Requests at any moment across the drain, on new connections and kept ones, nothing tried again. Late: a node
    forgets the router only after the delay."""
    await bench.replica("a", paced(fake))
    await bench.start()
    flags = ("--shutdown-delay-seconds", "0.5", "--drain-idle-seconds", "2")
    chance = random.Random(os.urandom(8))
    with router(bench.file, *flags) as (victim, port), router(bench.file, *flags) as (_, other):
        service, enough = Service([port, other]), asyncio.Event()
        async with service.client(keep_alive=1.0) as client:
            asking = [asyncio.create_task(asked_again(client, enough, chance)) for _ in range(24)]
            await asyncio.sleep(2.5)  # some streams are half way through
            victim.send_signal(signal.SIGTERM)
            await asyncio.sleep(late)
            service.ports = [other]
            code = await asyncio.to_thread(victim.wait, 30)
            await asyncio.sleep(0.5)
            enough.set()
            wrong = [each for found in await asyncio.gather(*asking) for each in found]
    assert not wrong
    assert code == 0


async def connect(bench: Any, port: int) -> Any:
    """A client that does not look whether its connection was closed before it sends: the worst that a race can be."""
    return type(await bench.client())(*await asyncio.open_connection("127.0.0.1", port))


async def test_a_stream_that_began_before_the_end_may_be_followed_by_a_request(bench: Any, fake: Any) -> None:
    """Its head could not say that the connection would not be kept. Each has the next request sent some time after."""
    await bench.replica("a", paced(fake))
    await bench.start()
    with router(bench.file, "--shutdown-delay-seconds", "0.3", "--drain-idle-seconds", "2") as (process, port):
        clients = [await connect(bench, port) for _ in range(20)]
        for client in clients:
            client.send("POST", "/v1/completions", b'{"max_tokens": 15}')
            assert "connection" not in (await client.head()).headers
        process.send_signal(signal.SIGTERM)

        async def follow(client: Any, after: float) -> None:
            while await client.chunk():
                pass
            await asyncio.sleep(after)
            client.send("POST", "/v1/completions", b'{"max_tokens": 1}')
            answer = await client.receive()
            assert (answer.status, answer.headers["connection"], answer.whole) == (200, "close", True), after

        await asyncio.gather(*(follow(client, number * 0.06) for number, client in enumerate(clients)))
        assert await asyncio.to_thread(process.wait, 20) == 0


async def test_a_kept_connection_is_closed_only_when_it_has_idled_for_long(bench: Any, fake: Any) -> None:
    """Whenever its client comes again; who never comes does not hold the router up for longer."""
    await bench.replica("a", paced(fake))
    await bench.start()
    with router(bench.file, "--shutdown-delay-seconds", "0.2", "--drain-idle-seconds", "1.5") as (process, port):
        clients = [await connect(bench, port) for _ in range(10)]
        for client in clients:
            client.send("POST", "/v1/completions", b'{"max_tokens": 1}')
            await client.receive()
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        for number, client in enumerate(clients[1:]):
            await asyncio.sleep(0.1)
            client.send("POST", "/v1/completions", b'{"max_tokens": 1}')
            answer = await client.receive()
            assert (answer.status, answer.headers["connection"]) == (200, "close"), number
        assert await clients[0].closed()
        assert time.monotonic() - began > 1.2
        assert await asyncio.to_thread(process.wait, 20) == 0
        assert time.monotonic() - began < 6


async def test_an_idle_router_goes_after_the_delay(bench: Any) -> None:
    await bench.start(1)
    with router(bench.file, "--shutdown-delay-seconds", "0.5") as (process, _):
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 20) == 0
        assert 0.5 <= time.monotonic() - began < 4


async def test_nobody_in_the_backlog_is_reset(bench: Any) -> None:
    """The system has let them in while the loop was busy; they have sent already."""
    running = await bench.start(1)
    host, port = running.address.rsplit(":", 1)
    waiting = [socket.create_connection((host, int(port))) for _ in range(30)]  # the loop does not run meanwhile
    for each in waiting:
        each.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        each.settimeout(20)
    await close_listener(running._server, running._client)
    for each in waiting:
        assert (await asyncio.to_thread(each.recv, 99)).startswith(b"HTTP/1.1 200")
        each.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)))


async def test_a_request_that_waits_to_be_read_keeps_its_connection(bench: Any) -> None:
    """The loop was busy when it came, and the moment to close an idle connection came first."""
    running = await bench.start(1)
    host, port = running.address.rsplit(":", 1)
    with socket.create_connection((host, int(port))) as client:
        await bench.until(lambda: running.clients)
        client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        for each in running.clients:
            each.close_if_idle()
        assert (await asyncio.to_thread(client.recv, 99)).startswith(b"HTTP/1.1 200")


async def test_a_stream_that_ends_late_ends_its_connection(bench: Any, fake: Any) -> None:
    """What followed it might not end within the drain timeout. The client sees the end with the last bytes."""
    await bench.replica("a", paced(fake))
    await bench.start()
    flags = ("--shutdown-delay-seconds", "0.2", "--drain-timeout-seconds", "4", "--drain-idle-seconds", "20")
    with router(bench.file, *flags) as (process, port):
        early, late = await connect(bench, port), await connect(bench, port)
        for client, tokens in ((early, 10), (late, 56)):  # 0.5 and 2.8 s; what is taken after 2 s has too little time
            client.send("POST", "/v1/completions", b'{"max_tokens": %d}' % tokens)
            await client.head()
        process.send_signal(signal.SIGTERM)
        for client in (early, late):
            while await client.chunk():
                pass
            if client is early:
                client.send("POST", "/v1/completions", b'{"max_tokens": 1}')
                assert (await client.receive()).status == 200
        began = time.monotonic()
        assert await late.closed() and time.monotonic() - began < 0.1
        assert await asyncio.to_thread(process.wait, 20) == 0
        assert time.monotonic() - began < 1, "nothing is left to wait for"


async def test_the_end_of_a_connection_comes_with_the_last_bytes(bench: Any, fake: Any) -> None:
    """In one segment: who has the last bytes can see the end, however little time has passed."""
    await bench.replica("a", paced(fake))
    await bench.start()

    def read(sock: socket.socket) -> bytes:
        told = b""
        while not told.endswith(b"0\r\n\r\n"):
            told += sock.recv(65536)
        sock.setblocking(False)
        return sock.recv(1)  # BlockingIOError: no end is there yet

    flags = ("--shutdown-delay-seconds", "0.1", "--drain-timeout-seconds", "2")
    with router(bench.file, *flags) as (process, port):
        clients = [socket.create_connection(("127.0.0.1", port), 10) for _ in range(30)]
        for number, client in enumerate(clients):
            body = b'{"max_tokens": %d}' % (25 + number % 4)  # 1.25 s and more: the minute, here 1 s, is over
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await asyncio.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        ends = await asyncio.gather(*(asyncio.to_thread(read, client) for client in clients))
        assert ends == [b""] * len(clients)
        for client in clients:
            client.close()
