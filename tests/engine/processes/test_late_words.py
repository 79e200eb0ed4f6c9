"""What a supervisor hears or sees late: of an engine after its death, of a core after the switch that it was for."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import zmq

from kvern_engine import children
from kvern_engine.child import ChildSpec
from kvern_engine.children import Child
from kvern_engine.config import EngineConfig
from kvern_engine.ipc import CoreReady, EngineDead
from kvern_engine.listen import listen_tcp
from kvern_engine.parallel.messages import ChangeLayout, Fence
from kvern_engine.signals import Signals
from kvern_engine.socket_dir import SocketDir
from kvern_engine.supervisor import Supervisor
from kvern_engine.transport import SUPERVISOR_IN, bind, connect, core_in, decode_to_core, encode

Heard = tuple[Supervisor, "zmq.Socket[bytes]"]


@pytest.fixture
def make() -> Iterator[Callable[..., Heard]]:
    """Supervisors of two devices that have started nobody, and sockets that they read."""
    with ExitStack() as stack:

        def made(**fields: int) -> Heard:
            folder = str(stack.enter_context(SocketDir()).path)
            listener = stack.enter_context(listen_tcp("127.0.0.1", 0))
            signals = stack.enter_context(Signals())
            config = EngineConfig(model="m", device="sim", **fields)
            supervisor = Supervisor(config, "m", folder, listener, None, signals)
            context: zmq.Context[zmq.Socket[bytes]] = stack.enter_context(zmq.Context())
            for sock in (supervisor._inbox, *supervisor._servers):
                stack.callback(sock.close)
            stack.callback(lambda: [sock.close(0) for sock in supervisor._switch._sockets.values()])
            stack.callback(lambda: children.end_all(supervisor._children, 0.0))
            return supervisor, stack.enter_context(connect(context, zmq.PUSH, folder, SUPERVISOR_IN))

        yield made


def say(supervisor: Supervisor, sock: "zmq.Socket[bytes]", engine: int) -> None:
    sock.send(encode(CoreReady(engine, 8, 16, 64, {"device": "sim"}, {1: 128, 2: 256})))
    assert supervisor._inbox.poll(5000)
    supervisor._read_inbox()


def test_a_dead_engine_stays_dead(make: Callable[..., Heard]) -> None:
    supervisor, sock = make(data_parallel_size=2)
    for engine in range(2):
        say(supervisor, sock, engine)
    assert supervisor._switch.obstacle() is None
    supervisor._engine_died(1, "worker 1 was killed by SIGKILL")
    assert supervisor._switch.obstacle() == "not all of its engines are ready"
    say(supervisor, sock, 1)  # its core was ready just before
    assert supervisor._switch.obstacle() == "not all of its engines are ready"
    assert set(supervisor._switch.engines) == {0}


def started(spec: ChildSpec, fds: object = (), command: tuple[str, ...] = ("sleep", "100")) -> Child:
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.close()
    return Child(spec.kind, spec.index, spec.engine, process, os.pidfd_open(process.pid))


def test_a_core_that_could_not_start_fails_one_switch_only(
    make: Callable[..., Heard], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks again as soon as it is told so: the core's exit is seen only after that."""
    supervisor, sock = make(tensor_parallel_size=2)
    say(supervisor, sock, 0)
    fails = ("sh", "-c", "exit 3")
    monkeypatch.setattr(children, "start", lambda spec, fds: started(spec, fds, fails))
    supervisor._switch.ask(ChangeLayout(0, 1, 1, 1))
    (core,) = supervisor._children
    monkeypatch.setattr(children, "start", started)
    sock.send(encode(EngineDead(1, "there is no such file", last=False)))
    sock.send(encode(ChangeLayout(0, 2, 1, 2)))
    assert supervisor._inbox.poll(5000)
    supervisor._exited(core, children.reap(core))
    supervisor._inbox.poll(500)
    supervisor._read_inbox()
    assert supervisor._switch.running, "the second one"
    assert [record.reason for record in supervisor._switch._records] == ["there is no such file"]
    assert [child.index for child in supervisor._children] == [1] and core not in supervisor._children


def test_an_api_server_that_ends_in_a_drain_does_not_hold_up_a_switch(make: Callable[..., Heard]) -> None:
    supervisor, sock = make(data_parallel_size=2, api_server_count=2)
    for engine in range(2):
        say(supervisor, sock, engine)
    supervisor._draining = True
    supervisor._switch.ask(ChangeLayout(0, 1, 2, 1))
    server = started(ChildSpec("server", 1, 0, supervisor._folder, os.getpid(), "{}"), command=("true",))
    supervisor._children.append(server)
    with zmq.Context() as context, bind(context, zmq.PULL, supervisor._folder, core_in(0)) as core:
        supervisor._exited(server, children.reap(server))
        assert core.poll(5000) and decode_to_core(core.recv()) == Fence(1, 1)
    assert supervisor._failure is None
