"""The API server's side of the sockets: sends requests to engine cores and hands their outputs to whoever waits.

One message holds the outputs of one step; it is decoded, measured and sorted into mailboxes in a single pass, and a
waiting task is woken once a pass. `release` is the single point where a request is given back, whatever ended it.
"""

import asyncio
import itertools
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Container, Mapping
from dataclasses import dataclass, field

import zmq

from kvern_engine.ipc import Abort, AddRequest, CoreReady, EngineDead, EngineStats, Outputs, TokenOutput, ToServer
from kvern_engine.logs import fields
from kvern_engine.metrics import STEP_LIMITS, EngineView, Metrics
from kvern_engine.parallel.messages import (
    ChangeLayout,
    Drained,
    Fence,
    Hold,
    LayoutAnswer,
    LayoutChanged,
    LayoutState,
    Left,
    SwitchToServer,
)
from kvern_engine.server.balance import Balancer, prefix_keys
from kvern_engine.server.engine_stats import at_rest, together, unheard
from kvern_engine.server.errors import ApiError
from kvern_engine.server.lifecycle import STALL_SECONDS
from kvern_engine.server.mailbox import ClientGone, EngineRequest, Mailbox
from kvern_engine.transport import SUPERVISOR_IN, bind, connect, core_in, decode_to_server, encode, server_in

__all__ = ["MAX_BACKLOG", "ClientGone", "EngineClient", "EngineDeadError", "EngineRequest", "Mailbox"]

log = logging.getLogger(__name__)

# Messages handled before the event loop gets a turn for its other sockets.
_MAX_PASS = 256
# Tokens, each with the alternatives reported for it, that wait for a client that reads more slowly than they come: some
# ten megabytes. More are not computed for it.
MAX_BACKLOG = 65_536
_ANSWER_SECONDS = 10.0  # in which the supervisor answers, which waits for nothing


class EngineDeadError(RuntimeError):
    """No engine can take the request."""


@dataclass(slots=True)
class _Engine:
    """What is known of one engine core."""

    state: str = "loading"
    stats: EngineStats = field(default_factory=lambda: EngineStats(0))
    ready: CoreReady | None = None
    heard: float = 0.0
    reason: str | None = None  # why it died


class EngineClient:
    """Talks to all engine cores of the pod from one event loop; create and close it there."""

    def __init__(
        self,
        index: int,
        socket_dir: str | os.PathLike[str],
        num_engines: int,
        metrics: Metrics | None = None,
        on_last_dead: Callable[[str], None] | None = None,
        on_ready: Callable[[], object] | None = None,
    ) -> None:
        self.index = index
        self.metrics = metrics
        self._on_last_dead, self._on_ready = on_last_dead, on_ready
        self._engines = [_Engine(stats=EngineStats(e)) for e in range(num_engines)]
        self.layout: LayoutState | None = None  # as the supervisor said last
        self._held: list[tuple[int, AddRequest | Abort]] | None = None  # during a switch of the layout: for the cores
        self._leaving: tuple[int, set[int]] | None = None  # the switch, and cores whose last outputs are not here
        self._replaced: dict[int, EngineStats] = {}  # by engine: what its cores had counted that are replaced
        self._asks: dict[int, asyncio.Future[LayoutAnswer]] = {}
        self._balancer = Balancer(num_engines)
        self._live: dict[str, EngineRequest] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        folder = os.fspath(socket_dir)
        self._in = bind(self._context, zmq.PULL, folder, server_in(index))
        # Linger: an abort sent just before this process ends must still reach the core.
        self._folder = folder
        self._out: list[zmq.Socket[bytes]] = []
        self._connect_cores(num_engines)
        self._supervisor = connect(self._context, zmq.PUSH, folder, SUPERVISOR_IN)
        self._loop = asyncio.get_running_loop()
        self._fd = int(self._in.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._readable)
        self._loop.call_soon(self._readable)
        self._closed = False
        self._numbers = itertools.count()

    def _connect_cores(self, number: int) -> None:
        """Have a socket to each of `number` cores; those that were there stay."""
        for engine in range(len(self._out), number):
            self._out.append(connect(self._context, zmq.PUSH, self._folder, core_in(engine), linger_ms=200))

    # State

    def views(self) -> list[EngineView]:
        """The engines' states and last reports, for /ready, /metrics and the admin port."""
        now = time.monotonic()
        return [
            EngineView(
                engine=index,
                state=self._state(e, now),
                stats=e.stats,
                num_blocks=e.ready.num_blocks if e.ready else 0,
                block_size=e.ready.block_size if e.ready else 0,
                reason=e.reason,
                feasible=e.ready.feasible if e.ready else {},
                device=str(e.ready.info.get("device", "")) if e.ready else "",
                steps={name: str(e.ready.info[name]) for name in STEP_LIMITS if name in e.ready.info}
                if e.ready
                else {},
            )
            for index, e in enumerate(self._engines)
        ]

    def past(self) -> dict[int, EngineStats]:
        """The last reports of engines that the present layout does not have: what they counted has been counted."""
        return {index: stats for index, stats in self._replaced.items() if index >= len(self._engines)}

    def _state(self, engine: _Engine, now: float) -> str:
        # In a switch of the layout cores say nothing, and the supervisor sees to it that every phase ends.
        silent = now - max(engine.heard, engine.stats.heartbeat) > STALL_SECONDS
        if engine.state == "ready" and silent and self._held is None:
            return "stalled"
        return engine.state

    @property
    def capacity(self) -> int | None:
        """Most tokens (prompt + output) that one sequence can have: the context or, if smaller, the KV pool."""
        known = [e.ready for e in self._engines if e.ready is not None]
        return min((min(r.max_model_len, r.num_blocks * r.block_size) for r in known), default=None)

    @property
    def max_model_len(self) -> int | None:
        return min((e.ready.max_model_len for e in self._engines if e.ready is not None), default=None)

    @property
    def num_in_flight(self) -> int:
        return len(self._live)

    # Requests

    def submit(self, request: AddRequest, mailbox: Mailbox, tag: int = 0) -> EngineRequest:
        """Send `request` to an engine; its outputs arrive in `mailbox` until `release`. Raises EngineDeadError."""
        now = time.monotonic()
        alive = [i for i, e in enumerate(self._engines) if self._state(e, now) == "ready"]
        if not alive:
            raise EngineDeadError("no engine is ready")
        engine = self._choose(alive, request)
        key = self.metrics.labels(engine) if self.metrics else ("", str(engine))
        handle = EngineRequest(request, engine, mailbox, key, tag)
        self._balancer.add(engine, handle.cost)
        self._live[handle.id] = handle
        self._send(engine, request)
        return handle

    def _choose(self, alive: list[int], request: AddRequest) -> int:
        """One of the engines that are `alive`."""
        if len(self._engines) == 1:
            return alive[0]
        ready = self._engines[alive[0]].ready
        size = ready.block_size if ready else 16
        return self._balancer.choose(alive, prefix_keys(request.prompt_token_ids, size, request.cache_salt))

    def release(self, handle: EngineRequest, reason: str) -> None:
        """Give a request back, once; `reason` is stop | length | abort | error. Aborted where it still runs."""
        if self._live.pop(handle.id, None) is None:
            return
        self._balancer.remove(handle.engine, handle.cost)
        if handle.left > 0 and not handle.engine_died:
            self._send(handle.engine, Abort([handle.id]))
        if self.metrics is not None:
            handle.times.tokens, handle.times.longest = sum(handle.counts), max(handle.counts)
            self.metrics.request_done(handle.key, reason, handle.times)

    def end_choice(self, handle: EngineRequest, index: int) -> None:
        """Stop computing one choice, which the caller has seen the end of; the others go on."""
        if handle.id in self._live and not handle.engine_died:
            self._send(handle.engine, Abort([], [(handle.id, index)]))

    def abort(self, request_id: str) -> None:
        """End a request by its id; unknown ids are ignored."""
        handle = self._live.get(request_id)
        if handle is not None:
            self.release(handle, "abort")

    async def generate(self, request: AddRequest) -> AsyncIterator[TokenOutput]:
        """The outputs of one request, one by one; leaving the loop early aborts it."""
        mailbox = Mailbox()
        handle = self.submit(request, mailbox)
        reason, left = "abort", request.params.n
        try:
            while left:
                for _, output in await mailbox.get():
                    if output.finish_reason is not None:
                        reason, left = output.finish_reason, left - 1
                    yield output
                    if output.finish_reason == "error":
                        return
        finally:
            self.release(handle, reason)

    def _send(self, engine: int, message: AddRequest | Abort) -> None:
        if self._held is not None:
            self._held.append((engine, message))
        elif self._engines[engine].state != "dead":
            self._out[engine].send(encode(message), zmq.NOBLOCK)

    # Messages

    def _readable(self) -> None:
        """All messages that are here. ZeroMQ's descriptor signals edges: it must be read until nothing is left."""
        if self._closed:
            return
        for _ in range(_MAX_PASS):
            try:
                data = self._in.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._handle(decode_to_server(data))
            except Exception:  # one bad message must not end the loop that all requests hang on
                log.exception("cannot handle a message of %d bytes", len(data))
        self._loop.call_soon(self._readable)

    def _handle(self, message: ToServer | SwitchToServer) -> None:
        if isinstance(message, LayoutState | LayoutAnswer | Hold | Left | LayoutChanged):
            self._handle_switch(message)
        elif isinstance(message, Outputs):
            now = time.monotonic()
            if message.outputs:
                self._dispatch(message, now)
            if message.engine >= len(self._engines):
                return  # of a layout that the supervisor is about to tell of: its core was faster
            engine = self._engines[message.engine]
            engine.heard = now
            if message.stats is not None:
                stats = together(message.stats, self._replaced.get(message.engine))
                # What a dead engine said last may come after the news of its death.
                engine.stats = at_rest(stats) if engine.state == "dead" else stats
                if self.metrics is not None:
                    self.metrics.iterations(message.engine, message.stats.iteration_tokens)
        elif isinstance(message, CoreReady):
            engine = self._engines[message.engine]
            if engine.state == "loading":
                engine.state, engine.stats = "ready", unheard(message, time.monotonic())
            engine.ready, engine.heard = message, time.monotonic()
            log.info("engine ready", extra=fields(engine=message.engine, blocks=message.num_blocks))
            if self._on_ready is not None:
                self._on_ready()
        else:
            self._engine_dead(message)

    # A switch of the layout

    async def change_layout(self, tensor: int, generation: int) -> LayoutAnswer:
        """Ask the supervisor for engines of this size; what it says. Raises TimeoutError where it says nothing."""
        ask = next(self._numbers)
        answer: asyncio.Future[LayoutAnswer] = self._loop.create_future()
        self._asks[ask] = answer
        try:
            self._supervisor.send(encode(ChangeLayout(self.index, ask, tensor, generation)), zmq.NOBLOCK)
            async with asyncio.timeout(_ANSWER_SECONDS):
                return await answer
        finally:
            del self._asks[ask]

    def _handle_switch(self, message: SwitchToServer) -> None:
        if isinstance(message, LayoutState):
            self.layout = message
        elif isinstance(message, LayoutAnswer):
            answer = self._asks.get(message.ask)
            if answer is not None and not answer.done():
                answer.set_result(message)
        elif isinstance(message, Hold):
            # Nothing after the fence: once it has all of them, a core knows that nothing is on its way.
            for engine in range(message.data):
                if self._engines[engine].state != "dead":
                    self._out[engine].send(encode(Fence(message.switch, self.index)), zmq.NOBLOCK)
            self._held = self._held if self._held is not None else []
            self._leaving = message.switch, {e for e, known in enumerate(self._engines) if known.state != "dead"}
            self._left(None)
        elif isinstance(message, Left):
            if self._leaving is not None and self._leaving[0] == message.switch:
                self._replaced[message.engine] = self._engines[message.engine].stats
                self._left(message.engine)
        else:
            self._layout_changed(message)

    def _left(self, engine: int | None) -> None:
        """A core has left, or died: with the last one the supervisor is told that all their outputs are here."""
        if self._leaving is not None:
            switch, missing = self._leaving
            missing.discard(-1 if engine is None else engine)
            if not missing:
                self._leaving = None
                self._supervisor.send(encode(Drained(switch, self.index)), zmq.NOBLOCK)

    def _layout_changed(self, message: LayoutChanged) -> None:
        """The engines are others now: requests in flight go on at those that have them, what was kept is sent."""
        now, before = time.monotonic(), self._engines
        by_engine = {ready.engine: ready for ready in message.engines}
        self._connect_cores(message.data)
        self._engines = []
        for index in range(message.data):
            ready = by_engine.get(index)
            if ready is None:  # it has died on the way: the layout is the old one
                self._engines.append(before[index])
            else:
                stats = together(unheard(ready, now), self._replaced.get(index))
                self._engines.append(_Engine("ready", stats, ready, now))
        self._balancer = Balancer(message.data)
        held, self._held, self._leaving = self._held or [], None, None
        unsent = {m.request_id: m for _, m in held if isinstance(m, AddRequest)}
        for handle in self._live.values():
            if handle.id not in unsent:
                # One that has ended, but was not read yet, is nowhere.
                self._assign(handle, min(message.engine_of.get(handle.id, handle.engine), message.data - 1))
        for _, kept in held:
            if isinstance(kept, AddRequest):
                self._send_kept(kept)
            else:
                self._abort_kept(kept, message.engine_of, unsent)

    def _assign(self, handle: EngineRequest, engine: int) -> None:
        """The request is that engine's now: there it is counted from here on."""
        handle.engine = engine
        if self.metrics is not None:
            handle.key = self.metrics.labels(engine)
        self._balancer.add(engine, handle.cost)

    def _send_kept(self, request: AddRequest) -> None:
        handle = self._live.get(request.request_id)
        if handle is None:
            return  # its client has gone meanwhile
        alive = [i for i, e in enumerate(self._engines) if e.state == "ready"]
        if not alive:
            handle.engine_died = True
            output = TokenOutput(handle.id, 0, [], finish_reason="error", error="no engine is ready")
            handle.mailbox.put(handle, output)
            return
        self._assign(handle, self._choose(alive, request))
        self._send(handle.engine, request)

    def _abort_kept(self, abort: Abort, engine_of: Mapping[str, int], unsent: Container[str]) -> None:
        """To whoever has these requests now; those that were never sent need no telling."""
        for request_id in abort.request_ids:
            if request_id in engine_of:
                self._send(engine_of[request_id], Abort([request_id]))
            elif request_id not in unsent:
                for engine in range(len(self._engines)):
                    self._send(engine, Abort([request_id]))
        for request_id, index in abort.choices:
            handle = self._live.get(request_id)
            if handle is not None and request_id not in unsent:
                self._send(handle.engine, Abort([], [(request_id, index)]))

    def _dispatch(self, message: Outputs, now: float) -> None:
        live, count, gaps = self._live, 0, []
        key = None
        for output in message.outputs:
            handle = live.get(output.request_id)
            if handle is None:
                continue  # released: what the engine had already computed is not wanted
            key = handle.key
            if output.token_ids:
                count += len(output.token_ids)
                last = handle.last_at[output.index]
                if last:
                    gaps.append(now - last)
                self._note(handle, output, now)
            elif output.scheduled is not None:
                handle.times.scheduled = output.scheduled
            if output.finish_reason is not None:
                handle.left -= 1
                if output.finish_reason == "error":
                    handle.left = 0
            size = len(output.token_ids)
            if output.logprobs:
                size += len(output.logprobs) * len(output.logprobs[0].top_ids)
            handle.mailbox.put(handle, output, size)
            if handle.mailbox.backlog > MAX_BACKLOG:
                self._too_slow(handle)
        if self.metrics is not None and key is not None:
            self.metrics.tokens_generated(key, count, gaps)

    def _too_slow(self, handle: EngineRequest) -> None:
        """Its client takes so little that the rest is not computed; what it has not taken is dropped."""
        text = f"The client reads too slowly: {MAX_BACKLOG} tokens were waiting for it."
        handle.mailbox.close(ApiError(text, status=408, code="client_too_slow"))
        self.release(handle, "abort")

    def _note(self, handle: EngineRequest, output: TokenOutput, now: float) -> None:
        times = handle.times
        handle.last_at[output.index] = times.last = now
        handle.counts[output.index] += len(output.token_ids)
        if times.first == 0.0:
            times.first = now
            if output.scheduled is not None:
                times.scheduled = output.scheduled
            times.scheduled = times.scheduled or times.arrival
            if self.metrics is not None:
                cached = output.num_cached_tokens or 0
                self.metrics.prompt_done(handle.key, times.prompt_tokens, cached, now - times.arrival)

    def _engine_dead(self, message: EngineDead) -> None:
        engine = self._engines[message.engine]
        unsent = {m.request_id for _, m in self._held or () if isinstance(m, AddRequest)}
        lost = [h for h in self._live.values() if h.engine == message.engine and h.id not in unsent]
        if engine.state != "dead":  # its core and the supervisor both tell
            extra = fields(engine=message.engine, reason=message.reason, requests_lost=len(lost))
            log.error("engine died", extra=extra)
            engine.reason = message.reason
        engine.state, engine.stats = "dead", at_rest(engine.stats)
        self._balancer.forget(message.engine)
        self._left(message.engine)
        for handle in lost:
            handle.engine_died = True
            output = TokenOutput(handle.id, 0, [], finish_reason="error", error=message.reason)
            handle.mailbox.put(handle, output)
        if message.last:
            for other in self._engines:
                other.state, other.stats = "dead", at_rest(other.stats)
            if self._on_last_dead is not None:
                self._on_last_dead(message.reason)

    def fail_all(self, reason: Exception) -> None:
        """Make every waiting request raise `reason` (the process ends)."""
        for handle in list(self._live.values()):
            handle.mailbox.close(reason)

    def close(self) -> None:
        """Stop reading and close the sockets; requests in flight are aborted."""
        if self._closed:
            return
        for handle in list(self._live.values()):
            self.release(handle, "abort")
        self._closed = True
        self._loop.remove_reader(self._fd)
        for sock in (self._in, *self._out, self._supervisor):
            sock.close()
        self._context.term()
