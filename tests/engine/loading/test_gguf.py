"""The GGUF reader against the `gguf` package: values, tables, dequantization, and what damage is told."""

import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from kvern_engine.loading.gguf import BLOCKS, GGUFError, GGUFFile
from kvern_engine.loading.gguf_blocks import FORMATS
from kvern_engine.loading.parts import WeightPart

F = struct.pack


FULL = os.environ.get("KVERN_TEST_FULL") == "1"


@pytest.fixture(scope="module")
def sample(smollm2_file: GGUFFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small file of the package's own writing; SmolLM2, which the package reads for six seconds, in full runs."""
    if FULL:
        return smollm2_file.path
    path, rng = tmp_path_factory.mktemp("gguf") / "sample.gguf", np.random.default_rng(2)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("håndkvern")
    writer.add_context_length(256)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_add_bos_token(False)
    writer.add_token_list([f"token {index} é" for index in range(300)])
    writer.add_token_scores([float(-index) for index in range(300)])
    writer.add_token_types([1] * 300)
    for name, shape, quant in (
        ("token_embd.weight", (300, 128), "Q8_0"),
        ("output_norm.weight", (128,), "F32"),
        ("blk.0.attn_q.weight", (128, 128), "Q4_1"),
        ("blk.1.ffn_down.weight", (128, 96), "Q4_1"),
    ):
        kind, tensor = gguf.GGMLQuantizationType[quant], rng.standard_normal(shape).astype(np.float32)
        writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def oracle(sample: Path) -> gguf.GGUFReader:
    return gguf.GGUFReader(sample)


def text(value: str) -> bytes:
    return F("<Q", len(value.encode())) + value.encode()


def raw_file(path: Path, values: list[bytes], tensors: list[bytes] = [], version: int = 3, tail: bytes = b"") -> Path:  # noqa: B006
    body = b"GGUF" + F("<IQQ", version, len(tensors), len(values)) + b"".join(values) + b"".join(tensors)
    path.write_bytes(body + tail)
    return path


def test_metadata_and_tensor_table(sample: Path, oracle: gguf.GGUFReader) -> None:
    file = GGUFFile(sample)
    fields = {key: field for key, field in oracle.fields.items() if not key.startswith("GGUF.")}
    assert set(file.metadata) == set(fields)
    for key, field in fields.items():
        own, expected = file.metadata[key], field.contents()
        assert own == expected, key
    assert {name: (info.shape, info.type_name, info.offset, info.nbytes) for name, info in file.tensors.items()} == {
        tensor.name: (
            tuple(map(int, tensor.shape[::-1])),
            tensor.tensor_type.name,
            tensor.data_offset,
            int(tensor.n_bytes),
        )
        for tensor in oracle.tensors
    }


@pytest.mark.parametrize(
    "name", ["token_embd.weight", "output_norm.weight", "blk.0.attn_q.weight", "blk.1.ffn_down.weight"]
)
def test_tensors(sample: Path, oracle: gguf.GGUFReader, name: str) -> None:
    stored = next(tensor for tensor in oracle.tensors if tensor.name == name)
    expected = gguf.quants.dequantize(stored.data, stored.tensor_type)
    own = GGUFFile(sample).dequantize(name)
    assert own.dtype == np.float32 and own.shape == expected.shape
    np.testing.assert_array_equal(own, expected)


# The package dequantizes the others only.
QUANTIZED_HERE = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


@pytest.mark.parametrize("quant", QUANTIZED_HERE)
def test_types_that_the_package_quantizes(write_gguf: Callable[..., Path], quant: str) -> None:
    rng = np.random.default_rng(7)
    # More elements than a chunk, so that the seams are covered; zeros and outliers too.
    weight = (rng.standard_normal((300, 1024)) * rng.choice([0.0, 0.01, 30.0], (300, 1))).astype(np.float32)
    file = GGUFFile(write_gguf({"w.weight": weight}, quant))
    kind = gguf.GGMLQuantizationType[quant]
    expected = weight if quant == "F32" else gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)
    assert file.tensors["w.weight"].type_name == quant
    np.testing.assert_array_equal(file.dequantize("w.weight"), expected)


def random_blocks(quant: str, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """Bytes of a tensor of any type [rows, bytes of a row]: every bit random, but that scales are finite numbers."""
    fmt = FORMATS[quant]
    raw = rng.integers(0, 256, (rows * columns // fmt.block, fmt.dtype.itemsize), dtype=np.uint8)
    items = raw.reshape(-1).view(fmt.dtype)
    for field in fmt.dtype.names or ():
        if fmt.dtype[field] == np.dtype("<f2"):
            items[field] = (rng.standard_normal(len(items)) * rng.choice([0.0, 1e-6, 1.0, 500.0], len(items))).astype(
                "f2"
            )
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("quant", [name for name in FORMATS if FORMATS[name].block > 1])
def test_any_bits_of_any_quantized_type(tmp_path: Path, quant: str) -> None:
    rng = np.random.default_rng(11)
    kind = gguf.GGMLQuantizationType[quant]
    raw = random_blocks(quant, 300, 1024, rng)
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_tensor("w.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "q.gguf")
    assert (file.tensors["w.weight"].type_name, file.tensors["w.weight"].shape) == (quant, (300, 1024))
    expected, own = gguf.quants.dequantize(raw, kind), file.dequantize("w.weight")
    np.testing.assert_array_equal(own.view(np.uint32), expected.view(np.uint32))  # bit for bit
    # A part that begins and ends within blocks of every size is cut from the same numbers.
    part = WeightPart((300, 1024), ((7, 230), (101, 1001)))
    np.testing.assert_array_equal(file.dequantize("w.weight", part), expected[part.slices])


def test_writing_into_a_tensor_leaves_the_file_alone(write_gguf: Callable[..., Path]) -> None:
    path = write_gguf()
    before = path.read_bytes()
    GGUFFile(path).dequantize("output_norm.weight")[:] = 0
    assert path.read_bytes() == before


def test_every_value_type(tmp_path: Path) -> None:
    scalars = {
        0: ("<B", 200), 1: ("<b", -100), 2: ("<H", 60000), 3: ("<h", -30000), 4: ("<I", 4_000_000_000),
        5: ("<i", -2_000_000_000), 6: ("<f", 0.5), 7: ("<?", True), 10: ("<Q", 2**63), 11: ("<q", -(2**62)),
        12: ("<d", 1e300),
    }  # fmt: skip
    values = [text(f"k{kind}") + F("<I", kind) + F(fmt, value) for kind, (fmt, value) in scalars.items()]
    values.append(text("s") + F("<I", 8) + text("håndkvern"))
    values.append(text("a") + F("<IIQ", 9, 5, 3) + F("<3i", -1, 0, 1))
    values.append(text("nested") + F("<IIQ", 9, 9, 2) + F("<IQ", 8, 1) + text("x") + F("<IQ", 4, 2) + F("<2I", 7, 8))
    for version in (2, 3):
        meta = GGUFFile(raw_file(tmp_path / "v.gguf", values, version=version)).metadata
        assert {kind: meta[f"k{kind}"] for kind in scalars} == {kind: value for kind, (_, value) in scalars.items()}
        assert meta["k7"] is True and isinstance(meta["k4"], int) and meta["s"] == "håndkvern"
        assert meta["a"] == [-1, 0, 1]
        assert meta["nested"][0] == ["x"] and meta["nested"][1] == [7, 8]


def test_alignment_is_the_files_own(tmp_path: Path) -> None:
    values = [text("general.alignment") + F("<II", 4, 64)]
    tensor = text("t") + F("<IQIQ", 1, 2, 0, 64)
    header = len(raw_file(tmp_path / "a.gguf", values, [tensor]).read_bytes())
    start = -(-header // 64) * 64 + 64
    path = raw_file(tmp_path / "a.gguf", values, [tensor], tail=bytes(start - header) + F("<2f", 1.5, -2.0))
    assert GGUFFile(path).dequantize("t").tolist() == [1.5, -2.0]


def test_a_vocabulary_of_150_000_opens_fast(write_gguf: Callable[..., Path]) -> None:
    tokens = [f"token-{index}" for index in range(150_000)]
    path = write_gguf({}, **{"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1] * len(tokens)})
    best = float("inf")
    for _ in range(3):  # other processes share the machine: the best of three
        start = time.perf_counter()
        file = GGUFFile(path)
        best = min(best, time.perf_counter() - start)
    assert file.metadata["tokenizer.ggml.tokens"] == tokens
    assert best < 0.5


def error(path: Path) -> str:
    with pytest.raises(GGUFError) as caught:
        GGUFFile(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_what_is_no_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    assert "not a GGUF file: it starts with b'PK\\x03\\x04' instead of b'GGUF'" in error(path)
    path.write_bytes(b"GG")
    assert "not a GGUF file: it has only 2 bytes" in error(path)
    path.write_bytes(b"")
    assert "not a GGUF file: it has only 0 bytes" in error(path)
    assert "its version is 1; versions 2 and 3" in error(raw_file(path, [], version=1))
    path.write_bytes(b"GGUF" + F(">IQQ", 3, 0, 0))
    assert "it is a big-endian file" in error(path)
    with pytest.raises(FileNotFoundError):
        GGUFFile(tmp_path / "absent.gguf")


def test_every_truncation_is_noticed(write_gguf: Callable[..., Path], tmp_path: Path) -> None:
    meta = {"tokenizer.ggml.tokens": ["a", "bc"], "tokenizer.ggml.token_type": [1, 2]}
    whole = write_gguf({"w.weight": np.ones((2, 32), np.float32)}, "Q8_0", **meta).read_bytes()
    path = tmp_path / "cut.gguf"
    data_end = len(whole.rstrip(b"\0"))
    for size in range(8, data_end):
        path.write_bytes(whole[:size])
        assert "truncated GGUF file" in error(path), size
    path.write_bytes(whole[: data_end - 1])
    assert "tensor 'w.weight' ends at byte" in error(path) and "download it again" in error(path)


def test_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    assert "general.name has unknown value type 77" in error(raw_file(path, [text("general.name") + F("<I", 77)]))
    huge = [text("tokens") + F("<IIQ", 9, 8, 2**60)]
    assert "truncated GGUF file: tokens" in error(raw_file(path, huge))
    assert "truncated GGUF file: n" in error(raw_file(path, [text("n") + F("<IIQ", 9, 4, 2**61)]))
    assert "s is not valid UTF-8" in error(raw_file(path, [text("s") + F("<IQ", 8, 2) + b"\xff\xfe"]))
    array = text("tokens") + F("<IIQ", 9, 8, 1) + F("<Q", 2) + b"\xff\xfe"
    assert "entry 0 of tokens is not valid UTF-8: b'\\xff\\xfe'" in error(raw_file(path, [array]))
    assert "'t' has 9 dimensions" in error(raw_file(path, [], [text("t") + F("<I", 9)], tail=bytes(20)))
    ragged = text("t") + F("<IQIQ", 1, 33, 8, 0)
    assert "'t' has rows of 33 elements; Q8_0 needs a multiple of 32" in error(raw_file(path, [], [ragged]))
    zero = [text("general.alignment") + F("<II", 4, 0)]
    assert "general.alignment must be a power of two above 0, got 0" in error(raw_file(path, zero))


def test_unsupported_type_is_named(tmp_path: Path) -> None:
    for type_id, name in ((16, "IQ2_XXS"), (99, "type 99")):
        file = GGUFFile(raw_file(tmp_path / "q.gguf", [], [text("t") + F("<IQIQ", 1, 256, type_id, 0)], tail=bytes(64)))
        with pytest.raises(GGUFError) as caught:
            file.dequantize("t")
        expected = f"tensor 't' is stored as {name}, which is not supported; supported are {', '.join(BLOCKS)}"
        assert expected in str(caught.value)


def test_block_sizes_agree_with_the_formats() -> None:
    assert {name: (f.block, f.dtype.itemsize) for name, f in FORMATS.items()} == BLOCKS


def test_a_header_is_read_without_numpy() -> None:
    """The API server reads a tokenizer from a GGUF file: importing NumPy would cost it a tenth of a second."""
    code = "import sys, kvern_engine.loading.gguf, kvern_engine.server.main; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
