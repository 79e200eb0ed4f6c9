"""The active probe: `GET /ready` on each listed replica, on a connection of its own each time.

A fresh connection, because one that is kept would ask the same one of a pod's server processes for ever.
"""

from __future__ import annotations

import asyncio
import logging
import random

from kvern_router.fleet import Fleet, Replica
from kvern_router.health import Probe
from kvern_router.http1 import ResponseHead
from kvern_router.settings import Settings

log = logging.getLogger("kvern.router")
EAGER_INTERVAL = 0.25  # seconds between probes of a replica that is not ready: held requests wait for it


class _Answer:
    """The sink of a probe: the status, or an error."""

    def __init__(self) -> None:
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def on_head(self, head: ResponseHead) -> None:
        if not self.status.done():
            self.status.set_result(head.status)

    def on_body(self, data: bytes) -> None:
        pass

    def on_complete(self) -> None:
        pass

    def on_lost(self, error: Exception) -> None:
        if not self.status.done():
            self.status.set_exception(error)


async def probe_replica(replica: Replica, timeout: float) -> Probe | None:
    """Ask once. None: no answer within `timeout` seconds. A server without /ready (404) counts as ready."""
    connection = None
    answer = _Answer()
    try:
        async with asyncio.timeout(timeout):
            connection = await replica.pool.acquire(fresh=True)
            path = f"{replica.spec.base}/ready".encode()
            head = b"GET " + path + b" HTTP/1.1\r\nhost: " + replica.authority + b"\r\nconnection: close\r\n"
            connection.send(answer, head + b"user-agent: kvern-router\r\naccept: */*\r\n\r\n")
            status = await answer.status
    except TimeoutError:
        return None
    except OSError:
        return Probe.UNREACHABLE
    finally:
        if connection is not None:
            connection.drop(answer)  # unless its answer is complete, and it somebody else's
    return Probe.READY if status < 400 or status == 404 else Probe.NOT_READY


async def probe_forever(fleet: Fleet, replica: Replica, settings: Settings) -> None:
    """Probe one replica until cancelled, and tell the fleet what changed."""
    loop = asyncio.get_running_loop()
    while True:
        began = loop.time()
        answer = await probe_replica(replica, settings.probe_timeout)
        now = loop.time()
        before, was_available = replica.health.probe, replica.available(now)
        replica.health.probed(answer, began, now)
        after = replica.health.probe
        if after is not before:
            log.info("replica %s: %s (was: %s)", replica.name, after, before)
        if after is not before or replica.available(now) != was_available or after is Probe.HUNG:
            fleet.probed(replica)
        ready = after is Probe.READY and replica.health.silent_probes == 0
        interval = settings.probe_interval if ready else min(EAGER_INTERVAL, settings.probe_interval)
        await asyncio.sleep(max(0.0, interval * random.uniform(0.9, 1.1) - (now - began)))
