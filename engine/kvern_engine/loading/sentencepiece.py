"""SentencePiece vocabularies (Kudo and Richardson, arXiv 1808.06226), from a `tokenizer.model` or from GGUF metadata,
as pipelines of the `tokenizers` library.

SentencePiece merges by score, the library by a list of pairs: the list is made of all pairs of pieces that form a
piece, in the order of the scores. What the library normalizes otherwise than SentencePiece does is avoided.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from kvern_engine.loading.charsmap import CharsMap

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # kinds of pieces; GGUF's token types too
SPACE = "\u2581"  # stands for a space
_MAX_PIECE = 512  # characters of a piece that is split into pairs


class TokenizerError(ValueError):
    """The model brings no tokenizer that Kvern can read; the text says what is missing and what helps."""


def call_library(work: Callable[[], Tokenizer], what: str) -> Tokenizer:
    """The result of `work`; TokenizerError where the library rejects what it was given, or panics over it."""
    try:
        return work()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # bare Exception, and for a panic a BaseException of its own
        raise TokenizerError(f"{what}: {error}") from error


@dataclass(frozen=True)
class Pieces:
    """A vocabulary: `texts`, their `scores` (log probabilities of unigrams, minus the rank of byte pairs) and `kinds`
    by id, and how text is normalized before it.

    `user_defined_in_text`: pieces of that kind are looked for in the text as it came, spaces and all, as GGUF and
    Hugging Face's added tokens have it; else in the normalized text, as SentencePiece does itself.
    `every_segment`: the dummy prefix goes in front of the text after each special token too.
    """

    texts: list[str]
    scores: list[float]
    kinds: list[int] = field(default_factory=list)
    unigram: bool = False
    unknown: int | None = 0
    charsmap: bytes = b""
    dummy_prefix: bool = True
    remove_extra_whitespaces: bool = False
    escape_whitespaces: bool = True
    user_defined_in_text: bool = False
    every_segment: bool = True

    def changed(self, **fields: Any) -> "Pieces":
        """The same with other rules."""
        return replace(self, **fields)

    def kind(self, index: int) -> int:
        """Of the piece `index`; NORMAL where kinds are not given."""
        return self.kinds[index] if index < len(self.kinds) else NORMAL

    def of_kind(self, *kinds: int) -> list[str]:
        """Texts of the pieces of these kinds."""
        return [text for index, text in enumerate(self.texts) if self.kind(index) in kinds]


def build_sentencepiece(pieces: Pieces, place: str) -> Tokenizer:
    """The pipeline of `pieces`, without tokens around a text. `place` is what errors name. Raises TokenizerError."""
    if not pieces.texts or (pieces.unknown is not None and not 0 <= pieces.unknown < len(pieces.texts)):
        raise TokenizerError(
            f"{place}: the vocabulary of {len(pieces.texts)} pieces has no id {pieces.unknown} for unknown text"
        )
    byte_fallback = BYTE in pieces.kinds

    def make() -> Tokenizer:
        model = _unigram_model(pieces, byte_fallback) if pieces.unigram else _bpe_model(pieces, byte_fallback)
        made = Tokenizer(model)
        made.normalizer = _normalizer(pieces)
        return made

    tokenizer = call_library(make, f"{place}: not a usable SentencePiece vocabulary")
    _add_pre_tokenizer(tokenizer, pieces)
    tokenizer.decoder = _decoder(pieces, byte_fallback)
    controls = [text for text in pieces.of_kind(CONTROL) if text]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in controls])
    if pieces.user_defined_in_text or not (pieces.unigram or _isolates(pieces)):
        in_normalized = not pieces.user_defined_in_text
        defined = [text for text in pieces.of_kind(USER_DEFINED) if text]
        tokenizer.add_tokens([AddedToken(text, special=False, normalized=in_normalized) for text in defined])
    return tokenizer


def _isolates(pieces: Pieces) -> bool:
    """Pieces that the user defined are found by a pre-tokenizer: as added tokens, which are normalized too, they would
    get a dummy prefix of their own."""
    in_text = pieces.user_defined_in_text
    return not in_text and not pieces.unigram and pieces.dummy_prefix and USER_DEFINED in pieces.kinds


def _bpe_model(pieces: Pieces, byte_fallback: bool) -> Any:
    return models.BPE(
        vocab={text: index for index, text in enumerate(pieces.texts)},
        merges=_merges(pieces),
        unk_token=None if pieces.unknown is None else pieces.texts[pieces.unknown],
        fuse_unk=True,
        byte_fallback=byte_fallback,
        ignore_merges=_isolates(pieces),  # what is isolated must come out whole
    )


def _merges(pieces: Pieces) -> list[tuple[str, str]]:
    """All pairs of normal pieces that form a normal piece, the best score first."""
    normal = {text: index for index, text in enumerate(pieces.texts) if pieces.kind(index) == NORMAL}
    ranked: list[tuple[float, int, int, str, str]] = []
    for text, index in normal.items():
        score = -pieces.scores[index]
        for cut in range(1, min(len(text), _MAX_PIECE)):
            left, right = text[:cut], text[cut:]
            if left in normal and right in normal:
                ranked.append((score, index, cut, left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _unigram_model(pieces: Pieces, byte_fallback: bool) -> Any:
    scores = list(pieces.scores)
    if not pieces.user_defined_in_text:
        # SentencePiece's own bonus for pieces that the user defined: by their bytes, of the best score there is.
        best = max((score for index, score in enumerate(scores) if pieces.kind(index) == NORMAL), default=0.0)
        for index, text in enumerate(pieces.texts):
            if pieces.kind(index) == USER_DEFINED:
                scores[index] = len(text.encode("utf-8", "replace")) * best - 0.1
    return models.Unigram(
        list(zip(pieces.texts, scores, strict=True)), unk_id=pieces.unknown, byte_fallback=byte_fallback
    )


def _normalizer(pieces: Pieces) -> Any:
    """In SentencePiece's order: characters, spaces too many, the dummy prefix, the mark for spaces."""
    steps: list[Any] = []
    if pieces.charsmap:
        steps.append(normalizers.Normalizer.custom(CharsMap(pieces.charsmap)))
    if pieces.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if pieces.dummy_prefix and pieces.every_segment:
        steps.append(normalizers.Prepend(SPACE))
    if pieces.escape_whitespaces:
        steps.append(normalizers.Replace(" ", SPACE))
        if pieces.remove_extra_whitespaces:  # at the end marks that stood in the text count as spaces
            steps.append(normalizers.Replace(Regex(rf"{SPACE}+\z"), ""))
    return normalizers.Sequence(steps)


def _add_pre_tokenizer(tokenizer: Tokenizer, pieces: Pieces) -> None:
    steps: list[Any] = []
    if pieces.dummy_prefix and not pieces.every_segment:
        steps.append(pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="first", split=False))
    if _isolates(pieces):
        longest_first = sorted((text for text in pieces.of_kind(USER_DEFINED) if text), key=len, reverse=True)
        pattern = "|".join(map(_escaped, longest_first))
        steps.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    if steps:
        tokenizer.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)


def _escaped(text: str) -> str:
    return "".join(rf"\x{{{ord(character):x}}}" for character in text)


def _decoder(pieces: Pieces, byte_fallback: bool) -> Any:
    steps: list[Any] = [decoders.Replace(SPACE, " ")]
    if byte_fallback:
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if pieces.dummy_prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    return decoders.Sequence(steps)


# The file format: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto

_UNIGRAM, _BPE = 1, 2  # trainer_spec.model_type


def read_model_file(data: bytes, place: str) -> Pieces:
    """The vocabulary in the bytes of a `tokenizer.model`. Raises TokenizerError for what is none, and for models of
    words or characters."""
    texts: list[str] = []
    scores: list[float] = []
    kinds: list[int] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    try:
        for number, value in _fields(data):
            if number == 1:
                piece = _message(value)
                texts.append(_bytes(piece.get(1, b"")).decode("utf-8"))
                scores.append(_float(piece.get(2, b"\0\0\0\0")))
                kinds.append(_number(piece.get(3, NORMAL)))
            elif number == 2:
                trainer = _message(value)
            elif number == 3:
                normalizer = _message(value)
        kind = _number(trainer.get(3, _UNIGRAM))
        unknown = kinds.index(UNKNOWN) if UNKNOWN in kinds else _number(trainer.get(40, 0))
        charsmap = _bytes(normalizer.get(2, b""))
    except ValueError as error:
        raise TokenizerError(f"{place}: not a SentencePiece model: {error}") from error
    if not texts:
        raise TokenizerError(f"{place}: not a SentencePiece model: it holds no pieces")
    if kind not in (_UNIGRAM, _BPE):
        raise TokenizerError(f"{place}: model_type {kind} is not supported; supported: 1 (unigram) and 2 (BPE)")
    if trainer.get(24, 0):
        raise TokenizerError(f"{place}: treat_whitespace_as_suffix is not supported; save a tokenizer.json instead")
    return Pieces(
        texts,
        scores,
        kinds,
        unigram=kind == _UNIGRAM,
        unknown=unknown,
        charsmap=charsmap,
        dummy_prefix=bool(normalizer.get(3, 1)),
        remove_extra_whitespaces=bool(normalizer.get(4, 1)),
        escape_whitespaces=bool(normalizer.get(5, 1)),
    )


def _float(value: Any) -> float:
    raw = _bytes(value)
    if len(raw) != 4:
        raise ValueError(f"a score has {len(raw):,} bytes instead of 4")
    return float(struct.unpack("<f", raw)[0])


def _bytes(value: Any) -> bytes:
    """Of a field that must be bytes: of a number, `bytes` would make so many zeros."""
    if isinstance(value, int):
        raise ValueError(f"a field that must be bytes is the number {value:,}")
    return bytes(value)


def _number(value: Any) -> int:
    if not isinstance(value, int):
        raise ValueError(f"a field that must be a number has {len(value):,} bytes")
    return value


def _message(value: Any) -> dict[int, Any]:
    return dict(_fields(_bytes(value)))


def _fields(data: Any) -> Iterator[tuple[int, Any]]:
    """(field number, value) of each field of a protobuf message: an int, or the bytes of what is longer."""
    view, at, size = memoryview(data), 0, len(data)
    while at < size:
        key, at = _varint(view, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(view, at)
            yield number, value
            continue
        if wire == 2:
            length, at = _varint(view, at)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise ValueError(f"unknown wire type {wire} at byte {at:,}")
        if at + length > size:
            raise ValueError(f"truncated: a field ends at byte {at + length:,} of {size:,}")
        yield number, view[at : at + length]
        at += length


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    result = 0
    for shift in range(0, 64, 7):
        if at >= len(view):
            raise ValueError(f"truncated at byte {at:,}")
        byte = view[at]
        at += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, at
    raise ValueError(f"a number at byte {at:,} is too long")
