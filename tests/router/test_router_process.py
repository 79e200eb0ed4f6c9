"""The router's own endpoints, keys and log, and the real process: command line, drain, exit codes."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvern_router.accesslog import AccessLog
from kvern_router.main import main

SERIES = (
    'kvern_router_requests_total{status="200"}',
    'kvern_router_requests_total{status="503"}',
    "kvern_router_held_requests",
    "kvern_router_held_input_tokens",
    "kvern_router_retries_total",
    'kvern_router_replica_inflight{replica="r0"}',
    "kvern_router_added_seconds_count",
)


async def test_metrics_are_there_from_the_first_scrape_and_true(bench: Any) -> None:
    await bench.start(1)
    first = (await bench.ask("GET", "/metrics", None)).body.decode()
    for name in SERIES:
        assert f"\n{name} 0.0\n" in first
    for _ in range(3):
        await bench.ask()
    await bench.ask("GET", "/health", None)
    assert bench.metric('kvern_router_requests_total{status="200"}') == 3
    assert bench.metric("kvern_router_added_seconds_count") == 3
    assert bench.metric("kvern_router_added_seconds_sum") < 1.0
    only = (await bench.ask("GET", "/metrics?name[]=kvern_router_held_requests", None)).body.decode()
    assert "kvern_router_held_requests 0.0" in only and "retries" not in only


async def test_the_router_answers_for_itself(bench: Any) -> None:
    await bench.start(1)
    assert (await bench.ask("GET", "/ready", None)).json() == {"status": "ready"}
    assert (await bench.ask("GET", "/health", None)).json() == {"status": "ok"}
    shown = (await bench.ask("GET", "/-/replicas", None)).json()
    assert shown["model"] == "tiny" and shown["replicas"][0]["name"] == "r0"
    assert (await bench.ask("POST", "/health", b"")).status == 405
    assert (await bench.ask("HEAD", "/health", None)).status == 200
    for path in ("/admin/drain", "/-/nothing"):
        answer = await bench.ask("GET", path, None)
        assert (answer.status, answer.json()["error"]["code"]) == (404, "not_found")
    assert not bench.replicas[0].seen


async def test_a_port_of_its_own_for_metrics(bench: Any) -> None:
    await bench.start(1, metrics_listen=("127.0.0.1", 0))
    assert (await bench.ask("GET", "/metrics", None)).status == 404
    assert (await bench.ask("GET", "/-/replicas", None)).status == 404
    host, port = bench.router.metrics_address.rsplit(":", 1)
    for path, status in (("/metrics", 200), ("/ready", 200), ("/-/replicas", 200), ("/v1/models", 404)):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"GET {path} HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n".encode())
        assert (await reader.read()).startswith(b"HTTP/1.1 %d" % status)
        writer.close()


async def test_api_keys_are_asked_for_and_rotated(bench: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("old\n")
    await bench.start(1, api_keys_file=keys)
    answer = await bench.ask()
    assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert (await bench.ask(headers={"authorization": "Bearer old"})).status == 200
    assert bench.replicas[0].seen[0].header("authorization") == ["Bearer old"], "passed on"
    keys.write_text("")
    await asyncio.sleep(0.25)
    assert (await bench.ask(headers={"authorization": "Bearer old"})).status == 200, "an empty file locks nobody out"
    keys.write_text("new\n")
    await asyncio.sleep(0.25)
    assert (await bench.ask(headers={"authorization": "Bearer old"})).status == 401
    assert (await bench.ask(headers={"authorization": "Bearer new"})).status == 200
    for path in ("/health", "/ready", "/metrics"):
        assert (await bench.ask("GET", path, None)).status == 200


def test_the_access_log_counts_lines_that_do_not_fit() -> None:
    unstick = threading.Event()

    class Stuck(io.StringIO):
        def write(self, text: str) -> int:
            assert unstick.wait(60)
            return super().write(text)

    out = Stuck()
    log = AccessLog(out, capacity=5)
    for i in range(20):
        log.write({"i": i})
    unstick.set()
    while out.getvalue().count("\n") < 5:
        time.sleep(0.01)
    log.write({"i": "after"})
    log.close()
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert lines[-1]["i"] == "after"
    assert lines[-1]["lines_dropped_before"] == 20 - (len(lines) - 1)


# the process


class Process:
    """`kvern-router` as it is run."""

    def __init__(self, file: Path, *flags: str) -> None:
        command = [sys.executable, "-m", "kvern_router.main", "--listen", "127.0.0.1:0", "--replicas-file", str(file)]
        self.popen = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            if "listening on http://" in line:
                self.address = line.split("http://")[1].split(",")[0]
                return
        raise AssertionError("it did not start")

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.communicate()

    async def end(self) -> tuple[int, str, str]:
        out, err = await asyncio.to_thread(self.popen.communicate, timeout=60)
        return self.popen.returncode, out, err


async def open_stream(bench: Any, process: Process) -> Any:
    host, port = process.address.rsplit(":", 1)
    client = type(await bench.client())(*await asyncio.open_connection(host, int(port)))
    client.send(
        "POST", "/v1/completions?secret=query", b'{"prompt": "secret prompt"}', headers={"x-request-id": "mine"}
    )
    await client.head()
    client.begun = await client.chunk()
    return client


async def test_sigterm_finishes_what_runs_and_exits_with_0(bench: Any, fake: Any) -> None:
    await bench.replica("a", fake.sse(count=60, gap=0.02))
    await bench.start()
    with Process(bench.file) as process:
        client = await open_stream(bench, process)
        host, port = process.address.rsplit(":", 1)
        _, idle = await asyncio.open_connection(host, int(port))
        process.popen.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.4)
        with pytest.raises(ConnectionError):
            await asyncio.open_connection(host, int(port))
        said = client.begun
        while chunk := await client.chunk():
            said += chunk
        assert said.count(b"data:") == 60
        assert await client.closed()
        code, out, err = await process.end()
        idle.close()
    assert code == 0
    assert "drained" in err
    line = json.loads(out)
    assert (line["id"], line["method"], line["path"], line["status"]) == ("mine", "POST", "/v1/completions", 200)
    assert (line["replica"], line["retries"], line["client"]) == ("a", 0, "127.0.0.1")
    assert line["seconds"] > 1.0 > line["first_byte"] >= 0  # the loop's clock counts milliseconds
    assert "secret" not in out + err


async def test_a_request_that_is_still_arriving_is_part_of_a_drain(bench: Any) -> None:
    await bench.start(1)
    client = await bench.client()
    client.writer.write(b"POST /v1/x HTTP/1.1\r\nhost: h\r\ncontent-length: 4\r\n\r\nha")
    await bench.until(lambda: bench.router.buffered_bytes == 2)
    draining = asyncio.ensure_future(bench.router.drain())
    await asyncio.sleep(0.3)
    assert not draining.done()
    client.writer.write(b"lf")
    answer = await client.receive()
    assert (answer.status, answer.headers["connection"]) == (200, "close")
    assert await draining is True


async def test_the_openai_client_understands_what_the_router_says(bench: Any, fake: Any) -> None:
    openai = pytest.importorskip("openai")
    chunk = {"id": "c", "object": "text_completion", "created": 1, "model": "m"}
    event = b"data: " + json.dumps({**chunk, "choices": [{"index": 0, "text": "a", "finish_reason": None}]}).encode()
    replica = await bench.replica("a", fake.sse(events=[event + b"\n\n"] * 3, die=True))
    await bench.start(hold_timeout=0.3)
    async with openai.AsyncOpenAI(base_url=f"http://{bench.router.address}/v1", api_key="k", max_retries=0) as client:
        got = ""
        with pytest.raises(openai.APIError, match="was lost while it was answering") as cut:
            async for part in await client.completions.create(model="m", prompt="x", stream=True):
                got += part.choices[0].text
        assert (got, cut.value.code) == ("aaa", "replica_lost")
        replica.kill()
        with pytest.raises(openai.InternalServerError, match="No replica of tiny is ready") as held:
            await client.completions.create(model="m", prompt="x")
        assert (held.value.status_code, held.value.code) == (503, "hold_timeout")


async def test_requests_during_the_shutdown_delay_are_served_and_told_to_close(bench: Any) -> None:
    await bench.start(1)
    with Process(bench.file, "--shutdown-delay-seconds", "1.0", "--no-access-log") as process:
        process.popen.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.2)
        host, port = process.address.rsplit(":", 1)
        for path, status in (("/v1/models", 200), ("/ready", 503), ("/health", 200)):
            client = type(await bench.client())(*await asyncio.open_connection(host, int(port)))
            client.send("GET", path)
            answer = await client.receive()
            assert (answer.status, answer.headers["connection"]) == (status, "close")
        assert (await process.end())[0] == 0


async def test_the_drain_timeout_ends_streams_with_an_error_event(bench: Any, fake: Any) -> None:
    replica = await bench.replica("a", fake.sse(count=10_000, gap=0.02))
    await bench.start()
    with Process(bench.file, "--drain-timeout-seconds", "0.5") as process:
        client = await open_stream(bench, process)
        process.popen.send_signal(signal.SIGTERM)
        last = b""
        while chunk := await client.chunk():
            last = chunk
        error = json.loads(last.split(b"data: ")[1])["error"]
        assert (error["code"], error["message"].endswith("waited 0.5 s (drain-timeout)")) == ("draining", True)
        code, _, err = await process.end()
    assert code == 0 and "drain timeout: 1 requests are ended" in err
    await bench.until(lambda: replica.disconnects == 1)


async def test_told_twice_it_ends_at_once(bench: Any, fake: Any) -> None:
    await bench.replica("a", fake.sse(count=10_000, gap=0.02))
    await bench.start()
    with Process(bench.file) as process:
        client = await open_stream(bench, process)
        process.popen.send_signal(signal.SIGINT)
        await asyncio.sleep(0.3)
        process.popen.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            code, _, err = await process.end()
        client.close()
    assert code == 1 and "told twice" in err


def test_what_keeps_it_from_starting_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# nothing\n")
    common = ["--listen", "127.0.0.1:0", "--replicas-file", str(tmp_path / "none.json"), "--no-access-log"]
    assert main([*common, "--api-keys-file", str(keys)]) == 1
    assert "cannot start: the API keys file holds no key; expected one a line" in caplog.text
    keys.unlink()
    assert main([*common, "--api-keys-file", str(keys)]) == 1
    why = f"the API keys file {keys} cannot be read (No such file or directory)"
    assert f"cannot start: {why}; in a cluster it is the entry 'keys' of a Secret" in caplog.text
