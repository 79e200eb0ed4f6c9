"""From a request's fields and the model's defaults to SamplingParams, with the context's length checked. Pure."""

from typing import Any

from kvern_engine.request import SamplingParams
from kvern_engine.server.errors import ApiError, context_length_exceeded, not_served_yet
from kvern_engine.server.protocol import ChatRequest, CompletionRequest

COMPLETION_MAX_TOKENS = 16
# Below this a temperature only overflows the logits: greedy is what it asks for (vLLM does the same).
_GREEDY_BELOW = 1e-5
_COPIED = (
    "n",
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


def to_params(
    request: ChatRequest | CompletionRequest, defaults: dict[str, Any], max_tokens: int, vocab_size: int
) -> SamplingParams:
    """SamplingParams of a request; `defaults` are the model's own (generation_config.json). Raises ApiError 400."""
    values = dict(defaults)
    values |= {name: v for name in _COPIED if (v := getattr(request, name)) is not None}
    if request.temperature is not None:
        values["temperature"] = request.temperature
    if 0 < values.get("temperature", 1.0) < _GREEDY_BELOW:
        values["temperature"] = 0.0
    if isinstance(request, ChatRequest):
        if request.logprobs:
            values["logprobs"] = request.top_logprobs or 0
    elif request.logprobs is not None:
        values["logprobs"] = request.logprobs
        if request.echo:
            values["prompt_logprobs"] = request.logprobs
    if request.logit_bias:
        values["logit_bias"] = _biases(request.logit_bias, vocab_size)
    for token in request.stop_token_ids or ():
        _check_token(token, vocab_size, "stop_token_ids")
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
