"""One attempt of one request on one replica: what the replica answers, passed on or held back.

An answer is held back until its first byte of body (an event stream) or until it is whole, 64 KiB long or a quarter of
a second old (anything else): up to there the request can still go to another replica. Afterwards bytes go through as
they come, and a replica that is lost ends the stream with an error event.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvern_router.http1 import ResponseHead
from kvern_router.sse import LineGate, opening_error
from kvern_router.upstream import UpstreamConnection

if TYPE_CHECKING:
    from kvern_router.exchange import Exchange
    from kvern_router.fleet import Replica
    from kvern_router.tenants import Use
    from kvern_router.usage import Usage

HOLD_BACK_BYTES = 64 * 1024
HEAD_SECONDS = 5.0  # then the head of an event stream goes out without a body (which keeps it retryable)
BODY_SECONDS = 0.25  # then what there is of any other body goes out
TRY_ELSEWHERE = (500, 502, 503)  # statuses of a replica that is draining, loading or broken


@dataclass(frozen=True, slots=True)
class Done:
    """The client has its answer, or as much as there will be."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The replica answered that it cannot; the answer can still be passed on."""

    head: ResponseHead
    body: bytes


@dataclass(frozen=True, slots=True)
class Failed:
    """No answer: `sent` says whether the replica may have begun, `stale` that an idle connection was just closed."""

    reason: str
    sent: bool
    stale: bool = False


Outcome = Done | Refused | Failed


class Relay:
    """The sink of an upstream connection for a client's request."""

    def __init__(self, exchange: Exchange, replica: Replica, connection: UpstreamConnection, began: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._exchange = exchange
        self._writer = exchange.writer
        self._replica = replica
        self._began = began
        self._head: ResponseHead | None = None
        self._gate: LineGate | None = None
        self._held_back: list[bytes] = []
        self._held_bytes = 0
        self._refusal = False
        self._timer: asyncio.TimerHandle | None = None
        self._use: Use | None = None  # of a tenant whose tokens are counted
        self._usage: Usage | None = None
        self.connection = connection
        self.streaming = False  # bytes of a body went out
        self.outcome: asyncio.Future[Outcome] = self._loop.create_future()

    # the connection's side

    def on_head(self, head: ResponseHead) -> None:
        self._head = head
        writer = self._writer
        refused = head.status in TRY_ELSEWHERE or (head.status == 429 and self._exchange.was_held)
        if writer.head is not None:  # an earlier attempt's head went out: only its like can follow
            refused = refused or not head.is_sse or head.status != writer.head.status
        self._refusal = refused
        if refused:
            self._timer = self._loop.call_later(HEAD_SECONDS, self.move, "its refusal did not end")
            return
        self._replica.health.served(self._began)
        use = self._exchange.request.use
        if use is not None and use.counts:
            self._use, self._usage = use, use.answer(head)
        if head.is_sse:
            self._gate = LineGate()
            self._timer = self._loop.call_later(HEAD_SECONDS, self._let_head_go)

    def on_body(self, data: bytes) -> None:
        if self._gate is not None:
            data = self._gate.feed(data)
            if not data:
                return
        if self._use is not None and self._usage is not None:
            data = self._usage.feed(data)
            self._use.generated()
            if not data:
                return
        if self.streaming:
            self._writer.body(data)
        elif self._gate is not None:
            self._first_event(data)
        else:
            self._hold_back(data)

    def on_complete(self) -> None:
        assert self._head is not None
        if self._refusal:
            self._resolve(Refused(self._head, b"".join(self._held_back)))
            return
        if not self.streaming:
            self._start()
        self._writer.end(b"".join(self._held_back) if self._gate is None else self._gate.tail)
        self._resolve(Done())

    def on_lost(self, error: Exception) -> None:
        stale = self.connection.reused and not self.connection.answered
        why = f"the connection was lost ({error or type(error).__name__})"
        if not stale:
            self._exchange.router.fleet.failed(self._replica, self._began, why)
        if not self.streaming:
            self._resolve(Failed(why, sent=True, stale=stale))
            return
        if self._gate is not None and self._gate.finished:
            self._writer.end()
        else:
            self._exchange.cut(f"The replica {self._replica.name} was lost while it was answering")
        self._resolve(Done())

    # the router's side

    def move(self, why: str) -> None:
        """Give the attempt up so that another replica is tried, unless the answer has begun."""
        if not self.streaming and not self.outcome.done():
            self.close()
            self._resolve(Failed(why, sent=True))

    def close(self) -> None:
        """Let go of the connection, whatever ended the attempt: one that has no complete response is closed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.connection.drop(self)

    def pause(self) -> None:
        """The client takes no more for now."""
        self.connection.pause(self)

    def resume(self) -> None:
        """It does again."""
        self.connection.resume(self)

    def idle_for(self, now: float) -> float:
        """Seconds since the last byte of an answer that has begun (a long prefill is not idle); 0 while paused."""
        if not self.streaming or self._exchange.paused:
            return 0.0
        return now - self.connection.last_data

    # inside

    def _first_event(self, data: bytes) -> None:
        if opening_error(data) is not None and self._exchange.can_try_elsewhere(self._replica):
            self.connection.drop(self)
            self._resolve(Failed("its stream opened with an error", sent=True))
            return
        self._go_out(data)

    def _hold_back(self, data: bytes) -> None:
        self._held_back.append(data)
        self._held_bytes += len(data)
        if self._held_bytes > HOLD_BACK_BYTES:
            self._let_go()
        elif self._timer is None:
            self._timer = self._loop.call_later(BODY_SECONDS, self._let_go)

    def _let_go(self) -> None:
        """What was held back goes out, and the rest as it comes (a refusal of such a length is an answer)."""
        if self._writer.head is not None:
            self.connection.drop(self)
            self._resolve(Failed("it answered otherwise than the replica before it", sent=True))
            return
        self._refusal = False
        data, self._held_back = b"".join(self._held_back), []
        self._go_out(data)

    def _go_out(self, data: bytes) -> None:
        """The first bytes of a body; from here on nothing is tried again."""
        self._start()
        self.streaming = True
        self._exchange.begun()
        self._writer.body(data)

    def _let_head_go(self) -> None:
        """A client sees that its stream is open though its prefill takes long; another replica can still follow."""
        self._start()
        self._writer.flush()

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        assert self._head is not None
        if self._writer.head is None:
            self._exchange.answering(self._head, self.connection.last_data)

    def _resolve(self, outcome: Outcome) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)
