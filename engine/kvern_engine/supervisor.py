"""The supervisor: starts workers, engine cores and API servers, watches them, and ends them together.

It holds the layout (which worker belongs to which engine) and computes nothing. A worker owns its device and outlives
cores; a core is CPU-only and replaceable over the same workers; API servers talk to all cores. Today the layout is
fixed from start to end: one worker an engine, and an engine that has died is not started again (the pod is restarted
as a whole once its last engine is dead).

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
from collections.abc import Callable, Iterator
from pathlib import Path

import zmq

from kvern_engine import children, logs
from kvern_engine.child import ChildSpec
from kvern_engine.children import Child, how_it_ended
from kvern_engine.config import EngineConfig
from kvern_engine.core.plan import WorkerProgress
from kvern_engine.ipc import CoreReady, EngineDead
from kvern_engine.listen import ListenError, listen_tcp, listen_unix, url_of
from kvern_engine.loading.resolve import ModelNotFoundError, resolve_model
from kvern_engine.probe import http_status
from kvern_engine.socket_dir import SocketDir
from kvern_engine.startup_report import StartupReport
from kvern_engine.transport import SUPERVISOR_IN, bind, connect, decode_to_supervisor, drain, encode, server_in
from kvern_engine.worker.limits import check_supported

log = logging.getLogger(__name__)

# After the last engine has died the API servers live on for this long: clients read their error, probes a 503.
_NOTICE_SECONDS = 2.0
_STOP_PATIENCE = 3.0
_CORE_SAID_WHY = 3  # exit status of a core that has reported its reason


class StartError(Exception):
    """The engine cannot be started; the text is for the user."""


def check_offered(config: EngineConfig) -> None:
    """Refuse, before anything starts, what this version cannot do. Raises StartError."""
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        size = getattr(config, name)
        if size > 1:
            flag = "--" + name.replace("_", "-")
            raise StartError(
                f"{flag} {size} comes with several devices, which are not offered yet; use 1 (or --data-parallel-size)"
            )
    try:
        check_supported(config)
    except ValueError as error:
        raise StartError(str(error)) from None


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
    check_offered(config)
    try:
        files = resolve_model(config.model, config.revision)  # before anything starts: is it there at all?
        name = (config.served_model_name or [files.name])[0]
        with contextlib.ExitStack() as stack:
            listeners = _listen(config, stack)
            raise_file_limit()
            folder = stack.enter_context(SocketDir())
            return Supervisor(config, name, str(folder.path), *listeners).run()
    except (ModelNotFoundError, OSError) as error:  # ListenError is an OSError
        raise StartError(str(error)) from None


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
        self, config: EngineConfig, name: str, folder: str, listener: socket.socket, admin: socket.socket | None
    ) -> None:
        self._config, self._name, self._folder = config, name, folder
        self._listener, self._admin = listener, admin
        self._human = sys.stderr.isatty()
        self._report = StartupReport(self._human)
        self._children: list[Child] = []
        self._ready: dict[int, CoreReady] = {}
        self._dead: dict[int, str] = {}
        self._signals: list[int] = []
        self._draining = False
        self._failure: str | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox = bind(self._context, zmq.PULL, folder, SUPERVISOR_IN)
        self._servers = [connect(self._context, zmq.PUSH, folder, server_in(i)) for i in range(config.api_server_count)]

    # ------------------------------------------------------------ life

    def run(self) -> int:
        with self._caught_signals() as wakeup:
            self._wakeup = wakeup
            try:
                self._start_children()
                if self._wait_until_ready():
                    self._watch()
                return self._stop()
            finally:
                children.end_all(self._children, 0.0)
                for sock in (self._inbox, *self._servers):
                    sock.close(0)
                self._context.term()

    @property
    def _engines(self) -> int:
        return self._config.data_parallel_size

    def _start_children(self) -> None:
        self._report.begin(self._name, url_of(self._listener), self._engines)
        apart = not worker_in_core(self._config)
        for engine in range(self._engines):  # the slowest to start come first
            workers = [self._start("worker", engine, engine)] if apart else []
            self._start("core", engine, engine, [worker.pid for worker in workers])
        for index in range(self._config.api_server_count):
            self._start("server", index, 0)

    def _start(self, kind: str, index: int, engine: int, worker_pids: list[int] | None = None) -> Child:
        fds = [sock.fileno() for sock in (self._listener, self._admin) if sock is not None] if kind == "server" else []
        spec = ChildSpec(
            kind=kind,
            index=index,
            engine=engine,
            socket_dir=self._folder,
            supervisor_pid=os.getpid(),
            config=self._config.model_dump_json(),
            human_logs=self._human,
            worker_pids=worker_pids or [],
            num_engines=self._engines,
            num_servers=self._config.api_server_count,
            listen_fd=self._listener.fileno(),
            # The admin port is one socket: with several API servers the first one answers there.
            admin_fd=self._admin.fileno() if self._admin is not None and index == 0 else None,
        )
        child = children.start(spec, fds)
        self._children.append(child)
        return child

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

    @contextlib.contextmanager
    def _caught_signals(self) -> Iterator[socket.socket]:
        """SIGTERM and SIGINT are noted in `_signals` and wake the loop through a socket."""
        receiver, sender = socket.socketpair()
        receiver.setblocking(False)
        sender.setblocking(False)
        before = {s: signal.signal(s, lambda n, _: self._signals.append(n)) for s in (signal.SIGTERM, signal.SIGINT)}
        old_fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        try:
            yield receiver
        finally:
            signal.set_wakeup_fd(old_fd)
            for signum, handler in before.items():
                signal.signal(signum, handler)
            receiver.close()
            sender.close()

    def _turn(self, timeout: float | None) -> None:
        """Wait for one or more events, at most `timeout` seconds, and act on them."""
        poller = zmq.Poller()
        poller.register(self._inbox, zmq.POLLIN)
        poller.register(self._wakeup.fileno(), zmq.POLLIN)
        living = {child.pidfd: child for child in self._children if child.status is None}
        for pidfd in living:
            poller.register(pidfd, zmq.POLLIN)
        ready = dict(poller.poll(None if timeout is None else int(timeout * 1000)))
        if self._wakeup.fileno() in ready:
            self._wakeup.recv(4096)
        ended = [(child, children.reap(child)) for child in (living[source] for source in ready if source in living)]
        # What a signal ended could not say why, and its peers only know that it is gone: we know. In all other cases
        # a message that has arrived tells more than an exit status.
        ended.sort(key=lambda end: end[1])
        killed = [end for end in ended if end[1] < 0]
        for child, status in killed:
            self._exited(child, status)
        self._read_inbox()
        for child, status in ended[len(killed) :]:
            self._exited(child, status)

    def _read_inbox(self) -> None:
        for data in drain(self._inbox):
            message = decode_to_supervisor(data)
            several = self._engines > 1
            if isinstance(message, WorkerProgress):
                self._report.progress(message.rank, message.phase, message.fraction, several)
            elif isinstance(message, CoreReady):
                self._ready[message.engine] = message
                self._report.engine_ready(message, several)
            else:
                self._engine_died(message.engine, message.reason)

    def _exited(self, child: Child, status: int) -> None:
        if child.kind == "server":
            if not self._draining and self._failure is None:
                self._fail(f"{child.name} {how_it_ended(status)}")
            return
        if child.engine in self._dead:
            return
        if status > 0 and self._inbox.poll(500):  # it had something to say; its core passes that on
            self._read_inbox()
        self._engine_died(child.engine, f"{child.name} {how_it_ended(status)}")

    def _engine_died(self, engine: int, reason: str) -> None:
        """Tell the API servers at once; end what is left of the engine. Only the first reason counts."""
        if engine in self._dead:
            return
        self._dead[engine] = reason
        last = len(self._dead) == self._engines
        for sock in self._servers:
            with contextlib.suppress(zmq.Again):
                sock.send(encode(EngineDead(engine, reason, last)), zmq.NOBLOCK)
        children.send_signal([c for c in self._children if c.kind == "worker" and c.engine == engine], signal.SIGTERM)
        if len(self._ready) < self._engines:
            self._fail(reason)  # while starting, the error is the last word
            return
        left = self._engines - len(self._dead)
        log.error("engine died", extra=logs.fields(engine=engine, reason=reason, engines_left=left))
        if last:
            self._fail(reason)

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
