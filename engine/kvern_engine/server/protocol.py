"""The bodies of OpenAI's endpoints as pydantic models, with vLLM's extra fields. Checked strictly: no coercion, no
unknown fields, no NaN. `parse_body` turns every violation into one 400 that names the field, the value and the rule.

What a field means is decided elsewhere (`sampling.py`, `messages.py`); `messages` and `prompt` are checked there, too.
"""

import difflib
import gc
import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError, WithJsonSchema
from pydantic_core import from_json

from kvern_engine.request import MAX_ALLOWED, MAX_BAD_WORDS, MAX_LOGPROBS, MAX_N, MAX_STOP
from kvern_engine.server.body import SMALL_BYTES, depth_of, is_flat, too_deep
from kvern_engine.server.errors import ApiError, not_served_yet
from kvern_engine.server.limits import RequestLimits, too_many

MAX_STOP_CHARS = 1024
MAX_BIASES = 1024
MAX_STOP_IDS = 256
MAX_MESSAGES = 65_536
MAX_IDS = 1 << 20  # in one call of /detokenize
_BIG = 2**31 - 1


def _whole(value: Any) -> Any:
    """JSON has one kind of number: 16.0 is an integer too."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**63 else value


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


# Outermost in its Annotated, or the bounds inside would be lost to the OpenAPI page.
WHOLE = BeforeValidator(_whole)
Tokens = Annotated[int, Field(ge=0, le=_BIG), WHOLE]
Number = Annotated[float, Field(allow_inf_nan=False)]
StopStrings = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]],
    Field(max_length=MAX_STOP),
    BeforeValidator(_listed),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
                {
                    "type": "array",
                    "maxItems": MAX_STOP,
                    "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
                },
            ]
        }
    ),
]
BadWords = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]], Field(max_length=MAX_BAD_WORDS)
]
_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
Messages = Annotated[
    list[dict[str, Any]],
    Field(min_length=1, max_length=MAX_MESSAGES),
    WithJsonSchema(
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {
                    "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
                    "content": {
                        "anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": _TEXT_PART}],
                    },
                    "name": {"type": "string"},
                    "tool_calls": {"type": "array", "description": "Of an assistant's earlier turn."},
                    "tool_call_id": {"type": "string"},
                },
                "required": ["role", "content"],
            },
        }
    ),
]
_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
Prompt = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
                _IDS,
                {"type": "array", "minItems": 1, "items": _IDS},
            ],
            "description": "A text, a list of texts, token ids, or a list of lists of token ids.",
        }
    ),
]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(None, description="vLLM's: usage in every chunk.")
    include_obfuscation: bool | None = Field(None, description="Only false: chunks are sent as long as they are.")


class ResponseFormat(Body):
    type: str
    json_schema: dict[str, Any] | None = None


class _Sampling(Body):
    """What chat and completions have in common."""

    model: str | None = Field(None, description="A served name; left out: the first one.")
    max_tokens: Tokens | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N), WHOLE] | None = None
    temperature: Annotated[Number, Field(ge=0)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_BIG), WHOLE] | None = Field(None, description="0 or -1: no limit.")
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[str, Annotated[Number, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)] | None = (
        Field(None, description="Token id (as a string) to bias.")
    )
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1), WHOLE] | None = None
    stop: StopStrings | None = None
    stop_token_ids: Annotated[list[Tokens], Field(max_length=MAX_STOP_IDS)] | None = None
    allowed_token_ids: Annotated[list[Tokens], Field(min_length=1, max_length=MAX_ALLOWED, fail_fast=True)] | None = (
        Field(None, description="The only tokens that may be chosen.")
    )
    bad_words: BadWords | None = Field(None, description="Texts whose last token is banned behind the others.")
    ignore_eos: bool | None = None
    min_tokens: Tokens | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = Field(
        None, description="vLLM's; nothing is put between tokens here, so it changes nothing."
    )
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = Field(
        None, description="Alternatives to report for each token of the prompt; not with stream."
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=_BIG), WHOLE] | None = Field(
        None, description="Keep only so many tokens of the prompt; -1: as many as leave room for the answer."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Where truncate_prompt_tokens cuts; left (the default) keeps the end."
    )
    return_tokens_as_token_ids: bool | None = Field(None, description='Tokens in logprobs as "token_id:7".')
    return_token_ids: bool | None = Field(None, description="Also the token ids of prompt and answer.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    priority: Annotated[int, Field(ge=-_BIG, le=_BIG), WHOLE] | None = Field(None, description="Lower runs first.")
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    response_format: ResponseFormat | None = None


class ChatTemplateFields(Body):
    """What decides how messages become a prompt."""

    messages: Messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(_Sampling, ChatTemplateFields):
    """`POST /v1/chat/completions`."""

    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = None
    reasoning_effort: str | None = Field(None, description="Passed to the chat template.")


class CompletionRequest(_Sampling):
    """`POST /v1/completions`."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N), WHOLE] | None = Field(None, description="Only equal to n.")
    add_special_tokens: bool | None = None


class TokenizeRequest(Body):
    """`POST /tokenize`: either `prompt` or `messages`."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": ["prompt"]}, {"required": ["messages"]}]})

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Annotated[list[Tokens], Field(max_length=MAX_IDS), FailFast()]


# Fields of OpenAI's API that change nothing about the answer here: accepted and not used.
IGNORED = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
    }
)
# Fields that people know and that come later: what to say about each.
_LATER = {
    "tools": "Tool calling",
    "tool_choice": "Tool calling",
    "functions": "Tool calling",
    "function_call": "Tool calling",
    "structured_outputs": "Structured output",
    "guided_json": "Structured output",
    "guided_regex": "Structured output",
    "guided_choice": "Structured output",
    "guided_grammar": "Structured output",
    "audio": "Audio output",
    "prediction": "Predicted output",
    "web_search_options": "Web search",
    "suffix": "Inserting text before a suffix",
    "verbosity": "Choosing how long answers are",
    "use_beam_search": "Beam search",
    "length_penalty": "Beam search",
    "logits_processors": "Running a caller's code on logits",
    "logprob_token_ids": "Choosing the tokens that logprobs are reported for",
    "prompt_logprob_token_ids": "Choosing the tokens that logprobs are reported for",
    "repetition_detection": "Ending an answer that repeats itself",
    "thinking_token_budget": "Limiting what is spent on reasoning",
    "prompt_embeds": "A prompt of embeddings",
    "kv_transfer_params": "Moving KV caches between servers",
    "vllm_xargs": "Parameters of vLLM's plug-ins",
}
_MAX_FIELDS = 256
_BUILT_IN = RequestLimits()
# Items of fields whose limit is no flag's.
_MAX_ITEMS = {
    "tokens": MAX_IDS,
    "stop_token_ids": MAX_STOP_IDS,
    "allowed_token_ids": MAX_ALLOWED,
    "bad_words": MAX_BAD_WORDS,
}
_ABSENT: tuple[Any, ...] = (None, False, "", [], {})
_ABSENT_CALLS = frozenset({"tool_choice", "function_call"})  # where "none" says that there shall be none

T = TypeVar("T", bound=Body)


def parse_body(model: type[T], body: bytes, limits: RequestLimits = _BUILT_IN) -> T:
    """The request in `body`. Raises ApiError 400."""
    try:
        content = _decode(body)
    except ValueError as e:
        raise ApiError(f"The body is not valid JSON: {e}.", code="invalid_json") from None
    if not isinstance(content, dict):
        raise ApiError(f"The body must be a JSON object, got {_kind(content)}.", code="invalid_json")
    most = limits.json_depth
    if len(body) <= SMALL_BYTES and not is_flat(body, most) and depth_of(content, most) > most:
        raise ApiError(too_deep(most), code="invalid_json")
    _check_sizes(content, limits)
    if issubclass(model, _Sampling):
        _take_known(content)
    try:
        request = model.model_validate(content)
    except ValidationError as e:
        raise _as_api_error(model, e) from None
    _check_caps(request, limits)
    return request


def _decode(body: bytes) -> Any:
    if len(body) < SMALL_BYTES or not gc.isenabled():
        return from_json(body, allow_inf_nan=False)
    # Millions of values would set off collection after collection of garbage that is none: ten times as slow.
    gc.disable()
    try:
        return from_json(body, allow_inf_nan=False)
    finally:
        gc.enable()


def _check_sizes(content: dict[str, Any], limits: RequestLimits) -> None:
    """The number of fields, and of items in each, before anything looks at every one of them (and finds a fault)."""
    if len(content) > _MAX_FIELDS:
        raise ApiError(f"The body must have at most {_MAX_FIELDS} fields, got {len(content)}.")
    flags = {
        "messages": (limits.messages, "max_messages"),
        "stop": (limits.stop, "max_stop"),
        "logit_bias": (limits.logit_bias, "max_logit_bias"),
        "tools": (limits.tools, "max_tools"),
        "functions": (limits.tools, "max_tools"),
    }
    for name, value in content.items():
        if not isinstance(value, list | dict) or name == "prompt":  # which has limits of its own
            continue
        limit, flag = flags.get(name, (_MAX_ITEMS.get(name, _MAX_FIELDS), ""))
        if len(value) > limit and flag:
            raise too_many(name, limit, flag, len(value))
        if len(value) > limit:
            raise ApiError(f"{name} must have at most {limit} items, got {len(value)}.", param=name)


def _check_caps(request: Body, limits: RequestLimits) -> None:
    """Limits that the server's configuration lowers."""
    if isinstance(request, _Sampling):
        _check_numbers(request, limits)
        for i, stop in enumerate(request.stop or ()):
            if len(stop) > limits.stop_chars:
                raise too_many(f"stop[{i}]", limits.stop_chars, "max_stop_chars", len(stop), "characters")
    messages = getattr(request, "messages", None)
    if isinstance(messages, list):
        _check_messages(messages, limits)


def _check_numbers(request: "_Sampling", limits: RequestLimits) -> None:
    logprobs = request.logprobs if isinstance(request, CompletionRequest) else None
    top_logprobs = request.top_logprobs if isinstance(request, ChatRequest) else None
    best_of = request.best_of if isinstance(request, CompletionRequest) else None
    for name, value, limit, flag in (
        ("n", request.n, limits.n, "max_n"),
        ("best_of", best_of, limits.n, "max_n"),
        ("logprobs", logprobs, limits.logprobs, "max_logprobs"),
        ("top_logprobs", top_logprobs, limits.logprobs, "max_logprobs"),
        ("prompt_logprobs", request.prompt_logprobs, limits.logprobs, "max_logprobs"),
    ):
        if value is not None and value > limit:
            raise ApiError(f"{name} must be at most {limit} ({flag}), got {value}.", param=name)


def _check_messages(messages: list[dict[str, Any]], limits: RequestLimits) -> None:
    parts = sum(len(c) for m in messages if isinstance(c := m.get("content"), list))
    if parts > limits.content_parts:
        raise too_many("messages", limits.content_parts, "max_content_parts", parts, "content parts")
    for i, message in enumerate(messages):
        calls = message.get("tool_calls")
        if isinstance(calls, list) and len(calls) > limits.tools:
            raise too_many(f"messages[{i}].tool_calls", limits.tools, "max_tools", len(calls))


def _take_known(content: dict[str, Any]) -> None:
    """Drop what is ignored on purpose, refuse what comes later."""
    for name in IGNORED & content.keys():
        del content[name]
    for name in _LATER.keys() & content.keys():
        absent = (*_ABSENT, "none") if name in _ABSENT_CALLS else _ABSENT
        if any(content[name] == value and type(content[name]) is type(value) for value in absent):
            del content[name]
        else:
            raise not_served_yet(_LATER[name], name, f"Leave {name} out.")
    if "modalities" in content and content.pop("modalities") not in (None, ["text"]):
        raise ApiError('modalities must be ["text"]: this model answers with text.', param="modalities")


def _kind(value: Any) -> str:
    names = {
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "an array",
        dict: "an object",
    }
    return names.get(type(value), "null")


_encoder = json.JSONEncoder(ensure_ascii=False, default=str)


def shown(value: Any) -> str:
    """A value for an error message: as JSON, cut short; of a large value only the beginning is looked at."""
    text = ""
    for part in _encoder.iterencode(value[:100] if isinstance(value, str) else value):
        text += part
        if len(text) > 80:
            return text[:77] + "..."
    return text


def path_of(loc: tuple[Any, ...]) -> str:
    """`("messages", 0, "content")` -> `messages[0].content`."""
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path


_WANTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "finite_number": "a finite number",
}


def _as_api_error(model: type[BaseModel], error: ValidationError) -> ApiError:
    # An unknown field says most about a typing error: it comes first.
    errors = sorted(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
    first = errors[0]
    path, kind, value = path_of(first["loc"]), first["type"], first["input"]
    if kind == "extra_forbidden":
        return ApiError(unknown_field(path, str(first["loc"][-1]), _fields_at(model, first["loc"])), param=path)
    if kind == "missing":
        return ApiError(f"{path} is required.", param=path, code="missing_required_parameter")
    if kind in _WANTED:
        return ApiError(f"{path} must be {_WANTED[kind]}, got {shown(value)} ({_kind(value)}).", param=path)
    rule = str(first["msg"]).removeprefix("Value error, ").removeprefix("Input should ").rstrip(".")
    if kind in ("too_long", "too_short"):
        context = first.get("ctx", {})
        limit = context.get("max_length", context.get("min_length"))
        most = "at most" if kind == "too_long" else "at least"
        return ApiError(f"{path} must have {most} {limit} items, got {len(value)}.", param=path)
    if rule.startswith("be "):
        return ApiError(f"{path} must {rule}, got {shown(value)}.", param=path)
    return ApiError(f"{path}: {rule}; got {shown(value)}.", param=path)


def _fields_at(model: type[BaseModel], loc: tuple[Any, ...]) -> list[str]:
    nested: dict[str, type[BaseModel]] = {"stream_options": StreamOptions, "response_format": ResponseFormat}
    return list((nested.get(str(loc[0]), model) if len(loc) > 1 else model).model_fields)


def unknown_field(path: str, name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name[:64], known, 1)  # which takes long where a name does
    hint = f"did you mean '{near[0]}'?" if near else f"known are: {', '.join(sorted(known))}."
    return f"Unknown field '{path}'; {hint}"
