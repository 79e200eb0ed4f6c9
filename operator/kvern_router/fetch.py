"""Ask a server something small: a probe of a replica, the usage that another router counted."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kvern_router.http1 import ResponseHead
from kvern_router.upstream import ConnectionPool

MAX_BODY = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Fetched:
    """An answer; `body` is empty where only the head was asked for."""

    head: ResponseHead
    body: bytes


class _Answer:
    """The sink: resolves at the head, or at the end of the body."""

    def __init__(self, whole: bool) -> None:
        self._whole = whole
        self._head: ResponseHead | None = None
        self._body: list[bytes] = []
        self._size = 0
        self.done: asyncio.Future[Fetched] = asyncio.get_running_loop().create_future()

    def on_head(self, head: ResponseHead) -> None:
        self._head = head
        if not self._whole:
            self._resolve()

    def on_body(self, data: bytes) -> None:
        self._size += len(data)
        if not self._whole:
            return
        if self._size > MAX_BODY:
            self.on_lost(ConnectionError(f"its answer is larger than {MAX_BODY} bytes"))
        else:
            self._body.append(data)

    def on_complete(self) -> None:
        self._resolve()

    def on_lost(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def _resolve(self) -> None:
        if not self.done.done() and self._head is not None:
            self.done.set_result(Fetched(self._head, b"".join(self._body)))


async def fetch(
    pool: ConnectionPool, path: str, authority: bytes, headers: bytes = b"", *, whole: bool = False
) -> Fetched:
    """GET `path` on a connection of its own. whole: with the body. Raises OSError; the caller limits the time."""
    connection = await pool.acquire(fresh=True)
    answer = _Answer(whole)
    try:
        head = b"GET " + path.encode() + b" HTTP/1.1\r\nhost: " + authority + b"\r\nconnection: close\r\n"
        connection.send(answer, head + b"user-agent: kvern-router\r\naccept: */*\r\n" + headers + b"\r\n")
        return await answer.done
    finally:
        connection.drop(answer)  # unless its answer is complete, and it somebody else's
