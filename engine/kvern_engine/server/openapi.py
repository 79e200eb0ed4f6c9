"""The OpenAPI page, the page for people at /docs, and the errors of the framework itself (404, 405, ...) in OpenAI's
shape. Built by hand: routing needs no framework that takes a third of a second to import.
"""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route, Router

from kvern_engine.server.errors import ApiError
from kvern_engine.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
_BODIES: dict[str, tuple[type[BaseModel], str, bool]] = {
    "/v1/chat/completions": (ChatRequest, "Answer a conversation", True),
    "/v1/completions": (CompletionRequest, "Continue a text", True),
    "/tokenize": (TokenizeRequest, "Text or messages to token ids", False),
    "/detokenize": (DetokenizeRequest, "Token ids to text", False),
}
_STATUSES = {
    400: "The request is not valid; the message says what is wrong and what would be right.",
    401: "No valid API key.",
    404: "No such model or path.",
    405: "The path does not take this method.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "Too many requests in flight; see Retry-After.",
    503: "Loading, draining or dead; see Retry-After.",
}


def error_response(error: ApiError) -> Response:
    return Response(error.encode(), error.status, error.headers, media_type="application/json")


def error_handlers(routes: Sequence[Route]) -> Mapping[Any, Callable[[Request, Exception], Any]]:
    """Starlette's `exception_handlers`: every error that leaves an app with `routes` has OpenAI's shape."""

    async def api_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error_response(error)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        messages = {
            404: f"There is no {request.url.path} here; see /docs for what is served.",
            405: f"{request.url.path} does not take {request.method}; see the Allow header.",
        }
        codes = {404: "not_found", 405: "method_not_allowed"}
        message, code = messages.get(error.status_code, str(error.detail)), codes.get(error.status_code)
        headers = dict(error.headers or {})
        if error.status_code == 405:
            headers["Allow"] = ", ".join(_methods_of(routes, request))
        return error_response(ApiError(message, status=error.status_code, code=code, headers=headers))

    return {ApiError: api_error, HTTPException: http_error}


def framework(routes: Sequence[Route]) -> Callable[..., Any]:
    """An ASGI app of these routes. What its endpoints raise beyond `error_handlers` is left to the gateway: Starlette's
    own app would answer in plain text."""
    inner = ExceptionMiddleware(Router(routes=routes), handlers=error_handlers(routes))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["app"] = app  # a router without one answers 404 in plain text
        await inner(scope, receive, send)

    return app


def _methods_of(routes: Sequence[Route], request: Request) -> list[str]:
    """All methods of a path, whichever of its routes takes them."""
    methods: set[str] = set()
    for route in routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            methods |= route.methods or set()
    return sorted(methods)


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


_OBJECT = _json({"type": "object"})
_READS: dict[str, tuple[str, str, list[int]]] = {
    "/v1/models": ("list_models", "The served models", [401]),
    "/v1/models/{model}": ("get_model", "One served model", [401, 404]),
    "/health": ("health", "200 while an engine lives", [503]),
    "/ready": ("ready", "200 where requests are taken; the state of each engine in any case", [503]),
    "/version": ("version", "The version of Kvern", []),
    "/metrics": ("metrics", "Prometheus metrics; ?name[]= keeps only these samples", []),
}


def _read_operation(path: str) -> dict[str, Any]:
    name, summary, statuses = _READS[path]
    content = {"text/plain": {"schema": {"type": "string"}}} if path == "/metrics" else _OBJECT
    errors = {str(s): _error_answer(s) for s in statuses}
    if path == "/ready":
        errors["503"]["content"] = _OBJECT  # the same report with another status
    operation: dict[str, Any] = {
        "operationId": name,
        "summary": summary,
        "responses": {"200": {"description": "The answer.", "content": content}, **errors},
    }
    if "{model}" in path:
        operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation


def _error_answer(status: int) -> dict[str, Any]:
    return {"description": _STATUSES[status], "content": _json({"$ref": "#/components/schemas/Error"})}


def build_page(version: str, keys_required: bool) -> dict[str, Any]:
    """The OpenAPI document of the public port."""
    parts: dict[str, Any] = {"Error": _ERROR}
    paths: dict[str, Any] = {path: {"get": _read_operation(path)} for path in _READS}
    for path, (model, summary, streams) in _BODIES.items():
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        parts.update(schema.pop("$defs", {}))
        parts[model.__name__] = schema
        ok: dict[str, Any] = {"description": "The answer.", "content": dict(_OBJECT)}
        if streams:
            ok["description"] = "The answer; where `stream` is true, an event a chunk, and `data: [DONE]` at the end."
            ok["content"]["text/event-stream"] = {}  # OpenAPI 3.1 has no words for the schema of an event
        paths[path] = {
            "post": {
                "operationId": path.strip("/").replace("/", "_"),
                "summary": summary,
                "requestBody": {"required": True, "content": _json({"$ref": f"#/components/schemas/{model.__name__}"})},
                "responses": {"200": ok, **{str(s): _error_answer(s) for s in _STATUSES}},
            }
        }
    page: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Kvern", "version": version, "description": "OpenAI-compatible inference server."},
        "paths": paths,
        "components": {"schemas": parts},
    }
    if keys_required:
        page["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        page["security"] = [{"key": []}]
    return page


def docs_html(page: dict[str, Any]) -> str:
    """A page for people: what is served and which fields it takes. Nothing is fetched from elsewhere."""
    rows = []
    for path, operations in page["paths"].items():
        for method, operation in operations.items():
            rows.append(f"<h2>{method.upper()} {escape(path)}</h2><p>{escape(operation['summary'])}</p>")
            reference = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            if reference:
                schema = page["components"]["schemas"][reference["$ref"].rpartition("/")[2]]
                required = schema.get("required", [])
                fields = [f"<b>{escape(f)}</b>" if f in required else escape(f) for f in schema["properties"]]
                rows.append(f"<p>Fields: {', '.join(fields)}</p>")
    title = f"Kvern {escape(page['info']['version'])}"
    style = "body{font-family:sans-serif;max-width:50em;margin:2em auto;line-height:1.4}h2{font-size:1.1em}"
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{style}</style>"
        f"<h1>{title}</h1><p>Machine-readable: <a href=/openapi.json>/openapi.json</a></p>{''.join(rows)}</html>"
    )
