"""One question to a running service through the OpenAI chat API, the answer printed as it comes."""

import json
from collections.abc import AsyncIterator, Callable

import httpx


class AskError(Exception):
    """The service did not answer; the text says why."""


async def stream_answer(url: str, model: str, question: str) -> AsyncIterator[str]:
    """Pieces of the answer. `url` is the base URL (.../v1). Greedy, so that a demonstration says the same each time."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "stream": True,
        "temperature": 0,
        "max_tokens": 256,
    }
    timeout = httpx.Timeout(10, read=300)
    try:
        async with (
            httpx.AsyncClient(trust_env=False, timeout=timeout) as client,
            client.stream("POST", f"{url}/chat/completions", json=body) as response,
        ):
            if response.status_code != 200:
                raise AskError(f"{response.status_code} from {url}: {_message(await response.aread())}")
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                if data == "[DONE]":
                    return
                if data:
                    yield _piece(data)
    except httpx.HTTPError as error:
        raise AskError(f"{url}: {error or type(error).__name__}") from error
    raise AskError(f"{url}: the answer ended before its end was said")


def _piece(data: str) -> str:
    event = json.loads(data)
    if "error" in event:
        raise AskError(str(event["error"].get("message", event["error"])))
    choices = event.get("choices") or []
    return str(choices[0].get("delta", {}).get("content") or "") if choices else ""


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:300].decode("utf-8", "replace")


async def ask(url: str, model: str, question: str, write: Callable[[str], None]) -> int:
    """Print the answer through `write`; returns how many pieces it came in. Raises AskError."""
    pieces = 0
    async for piece in stream_answer(url, model, question):
        if piece:
            pieces += 1
            write(piece)
    return pieces


def curl_line(url: str, model: str, question: str) -> str:
    """A command that asks the same, ready to be copied."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": question}]}, ensure_ascii=False)
    quoted = body.replace("'", "'\\''")
    return f"curl -s {url}/chat/completions -H 'Content-Type: application/json' -d '{quoted}'"
