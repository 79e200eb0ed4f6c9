"""DNS names of replicas, looked up while nobody is known to answer under them.

The operator's list says where replicas are. It is late where a kubelet is slow to carry it here, and stale while there
is no operator: a pod that was replaced meanwhile has another address. Its DNS name leads there anyway. Whether what is
found is ready it says itself (probe.py): an address in DNS may be that of a pod that loads, or of one that is going.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading

from kvern_router.fleet import Fleet
from kvern_router.replicas import HostSpec

log = logging.getLogger("kvern.router")
INTERVAL = 1.0  # seconds; a cluster's DNS keeps its answers for about five
MAX_AT_ONCE = 8


def resolve(host: str) -> str:
    """The first address of a name, blocking. Raises OSError. The name is taken as complete: without the final dot a
    pod's resolver would try it under every search domain first."""
    name = host if host.endswith(".") or "." not in host else f"{host}."
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return str(found[0][4][0])


class Lookup:
    """Looks up for a fleet, each name at most once at a time."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._loop = asyncio.get_running_loop()
        self._under_way: set[str] = set()
        self._slots = asyncio.Semaphore(MAX_AT_ONCE)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            for host in self._fleet.to_look_up():
                if host.host not in self._under_way:
                    await self._slots.acquire()
                    self._start(host)
            await asyncio.sleep(INTERVAL)

    def _start(self, host: HostSpec) -> None:
        # A thread of its own, which nobody waits for at the end: a resolver may take many seconds to give up, and the
        # end of this process is not to wait for it.
        self._under_way.add(host.host)
        threading.Thread(target=self._look_up, args=(host,), name="look-up", daemon=True).start()

    def _look_up(self, host: HostSpec) -> None:
        try:
            address = resolve(host.host)
        except (OSError, UnicodeError) as error:  # UnicodeError: no possible name
            log.debug("looking up %s: %s", host.host, error)
            address = ""
        try:
            self._loop.call_soon_threadsafe(self._looked_up, host, address)
        except RuntimeError:
            return  # the loop has ended meanwhile

    def _looked_up(self, host: HostSpec, address: str) -> None:
        self._under_way.discard(host.host)
        self._slots.release()
        if address:
            self._fleet.found(host, address)
