"""The admin app: drain and layout, on a port of its own behind a token of its own, never on the public one."""

import time
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvern_engine.parallel.messages import SwitchRecord
from kvern_engine.server.asgi import check_json_type, read_body
from kvern_engine.server.auth import BearerKeys
from kvern_engine.server.errors import ApiError, unavailable
from kvern_engine.server.gateway import App, Gateway
from kvern_engine.server.models import json_response
from kvern_engine.server.openapi import framework
from kvern_engine.server.protocol import WHOLE, Body, parse_body
from kvern_engine.server.state import ServerState

_BODY_LIMIT = 65_536


class LayoutRequest(Body):
    """`POST /admin/layout`: the tensor-parallel size wanted, and the asker's generation."""

    tensor: Annotated[int, Field(ge=1, le=1024), WHOLE]
    generation: Annotated[int, Field(ge=0, le=2**63 - 1), WHOLE]


class AdminEndpoints:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    def _drain(self) -> dict[str, Any]:
        lifecycle = self._state.lifecycle
        return {
            "draining": lifecycle.draining,
            "terminating": lifecycle.terminating,
            "in_flight": self._state.metrics.in_flight(),
        }

    async def drain_state(self, request: Request) -> Response:
        return json_response(self._drain())

    async def drain(self, request: Request) -> Response:
        """New requests get 503 from now on; what runs goes on. Reversible; the process never exits because of it."""
        self._state.lifecycle.drain_flag.set()
        return json_response(self._drain())

    async def undrain(self, request: Request) -> Response:
        self._state.lifecycle.drain_flag.clear()
        return json_response(self._drain())

    def _layout(self) -> dict[str, Any]:
        """The layout, and the sizes it could have with the tokens of KV that the pod would hold at each: measured for
        the present one, computed for the others."""
        config, said = self._state.config, self._state.client.layout
        size = said.tensor if said is not None else config.tensor_parallel_size
        data = said.data if said is not None else config.data_parallel_size
        engines = [e for e in self._state.client.views() if e.num_blocks]
        feasible = dict(engines[0].feasible) if engines else {}
        if engines:
            feasible[size] = sum(e.num_blocks * e.block_size for e in engines)
        stable = said is None or said.phase == "Stable"
        return {
            "current": size,
            "target": size if said is None else said.target,
            "generation": 0 if said is None else said.generation,
            "phase": ("Stable" if engines else "Loading") if said is None or stable else said.phase,
            "progress": (1.0 if engines else 0.0) if said is None or stable else said.progress,
            "engines": data,
            "pipeline": config.pipeline_parallel_size,
            "devices": data * config.pipeline_parallel_size * size,
            "device": ", ".join(sorted({_device_kind(e.device) for e in engines if e.device})),
            "feasible": [{"size": size, "kvTokens": tokens} for size, tokens in sorted(feasible.items())],
            "last": [_record(record) for record in said.last] if said is not None else [],
        }

    async def layout(self, request: Request) -> Response:
        return json_response(self._layout())

    async def change_layout(self, request: Request) -> Response:
        state = self._state
        check_json_type(request.scope)
        seconds = state.config.body_timeout_seconds
        asked = parse_body(LayoutRequest, await read_body(request.scope, request.receive, _BODY_LIMIT, seconds))
        try:
            answer = await state.client.change_layout(asked.tensor, asked.generation)
        except TimeoutError:
            raise unavailable("The supervisor does not answer. Please retry.", "layout_unknown", 1) from None
        if answer.status >= 300:
            param = "generation" if answer.code == "stale_generation" else "tensor"
            raise ApiError(answer.error, status=answer.status, param=param, code=answer.code)
        return json_response(self._layout(), answer.status)


def _record(record: SwitchRecord) -> dict[str, Any]:
    """A switch that is over, as JSON."""
    return {
        "from": record.source,
        "to": record.target,
        "generation": record.generation,
        "outcome": record.outcome,
        "reason": record.reason,
        "pauseSeconds": record.pause,
        "seconds": record.seconds,
        "kept": record.kept,
        "recomputed": record.recomputed,
        "secondsAgo": round(max(0.0, time.time() - record.ended), 1),
    }


def _device_kind(device: str) -> str:
    """`cuda:1 NVIDIA H200` as `cuda NVIDIA H200`: what the devices are, not which one an engine begins at."""
    where, space, name = device.partition(" ")
    return where.partition(":")[0] + space + name


def create_admin_app(state: ServerState, token: str) -> App:
    """The ASGI app of the admin port; every path needs `token` as its bearer token."""
    endpoints = AdminEndpoints(state)
    routes = [
        Route("/admin/drain", endpoints.drain_state, methods=["GET"]),
        Route("/admin/drain", endpoints.drain, methods=["POST"]),
        Route("/admin/drain", endpoints.undrain, methods=["DELETE"]),
        Route("/admin/layout", endpoints.layout, methods=["GET"]),
        Route("/admin/layout", endpoints.change_layout, methods=["POST"]),
    ]
    app = framework(routes)
    return Gateway(app, BearerKeys([token]), None, open_paths=frozenset(), access_log=state.config.access_log)
