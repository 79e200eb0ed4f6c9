"""The parts below the endpoints: choosing an engine, the mailbox, the single release, aligned logprobs."""

import asyncio
import tempfile
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_fake_core import FakeCore

from kvern_engine.core.plan import TokenLogprobs
from kvern_engine.ipc import AddRequest, CoreReady, EngineStats
from kvern_engine.request import SamplingParams
from kvern_engine.server.balance import Balancer, prefix_keys
from kvern_engine.server.engine_client import ClientGone, EngineClient, EngineDeadError, Mailbox
from kvern_engine.server.logprobs import Aligner
from kvern_engine.server.prompts import _MARK, _cut_at_mark
from kvern_engine.tokenizer import Tokenizer
from kvern_engine.transport import encode


def request(name: str = "r", **params) -> AddRequest:
    return AddRequest(name, 0, [5, 6, 7], SamplingParams(**{"max_tokens": 4, **params}), time.monotonic())


class TestBalancer:
    def test_prefix_keys(self) -> None:
        ids = list(range(100))
        assert len(prefix_keys(ids, 16)) == 3  # 1, 2 and 4 blocks
        assert prefix_keys(ids, 16)[:2] == prefix_keys(ids[:40] + [7] * 60, 16)[:2]
        assert prefix_keys(ids, 16)[2] != prefix_keys(ids[:40] + [7] * 60, 16)[2]
        assert prefix_keys(ids, 16) != prefix_keys(ids, 16, "salt") and prefix_keys(ids[:15], 16) == []

    def test_least_loaded_and_ties_go_round(self) -> None:
        balancer = Balancer(3)
        assert [balancer.choose([0, 1, 2], []) for _ in range(3)] == [0, 1, 2]
        balancer.add(0, 10)
        balancer.add(1, 5)
        balancer.add(2, 7)
        assert balancer.choose([0, 1, 2], []) == 1 and balancer.choose([0, 2], []) == 2

    def test_prefix_goes_where_it_was_until_that_is_too_busy(self) -> None:
        balancer = Balancer(2, factor=1.25, slack=100)
        assert balancer.choose([0, 1], [1, 2]) == 0
        balancer.add(0, 100)
        assert balancer.choose([0, 1], [1, 2]) == 0, "within the bound"
        assert balancer.choose([0, 1], [1, 3]) == 0, "its first block is known there"
        balancer.add(0, 1)
        assert balancer.choose([0, 1], [1, 2]) == 1
        balancer.forget(1)
        assert balancer.choose([0, 1], [1, 2]) == 1 and balancer.load == [101, 0], "by load now"

    @given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 10_000))))
    def test_never_far_above_the_least(self, arrivals: list[tuple[int, int, int]]) -> None:
        balancer = Balancer(4)
        for _, key, tokens in arrivals:
            least = min(balancer.load)
            engine = balancer.choose([0, 1, 2, 3], [key])
            assert balancer.load[engine] <= least * 1.25 + 8192
            balancer.add(engine, tokens)


async def test_mailbox() -> None:
    box = Mailbox()
    getting = asyncio.ensure_future(box.get())
    await asyncio.sleep(0)
    box.put("a", 1)  # type: ignore[arg-type]
    box.put("b", 2)  # type: ignore[arg-type]
    assert await getting == [("a", 1), ("b", 2)]
    box.put("c", 3)  # type: ignore[arg-type]
    box.close(ClientGone("gone"))
    with pytest.raises(ClientGone):
        await box.get()


class TestClient:
    @pytest.fixture
    def folder(self):
        with tempfile.TemporaryDirectory(prefix="kvern-") as made:
            yield made

    async def wait(self, condition) -> None:
        deadline = time.monotonic() + 5
        while not condition():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)

    async def test_generate(self, folder: str) -> None:
        core, client = FakeCore(folder), EngineClient(0, folder, 1)
        try:
            with pytest.raises(EngineDeadError, match="no engine is ready"):
                client.submit(request(), Mailbox())
            await self.wait(lambda: client.capacity == 512)
            outputs = [o async for o in client.generate(request(n=2))]
            assert len(outputs) == 8 and [o.finish_reason for o in outputs].count("length") == 2
            assert client.num_in_flight == 0 and not core.aborts, "what has ended is not aborted"
            stream = client.generate(request("left", max_tokens=400))
            await anext(stream)
            await stream.aclose()
            await self.wait(lambda: "left" in core.aborts)
            assert client.num_in_flight == 0
        finally:
            client.close()
            core.close()

    async def test_release_is_idempotent(self, folder: str) -> None:
        core, client = FakeCore(folder, step_seconds=0.02), EngineClient(0, folder, 1)
        try:
            await self.wait(lambda: client.capacity)
            handle = client.submit(request(), Mailbox())
            for _ in range(3):
                client.release(handle, "abort")
            client.abort("r")
            client.abort("unknown")
            await self.wait(lambda: core.aborts)
            assert client._balancer.load == [0] and len(core.aborts) == 1
        finally:
            client.close()
            core.close()

    async def test_pool_smaller_than_the_context(self, folder: str) -> None:
        client = EngineClient(0, folder, 1)
        try:
            core = FakeCore(folder, num_blocks=4)
            await self.wait(lambda: client.capacity)
            assert (client.capacity, client.max_model_len) == (64, 512)
            core.close()
        finally:
            client.close()

    async def test_bad_message_does_not_end_the_loop(self, folder: str) -> None:
        core, client = FakeCore(folder, ready_at_start=False), EngineClient(0, folder, 1)
        try:
            core.say({"what": "is this"})
            core.say(CoreReady(7, 1, 1, 1))  # an engine that does not exist
            core.become_ready()
            await self.wait(lambda: client.capacity == 512)
        finally:
            client.close()
            core.close()

    async def test_a_dead_engine_holds_nothing_and_keeps_its_counters(self, folder: str) -> None:
        client = EngineClient(0, folder, 2)
        try:
            cores = [FakeCore(folder, engine=e) for e in range(2)]
            busy = EngineStats(0, num_waiting=5, num_waiting_deferred=1, kv_cache_usage=0.5, kv_waste=0.1, steps=70)
            busy = msgspec.structs.replace(busy, blocks_total=8, blocks_free=4, blocks_cached=2)
            for core in cores:
                core.stats = busy
            await self.wait(lambda: all(view.stats.steps == 70 for view in client.views()))
            cores[0].die(last=False)
            await self.wait(lambda: client.views()[0].state == "dead")
            cores[0].stats = msgspec.structs.replace(busy, steps=71)  # said last, heard after the death
            await self.wait(lambda: client.views()[0].stats.steps == 71)
            dead = client.views()[0].stats
            assert (dead.num_waiting, dead.num_waiting_deferred) == (0, 0)
            assert (dead.kv_cache_usage, dead.kv_waste, dead.blocks_free, dead.blocks_cached) == (0, 0, 8, 0)
            cores[1].die()
            await self.wait(lambda: client.views()[1].state == "dead")
            assert client.views()[1].stats.num_waiting == 0
            for core in cores:
                core.close()
        finally:
            client.close()

    async def test_engine_without_a_heartbeat_is_stalled(self, folder: str) -> None:
        core, client = FakeCore(folder), EngineClient(0, folder, 1)
        try:
            await self.wait(lambda: client.capacity)
            assert client.views()[0].state == "ready"
            core.close()
            client._engines[0].heard -= 61
            client._engines[0].stats = type(client._engines[0].stats)(0, heartbeat=time.monotonic() - 61)
            assert client.views()[0].state == "stalled"
            with pytest.raises(EngineDeadError):
                client.submit(request(), Mailbox())
        finally:
            client.close()


def entry(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -1.0, 1, [], [])


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40), cut=st.lists(st.integers(1, 5)))
def test_logprobs_are_released_with_their_text(tokenizer: Tokenizer, text: str, cut: list[int]) -> None:
    """However text lags behind tokens, every entry comes exactly once, in order, and never before its text."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    aligner, out, sent = Aligner(tokenizer, True), [], 0
    aligner.add([entry(t) for t in ids])
    for size in cut:
        piece = text[sent : sent + size]
        sent += len(piece)
        out += aligner.sent(piece)
        assert len(b"".join(tokenizer.token_bytes(e.token_id) for e in out)) <= len(text[:sent].encode())
    out += aligner.rest(cut=False)
    assert [e.token_id for e in out] == ids


def test_continued_message_is_cut_at_its_end() -> None:
    assert _cut_at_mark(f"<u>hi</u><a>In the{_MARK}</a>\n", "In the") == "<u>hi</u><a>In the"
    assert _cut_at_mark(f"<a>In the {_MARK}</a>", "In the ") == "<a>In the "
    assert _cut_at_mark(f"<a>In the {_MARK.rstrip()}</a>", "In the ") == "<a>In the"  # by a template that trims


def test_message_is_small() -> None:
    """A step of 256 running requests is one message of a few kilobytes."""
    from kvern_engine.ipc import Outputs, TokenOutput

    assert len(encode(Outputs(0, [TokenOutput("a" * 32, 0, [77])] * 256))) < 16_000


def test_no_torch_in_the_server() -> None:
    import subprocess
    import sys

    code = "import kvern_engine.server.main, sys; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)
