"""Limits a tenant as clients meet them: refusals, headers, what is charged, keys that are rotated, two routers."""

from __future__ import annotations

import asyncio
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest

from kvern_router.accesslog import AccessLog
from kvern_router.limits import Limits
from kvern_router.tenants import Tenants

LAST = b"data: [DONE]\n\n"


def answer_of(prompt: int, output: int) -> Any:
    """A handler that answers with JSON that says what it cost."""

    async def handle(seen: Any, reader: Any, writer: Any) -> None:
        body = json.dumps({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output}}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body))
        writer.write(body)

    return handle


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def remaining(bench: Any, which: str = "tokens", key: str = "") -> int:
    """What the next request would be told."""
    (meter,) = [m for name, m in bench.router._tenants._meters.items() if not key or name == key]
    found = dict(meter.headers(asyncio.get_running_loop().time()))
    return int(found[f"x-ratelimit-remaining-{which}".encode()])


async def test_a_tenant_that_has_used_up_its_requests_is_told_when_to_come_again(bench: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alpha: sk-a\nsk-b\n")
    bench.more = {"limits": {"requestsPerMinute": 2}}
    await bench.start(1, api_keys_file=keys)
    first = await bench.ask(headers=bearer("sk-a"))
    assert first.status == 200
    assert {n: v for n, v in first.headers.items() if n.startswith("x-ratelimit")} == {
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "1",
        "x-ratelimit-reset-requests": "30s",
    }
    assert (await bench.ask(headers=bearer("sk-a"))).headers["x-ratelimit-remaining-requests"] == "0"
    client = await bench.client()
    client.send("POST", "/v1/completions", b"{}", headers=bearer("sk-a"))
    answer = await client.receive()
    assert answer.status == 429
    assert 10_000 < int(answer.headers["retry-after-ms"]) <= 30_000
    assert int(answer.headers["retry-after"]) == math.ceil(int(answer.headers["retry-after-ms"]) / 1000)
    assert answer.headers["x-ratelimit-remaining-requests"] == "0"
    assert 40 < float(answer.headers["x-ratelimit-reset-requests"].removesuffix("s").replace("1m0", "60")) <= 60
    error = answer.json()["error"]
    assert error["message"].startswith(
        "Rate limit reached for tenant alpha: 2 requests a minute (router.limits.requestsPerMinute). "
        "Please try again in "
    )
    assert (error["type"], error["param"], error["code"]) == ("requests", None, "rate_limit_exceeded")
    client.send("GET", "/v1/models", headers=bearer("sk-a"))
    assert (await client.receive()).status == 200, "the connection stays, and what generates nothing is free"
    assert (await bench.ask(headers=bearer("sk-b"))).status == 200, "another tenant has its own"
    assert len([s for s in bench.replicas[0].seen if s.method == "POST"]) == 3
    assert bench.metric('kvern_router_limited_total{limit="requests"}') == 1
    assert bench.metric('kvern_router_requests_total{status="429"}') == 1


async def test_whoever_comes_again_when_told_is_served(bench: Any) -> None:
    bench.more = {"limits": {"requestsPerMinute": 20}}
    await bench.start(1)
    answers = await asyncio.gather(*(bench.ask() for _ in range(21)))
    assert sorted(a.status for a in answers) == [200] * 20 + [429]
    answer = next(a for a in answers if a.status == 429)
    assert answer.json()["error"]["message"].startswith("Rate limit reached for this service: 20 requests a minute")
    await asyncio.sleep(int(answer.headers["retry-after-ms"]) / 1000)
    assert (await bench.ask()).status == 200


async def test_the_openai_client_knows_it_as_a_rate_limit(bench: Any) -> None:
    openai = pytest.importorskip("openai")
    bench.more = {"limits": {"requestsPerMinute": 1}}
    await bench.start(1)
    await bench.ask()
    async with openai.AsyncOpenAI(base_url=f"http://{bench.router.address}/v1", api_key="k", max_retries=0) as client:
        with pytest.raises(openai.RateLimitError, match="1 requests a minute") as caught:
            await client.completions.create(model="m", prompt="x")
    assert (caught.value.code, caught.value.type) == ("rate_limit_exceeded", "requests")
    assert 30 < int(caught.value.response.headers["retry-after"]) <= 60


async def test_an_answer_is_charged_what_it_says_it_cost(bench: Any) -> None:
    bench.more = {"limits": {"tokensPerMinute": 6000}}
    replica = await bench.replica("a", answer_of(100, 900))
    await bench.start()
    assert (await bench.ask(body=b"x" * 40)).headers["x-ratelimit-remaining-tokens"] == "5990", "estimated at first"
    assert 5000 <= await remaining(bench) < 5500
    assert replica.seen[0].header("x-kvern-usage") == ["comment"]
    replica.handler = answer_of(100, 50_000)
    await bench.ask()
    answer = await bench.ask()
    error = answer.json()["error"]
    assert (answer.status, error["type"]) == (429, "tokens")
    assert "6000 tokens a minute (router.limits.tokensPerMinute)" in error["message"]
    assert 440 < int(answer.headers["retry-after"]) < 460, "(50,100 - 5,000) / 100 a second: debt is paid first"


async def test_a_stream_is_charged_as_it_comes_and_put_right_at_its_end(bench: Any) -> None:
    go = asyncio.Event()

    async def stream(seen: Any, reader: Any, writer: Any) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(300):
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
        await writer.drain()
        await go.wait()
        last = b": kvern-usage 7 1000\n\n" + LAST
        writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last))

    event = b'data: {"choices": []}\n\n'
    bench.more = {"limits": {"tokensPerMinute": 60_000}}
    await bench.replica("a", stream)
    lines = io.StringIO()
    access_log = AccessLog(lines)
    await bench.start(0, access_log)
    asked = asyncio.ensure_future(bench.ask())
    await bench.until(lambda: [u for u in bench.router._tenants._meters.values() if u.charged_tokens >= 301])
    go.set()
    answer = await asked
    assert answer.body == event * 300 + LAST, "the comment was for the router"
    (meter,) = bench.router._tenants._meters.values()
    assert meter.charged_tokens == 1007
    access_log.close(20)
    assert json.loads(lines.getvalue())["tokens"] == 1007


async def test_a_client_that_leaves_pays_for_what_it_got(bench: Any, fake: Any) -> None:
    bench.more = {"limits": {"tokensPerMinute": 60_000}}
    await bench.replica("a", fake.sse(events=[b'data: {"choices": []}\n\n'] * 1000, gap=0.01))
    await bench.start()
    client = await bench.client()
    client.send("POST", "/v1/completions", b"x" * 400)
    await client.head()
    for _ in range(20):
        await client.chunk()
    client.close()
    await bench.until(lambda: not bench.router.clients)
    (meter,) = bench.router._tenants._meters.values()
    assert 100 + 20 <= meter.charged_tokens < 100 + 200


@pytest.mark.parametrize("code", [400, 500])
async def test_a_request_that_fails_costs_no_tokens(bench: Any, fake: Any, code: int) -> None:
    bench.more = {"limits": {"tokensPerMinute": 60_000, "requestsPerMinute": 10}}
    await bench.replica("a", fake.status(code))
    await bench.start()
    answer = await bench.ask(body=b"x" * 40_000)
    assert answer.status == code
    assert answer.headers["x-ratelimit-remaining-tokens"] == "50000"
    (meter,) = bench.router._tenants._meters.values()
    assert (meter.charged_tokens, meter.charged_requests) == (0, 1)


async def test_a_request_that_is_tried_twice_is_charged_once(bench: Any, fake: Any) -> None:
    met: list[Any] = []

    def first_dies(handler: Any) -> Any:
        async def handle(seen: Any, reader: Any, writer: Any) -> None:
            met.append(seen)
            if len(met) == 1:
                writer.transport.abort()
                raise ConnectionResetError
            await handler(seen, reader, writer)

        return handle

    bench.more = {"limits": {"tokensPerMinute": 60_000, "requestsPerMinute": 10}}
    for name in "ab":
        await bench.replica(name, first_dies(answer_of(5, 6)))
    await bench.start()
    assert (await bench.ask()).status == 200
    (meter,) = bench.router._tenants._meters.values()
    assert (meter.charged_tokens, meter.charged_requests, len(met)) == (11, 1, 2)


async def test_limits_change_without_a_restart_and_what_was_used_stays_used(bench: Any) -> None:
    await bench.start(1)
    answer = await bench.ask()
    assert not [name for name in answer.headers if name.startswith("x-ratelimit")], "no limits, no headers"
    assert bench.replicas[0].seen[0].header("x-kvern-usage") == []
    bench.more = {"limits": {"requestsPerMinute": 3}}
    bench.list_replicas()
    await bench.until(lambda: bench.router._tenants.limits.any)
    for left in ("2", "1", "0"):
        assert (await bench.ask()).headers["x-ratelimit-remaining-requests"] == left
    bench.more = {"limits": {"requestsPerMinute": 300}}
    bench.list_replicas()
    await bench.until(lambda: bench.router._tenants.limits.requests == 300)
    await asyncio.sleep(0.1)
    assert int((await bench.ask()).headers["x-ratelimit-remaining-requests"]) < 100
    bench.more = {"limits": {"requestsPerMinute": 0}}
    bench.list_replicas()
    await asyncio.sleep(0.3)
    assert bench.router._tenants.limits.requests == 300, "a file that says nonsense changes nothing"


async def test_a_tenant_that_rotates_its_key_has_one_limit(bench: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("team-a: sk-old\n")
    bench.more = {"limits": {"requestsPerMinute": 2}}
    await bench.start(1, api_keys_file=keys)
    assert (await bench.ask(headers=bearer("sk-old"))).status == 200
    keys.write_text("team-a: sk-old\nteam-a: sk-new\n")
    await bench.until(lambda: len(bench.router._keys._known) == 2)
    assert (await bench.ask(headers=bearer("sk-new"))).status == 200
    for key in ("sk-old", "sk-new"):
        assert (await bench.ask(headers=bearer(key))).status == 429
    keys.write_text("team-a: sk-new\n")
    await bench.until(lambda: len(bench.router._keys._known) == 1)
    assert (await bench.ask(headers=bearer("sk-old"))).status == 401
    assert (await bench.ask(headers=bearer("sk-new"))).status == 429
    keys.write_text("team-b: sk-new\n")
    await bench.until(lambda: "team-b" in bench.router._keys.tenants)
    assert (await bench.ask(headers=bearer("sk-new"))).status == 200
    assert list(bench.router._tenants._meters) == ["team-b"], "tenants that are gone are forgotten"


async def test_a_stream_goes_on_when_its_key_is_withdrawn(bench: Any, fake: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-a\n")
    await bench.replica("a", fake.sse(count=40, gap=0.02))
    await bench.start(api_keys_file=keys)
    asked = asyncio.ensure_future(bench.ask(headers=bearer("sk-a")))
    await bench.until(lambda: bench.replicas[0].seen)
    keys.write_text("sk-b\n")
    await bench.until(lambda: bench.router._keys.tenants != set())
    await asyncio.sleep(0.2)
    assert (await bench.ask(headers=bearer("sk-a"))).status == 401
    assert (await asked).body.count(b"data:") == 40


async def test_the_log_names_the_tenant_and_not_the_key(bench: Any, tmp_path: Path) -> None:
    keys, lines = tmp_path / "keys", io.StringIO()
    keys.write_text("team-a: sk-secret-one\nsk-secret-two\n")
    access_log = AccessLog(lines)
    await bench.start(1, access_log, api_keys_file=keys)
    for key in ("sk-secret-one", "sk-secret-two", "sk-wrong"):
        await bench.ask(headers=bearer(key))
    access_log.close(20)
    tenants = [json.loads(line).get("tenant") for line in lines.getvalue().splitlines()]
    assert tenants[0] == "team-a" and tenants[1].startswith("key-") and tenants[2] is None
    assert "secret" not in lines.getvalue()


# two routers


async def second_router(bench: Any, folder: Path, **settings: Any) -> Any:
    """Another router of the same replicas; both are told of each other, as the operator does it."""
    other = type(bench)(folder)
    other.replicas, other.more = bench.replicas, bench.more
    await other.start(**settings)
    bench.more["routers"] = other.more["routers"] = [bench.router.address, other.router.address]
    for one in (bench, other):
        one.list_replicas()
    await bench.until(lambda: bench.router._peers.boot in other.router._tenants._peers)
    await bench.until(lambda: other.router._peers.boot in bench.router._tenants._peers)
    return other


async def close(other: Any) -> None:
    other.replicas = []
    await other.close()


async def test_two_routers_keep_one_limit_together(bench: Any, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    bench.more = {"limits": {"requestsPerMinute": 20, "tokensPerMinute": 10_000}}
    await bench.replica("a", answer_of(50, 150))
    await bench.start()
    other = await second_router(bench, tmp_path / "other")
    began = asyncio.get_running_loop().time()
    try:
        for _ in range(10):
            assert (await bench.ask()).status == 200
        await bench.until(lambda: _missing(other) > 8)
        served = 0
        while (await other.ask()).status == 200:
            served += 1
            assert served < 18, "what the first let in counts here, too"
        assert served >= 10
        await bench.until(lambda: _missing(bench) > 17)
        (here,) = bench.router._tenants._meters.values()
        (there,) = other.router._tenants._meters.values()
        clock = asyncio.get_running_loop().time
        await bench.until(lambda: abs(here.tokens.refill(clock()) - there.tokens.refill(clock())) < 400)
        refilled = (clock() - began) * 10_000 / 60
        assert -400 < here.tokens.level - (10_000 - 200 * (10 + served)) < refilled + 400
    finally:
        await close(other)


def _missing(bench: Any) -> float:
    now = asyncio.get_running_loop().time()
    return max((m.missing(now)[0] for m in bench.router._tenants._meters.values()), default=0.0)


async def test_what_was_used_long_ago_is_nobodys_debt() -> None:
    """A router of yesterday tells a new one of a tenant that was away in between."""
    old, new = Tenants(FakeMetrics()), Tenants(FakeMetrics())  # type: ignore[arg-type]
    for one in (old, new):
        one.limit(Limits(10, 1000))
    for _ in range(10):
        old.admit("team-a", 4)
    meter = old._meters["team-a"]
    meter.elsewhere(0.0, -10, -1000)  # time goes by
    old._last["team-a"] -= 3600
    assert old.charged() == {}
    new.elsewhere("boot", old.charged())
    old.admit("team-a", 4)
    new.elsewhere("boot", old.charged())
    assert new._meters["team-a"].missing(0.0)[0] == pytest.approx(1, abs=0.8)
    old.admit("team-a", 4)
    new.elsewhere("boot", old.charged())
    old.elsewhere("other boot", new.charged())
    assert new._meters["team-a"].missing(0.0)[0] == pytest.approx(2, abs=0.8)
    assert old._meters["team-a"].missing(0.0)[0] == pytest.approx(2, abs=0.8), "nothing comes back as another's"


class FakeMetrics:
    limited = ()


async def test_a_router_that_starts_anew_takes_over_what_was_used(bench: Any, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    bench.more = {"limits": {"requestsPerMinute": 10}}
    await bench.start(1)
    for _ in range(8):
        await bench.ask()
    other = await second_router(bench, tmp_path / "other")
    try:
        assert _missing(other) > 7, "a restart is no way to a full bucket"
        assert _missing(bench) <= 8, "and the new one's full bucket fills nobody's, nor is anything counted twice"
    finally:
        await close(other)


async def test_what_tenants_use_is_told_to_routers_with_the_same_keys_only(bench: Any, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    keys = tmp_path / "keys"
    keys.write_text("team-a: sk-a\n")
    bench.more = {"limits": {"requestsPerMinute": 6}}
    await bench.start(1, api_keys_file=keys)
    for secret in (None, "guess", "none"):
        answer = await bench.ask("GET", "/-/usage", None, headers={"x-kvern-router": secret} if secret else {})
        assert (answer.status, answer.json()["error"]["code"]) == (403, "forbidden")
        assert "team-a" not in answer.body.decode()
    other_keys = tmp_path / "other" / "keys"
    other_keys.write_text("team-a: sk-a\n")
    other = await second_router(bench, tmp_path / "other", api_keys_file=other_keys)
    try:
        other_keys.write_text("team-a: sk-a\nteam-b: sk-b\n")  # the kubelet has been here, and there not yet
        await bench.until(lambda: "team-b" in other.router._keys.tenants)
        await bench.ask(headers=bearer("sk-a"))
        await bench.until(lambda: _missing(other) > 0.5)
        await other.ask(headers=bearer("sk-a"))
        await bench.until(lambda: _missing(bench) > 1.5)
    finally:
        await close(other)


async def test_a_router_that_does_not_answer_is_left_out(
    bench: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hung = await bench.replica("hung")
    hung.handler = _hang
    rubbish = await bench.replica("rubbish", answer_of(1, 1))
    bench.more = {
        "limits": {"requestsPerMinute": 100},
        "routers": [f"127.0.0.1:{hung.port}", f"127.0.0.1:{rubbish.port}", "127.0.0.1:1"],
    }
    bench.replicas = [await bench.replica("a")]
    await bench.start()
    await bench.until(lambda: caplog.text.count("what it counts is not known") == 3)
    assert (await bench.ask()).headers["x-ratelimit-remaining-requests"] == "99"
    assert caplog.text.count("what it counts is not known") == 3, "said once"
    for extra in (hung, rubbish):
        extra.kill()


async def _hang(seen: Any, reader: Any, writer: Any) -> None:
    await asyncio.sleep(600)


# the names of tenants


def test_a_key_is_found_among_very_many_as_fast_as_among_few() -> None:
    from timeit import repeat

    from kvern_router.auth import ApiKeys
    from kvern_router.http1 import Request

    keys, request = ApiKeys(), Request(0.0, headers=[(b"authorization", b"Bearer sk-7")])
    keys.load("".join(f"tenant-{i % 1000}: sk-{i}\n" for i in range(20_000)))
    assert keys.tenant(request) == "tenant-7" and len(keys.tenants) == 1000
    assert min(repeat(lambda: keys.tenant(request), number=100, repeat=5)) / 100 < 0.0002


def test_keys_files() -> None:
    from kvern_router.auth import ApiKeys

    keys = ApiKeys()
    keys.load("\ufeffteam-a: sk-1\r\nteam-a:\tsk-2\r\n# a comment\r\nplain\r\nwith: a colon and spaces\r\n")
    names = set(keys._known.values())
    assert len(keys._known) == 4 and "team-a" in names and sum(n.startswith("key-") for n in names) == 2
    before = keys.secrets
    with pytest.raises(ValueError, match="line 2: this key stands in the file twice, under two names") as caught:
        keys.load("team-a: sk-1\nteam-b: sk-1\n")
    assert "sk-1" not in str(caught.value)
    assert keys.secrets == before, "a wrong file changes nothing"
    keys.load("sk-3\n")
    assert keys.secrets[1] == before[0] and len(keys.secrets) == 2
