"""kill -9, seen by every kind of client at once: streams, answers, the queue, probes, scrapes, new requests.

`tests/engine/processes/test_serve.py` has the engines of a pod dying one by one under streams; here is the rest.
"""

import os
import signal
import time
from typing import Any

import openai
import pytest
from e2e_harness import AT_ONCE, Answer, Connection, Serve, parse, wait_for

LONG = {"prompt": [9] * 40, "max_tokens": 8000, "ignore_eos": True}
SLOW = ("--sim-speed", "0.05")


def read(connection: Connection) -> tuple[Answer, float]:
    """The answer, and when its connection was closed."""
    return parse(connection.rest()), time.monotonic()


def test_kill_9_of_the_only_engine(serve: Any) -> None:
    """Two API servers; five places in the batch, so that others wait. Everybody hears of it within a second."""
    server, words = serve(*SLOW, "--max-num-seqs", "5", "--api-server-count", "2"), "engine core 0 was killed"
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    chunks = client.completions.create(model="tiny-kjv", prompt=[9] * 40, max_tokens=8000, stream=True)
    next(chunks)
    running = [Connection(server, "/v1/completions", {**LONG, "stream": True}) for _ in range(4)]
    for connection in running:
        connection.read_until(b"data:")
    waiting = [Connection(server, "/v1/completions", {**LONG, "stream": i % 2 == 0, "n": 2}) for i in range(4)]
    wait_for(lambda: server.metrics().total("kvern:requests_in_flight") == 9)
    server.children("core")[0].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    for connection in running:
        answer, at = read(connection)
        assert at - killed < AT_ONCE
        assert answer.done and answer.error is not None and answer.finish_reason() is None
        assert answer.error["code"] == "engine_dead" and words in answer.error["message"]
    for connection in waiting:
        answer, at = read(connection)
        assert at - killed < AT_ONCE
        assert answer.status == 503 and answer.json["error"]["code"] == "engine_dead"
        assert int(answer.headers["retry-after"]) >= 1
    with pytest.raises(openai.APIError, match=words):
        for _ in chunks:
            pass
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model="tiny-kjv", prompt="x")
    client.close()
    for path in ("/health", "/ready", "/ping"):
        assert server.get(path).status_code == 503, path
    for body in ({"prompt": "x"}, {"prompt": "x", "stream": True}):
        refused = server.post("/v1/completions", **body)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_dead"
    samples = server.metrics()
    assert not samples.busy()
    assert samples.total("vllm:request_success_total", finished_reason="error") == 9
    assert samples.total("kvern:engine_up") == 0
    # All of this while the process still answered, two seconds long.
    assert server.wait() == 1
    assert words in server.text()
    # Streams had begun with a 200: the access log must say how they ended.
    lines = [line for line in server.text().splitlines() if "msg=request" in line and "status=200" in line]
    assert sum("finish=error" in line for line in lines) == 5 and not any("finish=done" in line for line in lines)


def test_one_engine_of_two_and_then_the_other_at_idle(serve: Any) -> None:
    """What the other engine had goes on, new requests go to it, and the pod stays ready until that one is dead."""
    server: Serve = serve(*SLOW, "--data-parallel-size", "2", "--api-server-count", "2")
    body = {**LONG, "max_tokens": 1500}
    connections = [
        Connection(server, "/v1/completions", {**body, "prompt": [i] * 40, "stream": True}) for i in range(8)
    ]
    for connection in connections:
        connection.read_until(b"data:")
    wait_for(lambda: server.metrics().total("vllm:num_requests_running") == 8)
    lost = server.metrics().total("vllm:num_requests_running", engine="1")
    assert 0 < lost < 8
    server.children("worker-1")[0].send_signal(signal.SIGKILL)
    wait_for(lambda: server.metrics().total("kvern:engine_up") == 1, AT_ONCE)
    samples = server.metrics()
    assert samples.total("vllm:request_success_total", finished_reason="error", engine="1") == lost
    assert samples.total("vllm:num_requests_running", engine="1") == 0
    assert samples.total("vllm:num_requests_running", engine="0") == 8 - lost
    states = [engine["state"] for engine in server.get("/ready").json()["engines"]]
    assert states == ["ready", "dead"] and server.get("/ready").status_code == 200
    for _ in range(6):  # from both API servers
        assert server.complete([5], max_tokens=1).status_code == 200
    for connection in connections:
        connection.close()
    server.assert_at_rest()
    server.children("worker-0")[0].send_signal(signal.SIGKILL)
    wait_for(lambda: server.get("/health").status_code == 503, AT_ONCE)
    assert server.wait() == 1


def test_a_stopped_worker_is_no_dead_one(sim: Serve) -> None:
    """SIGSTOP (a debugger, a frozen cgroup): nothing is lost, everything goes on afterwards."""
    body = {**LONG, "max_tokens": 600, "stream": True, "stream_options": {"include_usage": True}}
    connections = [Connection(sim, "/v1/completions", body) for _ in range(4)]
    workers = sim.children("worker")
    for worker in workers:
        os.kill(worker.pid, signal.SIGSTOP)
    time.sleep(0.7)
    assert sim.get("/health").status_code == 200
    for worker in workers:
        os.kill(worker.pid, signal.SIGCONT)
    for connection in connections:
        assert parse(connection.rest()).usage["completion_tokens"] == 600
