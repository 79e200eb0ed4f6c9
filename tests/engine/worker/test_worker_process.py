"""The worker in a process of its own: hello, plans, reset, last words, and that it never outlives its parent."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from worker_harness import GREEDY, plan

from kvern_engine.config import EngineConfig
from kvern_engine.core.loop import WorkerDiedError
from kvern_engine.core.plan import AddedRow, Reset
from kvern_engine.transport import encode
from kvern_engine.worker_client import GroupWorkerClient, Peer

RUN = (
    "import sys; from kvern_engine.worker.process import worker_main; "
    "worker_main(sys.stdin.buffer.read(), 0, 0, sys.argv[1])"
)


class Child:
    def __init__(self, folder: Path, code: str = RUN, **fields: object) -> None:
        config = EngineConfig(**{"model": "sim", "device": "sim", **fields})  # type: ignore[arg-type]
        self.process = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE)
        assert self.process.stdin is not None
        self.process.stdin.write(config.model_dump_json().encode())
        self.process.stdin.close()
        self.context: zmq.Context = zmq.Context()
        self.client = GroupWorkerClient(self.context, str(folder), 0, [Peer(0, self.process.pid)])

    def close(self) -> None:
        self.client.close()
        self.context.term()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    children: list[Child] = []

    def make(**fields: object) -> Child:
        children.append(Child(tmp_path, **fields))
        return children[-1]

    yield make
    for child in children:
        child.close()


def first(length: int = 3) -> AddedRow:
    return AddedRow(0, "a", list(range(length)), length, [0], GREEDY)


def test_real_model(start, tiny_path: str) -> None:  # type: ignore[no-untyped-def]
    child = start(model=tiny_path, device="cpu", num_gpu_blocks_override=8, max_num_seqs=2)
    phases: list[str] = []
    ready = child.client.wait_ready(lambda phase, share: phases.append(phase))
    assert (ready.num_blocks, ready.device) == (8, "cpu")
    child.client.submit(plan(0, [(0, 0, 3, True)], added=[first()]))
    child.client.submit(plan(1, [(0, 3, 1, True)]))
    results = [child.client.collect(30.0), child.client.collect(30.0)]
    assert [(r.step, r.rows, len(r.tokens[0])) for r in results if r] == [(0, [0], 1), (1, [0], 1)]
    # A new core: everything is forgotten, the worker says hello again and takes plans from the beginning.
    child.client._send(encode(Reset(1)))
    assert child.client.wait_ready() == ready
    child.client.submit(plan(0, [(0, 0, 3, True)], added=[first()]))
    again = child.client.collect(30.0)
    assert again is not None and results[0] is not None and again.tokens == results[0].tokens


def test_the_next_plan_is_taken_while_one_runs(start) -> None:  # type: ignore[no-untyped-def]
    """On a device that computes beside its process, two steps submitted together take the time of two, not more, and
    the first result is there after the time of one."""
    child = start(sim_speed=0.005)  # a decode step takes about a second
    child.client.wait_ready()
    child.client.submit(plan(0, [(0, 0, 3, True)], added=[first()]))
    begin = time.monotonic()
    child.client.submit(plan(1, [(0, 3, 1, True)]))
    one = child.client.collect(60.0)
    between = time.monotonic() - begin
    two = child.client.collect(60.0)
    both = time.monotonic() - begin
    assert one is not None and two is not None and (one.step, two.step) == (0, 1)
    assert between < one.seconds + two.seconds / 2
    assert both == pytest.approx(one.seconds + two.seconds, abs=one.seconds / 2)


def test_a_refusal_reaches_the_core(start, tiny_path: str) -> None:  # type: ignore[no-untyped-def]
    child = start(model=tiny_path, device="cpu", max_model_len=4000)
    with pytest.raises(ValueError, match="max_model_len must be at most 512"):
        child.client.wait_ready()
    assert child.process.wait(60) == 1


def test_a_failing_step_is_told(start) -> None:  # type: ignore[no-untyped-def]
    child = start()
    child.client.wait_ready()
    child.client.submit(plan(0, [(5000, 0, 3, True)]))
    with pytest.raises(WorkerDiedError, match="IndexError"):
        child.client.collect(60.0)
    assert child.process.wait(60) == 1


def test_signals(start) -> None:  # type: ignore[no-untyped-def]
    child = start()
    child.client.wait_ready()
    child.process.send_signal(signal.SIGINT)
    child.client.submit(plan(0, [(0, 0, 3, True)], added=[first()]))
    assert child.client.collect(60.0) is not None
    child.process.send_signal(signal.SIGTERM)
    assert child.process.wait(60) == 0


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    """The parent is killed with -9: the worker is gone within a moment."""
    code = (
        "import subprocess, sys, os, time\n"
        f"p = subprocess.Popen([sys.executable, '-c', {RUN!r}, sys.argv[1]], stdin=subprocess.PIPE)\n"
        "p.stdin.write(sys.stdin.buffer.read()); p.stdin.close()\n"
        "print(p.pid, flush=True); time.sleep(60)"
    )
    config = EngineConfig(model="sim", device="sim").model_dump_json().encode()
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert parent.stdin is not None and parent.stdout is not None
    parent.stdin.write(config)
    parent.stdin.close()
    pid = int(parent.stdout.readline())
    context: zmq.Context = zmq.Context()
    client = GroupWorkerClient(context, str(tmp_path), 0, [Peer(0, pid)])
    try:
        client.wait_ready()
        parent.kill()
        parent.wait(60)
        parent.stdout.close()
        deadline = time.monotonic() + 30
        while client.alive and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not client.alive
    finally:
        client.close()
        context.term()
        if parent.poll() is None:
            parent.kill()


def test_only_who_serves_holds_the_worker(tmp_path: Path) -> None:
    """A switch of the layout puts another worker in its place: what the first one had, its weights above all, is to be
    free then."""
    code = (
        "import sys, weakref\n"
        "from kvern_engine.worker import process\n"
        "def serve(serving, plans, outbox):\n"
        "    first = weakref.ref(serving.worker)\n"
        "    serving.worker = None\n"
        "    print('free' if first() is None else 'held', flush=True)\n"
        "process._serve = serve\n"
        "process.worker_main(sys.stdin.buffer.read(), 0, 0, sys.argv[1])\n"
    )
    config = EngineConfig(model="sim", device="sim").model_dump_json()
    done = subprocess.run([sys.executable, "-c", code, tmp_path], input=config, capture_output=True, text=True)
    assert done.stdout.strip() == "free", done.stderr
