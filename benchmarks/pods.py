"""Pods for experiments: `kvern serve` processes, what they log, what they leave behind. Used by `failures.py`,
`start_stop.py` and tests; it measures nothing itself.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
TINY = ROOT / "tests/engine/models_data/tiny-kjv"


def wait_for(condition: Callable[[], Any], seconds: float, what: str = "") -> Any:
    """The condition's first true value. Raises TimeoutError after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    raise TimeoutError(f"still not so after {seconds} s: {what or condition}")


def free_port(address: str = "127.0.0.1") -> int:
    """A port that nobody listens at now."""
    with socket.socket() as sock:
        sock.bind((address, 0))
        return int(sock.getsockname()[1])


class Pod:
    """One `kvern serve`: its log, children and HTTP. `prefix` goes in front of the command; `tmp` is its TMPDIR."""

    def __init__(
        self,
        *flags: str,
        device: str = "sim",
        tmp: str | None = None,
        prefix: Sequence[str] = (),
        env: dict[str, str] | None = None,
        model: str = str(TINY),
    ) -> None:
        self.tmp = tmp or tempfile.mkdtemp(prefix="pod-")
        if tmp is None:
            weakref.finalize(self, shutil.rmtree, self.tmp, ignore_errors=True)
        command = [*prefix, sys.executable, "-m", "kvern_engine.cli", "serve", model, "--served-model-name", "tiny"]
        command += ["--device", device, "--port", "0", *flags]
        path = os.pathsep.join([*(str(ROOT / part) for part in ("kernels", "engine", "operator"))])
        environ = {**os.environ, "TMPDIR": self.tmp, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **(env or {})}
        self.lines: list[str] = []
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ, process_group=0)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.family: list[psutil.Process] = []

    def _read(self) -> None:
        assert self.process.stderr is not None
        with contextlib.suppress(ValueError):
            self.lines.extend(self.process.stderr)

    # ------------------------------------------------------------ what it is

    @property
    def log(self) -> str:
        return "".join(self.lines)

    @property
    def url(self) -> str:
        """Where it listens; known as soon as it starts."""
        found = re.search(r"msg=(?:starting|ready) .*?url=(\S+)", self.log)
        return found.group(1) if found else ""

    @property
    def is_ready(self) -> bool:
        return "msg=ready" in self.log

    def wait_ready(self, seconds: float = 120.0) -> "Pod":
        """Raises RuntimeError with the log where it ends instead."""
        wait_for(lambda: self.is_ready or self.process.poll() is not None, seconds, f"ready: {self.log}")
        if not self.is_ready:
            raise RuntimeError(f"it did not start:\n{self.log}")
        return self

    def children(self, name: str = "") -> list[psutil.Process]:
        """Living children whose name (`worker-0`, `core-1`, ...) begins so, in order."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self.family += [p for p in found if p not in self.family]
        named = []
        for process in found:
            with contextlib.suppress(psutil.Error):
                line = process.cmdline()
                if line and "kvern_engine.child" in line and line[-1].startswith(name):
                    named.append((line[-1], process))
        return [process for _, process in sorted(named, key=lambda pair: pair[0])]

    # ------------------------------------------------------------ HTTP

    def get(self, path: str, token: str = "", url: str = "") -> tuple[int, Any]:
        """Status and JSON (or text) of a GET; (0, reason) where nobody answers."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return _fetch(urllib.request.Request((url or self.url) + path, headers=headers))

    def post(self, path: str, body: Any, token: str = "", url: str = "") -> tuple[int, Any]:
        """Status and JSON (or text) of a POST; (0, reason) where nobody answers."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        return _fetch(urllib.request.Request((url or self.url) + path, json.dumps(body).encode(), headers))

    def complete(self, max_tokens: int = 4, prompt: Any = (5, 6, 7)) -> tuple[int, Any]:
        body = {"model": "tiny", "prompt": list(prompt), "max_tokens": max_tokens, "ignore_eos": True}
        body |= {"temperature": 0, "seed": 1}  # the simulated device only knows seeds
        request = urllib.request.Request(
            self.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        return _fetch(request)

    # ------------------------------------------------------------ its end

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def wait(self, seconds: float = 20.0) -> int:
        status = self.process.wait(seconds)
        self._reader.join(5)
        return status

    def stop(self, seconds: float = 30.0) -> int:
        """SIGTERM and its exit status; killed where that does not help."""
        self.children()
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
        try:
            return self.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.wait()
            raise

    def left_over(self) -> list[str]:
        """Processes, socket folders and shared memory of this pod that are still there."""
        alive = [p for p in self.family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        found = [f"process {p.pid} {' '.join(p.cmdline()[-1:])}" for p in alive]
        found += [str(path) for path in Path(self.tmp).glob("kvern-*")]
        pids = {str(p.pid) for p in self.family}
        found += [str(path) for path in Path("/dev/shm").iterdir() if any(pid in path.name for pid in pids)]
        return found


def _fetch(request: urllib.request.Request) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, _parse(response.read())
    except urllib.error.HTTPError as error:
        return error.code, _parse(error.read())
    except (OSError, urllib.error.URLError) as error:
        return 0, str(getattr(error, "reason", error))


def _parse(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")


class Client(threading.Thread):
    """A client with a long request: what it got, and when."""

    def __init__(self, pod: Pod, prompt: Sequence[int], max_tokens: int) -> None:
        super().__init__(daemon=True)
        self._pod, self._prompt, self._max_tokens = pod, prompt, max_tokens
        self.events: list[dict[str, Any]] = []
        self.error: str | None = None
        self.done = False
        self.ended_at = 0.0
        self.start()

    def run(self) -> None:
        body = {"model": "tiny", "prompt": list(self._prompt), "max_tokens": self._max_tokens, "ignore_eos": True}
        body |= {"stream": True, "temperature": 0}
        request = urllib.request.Request(
            self._pod.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                for line in response:
                    self._event(line)
        except urllib.error.HTTPError as error:
            self.error = f"{error.code} {_parse(error.read())}"
        except (OSError, urllib.error.URLError) as error:
            self.error = self.error or f"connection lost: {error}"
        self.ended_at = time.monotonic()

    def _event(self, line: bytes) -> None:
        if line.startswith(b"data: [DONE]"):
            self.done = True
        elif line.startswith(b"data:"):
            event = json.loads(line[5:])
            self.events.append(event)
            if "error" in event:
                self.error = event["error"]["message"]

    @property
    def is_streaming(self) -> bool:
        return len(self.events) >= 2
