"""The data path: what goes in at one side comes out at the other, however slow or rude the sides are."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from kvern_router.upstream import ConnectionPool


async def test_a_request_and_its_answer_pass(bench: Any) -> None:
    replica = await bench.replica("a")
    await bench.start()
    answer = await bench.ask("POST", "/v1/completions?x=1", b'{"prompt": "hi"}', headers={"authorization": "Bearer k"})
    assert answer.status == 200
    assert answer.json() == {"replica": "a", "bytes": 16}
    seen = replica.seen[0]
    assert (seen.method, seen.target, seen.body) == ("POST", "/v1/completions?x=1", b'{"prompt": "hi"}')
    assert seen.header("authorization") == ["Bearer k"]
    assert seen.header("x-forwarded-for") == ["127.0.0.1"]
    assert seen.header("x-request-id") == [answer.headers["x-request-id"]]


@pytest.mark.parametrize("path", ["/v1/models", "/tokenize", "/version", "/v1/some/thing%20else"])
async def test_other_paths_are_proxied_too(bench: Any, path: str) -> None:
    await bench.start(1)
    answer = await bench.ask("GET", path, None, headers={"x-request-id": "mine"})
    assert (answer.status, answer.headers["x-request-id"]) == (200, "mine")
    assert bench.replicas[0].seen[0].target == path


async def test_a_stream_passes_byte_for_byte_as_it_comes(bench: Any) -> None:
    events = [b'data: {"t": "\xc3\xa6"}\n\n', b": ping\r\n\r\n", b"event: x\ndata: 1\ndata: 2\n\n", b"data: [DONE]\n\n"]
    arrived = asyncio.Semaphore()

    async def one_by_one(seen: Any, reader: Any, writer: Any) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for data in events:
            await arrived.acquire()
            writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        writer.write(b"0\r\n\r\n")

    await bench.replica("a", one_by_one)
    await bench.start()
    client = await bench.client()
    client.send("POST", "/v1/x", b"{}")
    assert (await client.head()).headers["content-type"] == "text/event-stream"
    async with asyncio.timeout(60):
        for event in events:  # each is passed on when it comes: the next is not sent before it has arrived
            assert await client.chunk() == event
            arrived.release()
        assert await client.chunk() == b""


async def test_a_stream_cut_in_odd_places_passes_byte_for_byte(bench: Any, fake: Any) -> None:
    stream = b"".join(b"data: %d\n\n" % i for i in range(300)) + b"data: without an end"
    await bench.replica("a", fake.sse(events=[stream[i : i + 7] for i in range(0, len(stream), 7)]))
    await bench.start()
    answer = await bench.ask()
    assert answer.body == stream


async def test_200_streams_at_once_lose_no_chunk(bench: Any) -> None:
    async def own(seen: Any, reader: Any, writer: Any) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for i in range(60):
            data = b"data: %b-%d\n\n" % (seen.body, i)
            writer.write(b"%x\r\n%b\r\n" % (len(data), data))
            await asyncio.sleep(0.005)
        writer.write(b"0\r\n\r\n")

    for name in "abc":
        await bench.replica(name, own)
    await bench.start()
    answers = await asyncio.gather(*(bench.ask(body=b"%d" % i) for i in range(200)))
    for i, answer in enumerate(answers):
        assert answer.whole
        assert answer.body == b"".join(b"data: %d-%d\n\n" % (i, j) for j in range(60))
    assert bench.metric('kvern_router_requests_total{status="200"}') == 200
    for name in "abc":
        assert bench.metric(f'kvern_router_replica_inflight{{replica="{name}"}}') == 0


async def test_connections_are_kept_on_both_sides(bench: Any) -> None:
    await bench.start(1)
    client = await bench.client()
    for i in range(20):
        client.send("POST", "/v1/x", b"%d" % i)
        assert (await client.receive()).status == 200
    assert bench.replicas[0].connections == 1
    client.send("GET", "/v1/x", headers={"connection": "close"})
    answer = await client.receive()
    assert answer.headers["connection"] == "close"
    assert await client.closed()


async def test_an_idle_connection_that_the_replica_closed_is_not_an_error(bench: Any) -> None:
    async def close_after(seen: Any, reader: Any, writer: Any) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        await writer.drain()
        if len(bench.replicas[0].seen) % 2 == 0:  # no Connection: close, and gone when the next request is written
            asyncio.get_running_loop().call_later(0.0, writer.transport.abort)

    await bench.replica("a", close_after)
    await bench.start()
    client = await bench.client()
    for _ in range(30):
        client.send("POST", "/v1/x", b"{}")
        assert (await client.receive()).body == b"ok"
    assert bench.probe_of(bench.replicas[0]) == "ready", "a closed idle connection is no failure"


async def test_a_large_body_passes_and_a_larger_one_is_refused_with_the_limit(bench: Any) -> None:
    await bench.start(1, max_body_bytes=4_000_000)
    answer = await bench.ask(body=b"x" * 4_000_000)
    assert answer.json()["bytes"] == 4_000_000
    answer = await bench.ask(body=b"x" * 4_000_001)
    assert answer.status == 413
    error = answer.json()["error"]
    assert error["code"] == "request_too_large"
    assert "at most 4000000 bytes are accepted, this one has 4000001 bytes" in error["message"]
    client = await bench.client()
    client.writer.write(b"POST /v1/x HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n")
    for _ in range(50):
        client.writer.write(b"%x\r\n%b\r\n" % (100_000, b"x" * 100_000))
    answer = await client.receive()
    assert (answer.status, answer.headers["connection"]) == (413, "close")
    assert len(bench.replicas[0].seen) == 1
    assert bench.router.buffered_bytes == 0


async def test_bodies_in_memory_are_bounded_over_all_requests(bench: Any) -> None:
    await bench.start(1, max_buffered_bytes=100_000)
    slow = await bench.client()
    slow.writer.write(b"POST /v1/x HTTP/1.1\r\nhost: h\r\ncontent-length: 90001\r\n\r\n" + b"x" * 90_000)
    await bench.until(lambda: bench.router.buffered_bytes == 90_000)
    answer = await bench.ask(body=b"x" * 20_000)
    assert (answer.status, answer.json()["error"]["code"]) == (503, "router_overloaded")
    slow.close()
    await bench.until(lambda: bench.router.buffered_bytes == 0)
    assert (await bench.ask(body=b"x" * 20_000)).status == 200


async def test_the_body_of_a_request_that_is_being_answered_takes_no_room(bench: Any) -> None:
    """Long prompts, long answers: what cannot be tried again need not be kept until the end."""
    release = asyncio.Event()

    async def stream(seen: Any, reader: Any, writer: Any) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(b"9\r\ndata: 1\n\n\r\n")
        await release.wait()
        writer.write(b"9\r\ndata: 2\n\n\r\n0\r\n\r\n")

    await bench.replica("a", stream)
    await bench.start(max_buffered_bytes=100_000)
    clients = [await bench.client() for _ in range(3)]
    for client in clients:
        client.send("POST", "/v1/x", b"x" * 90_000)
        assert (await client.head()).status == 200
        assert await client.chunk() == b"data: 1\n\n" and bench.router.buffered_bytes == 0
    release.set()
    for client in clients:
        assert [await client.chunk(), await client.chunk()] == [b"data: 2\n\n", b""]
    assert {len(seen.body) for seen in bench.replicas[0].seen} == {90_000}


async def test_interim_answers_of_a_replica_are_skipped(bench: Any) -> None:
    async def interim(seen: Any, reader: Any, writer: Any) -> None:
        writer.write(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

    await bench.replica("a", interim)
    await bench.start()
    answer = await bench.ask()
    assert (answer.status, answer.body) == (200, b"ok")
    assert "link" not in answer.headers


async def test_an_answer_that_ends_with_its_connection(bench: Any) -> None:
    async def until_close(seen: Any, reader: Any, writer: Any) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\nall ")
        await writer.drain()
        await asyncio.sleep(0.02)
        writer.write(b"of it")
        raise ConnectionResetError  # the fake closes

    await bench.replica("a", until_close)
    await bench.start()
    answer = await bench.ask()
    assert (answer.body, answer.whole, answer.headers["transfer-encoding"]) == (b"all of it", True, "chunked")


async def test_a_slow_client_holds_its_replica_back(bench: Any) -> None:
    total = 40_000_000
    sent = 0

    async def torrent(seen: Any, reader: Any, writer: Any) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % total)
        line = b"data: " + b"x" * 49_992 + b"\n\n"
        while sent < total:
            writer.write(line)
            sent += len(line)
            await writer.drain()

    await bench.replica("a", torrent)
    await bench.start()
    client = await bench.client(limit=65_536)
    client.send("POST", "/v1/x", b"{}")
    answer = await client.head()
    before = -1
    while before != sent:  # until nothing moves
        before = sent
        await asyncio.sleep(0.2)
    assert sent < total * 0.7, "the replica was not held back"
    async with asyncio.timeout(60):
        other = await bench.ask("GET", "/health", None)
    assert other.status == 200, "a slow client does not disturb others"
    length, events = int(answer.headers["content-length"]), 0
    for _ in range(length // 50_000):
        events += (await client.reader.readexactly(50_000)).endswith(b"x\n\n")
    assert events == total // 50_000


async def test_a_client_that_takes_nothing_is_given_up_after_the_idle_timeout(bench: Any) -> None:
    ended = asyncio.Event()

    async def torrent(seen: Any, reader: Any, writer: Any) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        try:
            while True:
                writer.write(b"9c40\r\n" + b"x" * 39_998 + b"\n\n\r\n")
                await writer.drain()
        finally:
            ended.set()

    await bench.replica("a", torrent)
    await bench.start(idle_timeout=0.3)
    client = await bench.client(limit=65_536)
    client.send("POST", "/v1/x", b"{}")
    await client.head()
    client.writer.transport.pause_reading()
    async with asyncio.timeout(60):
        await ended.wait()
    assert bench.metric('kvern_router_requests_total{status="499"}') == 1


async def test_a_client_that_leaves_frees_its_replica_at_once(bench: Any, fake: Any) -> None:
    streaming = await bench.replica("a", fake.sse(count=1000, gap=0.02))
    await bench.start()
    client = await bench.client()
    client.send("POST", "/v1/x", b"{}")
    await client.head()
    await client.chunk()
    client.close()
    await bench.until(lambda: streaming.disconnects == 1, 10)  # not when the stream ends

    async def prefill(seen: Any, reader: Any, writer: Any) -> None:
        await asyncio.sleep(60)

    streaming.handler = prefill
    client = await bench.client()
    client.send("POST", "/v1/x", b"{}")
    await bench.until(lambda: len(streaming.seen) == 2)
    client.close()
    await bench.until(lambda: streaming.disconnects == 2, 10)
    assert bench.metric('kvern_router_requests_total{status="499"}') == 2
    assert bench.metric('kvern_router_replica_inflight{replica="a"}') == 0
    assert bench.probe_of(streaming) == "ready"


async def test_a_silent_stream_ends_with_an_error_but_a_long_prefill_does_not(bench: Any) -> None:
    async def quiet(seen: Any, reader: Any, writer: Any) -> None:
        await asyncio.sleep(1.2)  # the prefill: longer than the idle timeout
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(b"9\r\ndata: 1\n\n\r\n")
        await asyncio.sleep(60)

    replica = await bench.replica("a", quiet)
    await bench.start(idle_timeout=0.5)
    answer = await bench.ask()
    assert answer.body.startswith(b"data: 1\n\n")
    error = json.loads(answer.body.split(b"data: ")[2])["error"]
    assert (error["code"], error["message"]) == ("idle_timeout", "The replica sent nothing for 0.5 s (idle-timeout)")
    assert answer.whole
    await bench.until(lambda: replica.disconnects == 1)


async def test_an_early_answer_to_a_large_body(bench: Any) -> None:
    async def refuse(seen: Any, reader: Any, writer: Any) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\nconnection: close\r\n\r\nno")
        raise ConnectionResetError

    await bench.replica("a", refuse)
    await bench.start()
    answer = await bench.ask(body=b"x" * 300_000)
    assert (answer.status, answer.body) == (400, b"no")
    assert "connection" not in answer.headers, "the replica's connection is not the client's"


async def test_rubbish_from_a_replica_is_a_502(bench: Any) -> None:
    async def rubbish(seen: Any, reader: Any, writer: Any) -> None:
        writer.write(b"220 smtp.example ESMTP\r\n")
        await asyncio.sleep(1)

    await bench.replica("a", rubbish)
    await bench.start()
    answer = await bench.ask()
    assert (answer.status, answer.json()["error"]["code"]) == (502, "replica_failed")
    assert "3 attempts failed" in answer.json()["error"]["message"]


class Sink:
    """Collects one response."""

    def __init__(self) -> None:
        self.body = b""
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def on_head(self, head: Any) -> None:
        pass

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_complete(self) -> None:
        self.done.set_result(True)

    def on_lost(self, error: Exception) -> None:
        self.done.set_exception(error)


async def test_whoever_had_a_connection_before_cannot_disturb_its_next_user(bench: Any, fake: Any) -> None:
    replica = await bench.replica("a", fake.sse(count=3, gap=0.02))
    pool = ConnectionPool("127.0.0.1", replica.port, 1.0)
    first, second = Sink(), Sink()
    connection = await pool.acquire()
    connection.send(first, b"GET /1 HTTP/1.1\r\nhost: h\r\n\r\n")
    await first.done
    assert await pool.acquire() is connection
    connection.send(second, b"GET /2 HTTP/1.1\r\nhost: h\r\n\r\n")
    connection.pause(first)
    connection.drop(first)
    async with asyncio.timeout(60):
        await second.done
    assert second.body == first.body == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"
    pool.close()


async def test_a_body_that_is_no_event_stream_is_not_kept_waiting(bench: Any) -> None:
    arrived = asyncio.Event()

    async def trickle(seen: Any, reader: Any, writer: Any) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(b"3\r\n{}\n\r\n")
        await arrived.wait()
        writer.write(b"3\r\n{}\n\r\n0\r\n\r\n")

    await bench.replica("a", trickle)
    await bench.start()
    client = await bench.client()
    client.send("POST", "/v1/x", b"{}")
    await client.head()
    async with asyncio.timeout(60):
        assert await client.chunk() == b"{}\n"
        arrived.set()
        assert [await client.chunk(), await client.chunk()] == [b"{}\n", b""]
