"""How an engine core reaches its workers: in processes of their own, here or in another pod, or in this process.

`GroupWorkerClient` speaks to all ranks of one engine: the same plan to each, encoded once; results from the rank that
answers. It notices when a rank dies (pidfd, or its connection closes) or hangs (the state of its process; ZeroMQ's
heartbeats, which the other side's I/O thread answers without Python), and says which and why. What is said is in
`core/plan.py`, the sockets are in `transport.py`, what a death means is decided by the core and the supervisor.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from kvern_engine.config import EngineConfig
from kvern_engine.core.loop import WorkerDiedError
from kvern_engine.core.plan import FromWorker, Reset, StepPlan, StepResult, WorkerFailed, WorkerProgress, WorkerReady
from kvern_engine.parallel.layout import Layout
from kvern_engine.transport import connect, decode_from_worker, encode, worker_in, worker_out

Progress = Callable[[str, float], None]

HEARTBEAT_SECONDS = 0.5
# So long a process may be stopped, or a rank in another pod silent: its engine must end within 5 s.
SILENCE_SECONDS = 2.5
# A process of this pod that is not stopped and yet answers no heartbeat only lacks a processor, as a rule: on a machine
# with ten times more work than cores an I/O thread was seen to wait for seconds.
STARVED_SECONDS = 20.0
_STATE_SECONDS = 0.25  # how often the state of a process is looked at
_SLICE_MS = 100  # how often the ranks are looked after while a result is awaited
_VERDICT_SECONDS = 0.3  # a rank that fails may only have lost another one: so long the culprit has time to show
_SECOND_HAND = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "socket", "distributed")


@dataclass(frozen=True)
class Peer:
    """A rank of the engine. `pid`: its process, None where it is in another pod, which `place` then names."""

    rank: int
    pid: int | None
    place: str = ""


def merge_ready(ready: Sequence[WorkerReady]) -> WorkerReady:
    """What the ranks of an engine can do together: the least of their limits, the sum of their bytes, the time of the
    slowest; the rest is the first one's."""
    first = ready[0]
    phases = dict.fromkeys(phase for one in ready for phase in one.load_seconds)
    return msgspec.structs.replace(
        first,
        num_blocks=min(one.num_blocks for one in ready),
        max_model_len=min(one.max_model_len for one in ready),
        max_num_seqs=min(one.max_num_seqs for one in ready),
        max_num_batched_tokens=min(one.max_num_batched_tokens for one in ready),
        kv_bytes=sum(one.kv_bytes for one in ready),
        weight_bytes=sum(one.weight_bytes for one in ready),
        load_seconds={phase: max(one.load_seconds.get(phase, 0.0) for one in ready) for phase in phases},
    )


def disagreement(step: int, results: dict[int, StepResult]) -> str | None:
    """Which ranks gave other tokens than the first of them, in words; None where all agree."""
    (first, expected), *others = results.items()
    for rank, result in others:
        if result.rows != expected.rows:
            return f"ranks {first} and {rank} computed different rows at step {step}"
        for row, ours, theirs in zip(expected.rows, expected.tokens, result.tokens, strict=True):
            if ours != theirs:
                return (
                    f"ranks disagree at step {step}: row {row} got {ours} at rank {first} and {theirs} at rank {rank}"
                )
    return None


class WorkerMissingError(WorkerDiedError):
    """Workers of an engine did not come to life in time."""

    def __init__(self, missing: Sequence[int], of: int, seconds: float) -> None:
        named = f"worker{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        super().__init__(missing[0], f"{named} of {of} did not join: nothing was heard for {seconds:.0f} s")
        self.args = (self.reason,)


class _Link:
    """The sockets to one rank, and what is known of its life."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", folder: str, peer: Peer, met: bool = False) -> None:
        self.rank, self._pid, self._place = peer.rank, peer.pid, peer.place
        self.heard = met  # it has said something, or answered a connection
        self.ready: WorkerReady | None = None  # what it said last when it had loaded
        self.failure: str | None = None  # its own last words
        self.failed_to_load = False
        self._lost = False
        self._looked = 0.0  # when the state of its process was read last
        self._stopped_since: float | None = None
        self.pidfd = -1
        if peer.pid is not None:
            try:
                self.pidfd = os.pidfd_open(peer.pid)
            except ProcessLookupError:
                raise WorkerDiedError(peer.rank, self._gone()) from None
        self.plans = connect(context, zmq.PUSH, folder, worker_in(peer.rank))
        self.results = connect(context, zmq.PULL, folder, worker_out(peer.rank), heartbeat=self._beats(peer.pid))
        self._monitor = self.results.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)

    @staticmethod
    def _beats(pid: int | None) -> tuple[int, int]:
        silence = SILENCE_SECONDS if pid is None else STARVED_SECONDS
        return int(HEARTBEAT_SECONDS * 1000), int(silence * 1000)

    def _gone(self) -> str:
        return f"its process (pid {self._pid}) is gone"

    @property
    def has_ended(self) -> bool:
        """Its process is known to be gone (only where it is one of this pod)."""
        if self.pidfd < 0:
            return False
        poller = zmq.Poller()
        poller.register(self.pidfd, zmq.POLLIN)
        return bool(poller.poll(0))

    def cause(self) -> str | None:
        """Why this rank can no longer be reckoned with, its own words apart; None while it lives."""
        if self.has_ended:
            return self._gone()
        if self.heard and self._stopped_for_long():
            return f"its process (pid {self._pid}) is stopped (SIGSTOP), no sign of life for {SILENCE_SECONDS:g} s"
        self._watch_connection()
        if not self._lost:
            return None
        if self._pid is None:
            return f"its connection to {self._place} is lost (the pod has ended, hangs or cannot be reached)"
        if self.pidfd >= 0 and self._wait_for_end(0.2):
            return self._gone()
        return f"its process (pid {self._pid}) hangs, no sign of life for {STARVED_SECONDS:g} s"

    def _stopped_for_long(self) -> bool:
        if self._pid is None:
            return False
        now = time.monotonic()
        if now - self._looked >= _STATE_SECONDS:
            self._looked = now
            if not is_stopped(self._pid):
                self._stopped_since = None
            elif self._stopped_since is None:
                self._stopped_since = now
        return self._stopped_since is not None and now - self._stopped_since >= SILENCE_SECONDS

    def _watch_connection(self) -> None:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.heard = True
            elif self.heard:
                self._lost = True

    def _wait_for_end(self, seconds: float) -> bool:
        poller = zmq.Poller()
        poller.register(self.pidfd, zmq.POLLIN)
        return bool(poller.poll(int(seconds * 1000)))

    def receive(self) -> StepResult | WorkerReady | WorkerProgress | None:
        """The next message that is here; keeps what must not be missed, whoever reads it: `ready` and `failure`."""
        try:
            message: FromWorker = decode_from_worker(self.results.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None
        self.heard = True
        if isinstance(message, WorkerFailed):
            self.failure, self.failed_to_load = message.message, message.during == "load"
            return None
        if isinstance(message, WorkerReady):
            self.ready = message
        return message

    def close(self) -> None:
        self.results.disable_monitor()
        self._monitor.close()
        self.plans.close()
        self.results.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def _second_hand(words: str) -> bool:
    """Whether a rank's last words may only tell that it has lost another one."""
    return any(sign in words.lower() for sign in _SECOND_HAND)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped (SIGSTOP) or traced; it then answers nobody and sees no SIGTERM."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


class GroupWorkerClient:
    """WorkerClient of all ranks of an engine, in rank order. Each call raises WorkerDiedError once one of them is gone.

    `answering` is the rank whose results count. `compared`: further ranks that answer; another token than the answering
    rank's at any of them ends the engine. `join_seconds`: how long a rank may be silent before it is given up. `met`:
    the ranks have loaded and been heard by others, so that one that is stopped now is not one that is slow to start.
    """

    overlaps = True  # a submitted plan is computed while the core goes on

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        folder: str,
        engine: int,
        peers: Sequence[Peer],
        answering: int | None = None,
        compared: Sequence[int] = (),
        join_seconds: float = 300.0,
        met: bool = False,
    ) -> None:
        self._join_seconds = join_seconds
        self._links: list[_Link] = []
        try:
            for peer in peers:
                self._links.append(_Link(context, folder, peer, met))
        except WorkerDiedError:
            self.close()
            raise
        by_rank = {link.rank: link for link in self._links}
        self._answering = by_rank[peers[0].rank if answering is None else answering]
        self._compared = [by_rank[rank] for rank in compared if rank != self._answering.rank]
        self._silent = [link for link in self._links if link is not self._answering and link not in self._compared]
        self._plans = [link.plans for link in self._links]
        self._waiting = zmq.Poller()
        self._waiting.register(self._answering.results, zmq.POLLIN)
        self._send(encode(Reset(engine)))

    # ------------------------------------------------------------ life

    @property
    def alive(self) -> bool:
        return not any(link.has_ended for link in self._links)

    def watch(self, poller: zmq.Poller) -> None:
        """Wake `poller` when a worker of this pod dies (for a core that is idle; `check` tells the rest)."""
        for link in self._links:
            if link.pidfd >= 0:
                poller.register(link.pidfd, zmq.POLLIN)

    def wake_on(self, sock: "zmq.Socket[bytes]") -> None:
        """Let `collect` return early, without a result, when a message has come to `sock`: a pipeline's first stage may
        be idle, and what has come could begin at once."""
        self._waiting.register(sock, zmq.POLLIN)

    def check(self) -> None:
        """Raises WorkerDiedError where a rank has failed, died or does not answer any more."""
        for link in self._silent:
            while link.receive() is not None:
                pass  # it says hello again after a Reset
        if any(link.failure is not None or link.cause() is not None for link in self._links):
            raise self._verdict()

    def _verdict(self) -> WorkerDiedError:
        """Who is to blame: a rank that is gone without a word before one that says why, and that before one which only
        reports that it has lost another."""
        patience = _VERDICT_SECONDS if len(self._links) > 1 else 0.05
        deadline = time.monotonic() + patience
        while True:
            for link in self._links:
                while link.receive() is not None:
                    pass
                cause = None if link.failure else link.cause()
                if cause is not None and not (time.monotonic() < deadline and link.results.poll(20)):
                    return WorkerDiedError(link.rank, cause)
            failed = [(link.rank, link.failure) for link in self._links if link.failure]
            original = [(rank, words) for rank, words in failed if not _second_hand(words)]
            left = deadline - time.monotonic()
            if (original and left < patience / 2) or (failed and left <= 0):
                return WorkerDiedError(*(original or failed)[0])
            time.sleep(0.02)

    # ------------------------------------------------------------ start

    def wait_ready(self, progress: Progress | None = None) -> WorkerReady:
        """Block until every rank has loaded; passes the answering one's progress on. Raises ValueError with the words
        of a rank that cannot load, WorkerDiedError naming those that are gone or were never heard of."""
        begin = time.monotonic()
        poller = zmq.Poller()
        self.watch(poller)
        for link in self._links:
            poller.register(link.results, zmq.POLLIN)
        # What is counted is what the links have kept: `check` reads from them too.
        while len(ready := [link.ready for link in self._links if link.ready is not None]) < len(self._links):
            poller.poll(_SLICE_MS)
            for link in self._links:
                while (message := link.receive()) is not None:
                    if isinstance(message, WorkerProgress) and progress is not None and link is self._answering:
                        progress(message.phase, message.fraction)
            try:
                self.check()
            except WorkerDiedError as error:
                if error.rank in [link.rank for link in self._links if link.failed_to_load]:
                    raise ValueError(error.reason) from None  # for the user, who has to change something
                raise
            self._check_joined(time.monotonic() - begin)
        for link in self._links:
            link.ready = None  # a Reset is answered anew
        return merge_ready(ready)

    def _check_joined(self, waited: float) -> None:
        missing = [link.rank for link in self._links if not link.heard]
        if missing and waited > self._join_seconds:
            raise WorkerMissingError(missing, len(self._links), waited)

    # ------------------------------------------------------------ steps

    def submit(self, plan: StepPlan) -> None:
        self._send(encode(plan))

    def _send(self, data: bytes) -> None:
        for sock in self._plans:
            sock.send(data, zmq.NOBLOCK)

    def collect(self, timeout: float | None = None) -> StepResult | None:
        """The result of the oldest submitted plan; None after `timeout` seconds (None: wait for it), or as `wake_on`
        says."""
        result = self._next_result(self._answering, timeout, self._waiting)
        if result is not None and self._compared:
            self._compare(result)
        return result

    def _next_result(self, link: _Link, timeout: float | None, waiting: zmq.Poller | None = None) -> StepResult | None:
        """`waiting`: what to wait for beside the link's results; anything else that comes ends the wait."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            message = link.receive()
            if isinstance(message, StepResult):
                return message
            if message is None:
                left = _SLICE_MS if deadline is None else int((deadline - time.monotonic()) * 1000)
                wait = min(max(left, 0), _SLICE_MS)
                came = waiting.poll(wait) if waiting is not None else [(link.results, 0)] * link.results.poll(wait)
                if link.failure is not None or not came:
                    self.check()
                    if left <= 0:
                        return None
                elif link.results not in dict(came):
                    return None

    def _compare(self, result: StepResult) -> None:
        results = {self._answering.rank: result}
        for link in self._compared:
            other = self._next_result(link, None)
            assert other is not None
            results[link.rank] = other
        difference = disagreement(result.step, results)
        if difference is not None:
            raise WorkerDiedError(next(r for r, other in results.items() if other.tokens != result.tokens), difference)

    def close(self) -> None:
        """Close the sockets; the workers live on."""
        for link in self._links:
            link.close()
        self._links = []


def group_client(
    context: "zmq.Context[zmq.Socket[bytes]]",
    folder: str,
    config: EngineConfig,
    engine: int,
    peers: Sequence[Peer],
    met: bool = False,
) -> GroupWorkerClient:
    """The client of the workers of `engine` under this configuration, which others have `met` before. With
    KVERN_DEBUG_RANKS=1 the ranks that know an answer are compared."""
    layout = Layout.of(config)
    debug = os.environ.get("KVERN_DEBUG_RANKS") == "1"
    return GroupWorkerClient(
        context,
        folder,
        engine,
        peers,
        answering=layout.answering_rank(engine),
        compared=layout.stage_ranks(engine, layout.pipeline - 1) if debug else (),
        join_seconds=config.distributed_timeout_seconds,
        met=met,
    )


class Pending(Protocol):
    """A step that was launched; `result` reads it back and may block."""

    def result(self) -> StepResult: ...


class WorkerLike(Protocol):
    """What Worker and SimWorker have in common. `is_asynchronous`: `execute` returns before the step is over."""

    @property
    def is_asynchronous(self) -> bool: ...

    def load(self, progress: Progress | None = None) -> WorkerReady: ...

    def execute(self, plan: StepPlan) -> Pending: ...


class NoWorker:
    """WorkerClient of a core that is still to be told of its workers."""

    overlaps = True
    alive = False

    def submit(self, plan: StepPlan) -> None:
        raise RuntimeError("the core has no workers yet")

    def collect(self, timeout: float | None = None) -> StepResult | None:
        """Nothing comes from nobody."""
        return None

    def close(self) -> None:
        """Nothing to let go of."""


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

    def check(self) -> None:
        """Nothing to look after, either."""

    def close(self) -> None:
        self._pending.clear()
