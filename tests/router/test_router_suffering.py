"""What users of routers and operators suffer from, each as a test: stalls, cut streams, requests that are held for
ever, traffic to pods that load or go, and the end of one router of two."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest


def prompt(i: int, **extra: Any) -> bytes:
    return json.dumps({"prompt": f"conversation {i}", **extra}).encode()


async def hang(seen: Any, reader: Any, writer: Any) -> None:
    await asyncio.sleep(600)


async def test_one_hung_backend_stalls_nobody_else(bench: Any) -> None:
    """production-stack #749. The hung one accepts everything and says nothing, to its probe neither."""
    hung, *others = [await bench.replica(name) for name in "abc"]
    hung.handler = hang

    def slowly(replica: Any) -> Any:
        async def handle(seen: Any, reader: Any, writer: Any) -> None:
            await asyncio.sleep(0.2)
            await replica.answer(seen, reader, writer)

        return handle

    for replica in others:
        replica.handler = slowly(replica)
    await bench.start(probe_timeout=0.5)
    took: dict[str, float] = {}

    async def ask(i: int) -> Any:
        began = time.monotonic()
        answer = await bench.ask(body=prompt(i), headers={"x-request-id": str(i)})
        took[str(i)] = time.monotonic() - began
        return answer

    asked = [asyncio.ensure_future(ask(i)) for i in range(60)]
    await bench.until(lambda: sum(len(r.seen) for r in bench.replicas) == 60)
    assert len(hung.seen) > 5
    hung.ready = None
    while bench.probe_of(hung) != "not answering":
        asked.append(asyncio.ensure_future(ask(len(asked))))
        await asyncio.sleep(0.02)
    known = len(asked)
    asked += [asyncio.ensure_future(ask(i)) for i in range(known, known + 50)]
    async with asyncio.timeout(20):
        answers = await asyncio.gather(*asked)
    assert {a.status for a in answers} == {200} and {a.json()["replica"] for a in answers} == {"b", "c"}
    met = {s.header("x-request-id")[0] for s in hung.seen}
    assert not met & {str(i) for i in range(known, len(asked))}, "nothing goes to it once it is known"
    assert max(seconds for i, seconds in took.items() if i not in met) < 0.7, "the others notice nothing"
    assert all(len(r.seen) > 5 for r in others)


async def test_a_hung_replica_that_leaves_the_list_lets_its_requests_go(bench: Any) -> None:
    """Nobody probes it any more; what waits for its first byte must not wait for ever."""
    a, b = await bench.replica("a"), await bench.replica("b")
    a.handler = hang
    bench.list_replicas([{"name": "a", "url": a.url}])
    await bench.start(probe_timeout=0.2)
    asked = asyncio.ensure_future(bench.ask())
    await bench.until(lambda: a.seen)
    a.ready = None
    await bench.until(lambda: bench.probe_of(a) == "not answering")
    assert not asked.done()
    bench.list_replicas([{"name": "b", "url": b.url}])
    async with asyncio.timeout(20):
        assert (await asked).json()["replica"] == "b"


async def test_no_total_timeout_cuts_a_stream(bench: Any, fake: Any) -> None:
    """LLMKube #734: only silence ends a stream, and this one is never silent for as long as any of the timeouts."""
    await bench.replica("a", fake.sse(count=40, gap=0.08))
    short = dict.fromkeys(("hold_timeout", "keep_alive", "upload_timeout", "body_timeout", "connect_timeout"), 0.5)
    await bench.start(**short, idle_timeout=0.5, probe_timeout=0.5)
    began = time.monotonic()
    answer = await bench.ask()
    assert time.monotonic() - began > 3.0
    assert answer.whole and answer.body.count(b"data:") == 40


async def test_nothing_goes_to_pods_that_load_and_each_has_its_share_once_it_is_ready(bench: Any) -> None:
    """AIBrix #2670, production-stack #601: the load on the only one that is ready must not take the rest along."""
    replicas = [await bench.replica(name) for name in "abcd"]
    for replica in replicas[1:]:
        replica.ready = 503
    release = asyncio.Event()

    async def wait(seen: Any, reader: Any, writer: Any) -> None:
        await release.wait()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    for replica in replicas:
        replica.handler = wait
    await bench.start()
    asked = [asyncio.ensure_future(bench.ask(body=prompt(i))) for i in range(40)]
    await bench.until(lambda: len(replicas[0].seen) == 40)
    assert not any(r.seen for r in replicas[1:])
    for replica in replicas[1:]:
        replica.ready = 200
    await bench.until(lambda: all(r["available"] for r in bench.router.fleet.describe()))
    asked += [asyncio.ensure_future(bench.ask(body=prompt(i))) for i in range(40, 80)]
    await bench.until(lambda: sum(len(r.seen) for r in replicas) == 80)
    assert len(replicas[0].seen) == 40, "the new ones first"
    assert all(len(r.seen) > 5 for r in replicas[1:])
    release.set()
    assert {a.status for a in await asyncio.gather(*asked)} == {200}


@pytest.mark.parametrize("seed", range(4))
async def test_held_requests_are_always_sent(bench: Any, fake: Any, seed: int) -> None:
    """GIE #2117: whatever replicas, lists and probes do meanwhile, once one is ready nothing stays behind."""
    rng = random.Random(seed)
    replicas = [await bench.replica(f"r{i}") for i in range(3)]
    usual = [r.handler for r in replicas]
    refuse = fake.status(503, retry_after=1, body=b'{"error": {"message": "draining", "code": "draining"}}')
    await bench.start(max_held=10_000, hold_timeout=60.0)
    asked: list[asyncio.Task[Any]] = []
    for _ in range(60):
        i = rng.randrange(3)
        replica, what = replicas[i], rng.randrange(6)
        if what == 0:
            replica.ready = 503
        elif what == 1:
            replica.ready = 200
        elif what == 2:
            replica.handler = refuse
        elif what == 3:
            replica.handler = fake.status(429, retry_after=1) if bench.metric("kvern_router_held_requests") else refuse
        elif what == 4:
            replica.handler = usual[i]
        else:
            states = {r.name: rng.choice(("ready", "draining")) for r in replicas}
            bench.list_replicas([x for x in _entries(replicas, states) if rng.random() < 0.7])
        asked += [asyncio.ensure_future(bench.ask(body=prompt(rng.randrange(100)))) for _ in range(3)]
        await asyncio.sleep(rng.random() * 0.08)
    for replica, handler in zip(replicas, usual, strict=True):
        replica.ready, replica.handler = 200, handler
    bench.list_replicas()
    async with asyncio.timeout(20):
        answers = await asyncio.gather(*asked)
    refused = [a for a in answers if a.status != 200]
    assert all(a.status == 429 for a in refused), "the only answer that is the client's business"
    assert bench.metric("kvern_router_held_requests") == 0 == bench.metric("kvern_router_held_input_tokens")


def _entries(replicas: list[Any], states: dict[str, str]) -> list[dict[str, str]]:
    return [{"name": r.name, "url": r.url, "state": states[r.name]} for r in replicas]


async def test_a_pod_that_goes_takes_nothing_along(bench: Any, fake: Any) -> None:
    """production-stack #619, Dynamo #13559: SIGTERM at the engine, then refusals, then nobody listens; the list is told
    last. Clients that never pause see none of it."""
    going, _ = await bench.replica("a"), await bench.replica("b")
    going.handler = bench.replicas[1].handler = fake.sse(events=[b"data: 1\n\n"] * 5, gap=0.02)
    await bench.start()
    over, answers = False, []

    async def client(i: int) -> None:
        turn = 0
        while not over:
            answers.append(await bench.ask(body=prompt(i + 100 * turn)))
            turn += 1

    async def go_on() -> None:
        enough = len(answers) + 40
        await bench.until(lambda: len(answers) >= enough)

    clients = [asyncio.ensure_future(client(i)) for i in range(20)]
    await go_on()
    going.ready = 503
    await asyncio.sleep(0.02)  # the probes do not know yet
    going.handler = fake.status(503, retry_after=1)
    await go_on()
    assert going.seen
    going.kill()
    await go_on()
    bench.list_replicas([{"name": "b", "url": bench.replicas[1].url}])
    await go_on()
    over = True
    await asyncio.gather(*clients)
    assert {(a.status, a.body.count(b"data:"), a.whole) for a in answers} == {(200, 5, True)}


async def test_the_only_replica_is_replaced_and_clients_wait(bench: Any, fake: Any) -> None:
    """Recreate, or a drain where no GPU is spare: slow, and no error."""
    old = await bench.replica("a")
    await bench.start()
    over, answers, slowest = False, [], 0.0

    async def client(i: int) -> None:
        nonlocal slowest
        while not over:
            began = time.monotonic()
            answers.append(await bench.ask(body=prompt(i)))
            slowest = max(slowest, time.monotonic() - began)

    clients = [asyncio.ensure_future(client(i)) for i in range(10)]
    await asyncio.sleep(0.2)
    bench.list_replicas(a="draining")
    await asyncio.sleep(0.3)
    old.kill()
    bench.list_replicas([])
    await asyncio.sleep(1.0)
    assert bench.metric("kvern_router_held_requests") == 10
    new = await bench.replica("a2")
    bench.list_replicas([{"name": "a", "url": new.url, "uid": "2"}])
    await bench.until(lambda: new.seen)
    await asyncio.sleep(0.2)
    over = True
    await asyncio.gather(*clients)
    assert {a.status for a in answers} == {200}
    assert slowest < 2.5


@pytest.mark.parametrize("body", [prompt(1, priority=-5), b'{"priority":7,\n "prompt": "x" }'])
async def test_priority_goes_through_as_it_is(bench: Any, body: bytes) -> None:
    await bench.start(1)
    await bench.ask(body=body)
    assert bench.replicas[0].seen[0].body == body


# the end of one router of two


def start_router(file: Path, *flags: str) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-m", "kvern_router.main", "--listen", "127.0.0.1:0", "--replicas-file", str(file)]
    process = subprocess.Popen([*command, "--no-access-log", *flags], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "listening on http://" in line:
            return process, int(line.split("http://")[1].split(",")[0].rpartition(":")[2])
    raise AssertionError("the router did not start")


async def connect(bench: Any, port: int) -> Any:
    return type(await bench.client())(*await asyncio.open_connection("127.0.0.1", port))


async def test_a_router_that_is_killed_harms_nothing_at_the_other(bench: Any, fake: Any) -> None:
    go = asyncio.Event()

    async def late(seen: Any, reader: Any, writer: Any) -> None:
        if b"late" in seen.body:
            await go.wait()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for i in range(30):
            writer.write(b"%x\r\ndata: %02d\n\n\r\n" % (10, i))
            if i == 5:
                await go.wait()
        writer.write(b"0\r\n\r\n")

    for name in "ab":
        await bench.replica(name, late)
    await bench.start()
    routers = [start_router(bench.file) for _ in range(2)]
    try:
        streams: list[list[Any]] = []
        for _, port in routers:
            clients = [await connect(bench, port) for _ in range(40)]
            for i, client in enumerate(clients):
                client.send("POST", "/v1/completions", b'{"prompt": "%s %d"}' % (b"late" if i % 2 else b"now", i))
            streams.append(clients)
        await bench.until(lambda: sum(len(r.seen) for r in bench.replicas) >= 80)
        victim, survivor = streams
        routers[0][0].kill()
        await bench.until(lambda: sum(r.disconnects for r in bench.replicas) >= 40)
        go.set()
        for client in survivor:
            answer = await client.receive()
            assert answer.status == 200 and answer.whole and answer.body.count(b"data:") == 30
        assert all([await client.closed() or True for client in victim])
    finally:
        for process, _ in routers:
            process.kill()
            process.communicate()


async def test_a_connection_that_is_kept_is_answered_until_the_endpoints_have_forgotten_the_router(bench: Any) -> None:
    """A client that has idled a moment sends its next request to a router that was told to end meanwhile."""
    await bench.start(1)
    process, port = start_router(bench.file, "--shutdown-delay-seconds", "1.5")
    try:
        clients = [await connect(bench, port) for _ in range(10)]
        for client in clients:
            client.send("POST", "/v1/completions", b"{}")
            assert (await client.receive()).headers.get("connection") is None
        process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.1)
        for i, client in enumerate(clients):
            client.send("POST", "/v1/completions", b"{}")
            answer = await client.receive()
            assert (answer.status, answer.headers["connection"]) == (200, "close"), i
            await asyncio.sleep(0.1)
        assert await asyncio.to_thread(process.wait, 20) == 0
    finally:
        process.kill()
        process.communicate()


async def test_held_requests_outlive_a_sigterm(bench: Any) -> None:
    """A drain waits for what is held as well: it is somebody's request."""
    replica = await bench.replica("a")
    replica.ready = 503
    await bench.start()
    process, port = start_router(bench.file)
    try:
        client = await connect(bench, port)
        client.send("POST", "/v1/completions", b"{}")
        await asyncio.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.5)
        assert process.poll() is None
        replica.ready = 200
        assert (await client.receive()).status == 200
        assert await asyncio.to_thread(process.wait, 20) == 0
    finally:
        process.kill()
        process.communicate()
