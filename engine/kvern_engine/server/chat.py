"""`POST /v1/chat/completions`: messages to a session, a session to OpenAI's chat answers and chunks."""

from collections.abc import Iterator, Sequence
from typing import Any

from kvern_engine.core.plan import TokenLogprobs
from kvern_engine.server.asgi import encode_json
from kvern_engine.server.generate import Plan
from kvern_engine.server.generation import Piece, Session, Usage
from kvern_engine.server.logprobs import Label, PromptLogprobs, TokenNames, chat_entry, label, numbered, slices
from kvern_engine.server.protocol import ChatRequest
from kvern_engine.server.sampling import (
    asked_max_tokens,
    check_prompt_logprobs,
    check_refused,
    cut_prompt,
    fit_max_tokens,
    to_params,
)
from kvern_engine.server.state import ServerState


async def plan_chat(state: ServerState, request: ChatRequest, response_id: str, created: int) -> Plan:
    """What a chat request asks the engines for. Raises ApiError."""
    model = state.check_model(request.model)
    reader, capacity = state.loaded()
    check_refused(request)
    asked, _ = asked_max_tokens(request)
    # Parameters come first: they are cheaper to check than messages are to render.
    to_params(request, state.sampling_defaults, max(1, asked or capacity), reader.vocab_size)
    bad_words = await reader.bad_words(request.bad_words)
    cut = request.truncate_prompt_tokens
    continue_final = bool(request.continue_final_message)
    generation_prompt = request.add_generation_prompt
    kwargs = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", request.reasoning_effort)
    ids = await reader.chat_ids(
        request.messages,
        generation_prompt=not continue_final if generation_prompt is None else generation_prompt,
        continue_final=continue_final,
        kwargs=kwargs,
        special=bool(request.add_special_tokens),
        capacity=capacity,
        cut=None if cut is None else lambda tokens: cut_prompt(request, tokens, asked, capacity),
    )
    max_tokens = fit_max_tokens(asked, len(ids), capacity, chat=True)
    params = to_params(request, state.sampling_defaults, max_tokens, reader.vocab_size, bad_words)
    check_prompt_logprobs(params, [ids])
    options = request.stream_options
    renderer = ChatRenderer(
        reader.tokenizer,
        head={
            "id": response_id,
            "object": "chat.completion.chunk" if request.stream else "chat.completion",
            "created": created,
            "model": model,
            "system_fingerprint": state.fingerprint,
        },
        n=params.n,
        top_logprobs=params.logprobs,
        include_usage=bool(options and options.include_usage),
        usage_in_chunks=bool(options and options.include_usage and options.continuous_usage_stats),
        prompt_logprobs=params.prompt_logprobs,
        name_of=numbered if request.return_tokens_as_token_ids else label,
        prompt_ids=ids if request.return_token_ids else None,
    )
    return [(ids, params)], renderer


class ChatRenderer:
    """Chat chunks and answers. `top_logprobs` None: logprobs are null. `prompt_ids`: token ids are shown, too."""

    def __init__(
        self,
        names: TokenNames,
        *,
        head: dict[str, Any],
        n: int,
        top_logprobs: int | None,
        include_usage: bool,
        usage_in_chunks: bool,
        prompt_logprobs: int | None = None,
        name_of: Label = label,
        prompt_ids: list[int] | None = None,
    ) -> None:
        self._names, self._name_of = names, name_of
        self._prompt_logprobs = None if prompt_logprobs is None else PromptLogprobs(names, prompt_logprobs)
        self._prompt_ids = prompt_ids
        self._tokens: list[list[int]] = [[] for _ in range(n)]
        self._head = head
        self._top = top_logprobs
        self._include_usage, self._usage_in_chunks = include_usage, usage_in_chunks
        self._text = [""] * n
        self._entries: list[list[dict[str, Any]]] = [[] for _ in range(n)]
        self._ends: list[tuple[str | None, int | str | None]] = [(None, None)] * n
        # Most chunks differ only in their text: the rest is made once.
        opening = b"data: " + encode_json(head)[:-1]
        self._before = [opening + b',"choices":[{"index":%d,"delta":{"content":' % i for i in range(n)]
        self._after = b'},"logprobs":null,"finish_reason":null}]}\n\n'

    def take_prompt_logprobs(self, prompt: int, entries: Sequence[TokenLogprobs]) -> Iterator[None]:
        if self._prompt_logprobs is not None:
            for part in slices(entries):
                self._prompt_logprobs.add(part)
                yield

    def events(self, pieces: list[Piece], session: Session) -> bytes:
        out = []
        usage = session.usage() if self._usage_in_chunks else None
        for piece in pieces:
            if piece.first:
                out.append(self._event(piece.index, {"role": "assistant", "content": ""}, usage))
            if piece.logprobs or usage is not None or piece.token_ids is not None:
                if piece.text or piece.logprobs or piece.token_ids:
                    entries = self._content(piece)
                    out.append(
                        self._event(piece.index, {"content": piece.text}, usage, entries, tokens=piece.token_ids)
                    )
            elif piece.text:
                out.append(self._before[piece.index] + encode_json(piece.text) + self._after)
            if piece.finish_reason is not None:
                end = (piece.finish_reason, piece.stop_reason)
                out.append(self._event(piece.index, {}, usage, end=end))
        return b"".join(out)

    def _content(self, piece: Piece) -> list[dict[str, Any]] | None:
        if piece.logprobs is None or self._top is None:
            return None
        return [chat_entry(self._names, entry, self._top, self._name_of) for entry in piece.logprobs]

    def _event(
        self,
        index: int,
        delta: dict[str, str],
        usage: Usage | None,
        entries: list[dict[str, Any]] | None = None,
        end: tuple[str, int | str | None] | None = None,
        tokens: list[int] | None = None,
    ) -> bytes:
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": None if entries is None else {"content": entries},
            "finish_reason": end[0] if end else None,
        }
        if end:
            choice["stop_reason"] = end[1]
        if tokens is not None:
            choice["token_ids"] = tokens
        chunk = {**self._head, "choices": [choice]}
        if self._prompt_ids is not None and "role" in delta:
            chunk["prompt_token_ids"] = self._prompt_ids
        if usage is not None:
            chunk["usage"] = usage.as_dict()
        return b"data: " + encode_json(chunk) + b"\n\n"

    def end(self, usage: Usage) -> bytes:
        if not self._include_usage:
            return b""
        return b"data: " + encode_json({**self._head, "choices": [], "usage": usage.as_dict()}) + b"\n\n"

    def collect(self, pieces: list[Piece], session: Session) -> None:
        for piece in pieces:
            self._text[piece.index] += piece.text
            self._entries[piece.index] += self._content(piece) or ()
            self._tokens[piece.index] += piece.token_ids or ()
            if piece.finish_reason is not None:
                self._ends[piece.index] = (piece.finish_reason, piece.stop_reason)

    def answer(self, usage: Usage) -> dict[str, Any]:
        choices: list[dict[str, Any]] = [
            {
                "index": i,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None if self._top is None else {"content": self._entries[i]},
                "finish_reason": self._ends[i][0],
                "stop_reason": self._ends[i][1],
            }
            for i, text in enumerate(self._text)
        ]
        answer = {**self._head, "choices": choices, "usage": usage.as_dict()}
        if self._prompt_logprobs is not None:
            answer["prompt_logprobs"] = self._prompt_logprobs.json()
        if self._prompt_ids is not None:
            answer["prompt_token_ids"] = self._prompt_ids
            for choice, tokens in zip(choices, self._tokens, strict=True):
                choice["token_ids"] = tokens
        return answer
