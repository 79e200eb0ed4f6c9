"""Real `kvern serve` processes on the simulated device, their children, and what they leave behind."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

TINY = Path(__file__).parents[1] / "models_data/tiny-kjv"


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """The condition's first true value; fails the test after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.01)
    pytest.fail(f"still false after {seconds} s: {condition}")


class Stream:
    """A streaming completion read in a thread: its events, when each came, and how it ended."""

    def __init__(self, url: str, prompt: Any, **body: Any) -> None:
        self.events: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.error: dict[str, Any] | None = None
        self.finish_reason: str | None = None
        self.complete = False
        body = {"model": "tiny", "prompt": prompt, "stream": True, "ignore_eos": True, "temperature": 0, **body}
        self._args = (url, body)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        url, body = self._args
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response,
        ):
            for line in response.iter_lines():
                if not line.startswith("data:"):
                    continue
                self.times.append(time.monotonic())
                if line == "data: [DONE]":
                    self.complete = True
                    continue
                event = json.loads(line[5:])
                self.events.append(event)
                self.error = event.get("error") or self.error
                for choice in event.get("choices", ()):
                    self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def join(self, seconds: float = 30.0) -> "Stream":
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the stream hangs"
        return self

    @property
    def started(self) -> bool:
        return len(self.events) >= 2


class Serve:
    """One `kvern serve` process: its URL once it is ready, its children, its log."""

    def __init__(self, tmp: Path, *flags: str, ready: bool = True) -> None:
        command = [sys.executable, "-m", "kvern_engine.cli", "serve", str(TINY), "--served-model-name", "tiny"]
        command += ["--device", "sim", "--port", "0", *flags]
        env = {**os.environ, "TMPDIR": str(tmp), "OMP_NUM_THREADS": "1"}
        self.tmp = tmp
        self.log: list[str] = []
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env, process_group=0)
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        self.url = ""
        if ready:
            wait_for(lambda: self._ready_url() or self.process.poll() is not None, 120)
            self.url = self._ready_url() or ""
            assert self.url, "".join(self.log)

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)

    def _ready_url(self) -> str | None:
        found = re.search(r"msg=ready url=(\S+)", "".join(self.log))
        return found.group(1) if found else None

    def children(self, kind: str = "") -> list[psutil.Process]:
        """Child processes whose name (the last word of their command line) begins with `kind`, in order."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        return sorted(
            (p for p in found if p.cmdline() and p.cmdline()[-1].startswith(kind)), key=lambda p: p.cmdline()[-1]
        )

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60)

    def complete(self, prompt: Any, **body: Any) -> httpx.Response:
        body = {"model": "tiny", "prompt": prompt, "temperature": 0, **body}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)

    def stream(self, prompt: Any, **body: Any) -> Stream:
        return Stream(self.url, prompt, **body)

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def wait(self, seconds: float = 15.0) -> int:
        status = self.process.wait(seconds)
        self._reader.join(5)
        return status

    def tracebacks(self) -> list[str]:
        """The lines of the log that hold or follow a traceback."""
        at = next((i for i, line in enumerate(self.log) if "Traceback" in line), len(self.log))
        return [line[-3000:] for line in self.log[at : at + 30]]

    def text(self) -> str:
        return "".join(self.log)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Serve]]:
    """Start servers; at the end each is stopped, and nothing of it may be left: process, socket, shared memory."""
    started: list[Serve] = []
    shared_before = set(Path("/dev/shm").iterdir())

    def start(*flags: str, **options: Any) -> Serve:
        server = Serve(tmp_path, *flags, **options)
        started.append(server)
        return server

    family: list[psutil.Process] = []
    try:
        yield start
    finally:
        for server in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                family += server.children()
            if server.process.poll() is None:
                server.signal(signal.SIGTERM)
                try:
                    server.wait(5)
                except subprocess.TimeoutExpired:  # a test failed and left streams running
                    server.signal(signal.SIGTERM)
                    server.wait()
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not list(tmp_path.glob("kvern-*")), "the socket folder is left over"
    pids = {str(p.pid) for p in family}
    new = set(Path("/dev/shm").iterdir()) - shared_before
    assert not [path for path in new if "kvern" in path.name or any(pid in path.name for pid in pids)]
