"""The active probe: `GET /ready` on each listed replica, on a connection of its own each time.

A fresh connection, because one that is kept would ask the same one of a pod's server processes for ever.
"""

from __future__ import annotations

import asyncio
import logging
import random

from kvern_router.fetch import fetch
from kvern_router.fleet import Fleet, Replica
from kvern_router.health import Probe
from kvern_router.settings import Settings

log = logging.getLogger("kvern.router")
EAGER_INTERVAL = 0.25  # seconds between probes of a replica that is not ready: held requests wait for it
POD_HEADER = b"x-kvern-pod"  # the name of the pod that answers, where it is one


async def probe_replica(replica: Replica, timeout: float) -> Probe | None:
    """Ask once. None: no answer within `timeout` seconds. A server without /ready (404) counts as ready.

    An address outlives its pod: somebody else may have it by now, who answers, too. So a replica that says its name is
    believed by it, and one that has said it once says it always.
    """
    try:
        async with asyncio.timeout(timeout):
            head = (await fetch(replica.pool, f"{replica.spec.base}/ready", replica.authority)).head
    except TimeoutError:
        return None
    except OSError:
        return Probe.UNREACHABLE
    name = head.header(POD_HEADER)
    if name is None and replica.says_name:
        return Probe.SOMEBODY_ELSE
    if name is not None:
        if name != replica.name.encode():
            return Probe.SOMEBODY_ELSE
        replica.says_name = True
    return Probe.READY if head.status < 400 or head.status == 404 else Probe.NOT_READY


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
