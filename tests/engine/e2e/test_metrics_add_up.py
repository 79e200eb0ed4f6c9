"""/metrics against what clients saw: every event once, whichever API server counted it; gauges true at rest."""

import random
import time
from typing import Any

from e2e_harness import GAUGES, Answer, Connection, Samples, Serve, ask_all, wait_for

REASONS = ("stop", "length", "abort", "error")


def grown(before: Samples, after: Samples, names: dict[str, str]) -> dict[str, float]:
    return {short: after.grown(before, name) for short, name in names.items()}


COUNTERS = {
    "prompt": "vllm:prompt_tokens_total",
    "cached": "vllm:prompt_tokens_cached_total",
    "generated": "vllm:generation_tokens_total",
    "ttfts": "vllm:time_to_first_token_seconds_count",
    "prompt sums": "vllm:request_prompt_tokens_sum",
    "generated sums": "vllm:request_generation_tokens_sum",
    "gaps": "vllm:inter_token_latency_seconds_count",
    "e2e": "vllm:e2e_request_latency_seconds_count",
    "queue times": "vllm:request_queue_time_seconds_count",
    "n": "vllm:request_params_n_sum",
    "max_tokens": "vllm:request_params_max_tokens_sum",
    "hits": "vllm:prefix_cache_hits_total",
    "looked up": "vllm:prefix_cache_queries_total",
}


def usage_of(answer: Answer) -> dict[str, Any]:
    assert answer.status == 200, answer.body
    return answer.usage if answer.events else answer.json["usage"]


def test_counters_are_the_sum_of_what_clients_saw(sim: Serve) -> None:
    """Two API servers, two engines; scrapes reach either API server."""
    rng = random.Random(3)
    shared = [rng.randrange(5, 1000) for _ in range(64)]
    bodies: list[dict[str, Any]] = []
    for i in range(60):
        prompt = shared[: 16 * (i % 5)] + [rng.randrange(5, 1000) for _ in range(1 + i % 7)]
        body = {"prompt": prompt, "max_tokens": 1 + i % 9, "ignore_eos": True, "n": 1 + i % 3, "stream": i % 2 == 0}
        bodies.append(body | ({"stream_options": {"include_usage": True}} if body["stream"] else {}))
    bodies.append({"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 2, "ignore_eos": True, "n": 2})
    before = sim.metrics()
    usages = [usage_of(answer) for answer in ask_all(sim, bodies)]
    after = sim.metrics()
    choices = sum(b["n"] for b in bodies[:-1]) + 4
    requests, tokens = 62, sum(u["completion_tokens"] for u in usages)
    prompts = sum(u["prompt_tokens"] for u in usages)
    cached = sum(u["prompt_tokens_details"]["cached_tokens"] for u in usages)
    assert tokens == sum(b["max_tokens"] * b["n"] for b in bodies[:-1]) + 8 and cached > 0
    assert grown(before, after, COUNTERS) == {
        "prompt": prompts,
        "cached": cached,
        "generated": tokens,
        "ttfts": requests,
        "prompt sums": prompts,
        "generated sums": tokens,
        "gaps": tokens - choices,
        "e2e": requests,
        "queue times": requests,
        "n": sum(b["n"] for b in bodies) + 2,
        "max_tokens": sum(b["max_tokens"] for b in bodies) + 2,
        "hits": cached,
        "looked up": prompts,
    }
    ends = {r: after.grown(before, "vllm:request_success_total", finished_reason=r) for r in REASONS}
    assert ends == {"stop": 0, "length": requests, "abort": 0, "error": 0}
    handled = {"handler": "/v1/completions", "method": "POST", "status": "2xx"}
    assert after.grown(before, "http_requests_total", **handled) == len(bodies)
    steps = after.grown(before, "kvern:step_tokens_total")
    assert steps == after.grown(before, "vllm:iteration_tokens_total_sum"), "each API server heard of every step"
    assert after.grown(before, "vllm:iteration_tokens_total_count") == after.grown(before, "kvern:steps_total")
    # Each choice computes what of its prompt was not cached, and every token of its own but the last.
    assert steps >= prompts - cached + tokens - choices


def test_every_scrape_agrees_whichever_server_answers(sim: Serve) -> None:
    ask_all(sim, [{"prompt": [5, 6, 7, 8], "max_tokens": 3, "ignore_eos": True} for _ in range(10)])
    time.sleep(0.1)
    names = [*COUNTERS.values(), *GAUGES, "vllm:iteration_tokens_total_sum", "kvern:steps_total"]
    scrapes = [{name: samples.total(name) for name in names} for samples in (sim.metrics() for _ in range(8))]
    assert all(scrape == scrapes[0] for scrape in scrapes)


def test_gauges_are_at_rest_as_soon_as_the_last_answer_is_read(tiny: Serve) -> None:
    for i in range(8):
        body = {"prompt": "And God said", "max_tokens": 1 + i % 4, "ignore_eos": True, "n": 1 + i % 2}
        ask_all(tiny, [body, {**body, "stream": True}][: 1 + i % 2])
        assert not tiny.metrics().busy()


def test_gauges_while_requests_run_and_wait(slow: Serve) -> None:
    before = slow.metrics()
    body = {"prompt": [9] * 63, "max_tokens": 1000, "ignore_eos": True, "stream": True, "n": 4}
    connections = [Connection(slow, "/v1/completions", body) for _ in range(3)]
    wait_for(lambda: slow.metrics().total("vllm:num_requests_running") == 8)
    wait_for(lambda: slow.metrics().total("kvern:requests_in_flight") == 3)
    samples = slow.metrics()
    reasons = [samples.total("vllm:num_requests_waiting_by_reason", reason=r) for r in ("capacity", "deferred")]
    assert samples.total("vllm:num_requests_waiting") == sum(reasons) == 4 and min(reasons) >= 0
    # The prefix of three blocks is shared by all; each of the eight has its own blocks behind it.
    assert 11 / 600 <= samples.total("vllm:kv_cache_usage_perc") <= 40 / 600
    assert samples.total("kvern:engine_up") == 1 and samples.total("kvern:heartbeat_age_seconds") < 2
    for connection in connections:
        connection.close()
    slow.assert_at_rest()
    after = slow.metrics()
    ends = {r: after.grown(before, "vllm:request_success_total", finished_reason=r) for r in REASONS}
    assert ends == {"stop": 0, "length": 0, "abort": 3, "error": 0}


def test_ends_by_reason(tiny: Serve) -> None:
    before = tiny.metrics()
    text = ask_all(tiny, [{"prompt": "And God said", "temperature": 0, "max_tokens": 20}])[0].json["choices"][0]["text"]
    stop = {"prompt": "And God said", "temperature": 0, "max_tokens": 20, "stop": text[8:11]}
    (stopped,) = ask_all(tiny, [stop])
    assert stopped.json["choices"][0]["finish_reason"] == "stop"
    after = tiny.metrics()
    ends = {r: after.grown(before, "vllm:request_success_total", finished_reason=r) for r in REASONS}
    assert ends == {"stop": 1, "length": 1, "abort": 0, "error": 0}
    for bad in ({"prompt": ""}, {"prompt": "x", "n": 0}, {"prompt": "x", "max_tokens": 999}):
        assert ask_all(tiny, [bad])[0].status == 400
    refused = tiny.metrics()
    assert refused.grown(after, "vllm:request_success_total") == 0
    assert refused.grown(after, "http_requests_total", status="4xx", handler="/v1/completions") == 3
