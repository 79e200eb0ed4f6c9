"""`kvern serve` as people run it: it answers, it says what is wrong, it ends cleanly, it dies loudly.

Real processes on the simulated device with the real tokenizer of tiny-kjv; each test starts as few as it can.
"""

import os
import signal
import time

import httpx
import psutil
import pytest

IDS = list(range(100, 164))
LONG = 1500  # tokens: at a tenth of an H200's speed, more than a minute
AT_ONCE = 15.0  # seconds, on a machine with much else to do; what is not noticed at once takes longer than this


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"still false after {seconds} s"
        time.sleep(0.01)
    return value


def test_it_answers_and_drains_a_running_stream_on_sigterm(serve):
    server = serve("--sim-speed", "0.5")
    assert server.get("/health").status_code == 200
    assert server.get("/v1/models").json()["data"][0]["id"] == "tiny"
    answer = server.complete("In the beginning", max_tokens=8, ignore_eos=True)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 8
    assert {p.cmdline()[-1] for p in server.children()} == {"worker-0", "core-0", "server-0"}

    stream = server.stream(IDS, max_tokens=200, stream_options={"include_usage": True})
    wait_for(lambda: stream.started)
    server.signal(signal.SIGTERM)
    wait_for(lambda: _refuses(server))
    stream.join()
    assert stream.complete and stream.finish_reason == "length", stream.events[-1]
    assert stream.events[-1]["usage"]["completion_tokens"] == 200
    assert server.wait() == 0
    assert "msg=draining" in server.text() and "msg=stopped" in server.text()


def _refuses(server) -> bool:
    try:
        return server.complete(IDS, max_tokens=1).status_code == 503
    except httpx.TransportError:
        return True


def test_two_engines_one_dies_then_the_other(serve):
    """kill -9 of a core, then of the other engine's worker: their clients see it at once, nobody else does."""
    server = serve("--data-parallel-size", "2", "--sim-speed", "0.1")
    assert len(server.children("core")) == len(server.children("worker")) == 2
    streams = [server.stream([100 + i, *IDS], max_tokens=LONG) for i in range(4)]
    wait_for(lambda: all(s.started for s in streams))

    server.children("core-0")[0].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    wait_for(lambda: any(s.error for s in streams))
    time.sleep(0.5)  # the threads that read the other streams of that engine get their turn
    lost = [s for s in streams if s.error]
    kept = [s for s in streams if s not in lost]
    assert lost and kept
    assert max(s.times[-1] for s in lost) - killed < AT_ONCE
    assert "engine core 0 was killed by SIGKILL" in lost[0].error["message"]
    assert server.get("/health").status_code == 200
    assert server.complete(IDS, max_tokens=4, ignore_eos=True).status_code == 200
    assert not any(s.error for s in kept)

    server.children("worker-1")[0].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    wait_for(lambda: server.get("/health").status_code == 503)
    assert time.monotonic() - killed < AT_ONCE
    for stream in kept:
        assert stream.join().error, stream.events[-1]
        assert stream.times[-1] - killed < AT_ONCE
    assert server.wait() == 1
    assert "worker 1 was killed by SIGKILL (kill -9, or out of memory)" in server.text()
    assert not server.tracebacks()


def test_ctrl_c_waits_for_requests_and_a_second_one_does_not(serve):
    server = serve("--sim-speed", "0.1", "--distributed-executor-backend", "uni")
    assert {p.cmdline()[-1] for p in server.children()} == {"core-0", "server-0"}
    stream = server.stream(IDS, max_tokens=LONG)
    wait_for(lambda: stream.started)
    os.killpg(server.process.pid, signal.SIGINT)  # a terminal sends it to the whole foreground group
    wait_for(lambda: "msg=draining" in server.text())
    seen = len(stream.events)
    wait_for(lambda: len(stream.events) > seen + 3)
    os.killpg(server.process.pid, signal.SIGINT)
    began = time.monotonic()
    assert server.wait() == 130
    assert time.monotonic() - began < AT_ONCE
    assert not stream.join().complete


def test_children_die_with_a_killed_supervisor_and_the_next_start_cleans_up(serve, tmp_path):
    server = serve()
    family = server.children()
    assert len(family) == 3
    server.signal(signal.SIGKILL)
    server.wait()
    wait_for(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family), AT_ONCE)
    assert list(tmp_path.glob("kvern-*")), "a killed supervisor cannot remove its folder"

    port = server.url.rsplit(":", 1)[1]
    second = serve("--port", port)  # the port is free at once
    assert len(list(tmp_path.glob("kvern-*"))) == 1
    third = serve("--port", port, ready=False)
    assert third.wait() == 1
    assert f"port {port} on 127.0.0.1 is already in use" in third.text()
    assert f"pid {second.process.pid}" in third.text()
    assert "Traceback" not in third.text()

    second.children("server-0")[0].send_signal(signal.SIGKILL)
    assert second.wait() == 1
    assert "API server 0 was killed by SIGKILL" in second.text()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["-tp", "3"], "tensor_parallel_size=3 does not divide the model's 32 attention heads; sizes that work"),
        (["--model", "/no/such/model", "--served-model-name", "x"], "two models are given"),
        (["--swap-space", "4"], "--swap-space was removed"),
        (["--admin-port", "0", "--admin-token-file", "/no/such/file"], "there is no such file"),
        (["--host", "192.0.2.1"], "this machine has no such address"),
    ],
)
def test_what_cannot_start_says_so_in_one_line(serve, flags, words):
    server = serve(*flags, ready=False)
    assert server.wait() in (1, 2)
    (line,) = server.log
    assert line.startswith("kvern serve: error: ") and words in line


def test_a_pool_too_small_is_told_in_the_workers_words(serve):
    server = serve("--kv-cache-memory-bytes", "4194304", "--max-model-len", "512", ready=False)
    assert server.wait(60) == 1
    assert "To serve at least one request with the model's max seq len" in server.text()
    assert not server.tracebacks()
    assert "32" in server.text().splitlines()[-1], (
        "the longest feasible length: two blocks of 16, 131,072 bytes a token"
    )
