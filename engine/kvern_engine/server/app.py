"""The public app: OpenAI's endpoints and the server's own, behind one gateway.

FastAPI routes and documents them; the two that generate are plain ASGI underneath (`generate.py`).
"""

import os
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvern_engine.server.auth import BearerKeys
from kvern_engine.server.chat import plan_chat
from kvern_engine.server.completions import plan_completion
from kvern_engine.server.errors import not_served_yet
from kvern_engine.server.gateway import App, Gateway
from kvern_engine.server.generate import GenerateEndpoint
from kvern_engine.server.models import InfoEndpoints
from kvern_engine.server.openapi import add_error_handlers, build_page
from kvern_engine.server.protocol import ChatRequest, CompletionRequest
from kvern_engine.server.state import ServerState
from kvern_engine.server.tokenize import TokenizeEndpoints

# Label values of the HTTP metrics: the routes' patterns.
HANDLERS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/v1/models/{model}",
    "/tokenize",
    "/detokenize",
    "/v1/responses",
    "/v1/responses/{rest}",
    "/v1/embeddings",
    "/v1/messages",
)
_LATER = {
    "/v1/responses": ("The Responses API", "Use /v1/chat/completions."),
    "/v1/responses/{rest:path}": ("The Responses API", "Use /v1/chat/completions."),
    "/v1/embeddings": ("The embeddings API", "The served model generates text."),
    "/v1/messages": ("The Messages API", "Use /v1/chat/completions."),
}


def api_keys(configured: list[str]) -> list[str]:
    """The keys of the configuration and of KVERN_API_KEYS (separated by commas)."""
    from_environment = os.environ.get("KVERN_API_KEYS", "").split(",")
    return [*configured, *(key.strip() for key in from_environment if key.strip())]


def create_app(state: ServerState) -> App:
    """The ASGI app of the public port."""
    keys = BearerKeys(api_keys(state.config.api_key))
    app = FastAPI(
        title="Kvern",
        version=state.version,
        description="OpenAI-compatible inference server. Errors are `{error: {message, type, param, code}}`.",
    )
    add_error_handlers(app)
    app.router.routes.append(
        Route(
            "/v1/chat/completions",
            GenerateEndpoint(state, ChatRequest, "chatcmpl", plan_chat),
            methods=["POST"],
            include_in_schema=False,
        )
    )
    app.router.routes.append(
        Route(
            "/v1/completions",
            GenerateEndpoint(state, CompletionRequest, "cmpl", plan_completion),
            methods=["POST"],
            include_in_schema=False,
        )
    )
    _add_small_routes(app, state)
    page: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not page:
            page.update(build_page(app, keys.required))
        return page

    app.openapi = openapi  # type: ignore[method-assign]
    return Gateway(app, keys, state.metrics, handlers=frozenset(HANDLERS))


def _add_small_routes(app: FastAPI, state: ServerState) -> None:
    tokens, info = TokenizeEndpoints(state), InfoEndpoints(state)
    app.add_api_route("/tokenize", tokens.tokenize, methods=["POST"], include_in_schema=False)
    app.add_api_route("/detokenize", tokens.detokenize, methods=["POST"], include_in_schema=False)
    app.add_api_route("/v1/models", info.models, methods=["GET"], summary="The served models")
    app.add_api_route("/v1/models/{model:path}", info.model, methods=["GET"], summary="One served model")
    app.add_api_route("/health", info.health, methods=["GET"], summary="503 when no engine lives")
    app.add_api_route("/ready", info.ready, methods=["GET"], summary="503 while loading, draining or dead")
    app.add_api_route("/ping", info.ping, methods=["GET"], summary="As /health")
    app.add_api_route("/ping", info.ping, methods=["POST"], summary="As /health", operation_id="ping_post")
    app.add_api_route("/version", info.version, methods=["GET"], summary="The version of Kvern")
    app.add_api_route("/metrics", info.metrics, methods=["GET"], summary="Prometheus metrics")

    def later(what: str, instead: str) -> Any:
        async def refuse(request: Request) -> Response:
            raise not_served_yet(what, None, instead)

        return refuse

    for path, (what, instead) in _LATER.items():
        methods = ["GET", "POST", "DELETE"] if "rest" in path else ["POST"]
        app.router.routes.append(Route(path, later(what, instead), methods=methods, include_in_schema=False))
