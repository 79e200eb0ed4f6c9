"""Request heads judged and response heads written. Pure; parsing is httptools'.

What two parsers in a row could read differently (request smuggling) is refused here, before anything is answered.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

from kvern_engine.server.errors import ApiError

Headers = list[tuple[bytes, bytes]]  # names in lower case

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
_CLOSE = {"Connection": "close"}


@dataclass(frozen=True, slots=True)
class WireLimits:
    """What a connection may take; sizes in bytes, times in seconds."""

    head_bytes: int = 64 << 10
    headers: int = 256
    head_seconds: float = 30.0  # from a head's first byte to its last
    keep_alive_seconds: float = 75.0
    slow_client_seconds: float = 60.0  # for a client that takes too little of what it asked for
    connections: int = 16384


@dataclass(slots=True)
class Head:
    """A request's line and headers, filled in by the parser's callbacks."""

    began: float  # when its first byte arrived, loop time
    method: str = ""
    target: bytes = b""
    version: str = "1.1"
    headers: Headers = field(default_factory=list)
    size: int = 0  # bytes of line and headers so far

    def values(self, name: bytes) -> list[bytes]:
        """All values of a header; `name` in lower case."""
        return [value for key, value in self.headers if key == name]

    @property
    def content_length(self) -> int | None:
        """Its Content-Length, None without one. Digits only: the parser has seen to it."""
        values = self.values(b"content-length")
        return int(values[0]) if values else None

    def framing(self) -> bytes:
        """The header that says how the body is framed, as a line; empty where there is no body."""
        if self.values(b"transfer-encoding"):
            return b"transfer-encoding: chunked\r\n"
        return b"content-length: %d\r\n" % self.content_length if self.content_length else b""

    @property
    def expects_continue(self) -> bool:
        return self.version == "1.1" and any(v.strip().lower() == b"100-continue" for v in self.values(b"expect"))


def invalid(message: str, status: int = 400, code: str = "invalid_http") -> ApiError:
    """A request that cannot be understood, or must not be; its connection is closed after the answer."""
    return ApiError(message, status=status, code=code, headers=dict(_CLOSE))


def head_too_large(limits: WireLimits) -> ApiError:
    text = f"The request line and headers must be at most {limits.head_bytes} bytes (max_header_bytes)."
    return invalid(text, 431, "headers_too_large")


def too_many_headers(limits: WireLimits) -> ApiError:
    text = f"A request must have at most {limits.headers} headers (max_headers)."
    return invalid(text, 431, "too_many_headers")


def head_too_slow(limits: WireLimits) -> ApiError:
    text = f"The headers did not arrive within {limits.head_seconds:g} seconds (header_timeout_seconds)."
    return invalid(text, 408, "request_timeout")


def check_head(head: Head, limits: WireLimits) -> ApiError | None:
    """What is wrong with a complete head, or None. Brings an absolute target to origin form."""
    if head.size > limits.head_bytes:
        return head_too_large(limits)
    if len(head.headers) > limits.headers:
        return too_many_headers(limits)
    codings, lengths = head.values(b"transfer-encoding"), head.values(b"content-length")
    if codings and lengths:
        return invalid("A request has either Content-Length or Transfer-Encoding, not both.")
    if codings and head.version != "1.1":
        return invalid(f"Transfer-Encoding is not part of HTTP/{head.version}.")
    if codings and (len(codings) > 1 or codings[0].strip().lower() != b"chunked"):
        return invalid(f"Transfer-Encoding {_shown(b', '.join(codings))}: only chunked is understood.", 501)
    if len(lengths) > 1:
        return invalid(f"A request has at most one Content-Length, got {len(lengths)}.")
    for value in head.values(b"expect"):
        if value.strip().lower() != b"100-continue":
            return invalid(f"Expect {_shown(value)}: only 100-continue is understood.", 417)
    hosts = len(head.values(b"host"))
    if hosts > 1 or (hosts == 0 and head.version == "1.1"):
        return invalid(f"A request has exactly one Host header, got {hosts}.")
    if head.method == "CONNECT":
        return invalid("CONNECT is not supported: this is no forward proxy.", 405)
    return _check_target(head)


def _check_target(head: Head) -> ApiError | None:
    target = head.target
    if target.startswith((b"http://", b"https://")):
        rest = target.split(b"/", 3)
        head.target = target = b"/" + rest[3] if len(rest) > 3 else b"/"
    if not target.isascii() or not (target.startswith(b"/") or (target == b"*" and head.method == "OPTIONS")):
        return invalid(f"The request target {_shown(target)} is no path: it must begin with / and be ASCII.")
    return None


def _shown(value: bytes) -> str:
    return repr(value[:100].decode("latin-1"))


def scope_of(head: Head, client: tuple[str, int] | None, server: tuple[str, int | None] | None) -> dict[str, Any]:
    """ASGI's scope of a request."""
    target = head.target.partition(b"#")[0]
    raw_path, _, query = target.partition(b"?")
    path = raw_path.decode("latin-1")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": head.version,
        "method": head.method,
        "scheme": "http",
        "path": unquote(path) if "%" in path else path,
        "raw_path": raw_path,
        "query_string": query,
        "root_path": "",
        "headers": head.headers,
        "client": client,
        "server": server,
        "state": {},
    }


def _status_line(status: int) -> bytes:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()


_STATUS_LINES = {status: _status_line(status) for status in range(200, 600)}
_NAME = frozenset(b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyz")


def response_head(status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A status line and headers. Raises ValueError for a header that would end its line."""
    out = [_STATUS_LINES[status]]
    for name, value in headers:
        if not _NAME.issuperset(name) or not name or b"\r" in value or b"\n" in value or b"\0" in value:
            raise ValueError(f"not a response header: {name!r}: {value[:100]!r}")
        out.append(name + b": " + value + b"\r\n")
    out.append(b"\r\n")
    return b"".join(out)
