"""Tokenizers in Hugging Face folders: a `tokenizer.json`, a SentencePiece `tokenizer.model`, or a byte-level
`vocab.json` with `merges.txt`, and what `tokenizer_config.json` adds to them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from kvern_engine.loading.bpe_splitters import SPLITTERS
from kvern_engine.loading.fields import read_json, shown
from kvern_engine.loading.sentencepiece import TokenizerError, build_sentencepiece, call_library, read_model_file

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ID_DIGITS = 10
_TOKEN_FLAGS = ("special", "lstrip", "rstrip", "normalized", "single_word")
_MOST_BYTES = 64 << 20  # of a vocabulary; the largest have 5 MB in these formats

# Names of splitters (`bpe_splitters.py`) by the class in tokenizer_config.json, or by the model's type without one.
_SPLITTER_OF_CLASS = {
    "GPT2Tokenizer": "gpt-2",
    "CodeGenTokenizer": "gpt-2",
    "GPTNeoXTokenizer": "olmo",
    "Qwen2Tokenizer": "qwen2",
}
_SPLITTER_OF_TYPE = {
    "gpt2": "gpt-2",
    "gpt_neox": "olmo",
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "qwen2"),
}
_ENDS_TEXTS = ("T5Tokenizer", "UMT5Tokenizer")  # classes that put the end token behind a text, and none in front


class TokenizerFolder:
    """The tokenizer that `path` names: a folder, or one of its files. `config` is its tokenizer_config.json, or empty;
    `special_tokens` maps names like "bos_token" to their text. Nothing large is read before `build`."""

    def __init__(self, path: Path) -> None:
        self._file: Path | None = None if path.is_dir() else path
        self.path = path if path.is_dir() else path.parent
        self.config = self._json("tokenizer_config.json")
        self.special_tokens = self._special_tokens()

    def build(self) -> Tokenizer:
        """The pipeline. Raises TokenizerError where the folder holds none that can be read, or a damaged one."""
        found = self._file or self._first("tokenizer.json", "tokenizer.model", "vocab.json")
        if found is None:
            raise TokenizerError(
                f"{self.path} holds no tokenizer.json, tokenizer.model or vocab.json with merges.txt; save the "
                "tokenizer in the fast format (tokenizer.json) or pass --tokenizer with a folder that has one"
            )
        if found.suffix == ".model":
            backend = self._sentencepiece(found)
        elif found.name == "vocab.json":
            backend = self._byte_level(found)
        else:
            backend = call_library(lambda: Tokenizer.from_file(str(found)), f"{found}: not a readable tokenizer.json")
        if self.config.get("split_special_tokens") is True:
            backend.encode_special_tokens = True
        return backend

    def _first(self, *names: str) -> Path | None:
        return next((self.path / name for name in names if (self.path / name).is_file()), None)

    def _json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        return read_json(path, _MOST_BYTES) if path.is_file() else {}

    def _special_tokens(self) -> dict[str, str]:
        named = {**self._json("special_tokens_map.json"), **self.config}
        special = {}
        for name in _SPECIAL_NAMES:
            value = named.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                special[name] = text
        return special

    @property
    def _class(self) -> str:
        return str(self.config.get("tokenizer_class") or "").removesuffix("Fast")

    def _sentencepiece(self, path: Path) -> Tokenizer:
        pieces = read_model_file(_read(path), str(path))
        changes: dict[str, Any] = {"every_segment": self.config.get("legacy") is not False}
        if isinstance(self.config.get("add_prefix_space"), bool):
            changes["dummy_prefix"] = self.config["add_prefix_space"]
        backend = build_sentencepiece(pieces.changed(**changes), str(path))
        self._add_tokens(backend)
        ends = self._class in _ENDS_TEXTS
        self._put_around(backend, bos=not ends and not pieces.unigram, eos=ends)
        return backend

    def _byte_level(self, path: Path) -> Tokenizer:
        merges_file = path.with_name("merges.txt")
        if not merges_file.is_file():
            raise TokenizerError(f"{path} has no merges.txt beside it; save the tokenizer as tokenizer.json instead")
        kind = self._class
        name = _SPLITTER_OF_CLASS.get(kind)
        if name is None and not kind:
            name = _SPLITTER_OF_TYPE.get(str(self._json("config.json").get("model_type")))
        if name is None:
            raise TokenizerError(
                f"{path}: how tokenizer_class {kind or None!r} splits words is not known (known: "
                f"{', '.join(_SPLITTER_OF_CLASS)}); save the tokenizer as tokenizer.json instead"
            )
        vocab, merges = read_json(path, _MOST_BYTES), _read_merges(merges_file)
        if not all(isinstance(index, int) and 0 <= index < 2**31 for index in vocab.values()):
            raise TokenizerError(f"{path}: expected an object of token ids")
        splitter = SPLITTERS[name]
        backend = call_library(
            lambda: Tokenizer(models.BPE(vocab=vocab, merges=merges)), f"{path}: not a usable vocabulary"
        )
        if splitter.nfc:
            backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = splitter.build()
        if self.config.get("add_prefix_space") is True:
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)
        backend.decoder = decoders.ByteLevel()
        backend.post_processor = processors.ByteLevel(trim_offsets=False)
        self._add_tokens(backend)
        self._put_around(backend, bos=False, eos=False)
        return backend

    def _add_tokens(self, backend: Tokenizer) -> None:
        """Those of tokenizer_config.json (`added_tokens_decoder`), of added_tokens.json, and the named special ones."""
        wanted: dict[int, AddedToken] = {}
        for text, index in self._json("added_tokens.json").items():
            if isinstance(index, int):
                wanted[index] = AddedToken(text, special=text in self.special_tokens.values(), normalized=False)
        wanted |= dict(self._decoder_entries())
        for index, token in sorted(wanted.items()):
            backend.add_tokens([token])
            got = backend.token_to_id(token.content)
            if got != index:
                raise TokenizerError(
                    f"{self.path}: added token {token.content!r} must get id {index}, but gets {got}; "
                    "save the tokenizer as tokenizer.json instead"
                )
        known = [text for text in self.special_tokens.values() if backend.token_to_id(text) is not None]
        backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in known])

    def _decoder_entries(self) -> Iterator[tuple[int, AddedToken]]:
        """Id and token of each entry of `added_tokens_decoder`."""
        entries = self.config.get("added_tokens_decoder") or {}
        if not isinstance(entries, dict):
            raise TokenizerError(f"{self.path}: added_tokens_decoder must map ids to objects, got {shown(entries)}")
        for number, entry in entries.items():
            where = f"{self.path}: added_tokens_decoder.{number[:_ID_DIGITS]}"
            if not (number.isascii() and number.isdecimal() and len(number) <= _ID_DIGITS):
                raise TokenizerError(f"{where} must be a token id")
            if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
                raise TokenizerError(f"{where} must be an object with content, got {shown(entry)}")
            given = {key: entry[key] for key in _TOKEN_FLAGS if entry.get(key) is not None}
            for key, value in given.items():
                if not isinstance(value, bool):
                    raise TokenizerError(f"{where}.{key} must be true or false, got {shown(value)}")
            yield int(number), AddedToken(entry["content"], **given)

    def _put_around(self, backend: Tokenizer, *, bos: bool, eos: bool) -> None:
        """Tokens before and behind a text, as tokenizer_config.json says or else as the class does."""
        asked = (self.config.get("add_bos_token", bos), self.config.get("add_eos_token", eos))
        tokens = []
        for name, alias, wanted in zip(("bos_token", "eos_token"), ("first", "last"), asked, strict=True):
            text = self.special_tokens.get(name) or ("<s>" if name == "bos_token" else "</s>")
            index = backend.token_to_id(text)
            if wanted is True and index is not None:
                tokens.append({"id": alias, "ids": [index], "tokens": [text]})
        if not tokens:
            return
        names = [token["id"] for token in tokens]
        single = [*(["first"] if "first" in names else []), "$A", *(["last"] if "last" in names else [])]
        pair = [*single, *(piece if piece != "$A" else "$B" for piece in single)]
        backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=tokens)


def _read(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > _MOST_BYTES:
            raise TokenizerError(f"{path}: has {size:,} bytes; at most {_MOST_BYTES:,} are read")
        return path.read_bytes()
    except OSError as error:
        raise TokenizerError(f"{path}: cannot be read: {error.strerror or error}") from error


def _read_merges(path: Path) -> list[tuple[str, str]]:
    try:
        lines = _read(path).decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path}: not valid UTF-8: {error}") from error
    merges = []
    for number, line in enumerate(lines, start=1):
        line = line.removesuffix("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        left, space, right = line.partition(" ")
        if not (left and space and right) or " " in right:
            raise TokenizerError(f"{path}, line {number}: expected two tokens and a space, got {line[:80]!r}")
        merges.append((left, right))
    return merges
