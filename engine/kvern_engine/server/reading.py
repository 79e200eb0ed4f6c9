"""From the bytes of a request to its fields: large bodies are looked at off the event loop, so that nobody waits."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvern_engine.config import EngineConfig
from kvern_engine.server.asgi import Receive, Scope, check_json_type, read_body
from kvern_engine.server.body import SMALL_BYTES, is_harmless, scan
from kvern_engine.server.errors import ApiError
from kvern_engine.server.limits import BodyRoom, RequestLimits
from kvern_engine.server.protocol import Body, parse_body

T = TypeVar("T", bound=Body)


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
            body = await read_body(scope, receive, config.max_body_bytes, config.body_timeout_seconds, place)
            if len(body) <= SMALL_BYTES:
                return parse_body(model, body, self._limits)
            return await asyncio.get_running_loop().run_in_executor(self._pool, self._parse_large, model, body)

    def _parse_large(self, model: type[T], body: bytes) -> T:
        depth = self._limits.json_depth
        if not is_harmless(body, depth) and (problem := scan(body, depth)) is not None:
            raise ApiError(problem, code="invalid_json")
        return parse_body(model, body, self._limits)
