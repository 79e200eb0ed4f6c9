"""Clients that go away: whatever they had asked for, within a second nothing of it is left in the engine."""

import itertools
import socket
import threading
import time

import httpx
import openai
import pytest
from e2e_harness import AT_ONCE, Connection, Samples, Serve, ask_all, request_bytes, wait_for

LONG = {"prompt": [9] * 50, "max_tokens": 8000, "ignore_eos": True}


def aborts(samples: Samples) -> float:
    return samples.total("vllm:request_success_total", finished_reason="abort")


def running(server: Serve) -> float:
    return server.metrics().total("vllm:num_requests_running")


def test_leaving_frees_within_a_second(slow: Serve) -> None:
    """Streams and answers, chat and completions, closed politely and reset: eight kinds, four at a time."""
    before = slow.metrics()
    kinds = list(itertools.product(("prompt", "messages"), (True, False), (Connection.close, Connection.reset)))
    connections = []
    for field, stream, _ in kinds:
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 7000, "ignore_eos": True}
        path, body = ("/v1/completions", LONG) if field == "prompt" else ("/v1/chat/completions", chat)
        connections.append(Connection(slow, path, {**body, "stream": stream}))
        if stream:
            connections[-1].read_until(b"data:")
    wait_for(lambda: running(slow) == 8)
    for half in (0, 1):
        held = slow.metrics().total("vllm:kv_cache_usage_perc")
        for connection, (_, _, leave) in list(zip(connections, kinds, strict=True))[half::2]:
            leave(connection)
        wait_for(lambda: running(slow) == 4 * (1 - half), AT_ONCE)  # noqa: B023
        assert slow.metrics().total("vllm:kv_cache_usage_perc") < held
    slow.assert_at_rest()
    assert aborts(slow.metrics()) - aborts(before) == 8


def test_leaving_the_queue(slow: Serve) -> None:
    """Requests that wait for a place are forgotten as well, and those behind them move up."""
    before = slow.metrics()
    connections = [Connection(slow, "/v1/completions", {**LONG, "stream": True, "n": 4}) for _ in range(5)]
    wait_for(lambda: running(slow) == 8)
    wait_for(lambda: slow.metrics().total("kvern:requests_in_flight") == 5)
    for connection in connections[2:]:
        connection.close()
    wait_for(lambda: slow.metrics().total("kvern:requests_in_flight") == 2, AT_ONCE)
    last = Connection(slow, "/v1/completions", {"prompt": [5], "max_tokens": 2, "stream": True})
    connections[0].close()
    last.read_until(b"[DONE]")
    connections[1].close()
    last.close()
    slow.assert_at_rest()
    assert aborts(slow.metrics()) - aborts(before) == 5


def test_leaving_many_at_once(slow: Serve) -> None:
    connections = [Connection(slow, "/v1/completions", {**LONG, "stream": i % 2 == 0}) for i in range(40)]
    wait_for(lambda: running(slow) == 8)
    for connection in connections:
        connection.reset()
    slow.assert_at_rest()
    (answer,) = ask_all(slow, [{"prompt": [5], "max_tokens": 3, "ignore_eos": True}])
    assert answer.json["usage"]["completion_tokens"] == 3


def test_the_openai_client_leaves_a_stream(slow: Serve) -> None:
    with openai.OpenAI(base_url=f"{slow.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(
            model="tiny-kjv", prompt=[9] * 50, max_tokens=8000, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        assert slow.metrics().total("vllm:kv_cache_usage_perc") > 0
        stream.close()
        slow.assert_at_rest()
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.3).completions.create(model="tiny-kjv", prompt="x", max_tokens=4000)
        slow.assert_at_rest()


def test_half_a_request_is_nothing(slow: Serve) -> None:
    """Bodies that never end: nothing of them reaches an engine, and nothing is left of them once their clients go."""
    whole = request_bytes("/v1/completions", LONG)
    for cut in (5, 40, whole.index(b"\r\n\r\n") + 4, len(whole) - 3):
        with socket.create_connection(slow.address) as half:
            half.sendall(whole[:cut])
            time.sleep(0.05)
            assert running(slow) == 0
    slow.assert_at_rest()


def test_two_requests_in_one_packet(slow: Serve) -> None:
    """Pipelined requests are answered in order."""
    bodies = [{"prompt": [5], "max_tokens": k, "ignore_eos": True} for k in (2, 3)]
    with socket.create_connection(slow.address, timeout=20) as both:
        both.sendall(b"".join(request_bytes("/v1/completions", body) for body in bodies))
        received = b""
        while received.count(b'"completion_tokens"') < 2:
            received += both.recv(65536)
    first, second = received.split(b"HTTP/1.1 200")[1:]
    assert b'"completion_tokens":2' in first and b'"completion_tokens":3' in second


def test_a_client_that_leaves_while_its_prompt_is_read(slow: Serve) -> None:
    """The tokenizer works in a thread: who leaves meanwhile must not leave a request behind."""
    text = "In the beginning God created the heaven and the earth. " * 300
    for _ in range(5):
        connection = Connection(slow, "/v1/completions", {"prompt": text, "max_tokens": 4000, "ignore_eos": True})
        connection.close()
    slow.assert_at_rest(2.0)


def test_keep_alive_connections_are_reused(slow: Serve) -> None:
    with httpx.Client(base_url=slow.url) as client:
        for _ in range(3):
            client.post("/v1/completions", json={"prompt": [5], "max_tokens": 1}).raise_for_status()
        results: list[int] = []
        threads = [threading.Thread(target=lambda: results.append(client.get("/health").status_code)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [200] * 8
