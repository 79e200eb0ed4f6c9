"""The supervisor of a pod that does not lead: it joins the leading one, runs its share of the workers, ends with it.

No API server and no core here; its port answers the kubelet's probes (`follower_port.py`). A worker that dies is
reported; the leader decides what ends because of it. SIGTERM only asks: the leader's clients may still need these
workers, so the pod stays until the leader says stop, is gone, or the drain's time is over.

Exit status: 0 when the leader has stopped, 1 when it could not join or the leader was lost, 130 after a second signal.
"""

import contextlib
import logging
import os
import time

import zmq

from kvern_engine import __version__, children, logs
from kvern_engine.children import Child, Ending, how_it_ended
from kvern_engine.config import EngineConfig
from kvern_engine.follower_port import FollowerPort
from kvern_engine.listen import ListenError, listen_tcp
from kvern_engine.nodes import (
    BEAT_SECONDS,
    AddressError,
    Beat,
    EndEngine,
    Endpoints,
    Join,
    RankDied,
    Refused,
    Stop,
    ToLeader,
    Welcome,
    decode_to_follower,
    encode,
    free_port,
    own_address,
    ranks_of_node,
    resolve,
    shared_settings,
    url,
)
from kvern_engine.parallel.layout import Layout
from kvern_engine.signals import Signals
from kvern_engine.socket_dir import SocketDir
from kvern_engine.start_worker import start_worker
from kvern_engine.transport import WORKER_TCP, read_endpoint, worker_in, worker_out

log = logging.getLogger(__name__)

_LEADER_SILENT_SECONDS = 5.0
_STOP_PATIENCE = 3.0


class JoinError(Exception):
    """This pod cannot take part; the text is for the user."""


def follow(config: EngineConfig) -> int:
    """Run the workers of this pod until the leader ends. Raises JoinError."""
    with contextlib.ExitStack() as stack:
        folder, signals = stack.enter_context(SocketDir()), stack.enter_context(Signals())
        follower = Follower(config, str(folder.path), signals)
        try:
            listener = stack.enter_context(listen_tcp(config.host, config.port))
        except ListenError as error:  # several on one machine: only a kubelet needs an answer
            log.warning("probes get no answer from this pod", extra=logs.fields(reason=error))
        else:
            port = FollowerPort(listener, str(config.master_addr), lambda: follower.runs_ranks)
            stack.callback(port.close)
        return follower.run()


class Follower:
    """One pod beside the leading one; `run` returns its exit status."""

    def __init__(self, config: EngineConfig, folder: str, signals: Signals) -> None:
        self._config, self._folder, self._signals = config, folder, signals
        self._layout = Layout.of(config)
        self._ranks = ranks_of_node(self._layout, config.nnodes, config.node_rank)
        self._children: list[Child] = []
        self._ending = Ending()
        self._address = ""
        self._heard = self._beat_at = 0.0
        self._rendezvous: dict[int, str] | None = None
        self._said_endpoints = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._leader = self._context.socket(zmq.DEALER)
        self._leader.setsockopt(zmq.LINGER, 500)
        self._leader.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._leader.setsockopt(zmq.ROUTING_ID, f"{config.node_rank}-{os.urandom(8).hex()}".encode())

    @property
    def runs_ranks(self) -> bool:
        """Its workers are there and the leader knows where."""
        return self._said_endpoints

    def run(self) -> int:
        try:
            self._join()
            if self._rendezvous is None:
                return 0  # a signal came first
            self._start_workers(self._rendezvous)
            return self._watch()
        finally:
            children.end_all(self._children, 0.0)
            self._leader.close()
            self._context.term()

    # ------------------------------------------------------------ joining

    def _join(self) -> None:
        config, began = self._config, time.monotonic()
        target = self._find_leader(began)
        self._address = config.node_addr or own_address(target)
        if ":" in target:
            self._leader.setsockopt(zmq.IPV6, 1)
        self._leader.connect(url(str(config.master_addr), config.master_port))  # by name: it may move
        join = Join(config.node_rank, self._address, free_port(self._address), __version__, shared_settings(config))
        log.info("joining", extra=logs.fields(node=config.node_rank, address=self._address, leader=target))
        while self._rendezvous is None and not self._signals.received:
            if time.monotonic() - began > config.distributed_timeout_seconds and not self._heard:
                raise JoinError(
                    f"node 0 at {config.master_addr} ({target}) port {config.master_port} did not answer within "
                    f"{time.monotonic() - began:.0f} s: is it running, with --node-rank 0 and the same --master-port?"
                )
            if not self._heard or time.monotonic() - self._heard > BEAT_SECONDS:
                self._say(join)
            self._read(BEAT_SECONDS)
            if self._heard and time.monotonic() - self._heard > _LEADER_SILENT_SECONDS:
                raise JoinError(f"node 0 at {config.master_addr} was not heard of for {_LEADER_SILENT_SECONDS:.0f} s")
            if self._heard:
                self._beat()

    def _find_leader(self, began: float) -> str:
        """The leader's address; its name may take a while to be known."""
        while True:
            try:
                return resolve(str(self._config.master_addr))
            except AddressError as error:
                waited = time.monotonic() - began
                if waited > self._config.distributed_timeout_seconds or self._signals.received:
                    raise JoinError(f"{error}; waited {waited:.0f} s") from None
            self._signals.wait(1.0)

    def _start_workers(self, rendezvous: dict[int, str]) -> None:
        self._heard = time.monotonic()
        for local, rank in enumerate(self._ranks):
            engine = self._layout.coordinates(rank)[0]
            place = {WORKER_TCP: self._address, "KVERN_BIND_ADDRESS": self._address}
            if engine in rendezvous:
                place["KVERN_RENDEZVOUS"] = rendezvous[engine]
            self._children.append(
                start_worker(self._config, rank, engine, self._folder, local, len(self._ranks), place)
            )

    # ------------------------------------------------------------ life

    def _watch(self) -> int:
        """Until the leader stops (0), is lost (1), or nobody waits any longer."""
        config, leave_at = self._config, None
        while True:
            if len(self._signals.received) > 1:
                return 130
            if self._signals.received and leave_at is None:
                limit = config.drain_timeout_seconds + config.shutdown_grace_seconds
                leave_at = time.monotonic() + limit
                log.info("waiting for the leader to drain", extra=logs.fields(at_most_seconds=limit))
            if not self._turn():
                children.end_all(self._children, _STOP_PATIENCE)
                log.info("stopped")
                return 0
            now = time.monotonic()
            if now - self._heard > _LEADER_SILENT_SECONDS:
                log.error(
                    "the leader is lost: this pod ends",
                    extra=logs.fields(leader=config.master_addr, silent_seconds=round(now - self._heard, 1)),
                )
                return 1
            if leave_at is not None and now > leave_at:
                log.warning("the leader did not stop in time: this pod ends")
                return 0
            self._beat()
            self._say_endpoints()

    def _turn(self) -> bool:
        """Wait for events and act on them; False once the leader has stopped."""
        living = {child.pidfd: child for child in self._children if child.status is None}
        poller = zmq.Poller()
        poller.register(self._leader, zmq.POLLIN)
        poller.register(self._signals.fileno(), zmq.POLLIN)
        for pidfd in living:
            poller.register(pidfd, zmq.POLLIN)
        wait = BEAT_SECONDS if self._said_endpoints else 0.05
        ready = dict(poller.poll(int(min(wait, self._ending.wait(wait)) * 1000)))
        self._signals.clear()
        for child in [living[source] for source in ready if source in living]:
            how = how_it_ended(children.reap(child))
            if child not in self._ending:
                log.error("a worker died", extra=logs.fields(rank=child.index, how=how))
                self._say(RankDied(self._config.node_rank, child.index, how))
        self._ending.finish()
        return self._read(0)

    def _read(self, seconds: float) -> bool:
        """Act on what the leader has said, waiting at most so long for the first; False once it has stopped."""
        if not self._leader.poll(int(seconds * 1000)):
            return True
        while self._leader.poll(0):
            message = decode_to_follower(self._leader.recv())
            self._heard = time.monotonic()
            if isinstance(message, Refused):
                raise JoinError(f"the leader at {self._config.master_addr} refused this pod: {message.reason}")
            if isinstance(message, Stop):
                return False
            if isinstance(message, Welcome) and self._rendezvous is None:
                self._rendezvous = message.rendezvous
            elif isinstance(message, EndEngine):
                self._ending.begin([c for c in self._children if c.engine == message.engine])
        return True

    def _say(self, message: ToLeader) -> None:
        self._leader.send(encode(message), zmq.NOBLOCK)

    def _beat(self) -> None:
        now = time.monotonic()
        if now >= self._beat_at:
            self._beat_at = now + BEAT_SECONDS
            self._say(Beat(self._config.node_rank))

    def _say_endpoints(self) -> None:
        """Once all workers are bound, where."""
        if self._said_endpoints:
            return
        names = [name for rank in self._ranks for name in (worker_in(rank), worker_out(rank))]
        found = {name: read_endpoint(self._folder, name) for name in names}
        if all(found.values()):
            self._say(Endpoints(self._config.node_rank, {name: str(where) for name, where in found.items()}))
            self._said_endpoints = True
