"""The outermost layer of both apps: request ids, keys, one place where every error becomes OpenAI's JSON, the HTTP
metrics and the access log (which never holds content, queries or keys).
"""

import logging
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

from kvern_engine.logs import fields
from kvern_engine.metrics import Metrics
from kvern_engine.server.asgi import Message, Receive, RequestContext, Scope, Send, header, new_id, send_error
from kvern_engine.server.auth import BearerKeys
from kvern_engine.server.engine_client import ClientGone
from kvern_engine.server.errors import ApiError

log = logging.getLogger(__name__)
access = logging.getLogger("kvern_engine.server.access")

App = Callable[[Scope, Receive, Send], Awaitable[None]]
# Probes and scrapes: open to all, not counted and not logged (as with vLLM's instrumentation).
QUIET = frozenset({"/health", "/ready", "/ping", "/version", "/metrics"})
OPEN = QUIET | {"/openapi.json", "/docs"}
_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Gateway:
    """ASGI middleware around `app`. `metrics` None: nothing is counted (the admin port)."""

    def __init__(
        self,
        app: App,
        keys: BearerKeys,
        metrics: Metrics | None,
        open_paths: frozenset[str] = OPEN,
        handlers: frozenset[str] = frozenset(),
        access_log: bool = True,
    ) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics
        self._open = open_paths
        self._handlers = handlers
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = header(scope, b"x-request-id")
        request_id = given if given and _ID.fullmatch(given) else new_id()
        context = RequestContext(request_id, time.monotonic(), send=send)
        context.says_usage = header(scope, b"x-kvern-usage") == "comment"
        scope["kvern"] = context

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode("latin-1"))]
            await send(message)

        try:
            await self._answer(scope, receive, sending, context)
        finally:
            self._account(scope, context)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, context: RequestContext) -> None:
        try:
            if (refusal := scope.get("kvern.refusal")) is not None:  # the connection could not make sense of it
                raise refusal
            if scope["path"] not in self._open:
                self._keys.check(header(scope, b"authorization"))
            await self._app(scope, receive, send)
        except ClientGone:
            context.finish = "abort"
        except Exception as e:
            if not isinstance(e, ApiError):
                log.exception("request failed", extra=fields(request_id=context.request_id))
                text = f"The server failed to handle the request; its log says more under {context.request_id}."
                e = ApiError(text, status=500, code="internal_error")
            context.error = e.code
            if context.status:
                raise  # half an answer is out: only closing the connection can say that it is broken
            await send_error(send, e)

    def _account(self, scope: Scope, context: RequestContext) -> None:
        path = scope["path"]
        refusal = scope.get("kvern.refusal")
        if path in QUIET and refusal is None:
            return
        seconds = time.monotonic() - context.start
        handler = "none" if refusal else path if path in self._handlers else handler_of(scope)
        # A client that left before its answer began is counted as what nginx calls 499.
        status = context.status or 499
        if self._metrics is not None:
            self._metrics.http_request(scope["method"], handler, status, seconds)
        # The operator asks an admin port for its drain and its layout every few seconds.
        level = logging.DEBUG if self._metrics is None and scope["method"] == "GET" else logging.INFO
        if self._access_log and access.isEnabledFor(level):
            self._log(level, scope, context, handler, status, seconds)

    @staticmethod
    def _log(level: int, scope: Scope, context: RequestContext, handler: str, status: int, seconds: float) -> None:
        more: dict[str, Any] = {
            "prompt_tokens": context.prompt_tokens,
            "completion_tokens": context.completion_tokens,
            "first_token_seconds": context.first_token and context.first_token - context.start,
            "finish": context.finish,
            "error": context.error,
        }
        access.log(
            level,
            "request",
            extra=fields(
                method=scope["method"],
                path=handler,
                status=status,
                seconds=seconds,
                request_id=context.request_id,
                **{k: v for k, v in more.items() if v is not None},
            ),
        )


def handler_of(scope: Scope) -> str:
    """The route's pattern ("/v1/models/{model}"), "none" where none matched: invented paths are no labels."""
    path = getattr(scope.get("route"), "path", None)
    return path.replace(":path}", "}") if isinstance(path, str) else "none"
