"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}` with the right HTTP status.

Every refusal a client can meet is built here or raised as `ApiError`; turning one into bytes happens in one place.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


# What a client sent comes back in messages: a long name or value must not make a long answer.
_MAX_MESSAGE = 1000
_MAX_PARAM = 200


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit * 3 // 4]}...{text[-limit // 4 + 3 :]}"


class ApiError(Exception):
    """A request that is refused or has failed: HTTP status and the four fields of OpenAI's error object."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        type: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.message = _cut(message, _MAX_MESSAGE)
        super().__init__(self.message)
        self.status = status
        self.param = None if param is None else _cut(param, _MAX_PARAM)
        self.code = code
        self.type = type or _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def encode(self) -> bytes:
        return msgspec.json.encode(self.body())


def model_not_found(name: object, served: tuple[str, ...]) -> ApiError:
    known = ", ".join(f"`{s}`" for s in served)
    return ApiError(
        f"The model `{name}` does not exist. Served here: {known}.", status=404, param="model", code="model_not_found"
    )


def context_length_exceeded(limit: int, prompt: int, output: int, *, chat: bool, at_least: bool = False) -> ApiError:
    """OpenAI's wording. `output` is the number of tokens asked for (0: none were named)."""
    what, param = ("messages", "messages") if chat else ("prompt", "prompt")
    least = "at least " if at_least else ""
    if output and prompt < limit:
        text = (
            f"This model's maximum context length is {limit} tokens. However, you requested {prompt + output} tokens "
            f"({prompt} in the {what}, {output} in the completion). Please reduce the length of the {what} or "
            f"completion: at most {limit - prompt} tokens of completion fit."
        )
    else:
        text = (
            f"This model's maximum context length is {limit} tokens. However, your {what} resulted in {least}{prompt} "
            f"tokens, and at least 1 token must be left for the completion. Please reduce the length of the {what}."
        )
    return ApiError(text, param=param, code="context_length_exceeded")


def not_served_yet(what: str, param: str | None, instead: str = "") -> ApiError:
    text = f"{what} is not served yet by this version of Kvern."
    return ApiError(f"{text} {instead}".strip(), param=param, code="unsupported")


def unavailable(message: str, code: str, retry_after: int, *, close: bool = False) -> ApiError:
    """503 with Retry-After; `close` also asks the client to open a new connection (to another replica)."""
    headers = {"Retry-After": str(retry_after)}
    if close:
        headers["Connection"] = "close"
    return ApiError(message, status=503, code=code, headers=headers)


def engine_died(reason: str) -> ApiError:
    return unavailable(f"The engine that ran this request died: {reason}. Please send it again.", "engine_dead", 1)
