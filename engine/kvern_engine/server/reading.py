"""From the bytes of a request to its fields: large bodies are looked at off the event loop, so that nobody waits.

A thread that computes keeps Python's lock until the loop has waited for it for the switch interval, and the loop asks
for the lock again before each of its callbacks: twenty sockets that are ready wait twenty times. So the thread sleeps
for a moment after each tenth of a millisecond of work, which gives the lock away before anybody has to ask for it.
"""

import asyncio
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvern_engine.config import EngineConfig
from kvern_engine.server.asgi import Receive, Scope, check_json_type, read_parts
from kvern_engine.server.body import SMALL_BYTES, scan
from kvern_engine.server.errors import ApiError
from kvern_engine.server.limits import BodyRoom, RequestLimits
from kvern_engine.server.protocol import Body, parse_body

T = TypeVar("T", bound=Body)
R = TypeVar("R")
_WORK_SECONDS, _REST_SECONDS = 0.0001, 0.00005


class RequestReader:
    """Reads and parses the bodies of one API server, within the limits of its configuration."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._limits = RequestLimits.of(config)
        self.room = BodyRoom(config.max_buffered_bytes)
        # One thread: large bodies wait for each other, and nothing else waits for them.
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bodies")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def read(self, scope: Scope, receive: Receive, model: type[T]) -> T:
        """The request of this kind in a body. Raises ApiError 400, 408, 413, 415 or 503, and ClientGone."""
        check_json_type(scope)
        config = self._config
        with self.room.place() as place:
            parts = await read_parts(scope, receive, config.max_body_bytes, config.body_timeout_seconds, place)
            if place.size <= SMALL_BYTES:
                return parse_body(model, b"".join(parts), self._limits)
            return await asyncio.get_running_loop().run_in_executor(self._pool, self._parse_large, model, parts)

    def _parse_large(self, model: type[T], parts: list[bytes]) -> T:
        if (problem := with_rests(scan(parts, self._limits.json_depth))) is not None:
            raise ApiError(problem, code="invalid_json")
        body = b"".join(parts)
        parts.clear()  # or both would be in memory
        return parse_body(model, body, self._limits)


def with_rests(steps: Generator[None, None, R]) -> R:
    """What `steps` returns; other threads have the processor, and Python's lock, after each piece of work."""
    began = time.perf_counter()
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: R = end.value
            return result
        if time.perf_counter() - began >= _WORK_SECONDS:
            time.sleep(_REST_SECONDS)
            began = time.perf_counter()
