"""`POST /v1/completions`: prompts to a session, a session to OpenAI's completions answers and chunks."""

from collections.abc import Iterator, Sequence
from typing import Any

from kvern_engine.core.plan import TokenLogprobs
from kvern_engine.request import MAX_CHOICES
from kvern_engine.server.asgi import encode_json
from kvern_engine.server.errors import ApiError
from kvern_engine.server.generate import Plan
from kvern_engine.server.generation import Piece, Session, Usage
from kvern_engine.server.logprobs import (
    CompletionLogprobs,
    Label,
    PromptLogprobs,
    joined,
    label,
    numbered,
    put_in_front,
    slices,
)
from kvern_engine.server.protocol import CompletionRequest
from kvern_engine.server.sampling import (
    asked_max_tokens,
    check_prompt_logprobs,
    check_refused,
    cut_prompt,
    fit_max_tokens,
    to_params,
)
from kvern_engine.server.state import ServerState
from kvern_engine.tokenizer import Tokenizer


async def plan_completion(state: ServerState, request: CompletionRequest, response_id: str, created: int) -> Plan:
    """What a completions request asks the engines for. Raises ApiError."""
    model = state.check_model(request.model)
    reader, capacity = state.loaded()
    check_refused(request)
    asked, _ = asked_max_tokens(request)
    to_params(request, state.sampling_defaults, max(1, asked or capacity), reader.vocab_size)
    bad_words = await reader.bad_words(request.bad_words)
    special = True if request.add_special_tokens is None else request.add_special_tokens
    most = state.config.max_prompts_per_request
    shortened = request.truncate_prompt_tokens is not None
    prompts = await reader.completion_prompts(
        request.prompt,
        special=special,
        capacity=capacity,
        most=most,
        cut=(lambda tokens: cut_prompt(request, tokens, asked, capacity)) if shortened else None,
    )
    if len(prompts) * (request.n or 1) > MAX_CHOICES:
        text = f"{len(prompts)} prompts with n={request.n} are {len(prompts) * (request.n or 1)} choices"
        raise ApiError(f"{text}; at most {MAX_CHOICES} can be asked for in one request.", param="n")
    # Unless named, the limit may differ between prompts: each has what its own length leaves.
    rooms = [fit_max_tokens(asked, len(ids), capacity, chat=False) for ids in prompts]
    by_room = {
        room: to_params(request, state.sampling_defaults, room, reader.vocab_size, bad_words)
        for room in dict.fromkeys(rooms)
    }
    params = by_room[rooms[0]]
    check_prompt_logprobs(params, prompts)
    echo = None
    if request.echo:
        echo = Echo(reader.tokenizer, prompts if shortened else request.prompt, prompts, only=asked == 0)
    options = request.stream_options
    renderer = CompletionRenderer(
        reader.tokenizer,
        head={
            "id": response_id,
            "object": "text_completion",
            "created": created,
            "model": model,
            "system_fingerprint": state.fingerprint,
        },
        n=params.n,
        num_choices=params.n * len(prompts),
        top_logprobs=params.logprobs,
        skip_special_tokens=params.skip_special_tokens,
        echo=echo,
        include_usage=bool(options and options.include_usage),
        usage_in_chunks=bool(options and options.include_usage and options.continuous_usage_stats),
        prompt_logprobs=request.prompt_logprobs,
        name_of=numbered if request.return_tokens_as_token_ids else label,
        prompt_ids=prompts if request.return_token_ids else None,
    )
    return [(ids, by_room[room]) for ids, room in zip(prompts, rooms, strict=True)], renderer


class Echo:
    """The prompts as they come back before their answers; `only`: nothing but the prompt was asked for."""

    def __init__(self, tokenizer: Tokenizer, given: Any, ids: list[list[int]], only: bool) -> None:
        self.ids = ids
        self.only = only
        texts = [given] if isinstance(given, str) else given
        self.texts = [
            text if isinstance(text, str) else tokenizer.decode(tokens, skip_special_tokens=False)
            for text, tokens in zip(texts if isinstance(texts[0], str) else ids, ids, strict=True)
        ]


class CompletionRenderer:
    """Completions chunks and answers. Choices are numbered through all prompts; `top_logprobs` None: null.
    `prompt_ids`: token ids are shown, too."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        head: dict[str, Any],
        n: int,
        num_choices: int,
        top_logprobs: int | None,
        skip_special_tokens: bool,
        echo: Echo | None,
        include_usage: bool,
        usage_in_chunks: bool,
        prompt_logprobs: int | None = None,
        name_of: Label = label,
        prompt_ids: list[list[int]] | None = None,
    ) -> None:
        self._head = head
        self._n = n
        self._echo = echo
        self._tokenizer, self._name_of, self._top_logprobs = tokenizer, name_of, top_logprobs
        self._prompt_ids = prompt_ids
        self._tokens: list[list[int]] = [[] for _ in range(num_choices)]
        self._echoed: dict[int, tuple[dict[str, Any], int]] = {}  # prompt -> its logprobs, and its characters
        self._prompt_logprobs: list[PromptLogprobs] | None = None
        if prompt_logprobs is not None:
            self._prompt_logprobs = [PromptLogprobs(tokenizer, prompt_logprobs) for _ in range(num_choices // n)]
        self._include_usage, self._usage_in_chunks = include_usage, usage_in_chunks
        self._logprobs = None
        if top_logprobs is not None:
            skip = skip_special_tokens and echo is None  # an echoed prompt is shown with its special tokens
            self._logprobs = [CompletionLogprobs(tokenizer, top_logprobs, skip, name_of) for _ in range(num_choices)]
        self._text = [""] * num_choices
        self._parts: list[list[dict[str, Any]]] = [[] for _ in range(num_choices)]
        self._ends: list[tuple[str | None, int | str | None]] = [(None, None)] * num_choices
        opening = b"data: " + encode_json(head)[:-1]
        self._before = [opening + b',"choices":[{"index":%d,"text":' % i for i in range(num_choices)]
        self._after = b',"logprobs":null,"finish_reason":null}]}\n\n'

    def take_prompt_logprobs(self, prompt: int, entries: Sequence[TokenLogprobs]) -> Iterator[None]:
        if self._prompt_logprobs is not None:
            for part in slices(entries):
                self._prompt_logprobs[prompt].add(part)
                yield
        if self._echo is not None and self._top_logprobs is not None:
            # An echoed prompt is shown with its special tokens.
            ids, text = self._echo.ids[prompt], self._echo.texts[prompt]
            before = put_in_front(self._tokenizer, ids, text)
            logprobs = CompletionLogprobs(self._tokenizer, self._top_logprobs, False, self._name_of, -before)
            parts = [logprobs.first_token(ids[0])]
            for part in slices(entries):
                parts.append(logprobs.of(part))
                yield
            self._echoed[prompt] = joined(parts), len(text)

    def _shown(self, piece: Piece) -> tuple[str, dict[str, Any] | None]:
        """Text and logprobs of a piece, the prompt before the first one where it is echoed."""
        text, parts = piece.text, []
        logprobs = self._logprobs[piece.index] if self._logprobs else None
        echo = self._echo
        if echo is not None and piece.first:
            prompt = piece.index // self._n
            text = echo.texts[prompt] + ("" if echo.only else text)
            if logprobs is not None:
                own, logprobs.offset = self._echoed[prompt]
                parts = [own]
        elif echo is not None and echo.only:
            text = ""
        if logprobs is not None and not (echo is not None and echo.only):
            parts.append(logprobs.of(piece.logprobs or ()))
        return text, joined(parts) if logprobs is not None else None

    def events(self, pieces: list[Piece], session: Session) -> bytes:
        out = []
        plain = self._logprobs is None and self._echo is None and not self._usage_in_chunks and not self._prompt_ids
        for piece in pieces:
            if plain and piece.finish_reason is None:
                out.append(self._before[piece.index] + encode_json(piece.text) + self._after)
                continue
            text, logprobs = self._shown(piece)
            nothing = not text and piece.finish_reason is None and not (logprobs and logprobs["tokens"])
            if nothing and not piece.token_ids:
                continue
            choice: dict[str, Any] = {
                "index": piece.index,
                "text": text,
                "logprobs": logprobs,
                "finish_reason": self._reason(piece),
            }
            if piece.finish_reason is not None:
                choice["stop_reason"] = piece.stop_reason
            if self._prompt_ids is not None:
                choice["token_ids"] = piece.token_ids
                if piece.first:
                    choice["prompt_token_ids"] = self._prompt_ids[piece.index // self._n]
            chunk = {**self._head, "choices": [choice]}
            if self._usage_in_chunks:
                chunk["usage"] = self._usage(session.usage()).as_dict()
            out.append(b"data: " + encode_json(chunk) + b"\n\n")
        return b"".join(out)

    def _reason(self, piece: Piece) -> str | None:
        return "length" if self._echo and self._echo.only and piece.finish_reason else piece.finish_reason

    def _usage(self, usage: Usage) -> Usage:
        return Usage(usage.prompt_tokens, 0, usage.cached_tokens) if self._echo and self._echo.only else usage

    def end(self, usage: Usage) -> bytes:
        if not self._include_usage:
            return b""
        chunk = {**self._head, "choices": [], "usage": self._usage(usage).as_dict()}
        return b"data: " + encode_json(chunk) + b"\n\n"

    def collect(self, pieces: list[Piece], session: Session) -> None:
        for piece in pieces:
            text, logprobs = self._shown(piece)
            self._tokens[piece.index] += piece.token_ids or ()
            self._text[piece.index] += text
            if logprobs is not None:
                self._parts[piece.index].append(logprobs)
            if piece.finish_reason is not None:
                self._ends[piece.index] = (self._reason(piece), piece.stop_reason)

    def answer(self, usage: Usage) -> dict[str, Any]:
        choices: list[dict[str, Any]] = [
            {
                "index": i,
                "text": text,
                "logprobs": joined(self._parts[i]) if self._logprobs else None,
                "finish_reason": self._ends[i][0],
                "stop_reason": self._ends[i][1],
            }
            for i, text in enumerate(self._text)
        ]
        for i, choice in enumerate(choices):
            prompt = i // self._n
            if self._prompt_logprobs is not None:
                choice["prompt_logprobs"] = self._prompt_logprobs[prompt].json()
            if self._prompt_ids is not None:
                choice |= {"token_ids": self._tokens[i], "prompt_token_ids": self._prompt_ids[prompt]}
        return {**self._head, "choices": choices, "usage": self._usage(usage).as_dict()}
