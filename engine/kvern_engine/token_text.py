"""From tokens to text, a few at a time: for every kind of vocabulary a stream whose pieces are, together, what decoding
all tokens at once gives. It emits whole characters and takes nothing back.

Byte-level vocabularies, the usual ones, have theirs in `detokenizer.py`; what decoding a text at once means is defined
here by pushing all of its tokens.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

REPLACEMENT = "\ufffd"
_MAX_HELD_TOKENS = 8  # of a decoder that we do not know: past this, bytes that form no character are given up on

TextOf = Callable[[int], str | None]  # a token's text in the vocabulary; None where there is no such token
DecodeAll = Callable[[list[int]], str]


class TextStream(Protocol):
    """Text of a growing list of tokens. `taken_off`: bytes that the first of them have lost, as a text begins with no
    space."""

    taken_off: int

    def push(self, tokens: Sequence[int]) -> str:
        """Takes the next tokens; returns the text that is certain now."""
        ...

    def flush(self) -> str:
        """The rest, when no more tokens come: U+FFFD for what is left of a character."""
        ...


MakeStream = Callable[[frozenset[int]], TextStream]  # of the ids to leave out


def stream_maker(decoder: Any, text_of: TextOf, decode: DecodeAll) -> MakeStream:
    """What makes streams for a decoder of the `tokenizers` library; `decode` is for those whose parts are not known."""
    steps = decoder_steps(decoder)
    kinds = [step.get("type") for step in steps]
    if not steps:
        return lambda skip: _WordStream(text_of, skip, "", cleanup=False)
    if kinds == ["WordPiece"]:
        return lambda skip: _WordStream(text_of, skip, steps[0]["prefix"], cleanup=steps[0]["cleanup"])
    if kinds == ["Metaspace"]:
        strips = steps[0].get("prepend_scheme", "always") != "never"
        return lambda skip: _MetaspaceStream(text_of, skip, steps[0]["replacement"], strips)
    if (pieces := _piece_rules(steps)) is not None:
        replaced, byte_fallback, stripped = pieces
        return lambda skip: _PieceStream(text_of, skip, replaced, byte_fallback, stripped)
    return lambda skip: _WindowStream(decode, skip)


def decoder_steps(decoder: Any) -> list[dict[str, Any]]:
    """The library's own description of a decoder, one entry a step; none where there is no decoder."""
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return state["decoders"] if state.get("type") == "Sequence" else [state]


def _piece_rules(steps: list[dict[str, Any]]) -> tuple[list[tuple[str, str]], bool, tuple[str, int]] | None:
    """(replacements, whether bytes are joined, (character, how many) to take off the start) of SentencePiece's
    decoders; None for any other sequence."""
    rest = list(steps)
    replaced = []
    while rest and rest[0].get("type") == "Replace" and "String" in rest[0].get("pattern", {}):
        step = rest.pop(0)
        replaced.append((step["pattern"]["String"], step["content"]))
    byte_fallback = bool(rest) and rest[0].get("type") == "ByteFallback"
    rest = rest[1:] if byte_fallback else rest
    fused = bool(rest) and rest[0].get("type") == "Fuse"
    rest = rest[1:] if fused else rest
    stripped = ("", 0)
    if fused and rest and rest[0].get("type") == "Strip" and not rest[0]["stop"]:
        step = rest.pop(0)
        stripped = (step["content"], step["start"])
    return None if rest or not (replaced or byte_fallback or fused) else (replaced, byte_fallback, stripped)


class _PieceStream:
    """SentencePiece: marks are spaces, tokens of single bytes make characters, and the first space is taken off.

    Bytes that are no part of a character become U+FFFD one by one, as SentencePiece has it. (The `tokenizers` library
    gives up whole runs of bytes for one that is wrong, also characters that were complete: nothing that could be sent
    before the run ends.)
    """

    def __init__(
        self,
        text_of: TextOf,
        skip: frozenset[int],
        replaced: list[tuple[str, str]],
        byte_fallback: bool,
        stripped: tuple[str, int],
    ) -> None:
        self._text_of, self._skip = text_of, skip
        self._replaced, self._byte_fallback = replaced, byte_fallback
        self._strip, self._to_strip = stripped
        self.taken_off = 0
        self._bytes = bytearray()  # of a character that is not complete

    def push(self, tokens: Sequence[int]) -> str:
        pieces = []
        for token in tokens:
            text = None if token in self._skip else self._text_of(token)
            if text is None:
                continue
            byte = byte_of(text) if self._byte_fallback else None
            if byte is not None:
                self._bytes.append(byte)
                pieces.append(self._characters())
                continue
            pieces.append(self._broken())
            for old, new in self._replaced:
                text = text.replace(old, new)
            pieces.append(text)
        return self._stripped("".join(pieces))

    def flush(self) -> str:
        return self._stripped(self._broken())

    def _stripped(self, text: str) -> str:
        while self._to_strip and text:
            if not text.startswith(self._strip):
                self._to_strip = 0
                break
            text = text[1:]
            self._to_strip -= 1
            self.taken_off += len(self._strip.encode())
        return text

    def _broken(self) -> str:
        count = len(self._bytes)
        self._bytes.clear()
        return REPLACEMENT * count

    def _characters(self) -> str:
        """The characters that the bytes so far make; what may still become one is kept."""
        out = []
        while self._bytes:
            size = _utf8_size(self._bytes)
            if size is None:
                out.append(REPLACEMENT)
                del self._bytes[:1]
            elif size > len(self._bytes):
                break
            else:
                out.append(self._bytes[:size].decode("utf-8"))
                del self._bytes[:size]
        return "".join(out)


def byte_of(text: str) -> int | None:
    """The byte that a SentencePiece token like <0x0A> stands for; None for any other token."""
    if len(text) != 6 or not text.startswith("<0x") or not text.endswith(">"):
        return None
    try:
        return int(text[3:5], 16)
    except ValueError:
        return None


def _utf8_size(data: bytearray) -> int | None:
    """Bytes of the character that `data` begins with, or will when more bytes come; None where it begins with none."""
    try:
        bytes(data[:4]).decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start == 0 and error.reason != "unexpected end of data":  # with that, more bytes may help
            return None
    return _wanted(data[0])


def _wanted(first: int) -> int:
    return 1 if first < 0x80 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4


class _WordStream:
    """WordPiece: a space before every token but the first and those that go on with a word (`prefix`). Without a prefix
    that is what the library does where a tokenizer has no decoder."""

    taken_off = 0
    _CLEANED = (
        (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"),
        (" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
    )  # fmt: skip

    def __init__(self, text_of: TextOf, skip: frozenset[int], prefix: str, cleanup: bool) -> None:
        self._text_of, self._skip = text_of, skip
        self._prefix, self._cleanup = prefix, cleanup
        self._first = True

    def push(self, tokens: Sequence[int]) -> str:
        return "".join([self._one(token) for token in tokens if token not in self._skip])

    def _one(self, token: int) -> str:
        text = self._text_of(token)
        if text is None:
            return ""
        if not self._first:
            goes_on = self._prefix and text.startswith(self._prefix)
            text = text[len(self._prefix) :] if goes_on else f" {text}"
        self._first = False
        for old, new in self._CLEANED if self._cleanup else ():
            text = text.replace(old, new)
        return text

    def flush(self) -> str:
        return ""


class _MetaspaceStream:
    """Unigrams of T5's kind: marks are spaces, those of the first token nothing if `strips`."""

    def __init__(self, text_of: TextOf, skip: frozenset[int], mark: str, strips: bool) -> None:
        self._text_of, self._skip = text_of, skip
        self._mark, self._strip_next = mark, strips
        self.taken_off = 0

    def push(self, tokens: Sequence[int]) -> str:
        pieces = []
        for token in tokens:
            text = None if token in self._skip else self._text_of(token)
            if text is not None:
                self.taken_off += text.count(self._mark) if self._strip_next else 0
                pieces.append(text.replace(self._mark, "" if self._strip_next else " "))
                self._strip_next = False
        return "".join(pieces)

    def flush(self) -> str:
        return ""


class _WindowStream:
    """For a decoder whose rules are not known here: decodes a short window of tokens with and without the new ones; the
    difference is new. The whole may differ from decoding at once where a token's text depends on distant ones."""

    taken_off = 0

    def __init__(self, decode: DecodeAll, skip: frozenset[int]) -> None:
        self._decode, self._skip = decode, skip
        self._context: list[int] = []  # tokens whose text was given, the last few
        self._context_text = ""
        self._new: list[int] = []

    def push(self, tokens: Sequence[int]) -> str:
        return "".join([self._one(token) for token in tokens if token not in self._skip])

    def _one(self, token: int) -> str:
        self._new.append(token)
        text = self._decode(self._context + self._new)
        incomplete = text.endswith(REPLACEMENT) and len(self._new) <= _MAX_HELD_TOKENS
        if incomplete or len(text) <= len(self._context_text):
            return ""
        new = text[len(self._context_text) :]
        self._context, self._new = self._new, []
        self._context_text = self._decode(self._context)
        return new

    def flush(self) -> str:
        text = self._decode(self._context + self._new)[len(self._context_text) :] if self._new else ""
        self._new = []
        return text
