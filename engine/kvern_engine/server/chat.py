"""`POST /v1/chat/completions`: messages to a session, a session to OpenAI's chat answers and chunks."""

from typing import Any

from kvern_engine.server.asgi import encode_json
from kvern_engine.server.generate import Plan
from kvern_engine.server.generation import Piece, Session, Usage
from kvern_engine.server.logprobs import TokenNames, chat_entry
from kvern_engine.server.protocol import ChatRequest
from kvern_engine.server.sampling import asked_max_tokens, check_refused, fit_max_tokens, to_params
from kvern_engine.server.state import ServerState


async def plan_chat(state: ServerState, request: ChatRequest, response_id: str, created: int) -> Plan:
    """What a chat request asks the engines for. Raises ApiError."""
    model = state.check_model(request.model)
    reader, capacity = state.loaded()
    check_refused(request)
    asked, _ = asked_max_tokens(request)
    # Parameters come first: they are cheaper to check than messages are to render.
    to_params(request, state.sampling_defaults, max(1, asked or capacity), reader.vocab_size)
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
    )
    max_tokens = fit_max_tokens(asked, len(ids), capacity, chat=True)
    params = to_params(request, state.sampling_defaults, max_tokens, reader.vocab_size)
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
    )
    return [(ids, params)], renderer


class ChatRenderer:
    """Chat chunks and answers. `top_logprobs` None: logprobs are null."""

    def __init__(
        self,
        names: TokenNames,
        *,
        head: dict[str, Any],
        n: int,
        top_logprobs: int | None,
        include_usage: bool,
        usage_in_chunks: bool,
    ) -> None:
        self._names = names
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

    def events(self, pieces: list[Piece], session: Session) -> bytes:
        out = []
        usage = session.usage() if self._usage_in_chunks else None
        for piece in pieces:
            if piece.first:
                out.append(self._event(piece.index, {"role": "assistant", "content": ""}, usage))
            if piece.logprobs or usage is not None:
                if piece.text or piece.logprobs:
                    entries = self._content(piece)
                    out.append(self._event(piece.index, {"content": piece.text}, usage, entries))
            elif piece.text:
                out.append(self._before[piece.index] + encode_json(piece.text) + self._after)
            if piece.finish_reason is not None:
                end = (piece.finish_reason, piece.stop_reason)
                out.append(self._event(piece.index, {}, usage, end=end))
        return b"".join(out)

    def _content(self, piece: Piece) -> list[dict[str, Any]] | None:
        if piece.logprobs is None or self._top is None:
            return None
        return [chat_entry(self._names, entry, self._top) for entry in piece.logprobs]

    def _event(
        self,
        index: int,
        delta: dict[str, str],
        usage: Usage | None,
        entries: list[dict[str, Any]] | None = None,
        end: tuple[str, int | str | None] | None = None,
    ) -> bytes:
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": None if entries is None else {"content": entries},
            "finish_reason": end[0] if end else None,
        }
        if end:
            choice["stop_reason"] = end[1]
        chunk = {**self._head, "choices": [choice]}
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
            if piece.finish_reason is not None:
                self._ends[piece.index] = (piece.finish_reason, piece.stop_reason)

    def answer(self, usage: Usage) -> dict[str, Any]:
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None if self._top is None else {"content": self._entries[i]},
                "finish_reason": self._ends[i][0],
                "stop_reason": self._ends[i][1],
            }
            for i, text in enumerate(self._text)
        ]
        return {**self._head, "choices": choices, "usage": usage.as_dict()}
