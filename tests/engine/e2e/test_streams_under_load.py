"""Many requests at once: no token is lost or doubled, and what runs beside a request does not change its answer."""

import asyncio
import os
import random
import time
from typing import Any

import pytest
from e2e_harness import Answer, Serve, ask, ask_all

STREAMS, TOKENS = 200, 160
GREEDY = {"temperature": 0, "ignore_eos": True}


def check_stream(answer: Answer, tokens: int, text: str) -> None:
    assert answer.status == 200 and answer.done and answer.error is None, answer
    assert answer.finish_reason() == "length"
    assert answer.usage["completion_tokens"] == tokens
    assert answer.text() == text


def streamed(i: int) -> dict[str, Any]:
    """The body of client `i`. Tokens of the simulated device depend on seed and position alone, so that 20 streams
    read one after the other say what each must hold; prompts differ, lengths too."""
    prompt = random.Random(i).choices(range(5, 1000), k=40)
    body = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    return {**body, "prompt": prompt, "seed": i % 20, "max_tokens": TOKENS - 3 * (i % 20)}


def one_after_the_other(sim: Serve) -> list[Answer]:
    alone = [ask_all(sim, [streamed(i)])[0] for i in range(20)]
    for i, answer in enumerate(alone):
        check_stream(answer, TOKENS - 3 * i, answer.text())
    assert len({answer.text()[:20] for answer in alone}) == 20
    return alone


def test_200_streams_lose_no_token(sim: Serve) -> None:
    """Two API servers, two engines."""
    before = sim.metrics()
    alone = one_after_the_other(sim)
    answers = ask_all(sim, [streamed(i) for i in range(STREAMS)])
    for i, answer in enumerate(answers):
        check_stream(answer, TOKENS - 3 * (i % 20), alone[i % 20].text())
    after = sim.metrics()
    generated = sum(answer.usage["completion_tokens"] for answer in (*alone, *answers))
    assert after.grown(before, "vllm:generation_tokens_total") == generated
    assert after.grown(before, "vllm:request_success_total", finished_reason="length") == STREAMS + 20


@pytest.mark.skipif(not os.environ.get("KVERN_TEST_FULL"), reason="a minute: KVERN_TEST_FULL=1")
def test_200_clients_for_a_minute_lose_no_token(sim: Serve) -> None:
    """200 streams open at any time for a minute, each client asking again as soon as it has its answer."""
    alone = one_after_the_other(sim)
    before, end = sim.metrics(), time.monotonic() + 60

    async def client(i: int) -> int:
        tokens = 0
        while time.monotonic() < end:
            answer = await ask(sim, "/v1/completions", streamed(i))
            check_stream(answer, TOKENS - 3 * (i % 20), alone[i % 20].text())
            tokens += answer.usage["completion_tokens"]
        return tokens

    async def clients() -> list[int]:
        return await asyncio.gather(*(client(i) for i in range(STREAMS)))

    tokens = sum(asyncio.run(clients()))
    assert sim.metrics().grown(before, "vllm:generation_tokens_total") == tokens
    print(f"{tokens} tokens of {STREAMS} clients in a minute, none lost")


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    verse = "And God said unto Moses the LORD thy of Israel shall come to pass in land king house man day"
    words = verse.split()
    rng = random.Random(7)
    shared = " ".join(rng.choice(words) for _ in range(30))
    heads = [shared, shared[:60], ""]
    return [f"{heads[i % 3]} {' '.join(rng.choice(words) for _ in range(5 + 3 * i))}" for i in range(9)]


def test_preemption_shared_prefixes_and_forks_change_no_answer(tiny: Serve, prompts: list[str]) -> None:
    """A pool of 40 blocks for requests that want more than 100 at once; greedy answers are those of an idle server."""
    bodies = [
        {**GREEDY, "prompt": prompt, "max_tokens": 64, "n": 1 + i % 3, "logprobs": 0}
        for i, prompt in enumerate(prompts)
    ]
    before = tiny.metrics()
    together = [answer.json for answer in ask_all(tiny, bodies)]
    crowded = tiny.metrics()
    assert crowded.grown(before, "vllm:num_preemptions_total") > 0, "the pool was large enough: nothing is tested"
    assert crowded.grown(before, "vllm:prefix_cache_hits_total") > 0
    for body, crowd in zip(bodies, together, strict=True):
        (alone,) = ask_all(tiny, [{**body, "n": 1}])
        (expected,) = alone.json["choices"]
        assert len(crowd["choices"]) == body["n"]
        for choice in crowd["choices"]:
            assert choice["text"] == expected["text"], body["prompt"]
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(
                expected["logprobs"]["token_logprobs"], abs=1e-3
            )


def test_seeded_samples_survive_preemption(tiny: Serve, prompts: list[str]) -> None:
    # min_p: in the tail of a distribution rounding (which differs with what runs beside) can decide between two tokens.
    sampled = {"max_tokens": 64, "ignore_eos": True, "temperature": 0.7, "frequency_penalty": 0.5, "min_p": 0.05}
    bodies = [{**sampled, "prompt": prompt, "seed": i} for i, prompt in enumerate(prompts)]
    alone = [ask_all(tiny, [body])[0].text() for body in bodies]
    before = tiny.metrics()
    for _ in range(5):  # after preemptions the scheduler keeps more room free for a while
        assert [answer.text() for answer in ask_all(tiny, bodies)] == alone
        if tiny.metrics().grown(before, "vllm:num_preemptions_total"):
            return
    pytest.fail("nobody was preempted: nothing is tested")
