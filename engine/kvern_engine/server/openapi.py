"""The OpenAPI page and the errors of the framework itself (404, 405, ...) in OpenAI's shape."""

from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

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
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "Too many requests in flight; see Retry-After.",
    503: "Loading, draining or dead; see Retry-After.",
}


def error_response(error: ApiError) -> Response:
    return Response(error.encode(), error.status, error.headers, media_type="application/json")


def add_error_handlers(app: FastAPI) -> None:
    """Every error that leaves `app` has OpenAI's shape."""

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
        return error_response(ApiError(message, status=error.status_code, code=code, headers=headers))

    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        field = str(first["loc"][-1])
        return error_response(ApiError(f"{field}: {first['msg']}.", param=field))

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, invalid)


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def build_page(app: FastAPI, keys_required: bool) -> dict[str, Any]:
    """The OpenAPI document: what FastAPI knows of its routes, and the generating endpoints, which it does not see."""
    from fastapi.openapi.utils import get_openapi

    page = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    parts = page.setdefault("components", {}).setdefault("schemas", {})
    parts["Error"] = _ERROR
    error = {"content": _json({"$ref": "#/components/schemas/Error"})}
    for operations in page["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            for status in (401, 404, 503):
                operation["responses"].setdefault(str(status), {"description": _STATUSES[status], **error})
    for path, (model, summary, streams) in _BODIES.items():
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        parts.update(schema.pop("$defs", {}))
        parts[model.__name__] = schema
        ok: dict[str, Any] = {"description": "The answer.", "content": _json({"type": "object"})}
        if streams:
            ok["content"]["text/event-stream"] = {"schema": {"type": "string"}}
        errors = {str(status): {"description": text, **error} for status, text in _STATUSES.items()}
        page["paths"].setdefault(path, {})["post"] = {
            "summary": summary,
            "description": (model.__doc__ or "").strip(),
            "operationId": path.strip("/").replace("/", "_"),
            "requestBody": {"required": True, "content": _json({"$ref": f"#/components/schemas/{model.__name__}"})},
            "responses": {"200": ok, **errors},
        }
    if keys_required:
        page["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        page["security"] = [{"key": []}]
    return page
