"""What a supervisor hears of an engine after its death does not bring it back."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import zmq

from kvern_engine.config import EngineConfig
from kvern_engine.ipc import CoreReady
from kvern_engine.listen import listen_tcp
from kvern_engine.signals import Signals
from kvern_engine.socket_dir import SocketDir
from kvern_engine.supervisor import Supervisor
from kvern_engine.transport import SUPERVISOR_IN, connect, encode


@pytest.fixture
def heard() -> Iterator[tuple[Supervisor, "zmq.Socket[bytes]"]]:
    """A supervisor of two engines that has started nobody, and a socket that it reads."""
    with ExitStack() as stack:
        folder = str(stack.enter_context(SocketDir()).path)
        listener = stack.enter_context(listen_tcp("127.0.0.1", 0))
        signals = stack.enter_context(Signals())
        config = EngineConfig(model="m", device="sim", data_parallel_size=2)
        supervisor = Supervisor(config, "m", folder, listener, None, signals)
        context: zmq.Context[zmq.Socket[bytes]] = stack.enter_context(zmq.Context())
        yield supervisor, stack.enter_context(connect(context, zmq.PUSH, folder, SUPERVISOR_IN))
        supervisor._inbox.close()
        for sock in supervisor._servers:
            sock.close()


def say(supervisor: Supervisor, sock: "zmq.Socket[bytes]", engine: int) -> None:
    sock.send(encode(CoreReady(engine, 8, 16, 64, {"device": "sim"}, {1: 128, 2: 256})))
    assert supervisor._inbox.poll(5000)
    supervisor._read_inbox()


def test_a_dead_engine_stays_dead(heard: tuple[Supervisor, "zmq.Socket[bytes]"]) -> None:
    supervisor, sock = heard
    for engine in range(2):
        say(supervisor, sock, engine)
    assert supervisor._switch.obstacle() is None
    supervisor._engine_died(1, "worker 1 was killed by SIGKILL")
    assert supervisor._switch.obstacle() == "not all of its engines are ready"
    say(supervisor, sock, 1)  # its core was ready just before
    assert supervisor._switch.obstacle() == "not all of its engines are ready"
    assert set(supervisor._switch.engines) == {0}
