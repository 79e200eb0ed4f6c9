"""Streams of every kind of decoder: any tokens in any chunks give what decoding at once gives, and at once is what the
`tokenizers` library (or, for bytes that are no characters, SentencePiece) says."""

import io
import random

import pytest
import sentencepiece
import tokenizers
from hostile import COUNT
from tokenizers import AddedToken, decoders, models, normalizers

from kvern_engine.detokenizer import IncrementalDetokenizer
from kvern_engine.loading.sentencepiece import build_sentencepiece, read_model_file
from kvern_engine.tokenizer import Tokenizer

PIECES = [
    *("<unk>", "</s>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁", "▁a", "▁the", "ing", "##ing"),
    *("a", "b", "é", "日", "👍", ".", "?", "'", "n't", " do not", "'s", "▁.", "Ġ", "<0xZZ>", "<0x4>", "▁▁▁b▁", "\n"),
    *("<tool> ", " <x>▁", "[CLS]"),
]
ADDED = [AddedToken("</s>", special=True), AddedToken("<s>", special=True), AddedToken("<tool> "), AddedToken(" <x>▁")]
LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
DECODERS = {
    "none": None,
    "llama": decoders.Sequence([*LLAMA, decoders.Strip(" ", 1, 0)]),
    "strip two": decoders.Sequence([*LLAMA, decoders.Strip(" ", 2, 0)]),
    "gemma": decoders.Sequence(LLAMA),
    "no bytes": decoders.Sequence([decoders.Replace("▁", " "), decoders.Replace("a", "aa"), decoders.Fuse()]),
    "bytes alone": decoders.ByteFallback(),
    "metaspace": decoders.Metaspace(),
    "metaspace never": decoders.Metaspace(prepend_scheme="never"),
    "wordpiece": decoders.WordPiece(cleanup=True),
    "wordpiece plain": decoders.WordPiece(prefix="##", cleanup=False),
    "byte level": decoders.ByteLevel(),
    "byte level alone": decoders.Sequence([decoders.ByteLevel()]),
}


def make(decoder: object) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({text: index for index, text in enumerate(PIECES)}, "<unk>"))
    backend.normalizer = normalizers.Sequence([])
    if decoder is not None:
        backend.decoder = decoder
    backend.add_tokens(ADDED)
    return Tokenizer(backend, special_tokens={}, eos_token_ids=())


MADE = {name: make(decoder) for name, decoder in DECODERS.items()}


def byte_ids(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]


def random_ids(rng: random.Random) -> list[int]:
    """Any tokens, whole characters as bytes and parts of them, and often those with rules of their own."""
    ids: list[int] = []
    for _ in range(rng.randint(0, 12)):
        kind = rng.randrange(4)
        if kind == 0:
            ids.append(rng.randrange(len(PIECES) + 4))
        elif kind == 1:
            ids += byte_ids(rng.choice(["é", "日本", "😀", "\x00", "a"]))
        elif kind == 2:
            ids += byte_ids(rng.choice(["é", "日本", "😀"]))[: rng.randint(1, 3)]
        else:
            ids.append(rng.choice([1, 2, *range(259, len(PIECES))]))
    return ids


@pytest.mark.parametrize("name", DECODERS)
def test_any_ids_in_any_chunks(name: str) -> None:
    tokenizer, rng = MADE[name], random.Random(name)
    for _ in range(COUNT):
        ids, skip = random_ids(rng), rng.random() < 0.5
        whole = tokenizer.decode(ids, skip)
        detokenizer, sent, rest = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip), "", ids
        while rest:
            size = rng.randint(1, 4)
            sent += detokenizer.append(rest[:size])
            assert whole.startswith(sent), (ids, skip)  # nothing is taken back
            rest = rest[size:]
        assert sent + detokenizer.finish() == whole, (ids, skip)
        if "\ufffd" not in whole:
            known = [index for index in ids if index < len(PIECES)]
            assert whole == tokenizer.backend.decode(known, skip_special_tokens=skip), (ids, skip)


@pytest.mark.parametrize("name", DECODERS)
def test_any_answer_behind_any_prompt(name: str) -> None:
    """Together they are what decoding both at once gives: only the beginning of a text loses its space."""
    tokenizer, rng = MADE[name], random.Random(name)
    for _ in range(COUNT):
        prompt, answer, skip = random_ids(rng), random_ids(rng), rng.random() < 0.5
        before = tokenizer.decode(prompt, skip)
        if before.endswith("\ufffd"):
            continue  # the answer might go on with a character of the prompt's
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip, before=prompt)
        text = detokenizer.append(answer) + detokenizer.finish()
        assert before + text == tokenizer.decode(prompt + answer, skip), (prompt, answer, skip)


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_every_split_of_bytes_into_characters(name: str) -> None:
    """At each token exactly the characters that are complete are there."""
    tokenizer = MADE[name]
    for text in ("é日😀\u0301a", "\U0010ffff\x7f\x80", "ab"):
        ids, detokenizer, sent = byte_ids(text), IncrementalDetokenizer(tokenizer), ""
        for count in range(1, len(ids) + 1):
            sent += detokenizer.append([ids[count - 1]])
            assert sent == text.encode()[:count].decode("utf-8", "ignore")


def test_broken_bytes_are_what_sentencepiece_makes_of_them() -> None:
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat on the mat", "é 日本 a b c d e f g"] * 20),
        model_writer=trained,
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    reference = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    pieces = read_model_file(trained.getvalue(), "m")
    tokenizer = Tokenizer(build_sentencepiece(pieces, "m"), special_tokens={}, eos_token_ids=())
    first = pieces.texts.index("<0x00>")
    rng = random.Random(3)
    for _ in range(400):
        ids = [
            rng.choice(
                [first + rng.randrange(256), first + rng.randrange(0x80, 0x100), rng.randrange(3, len(pieces.texts))]
            )
            for _ in range(rng.randint(1, 12))
        ]
        if rng.random() < 0.5:
            ids[rng.randrange(len(ids)) :] = [first + byte for byte in "日😀é".encode()[: rng.randint(1, 9)]]
        if ids[0] != first + ord(" "):  # of which the library's decoder takes the dummy prefix off
            assert tokenizer.decode(ids) == reference.decode(ids), ids


def test_decoders_that_are_not_known_go_through_a_window() -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"low</w>": 0, "er": 1, "new</w>": 2}, merges=[]))
    backend.decoder = decoders.BPEDecoder()
    tokenizer = Tokenizer(backend, special_tokens={}, eos_token_ids=())
    detokenizer = IncrementalDetokenizer(tokenizer)
    text = "".join(detokenizer.append([index]) for index in (1, 0, 2)) + detokenizer.finish()
    assert text.split() == tokenizer.decode([1, 0, 2]).split() == ["erlow", "new"]
