"""A worker in a process of its own: plans in, results out, until its parent ends or stops it.

Of several ranks of an engine, all get the same plans and the one that `Layout.answering_rank` names answers; with
KVERN_DEBUG_RANKS=1 all that know the tokens do, so that they can be compared.

Sockets are as in `transport.py`. Where the device computes on its own, a second thread waits for results, so that the
next plan is launched while the one before still runs.
"""

import contextlib
import ctypes
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import msgspec
import zmq

from kvern_engine.config import EngineConfig
from kvern_engine.core.plan import FromWorker, Reset, StepPlan, StepResult, ToWorker, WorkerFailed, WorkerProgress
from kvern_engine.parallel.messages import Switched, SwitchToWorker
from kvern_engine.transport import SUPERVISOR_IN, bind, connect, encode, worker_in, worker_out
from kvern_engine.worker import create_worker
from kvern_engine.worker.switching import Switching

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_POLL_MS = 500  # how often the main thread looks whether the sender has failed
_LAST_WORDS_MS = 5000  # how long a failing worker waits for somebody to hear why

_decode = msgspec.msgpack.Decoder(ToWorker | SwitchToWorker).decode


class _Pending(Protocol):
    def result(self) -> StepResult: ...


class _Outbox:
    """Sends messages and the results of pending steps in the order they are put; owns the socket.

    `threaded`: a thread of its own waits for the results; else `put` does. `answers`: results are sent, not only
    waited for.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", threaded: bool, rank: int, answers: bool = True) -> None:
        self._socket, self._rank, self.answers = socket, rank, answers
        self.failed = threading.Event()
        self._queue: queue.SimpleQueue[FromWorker | _Pending | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="results", daemon=True) if threaded else None
        if self._thread is not None:
            self._thread.start()

    def put(self, item: FromWorker | _Pending) -> None:
        if self._thread is None:
            self._send(item)
        else:
            self._queue.put(item)

    def _send(self, item: FromWorker | _Pending) -> None:
        if isinstance(item, msgspec.Struct):
            self._socket.send(encode(item))
            return
        result = item.result()
        if self.answers:
            self._socket.send(encode(result))

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                self._send(item)
            except Exception as error:
                log.exception("a step failed")
                self._socket.send(encode(_failure(self._rank, "step", error)))
                self.failed.set()
                return

    def close(self) -> None:
        """Send what was put, then stop the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout=_LAST_WORDS_MS / 1000)


def worker_main(config_json: bytes, rank: int, engine: int, socket_dir: str) -> None:
    """Loads the model and runs plans until SIGTERM or the death of the parent process. Ignores SIGINT (Ctrl-C goes to
    the whole group; the parent stops its children in order).

    Sends WorkerProgress and WorkerReady, or WorkerFailed; a Reset is answered with WorkerReady again. Raises SystemExit
    with status 1 after a failure.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit)
    config = EngineConfig.model_validate_json(config_json)
    context: zmq.Context[Any] = zmq.Context()
    plans = bind(context, zmq.PULL, socket_dir, worker_in(rank))
    results = bind(context, zmq.PUSH, socket_dir, worker_out(rank))
    try:
        during = "load"
        try:
            tell = partial(_tell_supervisor, context, socket_dir)
            serving = _load(config, rank, rendezvous_of(socket_dir, engine), results, tell)
            during = "step"
            outbox = _Outbox(results, serving.worker.is_asynchronous, rank, _answers(serving.worker))
            _serve(serving, plans, outbox)
        except Exception as error:
            _log_failure(during, error)
            _last_words(results, _failure(rank, during, error))
            sys.exit(1)
    finally:
        plans.close()
        results.close()
        context.term()


def _load(
    config: EngineConfig,
    rank: int,
    rendezvous: str,
    results: "zmq.Socket[bytes]",
    tell: Callable[[Switched], None],
) -> Switching:
    """What holds the worker from now on, and nobody else: after a switch of the layout the memory of the one before,
    its weights above all, is to be free."""
    worker = create_worker(config, rank, rendezvous)
    ready = worker.load(lambda phase, share: _try_send(results, WorkerProgress(rank, phase, share)))
    return Switching(worker, ready, tell)


def rendezvous_of(socket_dir: str, engine: int) -> str:
    """Where the ranks of an engine meet: KVERN_RENDEZVOUS, else a file in the socket folder."""
    return os.environ.get("KVERN_RENDEZVOUS") or f"file://{Path(socket_dir).absolute() / f'rendezvous-{engine}'}"


def _tell_supervisor(context: "zmq.Context[Any]", socket_dir: str, message: Switched) -> None:
    sock = connect(context, zmq.PUSH, socket_dir, SUPERVISOR_IN, linger_ms=_LAST_WORDS_MS)
    sock.send(encode(message))
    sock.close()


def _answers(worker: Any) -> bool:
    """Whether this rank's results are sent."""
    return bool(worker.answers or (worker.knows_tokens and os.environ.get("KVERN_DEBUG_RANKS") == "1"))


def _serve(serving: Switching, plans: "zmq.Socket[bytes]", outbox: _Outbox) -> None:
    """The loop: launch each plan as it comes. Returns only by an exception."""
    outbox.put(serving.ready)
    while not outbox.failed.is_set():
        if not plans.poll(_POLL_MS):
            continue
        message: ToWorker | SwitchToWorker = _decode(plans.recv())
        if isinstance(message, StepPlan):
            outbox.put(serving.worker.execute(message))
        elif isinstance(message, Reset):
            serving.worker.reset()
            outbox.put(serving.ready)
        else:
            serving.handle(message)
            outbox.answers = _answers(serving.worker)
    outbox.close()
    sys.exit(1)


def _exit(signum: int, frame: FrameType | None) -> None:
    # At once: unwinding would close the socket under the thread that waits for a step. There is nothing to give back
    # that the end of the process does not.
    os._exit(0)


def _failure(rank: int, during: str, error: Exception) -> WorkerFailed:
    known = isinstance(error, ValueError | MemoryError)  # written for users
    return WorkerFailed(rank, during, str(error) if known else f"{type(error).__name__}: {error}")


def _log_failure(during: str, error: Exception) -> None:
    if during == "load" and isinstance(error, ValueError | MemoryError):
        log.error("%s", error)
    else:
        log.error("the worker failed during %s", during, exc_info=error)


def _try_send(socket: "zmq.Socket[bytes]", message: FromWorker) -> None:
    with contextlib.suppress(zmq.Again):  # nobody listens yet
        socket.send(encode(message), zmq.NOBLOCK)


def _last_words(socket: "zmq.Socket[bytes]", message: WorkerFailed) -> None:
    if socket.poll(_LAST_WORDS_MS, zmq.POLLOUT):
        socket.setsockopt(zmq.LINGER, 1000)
        socket.send(encode(message))
