"""Sockets and encodings between the processes of an engine, and the two ways a core reaches its worker.

msgspec over ZeroMQ on unix sockets in one private folder (`socket_dir.py`); never pickle. Who is bound where:

    server-{i}.in     PULL, bound by API server i; every core and the supervisor push
    core-{e}.in       PULL, bound by core e; every API server pushes
    worker-{r}.in     PULL, bound by worker r; its core pushes plans
    worker-{r}.out    PUSH, bound by worker r; its core pulls results
    supervisor.in     PULL, bound by the supervisor; every core pushes

Queues are not bounded here: the server bounds the requests in flight, and a full queue would block a core.
"""

import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

from kvern_engine.core.loop import WorkerDiedError
from kvern_engine.core.plan import FromWorker, Reset, StepPlan, StepResult, WorkerFailed, WorkerProgress, WorkerReady
from kvern_engine.ipc import ToCore, ToServer, ToSupervisor

Progress = Callable[[str, float], None]

encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode
decode_to_core: Callable[[bytes], ToCore] = msgspec.msgpack.Decoder(ToCore).decode
decode_to_server: Callable[[bytes], ToServer] = msgspec.msgpack.Decoder(ToServer).decode
decode_to_supervisor: Callable[[bytes], ToSupervisor] = msgspec.msgpack.Decoder(ToSupervisor).decode
decode_from_worker: Callable[[bytes], FromWorker] = msgspec.msgpack.Decoder(FromWorker).decode

SUPERVISOR_IN = "supervisor.in"


def core_in(engine: int) -> str:
    return f"core-{engine}.in"


def server_in(index: int) -> str:
    return f"server-{index}.in"


def worker_in(rank: int) -> str:
    return f"worker-{rank}.in"


def worker_out(rank: int) -> str:
    return f"worker-{rank}.out"


def _socket(context: "zmq.Context[zmq.Socket[bytes]]", kind: int, linger_ms: int) -> "zmq.Socket[bytes]":
    sock = context.socket(kind)
    sock.setsockopt(zmq.SNDHWM, 0)
    sock.setsockopt(zmq.RCVHWM, 0)
    sock.setsockopt(zmq.LINGER, linger_ms)
    sock.setsockopt(zmq.RECONNECT_IVL, 10)  # peers start at the same time: look again soon, then less often
    sock.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
    return sock


def bind(context: "zmq.Context[zmq.Socket[bytes]]", kind: int, folder: str, name: str) -> "zmq.Socket[bytes]":
    """A PULL or PUSH socket bound to `name` in the socket folder."""
    sock = _socket(context, kind, linger_ms=0)
    sock.bind(f"ipc://{Path(folder) / name}")
    return sock


def connect(
    context: "zmq.Context[zmq.Socket[bytes]]", kind: int, folder: str, name: str, linger_ms: int = 0
) -> "zmq.Socket[bytes]":
    """A socket connected to `name`, which need not be bound yet. `linger_ms`: how long closing waits for the peer."""
    sock = _socket(context, kind, linger_ms)
    sock.connect(f"ipc://{Path(folder) / name}")
    return sock


def drain(sock: "zmq.Socket[bytes]", limit: int = 4096) -> list[bytes]:
    """The messages that have arrived, without waiting; at most `limit`."""
    messages: list[bytes] = []
    try:
        while len(messages) < limit:
            messages.append(sock.recv(zmq.NOBLOCK))
    except zmq.Again:
        pass
    return messages


class ProcessWorkerClient:
    """WorkerClient of a worker in another process, watched through a pidfd: its death is seen at once.

    `rank` names its sockets, `pid` its process. Raises WorkerDiedError from every call once it is gone.
    """

    overlaps = True  # a submitted plan is computed while the core goes on

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", folder: str, rank: int, engine: int, pid: int
    ) -> None:
        self._rank, self._pid = rank, pid
        self._plans = connect(context, zmq.PUSH, folder, worker_in(rank))
        self._results = connect(context, zmq.PULL, folder, worker_out(rank))
        self._poller = zmq.Poller()
        self._poller.register(self._results, zmq.POLLIN)
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            raise self._died() from None
        self._poller.register(self._pidfd, zmq.POLLIN)
        self._plans.send(encode(Reset(engine)))

    def _died(self) -> WorkerDiedError:
        return WorkerDiedError(self._rank, f"its process (pid {self._pid}) is gone")

    @property
    def alive(self) -> bool:
        return all(source != self._pidfd for source, _ in self._poller.poll(0))

    def watch(self, poller: zmq.Poller) -> None:
        """Wake `poller` when the worker dies (for a core that is idle)."""
        poller.register(self._pidfd, zmq.POLLIN)

    def wait_ready(self, progress: Progress | None = None) -> WorkerReady:
        """Block until the worker has loaded; passes its progress on. Raises ValueError with the worker's words where it
        cannot load, WorkerDiedError where it is gone."""
        while True:
            message = self._receive(None)
            if isinstance(message, WorkerReady):
                return message
            if isinstance(message, WorkerProgress) and progress is not None:
                progress(message.phase, message.fraction)

    def submit(self, plan: StepPlan) -> None:
        self._plans.send(encode(plan), zmq.NOBLOCK)

    def collect(self, timeout: float | None = None) -> StepResult | None:
        """The result of the oldest submitted plan; None after `timeout` seconds (None: wait for it)."""
        message = self._receive(timeout)
        while message is not None and not isinstance(message, StepResult):  # it says hello again after a Reset
            message = self._receive(timeout)
        return message

    def _receive(self, timeout: float | None) -> StepResult | WorkerReady | WorkerProgress | None:
        try:
            data = self._results.recv(zmq.NOBLOCK)
        except zmq.Again:
            events = dict(self._poller.poll(None if timeout is None else max(0, int(timeout * 1000))))
            if not events:
                return None
            # Dead? What it said last may still be on its way.
            if self._results not in events and not self._results.poll(50):
                raise self._died() from None
            data = self._results.recv()
        message = decode_from_worker(data)
        if isinstance(message, WorkerFailed):
            if message.during == "load":
                raise ValueError(message.message)  # the words are for the user, who has to change something
            raise WorkerDiedError(message.rank, message.message)
        return message

    def close(self) -> None:
        """Close the sockets; the worker lives on."""
        self._plans.close()
        self._results.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


class Pending(Protocol):
    """A step that was launched; `result` reads it back and may block."""

    def result(self) -> StepResult: ...


class WorkerLike(Protocol):
    """What Worker and SimWorker have in common. `is_asynchronous`: `execute` returns before the step is over."""

    @property
    def is_asynchronous(self) -> bool: ...

    def load(self, progress: Progress | None = None) -> WorkerReady: ...

    def execute(self, plan: StepPlan) -> Pending: ...


class InprocWorkerClient:
    """WorkerClient of a worker in this process: a plan is a direct call, its result is read back on collect."""

    def __init__(self, worker: WorkerLike, rank: int = 0) -> None:
        self._worker, self._rank = worker, rank
        self._pending: deque[Pending] = deque()
        self.alive = True
        self.overlaps = worker.is_asynchronous

    def wait_ready(self, progress: Progress | None = None) -> WorkerReady:
        """Load weights and size the arena; raises what the worker raises (ValueError, MemoryError: for people)."""
        return self._worker.load(progress)

    def submit(self, plan: StepPlan) -> None:
        try:
            self._pending.append(self._worker.execute(plan))
        except Exception as error:
            raise self._died(error) from error

    def collect(self, timeout: float | None = None) -> StepResult | None:
        """The result of the oldest submitted plan; `timeout` is not kept, since a direct call cannot be cut short."""
        if not self._pending:
            return None
        try:
            return self._pending.popleft().result()
        except Exception as error:
            raise self._died(error) from error

    def _died(self, error: Exception) -> WorkerDiedError:
        self.alive = False
        return WorkerDiedError(self._rank, f"{type(error).__name__}: {error}")

    def watch(self, poller: zmq.Poller) -> None:
        """Nothing to watch: the worker dies with this process."""

    def close(self) -> None:
        self._pending.clear()
