"""Asks a model over the OpenAI API as an application would, and prints one JSON line about what came.

    python ask.py URL MODEL PROMPT [--requests N] [--parallel N] [--max-tokens N] [--seconds S]
        [--completion]

`text` of the first answer, `chunks` that it came in, `first_token` and `total` in seconds, `finish_reason`; `answers`
and `errors` count all requests. With --seconds it goes on asking until then;
--completion is for a model without a chat template.
"""

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI, OpenAIError


def ask(client: OpenAI, model: str, prompt: str, max_tokens: int, completion: bool) -> dict:
    """One streamed answer; raises OpenAIError."""
    start, first, pieces, finish = time.monotonic(), None, [], None
    same = {"model": model, "stream": True, "temperature": 0, "max_tokens": max_tokens}
    if completion:
        stream = client.completions.create(prompt=prompt, **same)
    else:
        stream = client.chat.completions.create(messages=[{"role": "user", "content": prompt}], **same)
    for chunk in stream:
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            text = choice.text if completion else choice.delta.content
            if text:
                first = first or time.monotonic() - start
                pieces.append(text)
    return {
        "text": "".join(pieces),
        "chunks": len(pieces),
        "first_token": round(first or 0.0, 3),
        "total": round(time.monotonic() - start, 3),
        "finish_reason": finish,
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("prompt")
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--completion", action="store_true")
    given = parser.parse_args()
    client = OpenAI(base_url=given.url, api_key="none", max_retries=0, timeout=120)
    deadline = time.monotonic() + given.seconds
    errors: list[str] = []
    answers: list[dict] = []

    def one(number: int) -> None:
        while True:
            try:
                answers.append(ask(client, given.model, given.prompt, given.max_tokens, given.completion))
            except OpenAIError as error:
                errors.append(f"{type(error).__name__}: {error}")
            if time.monotonic() >= deadline:
                return

    with ThreadPoolExecutor(given.parallel) as pool:
        list(pool.map(one, range(given.requests)))
    first = answers[0] if answers else {}
    print(json.dumps({**first, "answers": len(answers), "errors": len(errors), "first_errors": errors[:3]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
