"""HTTP/1.1 messages as a proxy re-writes them: heads, framing and hop-by-hop headers. Pure; parsing is httptools'.

Every message is framed anew on each side, and nothing that says how a message was framed is passed on: what the router
and a replica could understand differently (request smuggling) does not reach the replica.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING

from kvern_router.errors import RouterError, bad_request

if TYPE_CHECKING:
    from kvern_router.tenants import Use

Headers = list[tuple[bytes, bytes]]  # names in lower case

_CONNECTION_WORDS = "connection keep-alive proxy-connection te trailer transfer-encoding upgrade http2-settings"
_ONE_HOP_ONLY = "proxy-authenticate proxy-authorization content-length expect"
HOP_BY_HOP = frozenset(f"{_CONNECTION_WORDS} {_ONE_HOP_ONLY}".encode().split())
ROUTERS_OWN = frozenset((b"x-request-id", b"x-kvern-usage", b"x-kvern-router"))  # set anew, or for routers only
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


@dataclass(slots=True, eq=False)
class Request:
    """One request of a client, filled in by the parser's callbacks (client.py)."""

    began: float  # when its first byte arrived, loop time
    method: bytes = b""
    target: bytes = b""  # origin form: path and query
    version: str = "1.1"
    headers: Headers = field(default_factory=list)
    parts: bytearray = field(default_factory=bytearray)  # of the body, as they come: a list of very small ones is large
    size: int = 0  # bytes of body so far
    kept: int = 0  # of them in memory
    keep_alive: bool = False
    head_done: bool = False
    complete: bool = False
    expects_continue: bool = False
    rejection: RouterError | None = None
    received: float = 0.0  # when its last byte arrived
    request_id: bytes = b""
    tenant: str = ""  # whose key it carries
    use: Use | None = None  # what it is charged, where there are limits
    extra: Headers = field(default_factory=list)  # headers of the router's own for its answer
    _body: bytes = b""

    @property
    def path(self) -> bytes:
        return self.target.partition(b"?")[0]

    @property
    def query(self) -> bytes:
        return self.target.partition(b"?")[2]

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header (name in lower case)."""
        for key, value in self.headers:
            if key == name:
                return value
        return None

    def framing(self) -> bytes:
        """The header that says how the body is framed, as a line; empty where there is no body."""
        if self.header(b"transfer-encoding") is not None:
            return b"transfer-encoding: chunked\r\n"
        length = int(self.header(b"content-length") or 0)
        return b"content-length: %d\r\n" % length if length else b""

    def body(self) -> bytes:
        """The whole body (copied once)."""
        if self.parts:
            self._body, self.parts = bytes(self.parts), bytearray()
        return self._body

    def forget_body(self) -> int:
        """It is not needed any more. Returns how many bytes were kept of it."""
        kept, self.kept = self.kept, 0
        self.parts, self._body = bytearray(), b""
        return kept


@dataclass(slots=True)
class ResponseHead:
    """Status line and headers of a replica's answer; `length` is its content-length, None where it has none."""

    status: int
    reason: bytes
    headers: Headers
    length: int | None = None
    chunked: bool = False

    def header(self, name: bytes) -> bytes | None:
        for key, value in self.headers:
            if key == name:
                return value
        return None

    @property
    def is_sse(self) -> bool:
        return (self.header(b"content-type") or b"").lower().startswith(b"text/event-stream")


def check_head(request: Request, max_body_bytes: int) -> RouterError | None:
    """What is wrong with a request's head, or None. Also brings its target to origin form and gives it an id."""
    offered = request.header(b"x-request-id")
    request.request_id = offered if offered and _REQUEST_ID.fullmatch(offered) else secrets.token_hex(16).encode()
    length: int | None = None
    names = [name for name, _ in request.headers]
    if b"transfer-encoding" in names and (b"content-length" in names or request.version != "1.1"):
        return bad_request("Transfer-Encoding beside Content-Length, or in HTTP/1.0; a request has one framing")
    if names.count(b"transfer-encoding") > 1 or names.count(b"content-length") > 1:
        return bad_request("two headers say how long the body is; a request has one framing")
    for name, value in request.headers:
        if name == b"transfer-encoding" and value.strip().lower() != b"chunked":
            return bad_request(f"Transfer-Encoding: {_show(value)}; only chunked is understood", status=501)
        if name == b"expect":
            if value.strip().lower() != b"100-continue":
                return bad_request(f"Expect: {_show(value)}; only 100-continue is understood", status=417)
            request.expects_continue = request.version == "1.1"
        if name == b"content-length":
            length = int(value)  # digits: the parser has seen to it
    hosts = sum(1 for name, _ in request.headers if name == b"host")
    if hosts > 1 or (hosts == 0 and request.version == "1.1"):
        return bad_request(f"{hosts} Host headers; a request has exactly one")
    if request.method == b"CONNECT":
        return bad_request("CONNECT is not supported: this is no forward proxy", status=405)
    if request.target.startswith((b"http://", b"https://")):
        request.target = b"/" + request.target.split(b"/", 3)[3] if request.target.count(b"/") > 2 else b"/"
    if not request.target.startswith(b"/") and not (request.target == b"*" and request.method == b"OPTIONS"):
        return bad_request(f"request target {_show(request.target)}; expected a path that begins with /")
    if length is not None and length > max_body_bytes:
        return too_large(max_body_bytes, length)
    return None


def too_large(limit: int, size: int | None = None) -> RouterError:
    """413 that says the limit, and the size where it is known."""
    said = "more than that" if size is None else f"{size} bytes"
    return bad_request(
        f"The request body is too large: at most {limit} bytes are accepted, this one has {said}",
        status=413,
        code="request_too_large",
    )


def _show(value: bytes) -> str:
    return repr(value[:100].decode("latin-1"))


def request_head(request: Request, base: str, client: bytes, length: int, more: bytes = b"") -> bytes:
    """The head that a replica is sent: hop-by-hop headers gone, X-Forwarded-For and X-Request-Id set.

    base: path prefix of the replica's URL; client: the client's address; length: bytes of the body; more: whole lines.
    """
    out = [request.method + b" " + base.encode() + request.target + b" HTTP/1.1\r\n"]
    forwarded: list[bytes] = []
    dropped = _connection_options(request.headers)
    for name, value in request.headers:
        if name in HOP_BY_HOP or name in dropped or name in ROUTERS_OWN:
            continue
        if name == b"x-forwarded-for":
            forwarded.append(value)
            continue
        out.append(name + b": " + value + b"\r\n")
    if client:
        forwarded.append(client)
    if forwarded:
        out.append(b"x-forwarded-for: " + b", ".join(forwarded) + b"\r\n")
    out.append(b"x-request-id: " + request.request_id + b"\r\n" + more)
    if length or request.method in (b"POST", b"PUT", b"PATCH"):
        out.append(b"content-length: %d\r\n" % length)
    out.append(b"\r\n")
    return b"".join(out)


def response_headers(head: ResponseHead, request_id: bytes) -> Headers:
    """A replica's headers as the client gets them, without framing."""
    dropped = _connection_options(head.headers)
    out = [(n, v) for n, v in head.headers if n not in HOP_BY_HOP and n not in dropped]
    if head.header(b"x-request-id") is None:
        out.append((b"x-request-id", request_id))
    return out


def _connection_options(headers: Headers) -> frozenset[bytes]:
    values = [v for n, v in headers if n == b"connection"]
    if not values:
        return frozenset()
    return frozenset(token.strip().lower() for v in values for token in v.split(b","))


def reason(status: int) -> bytes:
    """The reason phrase of a status, empty for one without."""
    try:
        return HTTPStatus(status).phrase.encode()
    except ValueError:
        return b""


def response_head(status: int, phrase: bytes, headers: Iterable[tuple[bytes, bytes]], connection: bytes = b"") -> bytes:
    """A status line and headers; `connection` is the Connection header's value, b"" for none."""
    out = [b"HTTP/1.1 %d %b\r\n" % (status, phrase)]
    out += [name + b": " + value + b"\r\n" for name, value in headers]
    if connection:
        out.append(b"connection: " + connection + b"\r\n")
    out.append(b"\r\n")
    return b"".join(out)
