"""Processes: killed in mid-file and gone on with, several at once, and what `kvern fetch` prints."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from fake_hub import FakeHub, noise

from kvern_engine.fetching.store import PART, Store

URI = "hf://org/large"
FILES = {
    "config.json": b"{}",
    "model-00001-of-00002.safetensors": noise(400_000, 1),
    "model-00002-of-00002.safetensors": noise(3_000_000, 2),
}
SMALL, LARGE = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def large(hub: FakeHub) -> FakeHub:
    hub.add("org/large", FILES)
    hub.faults.pause = 0.05  # 64 KiB each: the large one takes 2.3 s
    return hub


def start(*arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "kvern_engine.cli", "fetch", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def until(holds, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def partial(cache: Path) -> Path | None:
    return next(iter(Store(cache).partials()), None)


def size_of(cache: Path, name: str) -> int:
    folder = partial(cache)
    path = folder / name if folder else None
    return path.stat().st_size if path and path.exists() else 0


def test_killed_in_mid_file_and_gone_on_with(large: FakeHub, cache: Path) -> None:
    first = start(URI)
    until(lambda: size_of(cache, SMALL) == len(FILES[SMALL]) and size_of(cache, LARGE + PART) > 500_000)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert Store(cache).find(URI, None) is None  # what is there is not a model
    had, asked = size_of(cache, LARGE + PART), len(large.log)

    large.faults.pause = 0.0
    second = start(URI)
    out, err = second.communicate(timeout=60)
    assert second.returncode == 0, err
    folder = Path(out.strip())
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES
    again = [(path.rpartition("/")[2], range_) for method, path, range_, _ in large.log[asked:] if "/store/" in path]
    assert again == [(LARGE, f"bytes={had}-")]  # the rest of the one, and nothing of those that were finished


def test_several_at_once_download_once(large: FakeHub, cache: Path) -> None:
    large.faults.pause = 1.0  # the first one is busy for as long as the others need to start
    first = start(URI)
    until(lambda: size_of(cache, LARGE + PART) > 0)
    others = [start(URI) for _ in range(2)]
    for other in others:
        assert other.stderr is not None
        assert "waiting for another download into the same cache: " in other.stderr.readline()
    large.faults.pause = 0.0
    runs = [first, *others]
    ends = [run.communicate(timeout=60) for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0], ends
    assert len({out for out, _ in ends}) == 1
    assert sorted(name for name, _ in large.fetched() if name in (SMALL, LARGE)) == [SMALL, LARGE]


def test_a_killed_one_holds_those_who_wait_not_up(large: FakeHub, cache: Path) -> None:
    first = start(URI)
    until(lambda: size_of(cache, LARGE + PART) > 200_000)
    second = start(URI)
    time.sleep(1.0)
    first.send_signal(signal.SIGKILL)
    first.wait()
    began = time.monotonic()
    _, err = second.communicate(timeout=60)
    assert second.returncode == 0, err
    assert time.monotonic() - began < 15  # far less than the time after which a silent one is taken for dead


def test_how_far_it_is_by_http_and_in_the_end(large: FakeHub, cache: Path, tmp_path: Path) -> None:
    token, summary, port = tmp_path / "token", tmp_path / "summary", free_port()
    token.write_text("t0ken\n")
    more = ["--report-port", str(port), "--admin-token-file", str(token), "--summary-file", str(summary)]
    run = start(URI, *more)
    until(lambda: size_of(cache, LARGE + PART) > 200_000)
    total = sum(map(len, FILES.values()))
    said = ask(port, "t0ken")
    assert (said["phase"], said["total"], said["model"]) == ("Downloading", total, URI)
    assert 200_000 < said["bytes"] < total
    for wrong in ("", "other"):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            ask(port, wrong)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        ask(port, "t0ken", "/admin/drain")
    large.faults.pause = 0.0
    _, err = run.communicate(timeout=60)
    assert run.returncode == 0, err
    done = json.loads(summary.read_text())
    assert done["phase"] == "Ready" and done["bytes"] == done["total"] >= total
    assert done["shape"] is None  # its config.json is none that an engine reads
    assert 'level=info process=fetch msg="downloading hf://org/large: ' in err


def ask(port: int, token: str, path: str = "/admin/fetch") -> dict:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Authorization": f"Bearer {token}"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=10) as answer:
        return json.load(answer)


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_words_of_the_command(hub: FakeHub) -> None:
    def said(*arguments: str) -> tuple[int, str]:
        run = start(*arguments)
        _, err = run.communicate(timeout=60)
        return run.returncode, err

    code, err = said("hf://org/nome")
    assert code == 1 and "kvern fetch: error: hf://org/nome: not found: " in err and "Traceback" not in err
    code, err = said("s3://b/x", "--revision", "v2")
    assert code == 2 and "--revision is for hf:// models; leave it out for s3://b/x" in err
    code, err = said("builtin://x", "--update")
    assert code == 2 and "--update is for hf:// and s3:// models; leave it out for builtin://x" in err
    code, err = said("hf://org/name", "--report-port", "0")
    assert code == 2 and "--report-port needs --admin-token-file" in err


def test_told_to_end_it_gives_the_lock_back(large: FakeHub, cache: Path) -> None:
    """In a cluster nobody can see that a process of another pod is gone: its lock would be waited for."""
    first = start(URI)
    until(lambda: size_of(cache, LARGE + PART) > 200_000)
    first.send_signal(signal.SIGTERM)
    _, err = first.communicate(timeout=20)
    assert first.returncode == 143 and "Traceback" not in err, err
    (lock,) = Store(cache).hidden.glob("lock-*")
    assert json.loads(lock.read_text())["released"] is True
