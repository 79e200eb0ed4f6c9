"""Logprobs in OpenAI's two shapes, and held back until the text of their tokens is sent.

Text may lag behind tokens (half a character, the beginning of a stop string); `Aligner` releases an entry together with
the text that it belongs to, by counting bytes. Pure.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from kvern_engine.core.plan import TokenLogprobs

_LOWEST = -9999.0  # JSON has no -inf; OpenAI sends this instead


class TokenNames(Protocol):
    """What is needed of `tokenizer.Tokenizer`."""

    special_token_ids: frozenset[int]

    def token_bytes(self, token_id: int, /) -> bytes: ...


def finite(value: float) -> float:
    return value if math.isfinite(value) else _LOWEST


def label(names: TokenNames, token_id: int) -> str:
    """A token as text; bytes that are no whole characters are spelled out, so that different tokens look different."""
    raw = names.token_bytes(token_id)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)


def chat_entry(names: TokenNames, entry: TokenLogprobs, top: int) -> dict[str, Any]:
    """One element of a chat choice's `logprobs.content`."""

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        raw = names.token_bytes(token_id)
        return {"token": label(names, token_id), "logprob": finite(logprob), "bytes": list(raw)}

    alternatives = zip(entry.top_ids[:top], entry.top_logprobs[:top], strict=True)
    return {**one(entry.token_id, entry.logprob), "top_logprobs": [one(t, lp) for t, lp in alternatives]}


class CompletionLogprobs:
    """The `logprobs` object of a completions choice; `text_offset` runs on over the pieces of a stream."""

    def __init__(self, names: TokenNames, top: int, skip_special_tokens: bool = True) -> None:
        self._names, self._top = names, top
        self._skipped = names.special_token_ids if skip_special_tokens else frozenset()
        self._offset = 0

    def first_token(self, token_id: int) -> dict[str, Any]:
        """The first token of an echoed prompt: nothing comes before it, so it has no logprob."""
        offset = self._advance(token_id)
        return {
            "tokens": [label(self._names, token_id)],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [offset],
        }

    def of(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        tokens, values, tops, offsets = [], [], [], []
        for entry in entries:
            tokens.append(label(self._names, entry.token_id))
            values.append(finite(entry.logprob))
            pairs = zip(entry.top_ids[: self._top], entry.top_logprobs[: self._top], strict=True)
            top = {label(self._names, t): finite(lp) for t, lp in pairs}
            top.setdefault(tokens[-1], values[-1])  # the chosen token is always among them
            tops.append(top)
            offsets.append(self._advance(entry.token_id))
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _advance(self, token_id: int) -> int:
        """The character where this token's text begins."""
        offset = self._offset
        if token_id not in self._skipped:
            # A character counts where its first byte stands.
            self._offset += sum(byte & 0xC0 != 0x80 for byte in self._names.token_bytes(token_id))
        return offset


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Pieces of a completions `logprobs` object as one."""
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [value for part in parts for value in part[name]] for name in names}


class Aligner:
    """Holds the entries of tokens whose text has not been sent yet."""

    def __init__(self, names: TokenNames, skip_special_tokens: bool) -> None:
        self._names = names
        self._skipped = names.special_token_ids if skip_special_tokens else frozenset()
        self._waiting: deque[tuple[int, TokenLogprobs]] = deque()  # first byte after the token, entry
        self._bytes = 0
        self._sent = 0

    def add(self, entries: Sequence[TokenLogprobs]) -> None:
        for entry in entries:
            if entry.token_id not in self._skipped:
                self._bytes += len(self._names.token_bytes(entry.token_id))
            self._waiting.append((self._bytes, entry))

    def sent(self, text: str) -> list[TokenLogprobs]:
        """The entries whose text is complete now that `text` is sent as well."""
        self._sent += len(text.encode("utf-8"))
        ready = []
        while self._waiting and self._waiting[0][0] <= self._sent:
            ready.append(self._waiting.popleft()[1])
        return ready

    def rest(self, cut: bool) -> list[TokenLogprobs]:
        """What is left at the end; where a stop string has `cut` the text, only tokens with a part in it."""
        ready = []
        while self._waiting:
            end, entry = self._waiting.popleft()
            if not cut or self._begin_of(end, entry) < self._sent:
                ready.append(entry)
        return ready

    def _begin_of(self, end: int, entry: TokenLogprobs) -> int:
        return end if entry.token_id in self._skipped else end - len(self._names.token_bytes(entry.token_id))
