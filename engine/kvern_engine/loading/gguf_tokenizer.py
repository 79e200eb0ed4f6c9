"""Builds a `tokenizers.Tokenizer` from the vocabulary in a GGUF file's metadata.

GGUF names only the *kind* of text splitting (`tokenizer.ggml.pre`), so each kind's pipeline is written out here. A kind
that is not listed is refused: a wrong splitter gives plausible but wrong token ids.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

if TYPE_CHECKING:
    from kvern_engine.loading.gguf import GGUFFile

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

# The splitters of Llama 3 and of Qwen 2, as their own tokenizer.json state them; they differ in the digits.
_TIKTOKEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class TokenizerError(ValueError):
    """The model brings no tokenizer that Kvern can read; the text says what is missing and what helps."""


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _tiktoken(digits: str) -> Any:
    split = pre_tokenizers.Split(Regex(_TIKTOKEN_SPLIT % digits), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_SPLITTERS: dict[str, Callable[[], Any]] = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": lambda: _tiktoken(r"\p{N}{1,3}"),
    "qwen2": lambda: _tiktoken(r"\p{N}"),
}
_NFC = frozenset({"qwen2"})  # whose text is normalized first
_WHOLE_WORDS = frozenset({"llama-bpe"})  # whose words in the vocabulary are taken without merging


def build_tokenizer(file: "GGUFFile") -> Tokenizer:
    """The pipeline of `file`. Raises TokenizerError where the vocabulary's kind is unknown or incomplete."""
    meta = file.metadata
    kind, pre = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2":
        raise TokenizerError(
            f"{file.path}: tokenizer.ggml.model {kind!r} is not supported (supported: gpt2); "
            "pass --tokenizer with the folder of the original model"
        )
    if pre not in _SPLITTERS:
        raise TokenizerError(
            f"{file.path}: tokenizer.ggml.pre {pre!r} is not supported (supported: {', '.join(_SPLITTERS)}); "
            "pass --tokenizer with the folder of the original model"
        )
    tokens, merges = meta.get("tokenizer.ggml.tokens"), meta.get("tokenizer.ggml.merges")
    if not tokens or merges is None:
        raise TokenizerError(f"{file.path}: tokenizer.ggml.tokens and tokenizer.ggml.merges are needed")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[_merge(pair, file) for pair in merges],
            ignore_merges=pre in _WHOLE_WORDS,
        )
    )
    if pre in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _SPLITTERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(_added_tokens(tokens, meta.get("tokenizer.ggml.token_type", ())))
    tokenizer.post_processor = _bos_processor(file, tokens)
    return tokenizer


def _merge(pair: str, file: "GGUFFile") -> tuple[str, str]:
    left, space, right = pair.partition(" ")
    if not (left and space and right):
        raise TokenizerError(f"{file.path}: tokenizer.ggml.merges holds {pair!r}; expected two tokens and a space")
    return left, right


def _added_tokens(tokens: list[str], types: Any) -> list[AddedToken]:
    return [
        AddedToken(tokens[index], special=kind == _CONTROL, normalized=False)
        for index, kind in enumerate(types)
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def _bos_processor(file: "GGUFFile", tokens: list[str]) -> Any:
    """Puts the beginning-of-sequence token in front where the file asks for it."""
    bos = file.metadata.get("tokenizer.ggml.bos_token_id")
    if not file.metadata.get("tokenizer.ggml.add_bos_token", False):
        return processors.ByteLevel(trim_offsets=False)
    if bos is None or not 0 <= bos < len(tokens):
        raise TokenizerError(f"{file.path}: tokenizer.ggml.add_bos_token needs a valid bos_token_id, got {bos!r}")
    text = tokens[bos]
    return processors.TemplateProcessing(
        single=f"{text}:0 $A:0", pair=f"{text}:0 $A:0 {text}:1 $B:1", special_tokens=[(text, bos)]
    )
