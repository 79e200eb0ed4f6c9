"""API keys: who may send requests, and whose requests they are. The file is re-read on change: keys are rotated without
a restart.

A tenant is a key, or all the keys that a file gives one name. Its name goes into the access log and the limits hang on
it (tenants.py); a key itself is kept as a digest only and appears nowhere.
"""

from __future__ import annotations

import hmac
import re
import secrets
from hashlib import sha256

from kvern_router.errors import RouterError
from kvern_router.http1 import Request

# `name: key`. A key has no colon followed by a space: neither RFC 6750 nor anybody's generator makes one.
_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,62}):[ \t]+(\S+)")
_UNNAMED_DIGITS = 8


class ApiKeys:
    """The accepted keys, as digests under a secret of this process, with the names of their tenants.

    What a client sends is looked up by such a digest, which it can neither know nor choose: the time that takes tells
    nothing of the keys, nor depends on how many there are.
    """

    def __init__(self) -> None:
        self._blind = secrets.token_bytes(32)
        self._known: dict[bytes, str] = {}
        self.secrets: tuple[bytes, ...] = ()  # what routers with this file have in common, and those with the last one

    @property
    def tenants(self) -> frozenset[str]:
        """The names of all tenants."""
        return frozenset(self._known.values())

    def load(self, text: str) -> None:
        """Take over a file's keys: one a line, `name: key` for a tenant of that name, blank lines and lines that begin
        with # aside. Raises ValueError, and keeps what there was."""
        known: dict[bytes, str] = {}
        digests: set[bytes] = set()
        for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            named = _NAMED.fullmatch(line)
            key = (named[2] if named else line).encode()
            digest = sha256(key).digest()
            digests.add(digest)
            name = named[1] if named else f"key-{digest.hex()[:_UNNAMED_DIGITS]}"
            if known.setdefault(self._tag(key), name) != name:
                raise ValueError(f"line {number}: this key stands in the file twice, under two names")
        if not known:
            raise ValueError("the API keys file holds no key; expected one a line")
        self._known = known
        shared = sha256(b"kvern-routers" + b"".join(sorted(digests))).digest()
        self.secrets = (shared, *(s for s in self.secrets[:1] if s != shared))

    def tenant(self, request: Request) -> str:
        """The name of the tenant whose key a request carries. Raises RouterError (401)."""
        given = _presented(request)
        found = self._known.get(self._tag(given), "")
        if not given or not found:
            said = "No API key was given" if not given else "The API key is not valid"
            raise RouterError(
                401,
                f"{said}: send it as 'Authorization: Bearer KEY'",
                kind="invalid_request_error",
                code="invalid_api_key",
                headers=((b"www-authenticate", b"Bearer"),),
            )
        return found

    def _tag(self, key: bytes) -> bytes:
        return hmac.digest(self._blind, key, "sha256")


def _presented(request: Request) -> bytes:
    scheme, _, key = (request.header(b"authorization") or b"").partition(b" ")
    if scheme.lower() == b"bearer" and key.strip():
        return key.strip()
    return (request.header(b"x-api-key") or b"").strip()
