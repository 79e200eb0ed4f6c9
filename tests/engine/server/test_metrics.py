"""Metrics: all there at the first scrape, right after requests, counted once over several API servers."""

import re

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_harness import Setup, saying, wait_until

from kvern_engine.ipc import EngineStats
from kvern_engine.tokenizer import Tokenizer

GAUGES = """num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc
cache_config_info lora_requests_info"""
COUNTERS = """prefix_cache_queries prefix_cache_hits num_preemptions prompt_tokens prompt_tokens_cached
generation_tokens request_success admission_rejections spec_decode_num_drafts spec_decode_num_draft_tokens
spec_decode_num_accepted_tokens spec_decode_num_accepted_tokens_per_pos"""
HISTOGRAMS = """request_prompt_tokens request_generation_tokens request_max_num_generation_tokens
request_params_max_tokens request_params_n iteration_tokens_total time_to_first_token_seconds
inter_token_latency_seconds request_time_per_output_token_seconds e2e_request_latency_seconds
request_queue_time_seconds request_inference_time_seconds request_prefill_time_seconds request_decode_time_seconds"""
OWN = """layout blocks step_seconds draining heartbeat_age_seconds kv_waste_ratio engine_up requests_in_flight
gpu_idle_fraction device_seconds asyncio_tasks"""
CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}]}


def scrape(url: str) -> dict[tuple, float]:
    """(sample name, sorted labels without model_name) -> value."""
    found = {}
    for family in text_string_to_metric_families(httpx.get(url + "/metrics").text):
        for s in family.samples:
            labels = tuple(sorted((k, v) for k, v in s.labels.items() if k != "model_name"))
            assert (s.name, labels) not in found, "a series twice"
            found[s.name, labels] = s.value
    return found


E0 = ("engine", "0")


def served(setup: Setup, tokenizer: Tokenizer, **config):
    core = setup.core(servers=config.get("api_server_count", 1), cached_tokens=3)
    core.reply = saying(tokenizer, "In the beginning God")
    return core


def test_first_scrape(setup: Setup, tokenizer: Tokenizer) -> None:
    served(setup, tokenizer)
    server = setup.server()
    server.wait_for(200)
    types = {f.name: f.type for f in text_string_to_metric_families(httpx.get(server.url + "/metrics").text)}
    assert all(types[f"vllm:{n}"] == "gauge" for n in GAUGES.split())
    assert all(types[f"vllm:{n}"] == "counter" for n in COUNTERS.split())
    assert all(types[f"vllm:{n}"] == "histogram" for n in HISTOGRAMS.split())
    assert all(f"kvern:{n}" in types for n in OWN.split())
    assert types["http_requests"] == "counter" and types["http_request_duration_seconds"] == "histogram"
    assert "vllm:gpu_cache_usage_perc" not in types and "vllm:time_per_output_token_seconds" not in types
    idle = scrape(server.url)
    for reason in ("stop", "length", "abort", "error"):
        assert idle["vllm:request_success_total", (E0, ("finished_reason", reason))] == 0
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert idle[f"vllm:{name}", (E0,)] == 0
    for name in HISTOGRAMS.split():
        assert idle[f"vllm:{name}_count", (E0,)] == 0 and idle[f"vllm:{name}_bucket", (E0, ("le", "+Inf"))] == 0
    assert idle["kvern:gpu_idle_fraction", (E0,)] == 0
    (info,) = [dict(labels) for name, labels in idle if name == "vllm:cache_config_info"]
    assert (info["block_size"], info["num_gpu_blocks"], info["engine"]) == ("16", "1024", "0")
    bounds = [dict(lb)["le"] for name, lb in idle if name == "vllm:request_prompt_tokens_bucket"]
    assert bounds[:4] == ["1.0", "2.0", "5.0", "10.0"] and bounds[-2:] == ["500.0", "+Inf"]


def test_after_requests(setup: Setup, tokenizer: Tokenizer) -> None:
    core = served(setup, tokenizer)
    server = setup.server()
    server.wait_for(200)
    for _ in range(2):
        assert httpx.post(server.url + CHAT, json=BODY).status_code == 200
    assert httpx.post(server.url + CHAT, json={**BODY, "n": 3, "max_tokens": 2}).status_code == 200
    assert httpx.post(server.url + CHAT, json={**BODY, "n": 0}).status_code == 400
    prompt = len(core.requests[0].prompt_token_ids)
    words = len(tokenizer.encode("In the beginning God", add_special_tokens=False)) + 1
    seen = scrape(server.url)
    assert seen["vllm:prompt_tokens_total", (E0,)] == 3 * prompt
    assert seen["vllm:prompt_tokens_cached_total", (E0,)] == 9
    assert seen["vllm:generation_tokens_total", (E0,)] == 2 * words + 6
    assert seen["vllm:request_success_total", (E0, ("finished_reason", "stop"))] == 2
    assert seen["vllm:request_success_total", (E0, ("finished_reason", "length"))] == 1
    for name in HISTOGRAMS.split():
        if name not in ("iteration_tokens_total", "inter_token_latency_seconds"):
            assert seen[f"vllm:{name}_count", (E0,)] == 3, name
    assert seen["vllm:inter_token_latency_seconds_count", (E0,)] == 2 * (words - 1) + 3
    assert seen["vllm:request_generation_tokens_sum", (E0,)] == 2 * words + 6
    assert seen["vllm:request_max_num_generation_tokens_sum", (E0,)] == 2 * words + 2
    assert seen["vllm:request_params_n_sum", (E0,)] == 5
    assert seen["vllm:request_params_max_tokens_sum", (E0,)] == 2 * (512 - prompt) + 2
    assert 0 < seen["vllm:time_to_first_token_seconds_sum", (E0,)] < seen["vllm:e2e_request_latency_seconds_sum", (E0,)]
    queue, inference = (seen[f"vllm:request_{n}_time_seconds_sum", (E0,)] for n in ("queue", "inference"))
    assert queue + inference == pytest.approx(seen["vllm:e2e_request_latency_seconds_sum", (E0,)], rel=1e-6)
    http = (("handler", CHAT), ("method", "POST"))
    assert seen["http_requests_total", (*http, ("status", "2xx"))] == 3
    assert seen["http_requests_total", (*http, ("status", "4xx"))] == 1
    assert seen["http_request_duration_seconds_count", http] == 4
    assert seen["kvern:requests_in_flight", ()] == 0


def test_what_engines_report(setup: Setup, tokenizer: Tokenizer) -> None:
    core = served(setup, tokenizer)
    core.stats = EngineStats(
        0,
        num_waiting=5,
        num_waiting_deferred=2,
        kv_cache_usage=0.25,
        blocks_free=700,
        blocks_cached=300,
        kv_waste=0.1,
        prefix_queries=100,
        prefix_hits=60,
        preemptions=4,
        steps=9,
        step_tokens=99,
        step_seconds={"schedule": 0.5, "wait": 2.0},
        device_seconds={"busy": 3.0, "idle": 0.5},
        device_idle_fraction=0.125,
    )
    server = setup.server()
    server.wait_for(200)
    wait_until(lambda: scrape(server.url)["vllm:num_requests_waiting", (E0,)] == 5)
    seen = scrape(server.url)
    assert seen["vllm:num_requests_waiting_by_reason", (E0, ("reason", "capacity"))] == 3
    assert seen["vllm:num_requests_waiting_by_reason", (E0, ("reason", "deferred"))] == 2
    assert seen["vllm:kv_cache_usage_perc", (E0,)] == 0.25 and seen["kvern:kv_waste_ratio", (E0,)] == 0.1
    assert seen["vllm:prefix_cache_queries_total", (E0,)] == 100
    assert seen["vllm:prefix_cache_hits_total", (E0,)] == 60
    assert seen["vllm:num_preemptions_total", (E0,)] == 4
    assert [seen["kvern:blocks", (E0, ("state", s))] for s in ("total", "free", "cached")] == [1024, 700, 300]
    assert seen["kvern:step_seconds_total", (E0, ("phase", "wait"))] == 2.0
    assert seen["kvern:step_seconds_total", (E0, ("phase", "emit"))] == 0.0
    assert seen["kvern:device_seconds_total", (E0, ("state", "idle"))] == 0.5
    assert seen["kvern:gpu_idle_fraction", (E0,)] == 0.125
    assert 0 <= seen["kvern:heartbeat_age_seconds", (E0,)] < 5


def test_counted_once_over_several_servers(setup: Setup, tokenizer: Tokenizer) -> None:
    served(setup, tokenizer, api_server_count=2)
    servers = [setup.server(index=i, api_server_count=2) for i in range(2)]
    for server in servers:
        server.wait_for(200)
        assert httpx.post(server.url + CHAT, json=BODY).status_code == 200
    for server in servers:
        seen = scrape(server.url)
        assert seen["vllm:request_success_total", (E0, ("finished_reason", "stop"))] == 2
        assert seen["vllm:time_to_first_token_seconds_count", (E0,)] == 2
        # The other server may not have read yet what the engine told both.
        wait_until(lambda url=server.url: scrape(url)["vllm:num_requests_running", (E0,)] == 0)
        assert len({labels for name, labels in seen if name == "kvern:engine_up"}) == 1


def test_server_that_comes_back_goes_on_counting(setup: Setup, tokenizer: Tokenizer) -> None:
    served(setup, tokenizer)
    server = setup.server()
    server.wait_for(200)
    httpx.post(server.url + CHAT, json=BODY)
    server.close()
    again = setup.server()
    assert scrape(again.url)["vllm:request_success_total", (E0, ("finished_reason", "stop"))] == 1


def test_name_filter(setup: Setup, tokenizer: Tokenizer) -> None:
    served(setup, tokenizer)
    server = setup.server()
    names = {"vllm:num_requests_running", "vllm:request_success_total"}
    text = httpx.get(server.url + "/metrics", params={"name[]": sorted(names)}).text
    assert {re.split(r"[ {]", line)[0] for line in text.splitlines() if line[0] != "#"} == names


def test_paths_that_clients_invent_are_no_labels(setup: Setup, tokenizer: Tokenizer) -> None:
    served(setup, tokenizer)
    server = setup.server()
    for path in ("/a", "/b/c", "/v1/models/secret"):
        httpx.request("BREW", server.url + path)
        httpx.get(server.url + path)
    httpx.get(server.url + "/health")
    handlers = {dict(labels)["handler"] for name, labels in scrape(server.url) if name == "http_requests_total"}
    assert handlers == {CHAT, "/v1/completions", "/v1/models/{model}", "none"}
