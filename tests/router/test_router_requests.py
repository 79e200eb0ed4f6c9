"""What HTTP allows a client to send to a proxy, what it does not, and what a client sends nevertheless."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest


async def test_pipelined_requests_are_answered_in_order(bench: Any) -> None:
    async def slow_first(seen: Any, reader: Any, writer: Any) -> None:
        await asyncio.sleep(0.1 if seen.body == b"0" else 0)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(seen.body), seen.body))

    await bench.replica("a", slow_first)
    await bench.start()
    client = await bench.client()
    for i in range(40):
        client.send("POST", "/v1/x", b"%d" % i)
        if i == 20:
            client.send("GET", "/health")
    got = [(await client.receive()).body for _ in range(41)]
    assert got[:21] == [b"%d" % i for i in range(21)]
    assert json.loads(got[21]) == {"status": "ok"}
    assert got[22:] == [b"%d" % i for i in range(21, 40)]


async def test_a_chunked_request_body_arrives_whole(bench: Any) -> None:
    await bench.start(1)
    client = await bench.client()
    head = "POST /v1/x HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\ntrailer: t\r\n\r\n"
    client.writer.write(head.encode())
    for part in (b"first ", b"second ", b"third"):
        client.writer.write(b"%x\r\n%b\r\n" % (len(part), part))
        await asyncio.sleep(0.01)
    client.writer.write(b"0\r\nt: dropped\r\n\r\n")
    assert (await client.receive()).status == 200
    seen = bench.replicas[0].seen[0]
    assert seen.body == b"first second third"
    assert seen.header("content-length") == ["18"] and not seen.header("transfer-encoding") and not seen.header("t")


async def test_expect_100_continue(bench: Any) -> None:
    await bench.start(1, max_body_bytes=100)
    client = await bench.client()
    client.writer.write(b"POST /v1/x HTTP/1.1\r\nhost: h\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n")
    assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.writer.write(b"hello")
    assert (await client.receive()).status == 200
    assert bench.replicas[0].seen[0].body == b"hello" and not bench.replicas[0].seen[0].header("expect")
    client.writer.write(b"POST /v1/x HTTP/1.1\r\nhost: h\r\nexpect: 100-continue\r\ncontent-length: 101\r\n\r\n")
    assert (await client.receive()).status == 413


async def test_head_and_options(bench: Any) -> None:
    async def allow(seen: Any, reader: Any, writer: Any) -> None:
        if seen.method == "HEAD":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 12345\r\n\r\n")
        else:
            writer.write(b"HTTP/1.1 204 No Content\r\nallow: GET\r\n\r\n")

    await bench.replica("a", allow)
    await bench.start()
    client = await bench.client()
    for _ in range(2):
        client.send("HEAD", "/v1/models")
        answer = await client.receive(to_head=True)
        assert (answer.status, answer.headers["content-length"]) == (200, "12345")
        client.send("OPTIONS", "/v1/models")
        answer = await client.receive()
        assert (answer.status, answer.headers["allow"]) == (204, "GET")
        assert "content-length" not in answer.headers and "transfer-encoding" not in answer.headers


async def test_an_http_1_0_client_gets_no_chunks(bench: Any, fake: Any) -> None:
    await bench.replica("a", fake.sse(count=3))
    await bench.start()
    client = await bench.client()
    client.writer.write(b"POST /v1/x HTTP/1.0\r\ncontent-length: 2\r\n\r\n{}")
    answer = await client.receive()
    assert answer.body == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"
    assert "transfer-encoding" not in answer.headers and answer.headers["connection"] == "close"


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 a TLS hello\r\n\r\n", 400),
        (b"GET /a b HTTP/1.1\r\nhost: h\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost : h\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: h\r\nx: \x00\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nx", 400),
        (b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\nhost: h\r\nexpect: more\r\ncontent-length: 0\r\n\r\n", 417),
        (b"CONNECT h:1 HTTP/1.1\r\nhost: h\r\n\r\n", 405),
        (b"OPTIONS rubbish HTTP/1.1\r\nhost: h\r\n\r\n", 400),
    ],
)
async def test_bad_requests_are_answered_and_reach_no_replica(bench: Any, raw: bytes, status: int) -> None:
    await bench.start(1)
    client = await bench.client()
    client.writer.write(raw)
    answer = await client.receive()
    assert answer.status == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert await client.closed()
    assert not bench.replicas[0].seen
    assert bench.metric(f'kvern_router_requests_total{{status="{status}"}}') == 1


@pytest.mark.parametrize("size", [9_000, 900_000])
async def test_headers_that_are_too_large(bench: Any, size: int) -> None:
    await bench.start(1, max_header_bytes=8_192)
    client = await bench.client()
    client.writer.write(b"GET /v1/models HTTP/1.1\r\nhost: h\r\nx: " + b"y" * size)
    if size < 100_000:
        client.writer.write(b"\r\n\r\n")
    answer = await client.receive()
    assert answer.status == 431
    assert "at most 8192 bytes are accepted" in answer.json()["error"]["message"]


async def test_a_request_that_does_not_arrive_is_given_up(bench: Any) -> None:
    await bench.start(1, upload_timeout=0.2)
    client = await bench.client()
    client.writer.write(b"POST /v1/x HTTP/1.1\r\nhost: h\r\ncontent-length: 10\r\n\r\nhalf")
    assert (await client.receive()).status == 408
    assert await client.closed()


async def test_an_upgrade_is_ignored(bench: Any) -> None:
    await bench.start(1)
    client = await bench.client()
    upgrade = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAMAAABk"}
    for body in (b"", b"{}", b"GET /hidden HTTP/1.1\r\nhost: h\r\n\r\n"):
        client.send("POST", "/v1/x", body, headers=upgrade)
        assert (await client.receive()).json()["bytes"] == len(body), "the body is no request of its own"
    chunks = b"2\r\n{}\r\n0\r\n\r\n"
    head = (
        b"POST /v1/x HTTP/1.1\r\nhost: h\r\nconnection: upgrade\r\nupgrade: h2c\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    client.writer.write((head + chunks) * 2)
    for _ in range(2):
        assert (await client.receive()).json()["bytes"] == 2
    assert [seen.target for seen in bench.replicas[0].seen] == ["/v1/x"] * 5
    assert not any(seen.header("upgrade") or seen.header("http2-settings") for seen in bench.replicas[0].seen)


async def test_mutated_requests_leave_nothing_behind(bench: Any, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(7)
    seeds = [
        b'POST /v1/x HTTP/1.1\r\nhost: h\r\ncontent-length: 12\r\nexpect: 100-continue\r\n\r\n{"prompt": 1}',
        b"POST /v1/x HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nt: 1\r\n\r\n" * 2,
        b"GET /health HTTP/1.1\r\nhost: h\r\n\r\nHEAD /v1/models HTTP/1.0\r\nconnection: keep-alive\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nhost: h\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    ]
    await bench.start(2, max_body_bytes=1000, max_header_bytes=1000)

    async def throw(data: bytearray) -> None:
        client = await bench.client()
        for _ in range(rng.randrange(4)):
            at = rng.randrange(len(data))
            data[at : at + rng.randrange(3)] = rng.choice(
                [b"", b"\r\n", b"\x00", b"9", b": ", b" ", rng.randbytes(3), data[:20]]
            )
        cut = rng.randrange(len(data) + 1)
        client.writer.write(bytes(data[:cut]))
        await asyncio.sleep(rng.choice([0, 0.01]))
        client.writer.write(bytes(data[cut:]))
        await asyncio.sleep(rng.choice([0, 0.02]))
        client.close()

    for _ in range(30):
        await asyncio.gather(*(throw(bytearray(rng.choice(seeds))) for _ in range(10)))
    await bench.until(lambda: not bench.router.clients)
    assert bench.router.buffered_bytes == 0
    assert bench.router.fleet.held() == (0, 0)
    assert all(count == 0 for _, count in bench.router.fleet.inflight())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    assert (await bench.ask()).status == 200
