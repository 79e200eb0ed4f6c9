"""`POST /tokenize` and `POST /detokenize`, in vLLM's shapes."""

from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from kvern_engine.server.errors import ApiError
from kvern_engine.server.models import json_response
from kvern_engine.server.protocol import DetokenizeRequest, TokenizeRequest
from kvern_engine.server.state import ServerState

Q = TypeVar("Q", TokenizeRequest, DetokenizeRequest)


class TokenizeEndpoints:
    """Text to token ids and back with the served model's tokenizer."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def _asked(self, request: Request, model: type[Q]) -> Q:
        """The request's body, of the served model."""
        asked = await self._state.requests.read(request.scope, request.receive, model)
        self._state.check_model(asked.model)
        return asked

    async def tokenize(self, request: Request) -> Response:
        state = self._state
        asked = await self._asked(request, TokenizeRequest)
        reader, capacity = state.loaded()
        if (asked.prompt is None) == (asked.messages is None):
            raise ApiError("Give either prompt (a string) or messages (an array), and not both.", param="prompt")
        if asked.messages is not None:
            continue_final = bool(asked.continue_final_message)
            given = asked.add_generation_prompt
            tokens = await reader.chat_ids(
                asked.messages,
                generation_prompt=not continue_final if given is None else given,
                continue_final=continue_final,
                kwargs=asked.chat_template_kwargs,
                special=bool(asked.add_special_tokens),
                capacity=capacity,
                count_only=True,
            )
        else:
            special = True if asked.add_special_tokens is None else asked.add_special_tokens
            tokens = await reader.encode(asked.prompt or "", special=special, capacity=capacity, count_only=True)
        texts = [reader.tokenizer.token_text(t) for t in tokens] if asked.return_token_strs else None
        return json_response(
            {
                "count": len(tokens),
                "max_model_len": state.client.max_model_len,
                "tokens": tokens,
                "token_strs": texts,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        asked = await self._asked(request, DetokenizeRequest)
        reader, _ = self._state.loaded()
        reader.check_ids(asked.tokens, "tokens", to_read=True)
        tokenizer = reader.tokenizer
        long = len(asked.tokens) > 16_384
        text = await reader.off_loop(lambda: tokenizer.decode(asked.tokens, skip_special_tokens=False), long=long)
        return json_response({"prompt": text})
