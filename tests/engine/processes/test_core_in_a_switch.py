"""An engine core in switches of the layout: what it hears early, late, or of another switch."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvern_engine import core_process
from kvern_engine.config import EngineConfig
from kvern_engine.core.handed import HeldChoice, HeldRequest, Share
from kvern_engine.core.loop import WorkerDiedError
from kvern_engine.core.plan import WorkerReady
from kvern_engine.core_process import CoreProcess
from kvern_engine.ipc import AddRequest, EngineDead, Outputs
from kvern_engine.parallel.messages import Fence, Go, Handed, Left, TakeOver, TookOver
from kvern_engine.request import SamplingParams
from kvern_engine.transport import (
    SUPERVISOR_IN,
    bind,
    connect,
    core_in,
    decode_to_server,
    decode_to_supervisor,
    encode,
    server_in,
)

TINY = str(Path(__file__).parents[1] / "models_data/tiny-kjv")
READY = WorkerReady(0, 64, 16, 512, 1000, 1000, "sim", "float32", max_num_seqs=8)


class Workers:
    """Stands for the workers of a layout: there, and idle."""

    def __init__(self, *args: Any, **fields: Any) -> None: ...

    def watch(self, poller: zmq.Poller) -> None: ...

    def wait_ready(self) -> WorkerReady:
        return READY

    def close(self) -> None: ...


def request(name: str) -> AddRequest:
    return AddRequest(name, 0, [5, 6, 7], SamplingParams(max_tokens=4), 0.0)


class Around:
    """A core that serves, and those around it; what is said to it is read in this order."""

    def __init__(self, folder: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._supervisor = bind(self._context, zmq.PULL, folder, SUPERVISOR_IN)
        self._server = bind(self._context, zmq.PULL, folder, server_in(0))
        config = EngineConfig(model=TINY, device="sim", distributed_executor_backend="uni")
        self.process = CoreProcess(config, 0, folder, (), 1)
        self.process.start()
        self._to_core = connect(self._context, zmq.PUSH, folder, core_in(0))
        self.at_supervisor()

    @property
    def core(self) -> Any:
        assert self.process._core is not None
        return self.process._core

    def say(self, *messages: Any) -> None:
        for message in messages:
            self._to_core.send(encode(message))

    def receive(self) -> int | None:
        assert self.process._inbox.poll(5000)
        return self.process._receive(self.core)

    def at_supervisor(self) -> list[Any]:
        return [decode_to_supervisor(data) for data in self._all(self._supervisor)]

    def at_server(self) -> list[Any]:
        return [decode_to_server(data) for data in self._all(self._server)]

    @staticmethod
    def _all(sock: "zmq.Socket[bytes]") -> list[bytes]:
        found = []
        while sock.poll(200):
            found.append(sock.recv())
        return found

    def close(self) -> None:
        process = self.process
        for sock in (process._inbox, *process._servers, process._supervisor):
            sock.close(0)
        process._context.term()
        for sock in (self._supervisor, self._server, self._to_core):
            sock.close(0)
        self._context.term()


@pytest.fixture
def around(monkeypatch: pytest.MonkeyPatch) -> Iterator[Around]:
    monkeypatch.setattr(core_process, "group_client", Workers)
    with tempfile.TemporaryDirectory(prefix="kvern-") as folder:
        made = Around(folder)
        yield made
        made.close()


def order(switch: int, *names: str) -> TakeOver:
    held = [HeldRequest(request(name), [HeldChoice(0, "waiting")]) for name in names]
    return TakeOver(switch, 1, 1, [(0, None, "")], READY, Share(0, held))


def test_fences_of_the_next_switch_may_come_before_the_end_of_this_one(around: Around) -> None:
    """From API servers that were told of it while the supervisor's last word was still on its way to the core."""
    around.say(Fence(1, 0))
    assert around.receive() == 1
    around.say(order(1), Fence(2, 0), Go(1))
    around.process._leave(around.core, 1)
    assert around.process._receive(around.core) == 2
    around.say(order(2), Go(2))
    around.process._leave(around.core, 2)
    assert around.process._receive(around.core) is None
    told = around.at_supervisor()
    assert [message.switch for message in told if isinstance(message, Handed)] == [1, 2]


def test_what_belongs_to_another_switch_is_not_taken(around: Around) -> None:
    around.say(Fence(2, 0))
    assert around.receive() == 2
    around.say(order(1, "stale"), Go(1), order(2, "a"), order(1, "stale"), Fence(2, 0), Go(2))
    around.process._leave(around.core, 2)
    assert [message.switch for message in around.at_supervisor() if isinstance(message, TookOver)] == [2]
    assert list(around.core.scheduler._requests) == ["a"]
    assert around.process._receive(around.core) is None, "the server's own fence, for which the supervisor had spoken"


def test_the_last_steps_are_reported_before_a_core_leaves(around: Around) -> None:
    around.say(request("a"))
    around.receive()
    around.core.step()
    around.at_server()
    around.say(order(1), Go(1))
    around.process._leave(around.core, 1)
    outputs, left = around.at_server()
    assert isinstance(outputs, Outputs) and outputs.stats is not None and left == Left(1, 0)
    assert outputs.stats.iteration_tokens == [3]


def test_of_a_core_that_ends_in_a_switch_the_supervisor_tells(around: Around, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may be another engine's at API servers that have not heard of the new layout."""

    def gone(*args: Any, **fields: Any) -> None:
        raise WorkerDiedError(0, "its process is gone")

    monkeypatch.setattr(core_process, "group_client", gone)
    around.say(order(1), Go(1))
    with pytest.raises(WorkerDiedError):
        around.process._leave(around.core, 1)
    around.process.give_up("worker 0 died")
    assert not [message for message in around.at_server() if isinstance(message, EngineDead)]
    assert EngineDead(0, "worker 0 died", last=False) in around.at_supervisor()
