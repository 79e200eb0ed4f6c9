"""Reads the metrics of many pods at once, each at its own address, within a time that all of them share. Effects only.

Bounded in every way: so many at a time, so long for each, so many bytes of an answer, so long for a round; who has not
answered by then is told of as missing. Connections are kept. An answer belongs to the pod that was asked: an address
goes to another pod, so that one which says another name is none, and two pods at one address are not asked at all.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import aiohttp
from yarl import URL

from kvern_operator.answers import read_text
from kvern_operator.autoscale.readings import (
    ENGINE_SERIES,
    HELD,
    POD_HEADER,
    Round,
    Target,
    read_engine,
    read_router,
)
from kvern_operator.autoscale.signals import Scrape
from kvern_operator.queue import Clock

__all__ = ["OwnThread", "Round", "Scraper", "Target"]

AT_ONCE = 64
LONGEST_ANSWER = 4 * 2**20  # bytes
T = TypeVar("T")


class Scraper:
    """`round` asks once. Seconds: `timeout` for each pod, `within` for all of them together."""

    def __init__(
        self, timeout: float = 2.0, within: float = 4.0, at_once: int = AT_ONCE, clock: Clock = time.monotonic
    ) -> None:
        self._timeout, self._within, self._at_once, self._clock = timeout, within, at_once, clock
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Give the connections back."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def round(self, targets: Iterable[Target]) -> Round:
        """Ask each of them. Never raises for what a pod does."""
        targets = list(targets)
        shared = {address for address, count in Counter(t.address for t in targets).items() if count > 1}
        engines: dict[str, Scrape] = {}
        routers: dict[str, tuple[float, float, float]] = {}
        failures = {t.uid: "two pods have one address" for t in targets if t.address in shared}
        slots = asyncio.Semaphore(self._at_once)

        async def ask(target: Target) -> None:
            try:
                async with slots:
                    text = await self._text(target)
                    at = self._clock()
                if target.routing:
                    routers[target.uid] = (at, *read_router(text))
                else:
                    engines[target.uid] = read_engine(target.uid, at, text)
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError) as error:
                failures[target.uid] = str(error) or "no answer in time"

        asked = [t for t in targets if t.address not in shared]
        tasks = [asyncio.create_task(ask(target), name=f"scrape {target.name}") for target in asked]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=self._within)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        for target in asked:
            if target.uid not in engines and target.uid not in routers:
                failures.setdefault(target.uid, "no answer within the round")
        return Round(engines, routers, failures)

    async def _text(self, target: Target) -> str:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, limit_per_host=1, keepalive_timeout=30.0)
            self._session = aiohttp.ClientSession(trust_env=False, connector=connector, auto_decompress=True)
        names = HELD if target.routing else ENGINE_SERIES
        url = URL(f"http://{target.address}/metrics").with_query([("name[]", name) for name in names])
        timeout = aiohttp.ClientTimeout(total=self._timeout)
        async with self._session.get(url, timeout=timeout, allow_redirects=False) as answer:
            if answer.status != 200:
                raise ValueError(f"HTTP {answer.status}")
            said = answer.headers.get(POD_HEADER, target.name)
            if said != target.name:
                raise ValueError(f"{said} answers at its address")
            return await read_text(answer, LONGEST_ANSWER)


class OwnThread:
    """A loop in a thread of its own, so that reading hundreds of answers never holds up who reconciles."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    async def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do something there and wait for it here. What is cancelled here is cancelled there."""

        async def there() -> T:
            return await work()

        future: Any = asyncio.run_coroutine_threadsafe(there(), self._loop)
        result: T = await asyncio.wrap_future(future)
        return result

    async def stop(self) -> None:
        """End it; nothing is left running."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join, 5.0)
        if not self._thread.is_alive():
            self._loop.close()
