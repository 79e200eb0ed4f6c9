"""API keys: who may send requests. The keys' file is re-read on change, so keys are rotated without a restart.

A tenant is a key; limits a tenant (requests and tokens a minute) can hang on what `tenant` returns.
"""

from __future__ import annotations

import hmac
from hashlib import sha256

from kvern_router.errors import RouterError
from kvern_router.http1 import Request


class ApiKeys:
    """The accepted keys, as digests."""

    def __init__(self) -> None:
        self._digests: tuple[bytes, ...] = ()

    def load(self, text: str) -> None:
        """Take over a file's keys: one a line, blank lines and lines that begin with # aside. Raises ValueError."""
        lines = (line.strip() for line in text.splitlines())
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise ValueError("the API keys file holds no key; expected one a line")
        self._digests = tuple(sha256(key.encode()).digest() for key in keys)

    def tenant(self, request: Request) -> str:
        """A short name of the key that a request carries (its digest's first hex digits). Raises RouterError (401).

        Every key is compared in constant time, found or not: the answer's timing tells nothing of them.
        """
        given = _presented(request)
        digest = sha256(given).digest()
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(known, digest)
        if not given or not found:
            said = "No API key was given" if not given else "The API key is not valid"
            raise RouterError(
                401,
                f"{said}: send it as 'Authorization: Bearer KEY'",
                kind="invalid_request_error",
                code="invalid_api_key",
                headers=((b"www-authenticate", b"Bearer"),),
            )
        return digest.hex()[:12]


def _presented(request: Request) -> bytes:
    scheme, _, key = (request.header(b"authorization") or b"").partition(b" ")
    if scheme.lower() == b"bearer" and key.strip():
        return key.strip()
    return (request.header(b"x-api-key") or b"").strip()
