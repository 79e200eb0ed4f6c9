"""Turns a growing list of token ids into text that can be sent at once: whole characters only, and nothing that may
still become part of a stop string.

One object a choice of a request. Each token costs time in proportion to its own text, however long the output is.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from kvern_engine.token_text import TextStream


class _Decoding(Protocol):
    """What this module needs of `tokenizer.Tokenizer`."""

    special_token_ids: frozenset[int]

    @property
    def is_byte_level(self) -> bool: ...

    def token_bytes(self, token_id: int, /) -> bytes: ...

    def text_stream(self, skip_special_tokens: bool = True, before: Sequence[int] = ()) -> TextStream: ...


class IncrementalDetokenizer:
    """Text of one choice, piece by piece. All pieces together are the text decoded at once, cut at the stop string.

    `stopped` is the stop string that ended the text, None so far; `tokens_used` is the number of tokens appended, up to
    and including the one that completed the stop string. A stop string counts as soon as its last character is there
    (of several that end at the same character, the longest), whatever the tokens are; it is ignored while fewer than
    `min_tokens` tokens are there. `include_stop` keeps it in the text. `before` are the tokens that the text goes on
    from (a prompt's), whose own text is not given; none where it is a text of its own, as a chat's answer is.
    """

    def __init__(
        self,
        tokenizer: _Decoding,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        before: Sequence[int] = (),
    ) -> None:
        self.stopped: str | None = None
        self.tokens_used = 0
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._matchers = [_StopMatcher(text) for text in stop]
        self._held = ""  # decoded, but it may be the beginning of a stop string
        self._finished = False
        self._decoder: TextStream
        if tokenizer.is_byte_level:
            self._decoder = _ByteStream(tokenizer, skip_special_tokens)
        else:
            self._decoder = tokenizer.text_stream(skip_special_tokens, before)

    @property
    def taken_off(self) -> int:
        """Bytes of the tokens at the beginning that are no part of the text: the space of its first word."""
        return self._decoder.taken_off

    def append(self, token_ids: Sequence[int]) -> str:
        """Takes the next tokens; returns the text that is safe to send now. Nothing more comes after a stop string."""
        if self._finished:
            return ""
        if not self._matchers:
            self.tokens_used += len(token_ids)
            return self._decoder.push(token_ids)
        pieces: list[str] = []
        for token in token_ids:  # one by one: a stop string must be told the token that completed it
            if self.stopped is not None:
                break
            self.tokens_used += 1
            if text := self._decoder.push((token,)):
                pieces.append(self._pass(text))
        return "".join(pieces)

    def finish(self) -> str:
        """The rest, when no more tokens come: what was held back, and U+FFFD for a character cut in half."""
        if self.stopped is not None or self._finished:
            return ""
        self._finished = True
        text = self._decoder.flush()
        passed = self._pass(text) if text and self._matchers else text
        if self.stopped is not None:
            return passed
        rest, self._held = passed + self._held, ""
        return rest

    def _pass(self, text: str) -> str:
        """Runs new text through the stop matchers; returns what may be sent and keeps the rest in `_held`."""
        found, end = self._scan(text)
        whole = self._held + (text if found is None else text[:end])
        if found is None:
            keep = max([matcher.matched for matcher in self._matchers])
            split = len(whole) - keep
            self._held = whole[split:]
            return whole[:split]
        self.stopped, self._held = found, ""
        return whole if self._include_stop else whole[: len(whole) - len(found)]

    def _scan(self, text: str) -> tuple[str | None, int]:
        """The first stop string completed within `text` and the index after its last character."""
        armed = self.tokens_used >= self._min_tokens
        # Most tokens begin no stop string: those matchers would not move.
        moving = [matcher for matcher in self._matchers if matcher.matched or matcher.stop[0] in text]
        for index, character in enumerate(text if moving else ""):
            complete = [matcher.stop for matcher in moving if matcher.feed(character)]
            if complete and armed:
                return max(complete, key=len), index + 1
        return None, len(text)


class _StopMatcher:
    """Follows one stop string through a text (Knuth, Morris, Pratt 1977): `matched` is how many of its first
    characters the text ends with, a full match not counted, and thus how many must be held back."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._fallback = [0] * len(stop)  # for each prefix, the longest shorter prefix that it also ends with
        length = 0
        for index in range(1, len(stop)):
            while length and stop[index] != stop[length]:
                length = self._fallback[length - 1]
            length += stop[index] == stop[length]
            self._fallback[index] = length

    def feed(self, character: str) -> bool:
        """Takes the next character; True where it completes the stop string."""
        stop, matched = self.stop, self.matched
        while matched and stop[matched] != character:
            matched = self._fallback[matched - 1]
        if stop[matched] == character:
            matched += 1
        complete = matched == len(stop)
        self.matched = self._fallback[-1] if complete else matched
        return complete


class _ByteStream:
    """For byte-level vocabularies: the text is the bytes of the tokens, decoded as UTF-8 arrives."""

    taken_off = 0

    def __init__(self, tokenizer: _Decoding, skip_special_tokens: bool) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._skip = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, tokens: Sequence[int]) -> str:
        bytes_of, skip = self._bytes_of, self._skip
        return self._utf8.decode(b"".join([bytes_of(token) for token in tokens if token not in skip]))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)
