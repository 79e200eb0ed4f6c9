"""One API server process: builds the state, serves the inherited sockets, drains on SIGTERM.

It listens before the tokenizer is loaded (probes get answers, requests a 503) and goes on answering probes after the
last engine has died, until the supervisor ends it.
"""

import asyncio
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvern_engine.config import EngineConfig
from kvern_engine.loading.config import read_generation_config, read_model_config
from kvern_engine.loading.resolve import ModelFiles, resolve_model
from kvern_engine.logs import fields
from kvern_engine.metrics import Metrics
from kvern_engine.parallel.layout import Layout
from kvern_engine.server.admin import create_admin_app
from kvern_engine.server.app import HANDLERS, create_app
from kvern_engine.server.auth import read_token_file
from kvern_engine.server.engine_client import EngineClient
from kvern_engine.server.errors import unavailable
from kvern_engine.server.gateway import App
from kvern_engine.server.lifecycle import DrainFlag, Lifecycle
from kvern_engine.server.limits import wire_limits
from kvern_engine.server.prompts import PromptReader
from kvern_engine.server.reading import RequestReader
from kvern_engine.server.state import ServerState, pod_view
from kvern_engine.server.wire.server import HttpServer
from kvern_engine.tokenizer import load_tokenizer

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.02
# With no router in front: who keeps idle connections (httpx 5 s, aiohttp 15 s) never meets one that was just closed;
# who still connects after a minute was not sent here by a Service.
_IDLE_SECONDS, _ACCEPT_SECONDS = 20.0, 60.0
# How long a thread that tokenizes or renders may make the event loop wait; Python's own 5 ms would be seen in streams.
_SWITCH_SECONDS = 0.0005


def server_main(
    config_json: bytes, index: int, socket_dir: str, listen_fd: int, admin_fd: int | None, num_engines: int
) -> None:
    """Serve until SIGTERM and then until what runs has finished. Exits the process with status 1 where it cannot start.

    `listen_fd` and `admin_fd` are listening sockets that the supervisor has bound; `config_json` is an EngineConfig.
    """
    config = EngineConfig.model_validate_json(config_json)
    try:
        files = resolve_model(config.model, config.revision)
        token = read_token_file(config.admin_token_file or "") if admin_fd is not None else ""
    except ValueError as e:
        log.error("cannot start: %s", e)
        raise SystemExit(1) from None
    import uvloop

    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        uvloop.run(_serve(config, files, index, socket_dir, listen_fd, admin_fd, num_engines, token))
    except _StartError as e:
        log.error("cannot start: %s", e)
        raise SystemExit(1) from None


class _StartError(Exception):
    """The tokenizer or the model's configuration cannot be read."""


def served_names(config: EngineConfig, files: ModelFiles) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names that are accepted, and those that are listed: without `served_model_name` the model's short name, and
    what the server was started with is accepted too."""
    if config.served_model_name:
        names = tuple(dict.fromkeys(config.served_model_name))
        return names, names
    return tuple(dict.fromkeys((files.name, config.model))), (files.name,)


def build_state(config: EngineConfig, files: ModelFiles, index: int, socket_dir: str, num_engines: int) -> ServerState:
    """Everything but the tokenizer, which `load_reader` brings later. Call it in the running event loop."""
    served, reported = served_names(config, files)
    metrics = Metrics(
        Path(socket_dir),
        model_name=reported[0],
        num_engines=max(num_engines, most_engines(config)),
        handlers=HANDLERS,
        index=index,
        num_servers=config.api_server_count,
        view=lambda: pod_view(config, client, lifecycle),
    )
    client = EngineClient(index, socket_dir, num_engines, metrics, on_ready=lambda: lifecycle.state())
    lifecycle = Lifecycle(
        DrainFlag(Path(socket_dir)),
        metrics,
        max_in_flight=config.max_waiting_requests,
        engines=client.views,
        drain_timeout=config.drain_timeout_seconds,
        behind_router=not config.shutdown_grace_seconds,
    )
    return ServerState(config, served, reported, client, metrics, lifecycle, RequestReader(config))


def most_engines(config: EngineConfig) -> int:
    """As many as the pod can have after a switch of its layout: one a device."""
    layout = Layout.of(config)
    return layout.world // layout.pipeline


async def load_reader(state: ServerState, files: ModelFiles) -> None:
    """Read tokenizer and sampling defaults in a thread; the state is loaded afterwards."""
    config = state.config

    def load() -> tuple[PromptReader, dict[str, Any]]:
        tokenizer = load_tokenizer(files, config.tokenizer, config.chat_template, config.template_timeout_seconds)
        reader = PromptReader(tokenizer, read_model_config(files).vocab_size)
        return reader, read_generation_config(files)

    state.reader, state.sampling_defaults = await asyncio.to_thread(load)
    state.lifecycle.loaded = True
    state.lifecycle.state()
    # What is here now stays: the garbage collector need not look at it again in the middle of a stream.
    gc.collect()
    gc.freeze()


def http_servers(state: ServerState, token: str | None) -> list[HttpServer]:
    """The public one, and that of the admin port where it has a token."""
    lifecycle = state.lifecycle
    servers = [http_server(create_app(state), state.config, lambda: lifecycle.draining)]
    if token is not None:
        servers.append(http_server(create_admin_app(state, token), state.config, lambda: lifecycle.terminating))
    return servers


def http_server(app: App, config: EngineConfig, leaving: Callable[[], bool]) -> HttpServer:
    """A server of `app` with the limits of the configuration; call it in the running event loop."""
    return HttpServer(app, wire_limits(config), leaving)


async def _serve(
    config: EngineConfig,
    files: ModelFiles,
    index: int,
    socket_dir: str,
    listen_fd: int,
    admin_fd: int | None,
    num_engines: int,
    token: str,
) -> None:
    try:
        state = build_state(config, files, index, socket_dir, num_engines)
    except OSError as e:
        raise _StartError(f"no room for sockets and shared memory in {socket_dir}: {e.strerror or e}") from e
    servers = http_servers(state, token if admin_fd is not None else None)
    sockets = [socket.socket(fileno=fd) for fd in (listen_fd, admin_fd) if fd is not None]
    terminator = Terminator(state, servers)
    terminator.listen_to_signals()
    serving = [asyncio.ensure_future(s.serve([sock])) for s, sock in zip(servers, sockets, strict=True)]
    try:
        await load_reader(state, files)
        await asyncio.gather(*serving)
    except (ValueError, OSError) as e:
        raise _StartError(str(e)) from e
    finally:
        for server in servers:
            server.stop()
        await asyncio.gather(*serving, return_exceptions=True)
        state.client.close()
        state.requests.close()
        if state.reader is not None:
            state.reader.close()


class Terminator:
    """SIGTERM: refuse new requests (after a grace period, where there is no router, once clients have gone elsewhere),
    finish what runs, stop. A second signal: stop now."""

    def __init__(self, state: ServerState, servers: list[HttpServer]) -> None:
        self._state = state
        self._servers = servers
        self._hurry = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.signalled)
        # Under a supervisor Ctrl-C is the supervisor's, which ignores it on our behalf.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGINT, self.signalled)

    def signalled(self) -> None:
        if self._task is None:
            self._task = asyncio.ensure_future(self.drain())
        else:
            self._hurry.set()

    async def drain(self) -> None:
        config, lifecycle, metrics = self._state.config, self._state.lifecycle, self._state.metrics
        lifecycle.terminating = True
        log.info("draining", extra=fields(in_flight=metrics.own_in_flight()))
        await self._wait(config.shutdown_grace_seconds, lambda: False)
        # One deadline: what the admin port has let drain before has used up a part of it.
        left = max(config.drain_timeout_seconds - lifecycle.drain_flag.age(), 0.0)
        # A little before the limit, so that cut streams still get their error event.
        limit = max(left - 1.0, left / 2)
        if config.shutdown_grace_seconds:
            limit -= await self._let_clients_go(limit)
        lifecycle.refusing = True
        if not await self._wait(limit, lambda: metrics.own_in_flight() == 0):
            log.warning("requests cut off", extra=fields(in_flight=metrics.own_in_flight()))
            self._state.client.fail_all(unavailable("The server is shutting down.", "shutting_down", 1, close=True))
            self._hurry.clear()
            await self._wait(0.5, lambda: metrics.own_in_flight() == 0)
        for server in self._servers:
            server.stop()

    async def _let_clients_go(self, limit: float) -> float:
        """With no router in front, a client meets what happens here itself: what it sends on a connection that it may
        use still (answers that had begun before could not tell it otherwise) is answered, and so is, for a while, who
        comes from a node that has not forgotten this pod. Returns the seconds that it took, `limit` at most."""
        public, began, lifecycle = self._servers[0], time.monotonic(), self._state.lifecycle
        grace = self._state.config.shutdown_grace_seconds

        def gone() -> bool:
            return public.let_go(_IDLE_SECONDS) and (
                public.stopping or time.monotonic() - lifecycle.last_arrival >= grace  # a node still sends clients here
            )

        if not await self._wait(min(_ACCEPT_SECONDS, limit / 2), gone):
            await public.take_no_more()
            await self._wait(limit - (time.monotonic() - began), gone)
        return min(time.monotonic() - began, limit)

    async def _wait(self, seconds: float, until: Any) -> bool:
        """Whether `until()` came true within `seconds` and before a second signal."""
        deadline = asyncio.get_running_loop().time() + seconds
        while not until():
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0 or self._hurry.is_set():
                return False
            await asyncio.sleep(min(_POLL_SECONDS, left))
        return True
