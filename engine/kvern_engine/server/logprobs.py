"""Logprobs in OpenAI's two shapes, and held back until the text of their tokens is sent.

Text may lag behind tokens (half a character, the beginning of a stop string); `Aligner` releases an entry together with
the text that it belongs to, by counting bytes. Pure.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from kvern_engine.core.plan import TokenLogprobs

_encode = msgspec.json.Encoder().encode
_SLICE = 32
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


def numbered(names: TokenNames, token_id: int) -> str:
    """A token as vLLM's return_tokens_as_token_ids asks for it."""
    return f"token_id:{token_id}"


Label = Callable[[TokenNames, int], str]


def prompt_entry(names: TokenNames, entry: TokenLogprobs, top: int) -> dict[str, Any]:
    """One element of vLLM's `prompt_logprobs`: token id -> logprob, rank and text, of the `top` most likely tokens and
    of the prompt's own."""
    pairs = zip(entry.top_ids[:top], entry.top_logprobs[:top], strict=True)
    found = {token: (logprob, rank) for rank, (token, logprob) in enumerate(pairs, start=1)}
    found.setdefault(entry.token_id, (entry.logprob, entry.rank))
    return {
        str(token): {"logprob": finite(logprob), "rank": rank, "decoded_token": label(names, token)}
        for token, (logprob, rank) in found.items()
    }


class PromptLogprobs:
    """The `prompt_logprobs` of a prompt as JSON, made piece by piece: they may be a million numbers."""

    def __init__(self, names: TokenNames, top: int) -> None:
        self._names, self._top = names, top
        self._parts = [b"null"]  # nothing comes before the first token

    def add(self, entries: Sequence[TokenLogprobs]) -> None:
        self._parts += [_encode(prompt_entry(self._names, entry, self._top)) for entry in entries]

    def json(self) -> msgspec.Raw:
        return msgspec.Raw(b"[" + b",".join(self._parts) + b"]")


def slices(entries: Sequence[TokenLogprobs]) -> Iterator[Sequence[TokenLogprobs]]:
    """Pieces that take about a millisecond each."""
    for at in range(0, len(entries), _SLICE):
        yield entries[at : at + _SLICE]


def chat_entry(names: TokenNames, entry: TokenLogprobs, top: int, name_of: Label = label) -> dict[str, Any]:
    """One element of a chat choice's `logprobs.content`."""

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        raw = names.token_bytes(token_id)
        return {"token": name_of(names, token_id), "logprob": finite(logprob), "bytes": list(raw)}

    alternatives = zip(entry.top_ids[:top], entry.top_logprobs[:top], strict=True)
    return {**one(entry.token_id, entry.logprob), "top_logprobs": [one(t, lp) for t, lp in alternatives]}


class CompletionLogprobs:
    """The `logprobs` object of a completions choice; `text_offset` runs on over the pieces of a stream."""

    def __init__(
        self, names: TokenNames, top: int, skip_special_tokens: bool = True, name_of: Label = label, offset: int = 0
    ) -> None:
        self._names, self._top, self._name_of = names, top, name_of
        self._skipped = names.special_token_ids if skip_special_tokens else frozenset()
        self.offset = offset  # characters of text so far; below 0 for what stands in front of it

    def first_token(self, token_id: int) -> dict[str, Any]:
        """The first token of an echoed prompt: nothing comes before it, so it has no logprob."""
        offset = self._advance(token_id)
        return {
            "tokens": [self._name_of(self._names, token_id)],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [offset],
        }

    def of(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        tokens, values, tops, offsets = [], [], [], []
        name_of = self._name_of
        for entry in entries:
            tokens.append(name_of(self._names, entry.token_id))
            values.append(finite(entry.logprob))
            pairs = zip(entry.top_ids[: self._top], entry.top_logprobs[: self._top], strict=True)
            top = {name_of(self._names, t): finite(lp) for t, lp in pairs}
            top.setdefault(tokens[-1], values[-1])  # the chosen token is always among them
            tops.append(top)
            offsets.append(self._advance(entry.token_id))
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _advance(self, token_id: int) -> int:
        """The character where this token's text begins."""
        offset = self.offset
        if token_id not in self._skipped:
            self.offset += characters(self._names.token_bytes(token_id))
        return max(offset, 0)


def characters(raw: bytes) -> int:
    """How many begin in these bytes: a character counts where its first byte stands."""
    return sum(byte & 0xC0 != 0x80 for byte in raw)


def put_in_front(names: TokenNames, tokens: Sequence[int], text: str) -> int:
    """How many characters the first of a prompt's tokens have that are not in its `text`: a tokenizer puts a token in
    front (BOS), or a space."""
    count = 0
    for token in tokens:
        raw = names.token_bytes(token)
        if token in names.special_token_ids and not text.startswith(raw.decode("utf-8", "replace")):
            count += characters(raw)
            continue
        return count + (raw.startswith(b" ") and not text.startswith(" "))
    return count


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
        self._taken_off = 0

    def add(self, entries: Sequence[TokenLogprobs]) -> None:
        for entry in entries:
            if entry.token_id not in self._skipped:
                self._bytes += len(self._names.token_bytes(entry.token_id))
            self._waiting.append((self._bytes, entry))

    def sent(self, text: str, taken_off: int = 0) -> list[TokenLogprobs]:
        """The entries whose text is complete now that `text` is sent as well; `taken_off` bytes of the first tokens
        never are."""
        self._sent += len(text.encode("utf-8")) + taken_off - self._taken_off
        self._taken_off = taken_off
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
