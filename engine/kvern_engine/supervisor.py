"""The supervisor: starts workers, engine cores and API servers, watches them, and ends them together.

It holds the layout (which worker belongs to which engine) and computes nothing. A worker owns its device and outlives
cores; a core is CPU-only and replaceable over the same workers; API servers talk to all cores. Today the layout is
fixed from start to end, and an engine that has died, or has lost one of its workers, is not started again: the others
go on, and the pod is restarted as a whole once its last engine is dead. Where the ranks are shared by several pods
(`nodes.py`), this is the leading one; the others run `follower.py`.

Exit status: 0 after SIGTERM or SIGINT and a drain; 1 when it could not start, when the last engine died or when an API
server died; 130 when a second signal cut the drain short.
"""

import contextlib
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq

from kvern_engine import children, logs
from kvern_engine.capacity import model_shape
from kvern_engine.child import ChildSpec
from kvern_engine.children import Child, Ending, how_it_ended
from kvern_engine.config import EngineConfig
from kvern_engine.core.plan import WorkerProgress
from kvern_engine.devices import check_devices, devices_visible, free_shared_memory, shared_memory_note
from kvern_engine.fetching.lines import shown
from kvern_engine.fetching.obtain import held
from kvern_engine.ipc import CoreReady, EngineDead
from kvern_engine.layout_switch import LayoutSwitch
from kvern_engine.listen import ListenError, listen_tcp, listen_unix, url_of
from kvern_engine.nodes import BEAT_SECONDS, EndEngine, Leader, node_of, ranks_of_node
from kvern_engine.parallel.layout import Layout, check_layout
from kvern_engine.probe import http_status
from kvern_engine.signals import Signals
from kvern_engine.socket_dir import SocketDir
from kvern_engine.start_worker import start_worker
from kvern_engine.startup_report import StartupReport
from kvern_engine.transport import (
    SUPERVISOR_IN,
    bind,
    connect,
    decode_to_supervisor,
    drain,
    encode,
    server_in,
    write_endpoint,
)

log = logging.getLogger(__name__)

# After the last engine has died the API servers live on for this long: clients read their error, probes a 503.
_NOTICE_SECONDS = 2.0
_STOP_PATIENCE = 3.0
_WORDS_SECONDS = 1.0  # how long a child that ended by itself has to say why, through its core
_WAITING_LOG_SECONDS = 10.0


class StartError(Exception):
    """The engine cannot be started; the text is for the user."""


def worker_in_core(config: EngineConfig) -> bool:
    """Whether the worker runs in its core's process. Apart is the default: the core plans, and takes in new requests,
    while the worker computes. On two CPU cores both were measured to take the same CPU time a token (81 and 82 ms with
    SmolLM2-135M in float32); together saves one start of Python, half a second of CPU time.
    """
    return config.distributed_executor_backend == "uni"


def raise_file_limit() -> None:
    """As many open files as the system allows: thousands of connections need as many descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def serve(config: EngineConfig) -> int:
    """Run the engine until it is told to stop. Raises StartError with a text for the user."""
    try:
        _check_files(config)
        devices = devices_visible(os.environ)
        check_devices(config, devices)
        if note := shared_memory_note(config, devices, free_shared_memory()):
            log.warning("%s", note)
        with contextlib.ExitStack() as stack:
            # Before anything starts: it is there, or is fetched now, and stays while we run.
            with shown(sys.stderr.isatty() and config.log_format == "text") as meter:
                files = stack.enter_context(held(config.model, config.revision, meter))
            check_layout(model_shape(config), Layout.of(config))
            if config.node_rank > 0:
                return _follow(config)
            name = (config.served_model_name or [files.name])[0]
            listeners = _listen(config, stack)
            raise_file_limit()
            folder = stack.enter_context(SocketDir())
            signals = stack.enter_context(Signals())
            return Supervisor(config, name, str(folder.path), *listeners, signals).run()
    except (ValueError, OSError) as error:  # what is wrong with the model; ListenError and AddressError are OSErrors
        raise StartError(str(error)) from None


def _follow(config: EngineConfig) -> int:
    from kvern_engine.follower import JoinError, follow

    try:
        return follow(config)
    except JoinError as error:
        raise StartError(str(error)) from None


def _check_files(config: EngineConfig) -> None:
    for flag, path in (("--chat-template", config.chat_template), ("--tokenizer", config.tokenizer)):
        if path and not Path(path).exists():
            raise StartError(f"{flag} {path}: there is no such {'file' if flag != '--tokenizer' else 'folder or file'}")


def _listen(config: EngineConfig, stack: contextlib.ExitStack) -> tuple[socket.socket, socket.socket | None]:
    if config.uds:
        sock = stack.enter_context(listen_unix(config.uds))
        stack.callback(Path(config.uds).unlink, missing_ok=True)
    else:
        sock = stack.enter_context(listen_tcp(config.host, config.port))
    if config.admin_port is None:
        return sock, None
    if not Path(str(config.admin_token_file)).is_file():
        raise ListenError(f"--admin-token-file {config.admin_token_file}: there is no such file")
    return sock, stack.enter_context(listen_tcp(config.admin_host, config.admin_port, "--admin-port"))


class Supervisor:
    """One running engine service; `run` returns its exit status. Must run in the main thread (signals)."""

    def __init__(
        self,
        config: EngineConfig,
        name: str,
        folder: str,
        listener: socket.socket,
        admin: socket.socket | None,
        signals: Signals,
    ) -> None:
        self._config, self._name, self._folder = config, name, folder
        self._layout = Layout.of(config)
        self._listener, self._admin = listener, admin
        self._caught = signals
        self._signals = signals.received
        self._human = sys.stderr.isatty() and config.log_format == "text"
        self._report = StartupReport(self._human)
        self._children: list[Child] = []
        self._ending = Ending()
        self._ready: dict[int, CoreReady] = {}
        self._dead: dict[int, str] = {}
        self._draining = False
        self._failure: str | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._leader = Leader(self._context, config) if config.nnodes > 1 else None
        self._inbox = bind(self._context, zmq.PULL, folder, SUPERVISOR_IN)
        self._servers = [connect(self._context, zmq.PUSH, folder, server_in(i)) for i in range(config.api_server_count)]
        self._switch = LayoutSwitch(self, config, self._context, folder)
        self._retired: set[Child] = set()  # cores that belong to no layout any more

    # ------------------------------------------------------------ life

    def run(self) -> int:
        try:
            self._report.begin(self._name, url_of(self._listener), self._engines)
            if self._start_children() and self._wait_until_ready():
                self._watch()
            return self._stop()
        finally:
            children.end_all(self._children, 0.0)
            for sock in (self._inbox, *self._servers):
                sock.close(0)
            if self._leader is not None:
                self._leader.close()
            self._context.term()

    @property
    def _engines(self) -> int:
        return self._layout.data

    def _start_children(self) -> bool:
        """False where a signal came first or the other pods did not (`_failure` says which)."""
        if self._leader is not None:  # the API servers answer probes while other pods are awaited
            self._start_servers()
            if not self._wait_for_pods(self._leader, lambda leader: not leader.missing()):
                return False
        meeting = self._leader.welcome() if self._leader is not None else {}
        if not worker_in_core(self._config):
            self._start_workers(meeting)  # the slowest to start come first
        if self._leader is not None:
            if not self._wait_for_pods(self._leader, lambda leader: leader.endpoints() is not None):
                return False
            for name, endpoint in (self._leader.endpoints() or {}).items():
                write_endpoint(self._folder, name, endpoint)
        for engine in range(self._engines):
            self._start("core", engine, engine, self._peers(engine))
        if self._leader is None:
            self._start_servers()
        return True

    def _start_servers(self) -> None:
        for index in range(self._config.api_server_count):
            self._start("server", index, 0)

    def _start_workers(self, meeting: dict[int, str]) -> None:
        ranks = ranks_of_node(self._layout, self._config.nnodes, 0)
        for local, rank in enumerate(ranks):
            engine = self._layout.coordinates(rank)[0]
            place = {"KVERN_RENDEZVOUS": meeting[engine]} if engine in meeting else {}
            if self._leader is not None:
                place["KVERN_BIND_ADDRESS"] = self._leader.address
            child = start_worker(self._config, rank, engine, self._folder, local, len(ranks), place)
            self._children.append(child)

    def _peers(self, engine: int) -> list[tuple[int, int | None, str]]:
        """The workers of an engine as its core is told of them; none: it has its own."""
        return [] if worker_in_core(self._config) else self.peers(self._layout.ranks_of(engine))

    def peers(self, ranks: Sequence[int]) -> list[tuple[int, int | None, str]]:
        """(rank, pid, place) of workers as a core is told of them."""
        pids = {child.index: child.pid for child in self._children if child.kind == "worker"}
        peers: list[tuple[int, int | None, str]] = []
        for rank in ranks:
            away = self._leader is not None and rank not in pids
            node = node_of(self._layout, self._config.nnodes, rank)
            peers.append((rank, pids.get(rank), self._leader.place(node) if away and self._leader else ""))
        return peers

    def _wait_for_pods(self, leader: Leader, arrived: Callable[[Leader], bool]) -> bool:
        """Turn until it is so; False where a signal came or the time is over (`_failure` says who is missing)."""
        told = _WAITING_LOG_SECONDS
        while not self._signals and self._failure is None:
            self._turn(0.05)
            if arrived(leader):
                return True
            missing = leader.missing()
            if missing and leader.waited > self._config.distributed_timeout_seconds:
                self._fail(leader.missing_text())
            elif missing and leader.waited > told:
                told += _WAITING_LOG_SECONDS
                log.info("waiting for pods", extra=logs.fields(nodes=missing, seconds=round(leader.waited)))
        return False

    def _start(
        self,
        kind: str,
        index: int,
        engine: int,
        peers: Sequence[tuple[int, int | None, str]] = (),
        switch: int | None = None,
    ) -> None:
        fds = [sock.fileno() for sock in (self._listener, self._admin) if sock is not None] if kind == "server" else []
        spec = ChildSpec(
            kind=kind,
            index=index,
            engine=engine,
            socket_dir=self._folder,
            supervisor_pid=os.getpid(),
            config=self._config.model_dump_json(),
            human_logs=self._human,
            peers=list(peers),
            num_engines=self._engines,
            num_servers=self._config.api_server_count,
            listen_fd=self._listener.fileno(),
            # The admin port is one socket: with several API servers the first one answers there.
            admin_fd=self._admin.fileno() if self._admin is not None and index == 0 else None,
            switch=switch,
        )
        self._children.append(children.start(spec, fds))

    def _wait_until_ready(self) -> bool:
        """True once /ready is 200; False where starting failed (`_failure` says why) or a signal came."""
        while not self._signals and self._failure is None:
            complete = len(self._ready) == self._engines
            self._turn(0.02 if complete else 1.0)
            if complete and http_status(self._listener, "/ready", timeout=0.5) == 200:
                admin_url = url_of(self._admin) if self._admin else None
                keyed = bool(self._config.api_key or os.environ.get("KVERN_API_KEYS"))
                engines = list(self._ready.values())
                self._report.ready(url_of(self._listener), admin_url, self._name, engines, keyed)
                return True
        return False

    def _watch(self) -> None:
        """Serve until a signal comes or nothing is left to serve with."""
        while not self._signals and self._failure is None:
            self._turn(None)

    def _stop(self) -> int:
        if self._failure is not None:
            if len(self._ready) == self._engines:  # it has served: let clients and probes see the end
                self._turns(_NOTICE_SECONDS, until=lambda: False)
            children.end_all(self._children, _STOP_PATIENCE)
            raise StartError(self._failure)
        self._drain()
        children.end_all(self._children, 0.0 if len(self._signals) > 1 else _STOP_PATIENCE)
        if len(self._signals) > 1:
            return 130
        log.info("stopped")
        return 1 if self._failure else 0

    def _drain(self) -> None:
        """Let the API servers finish their requests; cut short by the time limit or a second signal."""
        config, self._draining = self._config, True
        servers = [child for child in self._children if child.kind == "server"]
        limit = config.drain_timeout_seconds + config.shutdown_grace_seconds
        log.info("draining", extra=logs.fields(at_most_seconds=limit))
        self._report.say("Stopping: running requests may finish (Ctrl-C again stops at once)")
        children.send_signal(servers, signal.SIGTERM)
        done = self._turns(limit, until=lambda: all(s.status is not None for s in servers) or len(self._signals) > 1)
        if not done:
            log.warning("requests were cut off", extra=logs.fields(after_seconds=limit))

    def _turns(self, seconds: float, until: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + seconds
        while not until():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._turn(left)
        return True

    # ------------------------------------------------------------ events

    def _turn(self, timeout: float | None) -> None:
        """Wait for one or more events, at most `timeout` seconds, and act on them."""
        poller = zmq.Poller()
        poller.register(self._inbox, zmq.POLLIN)
        poller.register(self._caught.fileno(), zmq.POLLIN)
        if self._leader is not None:
            poller.register(self._leader.socket, zmq.POLLIN)
            timeout = min(BEAT_SECONDS, BEAT_SECONDS if timeout is None else timeout)
        living = {child.pidfd: child for child in self._children if child.status is None}
        for pidfd in living:
            poller.register(pidfd, zmq.POLLIN)
        forever = 3600.0
        wait = self._switch.timeout(self._ending.wait(forever if timeout is None else timeout))
        ready = dict(poller.poll(int(min(wait, forever if timeout is None else timeout) * 1000)))
        self._caught.clear()
        ended = [(child, children.reap(child)) for source, child in living.items() if source in ready]
        # What a signal ended could not say why, and its peers only know that it is gone: we know. In all other cases
        # a message that has arrived tells more than an exit status.
        ended.sort(key=lambda end: end[1])
        killed = [end for end in ended if end[1] < 0]
        for child, status in killed:
            self._exited(child, status)
        self._read_inbox()
        for child, status in ended[len(killed) :]:
            self._exited(child, status)
        self._read_pods()
        self._switch.tick()
        self._ending.finish()

    def _read_pods(self) -> None:
        if self._leader is None:
            return
        news = self._leader.read()
        for rank, how in news.died:
            self._engine_died(self._layout.coordinates(rank)[0], how)
        for node, why in news.lost:
            lost = {self._layout.coordinates(r)[0] for r in ranks_of_node(self._layout, self._config.nnodes, node)}
            for engine in sorted(lost):
                self._engine_died(engine, why)

    def _read_inbox(self) -> None:
        for data in drain(self._inbox):
            message = decode_to_supervisor(data)
            several = self._engines > 1
            if isinstance(message, WorkerProgress):
                self._report.progress(message.rank, message.phase, message.fraction, several)
            elif isinstance(message, CoreReady):
                if message.engine not in self._dead:  # it may have been on its way when the engine died
                    self._ready[message.engine] = self._switch.engines[message.engine] = message
                    self._report.engine_ready(message, several)
            elif isinstance(message, EngineDead):
                self._engine_died(message.engine, message.reason)
            else:
                self._switch.read(message)

    def _exited(self, child: Child, status: int) -> None:
        if child in self._retired:
            self._children.remove(child)
            self._retired.remove(child)
            return
        if child.kind == "server":
            if self._draining:
                self._switch.server_ended(child.index)
            elif self._failure is None:
                self._fail(f"{child.name} {how_it_ended(status)}")
            return
        if status > 0:  # it had something to say; its core passes that on
            deadline = time.monotonic() + _WORDS_SECONDS
            while self._is_missed(child) and (left := deadline - time.monotonic()) > 0:
                self._inbox.poll(int(left * 1000))
                self._read_inbox()
        if child not in self._children:
            return  # a core of a layout that was given up, with what it had to say
        reason = f"{self._full_name(child)} {how_it_ended(status)}"
        self._engine_died(child.engine, reason)
        # Of an engine that is dead already, it was we who ended what is left: that is not why.
        self._switch.lost(child.kind, child.index, self._dead.get(child.engine, reason))

    def _is_missed(self, child: Child) -> bool:
        """Whether nobody knows yet that this one is no more."""
        return child in self._children and child.engine not in self._dead

    def _full_name(self, child: Child) -> str:
        """`worker 3 (engine 1, stage 0, tensor rank 1)` where an engine has several workers."""
        if child.kind != "worker" or self._layout.engine_size == 1:
            return child.name
        engine, stage, tensor_rank = self._layout.coordinates(child.index)
        return f"{child.name} (engine {engine}, stage {stage}, tensor rank {tensor_rank})"

    def _engine_died(self, engine: int, reason: str) -> None:
        """Tell the API servers at once; end what is left of the engine. Only the first reason counts."""
        if engine in self._dead:
            return
        if engine >= self._engines:  # one of a layout to come: nobody has lost anything
            self._switch.lost("core", engine, reason)
            return
        self._dead[engine] = reason
        self._switch.engines.pop(engine, None)
        last = len(self._dead) == self._engines
        self.tell_servers(EngineDead(engine, reason, last))
        self._ending.begin([c for c in self._children if c.kind in ("worker", "core") and c.engine == engine])
        if self._leader is not None:
            self._leader.tell(EndEngine(engine))
        if len(self._ready) < self._engines:
            self._fail(reason)  # while starting, the error is the last word
            return
        left = self._engines - len(self._dead)
        log.error("engine died", extra=logs.fields(engine=engine, reason=reason, engines_left=left))
        if last:
            self._fail(reason)

    # ------------------------------------------------------------ what a switch of the layout needs

    def start_core(self, engine: int, switch: int) -> None:
        """A core for a layout to come."""
        self._start("core", engine, engine, switch=switch)

    def end_core(self, engine: int) -> None:
        """It belongs to no layout any more; that it ends is no failure."""
        cores = [c for c in self._children if c.kind == "core" and c.index == engine]
        living = [c for c in cores if c.status is None]
        self._retired.update(living)
        self._ending.begin(living)
        self._children = [c for c in self._children if c not in cores or c in living]

    def tell_servers(self, message: Any, server: int | None = None) -> None:
        """To all API servers, or to one."""
        for sock in self._servers if server is None else [self._servers[server]]:
            with contextlib.suppress(zmq.Again):
                sock.send(encode(message), zmq.NOBLOCK)

    def adopt(self, layout: Layout, engines: Sequence[CoreReady]) -> None:
        """The pod has this layout now."""
        self._layout, self._ready = layout, {engine.engine: engine for engine in engines}
        for child in self._children:
            if child.kind == "worker":
                child.engine = layout.coordinates(child.index)[0]

    def give_up(self, engine: int, reason: str) -> None:
        """An engine that does not answer any more."""
        self._engine_died(engine, reason)

    def processes(self) -> list[tuple[str, int, int]]:
        """(kind, index, pid) of the workers and cores that live and are to."""
        return [
            (child.kind, child.index, child.pid)
            for child in self._children
            if child.kind != "server" and child.status is None and child not in self._ending
        ]

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
