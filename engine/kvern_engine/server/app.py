"""The public app: OpenAI's endpoints and the server's own, behind one gateway.

Starlette routes them; the two that generate are plain ASGI underneath (`generate.py`).
"""

import os
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from kvern_engine.server.auth import BearerKeys
from kvern_engine.server.chat import plan_chat
from kvern_engine.server.completions import plan_completion
from kvern_engine.server.errors import not_served_yet
from kvern_engine.server.gateway import App, Gateway
from kvern_engine.server.generate import GenerateEndpoint
from kvern_engine.server.models import InfoEndpoints, json_response
from kvern_engine.server.openapi import build_page, docs_html, framework
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
    page: dict[str, Any] = {}

    def built() -> dict[str, Any]:
        if not page:
            page.update(build_page(state.version, keys.required))
        return page

    async def openapi(request: Request) -> Response:
        return json_response(built())

    async def docs(request: Request) -> Response:
        return HTMLResponse(docs_html(built()))

    routes = [
        *_generating_routes(state),
        *_small_routes(state),
        *_later_routes(),
        Route("/openapi.json", openapi),
        Route("/docs", docs),
    ]
    app = framework(routes)
    return Gateway(app, keys, state.metrics, handlers=frozenset(HANDLERS), access_log=state.config.access_log)


def _generating_routes(state: ServerState) -> list[Route]:
    return [
        Route("/v1/chat/completions", GenerateEndpoint(state, ChatRequest, "chatcmpl", plan_chat), methods=["POST"]),
        Route("/v1/completions", GenerateEndpoint(state, CompletionRequest, "cmpl", plan_completion), methods=["POST"]),
    ]


def _small_routes(state: ServerState) -> list[Route]:
    tokens, info = TokenizeEndpoints(state), InfoEndpoints(state)
    return [
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/v1/models", info.models),
        Route("/v1/models/{model:path}", info.model),
        Route("/health", info.health),
        Route("/ready", info.ready),
        Route("/ping", info.health, methods=["GET", "POST"]),
        Route("/version", info.version),
        Route("/metrics", info.metrics),
    ]


def _later_routes() -> list[Route]:
    def later(what: str, instead: str) -> Any:
        async def refuse(request: Request) -> Response:
            raise not_served_yet(what, None, instead)

        return refuse

    return [
        Route(path, later(what, instead), methods=["GET", "POST", "DELETE"] if "rest" in path else ["POST"])
        for path, (what, instead) in _LATER.items()
    ]
