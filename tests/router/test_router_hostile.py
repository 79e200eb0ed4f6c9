"""Clients of the router that are slow, half gone or hostile: it stands before everything."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import socket
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from kvern_router.accesslog import AccessLog, JsonFormatter
from kvern_router.client import was_reset

POST = b"POST /v1/x HTTP/1.1\r\nhost: h\r\ncontent-length: 2\r\n\r\n{}"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def half_close(client: Any) -> None:
    client.writer.write_eof()


async def all_of(client: Any) -> bytes:
    """Until the router closes the connection."""
    async with asyncio.timeout(20):
        return bytes(await client.reader.read())


async def slow_json(seen: Any, reader: Any, writer: Any) -> None:
    await asyncio.sleep(0.3)
    writer.write(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 8\r\n\r\n{"a": 1}')


async def never(seen: Any, reader: Any, writer: Any) -> None:
    await asyncio.sleep(600)


async def test_a_client_that_shut_its_sending_side_gets_its_answer(bench: Any, fake: Any) -> None:
    replica = await bench.replica("a", slow_json)
    await bench.start()
    client = await bench.client()
    client.writer.write(POST)
    half_close(client)
    answer = await all_of(client)
    assert answer.startswith(CONTINUE + b"HTTP/1.1 200 OK") and answer.endswith(b'{"a": 1}')
    replica.handler = fake.sse(count=20, gap=0.02)
    client = await bench.client()
    client.writer.write(POST)
    half_close(client)
    answer = await all_of(client)
    assert answer.endswith(b"data: 19\n\n\r\n0\r\n\r\n") and replica.disconnects == 0
    assert bench.metric('kvern_router_requests_total{status="200"}') == 2


async def test_several_requests_and_then_the_sending_side_is_shut(bench: Any) -> None:
    await bench.replica("a", slow_json)
    await bench.start()
    client = await bench.client()
    client.writer.write(POST * 3)
    half_close(client)
    answer = await all_of(client)
    assert answer.count(b'{"a": 1}') == 3 and answer.endswith(b'{"a": 1}')


@pytest.mark.parametrize("shut_first", [False, True])
async def test_a_client_that_is_gone_frees_its_replica(bench: Any, shut_first: bool) -> None:
    """Both look the same until something is sent."""
    replica = await bench.replica("a", never)
    await bench.start()
    client = await bench.client()
    client.writer.write(POST)
    await bench.until(lambda: replica.seen)
    if shut_first:
        half_close(client)
        await asyncio.sleep(0.05)
    client.close()
    await bench.until(lambda: replica.disconnects == 1, 20)
    await bench.until(lambda: not bench.router.clients, 20)
    assert bench.metric('kvern_router_requests_total{status="499"}') == 1


async def test_a_client_of_http_1_0_that_sends_no_more_is_gone(bench: Any) -> None:
    replica = await bench.replica("a", never)
    await bench.start()
    client = await bench.client()
    client.writer.write(POST.replace(b"1.1", b"1.0"))
    await bench.until(lambda: replica.seen)
    half_close(client)
    assert await all_of(client) == b""
    await bench.until(lambda: replica.disconnects == 1, 20)


async def test_half_a_request_and_then_no_more(bench: Any) -> None:
    await bench.start(1)
    for cut in (1, 20, len(POST) - 1):
        client = await bench.client()
        client.writer.write(POST[:cut])
        half_close(client)
        assert await all_of(client) == b""
    await bench.until(lambda: not bench.router.clients)
    assert bench.router.buffered_bytes == 0 and not bench.replicas[0].seen


async def test_a_reset_is_seen_without_reading() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    accepted, _ = listener.accept()
    try:
        client.shutdown(socket.SHUT_WR)
        assert not was_reset(accepted), "a client that only sends no more"
        client.close()
        assert not was_reset(accepted), "nobody can tell yet"
        accepted.send(b"x")
        for _ in range(500):
            if was_reset(accepted):
                break
            await asyncio.sleep(0.01)
        assert was_reset(accepted)
    finally:
        accepted.close()
        listener.close()


async def test_slow_writers_are_given_up(bench: Any) -> None:
    await bench.start(1, upload_timeout=5.0, body_timeout=0.4)
    head, body = await bench.client(), await bench.client()
    head.writer.write(b"GET /v1/models HTTP/1.1\r\nhost: h\r\nx-")
    body.writer.write(POST[:-2])

    async def trickle() -> None:
        while not body.writer.is_closing():
            head.writer.write(b"a")  # always something, never enough
            await asyncio.sleep(0.05)

    trickling = asyncio.ensure_future(trickle())
    for client in (body, head):
        answer = await client.receive()
        message = answer.json()["error"]["message"]
        assert (answer.status, answer.headers["connection"]) == (408, "close")
        assert message == "The request did not arrive in time (5 s without a byte, 0.4 s in all)"
    trickling.cancel()
    assert not bench.replicas[0].seen


async def test_one_connection_too_many(bench: Any) -> None:
    await bench.start(1, max_connections=2)
    first, second = await bench.client(), await bench.client()
    await bench.until(lambda: len(bench.router.clients) == 2)
    third = await bench.client()
    third.send("GET", "/v1/models")
    answer = await third.receive()
    assert answer.status == 503 and answer.headers["retry-after"] == "1" and await third.closed()
    assert answer.json()["error"]["message"].startswith("The router has 2 connections, the most it takes (max-conn")
    for client in (first, second):
        client.send("GET", "/v1/models")
        assert (await client.receive()).status == 200


async def test_with_too_many_connections_a_router_lives_all_the_same(bench: Any) -> None:
    """The kubelet asks on a connection of its own: refused, it would end a router for having too many clients."""
    await bench.start(1, max_connections=1)
    await bench.client()
    await bench.until(lambda: len(bench.router.clients) == 1)
    answer = await bench.ask("GET", "/health", None)
    assert (answer.status, answer.headers["connection"]) == (200, "close")
    assert (await bench.ask("GET", "/ready", None)).status == 503, "new requests are for other routers"
    silent = await bench.client()
    answer = await silent.receive()
    assert answer.json()["error"]["code"] == "router_overloaded" and await silent.closed()


async def test_many_headers(bench: Any) -> None:
    await bench.start(1, max_headers=20)
    client = await bench.client()
    client.writer.write(b"GET /v1/models HTTP/1.1\r\nhost: h\r\n" + b"a: b\r\n" * 20 + b"\r\n")
    answer = await client.receive()
    assert answer.status == 431 and await client.closed()
    text = "The request has too many headers: at most 20 are accepted (max-headers)"
    assert answer.json()["error"]["message"] == text


@pytest.mark.parametrize(
    "framing",
    [
        "content-length: 0\r\ntransfer-encoding: chunked",
        "transfer-encoding: chunked\r\ncontent-length: 4",
        "transfer-encoding: chunked\r\ntransfer-encoding: chunked",
        "transfer-encoding: chunked, identity",
        "content-length: 5\r\ncontent-length: 5",
        "content-length: +5",
        "content-length: 5, 5",
        "transfer-encoding : chunked",
        "transfer-encoding:\x0bchunked",
    ],
)
async def test_nothing_is_smuggled_behind_a_request(bench: Any, framing: str) -> None:
    """What a replica and the router could read differently reaches no replica, nor does what stands behind it."""
    await bench.start(1)
    client = await bench.client()
    hidden = "GET /v1/hidden HTTP/1.1\r\nhost: h\r\n\r\n"
    client.writer.write(f"POST /v1/x HTTP/1.1\r\nhost: h\r\n{framing}\r\n\r\n0\r\n\r\n{hidden}".encode())
    answer = await client.receive()
    assert answer.status in (400, 501) and await client.closed()
    assert not bench.replicas[0].seen


async def test_chunks_of_http_1_0_are_refused(bench: Any) -> None:
    await bench.start(1)
    client = await bench.client()
    client.writer.write(b"POST /v1/x HTTP/1.0\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n")
    assert (await client.receive()).status == 400
    assert not bench.replicas[0].seen


async def test_answers_that_nobody_reads_are_not_made(bench: Any) -> None:
    """What a client asks of the router itself waits for it as a replica's stream does, and does not pile up here."""
    await bench.start(1)
    client = await bench.client(limit=65_536)
    client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
    client.writer.transport.pause_reading()
    for _ in range(30):
        client.writer.write(b"GET /-/nothing HTTP/1.1\r\nhost: h\r\n\r\n" * 1000)
        await asyncio.sleep(0.02)
    (connection,) = bench.router.clients
    assert connection._transport.get_write_buffer_size() < 400_000 and len(connection._queue) < 1000
    client.writer.transport.resume_reading()
    for _ in range(30_000):
        assert (await client.receive()).status == 404


async def test_a_connection_that_asks_for_thousands_lets_others_have_their_turn(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.start(1)
    made = 0

    def counted(query: bytes) -> bytes:
        nonlocal made
        made += 1
        return b"x"

    monkeypatch.setattr(bench.router.metrics, "exposition", counted)
    client = await bench.client()
    client.writer.write(b"GET /metrics HTTP/1.1\r\nhost: h\r\n\r\n" * 4000)
    await bench.until(lambda: made)
    assert made < 1000, "everybody else had to wait for them"
    half_close(client)
    assert (await all_of(client)).count(b"HTTP/1.1 200") == 4000


async def test_requests_that_wait_for_a_slow_one_are_left_unread(bench: Any) -> None:
    release = asyncio.Event()

    async def slow(seen: Any, reader: Any, writer: Any) -> None:
        await release.wait()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

    await bench.replica("a", slow)
    await bench.start()
    client = await bench.client()
    client.writer.write(POST + b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n" * 5000 + POST)
    await bench.until(lambda: bench.replicas[0].seen)
    await asyncio.sleep(0.1)
    (connection,) = bench.router.clients
    assert len(connection._queue) < 1000, "each is twenty times as large in memory as on the wire"
    release.set()
    got = [(await client.receive()).body for _ in range(5002)]
    assert got[0] == got[-1] == b"ok" and set(got[1:-1]) == {b'{"status": "ok"}'}


async def test_a_body_of_tiny_chunks_takes_no_more_memory_than_its_bytes(bench: Any) -> None:
    await bench.start(1)
    client = await bench.client()
    client.writer.write(b"POST /v1/x HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n")
    await bench.until(lambda: bench.router.clients)
    tracemalloc.start()
    try:
        for _ in range(50):
            client.writer.write(b"2\r\nab\r\n" * 2000)
            await client.writer.drain()
        await bench.until(lambda: bench.router.buffered_bytes == 200_000)
        assert tracemalloc.get_traced_memory()[0] < 2_000_000
    finally:
        tracemalloc.stop()
    client.writer.write(b"0\r\n\r\n")
    assert (await client.receive()).json()["bytes"] == 200_000


@pytest.mark.parametrize("header", ["", "authorization: Bearer sk-guessed\r\n"])
@pytest.mark.parametrize("framing", ["content-length: 90000", "transfer-encoding: chunked"])
@pytest.mark.parametrize("method", ["POST", "OPTIONS"])
async def test_of_who_has_no_key_no_body_is_kept(
    bench: Any, tmp_path: Path, method: str, framing: str, header: str
) -> None:
    """The room for bodies is everybody's: who may not ask must not be able to fill it."""
    keys = tmp_path / "keys"
    keys.write_text("sk-a\n")
    await bench.start(1, api_keys_file=keys)
    client = await bench.client()
    start = b"ea60\r\n" if "chunked" in framing else b""
    client.writer.write(f"{method} /v1/x HTTP/1.1\r\nhost: h\r\n{header}{framing}\r\n\r\n".encode() + start)
    answer = await client.receive()  # while the body still is to come
    assert (answer.status, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    client.writer.write(b"x" * 60_000)
    assert await client.closed() and bench.router.buffered_bytes == 0
    assert bench.metric('kvern_router_requests_total{status="401"}') == 1
    assert not bench.replicas[0].seen


async def test_who_has_no_key_is_not_asked_for_a_body(bench: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-a\n")
    await bench.start(1, api_keys_file=keys)
    client = await bench.client()
    expecting = {"expect": "100-continue", "content-length": "5"}
    client.send("POST", "/v1/x", headers=expecting)
    assert (await client.receive()).status == 401
    assert (await bench.ask("OPTIONS", "/v1/x", None)).status == 200, "what a browser asks first carries no key"


async def test_idle_connections_disturb_nobody(bench: Any) -> None:
    await bench.start(1)
    idle = [await bench.client() for _ in range(300)]
    for i, client in enumerate(idle):
        client.writer.write(b"" if i % 2 else b"GET /v1/mo")
    await bench.until(lambda: len(bench.router.clients) >= 300)
    assert (await bench.ask()).status == 200
    for client in idle:
        client.close()
    await bench.until(lambda: not bench.router.clients, 20)


async def test_keys_and_content_are_never_logged(bench: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    keys, lines = tmp_path / "keys", io.StringIO()
    keys.write_text("sk-of-the-house\nsk-another\n")
    access_log = AccessLog(lines)
    await bench.start(1, access_log, api_keys_file=keys)
    body = b'{"prompt": "private question"}'
    for headers in (
        {"authorization": "Bearer sk-of-the-house", "x-request-id": "mine"},
        {"x-api-key": "sk-another"},
        {"authorization": "Bearer sk-guessed"},
        {"authorization": "Basic sk-odd", "cookie": "private=1"},
    ):
        await bench.ask("POST", "/v1/completions?key=sk-in-a-query&private=1", body, headers=headers)
    replica = bench.replicas[0]
    replica.kill()
    await bench.until(lambda: bench.probe_of(replica) != "ready", 20)
    access_log.close(20)
    logged = lines.getvalue()
    assert [json.loads(line)["status"] for line in logged.splitlines()] == [200, 200, 401, 401]
    assert json.loads(logged.splitlines()[0])["id"] == "mine"
    for word in ("sk-", "private", "cookie"):
        assert word not in logged + caplog.text, word


def test_what_else_is_logged_can_be_json() -> None:
    record = logging.LogRecord("kvern.router", logging.WARNING, "", 0, "two\nlines %d", (5,), None)
    line = JsonFormatter().format(record)
    assert "\n" not in line
    seen = json.loads(line)
    assert (seen["level"], seen["logger"], seen["msg"]) == ("warning", "kvern.router", "two\nlines 5")
