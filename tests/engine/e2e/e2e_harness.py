"""Real `kvern serve` processes as people start them, read with as little between as possible: raw sockets, /metrics."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

TINY = Path(__file__).parents[1] / "models_data/tiny-kjv"
# tiny-kjv is no chat model: its conversations are its verses.
TEMPLATE = Path(__file__).with_name("verses.jinja")
KVERN = Path(sys.executable).with_name("kvern")
# Seconds, on a machine with much else to do; whatever is not noticed at once takes far longer.
AT_ONCE = 15.0
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


def wait_for(condition: Callable[[], Any], seconds: float = 60.0, pause: float = 0.01) -> Any:
    """The condition's first true value; fails the test after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(pause)
    pytest.fail(f"still false after {seconds} s: {condition}")


class Serve:
    """One `kvern serve` process; `url` waits until it is ready."""

    def __init__(self, model: str, *flags: str, tmp: Path, env: dict[str, str] | None = None) -> None:
        template = ("--chat-template", str(TEMPLATE)) if model == str(TINY) else ()
        command = [str(KVERN), "serve", model, "--port", "0", *template, *flags]
        environ = {**os.environ, "TMPDIR": str(tmp), "OMP_NUM_THREADS": "1", **(env or {})}
        self.log: list[str] = []
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ, process_group=0)
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        self._url = ""
        # A connection a request, so that each may reach another API server; no certificates are read for each of them.
        no_reuse = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.Client(verify=False, timeout=60, limits=no_reuse, trust_env=False)
        self.key: str | None = None  # sent with every request

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)

    def text(self) -> str:
        return "".join(self.log)

    def _find_url(self) -> str:
        found = re.search(r"msg=ready url=(\S+)", self.text())
        return found.group(1) if found else ""

    @property
    def url(self) -> str:
        if not self._url:
            wait_for(lambda: self._find_url() or self.process.poll() is not None, 120)
            self._url = self._find_url()
            assert self._url, self.text()
        return self._url

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    @property
    def model(self) -> str:
        return str(self.get("/v1/models").json()["data"][0]["id"])

    def children(self, kind: str) -> list[psutil.Process]:
        """Its worker, core or server processes, in order."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        chosen = [p for p in found if p.cmdline() and p.cmdline()[-1].startswith(kind)]
        return sorted(chosen, key=lambda p: p.cmdline()[-1])

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self._http.get(self.url + path, headers=self._headers, **options)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self._http.post(self.url + path, json=body, headers=self._headers)

    def complete(self, prompt: Any, **body: Any) -> httpx.Response:
        return self.post("/v1/completions", prompt=prompt, **body)

    def metrics(self) -> "Samples":
        return Samples(self.get("/metrics").text)

    def assert_at_rest(self, seconds: float = AT_ONCE) -> None:
        """Within `seconds` nothing runs or waits any more, and every block is free."""
        deadline = time.monotonic() + seconds
        while busy := self.metrics().busy():
            assert time.monotonic() < deadline, busy
            time.sleep(0.02)

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def wait(self, seconds: float = 20.0) -> int:
        status = self.process.wait(seconds)
        self._reader.join(5)
        return status

    def stop(self) -> None:
        """At once; for the end of a test."""
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1)
            self.signal(signal.SIGTERM)  # a second one waits for nobody
            self.process.wait(15)
        self._reader.join(5)


class Samples:
    """A parsed scrape: `samples[name]` maps a sorted tuple of labels to a value."""

    def __init__(self, text: str) -> None:
        self.samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = defaultdict(dict)
        for line in text.splitlines():
            if match := re.fullmatch(r"([\w:]+)(?:\{(.*)\})? (\S+)", line):
                labels = tuple(sorted(re.findall(r'(\w+)="([^"]*)"', match[2] or "")))
                self.samples[match[1]][labels] = float(match[3])

    def total(self, name: str, **labels: str) -> float:
        """The sum over all series of `name` with these labels."""
        assert name in self.samples, name
        wanted = set(labels.items())
        return sum(value for key, value in self.samples[name].items() if wanted <= set(key))

    def busy(self) -> dict[str, float]:
        """What is not at rest."""
        seen = {name: self.total(name) for name in (*GAUGES, "kvern:requests_in_flight")}
        seen["blocks held"] = self.total("kvern:blocks", state="total") - self.total("kvern:blocks", state="free")
        return {name: value for name, value in seen.items() if value}

    def grown(self, before: "Samples", name: str, **labels: str) -> float:
        return self.total(name, **labels) - before.total(name, **labels)


@dataclass
class Answer:
    """What came over a raw connection: the events of a stream, or one body, as JSON."""

    status: int
    headers: dict[str, str]
    body: bytes
    events: list[Any] = field(default_factory=list)
    done: bool = False  # the stream ended with [DONE]

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def text(self, index: int = 0) -> str:
        return "".join(c["text"] for c in self._choices(index))

    def finish_reason(self, index: int = 0) -> str | None:
        (reason,) = [c["finish_reason"] for c in self._choices(index) if c["finish_reason"]] or [None]
        return reason

    def _choices(self, index: int) -> list[dict[str, Any]]:
        return [c for e in self.events or [self.json] for c in e.get("choices", ()) if c["index"] == index]

    @property
    def usage(self) -> dict[str, Any]:
        (found,) = [e["usage"] for e in self.events if e.get("usage")]
        return found

    @property
    def error(self) -> dict[str, Any] | None:
        return next((e["error"] for e in self.events if "error" in e), None)


def request_bytes(path: str, body: Any, *headers: str) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = (f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(content)}", "Content-Type: application/json")
    return "\r\n".join((*lines, *headers, "", "")).encode() + content


def parse(raw: bytes) -> Answer:
    """One answer on a connection that was closed after it."""
    head, _, body = raw.partition(b"\r\n\r\n")
    status_line, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = _dechunk(body)
    answer = Answer(int(status_line.split()[1]), headers, body)
    if headers.get("content-type", "").startswith("text/event-stream"):
        blocks = body.decode("utf-8").split("\n\n")
        assert blocks[-1] == "", "the stream ends within an event"
        data = [block.removeprefix("data: ") for block in blocks[:-1]]
        answer.done = bool(data) and data[-1] == "[DONE]"
        answer.events = [json.loads(item) for item in data if item != "[DONE]"]
    return answer


def _dechunk(body: bytes) -> bytes:
    parts, at = [], 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end], 16)
        if size == 0:
            return b"".join(parts)
        parts.append(body[end + 2 : end + 2 + size])
        at = end + 4 + size


async def ask(server: Serve, path: str, body: Any) -> Answer:
    """One request over a connection of its own, read to the end."""
    reader, writer = await asyncio.open_connection(*server.address)
    key = [f"Authorization: Bearer {server.key}"] if server.key else []
    try:
        writer.write(request_bytes(path, body, "Connection: close", *key))
        return parse(await reader.read(-1))
    finally:
        writer.close()


def ask_all(server: Serve, bodies: Sequence[dict[str, Any]], path: str = "/v1/completions") -> list[Answer]:
    """All at once; the answers in order."""

    async def run() -> list[Answer]:
        return list(await asyncio.gather(*(ask(server, path, body) for body in bodies)))

    return asyncio.run(run())


class Connection:
    """A raw connection with a request on it, to be read in part and cut."""

    def __init__(self, server: Serve, path: str, body: Any, *headers: str) -> None:
        self.socket = socket.create_connection(server.address, timeout=60)
        self.socket.sendall(request_bytes(path, body, "Connection: close", *headers))
        self.received = b""

    def read_until(self, text: bytes) -> None:
        while text not in self.received:
            data = self.socket.recv(65536)
            assert data, self.received
            self.received += data

    def rest(self) -> bytes:
        """Everything until the server closes."""
        while data := self.socket.recv(65536):
            self.received += data
        return self.received

    def close(self) -> None:
        self.socket.close()

    def reset(self) -> None:
        """Close with a RST, as a killed machine's kernel does."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.socket.close()
