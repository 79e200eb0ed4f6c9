"""Who gets a request, who is waited for, and what is tried again: replicas that come, go, drain, hang and die."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import pytest

from kvern_router.policy import Policy


def chat(text: str, **extra: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}], **extra}).encode()


def error_in(body: bytes) -> dict[str, Any]:
    """The error event that ends a stream."""
    assert body.endswith(b"}}\n\n")
    error: dict[str, Any] = json.loads(body.rsplit(b"data: ", 1)[1])["error"]
    return error


# choice


async def test_a_conversation_stays_with_its_replica_and_conversations_are_spread(bench: Any) -> None:
    await bench.start(4)
    served = Counter()
    for i in range(24):
        names = {(await bench.ask(body=chat(f"conversation {i}", seed=turn))).json()["replica"] for turn in range(3)}
        assert len(names) == 1
        served.update(names)
    assert len(served) == 4


async def test_two_routers_agree(bench: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    await bench.start(4)
    other = type(bench)(tmp_path_factory.mktemp("other"))
    other.replicas = bench.replicas
    other.list_replicas([{"name": r.name, "url": r.url} for r in reversed(bench.replicas)])
    try:
        await other.start()
        for i in range(12):
            body = chat(f"c{i}")
            assert (await bench.ask(body=body)).json() == (await other.ask(body=body)).json()
    finally:
        other.replicas = []
        await other.close()


async def test_a_hot_prefix_is_bounded_by_load(bench: Any) -> None:
    release = asyncio.Event()

    async def wait(seen: Any, reader: Any, writer: Any) -> None:
        await release.wait()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    for name in "abcd":
        await bench.replica(name, wait)
    await bench.start()
    asked = [asyncio.ensure_future(bench.ask(body=chat("the same"))) for _ in range(40)]
    await bench.until(lambda: sum(len(r.seen) for r in bench.replicas) == 40)
    loads = sorted((len(r.seen) for r in bench.replicas), reverse=True)
    assert loads[0] == 13, "ceil(1.25 * 40 / 4): full to the bound"
    assert loads[-1] >= 1
    shown = sorted((bench.metric(f'kvern_router_replica_inflight{{replica="{n}"}}') for n in "abcd"), reverse=True)
    assert shown == loads
    release.set()
    assert {a.status for a in await asyncio.gather(*asked)} == {200}


async def test_least_load_and_weights(bench: Any) -> None:
    async def wait(seen: Any, reader: Any, writer: Any) -> None:
        await asyncio.sleep(0.5)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    small, large, none = [await bench.replica(name, wait) for name in ("small", "large", "none")]
    weights = {"small": 1, "large": 3, "none": 0}
    bench.list_replicas([{"name": r.name, "url": r.url, "weight": weights[r.name]} for r in bench.replicas])
    await bench.start(policy=Policy.LEAST_LOAD)
    await asyncio.gather(*(bench.ask(body=chat("the same")) for _ in range(16)))
    assert (len(small.seen), len(large.seen), len(none.seen)) == (4, 12, 0)


async def test_sessions_stick(bench: Any) -> None:
    await bench.start(4, policy=Policy.SESSION)
    by_session: dict[str, set[str]] = {}
    for i in range(48):
        session = f"s{i % 12}"
        answer = await bench.ask(body=chat(f"text {i}"), headers={"x-session-id": session})
        by_session.setdefault(session, set()).add(answer.json()["replica"])
    assert all(len(names) == 1 for names in by_session.values())
    assert len(set.union(*by_session.values())) > 1


# the file


async def test_a_draining_replica_gets_nothing_new_and_finishes_what_it_has(bench: Any, fake: Any) -> None:
    a = await bench.replica("a", fake.sse(count=30, gap=0.02))
    await bench.start()
    client = await bench.client()
    client.send("POST", "/v1/x", b"{}")
    await client.head()
    await bench.replica("b")
    bench.list_replicas(a="draining")
    await bench.until(lambda: bench.probe_of(a) == "draining")
    for i in range(10):
        assert (await bench.ask(body=chat(str(i)))).json()["replica"] == "b"
    got = b""
    while chunk := await client.chunk():
        got += chunk
    assert got.count(b"data:") == 30
    assert len(a.seen) == 1


async def test_the_file_is_read_again_and_a_broken_one_keeps_the_old_list(
    bench: Any, caplog: pytest.LogCaptureFixture
) -> None:
    await bench.start(1)
    bench.file.write_text('{"replicas": [{"name": "x", "url": "nowhere"}]}')
    await bench.until(lambda: "replicas[0].url: 'nowhere'; expected http://host:port" in caplog.text)
    assert (await bench.ask()).json()["replica"] == "r0"
    bench.file.unlink()
    await asyncio.sleep(0.25)
    assert (await bench.ask()).json()["replica"] == "r0"
    await bench.replica("new")
    bench.list_replicas([{"name": "new", "url": bench.replicas[1].url}])
    await bench.until(lambda: [r.name for r in bench.router.fleet.replicas] == ["new"])
    assert (await bench.ask()).json()["replica"] == "new"
    assert 'replica="r0"' not in bench.router.metrics.exposition(b"").decode(), "series of what is gone are gone"


async def test_a_replica_that_is_taken_off_the_list_finishes_its_streams(bench: Any, fake: Any) -> None:
    await bench.replica("a", fake.sse(count=30, gap=0.02))
    await bench.start()
    asked = asyncio.ensure_future(bench.ask())
    await bench.until(lambda: bench.replicas[0].seen)
    bench.list_replicas([])
    await bench.until(lambda: not bench.router.fleet.replicas)
    assert bench.metric('kvern_router_replica_inflight{replica="a"}') == 1
    assert (await asked).body.count(b"data:") == 30


# holding


async def test_requests_are_held_and_sent_when_a_replica_is_ready(bench: Any) -> None:
    replica = await bench.replica("a")
    replica.ready = 503
    await bench.start()
    await bench.until(lambda: bench.probe_of(replica) == "not ready")
    asked = [asyncio.ensure_future(bench.ask(body=chat("x" * 400))) for _ in range(50)]
    await bench.until(lambda: bench.metric("kvern_router_held_requests") == 50)
    size = len(chat("x" * 400))
    assert bench.metric("kvern_router_held_input_tokens") == 50 * (size // 4)
    assert not replica.seen, "nothing goes to a replica that is loading"
    replica.ready = 200
    answers = await asyncio.gather(*asked)
    assert {a.status for a in answers} == {200} and len(replica.seen) == 50
    assert bench.metric("kvern_router_held_requests") == 0 == bench.metric("kvern_router_held_input_tokens")


async def test_requests_are_held_at_zero_replicas_and_wake_with_the_file(bench: Any) -> None:
    await bench.start()
    asked = asyncio.ensure_future(bench.ask())
    await bench.until(lambda: bench.metric("kvern_router_held_requests") == 1)
    ready = await bench.ask("GET", "/ready", None)
    assert (ready.status, ready.json()) == (200, {"status": "holding"})
    await bench.replica("late")
    bench.list_replicas()
    async with asyncio.timeout(60):
        assert (await asked).json()["replica"] == "late"


async def test_after_the_hold_timeout_the_answer_says_what_is_wrong(bench: Any) -> None:
    loading, gone = await bench.replica("web-0"), await bench.replica("web-1")
    loading.ready = 503
    gone.kill()
    await bench.start(hold_timeout=0.4)
    await bench.until(lambda: bench.probe_of(loading) == "not ready" and bench.probe_of(gone) == "unreachable")
    answer = await bench.ask()
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"] == {
        "message": "No replica of tiny is ready (web-0 is not ready; web-1 is unreachable) and none became ready "
        "within 0.4 s (hold-timeout). Try again later.",
        "type": "server_error",
        "param": None,
        "code": "hold_timeout",
    }
    assert bench.metric('kvern_router_requests_total{status="503"}') == 1


async def test_no_more_than_max_held_wait(bench: Any) -> None:
    await bench.start(max_held=2, hold_timeout=3.0)
    waiting = [asyncio.ensure_future(bench.ask()) for _ in range(2)]
    await bench.until(lambda: bench.metric("kvern_router_held_requests") == 2)
    answer = await bench.ask()
    assert (answer.status, answer.json()["error"]["code"]) == (503, "hold_queue_full")
    assert "(none is listed) and 2 requests are waiting already (max-held)" in answer.json()["error"]["message"]
    await bench.replica("late")
    bench.list_replicas()
    assert {a.status for a in await asyncio.gather(*waiting)} == {200}


async def test_without_holding_the_router_is_not_ready_either(bench: Any) -> None:
    await bench.start(max_held=0)
    answer = await bench.ask()
    assert (answer.status, answer.json()["error"]["code"]) == (503, "hold_queue_full")
    assert (await bench.ask("GET", "/ready", None)).status == 503
    assert (await bench.ask("GET", "/health", None)).status == 200


async def test_a_client_that_leaves_while_it_is_held_is_forgotten(bench: Any) -> None:
    await bench.start()
    client = await bench.client()
    client.send("POST", "/v1/x", b"{}")
    await bench.until(lambda: bench.metric("kvern_router_held_requests") == 1)
    client.close()
    await bench.until(lambda: bench.metric("kvern_router_held_requests") == 0)
    assert bench.metric('kvern_router_requests_total{status="499"}') == 1


async def test_a_held_request_is_not_lost_to_a_full_queue(bench: Any, fake: Any) -> None:
    replica = await bench.replica("a")
    usual = replica.handler

    async def full_at_first(seen: Any, reader: Any, writer: Any) -> None:
        handler = usual if len(replica.seen) > 1 else fake.status(429, retry_after=1)
        await handler(seen, reader, writer)

    replica.handler, replica.ready = full_at_first, 503
    await bench.start()
    await bench.until(lambda: bench.probe_of(replica) == "not ready")
    asked = asyncio.ensure_future(bench.ask())
    await bench.until(lambda: bench.metric("kvern_router_held_requests") == 1)
    replica.ready = 200
    assert (await asked).status == 200


async def test_a_queue_that_stays_full_is_what_a_held_request_is_told(bench: Any, fake: Any) -> None:
    full = fake.status(429, retry_after=3, body=b'{"error": {"message": "The queue is full", "code": "queue_full"}}')
    replica = await bench.replica("a", full)
    replica.ready = 503
    await bench.start(hold_timeout=1.5)
    await bench.until(lambda: bench.probe_of(replica) == "not ready")
    asked = asyncio.ensure_future(bench.ask())
    await bench.until(lambda: bench.metric("kvern_router_held_requests") == 1)
    replica.ready = 200
    answer = await asked
    assert (answer.status, answer.headers["retry-after"]) == (429, "3"), "no replica was ready, it would be told"
    assert answer.json()["error"]["code"] == "queue_full" and len(replica.seen) > 1


# retries


async def both_ways(bench: Any, first: Any, **settings: Any) -> Any:
    """One request that meets `first` on the replica that it goes to, and a good answer on the other."""
    met: list[str] = []

    def handler(replica: Any) -> Any:
        usual = replica.handler

        async def handle(seen: Any, reader: Any, writer: Any) -> None:
            met.append(replica.name)
            await (first if len(met) == 1 else usual)(seen, reader, writer)

        return handle

    for name in "ab":
        replica = await bench.replica(name)
        replica.handler = handler(replica)
    await bench.start(**settings)
    answer = await bench.ask()
    return answer, met


async def reset(seen: Any, reader: Any, writer: Any) -> None:
    writer.transport.abort()
    raise ConnectionResetError


async def half_an_answer(seen: Any, reader: Any, writer: Any) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\nhalf")
    await writer.drain()
    await asyncio.sleep(0.05)
    await reset(seen, reader, writer)


async def head_of_a_stream(seen: Any, reader: Any, writer: Any) -> None:
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n5\r\ndata:\r\n"
    )
    await writer.drain()
    await asyncio.sleep(0.05)
    await reset(seen, reader, writer)


async def error_first(seen: Any, reader: Any, writer: Any) -> None:
    data = b'data: {"error": {"message": "The engine died", "type": "server_error", "code": "engine_dead"}}\n\n'
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))


@pytest.mark.parametrize("first", [reset, half_an_answer, head_of_a_stream, error_first])
async def test_a_replica_that_dies_before_the_first_byte_is_not_noticed(bench: Any, first: Any) -> None:
    answer, met = await both_ways(bench, first)
    assert (answer.status, answer.json()["replica"]) == (200, met[1])
    assert len(set(met)) == 2
    assert bench.metric("kvern_router_retries_total") == 1
    assert bench.metric('kvern_router_requests_total{status="200"}') == 1


@pytest.mark.parametrize(("code", "retry_after"), [(503, 1), (503, None), (502, None), (500, None)])
async def test_a_replica_that_cannot_is_passed_over(bench: Any, fake: Any, code: int, retry_after: int | None) -> None:
    answer, met = await both_ways(bench, fake.status(code, retry_after=retry_after))
    assert answer.status == 200 and len(set(met)) == 2
    assert bench.metric("kvern_router_retries_total") == 1


@pytest.mark.parametrize("code", [400, 404, 429])
async def test_what_is_about_the_request_is_passed_on(bench: Any, fake: Any, code: int) -> None:
    answer, met = await both_ways(bench, fake.status(code, retry_after=7))
    assert (answer.status, answer.headers["retry-after"], len(met)) == (code, "7", 1)
    assert bench.metric("kvern_router_retries_total") == 0


async def test_an_answer_without_an_alternative_is_passed_on(bench: Any, fake: Any) -> None:
    await bench.replica("a", fake.status(500, body=b"the replica's own words"))
    await bench.start()
    answer = await bench.ask()
    assert (answer.status, answer.body) == (500, b"the replica's own words")


async def test_nobody_listens_on_one_of_two(bench: Any) -> None:
    dead, alive = await bench.replica("a"), await bench.replica("b")
    dead.kill()
    await bench.start(probe_interval=30.0)
    await asyncio.sleep(0.05)
    for i in range(20):
        assert (await bench.ask(body=chat(str(i)))).json()["replica"] == alive.name


async def test_a_request_waits_for_its_only_replica_to_come_back(bench: Any) -> None:
    replica = await bench.replica("a")
    usual, replica.handler = replica.handler, head_of_a_stream
    await bench.start()
    asked = asyncio.ensure_future(bench.ask())
    await bench.until(lambda: replica.seen)
    replica.kill()
    await bench.until(lambda: bench.metric("kvern_router_held_requests") == 1)
    replica.handler = usual
    await replica.start()
    async with asyncio.timeout(60):
        answer = await asked
    assert answer.json()["replica"] == "a"


async def test_a_request_that_kills_replicas_does_not_go_through_all_of_them(bench: Any) -> None:
    for name in "abcde":
        await bench.replica(name, reset)
    await bench.start()
    answer = await bench.ask()
    error = answer.json()["error"]
    assert (answer.status, error["code"]) == (502, "replica_failed")
    assert "3 attempts failed" in error["message"]
    assert sum(len(r.seen) for r in bench.replicas) == 3


async def test_nor_does_it_on_connections_that_were_idle_before(bench: Any) -> None:
    killed: list[str] = []

    def handler(replica: Any) -> Any:
        async def handle(seen: Any, reader: Any, writer: Any) -> None:
            if b"poison" in seen.body:
                killed.append(replica.name)
                replica.kill()
                raise ConnectionResetError
            await replica.answer(seen, reader, writer)

        return handle

    for name in "abcde":
        replica = await bench.replica(name)
        replica.handler = handler(replica)
    await bench.start(policy=Policy.LEAST_LOAD)
    while not all(r.seen for r in bench.replicas):  # a warm connection to each
        await asyncio.gather(*(bench.ask() for _ in range(5)))
    assert (await bench.ask(body=b"poison")).status == 502
    assert len(killed) == 3


async def test_engines_that_die_with_a_request_are_counted_too(bench: Any, fake: Any) -> None:
    dead = fake.status(503, retry_after=1, body=b'{"error": {"message": "m", "code": "engine_dead"}}')
    for name in "abcde":
        await bench.replica(name, dead)
    await bench.start()
    answer = await bench.ask()
    assert (answer.status, answer.json()["error"]["code"]) == (503, "engine_dead")
    assert sum(len(r.seen) for r in bench.replicas) == 3


async def test_a_stream_whose_replica_dies_ends_with_an_error_event(bench: Any, fake: Any) -> None:
    begun = [b"data: 1\n\n", b"data: 2\n\n", b'data: {"half": ']
    a, b = [await bench.replica(n, fake.sse(events=begun, die=True)) for n in "ab"]
    await bench.start()
    client = await bench.client()
    client.send("POST", "/v1/x", b"{}")
    answer = await client.receive()
    assert answer.whole, "the framing ends properly"
    assert answer.body.startswith(b"data: 1\n\ndata: 2\n\n")
    assert b"half" not in answer.body, "no broken event reaches the client"
    error = error_in(answer.body)
    assert (error["type"], error["code"]) == ("server_error", "replica_lost")
    assert error["message"].endswith("was lost while it was answering")
    assert await client.closed()
    assert len(a.seen) + len(b.seen) == 1, "no retry after the first byte"
    assert bench.metric('kvern_router_requests_total{status="502"}') == 1
    assert bench.metric("kvern_router_retries_total") == 0


async def test_kill_in_mid_stream_of_many(bench: Any, fake: Any) -> None:
    doomed, other = [await bench.replica(n, fake.sse(count=50, gap=0.02)) for n in "ab"]
    await bench.start()
    begun = []

    async def stream(number: int) -> bytes:
        client = await bench.client()
        client.send("POST", "/v1/completions", chat(str(number)))
        await client.head()
        chunks = [await client.chunk()]
        begun.append(number)  # from here on it is not sent again
        while chunk := await client.chunk():
            chunks.append(chunk)
        return b"".join(chunks)

    asked = [asyncio.ensure_future(stream(i)) for i in range(40)]
    await bench.until(lambda: len(begun) == 40)
    # A machine that stands still for seconds makes a replica look hung: what waits there is moved, and its place left.
    held_by_doomed, held_by_other = [len(r.seen) - r.disconnects for r in (doomed, other)]
    doomed.kill()
    bodies = await asyncio.gather(*asked)
    whole = [body for body in bodies if body.count(b"data:") == 50 and b"error" not in body]
    cut = [body for body in bodies if b"error" in body]
    assert (len(whole), len(cut)) == (held_by_other, held_by_doomed) and cut and whole
    assert all(error_in(body)["code"] == "replica_lost" for body in cut)
    other.handler = fake.sse(count=3)
    for _ in range(5):
        assert (await bench.ask()).body.count(b"data:") == 3


async def test_a_stream_that_had_said_everything_is_whole_though_its_replica_died(bench: Any, fake: Any) -> None:
    await bench.replica("a", fake.sse(events=[b"data: 1\n\n", b"data: [DONE]\n\n"], die=True))
    await bench.start()
    answer = await bench.ask()
    assert answer.whole and answer.body == b"data: 1\n\ndata: [DONE]\n\n"


async def test_an_answer_that_is_cut_is_not_made_to_look_whole(bench: Any) -> None:
    async def half(seen: Any, reader: Any, writer: Any) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 200000\r\n\r\n" + b"x" * 100_000)
        await writer.drain()
        await asyncio.sleep(0.1)
        await reset(seen, reader, writer)

    await bench.replica("a", half)
    await bench.start()
    answer = await bench.ask()
    assert answer.status == 200 and not answer.whole


async def test_requests_that_wait_for_a_hung_replica_are_moved(bench: Any) -> None:
    async def hang(seen: Any, reader: Any, writer: Any) -> None:
        await asyncio.sleep(60)

    a, b = await bench.replica("a"), await bench.replica("b")
    a.handler = hang
    await bench.start(probe_timeout=0.2)
    asked = [asyncio.ensure_future(bench.ask(body=chat(str(i)))) for i in range(12)]
    await bench.until(lambda: len(a.seen) + len(b.seen) == 12)
    on_hung = len(a.seen)
    assert on_hung > 0
    a.ready = None
    async with asyncio.timeout(60):
        answers = await asyncio.gather(*asked)
    assert {x.json()["replica"] for x in answers} == {"b"}
    assert bench.metric("kvern_router_retries_total") == on_hung
    assert bench.probe_of(a) == "not answering"
    for i in range(5):
        assert (await bench.ask(body=chat(f"new {i}"))).json()["replica"] == "b"
    a.ready, a.handler = 200, a.answer
    await bench.until(lambda: bench.probe_of(a) == "ready")


async def test_a_long_prefill_is_left_alone_while_the_replica_answers_its_probe(bench: Any) -> None:
    async def prefill(seen: Any, reader: Any, writer: Any) -> None:
        await asyncio.sleep(1.0)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

    for name in "ab":
        await bench.replica(name, prefill)
    await bench.start(idle_timeout=0.3)
    assert (await bench.ask()).body == b"ok"
    assert bench.metric("kvern_router_retries_total") == 0
