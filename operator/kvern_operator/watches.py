"""The connection that kopf watches through, and whether its watches are alive.

A watch that has fallen silent looks like a quiet cluster. Every watch gets a bookmark a minute, so the age of the last
byte on each tells them apart; an open port or a running loop does not.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import aiohttp

from kvern_operator.queue import Clock


@dataclass
class _Watch:
    response: aiohttp.ClientResponse
    seen: int  # bytes
    at: float  # when there were new ones


class Watches:
    """Keeps an eye on the streams of one session. `listed(path)` is called for each list that is not the first."""

    def __init__(self, listed: Callable[[str], None] = lambda path: None, clock: Clock = time.monotonic) -> None:
        self.listed, self._clock = listed, clock
        self._watches: dict[str, _Watch] = {}
        self._lists: set[str] = set()

    def trace(self) -> aiohttp.TraceConfig:
        """What a session needs to be watched over."""
        config = aiohttp.TraceConfig()
        config.on_request_end.append(self._ended)
        return config

    async def _ended(
        self, session: aiohttp.ClientSession, context: SimpleNamespace, params: aiohttp.TraceRequestEndParams
    ) -> None:
        """A response's head has come; what follows of a watch is read from its stream's counter."""
        if params.method.upper() != "GET" or params.response.status != 200:
            return
        path, query = params.response.url.path, params.response.url.query
        if query.get("watch") == "true":
            self._watches[path] = _Watch(params.response, 0, self._clock())
        elif query.get("continue"):
            return  # a further page of the same list
        elif path in self._lists:
            self.listed(path)
        else:
            self._lists.add(path)

    @property
    def count(self) -> int:
        """How many collections are watched, or were."""
        return len(self._watches)

    def age(self) -> float:
        """Seconds since the most silent watch has said anything; 0 where there is none yet."""
        now, oldest = self._clock(), 0.0
        for watch in self._watches.values():
            seen = watch.response.content.total_bytes
            if seen != watch.seen:
                watch.seen, watch.at = seen, now
            oldest = max(oldest, now - watch.at)
        return oldest
