"""Errors that the router answers itself, in OpenAI's shape; what a replica answers is passed on as it is."""

from __future__ import annotations

import json
from typing import Any


class RouterError(Exception):
    """An answer in the making: HTTP status, OpenAI's fields, and seconds for Retry-After where trying again helps."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "server_error",
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.retry_after = retry_after
        self.headers = headers

    def as_dict(self) -> dict[str, Any]:
        """The object under "error"."""
        return {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}

    def body(self) -> bytes:
        """The whole JSON body."""
        return json.dumps({"error": self.as_dict()}).encode()


def bad_request(message: str, *, status: int = 400, code: str | None = None) -> RouterError:
    """The client's mistake."""
    return RouterError(status, message, kind="invalid_request_error", code=code)


def error_code(body: bytes) -> str | None:
    """The `code` of an error in OpenAI's shape, None where the body is something else."""
    try:
        error = json.loads(body)["error"]
        return str(error["code"])
    except (ValueError, KeyError, TypeError):
        return None
