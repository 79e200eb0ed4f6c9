"""The little HTTP that the generating endpoints need below Starlette: bodies with a limit, JSON answers, event streams.

These endpoints are plain ASGI: a stream of tokens passes through as few layers as possible.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from kvern_engine.core.plan import TokenLogprobs
from kvern_engine.server.engine_client import ClientGone, Mailbox
from kvern_engine.server.errors import ApiError
from kvern_engine.server.generation import Piece, Session, Usage
from kvern_engine.server.limits import Place

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

encode_json = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class RequestContext:
    """What is known of an HTTP request from its first byte on; the access log's line is made of it."""

    request_id: str
    start: float
    status: int = 0
    send: Send | None = None  # the server's own, under all middleware
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    first_token: float | None = None  # when a stream's first tokens were here
    finish: str | None = None
    error: str | None = None  # the code of the error that was answered
    says_usage: bool = False  # a stream says its usage in a comment: a router asked, which keeps limits by it


def new_id() -> str:
    """32 hexadecimal digits that no other request has (not a secret; a tenth of uuid4's time)."""
    return f"{random.getrandbits(128):032x}"


def header(scope: Scope, name: bytes) -> str | None:
    """A request header; `name` in lower case."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return None


def check_json_type(scope: Scope) -> None:
    """Raises ApiError 415 for a body that says to be something else than JSON, or to be compressed."""
    given = header(scope, b"content-type")
    kind = (given or "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(
            f"Content-Type {given!r} is not supported; send the body as application/json.",
            status=415,
            code="unsupported_media_type",
        )
    coding = header(scope, b"content-encoding")
    if coding is not None and coding.strip().lower() not in ("", "identity"):
        raise ApiError(
            f"Content-Encoding {coding!r} is not supported; send the body as it is.",
            status=415,
            code="unsupported_media_type",
        )


async def read_body(scope: Scope, receive: Receive, limit: int, seconds: float) -> bytes:
    """The whole body, as `read_parts` reads it."""
    return b"".join(await read_parts(scope, receive, limit, seconds))


async def read_parts(
    scope: Scope, receive: Receive, limit: int, seconds: float, place: Place | None = None
) -> list[bytes]:
    """The whole body, counted in `place`, in the parts that came. Raises ApiError 413 above `limit` bytes, 408 for one
    that does not end within `seconds`, 503 where too many bodies are being read; ClientGone where the client leaves
    meanwhile."""
    too_large = ApiError(
        f"The body is larger than {limit} bytes (max_body_bytes).",
        status=413,
        code="request_too_large",
        headers={"Connection": "close"},
    )
    length = header(scope, b"content-length")
    if length is not None and length.isdecimal() and int(length) > limit:
        raise too_large
    parts: list[bytes] = []
    size, more = 0, True
    try:
        async with asyncio.timeout(seconds):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone("the client left before its request was complete")
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > limit:
                    raise too_large
                if place is not None:
                    place.take(len(parts[-1]))
                more = message.get("more_body", False)
    except TimeoutError:
        text = f"The body did not arrive within {seconds:g} seconds (body_timeout_seconds)."
        raise ApiError(text, status=408, code="request_timeout", headers={"Connection": "close"}) from None
    return parts


async def send_json(send: Send, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
    body = content if isinstance(content, bytes) else encode_json(content)
    every = {"Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})}
    raw = [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in every.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: ApiError) -> None:
    await send_json(send, error.encode(), error.status, error.headers)


class Renderer(Protocol):
    """How the pieces of a session look: as events of a stream, or as one answer."""

    def take_prompt_logprobs(self, prompt: int, entries: Sequence[TokenLogprobs]) -> Iterator[None]:
        """Those of a prompt, before its first piece; yields now and then to let others run."""

    def events(self, pieces: list[Piece], session: Session) -> bytes: ...

    def end(self, usage: Usage) -> bytes: ...

    def collect(self, pieces: list[Piece], session: Session) -> None: ...

    def answer(self, usage: Usage) -> dict[str, Any]: ...


async def _watch(receive: Receive, mailbox: Mailbox) -> None:
    """After the body, the only thing a client can say is that it is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    mailbox.close(ClientGone("the client has disconnected"))


async def run_session(
    session: Session, renderer: Renderer, stream: bool, context: RequestContext, receive: Receive, send: Send
) -> None:
    """Submit, answer, give back. Raises ApiError as long as nothing has been sent; later errors end the stream."""
    watch = asyncio.ensure_future(_watch(receive, session.mailbox))
    try:
        session.submit()
        if stream:
            await _stream(session, renderer, context, send)
        else:
            await _answer(session, renderer, send)
        context.finish = context.finish or "done"  # a stream that ended with an error event says so itself
    finally:
        watch.cancel()
        session.release("abort")
        usage = session.usage()
        context.prompt_tokens, context.completion_tokens = usage.prompt_tokens, usage.completion_tokens


async def _answer(session: Session, renderer: Renderer, send: Send) -> None:
    while not session.done:
        renderer.collect(await session.next(), session)
    await send_json(send, renderer.answer(session.usage()))


async def _stream(session: Session, renderer: Renderer, context: RequestContext, send: Send) -> None:
    # The status is chosen when the first output is here: until then an error has one of its own, and a router may
    # still send the request elsewhere.
    pieces = await session.next()
    context.first_token = time.monotonic()
    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
    headers.append((b"x-accel-buffering", b"no"))  # or nginx would collect the tokens
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    direct = context.send or send
    try:
        while True:
            body = renderer.events(pieces, session)
            if session.done:
                body += renderer.end(session.usage()) + _ending(session, context)
                break
            if body:
                await direct({"type": "http.response.body", "body": body, "more_body": True})
            pieces = await session.next()
    except ApiError as e:
        context.finish, context.error = "error", e.code
        body = b"data: " + e.encode() + b"\n\n" + _ending(session, context)
    await direct({"type": "http.response.body", "body": body, "more_body": False})


def _ending(session: Session, context: RequestContext) -> bytes:
    """The last event; before it the usage where a router asked for it, as a comment, which clients skip."""
    if not context.says_usage:
        return DONE
    usage = session.usage()
    return b": kvern-usage %d %d\n\n" % (usage.prompt_tokens, usage.completion_tokens) + DONE
