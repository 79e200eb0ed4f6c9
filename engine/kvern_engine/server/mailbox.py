"""Where an HTTP request's outputs wait for it, and what is known of a request in flight. Plain state of one event loop;
who fills it is `engine_client.py`."""

import asyncio

from kvern_engine.ipc import AddRequest, TokenOutput
from kvern_engine.metrics import RequestTimes


class ClientGone(Exception):
    """The HTTP client has disconnected: nobody waits for this request any more."""


class Mailbox:
    """Where the outputs of one HTTP request (one or more engine requests) arrive. One reader."""

    __slots__ = ("_closed", "_pending", "_waiter", "backlog")

    def __init__(self) -> None:
        self.backlog = 0  # tokens and alternatives that wait
        self._pending: list[tuple[EngineRequest, TokenOutput]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._closed: Exception | None = None

    def put(self, request: "EngineRequest", output: TokenOutput, size: int = 0) -> None:
        """`size`: how much it adds to the backlog."""
        if self._closed is not None:
            return
        self._pending.append((request, output))
        self.backlog += size
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def close(self, reason: Exception) -> None:
        """Make the reader raise `reason`, now or at its next `get`."""
        self._closed = self._closed or reason
        self._pending = []
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def get(self) -> "list[tuple[EngineRequest, TokenOutput]]":
        """Everything that has arrived; waits while that is nothing. Raises what `close` was given."""
        while not self._pending:
            if self._closed is not None:
                raise self._closed
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._closed is not None:
            raise self._closed
        pending, self._pending, self.backlog = self._pending, [], 0
        return pending


class EngineRequest:
    """An AddRequest in flight: which engine has it, where its outputs go, and its times for the metrics."""

    __slots__ = ("cost", "counts", "engine", "engine_died", "id", "key", "last_at", "left", "mailbox", "tag", "times")

    def __init__(self, request: AddRequest, engine: int, mailbox: Mailbox, key: tuple[str, str], tag: int) -> None:
        self.id = request.request_id
        self.engine = engine
        self.mailbox = mailbox
        self.tag = tag  # the caller's: which prompt of the HTTP request this is
        self.key = key
        self.left = request.params.n  # choices that the engine has not finished
        self.last_at = [0.0] * self.left
        self.counts = [0] * self.left
        self.engine_died = False
        most = request.params.max_tokens or 0
        self.cost = len(request.prompt_token_ids) + most * request.params.n
        self.times = RequestTimes(request.arrival, len(request.prompt_token_ids), most, request.params.n)
