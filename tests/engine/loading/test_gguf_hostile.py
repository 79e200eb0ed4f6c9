"""GGUF files that lie: the error names file and tensor or key, and no memory is taken for what they claim."""

import errno
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvern_engine.loading.config import ModelConfigError
from kvern_engine.loading.fields import shown
from kvern_engine.loading.gguf import GGUFError, GGUFFile
from kvern_engine.loading.gguf_config import gguf_model_config
from kvern_engine.loading.gguf_names import hf_sources
from kvern_engine.loading.gguf_tokenizer import TokenizerError, build_tokenizer

F = struct.pack
HUGE = 2**62


def text(value: str) -> bytes:
    return F("<Q", len(value.encode())) + value.encode()


def tensor(name: str, *dims: int, type_id: int = 0, offset: int = 0) -> bytes:
    return text(name) + F(f"<I{len(dims)}Q", len(dims), *dims) + F("<IQ", type_id, offset)


def write(
    path: Path,
    values: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    *,
    counts: tuple[int, int] | None = None,
    tail: bytes = b"",
    sparse: int = 0,
) -> Path:
    """`counts` of tensors and values are what the header claims; the file is made `sparse` bytes long."""
    values, tensors = values or [], tensors or []
    claimed = counts or (len(tensors), len(values))
    with path.open("wb") as file:
        file.write(b"GGUF" + F("<IQQ", 3, *claimed) + b"".join(values) + b"".join(tensors) + tail)
        if sparse:
            file.truncate(sparse)
    return path


def refusal(path: Path, most_bytes: int = 1 << 20) -> str:
    """The error of opening the file, which must take no more memory than that."""
    tracemalloc.start()
    try:
        with pytest.raises(GGUFError) as caught:
            GGUFFile(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < most_bytes and str(path) in str(caught.value)
    return str(caught.value)


def test_counts_that_no_file_can_hold(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    assert f"the table of {HUGE:,} tensors ends at byte" in refusal(write(path, counts=(HUGE, 0)))
    assert f"the metadata of {HUGE:,} keys ends at byte" in refusal(write(path, counts=(0, HUGE)))
    assert "a metadata key ends at byte" in refusal(write(path, [F("<Q", HUGE) + bytes(20)]))
    for item_type in range(13):
        array = [text("k") + F("<IIQ", 9, item_type, HUGE) + bytes(50)]
        assert "truncated GGUF file: k ends at byte" in refusal(write(path, array))
    entry = [text("k") + F("<IIQ", 9, 8, 2) + text("a") + F("<Q", HUGE) + bytes(50)]
    assert "truncated GGUF file: entry 1 of k ends at byte" in refusal(write(path, entry))
    big = [tensor("w", 2**40, 2**20)]
    assert "truncated GGUF file: tensor 'w' ends at byte 4,611,686,018,427,38" in refusal(write(path, [], big))
    assert "truncated GGUF file: tensor 'w'" in refusal(write(path, [], [tensor("w", 8, offset=2**63)]))


def test_sparse_files_that_seem_to_hold_it_all(tmp_path: Path) -> None:
    """A terabyte of zeros takes no room on a disk."""
    path, size = tmp_path / "x.gguf", 1 << 40
    assert "the metadata key '' stands twice" in refusal(write(path, counts=(0, 10**6), sparse=size))
    assert "tensor '' stands twice in the table" in refusal(write(path, counts=(10**6, 0), sparse=size))
    many = write(path, counts=(HUGE >> 30, 0), sparse=size)
    assert "a header has at most 536,870,912" in refusal(many)
    strings = [text("k") + F("<IIQ", 9, 8, 2**25)]
    assert "k has 33,554,432 items; all metadata together may have 8,388,608" in refusal(
        write(path, strings, sparse=size)
    )
    long = [text("k") + F("<IQ", 8, 2**39)]
    assert "k ends at byte" in (said := refusal(write(path, long, sparse=size))) and "header has at most" in said
    pieces = [text(f"k{i}") + F("<IIQ", 9, 0, 2**22) for i in range(4)]
    with path.open("wb") as file:  # several arrays that are small enough each
        file.write(b"GGUF" + F("<IQQ", 3, 0, len(pieces)))
        for piece in pieces:
            file.write(piece)
            file.seek(2**22, 1)
        file.truncate(size)
    assert "k2 has 4,194,304 items; all metadata together" in refusal(path, 120 << 20)


def test_a_file_that_cannot_be_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **how: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("mmap.mmap", refuse)
    path = write(tmp_path / "x.gguf", sparse=1 << 30)
    assert "this file of 1,073,741,824 bytes cannot be mapped into memory: [Errno 12] Cannot" in refusal(path)


def test_nested_arrays(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    for depth in (5, 1000):
        nested = text("k") + F("<I", 9) + F("<IQ", 9, 1) * depth + F("<IQ", 4, 1) + F("<I", 7)
        assert "k has arrays more than 4 deep" in refusal(write(path, [nested]))
    wide = text("k") + F("<I", 9) + F("<IQ", 9, HUGE)
    assert "truncated GGUF file: k" in refusal(write(path, [wide]))
    assert "k has unknown value type 13" in refusal(write(path, [text("k") + F("<IIQ", 9, 13, 1) + bytes(20)]))


def test_tables_that_contradict_themselves(tmp_path: Path) -> None:
    path, room = tmp_path / "x.gguf", bytes(4096)
    twice = [text("general.name") + F("<I", 8) + text("a")] * 2
    assert "the metadata key 'general.name' stands twice" in refusal(write(path, twice))
    assert "tensor 'w' stands twice" in refusal(write(path, [], [tensor("w", 8), tensor("w", 8, offset=32)], tail=room))
    said = refusal(write(path, [], [tensor("a", 8, 4), tensor("b", 8, offset=96)], tail=room))
    assert "tensors 'a' (to byte 256) and 'b' (from byte 224) overlap" in said
    said = refusal(write(path, [], [tensor("b", 8, offset=33)], tail=room))
    assert "tensor 'b' lies at offset 33, which is no multiple of the alignment (32)" in said
    said = refusal(write(path, [], [tensor("b", 8, 0, 4)], tail=room))
    assert "tensor 'b' has the shape [4, 0, 8]: no dimension may be 0" in said
    assert "tensor 'b' has rows of 1 elements; Q8_0 needs" in refusal(
        write(path, [], [tensor("b", type_id=8)], tail=room)
    )
    for value, said in (
        (F("<II", 4, 48), "general.alignment must be a power of two above 0, got 48"),
        (F("<I", 8) + text("x"), "general.alignment must be a power of two above 0, got 'x'"),
        (F("<I?", 7, True), "general.alignment must be a power of two above 0, got True"),
    ):
        assert said in refusal(write(path, [text("general.alignment") + value], tail=room))
    for key, value, said in (
        ("split.count", F("<I", 8) + text("x"), "split.count must be a number of files up to 4096, got 'x'"),
        ("split.count", F("<IH", 2, 60000), "split.count must be a number of files up to 4096, got 60000"),
        ("split.no", F("<IH", 2, 3), "split.no must be below split.count (2), got 3"),
    ):
        count = [] if key == "split.count" else [text("split.count") + F("<IH", 2, 2)]
        assert said in refusal(write(path, [*count, text(key) + value], tail=room))


def test_experts_are_not_counted_out_for_ever(tmp_path: Path) -> None:
    values = [text("general.architecture") + F("<I", 8) + text("qwen3moe")]
    name = "blk.0.ffn_up_exps.weight"
    file = GGUFFile(write(tmp_path / "x.gguf", values, [tensor(name, 1, 1, 2**28)], sparse=2**31))
    with pytest.raises(
        GGUFError, match=r"tensor 'blk\.0\.ffn_up_exps\.weight' holds 268,435,456 experts; at most 4096"
    ):
        hf_sources(file)


def test_types_are_refused_before_anything_is_read(write_gguf: Callable[..., Path]) -> None:
    path = write_gguf()
    data = bytearray(path.read_bytes())
    at = data.index(b"blk.1.ffn_up.weight") + len(b"blk.1.ffn_up.weight") + 4 + 16
    assert data[at : at + 4] == F("<I", 0)
    data[at : at + 4] = F("<I", 16)
    path.write_bytes(data)
    with pytest.raises(GGUFError) as caught:
        hf_sources(GGUFFile(path))
    assert str(caught.value).startswith(
        f"{path}: tensor 'blk.1.ffn_up.weight' is stored as IQ2_XXS, which is not supported; supported are F32, F16"
    )


def test_damage_anywhere_is_an_error_of_ours_or_harmless(write_gguf: Callable[..., Path], tmp_path: Path) -> None:
    """Bytes of the header are changed at random: whatever reads it gives a result or one of its own errors."""
    tokens = [*map(chr, range(33, 127)), "ab", "▁"]
    whole = write_gguf(
        {"token_embd.weight": np.ones((320, 128), np.float32), "blk.0.attn_q.weight": np.ones((128, 128), np.float32)},
        "Q8_0",
        **{
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "qwen2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1] * len(tokens),
            "tokenizer.ggml.merges": ["a b"],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.add_bos_token": True,
            "llama.rope.scaling.type": "linear",
            "llama.rope.scaling.factor": 2.0,
        },
    ).read_bytes()
    header = len(whole) - (320 + 128) * 128 // 32 * 34
    rng, refused, path = random.Random(5), 0, tmp_path / "damaged.gguf"
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(rng.choice([1, 1, 1, 3])):
            at = rng.randrange(4, header)
            data[at] = rng.choice([0, 1, 0xFF, 0x7F, data[at] ^ (1 << rng.randrange(8)), rng.randrange(256)])
        path.write_bytes(data)
        try:
            file = GGUFFile(path)
            gguf_model_config(file)
            hf_sources(file)
            build_tokenizer(file).encode("ab c")
        except (GGUFError, ModelConfigError, TokenizerError) as error:
            refused += 1
            assert str(path) in str(error) and len(str(error)) < 2000
    assert refused > 100
    assert shown("x" * 500).endswith("(500 characters)")
