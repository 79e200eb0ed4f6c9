"""`/v1/models` and the endpoints about the server itself: health, readiness, version, metrics."""

import os
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvern_engine.server.asgi import encode_json
from kvern_engine.server.errors import ApiError, model_not_found
from kvern_engine.server.state import ServerState


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode_json(content), status, headers, media_type="application/json")


def model_card(state: ServerState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.started,
        "owned_by": "kvern",
        "root": state.config.model,
        "parent": None,
        "max_model_len": state.client.max_model_len or state.config.asked_model_len,
    }


class InfoEndpoints:
    """Endpoints that only read the state."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [model_card(self._state, n) for n in self._state.reported]})

    async def model(self, request: Request) -> Response:
        model = request.path_params["model"]
        if model not in self._state.served:
            raise model_not_found(model, self._state.reported)
        return json_response(model_card(self._state, model))

    async def health(self, request: Request) -> Response:
        """200 while an engine lives, also while loading or draining: restarting would not help."""
        state = self._state.lifecycle.state()
        if state == "dead":
            raise ApiError("No engine of this server is alive.", status=503, code="engine_dead")
        return json_response({"status": state})

    async def ready(self, request: Request) -> Response:
        """200 where new requests are taken; says the state of each engine in any case."""
        state = self._state.lifecycle.state()
        now = time.monotonic()
        engines = [
            {
                "engine": e.engine,
                "state": e.state,
                "running": e.stats.num_running,
                "waiting": e.stats.num_waiting,
                "kv_cache_usage": round(e.stats.kv_cache_usage, 4),
                "heartbeat_age_seconds": round(max(0.0, now - e.stats.heartbeat), 3) if e.stats.heartbeat else None,
                **({"reason": e.reason} if e.reason else {}),
            }
            for e in self._state.client.views()
        ]
        content = {"status": state, "in_flight": self._state.metrics.in_flight(), "engines": engines}
        headers = _own_name() | ({} if state == "ready" else {"Retry-After": "1"})
        return json_response(content, 200 if state == "ready" else 503, headers)

    async def version(self, request: Request) -> Response:
        return json_response({"version": self._state.version})

    async def metrics(self, request: Request) -> Response:
        """Prometheus's text format; `?name[]=` (repeatable) keeps only these samples."""
        names = request.query_params.getlist("name[]")
        body, content_type = self._state.metrics.render(names, request.headers.get("accept", ""))
        return Response(body, media_type=None, headers={"Content-Type": content_type, **_own_name()})


def _own_name() -> dict[str, str]:
    """An address goes to another pod: who asks must know whom it has asked."""
    pod = os.environ.get("KVERN_POD_NAME")
    return {"X-Kvern-Pod": pod} if pod else {}
