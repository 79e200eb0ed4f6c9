"""One downloader at a time; whoever holds the lock and dies does not hold others up."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvern_engine.fetching import lock as lock_module
from kvern_engine.fetching.lock import FolderLock, Holder, LockLostError, here


def made(folder: Path, what: str = "x") -> FolderLock:
    return FolderLock(folder, what, beat=0.05, stale=0.5, poll=0.02)


def taken(folder: Path, what: str = "x", text: str = "") -> FolderLock:
    lock = made(folder, what)
    lock.acquire(lambda holder: None, lambda: text)
    return lock


def record(folder: Path) -> tuple[str, dict]:
    (path,) = folder.glob("lock-*")
    return path.name, json.loads(path.read_text())


def test_taken_given_back_and_taken_again(tmp_path: Path) -> None:
    first = taken(tmp_path)
    first.check()
    first.release()
    first.release()
    second = taken(tmp_path)
    second.check()
    assert record(tmp_path)[0] == "lock-2"
    second.release()


def test_many_threads_one_at_a_time(tmp_path: Path) -> None:
    inside, most, order = 0, 0, []

    def work(number: int) -> None:
        nonlocal inside, most
        lock = taken(tmp_path)
        inside += 1
        most = max(most, inside)
        time.sleep(0.01)
        lock.check()
        order.append(number)
        inside -= 1
        lock.release()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1 and sorted(order) == list(range(8))


def test_who_waits_is_told_by_whom_and_for_what(tmp_path: Path) -> None:
    first, seen = taken(tmp_path, "hf://a/b", "45 %"), []

    def waiting(holder: Holder) -> None:
        seen.append(holder)
        first.release()

    second = made(tmp_path)
    second.acquire(waiting, lambda: "")
    assert [(h.what, h.text) for h in seen] == [("hf://a/b", "45 %")]
    second.release()


def test_a_holder_that_beats_is_waited_for(tmp_path: Path) -> None:
    first, began = taken(tmp_path), time.monotonic()
    threading.Timer(1.2, first.release).start()
    second = taken(tmp_path)
    assert time.monotonic() - began >= 1.1  # twice as long as a silent one is waited for
    second.release()


@pytest.mark.parametrize("same_machine", [True, False])
def test_a_dead_holder_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_machine: bool) -> None:
    code = (
        "import sys, time; from pathlib import Path; from kvern_engine.fetching.lock import FolderLock\n"
        "FolderLock(Path(sys.argv[1]), 'x').acquire(lambda h: None, lambda: '')\n"
        "print('have', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, env=environment())
    assert holder.stdout is not None and holder.stdout.readline() == b"have\n"
    holder.kill()
    holder.wait()
    if not same_machine:
        monkeypatch.setattr(lock_module, "here", lambda: "another")
    began = time.monotonic()
    lock = taken(tmp_path)
    passed = time.monotonic() - began
    assert passed < 0.3 if same_machine else 0.4 < passed < 5
    lock.release()


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def test_a_holder_that_was_suspended_finds_out(tmp_path: Path) -> None:
    first = taken(tmp_path)
    first._stop.set()  # its beats stop, as under SIGSTOP
    path = tmp_path / "lock-1"
    path.write_text(json.dumps({**json.loads(path.read_text()), "here": "another"}))
    second = taken(tmp_path)
    with pytest.raises(LockLostError, match="has taken over the lock"):
        first.check()
    assert first.lost()
    first.release()  # and does not give back what is not its own
    assert not record(tmp_path)[1]["released"]
    second.check()
    second.release()


def test_a_broken_record_is_a_holder_for_a_while(tmp_path: Path) -> None:
    (tmp_path / "lock-7").write_text("")
    began = time.monotonic()
    lock = taken(tmp_path)
    assert time.monotonic() - began >= 0.4 and record(tmp_path)[0] == "lock-8"
    lock.release()


def test_here_is_the_same_for_a_child() -> None:
    code = "from kvern_engine.fetching.lock import here; print(here(), end='')"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    assert out.stdout == here() != ""
