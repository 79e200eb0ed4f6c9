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
    new_id,
    run_session,
)
from kvern_engine.server.errors import ApiError
from kvern_engine.server.generation import Session
from kvern_engine.server.protocol import ChatRequest, CompletionRequest
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
        state.lifecycle.check()  # whom it refuses need not send a body
        # It holds no place in flight before it is there: clients that send slowly must not keep out those that do not.
        request = await state.requests.read(scope, receive, self._body)
        with state.lifecycle.admit() as slot:
            unique = new_id()
            response_id = f"{self._id_prefix}-{unique}"
            prompts, renderer = await self._plan(state, request, response_id, int(time.time()))
            _check_prompt_tokens(prompts, state.config.max_prompt_tokens)
            slot.resize(len(prompts))
            reader, _ = state.loaded()
            # A completion, and a message that is continued, goes on from the prompt's text: spaces count there.
            continues = isinstance(request, CompletionRequest) or bool(request.continue_final_message)
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
                        eos_token_ids=reader.tokenizer.eos_token_ids,
                    )
                    for i, (ids, params) in enumerate(prompts)
                ],
                renderer.take_prompt_logprobs,
                keep_tokens=bool(request.return_token_ids),
                continues=continues,
            )
            await run_session(session, renderer, bool(request.stream), context, receive, send)


def _check_prompt_tokens(prompts: list[tuple[list[int], SamplingParams]], most: int | None) -> None:
    size = sum(len(ids) for ids, _ in prompts)
    if most is not None and size > most:
        text = f"A request's prompts must have at most {most} tokens (max_prompt_tokens), got {size}."
        raise ApiError(text, param="prompt", code="prompt_too_long")
