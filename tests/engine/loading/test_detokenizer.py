"""Incremental text: what decoding at once gives, for any text and any cut; no half character, no leaked stop string."""

import codecs
import os

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers

from kvern_engine.detokenizer import IncrementalDetokenizer
from kvern_engine.loading.resolve import ModelFiles
from kvern_engine.tokenizer import Tokenizer, load_tokenizer

LESS = 1 if os.environ.get("KVERN_TEST_FULL") == "1" else 3  # an ordinary run tries a third of the examples
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
TEXTS = st.lists(
    st.one_of(
        st.text(),
        st.text("ab <|"),
        st.sampled_from([*SPECIAL, "😀", "👩‍👩‍👧", "é", "e\u0301", "日本語", "한국", "\n\n", "  1", "\ufffd", "<|im_"]),
    ),
    max_size=12,
).map("".join)
# A small alphabet makes stop strings that overlap, nest and nearly match.
STOPS = st.lists(st.one_of(st.text("ab<|é", min_size=1, max_size=5), st.sampled_from(["\n\n", "日本"])), max_size=4)


class Bytes:
    """A vocabulary of arbitrary byte strings; ids count from 0, `special` are special."""

    is_byte_level = True

    def __init__(self, tokens: list[bytes], special: frozenset[int] = frozenset()) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.calls = 0

    def token_bytes(self, token_id: int) -> bytes:
        self.calls += 1
        return self.tokens[token_id]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        kept = [self.tokens[i] for i in ids if not (skip_special_tokens and i in self.special_token_ids)]
        return b"".join(kept).decode("utf-8", "replace")


@st.composite
def cut_texts(draw: st.DrawFn, texts: st.SearchStrategy[bytes]) -> Bytes:
    """A text cut into tokens at arbitrary bytes."""
    data = draw(texts)
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=12)))
    return Bytes([data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)])


def chunks(ids: list[int], sizes: list[int]) -> list[list[int]]:
    out, start = [], 0
    for size in sizes:
        out.append(ids[start : start + size])
        start += size
    return [*out, ids[start:]]


def run(detokenizer: IncrementalDetokenizer, parts: list[list[int]]) -> list[str]:
    return [*(detokenizer.append(part) for part in parts), detokenizer.finish()]


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2: ModelFiles) -> Tokenizer:
    return load_tokenizer(smollm2)


SIZES = st.lists(st.integers(0, 5), max_size=20)


@settings(max_examples=300 // LESS, deadline=None)
@given(text=TEXTS, sizes=SIZES, skip=st.booleans())
def test_real_tokens_in_any_chunks(smollm2_tokenizer: Tokenizer, text: str, sizes: list[int], skip: bool) -> None:
    ids = smollm2_tokenizer.encode(text)
    detokenizer = IncrementalDetokenizer(smollm2_tokenizer, skip_special_tokens=skip)
    assert "".join(run(detokenizer, chunks(ids, sizes))) == smollm2_tokenizer.decode(ids, skip)
    assert detokenizer.stopped is None and detokenizer.tokens_used == len(ids)


@settings(max_examples=200 // LESS, deadline=None)
@given(ids=st.lists(st.integers(0, 49200), max_size=40), sizes=SIZES, skip=st.booleans())
def test_any_ids_in_any_chunks(smollm2_tokenizer: Tokenizer, ids: list[int], sizes: list[int], skip: bool) -> None:
    detokenizer = IncrementalDetokenizer(smollm2_tokenizer, skip_special_tokens=skip)
    assert "".join(run(detokenizer, chunks(ids, sizes))) == smollm2_tokenizer.decode(ids, skip)


@settings(max_examples=300 // LESS, deadline=None)
@given(tokenizer=cut_texts(st.one_of(TEXTS.map(str.encode), st.binary(max_size=20))), sizes=SIZES)
def test_any_cut_of_any_bytes(tokenizer: Bytes, sizes: list[int]) -> None:
    ids = list(range(len(tokenizer.tokens)))
    pieces = run(IncrementalDetokenizer(tokenizer), chunks(ids, sizes))
    assert "".join(pieces) == tokenizer.decode(ids)


@settings(max_examples=300 // LESS, deadline=None)
@given(tokenizer=cut_texts(TEXTS.filter(lambda text: "\ufffd" not in text).map(str.encode)))
def test_valid_text_never_shows_half_a_character(tokenizer: Bytes) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    whole, sent = tokenizer.decode(list(range(len(tokenizer.tokens)))), ""
    for index in range(len(tokenizer.tokens)):
        sent += detokenizer.append([index])
        assert "\ufffd" not in sent and whole.startswith(sent)
        # And all whole characters are sent at once.
        assert len(sent) == len(b"".join(tokenizer.tokens[: index + 1]).decode("utf-8", "ignore"))


def test_a_character_cut_off_at_the_end() -> None:
    detokenizer = IncrementalDetokenizer(Bytes(["日".encode()[:2], b"x"]))
    assert detokenizer.append([0]) == "" and detokenizer.finish() == "\ufffd" and detokenizer.finish() == ""
    detokenizer = IncrementalDetokenizer(Bytes(["日".encode()[:2], b"x"]))
    assert detokenizer.append([0]) == "" and detokenizer.append([1]) == "\ufffdx" and detokenizer.finish() == ""


def expected(
    tokenizer: Bytes, stops: list[str], include: bool, min_tokens: int
) -> tuple[str, str | None, int, list[str]]:
    """By brute force: (text, stop string, tokens used, text that may be sent after each token)."""
    utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
    text, sendable = "", []
    for used, token in enumerate([*tokenizer.tokens, None], start=1):
        new = utf8.decode(b"", final=True) if token is None else utf8.decode(token)
        used = min(used, len(tokenizer.tokens))
        for character in new:
            text += character
            ending = [stop for stop in stops if text.endswith(stop)]
            if ending and used >= min_tokens:
                stop = max(ending, key=len)
                return text if include else text[: -len(stop)], stop, used, sendable
        held = max(
            (size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])),
            default=0,
        )
        sendable.append(text[: len(text) - held])
    return text, None, len(tokenizer.tokens), sendable


@settings(max_examples=600 // LESS, deadline=None)
@given(
    tokenizer=cut_texts(st.one_of(st.text("ab<|é", max_size=40), TEXTS).map(str.encode)),
    stops=STOPS,
    include=st.booleans(),
    min_tokens=st.integers(0, 8),
    sizes=SIZES,
)
@example(tokenizer=Bytes([b"aa", b"b"]), stops=["aa", "aab"], include=False, min_tokens=2, sizes=[1])
@example(tokenizer=Bytes([b"abc"]), stops=["abc", "b"], include=False, min_tokens=0, sizes=[])
def test_stop_strings(tokenizer: Bytes, stops: list[str], include: bool, min_tokens: int, sizes: list[int]) -> None:
    ids = list(range(len(tokenizer.tokens)))
    text, stop, used, sendable = expected(tokenizer, stops, include, min_tokens)

    detokenizer = IncrementalDetokenizer(tokenizer, tuple(stops), include, min_tokens=min_tokens)
    assert "".join(run(detokenizer, chunks(ids, sizes))) == text
    assert (detokenizer.stopped, detokenizer.tokens_used) == (stop, used)

    # Token by token: as much as possible is sent, and never a part of what may become a stop string.
    detokenizer = IncrementalDetokenizer(tokenizer, tuple(stops), include, min_tokens=min_tokens)
    sent = ""
    for index, may_be_sent in zip(ids, sendable, strict=False):
        sent += detokenizer.append([index])
        if detokenizer.stopped is None:
            assert sent == may_be_sent


def split(text: str, *tokens: str) -> tuple[Bytes, list[int]]:
    assert "".join(tokens) == text
    return Bytes([token.encode() for token in tokens]), list(range(len(tokens)))


def test_a_stop_string_over_several_tokens_never_shows() -> None:
    tokenizer, ids = split("Hello</s> more", "Hel", "lo<", "/", "s", "> more")
    detokenizer = IncrementalDetokenizer(tokenizer, ("</s>",))
    assert [detokenizer.append([index]) for index in ids] == ["Hel", "lo", "", "", ""]
    assert (detokenizer.stopped, detokenizer.tokens_used) == ("</s>", 5)
    assert detokenizer.append([0]) == "" and detokenizer.finish() == "" and detokenizer.tokens_used == 5


def test_a_false_start_is_given_back() -> None:
    tokenizer, ids = split("a</b", "a<", "/", "b")
    detokenizer = IncrementalDetokenizer(tokenizer, ("</s>",))
    assert [detokenizer.append([index]) for index in ids] == ["a", "", "</b"]
    tokenizer, ids = split("a</", "a<", "/")
    detokenizer = IncrementalDetokenizer(tokenizer, ("</s>",))
    assert [*(detokenizer.append([index]) for index in ids), detokenizer.finish()] == ["a", "", "</"]
    assert detokenizer.finish() == ""


def test_include_stop_cuts_after_it() -> None:
    tokenizer, ids = split("one. two", "on", "e. two")
    detokenizer = IncrementalDetokenizer(tokenizer, (".",), include_stop=True)
    assert [detokenizer.append([index]) for index in ids] == ["on", "e."] and detokenizer.finish() == ""


def test_the_first_of_several_wins() -> None:
    for stops in (("two", "one"), ("one", "two")):
        tokenizer, ids = split("zero one two", "zero one two")
        detokenizer = IncrementalDetokenizer(tokenizer, stops)
        assert detokenizer.append(ids) == "zero " and detokenizer.stopped == "one"


def test_of_two_that_end_together_the_longest_is_taken_out() -> None:
    for stops in (("User:", "\nUser:"), ("\nUser:", "User:")):
        tokenizer, ids = split("ja\nUser: x", "ja", "\nUs", "er:", " x")
        detokenizer = IncrementalDetokenizer(tokenizer, stops)
        assert detokenizer.append(ids) == "ja" and (detokenizer.stopped, detokenizer.tokens_used) == ("\nUser:", 3)


def test_min_tokens_lets_early_stop_strings_pass() -> None:
    tokenizer, ids = split("a.b.c.", "a.", "b", ".", "c", ".")
    detokenizer = IncrementalDetokenizer(tokenizer, (".",), min_tokens=4)
    assert detokenizer.append(ids) == "a.b.c" and (detokenizer.stopped, detokenizer.tokens_used) == (".", 5)
    detokenizer = IncrementalDetokenizer(tokenizer, (".",), min_tokens=3)
    assert detokenizer.append(ids) == "a.b" and detokenizer.tokens_used == 3


def test_special_tokens_are_no_text_unless_asked_for(smollm2_tokenizer: Tokenizer) -> None:
    ids = smollm2_tokenizer.encode("ja<|im_end|>nei")
    assert "".join(run(IncrementalDetokenizer(smollm2_tokenizer, ("<|im_end|>",)), [ids])) == "janei"
    shown = IncrementalDetokenizer(smollm2_tokenizer, ("<|im_end|>",), skip_special_tokens=False)
    assert "".join(run(shown, [ids])) == "ja" and shown.stopped == "<|im_end|>" and shown.tokens_used == 2


def test_work_does_not_grow_with_the_output() -> None:
    """Each token is looked up once, and what is kept does not grow, even where every character begins a stop."""
    tokenizer = Bytes([b"a"])
    detokenizer = IncrementalDetokenizer(tokenizer, ("aaab", "a" * 50 + "c"))
    for _ in range(5000):
        detokenizer.append([0])
    assert tokenizer.calls == 5000 and len(detokenizer.finish()) == 50


# Decoders that are not byte-level


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """Llama 2's kind: spaces as U+2581, unknown characters as bytes, the first space stripped."""
    letters = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abé日", "▁a", "ab"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={text: index for index, text in enumerate(letters)},
            merges=[("▁", "a"), ("a", "b")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("</s>", normalized=False)])
    return Tokenizer(backend, special_tokens={"eos_token": "</s>"}, eos_token_ids=())


@settings(max_examples=300 // LESS, deadline=None)
@given(
    text=st.one_of(st.text("ab é日本😀"), st.text()).filter(lambda t: "▁" not in t and "\ufffd" not in t), sizes=SIZES
)
def test_sentencepiece_decoder(sentencepiece: Tokenizer, text: str, sizes: list[int]) -> None:
    ids = sentencepiece.encode(text)
    assert not sentencepiece.is_byte_level and sentencepiece.decode(ids) == text
    sent = ""
    detokenizer = IncrementalDetokenizer(sentencepiece)
    for part in chunks(ids, sizes):
        sent += detokenizer.append(part)
        assert text.startswith(sent)
    assert sent + detokenizer.finish() == text


def test_sentencepiece_details(sentencepiece: Tokenizer) -> None:
    eos = sentencepiece.eos_token_ids[0]
    ids = [*sentencepiece.encode("a"), eos, *sentencepiece.encode(" 😀")]
    assert "".join(run(IncrementalDetokenizer(sentencepiece), [ids])) == sentencepiece.decode(ids)
    shown = IncrementalDetokenizer(sentencepiece, skip_special_tokens=False)
    assert "".join(run(shown, [ids])) == sentencepiece.decode(ids, skip_special_tokens=False)
    byte = sentencepiece.backend.token_to_id("<0xF0>")
    assert sentencepiece.token_bytes(byte) == b"\xf0"
    assert sentencepiece.token_text(sentencepiece.backend.token_to_id("▁a")) == " a"
    # A byte that begins a character is given up on as soon as the next one does not go on with it.
    endless = IncrementalDetokenizer(sentencepiece)
    assert [endless.append([byte]) for _ in range(4)] == ["", "\ufffd", "\ufffd", "\ufffd"]
    assert endless.finish() == "\ufffd"


def test_wordpiece_decoder() -> None:
    vocab = {"hello": 0, "##ing": 1, "world": 2, ".": 3}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="hello"))
    backend.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(backend, special_tokens={}, eos_token_ids=())
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.append([index]) for index in (0, 1, 2, 3)] == ["hello", "ing", " world", "."]
    assert detokenizer.finish() == "" and tokenizer.decode([0, 1, 2, 3]) == "helloing world."
