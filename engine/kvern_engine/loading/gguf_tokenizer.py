"""Builds a `tokenizers.Tokenizer` from the vocabulary in a GGUF file's metadata, whatever its kind: byte-level BPE
(`gpt2`), SentencePiece with scores (`llama`), unigrams (`t5`) or WordPiece (`bert`).

Metadata is untrusted: types and sizes are checked before the library, which panics, gets to see them.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from kvern_engine.loading.bpe_splitters import SPLITTERS
from kvern_engine.loading.sentencepiece import (
    CONTROL,
    USER_DEFINED,
    Pieces,
    TokenizerError,
    build_sentencepiece,
    call_library,
)

if TYPE_CHECKING:
    from kvern_engine.loading.gguf import GGUFFile

__all__ = ["TokenizerError", "build_tokenizer"]

_HELP = "pass --tokenizer with the folder of the original model"


def build_tokenizer(file: "GGUFFile") -> Tokenizer:
    """The pipeline of `file`. Raises TokenizerError where the vocabulary's kind is unknown, incomplete or damaged."""
    fields = _Metadata(file)
    kind = file.metadata.get("tokenizer.ggml.model")
    build = _KINDS.get(str(kind))
    if build is None:
        raise TokenizerError(
            f"{file.path}: tokenizer.ggml.model {kind!r} is not supported (supported: {', '.join(_KINDS)}); {_HELP}"
        )
    return build(fields)


class _Metadata:
    """Typed access to the keys under `tokenizer.ggml.`: an error names file and key."""

    def __init__(self, file: "GGUFFile") -> None:
        self.path = file.path
        self.all = file.metadata
        self.tokens: list[str] = self.list_of("tokens", str) or []
        if not self.tokens:
            raise TokenizerError(f"{self.path}: tokenizer.ggml.tokens is missing; {_HELP}")
        seen: dict[str, int] = {}
        for index, token in enumerate(self.tokens):
            if seen.setdefault(token, index) != index and token:  # empty ones, of padding, may be many
                raise TokenizerError(
                    f"{self.path}: tokenizer.ggml.tokens holds {token!r} twice, as {seen[token]} and {index}"
                )
        self.ids = seen
        self.kinds: list[int] = self.list_of("token_type", int) or []
        if self.kinds and len(self.kinds) != len(self.tokens):
            raise TokenizerError(
                f"{self.path}: tokenizer.ggml.token_type has {len(self.kinds)} entries for {len(self.tokens)} tokens"
            )

    def get(self, key: str) -> Any:
        return self.all.get(f"tokenizer.ggml.{key}")

    def list_of(self, key: str, kind: type) -> list[Any] | None:
        value = self.get(key)
        if value is not None and (not isinstance(value, list) or (value and not isinstance(value[0], kind))):
            raise TokenizerError(f"{self.path}: tokenizer.ggml.{key} must be a list of {kind.__name__}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise TokenizerError(f"{self.path}: tokenizer.ggml.{key} must be true or false, got {value!r}")
        return default if value is None else value

    def token_id(self, key: str, default: int | None = None) -> int | None:
        """The id in `key`, `default` where it is missing; None for one that the vocabulary does not have."""
        value = self.get(f"{key}_token_id")
        value = default if value is None else value
        if value is not None and (not isinstance(value, int) or value < 0):
            raise TokenizerError(f"{self.path}: tokenizer.ggml.{key}_token_id must be a token id, got {value!r}")
        return value if value is not None and value < len(self.tokens) else None

    def needed_id(self, key: str, flag: str, default: int | None) -> tuple[str, int]:
        """Text and id of the token that `flag` asks for."""
        index = self.token_id(key, default)
        if index is None:
            name = f"{key}_token_id"
            raise TokenizerError(f"{self.path}: tokenizer.ggml.{flag} needs a valid {name}, got {self.get(name)!r}")
        return self.tokens[index], index

    def added_tokens(self) -> list[AddedToken]:
        return [
            AddedToken(token, special=kind == CONTROL, normalized=False)
            for token, kind in zip(self.tokens, self.kinds, strict=False)
            if kind in (CONTROL, USER_DEFINED) and token
        ]


def _byte_level(fields: _Metadata) -> Tokenizer:
    gpt2 = fields.all.get("general.architecture") == "gpt2"
    pre = fields.get("pre") or ("gpt-2" if gpt2 else "default")
    splitter = SPLITTERS.get(str(pre))
    if splitter is None:
        raise TokenizerError(
            f"{fields.path}: tokenizer.ggml.pre {pre!r} is not supported (supported: {', '.join(SPLITTERS)}); {_HELP}"
        )
    merges = fields.list_of("merges", str)
    if merges is None:
        raise TokenizerError(f"{fields.path}: tokenizer.ggml.merges is missing; {_HELP}")
    pairs = [_merge(pair, fields) for pair in merges]
    tokenizer = call_library(
        lambda: Tokenizer(models.BPE(vocab=fields.ids, merges=pairs, ignore_merges=splitter.whole_words)),
        f"{fields.path}: not a usable vocabulary",
    )
    if splitter.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = splitter.build()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(fields.added_tokens())
    around = _around(fields, bos=splitter.add_bos, eos=False)
    tokenizer.post_processor = around or processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _merge(pair: str, fields: _Metadata) -> tuple[str, str]:
    left, space, right = pair.partition(" ")
    if not (left and space and right):
        raise TokenizerError(f"{fields.path}: tokenizer.ggml.merges holds {pair!r}; expected two tokens and a space")
    for token in (left, right, left + right):
        if token not in fields.ids:
            raise TokenizerError(f"{fields.path}: tokenizer.ggml.merges holds {pair!r}, but {token!r} is no token")
    return left, right


def _sentencepiece(fields: _Metadata) -> Tokenizer:
    """Byte-pair encoding by scores, as Llama 2, Mistral, Gemma and Phi-3 have it."""
    scores = _scores(fields)
    pieces = Pieces(
        texts=fields.tokens,
        scores=scores,
        kinds=fields.kinds,
        unigram=False,
        unknown=fields.token_id("unknown", 0),
        dummy_prefix=fields.flag("add_space_prefix", True),
        user_defined_in_text=True,
    )
    tokenizer = build_sentencepiece(pieces, str(fields.path))
    tokenizer.post_processor = _around(fields, bos=True, eos=False, defaults=(1, 2)) or processors.Sequence([])
    return tokenizer


def _unigram(fields: _Metadata) -> Tokenizer:
    """T5's kind, with the normalization that its SentencePiece model brings."""
    charsmap = fields.list_of("precompiled_charsmap", int) or []
    pieces = Pieces(
        texts=fields.tokens,
        scores=_scores(fields),
        kinds=fields.kinds,
        unigram=True,
        unknown=fields.token_id("unknown", 2),
        charsmap=bytes(value & 0xFF for value in charsmap),
        dummy_prefix=fields.flag("add_space_prefix", True),
        remove_extra_whitespaces=fields.flag("remove_extra_whitespaces", False),
        user_defined_in_text=True,
    )
    tokenizer = build_sentencepiece(pieces, str(fields.path))
    tokenizer.post_processor = _around(fields, bos=False, eos=True, defaults=(None, 1)) or processors.Sequence([])
    return tokenizer


def _scores(fields: _Metadata) -> list[float]:
    scores = fields.list_of("scores", float)
    if scores is None or len(scores) != len(fields.tokens):
        count = "none" if scores is None else len(scores)
        raise TokenizerError(
            f"{fields.path}: tokenizer.ggml.scores must have one entry for each of {len(fields.tokens)} tokens, got "
            f"{count}"
        )
    return scores


_WORD_START = "\u2581"  # in front of what begins a word; what goes on stands bare


def _wordpiece(fields: _Metadata) -> Tokenizer:
    """BERT's vocabulary. GGUF marks the beginnings of words, BERT what goes on (##)."""
    vocab: dict[str, int] = {}
    for index, token in enumerate(fields.tokens):
        special = fields.kinds[index] == CONTROL if fields.kinds else False
        if token.startswith(_WORD_START):
            name = token[len(_WORD_START) :]
        else:
            name = token if special or (token.startswith("[") and token.endswith("]")) else f"##{token}"
        vocab.setdefault(name, index)
    unknown = fields.needed_id("unknown", "model 'bert'", 100)[0].removeprefix(_WORD_START)
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token=unknown, max_input_chars_per_word=100))
    lowercase = fields.flag("normalizer.lowercase", True)
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=True,
        strip_accents=fields.flag("normalizer.strip_accents", lowercase),
        lowercase=lowercase,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.add_tokens(
        [
            AddedToken(token.content.removeprefix(_WORD_START), special=token.special, normalized=False)
            for token in fields.added_tokens()
        ]
    )
    bos, eos = fields.get("cls_token_id"), fields.get("seperator_token_id")  # GGUF's own spelling
    around = _around(
        fields,
        bos=True,
        eos=fields.flag("add_sep_token", True),
        defaults=(bos if isinstance(bos, int) else 101, eos if isinstance(eos, int) else 102),
        end="seperator",
    )
    tokenizer.post_processor = around or processors.Sequence([])
    return tokenizer


def _around(
    fields: _Metadata,
    *,
    bos: bool,
    eos: bool,
    defaults: tuple[int | None, int | None] = (None, None),
    end: str = "eos",
) -> Any:
    """Puts the tokens around a text that the file asks for; `bos` and `eos` are what holds where it does not say."""
    first = _asked_for(fields, "bos", "add_bos_token", bos, defaults[0])
    last = _asked_for(fields, end, "add_eos_token", eos, defaults[1])
    before, after = ["first"] if first else [], ["last"] if last else []
    if not (before or after):
        return None
    return processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *before, "$B", *after],
        special_tokens=[
            {"id": name, "ids": [token[1]], "tokens": [token[0]]}
            for name, token in (("first", first), ("last", last))
            if token
        ],
    )


def _asked_for(fields: _Metadata, key: str, flag: str, default: bool, default_id: int | None) -> tuple[str, int] | None:
    """The token that goes around a text. What the file asks for must exist; what is only usual may be missing."""
    if not fields.flag(flag, default):
        return None
    index = fields.token_id(key, default_id)
    if index is None and fields.get(flag) is None:
        return None
    return fields.needed_id(key, flag, default_id)


_KINDS: dict[str, Callable[[_Metadata], Tokenizer]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "t5": _unigram,
    "bert": _wordpiece,
}
