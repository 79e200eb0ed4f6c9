"""The health port: /healthz, /readyz and /metrics.

Alive is who hears: the loop ticks and every watch has spoken lately. Ready is also a standby that waits for the Lease:
else no rolling update would end.
"""

import asyncio
import time
from collections.abc import Callable

from aiohttp import web

from kvern_operator.metrics import CONTENT_TYPE, Metrics
from kvern_operator.queue import Clock

TICK = 1.0  # seconds
LATE = 30.0  # seconds without a tick after which the loop counts as stuck
DEAF = 300.0  # seconds without a word from some watch; kopf starts a silent one again after 80

# "" where all is well, else what is wrong.
Check = Callable[[], str]


class Health:
    """The server. `alive` and `ready` are asked at each request, beside the loop's own tick."""

    def __init__(self, metrics: Metrics, alive: Check, ready: Check, clock: Clock = time.monotonic) -> None:
        self._metrics, self._alive, self._ready, self._clock = metrics, alive, ready, clock
        self._ticked = clock()
        self._runner: web.AppRunner | None = None
        self._ticker: asyncio.Task[None] | None = None

    async def start(self, port: int, host: str = "0.0.0.0") -> int:
        """Listen; returns the port. Raises OSError."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
                web.get("/metrics", self._metrics_page),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        self._ticker = asyncio.create_task(self._tick(), name="health ticker")
        chosen: int = self._runner.addresses[0][1]
        return chosen

    async def stop(self) -> None:
        """Stop listening."""
        if self._ticker is not None:
            self._ticker.cancel()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _tick(self) -> None:
        while True:
            self._ticked = self._clock()
            await asyncio.sleep(TICK)

    async def _healthz(self, request: web.Request) -> web.Response:
        late = self._clock() - self._ticked
        return _answer(f"the event loop has not ticked for {late:.0f} s" if late > LATE else self._alive())

    async def _readyz(self, request: web.Request) -> web.Response:
        return _answer(self._ready())

    async def _metrics_page(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE})


def _answer(trouble: str) -> web.Response:
    return web.Response(text=f"{trouble or 'ok'}\n", status=503 if trouble else 200)
