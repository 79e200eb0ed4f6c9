"""Tokenizers against pipelines built here, from the raw vocabulary, with the `tokenizers` library alone."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from kvern_engine.loading.gguf import GGUFFile
from kvern_engine.loading.resolve import ModelFiles
from kvern_engine.tokenizer import Tokenizer, TokenizerError, load_tokenizer

GOLDEN = [
    "x =  1",
    "\n\n1. foo",
    "In 2024, 1,234.56 + 789 = 42",
    "a1b22c333",
    "١٢٣ ½ ²",
    "😀👩‍👩‍👧 naïve café",
    "日本語の文章です。中文 한국어",
    "   leading and trailing   ",
    "a\t\tb \r\n  c\n\n\n   d",
    "Don't we'll I'VE they're",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|im_start|><|endoftext|> <repo_name>x",
    "< |im_end|> <|im_en",
    "def f(x):\n    return x ** 2  # 100%",
    "",
    " ",
]


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2: ModelFiles) -> Tokenizer:
    return load_tokenizer(smollm2)


@pytest.fixture(scope="module")
def kjv_tokenizer(tiny_kjv: ModelFiles) -> Tokenizer:
    return load_tokenizer(tiny_kjv)


@pytest.fixture(scope="module")
def independent(smollm2_file: GGUFFile) -> tokenizers.Tokenizer:
    """SmolLM2's pipeline: every digit alone, then GPT-2's byte-level words."""
    tokens = smollm2_file.metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in smollm2_file.metadata["tokenizer.ggml.merges"]]
    pipeline = tokenizers.Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(tokens)}, merges=merges))
    pipeline.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    pipeline.decoder = decoders.ByteLevel()
    pipeline.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in tokens[:17]])
    return pipeline


@pytest.mark.parametrize("text", GOLDEN)
def test_smollm2_golden_strings(smollm2_tokenizer: Tokenizer, independent: tokenizers.Tokenizer, text: str) -> None:
    ids = smollm2_tokenizer.encode(text)
    assert ids == independent.encode(text).ids == smollm2_tokenizer.encode(text, add_special_tokens=False)
    assert smollm2_tokenizer.decode(ids, skip_special_tokens=False) == text
    assert smollm2_tokenizer.decode(ids) == independent.decode(ids, skip_special_tokens=True)


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_smollm2_any_string(smollm2_tokenizer: Tokenizer, independent: tokenizers.Tokenizer, text: str) -> None:
    ids = smollm2_tokenizer.encode(text)
    assert ids == independent.encode(text).ids
    # The vocabulary lacks the bytes of some planes that nobody writes in; what it has comes back.
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    if all(independent.token_to_id(letter) is not None for word, _ in letters for letter in word):
        assert smollm2_tokenizer.decode(ids, skip_special_tokens=False) == text


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=30), skip=st.booleans())
def test_smollm2_any_ids(
    smollm2_tokenizer: Tokenizer, independent: tokenizers.Tokenizer, ids: list[int], skip: bool
) -> None:
    assert smollm2_tokenizer.decode(ids, skip) == independent.decode(ids, skip_special_tokens=skip)


def test_smollm2_known_ids(smollm2_tokenizer: Tokenizer) -> None:
    """Literal ids: both pipelines above could be wrong together."""
    assert smollm2_tokenizer.encode("x =  1") == [104, 446, 256, 33]
    assert smollm2_tokenizer.encode("\n\n1. foo") == [1116, 33, 30, 29856]
    assert smollm2_tokenizer.encode("2024") == [34, 32, 34, 36]
    assert smollm2_tokenizer.encode("<|im_end|>hi<|im_start|>") == [2, 6004, 1]


def test_smollm2_facts(smollm2_tokenizer: Tokenizer) -> None:
    tokenizer = smollm2_tokenizer
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (49152, 1, (2,))
    assert tokenizer.special_token_ids == frozenset(range(17)) and tokenizer.is_byte_level
    first, *rest = tokenizer.encode("😀")
    assert tokenizer.token_bytes(first) + b"".join(map(tokenizer.token_bytes, rest)) == "😀".encode()
    assert tokenizer.token_text(2) == "<|im_end|>" and tokenizer.token_bytes(446) == b" ="
    assert tokenizer.token_text(rest[0]) == "\ufffd"


def test_ids_outside_the_vocabulary_are_nothing(smollm2_tokenizer: Tokenizer) -> None:
    for index in (49152, 10**6, -1):
        assert smollm2_tokenizer.token_bytes(index) == b"" and smollm2_tokenizer.token_text(index) == ""
        assert smollm2_tokenizer.decode([index, 104, index]) == "x"


def test_invalid_unicode_is_named(smollm2_tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"not valid Unicode: lone surrogate '\\ud800' at character 2"):
        smollm2_tokenizer.encode("ab\ud800")


def test_tiny_kjv(kjv_tokenizer: Tokenizer, tiny_kjv: ModelFiles) -> None:
    backend = tokenizers.Tokenizer.from_file(str(tiny_kjv.path / "tokenizer.json"))
    for text in [*GOLDEN, "In the beginning God created the heaven and the earth."]:
        assert kjv_tokenizer.encode(text) == backend.encode(text).ids
        assert kjv_tokenizer.decode(kjv_tokenizer.encode(text), False) == text
    assert (kjv_tokenizer.vocab_size, kjv_tokenizer.bos_token_id, kjv_tokenizer.eos_token_ids) == (2048, 0, (0,))
    assert kjv_tokenizer.special_token_ids == {0}


def test_importing_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, kvern_engine.tokenizer, kvern_engine.detokenizer\n"
        "print([name for name in ('torch', 'transformers', 'jinja2', 'safetensors') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Other kinds of vocabulary, with the 256 bytes and a few words


def byte_vocabulary(extra: list[str]) -> list[str]:
    return [*sorted(pre_tokenizers.ByteLevel.alphabet()), *extra]


@pytest.fixture
def gguf_tokenizer(write_gguf: Callable[..., Path]) -> Callable[..., Tokenizer]:
    def make(pre: str | None, tokens: list[str], merges: list[str], **metadata: Any) -> Tokenizer:
        values = {"model": "gpt2", "pre": pre, "tokens": tokens, "merges": merges, **metadata}
        path = write_gguf({}, **{f"tokenizer.ggml.{key}": value for key, value in values.items()})
        return load_tokenizer(ModelFiles("m", "gguf", path))

    return make


def words(tokenizer: Tokenizer, text: str) -> list[str]:
    return [piece for piece, _ in tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)]


def test_splitters(gguf_tokenizer: Callable[..., Tokenizer]) -> None:
    tokens, merges = byte_vocabulary(["ab"]), ["a b"]
    split = {pre: words(gguf_tokenizer(pre, tokens, merges), "x 12345'LL\n\n y") for pre in (None, "gpt-2", "smollm")}
    assert split["gpt-2"] == ["x", "Ġ12345", "'", "LL", "ĊĊ", "Ġy"]
    # A file that names no splitter was written before there were names: as llama.cpp reads it.
    assert split[None] == ["x", "Ġ", "123", "45", "'", "LL", "ĊĊ", "Ġy"]
    assert split["smollm"] == ["x", "Ġ", "1", "2", "3", "4", "5", "'", "LL", "ĊĊ", "Ġy"]
    text = "x 12345'LL\n\n y"
    assert words(gguf_tokenizer("llama-bpe", tokens, merges), text) == ["x", "Ġ", "123", "45", "'LL", "ĊĊ", "Ġy"]
    assert words(gguf_tokenizer("qwen2", tokens, merges), text) == ["x", "Ġ", *"12345", "'LL", "ĊĊ", "Ġy"]


def test_qwen_normalizes_and_llama_takes_whole_words(gguf_tokenizer: Callable[..., Tokenizer]) -> None:
    tokens, merges = byte_vocabulary(["ab", "abc"]), ["a b"]
    composed, decomposed = "\u00e9", "e\u0301"
    qwen, gpt2 = gguf_tokenizer("qwen2", tokens, merges), gguf_tokenizer("gpt-2", tokens, merges)
    assert qwen.encode(decomposed) == qwen.encode(composed) and gpt2.encode(decomposed) != gpt2.encode(composed)
    assert gguf_tokenizer("llama-bpe", tokens, merges).encode("abc") == [tokens.index("abc")]
    assert gpt2.encode("abc") == [tokens.index("ab"), tokens.index("c")]


def test_added_tokens_and_bos_of_a_gguf(gguf_tokenizer: Callable[..., Tokenizer]) -> None:
    tokens, merges = byte_vocabulary(["<s>", "</s>", "<tool é>", "ab"]), ["a b"]
    special = {"token_type": [1] * 256 + [3, 3, 4, 1], "bos_token_id": 256, "eos_token_id": 257, "eot_token_id": 5}
    plain = gguf_tokenizer("gpt-2", tokens, merges, **special)
    assert plain.special_token_ids == {256, 257} and plain.eos_token_ids == (257, 5)
    assert plain.encode("<s><tool é>ab") == [256, 258, 259] and plain.decode([256, 258, 259]) == "<tool é>ab"
    with_bos = gguf_tokenizer("gpt-2", tokens, merges, add_bos_token=True, **special)
    assert with_bos.encode("</s>") == [256, 257] and with_bos.encode("</s>", add_special_tokens=False) == [257]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model": "rwkv"}, "tokenizer.ggml.model 'rwkv' is not supported (supported: gpt2, llama, t5, bert); pass --"),
        ({"model": None}, "tokenizer.ggml.model None is not supported"),
        ({"pre": "kimi-k2"}, "tokenizer.ggml.pre 'kimi-k2' is not supported (supported: default, gpt-2, phi-2,"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing; pass --tokenizer with the folder of the original model"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens must be a list of str"),
        ({"tokens": [*byte_vocabulary(["ab"]), "ab"]}, "tokenizer.ggml.tokens holds 'ab' twice, as 256 and 257"),
        ({"merges": None}, "tokenizer.ggml.merges is missing; pass --tokenizer"),
        ({"merges": ["ab"]}, "tokenizer.ggml.merges holds 'ab'; expected two tokens and a space"),
        ({"merges": ["a c"]}, "tokenizer.ggml.merges holds 'a c', but 'ac' is no token"),
        ({"token_type": [1, 3]}, "tokenizer.ggml.token_type has 2 entries for 257 tokens"),
        ({"add_bos_token": True}, "tokenizer.ggml.add_bos_token needs a valid bos_token_id, got None"),
        ({"add_bos_token": True, "bos_token_id": 999}, "add_bos_token needs a valid bos_token_id, got 999"),
        ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token must be true or false, got 1"),
        ({"model": "llama"}, "tokenizer.ggml.scores must have one entry for each of 257 tokens, got none"),
        ({"model": "t5", "scores": [0.0]}, "tokenizer.ggml.scores must have one entry for each of 257 tokens, got 1"),
        ({"model": "bert", "unknown_token_id": 999}, "tokenizer.ggml.model 'bert' needs a valid unknown_token_id"),
    ],
)
def test_gguf_errors(gguf_tokenizer: Callable[..., Tokenizer], changes: dict[str, Any], text: str) -> None:
    arguments = {"pre": "gpt-2", "tokens": byte_vocabulary(["ab"]), "merges": ["a b"], **changes}
    with pytest.raises(TokenizerError) as caught:
        gguf_tokenizer(**arguments)
    assert text in str(caught.value)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_empty_tokens_of_a_gguf_are_no_text(gguf_tokenizer: Callable[..., Tokenizer], kind: str) -> None:
    """llama.cpp reads files with several."""
    tokens = byte_vocabulary(["ab", "", "", "<s>"])
    scores = [float(-index) for index in range(len(tokens))]
    tokenizer = gguf_tokenizer("gpt-2", tokens, ["a b"], model=kind, scores=scores, bos_token_id=259)
    assert tokenizer.decode([tokens.index("a"), 257, 258, tokens.index("b")]) == "ab"
    assert tokenizer.encode("ab", add_special_tokens=False)[-1] == 256


@pytest.mark.parametrize(
    ("added", "text"),
    [
        ([], None),
        ({}, None),
        ([1], "added_tokens_decoder must map ids to objects, got [1]"),
        ("x", "added_tokens_decoder must map ids to objects, got 'x'"),
        ({"²": {"content": "x"}}, "added_tokens_decoder.² must be a token id"),
        ({"9" * 5000: {"content": "x"}}, "added_tokens_decoder.9999999999 must be a token id"),
        ({"-1": {"content": "x"}}, "added_tokens_decoder.-1 must be a token id"),
        ({"256": "x"}, "added_tokens_decoder.256 must be an object with content, got 'x'"),
        ({"256": {"content": None}}, "added_tokens_decoder.256 must be an object with content"),
        (
            {"256": {"content": "x", "lstrip": "yes"}},
            "decoder.256.lstrip must be true or false, got 'yes'",
        ),
        ({"256": {"content": "x", "special": 1}}, "added_tokens_decoder.256.special must be true or false, got 1"),
        ({"4000000000": {"content": "<x>"}}, "added token '<x>' must get id 4000000000, but gets 256"),
        ({"256": {"content": ""}}, "added token '' must get id 256, but gets None"),
    ],
)
def test_odd_added_tokens_of_a_folder(added: object, text: str | None, tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(byte_vocabulary([]))}))
    (tmp_path / "merges.txt").write_text("")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    files = ModelFiles("m", "folder", tmp_path)
    if text is None:
        assert load_tokenizer(files).vocab_size == 256
        return
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(files)
    assert text in str(caught.value) and len(str(caught.value)) < 400


def test_ids_that_lie_far_apart_are_not_counted_through() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "bbb": 3_000_000_000}, "a"))
    tokenizer = Tokenizer(backend, special_tokens={}, eos_token_ids=())
    assert (tokenizer.longest_token, tokenizer.vocab_size) == (3, 3_000_000_001)


def test_truncation_and_padding_of_a_training_run_are_off(tiny_kjv: ModelFiles, tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(tiny_kjv.path / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")
    ids = load_tokenizer(ModelFiles("m", "folder", tmp_path)).encode("In the beginning")
    assert ids == tokenizers.Tokenizer.from_file(str(tiny_kjv.path / "tokenizer.json")).encode("In the beginning").ids


def test_override(smollm2: ModelFiles, tiny_kjv: ModelFiles, kjv_tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = "In the beginning 1"
    for place in (tiny_kjv.path, tiny_kjv.path / "tokenizer.json"):
        other = load_tokenizer(smollm2, override=str(place))
        assert other.encode(text) == kjv_tokenizer.encode(text) and other.eos_token_ids == (2, 0)
    assert load_tokenizer(tiny_kjv, override=str(smollm2.path)).encode("x =  1") == [104, 446, 256, 33]
    with pytest.raises(TokenizerError, match=r"tokenizer: no such folder or file '/no/where'"):
        load_tokenizer(smollm2, override="/no/where")
    with pytest.raises(TokenizerError, match=r"holds no tokenizer\.json, tokenizer\.model or vocab\.json with"):
        load_tokenizer(smollm2, override=str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: not a readable tokenizer\.json"):
        load_tokenizer(smollm2, override=str(tmp_path))


def test_special_tokens_given_as_objects(tiny_kjv: ModelFiles, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((tiny_kjv.path / name).read_bytes())
    token = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).id_to_token(300)
    config = {"eos_token": {"content": token, "special": True}, "bos_token": None, "pad_token": "nowhere"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(ModelFiles("m", "folder", tmp_path))
    assert tokenizer.eos_token_ids == (0, 300) and tokenizer.bos_token_id is None
