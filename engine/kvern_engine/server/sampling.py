"""From a request's fields and the model's defaults to SamplingParams, with the context's length checked. Pure."""

from typing import Any

from kvern_engine.prompt_rules import truncated
from kvern_engine.request import MAX_PROMPT_LOGPROBS, SamplingParams
from kvern_engine.server.errors import ApiError, context_length_exceeded, not_served_yet
from kvern_engine.server.protocol import ChatRequest, CompletionRequest

COMPLETION_MAX_TOKENS = 16
_COPIED = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "bad_words",
    "allowed_token_ids",
    "prompt_logprobs",
)


def check_refused(request: ChatRequest | CompletionRequest) -> None:
    """Fields whose values are refused whatever the prompt is. Raises ApiError 400."""
    form = request.response_format
    if form is not None and form.type in ("json_object", "json_schema", "structural_tag"):
        raise not_served_yet(
            f"Structured output (response_format {form.type!r})", "response_format", 'Use {"type": "text"}.'
        )
    if form is not None and (form.type != "text" or form.json_schema is not None):
        raise ApiError(f'response_format must be {{"type": "text"}}, got type {form.type!r}.', param="response_format")
    if request.stream_options is not None and not request.stream:
        raise ApiError("stream_options is only allowed when stream is true.", param="stream_options")
    if request.stream_options is not None and request.stream_options.include_obfuscation:
        raise not_served_yet(
            "Padding chunks against guesses by their size", "stream_options.include_obfuscation", "Give false."
        )
    if request.prompt_logprobs is not None and request.stream:
        raise ApiError("prompt_logprobs are not available when stream is true.", param="prompt_logprobs")
    if request.truncate_prompt_tokens == 0:
        raise ApiError("truncate_prompt_tokens must be -1 or at least 1, got 0.", param="truncate_prompt_tokens")
    if request.truncation_side is not None and request.truncate_prompt_tokens is None:
        raise ApiError("truncation_side needs truncate_prompt_tokens.", param="truncation_side")
    if isinstance(request, ChatRequest):
        if request.top_logprobs is not None and not request.logprobs:
            raise ApiError("top_logprobs needs logprobs to be true.", param="top_logprobs")
        both = (request.max_tokens, request.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise ApiError(
                f"max_tokens ({both[0]}) and max_completion_tokens ({both[1]}) name the same limit; give one of them.",
                param="max_tokens",
            )
    elif request.best_of is not None and request.best_of != (request.n or 1):
        raise ApiError(
            f"best_of ({request.best_of}) other than n ({request.n or 1}) is not served; leave best_of out.",
            param="best_of",
        )


def asked_max_tokens(request: ChatRequest | CompletionRequest) -> tuple[int | None, str]:
    """The limit that the client named, and the field it named it in. Raises ApiError 400 for 0."""
    field, value = "max_tokens", request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        field, value = "max_completion_tokens", request.max_completion_tokens
    echo = isinstance(request, CompletionRequest) and request.echo
    if value == 0 and not echo:
        raise ApiError(f"{field} must be at least 1, got 0.", param=field)
    return value, field


def fit_max_tokens(asked: int | None, prompt: int, capacity: int, *, chat: bool) -> int:
    """How many tokens may be generated after `prompt` tokens where a sequence holds `capacity`.

    Unless asked for, chat takes what fits and completions take 16. Raises ApiError context_length_exceeded.
    """
    room = capacity - prompt
    if room < 1 or (asked or 0) > room:
        raise context_length_exceeded(capacity, prompt, asked or 0, chat=chat)
    if asked is not None:
        return max(asked, 1)  # 0 comes with echo: one token is computed and not shown
    return room if chat else min(COMPLETION_MAX_TOKENS, room)


def cut_prompt(request: ChatRequest | CompletionRequest, ids: list[int], asked: int | None, capacity: int) -> list[int]:
    """The prompt as truncate_prompt_tokens leaves it, where a sequence holds `capacity` tokens."""
    wanted = request.truncate_prompt_tokens
    most = max(capacity - max(asked or 0, 1), 1)
    if request.truncation_side != "right" or wanted is None:
        return truncated(ids, wanted, most)
    return ids[: most if wanted == -1 else wanted]


def check_prompt_logprobs(params: SamplingParams, prompts: list[list[int]]) -> None:
    """How much is reported of the prompts has a limit, as it is kept until it is sent. Raises ApiError 400."""
    if params.prompt_logprobs is None:
        return
    tokens = sum(map(len, prompts))
    if tokens * (params.prompt_logprobs + 1) > MAX_PROMPT_LOGPROBS:
        raise ApiError(
            f"Logprobs of {tokens} prompt tokens with {params.prompt_logprobs} alternatives each are "
            f"{tokens * (params.prompt_logprobs + 1)} numbers; at most {MAX_PROMPT_LOGPROBS} can be asked for in one "
            "request.",
            param="prompt_logprobs",
        )


def to_params(
    request: ChatRequest | CompletionRequest,
    defaults: dict[str, Any],
    max_tokens: int,
    vocab_size: int,
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> SamplingParams:
    """SamplingParams of a request; `defaults` are the model's own (generation_config.json), `bad_words` the request's
    in tokens. Raises ApiError 400."""
    values = dict(defaults)
    values |= {name: v for name in _COPIED if (v := getattr(request, name)) is not None}
    if bad_words:
        values["bad_words_token_ids"] = bad_words
    if isinstance(request, ChatRequest):
        if request.logprobs:
            values["logprobs"] = request.top_logprobs or 0
    elif request.logprobs is not None:
        values["logprobs"] = request.logprobs
        if request.echo:
            values["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
    if request.logit_bias:
        values["logit_bias"] = _biases(request.logit_bias, vocab_size)
    for name in ("stop_token_ids", "allowed_token_ids"):
        if (tokens := getattr(request, name)) and max(tokens) >= vocab_size:
            _check_token(max(tokens), vocab_size, name)
    try:
        return SamplingParams(max_tokens=max_tokens, **values)
    except ValueError as e:
        field = str(e).partition(" ")[0]
        raise ApiError(f"{e}.", param=field) from None


def _biases(given: dict[str, float], vocab_size: int) -> dict[int, float]:
    biases = {}
    for key, bias in given.items():
        if not key.isascii() or not key.isdecimal() or len(key) > 10:
            raise ApiError(f"logit_bias must map token ids to biases, got the key {key[:40]!r}.", param="logit_bias")
        token = int(key)
        _check_token(token, vocab_size, "logit_bias")
        biases[token] = bias
    return biases


def _check_token(token: int, vocab_size: int, field: str) -> None:
    if not 0 <= token < vocab_size:
        raise ApiError(f"{field}: token id {token} is outside the vocabulary (0..{vocab_size - 1}).", param=field)
