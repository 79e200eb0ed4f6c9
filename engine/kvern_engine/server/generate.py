"""What `/v1/chat/completions` and `/v1/completions` have in common, from the door to the last byte.

Everything about a request is checked before an engine hears of it and before a stream opens.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from kvern_engine.ipc import AddRequest
from kvern_engine.request import SamplingParams
from kvern_engine.server.asgi import (
    Receive,
    Renderer,
    RequestContext,
    Scope,
    Send,
    check_json_type,
    new_id,
    read_body,
    run_session,
)
from kvern_engine.server.generation import Session
from kvern_engine.server.protocol import ChatRequest, CompletionRequest, parse_body
from kvern_engine.server.state import ServerState

Q = TypeVar("Q", ChatRequest, CompletionRequest)
# Of a request: its prompts' token ids with their parameters, and how its answer looks.
Plan = tuple[list[tuple[list[int], SamplingParams]], Renderer]
Planner = Callable[[ServerState, Q, str, int], Awaitable[Plan]]


class GenerateEndpoint(Generic[Q]):
    """An ASGI endpoint that runs a session; `plan(state, request, response_id, created)` says which."""

    def __init__(self, state: ServerState, body: type[Q], id_prefix: str, plan: Planner[Q]) -> None:
        self._state = state
        self._body: Any = body
        self._id_prefix = id_prefix
        self._plan: Any = plan

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self._state
        context: RequestContext = scope["kvern"]
        check_json_type(scope)
        with state.lifecycle.admit() as slot:
            request = parse_body(self._body, await read_body(scope, receive, state.config.max_body_bytes))
            unique = new_id()
            response_id = f"{self._id_prefix}-{unique}"
            prompts, renderer = await self._plan(state, request, response_id, int(time.time()))
            slot.resize(len(prompts))
            reader, _ = state.loaded()
            session = Session(
                state.client,
                reader.tokenizer,
                [
                    AddRequest(
                        request_id=unique if len(prompts) == 1 else f"{unique}-{i}",
                        client=state.client.index,
                        prompt_token_ids=ids,
                        params=params,
                        arrival=context.start,
                        priority=request.priority or 0,
                        cache_salt=request.cache_salt or "",
                    )
                    for i, (ids, params) in enumerate(prompts)
                ],
                renderer.take_prompt_logprobs,
                keep_tokens=bool(request.return_token_ids),
            )
            await run_session(session, renderer, bool(request.stream), context, receive, send)
