"""What the other routers of the service charged their tenants: asked for a few times a second while there are limits.

Without it a tenant would have its limit once a router, or, with the limit divided among them, only a part of it on one
connection. What the others count is known here a moment late: a tenant may exceed its limit by what it uses at all
routers within an interval. A router that does not answer is left out; nothing waits for it.

Routers know each other by what they have in common: the file of API keys. Who has not got it is told nothing.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
import secrets
from collections.abc import Sequence
from typing import Any

from kvern_router.auth import ApiKeys
from kvern_router.errors import RouterError
from kvern_router.fetch import fetch
from kvern_router.http1 import Request
from kvern_router.tenants import Tenants
from kvern_router.upstream import ConnectionPool

log = logging.getLogger("kvern.router")
PATH = "/-/usage"
SECRET_HEADER = b"x-kvern-router"
ASK_SECONDS = 0.25  # between two questions to a router; with very many of them, longer
ANSWER_SECONDS = 2.0
Address = tuple[str, int]


class Peers:
    """The other routers of this service, by address."""

    def __init__(self, tenants: Tenants, keys: ApiKeys | None, connect_timeout: float) -> None:
        self._tenants = tenants
        self._keys = keys
        self._connect_timeout = connect_timeout
        self._boots: dict[Address, str] = {}
        self._silent: set[Address] = set()
        self.boot = secrets.token_hex(8)  # of this run of this router
        self.addresses: tuple[Address, ...] = ()  # this router's own may be among them

    def answer(self, request: Request) -> dict[str, Any]:
        """What another router is told. Raises RouterError (403)."""
        given = request.header(SECRET_HEADER) or b""
        if self._keys is not None and not any(hmac.compare_digest(given, s) for s in self._secrets()):
            message = "What tenants use is told to this service's routers only, which have the same API keys"
            raise RouterError(403, message, kind="invalid_request_error", code="forbidden")
        return {"boot": self.boot, "tenants": self._tenants.charged()}

    async def ask_forever(self) -> None:
        """Ask all others in turn until cancelled."""
        while True:
            if self._tenants.limits.any and self.addresses:
                await asyncio.gather(*(self._ask(address) for address in self.addresses))
                gone = [address for address in self._boots if address not in self.addresses]
                for address in gone:
                    del self._boots[address]
                self._tenants.forget_peers(self._boots.values())
            await asyncio.sleep(max(ASK_SECONDS, 0.05 * len(self.addresses)))

    async def _ask(self, address: Address) -> None:
        if self._boots.get(address) == self.boot:
            return  # that is this router
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                said = await self._fetch(address)
            boot, tenants = str(said["boot"]), _numbers(said["tenants"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if address not in self._silent:
                self._silent.add(address)
                why = str(error) or "no answer in time"
                log.warning("router %s:%d: what it counts is not known (%s)", *address, why)
            return
        self._silent.discard(address)
        self._boots[address] = boot
        if boot != self.boot:
            self._tenants.elsewhere(boot, tenants)

    async def _fetch(self, address: Address) -> Any:
        host, port = address
        pool = ConnectionPool(host, port, self._connect_timeout)
        authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        status = 0
        for secret in self._secrets():
            headers = SECRET_HEADER + b": " + secret + b"\r\n"
            fetched = await fetch(pool, PATH, authority.encode(), headers, whole=True)
            status = fetched.head.status
            if status == 200:
                return json.loads(fetched.body)
        raise ValueError(f"status {status}")

    def _secrets(self) -> Sequence[bytes]:
        """The present one first: while keys are rotated the other router may still have the file before."""
        return [s.hex().encode() for s in self._keys.secrets] if self._keys is not None else [b"none"]


def _numbers(said: Any) -> dict[str, tuple[float, float, float, float]]:
    """What another router said, checked. Raises ValueError, TypeError."""
    out = {}
    for name, values in said.items():
        a, b, c, d = (float(value) for value in values)
        if not all(math.isfinite(value) for value in (a, b, c, d)):
            raise ValueError(f"tenant {name}: {values}")
        out[str(name)] = (a, b, c, d)
    return out
