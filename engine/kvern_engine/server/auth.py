"""API keys and the admin token: bearer tokens compared in constant time, never logged."""

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from kvern_engine.server.errors import ApiError


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()


class BearerKeys:
    """A set of accepted bearer tokens; an empty set accepts everybody."""

    def __init__(self, keys: Iterable[str]) -> None:
        # Digests have one length, and all of them are compared: time tells neither a key's length nor its place.
        self._digests = [_digest(k.encode("utf-8", "surrogateescape")) for k in keys if k]

    @property
    def required(self) -> bool:
        return bool(self._digests)

    def accepts(self, authorization: str | None) -> bool:
        """`authorization` is the header's bytes read as Latin-1, as HTTP has it; keys are compared in UTF-8."""
        if not self._digests:
            return True
        scheme, _, token = (authorization or "").partition(" ")
        given = _digest(token.strip().encode("latin-1", "backslashreplace"))
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(matches) and scheme.lower() == "bearer"

    def check(self, authorization: str | None) -> None:
        """Raises ApiError 401 unless the header carries one of the keys."""
        if self.accepts(authorization):
            return
        if not authorization:
            message = "You didn't provide an API key. Send it in a header: Authorization: Bearer YOUR_KEY."
        else:
            message = "Incorrect API key provided. Send a valid one in a header: Authorization: Bearer YOUR_KEY."
        raise ApiError(
            message,
            status=401,
            code="invalid_api_key",
            type="invalid_request_error",
            headers={"WWW-Authenticate": "Bearer"},
        )


def read_token_file(path: str) -> str:
    """The token of the admin port. Raises ValueError where the file is missing or empty."""
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except OSError as e:
        raise ValueError(f"admin_token_file {path!r} cannot be read: {e.strerror}; put a bearer token in it") from e
    if not token:
        raise ValueError(f"admin_token_file {path!r} is empty; put a bearer token in it")
    return token
