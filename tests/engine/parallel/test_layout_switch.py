"""What the supervisor says to workers, cores and API servers in a switch, and on the way back from each of its phases.

Everybody else is played by `Played`: it answers as they do until it is told to fail.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvern_engine.config import EngineConfig
from kvern_engine.core.handed import Handover, HeldChoice, HeldRequest
from kvern_engine.core.placement import without_kv
from kvern_engine.core.plan import WorkerReady
from kvern_engine.ipc import AddRequest, CoreReady
from kvern_engine.layout_switch import LayoutSwitch
from kvern_engine.parallel.layout import Layout
from kvern_engine.parallel.messages import (
    ChangeLayout,
    Drained,
    Fence,
    Finish,
    Go,
    Handed,
    Hold,
    LayoutAnswer,
    LayoutChanged,
    LayoutState,
    MoveKv,
    Reform,
    Standing,
    Switched,
    SwitchToWorker,
    TakeOver,
    TookOver,
)
from kvern_engine.request import SamplingParams
from kvern_engine.transport import decode_to_core, encode

BLOCKS = 40


def worker_ready(rank: int, blocks: int = BLOCKS) -> WorkerReady:
    return WorkerReady(rank, blocks, 4, 100, 1000, 1000, "cpu", "float32", max_num_seqs=8)


def core_ready(engine: int) -> CoreReady:
    return CoreReady(engine, BLOCKS, 4, 100, {"device": "cpu"}, {1: 640, 2: 640, 4: 640})


def handover(engine: int) -> Handover:
    """One running request with two blocks, one that waits, one idle prefix."""
    running = AddRequest(f"run{engine}", 0, [1, 2, 3, 4, 5], SamplingParams(max_tokens=20), 1.0)
    waiting = AddRequest(f"wait{engine}", 0, [1, 2], SamplingParams(max_tokens=20), 2.0)
    held = [
        HeldRequest(running, [HeldChoice(0, "running", [6], [7, 3], 5, told=True)], 1.5),
        HeldRequest(waiting, [HeldChoice(0, "waiting")]),
    ]
    return Handover(engine, held, [(bytes([engine]) * 32, 9)], 100)


class Socket:
    def __init__(self, played: "Played", kind: str, index: int) -> None:
        self._played, self._to, self.closed = played, (kind, index), False

    def send(self, data: bytes, flags: int = 0) -> None:
        self._played.sent.append((*self._to, data))

    def close(self) -> None:
        self.closed = True


class Played:
    """The pod around a switch. `fail(kind, index, message)` returns True where that party does not answer a message,
    because it has told of a failure by itself."""

    def __init__(self, folder: Path, source: Layout, servers: int = 1) -> None:
        self.now, self.sent, self.servers = 0.0, [], []  # type: ignore[var-annotated]
        self.started: list[int] = []
        self.ended: list[int] = []
        self.given_up: dict[int, str] = {}
        self.layout = source
        self.sockets: list[Socket] = []
        self.fail: Callable[[str, int, Any], bool] = lambda kind, index, message: False
        self.blocks = BLOCKS
        sizes = {"data_parallel_size": source.data, "tensor_parallel_size": source.tensor}
        config = EngineConfig(model="m", api_server_count=servers, **sizes)
        self.answers = list(range(servers))  # the API servers that say when they have all outputs
        self.switch = LayoutSwitch(self, config, None, str(folder), clock=lambda: self.now)  # type: ignore[arg-type]
        self.switch._connect = self._connect  # type: ignore[method-assign, assignment]
        self.switch.engines.update({e: core_ready(e) for e in range(source.data)})
        self.source = source
        self.dead: set[tuple[str, int]] = set()
        self.log: list[tuple[str, int, Any]] = []
        self.living: list[tuple[str, int, int]] = []

    def _connect(self, name: str) -> Socket:
        kind, _, rest = name.partition("-")
        self.sockets.append(Socket(self, kind, int(rest.partition(".")[0])))
        return self.sockets[-1]

    def start_core(self, engine: int, switch: int) -> None:
        self.started.append(engine)
        self.sent.append(("start", engine, encode(Standing(switch, engine))))

    def end_core(self, engine: int) -> None:
        self.ended.append(engine)

    def peers(self, ranks: Sequence[int]) -> list[tuple[int, int | None, str]]:
        return [(rank, 1000 + rank, "") for rank in ranks]

    def tell_servers(self, message: Any, server: int | None = None) -> None:
        self.servers.append(message)
        if isinstance(message, Hold):
            for engine in range(message.data):
                self.sent.append(("fenced", engine, encode(Go(message.switch))))
            self.sent += [("drained", server, encode(Go(message.switch))) for server in self.answers]

    def adopt(self, layout: Layout, engines: Sequence[CoreReady]) -> None:
        assert [engine.engine for engine in engines] == list(range(layout.data))
        self.layout = layout

    def processes(self) -> list[tuple[str, int, int]]:
        return self.living

    def give_up(self, engine: int, reason: str) -> None:
        self.given_up[engine] = reason

    def run(self, tensor: int) -> None:
        """Ask, and let everybody answer until nobody has anything to say."""
        self.switch.read(ChangeLayout(0, 1, tensor, 1))
        self.answer()

    def answer(self) -> None:
        decode_worker = msgspec.msgpack.Decoder(SwitchToWorker).decode
        while self.sent:
            kind, index, data = self.sent.pop(0)
            self.now += 0.01
            if kind == "drained":
                self.switch.read(Drained(1, index))
                continue
            if (("core" if kind in ("start", "fenced") else kind), index) in self.dead:
                continue
            message = (
                Standing(1, index)
                if kind == "start"
                else Hold(1, index)
                if kind == "fenced"
                else decode_worker(data)
                if kind == "worker"
                else decode_to_core(data)
            )
            self.log.append((kind, index, message))
            if self.fail(kind, index, message):
                continue
            if kind == "start":
                self.switch.read(Standing(1, index))
            elif kind == "fenced":
                self.hand_over(index)
            elif isinstance(message, Reform):
                self.switch.read(Switched(1, index, "reform", {"weights": 0.1}, worker_ready(index, self.blocks)))
            elif isinstance(message, MoveKv):
                self.switch.read(Switched(1, index, "kv", {"kv": 0.2}))
            elif isinstance(message, Finish):
                self.switch.read(Switched(1, index, "finish"))
            elif isinstance(message, TakeOver):
                self.switch.read(TookOver(1, message.tensor, core_ready(index)))

    def hand_over(self, engine: int) -> bool:
        self.switch.read(Handed(1, handover(engine), worker_ready(engine)))
        return True

    def said(self, kind: type) -> list[Any]:
        return [message for message in self.servers if isinstance(message, kind)]

    def told(self, kind: type) -> list[tuple[str, int, Any]]:
        return [entry for entry in self.log if isinstance(entry[2], kind) and entry[0] in ("core", "worker")]


LAYOUTS = [Layout(4, 1), Layout(2, 2), Layout(1, 4)]


@pytest.mark.parametrize(
    ("source", "target"), [(a, b) for a in LAYOUTS for b in LAYOUTS if a != b], ids=lambda layout: str(layout)
)
def test_a_switch_from_beginning_to_end(tmp_path: Path, source: Layout, target: Layout) -> None:
    pod = Played(tmp_path, source)
    pod.run(target.tensor)
    assert pod.layout == target and not pod.switch.running
    assert pod.started == list(range(source.data, target.data))
    assert pod.ended == list(range(target.data, source.data))
    assert [message.status for message in pod.said(LayoutAnswer)] == [202]
    (changed,) = pod.said(LayoutChanged)
    assert (changed.data, changed.tensor) == (target.data, target.tensor)
    assert set(changed.engine_of) == {f"{kind}{e}" for kind in ("run", "wait") for e in range(source.data)}
    orders = {index: order for _, index, order in pod.told(TakeOver)}
    assert sorted(orders) == list(range(target.data))
    for engine, order in orders.items():
        assert [peer[0] for peer in order.peers] == target.ranks_of(engine)
        assert all(changed.engine_of[request.message.request_id] == engine for request in order.share.requests)
    assert {index for _, index, _ in pod.told(Go)} == set(range(target.data))
    assert [finish.keep for _, _, finish in pod.told(Finish)] == [True] * 4
    state = pod.said(LayoutState)[-1]
    assert (state.phase, state.tensor, state.target, state.totals) == (
        "Stable",
        target.tensor,
        target.tensor,
        {"Switched": 1},
    )
    (record,) = state.last
    assert (record.kept, record.recomputed, record.reason) == (source.data, 0, "")
    assert record.seconds["weights"] == 0.1 and record.seconds["kv"] == 0.2
    assert all(sock.closed for sock in pod.sockets) and not list(tmp_path.iterdir())


def everybody_is_back(pod: Played, reason: str, engines: Sequence[int], lost: Sequence[int] = ()) -> None:
    """The old engines that live go on with what they had, block for block but for those that `lost` theirs, and the
    reason is told."""
    assert pod.layout == pod.source and not pod.switch.running
    record = pod.said(LayoutState)[-1].last[0]
    assert (record.outcome, record.reason) == ("RolledBack", reason)
    assert 0 <= time.time() - record.ended < 60
    taken = {index: order for _, index, order in pod.told(TakeOver) if order.data == pod.source.data}
    assert sorted(taken) == list(engines)
    for engine, order in taken.items():
        assert order.share == (without_kv if engine in lost else Handover.unmoved)(handover(engine))
        assert [peer[0] for peer in order.peers] == pod.source.ranks_of(engine)
    (changed,) = pod.said(LayoutChanged)
    assert (changed.data, changed.tensor, changed.engine_of) == (pod.source.data, pod.source.tensor, {})
    assert [ready.engine for ready in changed.engines] == list(engines)
    assert {index for _, index, _ in pod.told(Go)} == set(engines)
    assert False in [finish.keep for _, _, finish in pod.told(Finish)]
    assert pod.ended == pod.started
    assert all(sock.closed for sock in pod.sockets)


@pytest.mark.parametrize(("kind", "step"), [(Reform, "reform"), (MoveKv, "kv")])
def test_a_worker_that_cannot(tmp_path: Path, kind: type, step: str) -> None:
    pod = Played(tmp_path, Layout(2, 2))

    def fail(_: str, index: int, message: Any) -> bool:
        if isinstance(message, kind) and index == 2:
            pod.switch.read(Switched(1, 2, step, error="this machine has too little memory"))
            return True
        return False

    pod.fail = fail
    pod.run(1)
    everybody_is_back(pod, "worker 2: this machine has too little memory", [0, 1])


def test_a_worker_that_lost_its_kv_on_the_way_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its engine's requests go on from their tokens; the other engine has all that it had."""
    pod = Played(tmp_path, Layout(2, 2))

    def fail(_: str, index: int, message: Any) -> bool:
        if isinstance(message, MoveKv) and index == 0:
            pod.switch.read(Switched(1, 0, "kv", error="a rank of the pod is gone"))
            return True
        if isinstance(message, Finish) and index == 3:
            pod.switch.read(Switched(1, 3, "finish", lost_kv=True))
            return True
        return False

    pod.fail = fail
    pod.run(4)
    everybody_is_back(pod, "worker 0: a rank of the pod is gone", [0, 1], lost=[1])
    (again,) = [order.share for _, engine, order in pod.told(TakeOver) if engine == 1]
    (choice,) = again.requests[0].choices
    assert (choice.state, choice.tokens, choice.blocks, choice.lost) == ("waiting", [6], [], 5)
    assert "engine 1 computes its KV again" in caplog.text


@pytest.mark.parametrize("kind", [Hold, Reform, MoveKv, TakeOver])
def test_a_worker_that_dies_in_each_phase(tmp_path: Path, kind: type) -> None:
    pod = Played(tmp_path, Layout(2, 2))

    def fail(_: str, __: int, message: Any) -> bool:
        if isinstance(message, kind) and not pod.dead:
            pod.dead = {("worker", 2), ("worker", 3), ("core", 1)}  # the supervisor ends what is left of the engine
            pod.switch.lost("worker", 2, "worker 2 was killed by SIGKILL")
        return False

    pod.fail = fail
    pod.run(4)
    everybody_is_back(pod, "worker 2 was killed by SIGKILL", [0])


def test_what_a_core_says_late_of_the_layout_that_failed_counts_for_nothing(tmp_path: Path) -> None:
    """Neither as its way back, which it has yet to go, nor as an engine of the pod once all is over."""
    pod = Played(tmp_path, Layout(2, 2))
    running_after: list[bool] = []

    def fail(_: str, index: int, message: Any) -> bool:
        if isinstance(message, TakeOver) and message.tensor == 1:
            if index == 3:
                pod.dead = {("worker", 2), ("worker", 3), ("core", 1)}
                pod.switch.lost("worker", 2, "worker 2 was killed by SIGKILL")
            return True
        if isinstance(message, TakeOver) and index == 0:
            pod.switch.read(TookOver(1, 1, core_ready(0)))  # that of the target, which it had taken before
            running_after.append(pod.switch.running)
        return False

    pod.fail = fail
    pod.run(1)
    assert running_after == [True]
    everybody_is_back(pod, "worker 2 was killed by SIGKILL", [0])
    pod.switch.read(TookOver(1, 1, core_ready(2)))
    assert set(pod.switch.engines) == {0} and pod.switch.obstacle() == "not all of its engines are ready"


def test_a_worker_that_stops_is_given_up_in_the_end(tmp_path: Path) -> None:
    pod = Played(tmp_path, Layout(4, 1))
    pod.dead = {("worker", 3)}
    pod.run(2)
    assert pod.switch.running and pod.switch.timeout(1000.0) < 100
    pod.now += 100
    pod.switch.tick()
    pod.answer()
    assert pod.switch.running, "it has not answered on the way back either"
    pod.now += 100
    pod.switch.tick()
    pod.answer()
    assert pod.given_up == {3: "worker 3 did not answer after a switch of the layout failed"}
    assert not pod.switch.running
    record = pod.said(LayoutState)[-1].last[0]
    assert record.reason == "Resharding took more than 90 s, waiting for worker 3"


def test_a_worker_that_cannot_go_back_is_given_up_at_once(tmp_path: Path) -> None:
    """With its own words; the others do not wait until its time is over."""
    pod = Played(tmp_path, Layout(2, 2))

    def fail(_: str, index: int, message: Any) -> bool:
        if isinstance(message, MoveKv) and index == 0:
            pod.switch.read(Switched(1, 0, "kv", error="a rank of the pod is gone"))
            return True
        if isinstance(message, Finish) and index == 3:
            pod.switch.read(Switched(1, 3, "finish", error="no room for the old arena"))
            return True
        return False

    pod.fail = fail
    pod.run(4)
    assert pod.given_up == {1: "worker 3: no room for the old arena"}
    everybody_is_back(pod, "worker 0: a rank of the pod is gone", [0])


def test_an_api_server_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    """The pod drains: the other one still has streams, which go on in the new layout."""
    pod = Played(tmp_path, Layout(2, 2), servers=3)
    pod.switch.server_ended(2)  # before it begins
    pod.answers = [0]
    pod.run(4)
    assert pod.switch.running and pod.told(Fence) == [("core", 0, Fence(1, 2)), ("core", 1, Fence(1, 2))]
    pod.switch.server_ended(1)  # in the middle
    pod.answer()
    assert pod.told(Fence)[2:] == [("core", 0, Fence(1, 1)), ("core", 1, Fence(1, 1))]
    assert pod.layout == Layout(1, 4) and not pod.switch.running


def test_an_api_server_that_hangs_takes_no_engine_along(tmp_path: Path) -> None:
    pod = Played(tmp_path, Layout(2, 2), servers=2)
    pod.answers = [0]
    pod.fail = lambda kind, index, message: kind == "fenced"  # one fence is missing
    pod.run(4)
    pod.now += 60
    pod.switch.tick()
    pod.fail = lambda kind, index, message: message == Fence(1, 1) and pod.hand_over(index)
    pod.answer()
    assert pod.told(Fence) == [("core", e, Fence(1, server)) for e in (0, 1) for server in (0, 1)]
    assert not pod.given_up
    reason = "Freezing took more than 60 s, waiting for API server 1, engine core 0, engine core 1"
    everybody_is_back(pod, reason, [0, 1])


def test_a_process_that_is_stopped_is_given_up_sooner(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "100"]) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)  # until the system says so
        try:
            pod = Played(tmp_path, Layout(4, 1))
            pod.living = [("worker", 3, process.pid), ("worker", 1, os.getpid())]
            pod.dead = {("worker", 3)}
            pod.run(2)
            for _ in range(2):
                pod.now += 2.0
                pod.switch.tick()
                assert pod.switch.running and not pod.given_up
            pod.now += 2.0
            pod.dead = {("worker", 3), ("core", 3)}
            pod.switch.tick()
            pod.answer()
        finally:
            process.kill()
    reason = "worker 3 is stopped (SIGSTOP), no sign of life for 2.5 s"
    assert pod.given_up == {3: reason}
    everybody_is_back(pod, reason, [0, 1, 2])


def test_a_core_that_does_not_start_disturbs_nobody(tmp_path: Path) -> None:
    pod = Played(tmp_path, Layout(1, 4))

    def fail(kind: str, index: int, _: Any) -> bool:
        if kind == "start" and index == 2:
            pod.switch.lost("core", 2, "engine core 2 exited with status 1")
        return kind == "start"

    pod.fail = fail
    pod.run(1)
    assert not pod.switch.running and not pod.said(Hold) and not pod.said(LayoutChanged)
    assert pod.ended == [1, 2, 3]
    assert pod.said(LayoutState)[-1].last[0].reason == "engine core 2 exited with status 1"
    assert sorted(pod.switch.engines) == [0]


def test_requests_that_would_not_fit_any_more(tmp_path: Path) -> None:
    pod = Played(tmp_path, Layout(2, 2))
    pod.blocks = 10
    pod.run(1)
    everybody_is_back(pod, "an engine of 1 would hold 40 tokens, and requests may have 100", [0, 1])


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"nnodes": 2, "master_addr": "a"}, "the ranks are in several pods, whose layout is fixed"),
        ({"pipeline_parallel_size": 2}, "the model is a pipeline of 2 stages, whose layout is fixed"),
        (
            {"record_step_plans": "/tmp/x"},
            "step plans are recorded (record_step_plans), which are replayed on one layout",
        ),
    ],
)
def test_pods_whose_layout_is_fixed(tmp_path: Path, fields: dict[str, Any], why: str) -> None:
    pod = Played(tmp_path, Layout(2, 2))
    pod.switch._config = pod.switch._config.model_copy(update=fields)
    assert pod.switch.obstacle() == why
    pod.run(4)
    (answer,) = pod.said(LayoutAnswer)
    assert (answer.status, answer.code) == (400, "layout_not_feasible")
    assert answer.error == f"tensor must be 2, the present size, got 4: {why}."


def test_why_a_pod_cannot_switch(tmp_path: Path) -> None:
    pod = Played(tmp_path, Layout(2, 2))
    pod.switch.lost("core", 1, "engine core 1 was killed")
    pod.run(4)
    (answer,) = pod.said(LayoutAnswer)
    assert (answer.status, answer.error) == (
        400,
        "tensor must be 2, the present size, got 4: not all of its engines are ready.",
    )


def on_gpus(pod: Played) -> None:
    for engine, ready in pod.switch.engines.items():
        pod.switch.engines[engine] = msgspec.structs.replace(ready, info={"device": f"cuda:{engine} NVIDIA H200"})


def test_on_gpus_it_is_for_pods_that_were_started_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVERN_GPU_LAYOUT_SWITCH", raising=False)
    pod = Played(tmp_path, Layout(2, 2))
    on_gpus(pod)
    pod.run(4)
    (answer,) = pod.said(LayoutAnswer)
    assert (answer.status, answer.code) == (400, "layout_not_feasible")
    assert answer.error == (
        "tensor must be 2, the present size, got 4: on cuda:0 NVIDIA H200 that is for pods that were started with "
        "KVERN_GPU_LAYOUT_SWITCH=1."
    )


@pytest.mark.parametrize("fails", [False, True], ids=["there", "and back"])
def test_on_gpus_workers_are_told_what_is_to_outlive_the_arena(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setenv("KVERN_GPU_LAYOUT_SWITCH", "1")
    pod = Played(tmp_path, Layout(2, 2))
    on_gpus(pod)

    def fail(_: str, index: int, message: Any) -> bool:
        if fails and isinstance(message, MoveKv) and index == 2:
            pod.switch.read(Switched(1, 2, "kv", error="a rank of the pod is gone"))
            return True
        return False

    pod.fail = fail
    pod.run(4)
    kept = {tuple(map(tuple, reform.kept or [])) for _, _, reform in pod.told(Reform)}
    assert kept == {((7, 3), (7, 3))}, "both blocks of what runs; 6 % of 40 blocks leave no room for a prefix"
    shares = [order.share for _, _, order in pod.told(TakeOver)]
    assert len(shares) == (2 if fails else 1)
    assert all(share.cached == [] for share in shares), "what was not kept is not handed back either"
