"""The life of one proxied request: choose or hold, try, try elsewhere, finish. Reads top to bottom in `_serve`.

A request is tried again only while no byte of a body has gone to the client. Attempts that cannot have begun anywhere
(no connection, 503 with Retry-After) are bounded by the hold timeout alone; those that may have begun (a replica or its
engine died with it) by MAX_ATTEMPTS, so that a request that kills engines does not go through all of them.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from kvern_router.errors import RouterError, error_code
from kvern_router.http1 import Request, ResponseHead, request_head
from kvern_router.policy import request_key
from kvern_router.relay import Done, Failed, Outcome, Refused, Relay
from kvern_router.usage import REQUEST_HEADER
from kvern_router.writer import ResponseWriter

if TYPE_CHECKING:
    from kvern_router.client import ClientConnection
    from kvern_router.fleet import Replica
    from kvern_router.router import Router

log = logging.getLogger("kvern.router")
MAX_ATTEMPTS = 3
BEGUN_CODES = ("engine_dead",)  # refusals of a replica whose engine died with the request
AGAIN_SECONDS = 0.25  # until replicas that were tried are tried again, where no other can be
QUEUE_FULL_SECONDS = 1.0  # the same for a held request whose replica answers 429


class Exchange:
    """One request between a client and the replicas."""

    def __init__(self, router: Router, client: ClientConnection, request: Request) -> None:
        self.router = router
        self.request = request
        self.writer = ResponseWriter(client, request)
        self.paused = False  # the client takes no more for now
        self.was_held = False
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._relay: Relay | None = None
        self._replica_name = ""
        self._key: int | None = None
        self._keyed = False
        self._hold_left = router.settings.hold_timeout
        self._held_for = 0.0
        self._again = AGAIN_SECONDS
        self._retries = 0
        self._begun_elsewhere = 0  # attempts that a replica may have begun
        self._sent_at = 0.0
        self._answered_at = 0.0
        self._status = 0
        self._error: str | None = None
        self._client_gone = False
        self._interruption: RouterError | None = None
        self._began = self._loop.time()
        self._running = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; `ClientConnection.exchange_done` is called at the end."""
        self._task = self._loop.create_task(self._run())

    # what happens from outside

    def client_gone(self) -> None:
        """The client closed its connection: the replica must know at once, so that it frees the request's blocks."""
        self._client_gone = True
        self._stop()

    def interrupt(self, error: RouterError) -> None:
        """The router cannot go on with this request (drain deadline, idle timeout)."""
        self._interruption = self._interruption or error
        self._stop()

    def pause(self) -> None:
        """The client is slower than its replica."""
        self.paused = True
        if self._relay is not None:
            self._relay.pause()

    def resume(self) -> None:
        """It has caught up."""
        self.paused = False
        if self._relay is not None:
            self._relay.resume()

    def idle_for(self, now: float) -> float:
        """Seconds without a byte in a begun answer."""
        return self._relay.idle_for(now) if self._relay is not None else 0.0

    # what a relay reports

    def answering(self, head: ResponseHead, arrived: float) -> None:
        """The first answer that goes to the client: `arrived` is when its last byte so far came."""
        self._status = head.status
        self._answered_at = self._loop.time()
        self.writer.start(head, self._client.may_keep_alive(self.request))
        if self._retries == 0:
            before = self._sent_at - self._began - self._held_for
            self.router.metrics.added.observe(max(0.0, before) + max(0.0, self._answered_at - arrived))

    def begun(self) -> None:
        """A byte of a body goes to the client: the request is not sent again."""
        self._client.begun(self.request)

    def cut(self, message: str, code: str = "replica_lost") -> None:
        """The answer has begun and cannot go on: end it with an error event, or cut the connection."""
        error = RouterError(502, message, code=code)
        self._status, self._error = 502, code
        if not self.writer.end_with_error(error.as_dict()):
            self._client.abort()

    def can_try_elsewhere(self, replica: Replica) -> bool:
        """Whether a further attempt is allowed and a replica beside this one there for it."""
        return self._begun_elsewhere + 1 < MAX_ATTEMPTS and self.router.fleet.has_available(beside=replica)

    # the request's life

    async def _run(self) -> None:
        self._running = True
        try:
            if self._client_gone or self._interruption is not None:
                raise asyncio.CancelledError
            await self._serve()
        except asyncio.CancelledError:
            if self._interruption is not None and not self._client_gone:
                self._answer_error(self._interruption)
        except RouterError as error:
            self._answer_error(error)
        except Exception:
            log.exception("request %s", self.request.request_id.decode())
            self._answer_error(RouterError(500, "The router failed on this request", code="router_error"))
        finally:
            self._finish()

    async def _serve(self) -> None:
        tried: set[Replica] = set()
        while True:
            replica = self._choose(tried) or await self._hold(tried)
            outcome = await self._attempt(replica)
            if isinstance(outcome, Done):
                return
            tried.add(replica)
            if isinstance(outcome, Refused):
                if self._pass_on(replica, outcome, tried):
                    return
            elif outcome.sent:
                self._count_begun(f"replica {replica.name}: {outcome.reason}")
            self._retries += 1
            self.router.metrics.retries.inc()

    def _choose(self, tried: set[Replica]) -> Replica | None:
        fleet = self.router.fleet
        if not self._keyed and len(fleet.replicas) > 1:
            session = self.request.header(b"x-session-id")
            self._key = request_key(self.router.settings.policy, session, self.request.body())
            self._keyed = True
        return fleet.choose(self._key, tried)

    async def _hold(self, tried: set[Replica]) -> Replica:
        """Wait until a replica may get the request. Raises RouterError (503)."""
        fleet, began = self.router.fleet, self._loop.time()
        with fleet.queue.place(self.request.size // 4) as placed:
            if not placed:
                limit = self.router.settings.max_held
                why = (
                    f"{limit} requests are waiting already (max-held)"
                    if limit
                    else "requests are not held (max-held 0)"
                )
                raise fleet.no_replica(why, "hold_queue_full")
            self.was_held = True
            try:
                while True:
                    left = self._hold_left - (self._loop.time() - began)
                    if left <= 0:
                        waited = f"{self.router.settings.hold_timeout:g} s"
                        raise fleet.no_replica(f"none became ready within {waited} (hold-timeout)", "hold_timeout")
                    await fleet.queue.changed(min(left, self._again) if tried else left)
                    tried.clear()
                    if (replica := self._choose(tried)) is not None:
                        return replica
            finally:
                held = self._loop.time() - began
                self._held_for += held
                self._hold_left -= held

    async def _attempt(self, replica: Replica) -> Outcome:
        """Send the request to a replica and see it through; a connection that proves stale is replaced once."""
        request, fleet = self.request, self.router.fleet
        self._replica_name = replica.name
        more = REQUEST_HEADER if request.use is not None and request.use.counts else b""
        head = request_head(request, replica.spec.base, self._client.peer, request.size, more)
        fresh = False
        with fleet.using(replica):
            while True:
                began = self._loop.time()
                try:
                    connection = await replica.pool.acquire(fresh=fresh)
                except OSError as error:
                    why = f"cannot connect ({error or 'no answer in time'})"
                    fleet.failed(replica, began, why)
                    return Failed(why, sent=fresh)  # the request may have killed it on the connection that seemed stale
                self._relay = relay = Relay(self, replica, connection, began)
                replica.attempts.add(relay)
                self._sent_at = self._loop.time()
                try:
                    connection.send(relay, head, request.body(), bodiless=request.method == b"HEAD")
                    if self.paused:
                        relay.pause()
                    outcome = await relay.outcome
                finally:
                    replica.attempts.discard(relay)
                    relay.close()
                    self._relay = None
                if not (isinstance(outcome, Failed) and outcome.stale and not fresh):
                    return outcome
                fresh = True

    def _pass_on(self, replica: Replica, outcome: Refused, tried: set[Replica]) -> bool:
        """Whether a replica's refusal is the client's answer (then it was sent) rather than a reason to try again."""
        fleet, status = self.router.fleet, outcome.head.status
        if status == 429:  # of a held request: others are passed on as they come
            self._again = QUEUE_FULL_SECONDS
            if self._hold_left > 0:
                return False
        elif status == 503 and outcome.head.header(b"retry-after") is not None:
            replica.health.refused(self._loop.time())
            self._begun_elsewhere += error_code(outcome.body) in BEGUN_CODES
            may_wait = self.router.settings.max_held > 0 or fleet.has_available()
            if may_wait and self._begun_elsewhere < MAX_ATTEMPTS:
                return False
        else:
            self._begun_elsewhere += 1
            if self._begun_elsewhere < MAX_ATTEMPTS and self._choose(tried) is not None:
                return False
        if self.writer.head is not None:
            self.cut(f"The replica {replica.name} answered with status {status}", "replica_failed")
            return True
        head = outcome.head
        head.length = len(outcome.body) if self.request.method != b"HEAD" else head.length
        self.answering(head, self._loop.time())
        self.writer.end(outcome.body)
        return True

    def _count_begun(self, why: str) -> None:
        self._begun_elsewhere += 1
        if self._begun_elsewhere >= MAX_ATTEMPTS:
            raise RouterError(
                502,
                f"{self._begun_elsewhere} attempts failed, the last with: {why}",
                code="replica_failed",
                retry_after=1,
            )

    def _stop(self) -> None:
        if self._relay is not None:
            self._relay.close()
        if self._task is not None and self._running:  # a task that is cancelled before it runs never gets to its end
            self._task.cancel()

    def _answer_error(self, error: RouterError) -> None:
        if self.writer.ended:
            return
        self._status, self._error = error.status, error.code
        if self.writer.head is None:
            self.writer.ended = True
            self.writer.keep_alive = self._client.answer_error(self.request, error)
        elif not self.writer.end_with_error(error.as_dict()):
            self._client.abort()

    def _finish(self) -> None:
        """The one place where a request ends, whatever ended it."""
        status = self._status if self.writer.ended or self._error else 499
        if self._client_gone and not self.writer.ended and not self._error:
            status = 499
        if self.request.use is not None:
            self.request.use.settle(status)
        self.router.account(self.request, self._client.peer, status, self._summary())
        self._client.exchange_done(self, self.writer.keep_alive and self.writer.ended)

    def _summary(self) -> dict[str, Any]:
        """The request's own part of its access log line; seconds, bytes; no content."""
        received = self.request.received
        first = self._answered_at - received if self._answered_at else None
        use = self.request.use
        return {
            **({"tokens": use.charged} if use is not None and use.counts else {}),
            "replica": self._replica_name or None,
            "retries": self._retries,
            "held": round(self._held_for, 4),
            "first_byte": None if first is None else round(first, 4),
            "bytes_out": self.writer.bytes_sent,
            "error": self._error,
        }
