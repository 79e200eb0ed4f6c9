"""Clients that speak HTTP badly, slowly, or in rare ways that are allowed: each gets its answer, others theirs."""

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
from server_harness import LiveServer, Setup, saying, wait_until

from kvern_engine.server.wire.connection import MUCH_BYTES, REST_BETWEEN_READS, Connection
from kvern_engine.supervisor import raise_file_limit
from kvern_engine.tokenizer import Tokenizer

LONG = {"prompt": [9] * 20, "max_tokens": 400, "ignore_eos": True}
HELLO = {"prompt": "x", "max_tokens": 3, "ignore_eos": True}


def request(body: Any = HELLO, *headers: str, path: str = "/v1/completions", version: str = "1.1") -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = (f"POST {path} HTTP/{version}", "Host: x", f"Content-Length: {len(content)}", *headers, "", "")
    return "\r\n".join(lines).encode() + content


def get(path: str, *headers: str, version: str = "1.1") -> bytes:
    return "\r\n".join((f"GET {path} HTTP/{version}", "Host: x", *headers, "", "")).encode()


class Raw:
    """A TCP connection to a server."""

    def __init__(self, server: LiveServer, receive_buffer: int | None = None) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self.socket = socket.socket()
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(30)
        self.socket.connect((host, int(port)))

    def __enter__(self) -> "Raw":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> "Raw":
        self.socket.sendall(data)
        return self

    def half_close(self) -> None:
        self.socket.shutdown(socket.SHUT_WR)

    def rest(self) -> bytes:
        """All until the server closes."""
        received = b""
        while data := self.socket.recv(65536):
            received += data
        return received

    def until(self, text: bytes, count: int = 1) -> bytes:
        received = b""
        while received.count(text) < count:
            data = self.socket.recv(65536)
            assert data, received
            received += data
        return received


def status(answer: bytes) -> int:
    return int(answer.split(maxsplit=2)[1])


def error(answer: bytes) -> dict[str, Any]:
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


@pytest.fixture
def own(setup: Setup, tokenizer: Tokenizer) -> Iterator[Callable[..., LiveServer]]:
    """A server with flags of one's own, ready."""

    def start(**flags: Any) -> LiveServer:
        core = setup.core()
        core.reply = saying(tokenizer, "In the beginning God created the heaven and the earth.")
        server = setup.server(**flags)
        server.wait_for(200)
        return server

    yield start


# ---------------------------------------------------------------- half-closed and gone


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_shut_its_sending_side_gets_its_answer(live: Setup, stream: bool) -> None:
    core = live.cores[0]
    core.step_seconds = 0.01
    with Raw(live.servers[0]) as raw:
        raw.send(request({**HELLO, "max_tokens": 40, "stream": stream}, "Connection: close")).half_close()
        answer = raw.rest()
    while answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\n"):  # the question whether it is still there
        answer = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert status(answer) == 200 and not core.aborts
    text = answer.decode()
    assert text.endswith("data: [DONE]\n\n\r\n0\r\n\r\n") if stream else '"completion_tokens":40' in text


def test_several_requests_and_then_the_sending_side_is_shut(live: Setup) -> None:
    with Raw(live.servers[0]) as raw:
        raw.send(request() + get("/version") + request()).half_close()
        answer = raw.rest().replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert answer.index(b'"version"') > answer.index(b'"completion_tokens"')


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("shut_first", [False, True])
def test_a_client_that_is_gone_frees_its_request(live: Setup, stream: bool, shut_first: bool) -> None:
    """Closed at once, or after its sending side: both look the same until something is sent."""
    core = live.cores[0]
    core.step_seconds = 0.02
    with Raw(live.servers[0]) as raw:
        raw.send(request({**LONG, "stream": stream}))
        wait_until(lambda: core.num_running == 1)
        if shut_first:
            raw.half_close()
            time.sleep(0.05)
    wait_until(lambda: core.aborts and core.num_running == 0, 20)
    wait_until(lambda: live.servers[0].state.metrics.in_flight() == 0)


def test_http_1_0_cannot_be_asked(live: Setup) -> None:
    core = live.cores[0]
    core.step_seconds = 0.02
    with Raw(live.servers[0]) as raw:
        raw.send(get("/version", version="1.0")).half_close()
        assert status(raw.rest()) == 200
    with Raw(live.servers[0]) as raw:
        raw.send(request(LONG, version="1.0"))
        wait_until(lambda: core.num_running == 1)
        raw.half_close()
        assert raw.rest() == b""
    wait_until(lambda: core.num_running == 0)


def test_half_a_request_and_then_no_more(live: Setup) -> None:
    whole = request(LONG)
    for cut in (1, 30, whole.index(b"\r\n\r\n") + 4, len(whole) - 1):
        with Raw(live.servers[0]) as raw:
            raw.send(whole[:cut]).half_close()
            assert raw.rest() == b""
    wait_until(lambda: not live.servers[0].http[0].connections)
    assert not live.cores[0].requests


# ---------------------------------------------------------------- slow ones


def test_slow_heads_and_slow_bodies_end_and_hold_no_place(own: Callable[..., LiveServer]) -> None:
    server = own(header_timeout_seconds=0.3, body_timeout_seconds=0.3, max_waiting_requests=1)
    with Raw(server) as head, Raw(server) as body, Raw(server) as fresh:
        head.send(b"GET /version HTTP/1.1\r\nHost: x\r\nX-")
        body.send(request()[:-3])
        time.sleep(0.1)
        assert server.state.metrics.in_flight() == 0, "what has not arrived keeps nobody out"
        answer = body.rest()
        assert status(answer) == 408 and b"connection: close" in answer
        assert error(answer)["message"] == "The body did not arrive within 0.3 seconds (body_timeout_seconds)."
        answer = head.rest()
        assert status(answer) == 408
        assert error(answer)["message"] == "The headers did not arrive within 0.3 seconds (header_timeout_seconds)."
        fresh.send(request(HELLO, "Connection: close"))  # it has said nothing so far, which is no fault
        assert status(fresh.rest()) == 200


def test_idle_connections_end_after_a_while(own: Callable[..., LiveServer]) -> None:
    server = own(keep_alive_seconds=0.5)
    with Raw(server) as silent, Raw(server) as used:
        used.send(get("/version"))
        assert used.rest().startswith(b"HTTP/1.1 200 OK") and silent.rest() == b""


@pytest.mark.parametrize("reads_head", [True, False])
def test_a_client_that_does_not_read_is_cut_off_and_its_request_aborted(
    own: Callable[..., LiveServer], setup: Setup, reads_head: bool
) -> None:
    server = own(slow_client_seconds=0.5)
    server.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
    core = setup.cores[0]
    core.step_seconds = 0.05
    core.reply = lambda request, choice: [10 + choice] * 64
    with Raw(server, receive_buffer=4096) as raw:
        raw.send(request({**LONG, "n": 100, "stream": True}))
        if reads_head:
            raw.until(b"data:")
        wait_until(lambda: core.aborts, 30)
        assert core.num_running == 0
        wait_until(lambda: not server.http[0].connections, 10)
    assert server.state.client.num_in_flight == 0 and server.state.metrics.in_flight() == 0


def test_what_waits_for_a_slow_client_is_bounded(
    own: Callable[..., LiveServer], setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvern_engine.server.engine_client.MAX_BACKLOG", 2000)
    server = own()  # a minute's patience: the backlog ends it before
    server.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
    setup.cores[0].reply = lambda request, choice: [10 + choice] * 64
    with Raw(server, receive_buffer=4096) as raw:
        raw.send(request({**LONG, "n": 100, "stream": True}, "Connection: close"))
        wait_until(lambda: setup.cores[0].aborts, 30)
        assert server.state.client.num_in_flight == 0
        text = raw.rest().decode()  # now it reads, and is told
    assert "The client reads too slowly: 2000 tokens were waiting for it." in text and '"client_too_slow"' in text
    assert text.count("data: {") < 100 * 400


def test_an_answer_that_nobody_reads_does_not_keep_its_connection(own: Callable[..., LiveServer], setup: Setup) -> None:
    server = own(slow_client_seconds=0.5)
    server.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
    with Raw(server, receive_buffer=4096) as raw:
        raw.send(get("/metrics", "Connection: close") * 1)
        wait_until(lambda: not server.http[0].connections, 20)
        assert raw.socket.fileno() >= 0


# ---------------------------------------------------------------- many, and one after another


def test_pipelined_requests_are_answered_in_order(live: Setup) -> None:
    with Raw(live.servers[0]) as raw:
        many = [request({**HELLO, "max_tokens": 1 + i % 3}) if i % 2 else get(f"/v1/models/{i}") for i in range(30)]
        raw.send(b"".join(many))
        answers = raw.until(b"HTTP/1.1 ", 30) + b""
        while not answers.rstrip().endswith(b"}"):
            answers += raw.socket.recv(65536)
    bodies = [part.partition(b"\r\n\r\n")[2] for part in answers.split(b"HTTP/1.1 ")[1:]]
    assert [b"`%d` does not exist" % i in body for i, body in enumerate(bodies) if i % 2 == 0] == [True] * 15
    assert [json.loads(b)["usage"]["completion_tokens"] for i, b in enumerate(bodies) if i % 2] == [
        1 + i % 3 for i in range(1, 30, 2)
    ]


def test_requests_that_wait_for_a_slow_one_are_left_unread(live: Setup) -> None:
    core, server = live.cores[0], live.servers[0]
    core.step_seconds = 0.1
    with Raw(server) as raw:
        raw.send(request({**HELLO, "max_tokens": 20}) + get("/version") * 5000)
        wait_until(lambda: any(c._queue for c in server.http[0].connections), 20)
        time.sleep(0.3)
        most = max(len(c._queue) for c in server.http[0].connections)
        assert 0 < most < 1000, "each is many times as large in memory as on the wire"
        raw.until(b'"version"', 5000)


def test_a_connection_is_used_again_after_refusals(live: Setup) -> None:
    """Also where the refusal came before the body was read; what is left of it is thrown away."""
    refused = [
        (request({"prompt": 5}), 400),
        (request(b"{" * 50_000), 400),
        (request(b'{"a": 1}' * 20_000, path="/nowhere"), 404),
        (request({"prompt": "x" * 70_000, "model": "other"}), 404),
        (request(HELLO, "Content-Type: text/plain"), 415),
    ]
    with Raw(live.servers[0]) as raw:
        for sent, expected in refused:
            raw.send(sent + get("/version"))
            answer = raw.until(b'"version"')
            assert status(answer) == expected and answer.count(b"HTTP/1.1 200") == 1, answer


def test_many_idle_connections_disturb_nobody(live: Setup) -> None:
    """Silent ones, ones that stopped in the middle of a head, ones that have had an answer. KVERN_TEST_FULL: 5,000."""
    count = 5000 if os.environ.get("KVERN_TEST_FULL") else 300
    raise_file_limit()
    idle = [Raw(live.servers[0]) for _ in range(count)]
    try:
        for i, raw in enumerate(idle):
            raw.send(b"" if i % 3 == 0 else b"GET / HT" if i % 3 == 1 else get("/version"))
        wait_until(lambda: len(live.servers[0].http[0].connections) >= count, 60)
        assert httpx.post(live.servers[0].url + "/v1/completions", json=HELLO, timeout=30).status_code == 200
        assert b'"version"' in idle[2].until(b'"version"')
    finally:
        for raw in idle:
            raw.socket.close()
    wait_until(lambda: not live.servers[0].http[0].connections, 60)


def test_one_connection_too_many(own: Callable[..., LiveServer]) -> None:
    server = own(max_connections=2)
    wait_until(lambda: not server.http[0].connections)
    with Raw(server) as first, Raw(server) as second:
        wait_until(lambda: len(server.http[0].connections) == 2)
        with Raw(server) as third:
            answer = third.rest()
        assert status(answer) == 503
        assert error(answer)["message"] == "This server has 2 connections, the most it takes (max_connections)."
        for raw in (first, second):
            raw.send(get("/version"))
            raw.until(b'"version"')
    wait_until(lambda: not server.http[0].connections)
    assert httpx.get(server.url + "/version").status_code == 200


# ---------------------------------------------------------------- what is no request

CHUNKED = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
BAD = {
    "a TLS hello": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n", 400, "not a valid HTTP/1.1 request"),
    "two framings": (CHUNKED + b"Content-Length: 5\r\n\r\n0\r\n\r\n", 400, ""),
    "two framings the other way": (
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
        "",
    ),
    "chunks in HTTP/1.0": (CHUNKED.replace(b"1.1", b"1.0") + b"\r\n0\r\n\r\n", 400, "not part of HTTP/1.0"),
    "a coding that is unknown": (CHUNKED.replace(b"chunked", b"gzip, chunked") + b"\r\n0\r\n\r\n", 501, "only chunked"),
    "a coding twice": (CHUNKED + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, ""),
    "chunked, nearly": (CHUNKED.replace(b"chunked", b"chunked, identity") + b"\r\n0\r\n\r\n", 400, ""),
    "chunks that are none": (CHUNKED + b"\r\nzz\r\n{}\r\n", 400, "not a valid HTTP/1.1 request"),
    "a chunk that is longer than it says": (CHUNKED + b"\r\n2\r\n{}xx\r\n0\r\n\r\n", 400, ""),
    "a negative chunk": (CHUNKED + b"\r\n-2\r\n{}\r\n0\r\n\r\n", 400, ""),
    "two lengths": (
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        400,
        "",
    ),
    "a length with a sign": (b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: +2\r\n\r\n{}", 400, ""),
    "a space before a colon": (b"GET /version HTTP/1.1\r\nHost : x\r\n\r\n", 400, ""),
    "a folded header": (b"GET /version HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n", 400, ""),
    "a null in a header": (b"GET /version HTTP/1.1\r\nHost: x\r\nA: \0\r\n\r\n", 400, ""),
    "two hosts": (b"GET /version HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, "exactly one Host header, got 2."),
    "no host": (b"GET /version HTTP/1.1\r\n\r\n", 400, "exactly one Host header, got 0."),
    "a tunnel": (b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n", 405, "no forward proxy"),
    "an expectation": (get("/version", "Expect: more"), 417, "only 100-continue is understood"),
    "a target that is none": (b"OPTIONS rubbish HTTP/1.1\r\nHost: x\r\n\r\n", 400, ""),
    "a target that is no ASCII": ("GET /vérsion HTTP/1.1\r\nHost: x\r\n\r\n".encode(), 400, ""),
    "a long header": (get("/version", "A: " + "b" * 70_000), 431, "at most 65536 bytes (max_header_bytes)."),
    "a header without an end": (b"GET /version HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 900_000, 431, "max_header_bytes"),
    "a long target": (get("/" + "x" * 70_000), 431, "max_header_bytes"),
    "many headers": (get("/version", *["A: b"] * 300), 431, "at most 256 headers (max_headers)."),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_request_is_answered_and_its_connection_closed(live: Setup, what: str) -> None:
    sent, expected, words = BAD[what]
    with Raw(live.servers[0]) as raw:
        raw.send(sent)
        answer = raw.rest()
    assert status(answer) == expected and b"\r\nconnection: close\r\n" in answer and b"\r\nx-request-id: " in answer
    found = error(answer)
    assert (
        words in found["message"]
        and found["message"].endswith(".")
        and found.keys()
        == {
            "message",
            "type",
            "param",
            "code",
        }
    )
    assert not live.cores[0].requests


def test_nothing_is_smuggled_behind_a_request(live: Setup) -> None:
    """What a proxy could take for a part of the body of the first request is no second request either."""
    hidden = get("/v1/models/hidden")
    for framing in (
        "Content-Length: 0\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nContent-Length: 4",
    ):
        head = f"POST /tokenize HTTP/1.1\r\nHost: x\r\n{framing}\r\n\r\n".encode()
        with Raw(live.servers[0]) as raw:
            raw.send(head + b"0\r\n\r\n" + hidden)
            answer = raw.rest()
        assert answer.count(b"connection: close") == 1 and status(answer) == 400 and b"hidden" not in answer


def test_bad_framing_in_the_middle_of_a_body(live: Setup) -> None:
    with Raw(live.servers[0]) as raw:
        raw.send(CHUNKED.replace(b"/tokenize", b"/v1/completions") + b'\r\n5\r\n{"a":\r\n')
        time.sleep(0.05)
        raw.send(b"nonsense\r\n")
        assert status(raw.rest()) == 400
    wait_until(lambda: live.servers[0].state.metrics.in_flight() == 0)


def test_bytes_after_a_last_request_are_nobodys(live: Setup) -> None:
    with Raw(live.servers[0]) as raw:
        raw.send(get("/version", "Connection: close") + b"\x00 rubbish \xff" * 1000)
        answer = raw.rest()
    assert answer.count(b"HTTP/1.1 ") == 1 and status(answer) == 200


def test_upgrades_are_ignored(live: Setup) -> None:
    with Raw(live.servers[0]) as raw:
        h2c = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c")
        chunked = CHUNKED + "\r\n".join(h2c).encode() + b'\r\n\r\n9\r\n{"prompt"\r\n6\r\n: "x"}\r\n0\r\n\r\n'
        raw.send(request(HELLO, *h2c) + chunked + get("/v1/models", *h2c) + get("/version"))
        answer = raw.until(b'"version"')
    assert answer.count(b"HTTP/1.1 200 OK") == 4, "a body is no request of its own"


# ---------------------------------------------------------------- bodies


def test_a_body_that_is_too_large_is_refused_while_it_is_still_sent(own: Callable[..., LiveServer]) -> None:
    server = own(max_body_bytes=100_000)
    body = b"x" * 5_000_000
    for sent in (request(body), CHUNKED + b"\r\n" + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)):
        with Raw(server) as raw:
            raw.send(sent)
            answer = raw.rest()
        assert status(answer) == 413 and b"connection: close" in answer
        assert error(answer)["message"] == "The body is larger than 100000 bytes (max_body_bytes)."


def test_what_is_thrown_away_is_read_with_rests(live: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that always has more to send would be read thirty times in a row, and others wait."""
    reads: list[tuple[float, int]] = []
    throw_away = Connection._throw_away

    def noted(self: Connection, size: int) -> None:
        reads.append((time.monotonic(), size))
        throw_away(self, size)

    monkeypatch.setattr(Connection, "_throw_away", noted)
    with Raw(live.servers[0]) as raw:
        raw.send(request(b"x" * (20 << 20)))
        assert status(raw.rest()) == 413
    assert sum(size for _, size in reads) > 10 << 20, "so much was still on its way"
    for (before, size), (after, _) in pairwise(reads):
        assert size < MUCH_BYTES or after - before > 0.8 * REST_BETWEEN_READS


def test_bodies_in_memory_are_bounded_over_all_requests(own: Callable[..., LiveServer]) -> None:
    server = own(max_buffered_bytes=100_000)
    begun = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 90000\r\n\r\n" + b" " * 80_000
    with Raw(server) as first:
        first.send(begun)
        wait_until(lambda: server.state.requests.room.used == 80_000)
        with Raw(server) as second:
            second.send(begun)
            answer = second.rest()
        assert status(answer) == 503 and b"retry-after: 1" in answer
        assert "100000 bytes of bodies, the most it takes (max_buffered_bytes)" in error(answer)["message"]
    wait_until(lambda: server.state.requests.room.used == 0)
    assert httpx.post(server.url + "/v1/completions", json=HELLO, timeout=30).status_code == 200


def test_expect_100_continue(live: Setup) -> None:
    head, _, body = request(HELLO, "Expect: 100-continue").partition(b"\r\n\r\n")
    with Raw(live.servers[0]) as raw:
        raw.send(head + b"\r\n\r\n")
        assert raw.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        raw.send(body)
        assert status(raw.until(b'"usage"')) == 200
    with Raw(live.servers[0]) as raw:  # refused by its head: the body is not wanted, and the connection ends
        raw.send(head.replace(b"Host: x", b"Host: x\r\nContent-Type: text/plain") + b"\r\n\r\n")
        answer = raw.rest()
        assert status(answer) == 415 and b"100 Continue" not in answer


def test_head_requests_have_no_body(live: Setup) -> None:
    with Raw(live.servers[0]) as raw:
        raw.send(get("/version").replace(b"GET", b"HEAD") + get("/version"))
        answer = raw.until(b'"version"')
    first, second = answer.split(b"HTTP/1.1 200 OK")[1:]
    assert first.endswith(b"\r\n\r\n") and b"content-length: " in first and b"\r\ndate: " in second


def test_an_http_1_0_client_gets_no_chunks(live: Setup) -> None:
    with Raw(live.servers[0]) as raw:
        raw.send(request({**HELLO, "stream": True}, version="1.0"))
        answer = raw.rest()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head and b"connection: close" in head
    assert body.startswith(b"data: {") and body.endswith(b"data: [DONE]\n\n")
