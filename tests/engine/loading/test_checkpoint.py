"""What a checkpoint's headers say, believed only as far as it can be true: hostile, damaged, incomplete and mismatched
safetensors, each with the text that the user reads."""

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvern_engine.loading.checkpoint import (
    ExpectedTensor,
    StoredTensor,
    WeightsError,
    check_weights,
    known_name,
    stored_tensors,
)
from kvern_engine.loading.config import read_model_config
from kvern_engine.loading.resolve import ModelFiles
from kvern_engine.loading.safetensors_files import INDEX, read_header, read_tensors
from kvern_engine.loading.weights import iter_weights
from kvern_engine.model_config import ModelConfig

Entries = dict[str, Any]


def entry(begin: int, end: int, shape: Any = None, dtype: Any = "U8") -> Entries:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def raw_file(path: Path, header: bytes, data: int = 0, length: int | None = None) -> Path:
    path.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + bytes(data))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., Path]:
    """file(header, data=bytes behind it, length=what the file claims) -> path"""

    def make(header: bytes | Entries, data: int = 0, length: int | None = None) -> Path:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return raw_file(tmp_path / "model.safetensors", text, data, length)

    return make


def error_of(call: Callable[[], object]) -> str:
    """The text of the refusal, which must take no memory to speak of."""
    tracemalloc.start()
    try:
        with pytest.raises(WeightsError) as caught:
            call()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20, f"{peak:,} bytes at the peak"
    return str(caught.value)


@pytest.mark.parametrize(
    ("header", "data", "text"),
    [
        (b"{", 0, "not a safetensors file or truncated (9 bytes, 1 bytes of header); download it again"),
        (b"[]", 0, "not a safetensors file or truncated (10 bytes, 2 bytes of header); download it again"),
        (b"{?", 0, "the safetensors header is damaged: JSON is malformed"),
        (b'{"a":' + b"[" * 50_000, 0, "the safetensors header is damaged: "),
        (b'{"a\xff":1}', 0, "the safetensors header is damaged: "),
        ({"a": 5}, 0, "tensor a: the header is damaged: Expected `object`, got `int`"),
        (
            {"a": {"dtype": "U8", "shape": [1]}},
            0,
            "tensor a: the header is damaged: Object missing required field `data",
        ),
        (
            {"a": entry(0, 4, shape=["4"])},
            4,
            "tensor a: the header is damaged: Expected `int`, got `str` - at `$.shape[",
        ),
        ({"a": entry(0, 4, shape=4)}, 4, "tensor a: the header is damaged: Expected `array`, got `int` - at `$.shape`"),
        (
            {"a": {**entry(0, 4), "data_offsets": [0, 4, 8]}},
            4,
            "tensor a: the header is damaged: Expected `array` of len",
        ),
        ({"a": entry(0, 4, shape=[-4])}, 4, "tensor a has an impossible shape: [-4]"),
        (
            {"a": entry(0, 4, shape=[1 << 60, 1 << 60])},
            4,
            "tensor a has an impossible shape: [1152921504606846976, 1152",
        ),
        ({"a": entry(0, 4, shape=[1] * 5000)}, 4, "tensor a has an impossible shape: [1, 1, 1, 1, 1, 1, 1, 1, 1, ...]"),
        ({"a": entry(0, 4, dtype="INT3")}, 4, "tensor a is of the unknown type INT3"),
        ({"a": entry(0, 4, dtype="F32", shape=[2])}, 4, "tensor a has 4 bytes; [2] of F32 takes 8"),
        ({"a": entry(0, 4, dtype="F4", shape=[3])}, 4, "tensor a has 4 bytes; [3] of F4 takes 1"),
        ({"a": entry(4, 0, shape=[4])}, 4, "tensor a has -4 bytes; [4] of U8 takes 4"),
        (
            {"a": entry(0, 4), "b": entry(2, 6)},
            6,
            "tensor b overlaps the tensor before it: it begins at byte 2 of the da",
        ),
        (
            {"a": entry(0, 4), "b": entry(8, 12)},
            12,
            "tensor b leaves a gap before it: it begins at byte 8 of the data in",
        ),
        (
            {"a": entry(0, 4), "b": entry(4, 12)},
            11,
            "truncated: tensor b ends at byte 12 of the data, the file has 11; ",
        ),
        ({"a": entry(0, 1 << 40)}, 4, "truncated: tensor a ends at byte 1,099,511,627,776 of the data, the file has 4"),
        ({"a": entry(0, 4)}, 9, "the tensors end at byte 4 of the data, the file has 9; is it damaged?"),
        ({"x" * 5000: entry(0, 4)}, 9, "the tensors end at byte 4"),
        (
            {"x" * 5000: entry(0, 4, dtype="?")},
            4,
            "tensor " + "x" * 160 + "... (5,000 characters) is of the unknown type",
        ),
        ({"a\n\x1b[2J": entry(0, 4, dtype="?")}, 4, "tensor a??[2J is of the unknown type ?"),
        (b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},' * 2 + b'"b":1}', 4, "header is damaged"),
    ],
)
def test_headers_that_lie(file: Callable[..., Path], header: bytes | Entries, data: int, text: str) -> None:
    path = file(header, data)
    assert error_of(lambda: read_header(path)).startswith(f"{path}: {text}"[:200]) or text == "header is damaged"


def test_a_tensor_that_comes_twice(file: Callable[..., Path]) -> None:
    """JSON readers keep the last of two equal names: the first one's bytes then belong to nobody."""
    one = b'"a":{"dtype":"U8","shape":[4],"data_offsets":[%d,%d]}'
    path = file(b"{" + one % (0, 4) + b"," + one % (4, 8) + b"}", 8)
    assert "tensor a leaves a gap before it: it begins at byte 4 of the data instead of 0" in error_of(
        lambda: read_header(path)
    )


@pytest.mark.parametrize("length", [0, 1, 1 << 20, 99_999_999, 100_000_001, 1 << 40, (1 << 64) - 1])
def test_header_lengths_that_lie(file: Callable[..., Path], length: int) -> None:
    path = file({"a": entry(0, 4)}, 4, length)
    assert f"truncated ({path.stat().st_size:,} bytes, {length:,} bytes of header)" in error_of(
        lambda: read_header(path)
    )


def test_a_header_of_holes(tmp_path: Path) -> None:
    """A sparse file claims as much header as the format allows, and has as many bytes: none of them is read."""
    path = tmp_path / "model.safetensors"
    with path.open("wb") as out:
        out.write((99_999_990).to_bytes(8, "little"))
        out.truncate(99_999_998)
    assert "not a safetensors file or truncated" in error_of(lambda: read_header(path))


def test_a_bomb_of_entries(file: Callable[..., Path]) -> None:
    """More tensors than any model has, each of a few bytes: counted, not parsed."""
    path = file(b'{"a":{},' + b'"b":{},' * 300_000 + b'"c":{}}')
    with pytest.raises(WeightsError) as caught:
        read_header(path)
    assert str(caught.value) == f"{path}: the safetensors header describes more than 250,000 tensors"


def test_what_the_format_allows(file: Callable[..., Path]) -> None:
    """Metadata, spaces at the end, tensors in any order, empty ones, numbers, odd types."""
    header = {
        "__metadata__": {"format": "pt"},
        "b": entry(8, 9, [3], "F4") | {"shape": [2]},
        "a": entry(0, 8, [2, 1, 2], "BF16"),
        "nothing": entry(8, 8, [0, 5], "F32"),
        "number": entry(9, 13, [], "F32"),
    }
    path = file(json.dumps(header).encode() + b"   ", 13)
    found = read_header(path)
    assert found["a"] == StoredTensor(path, (2, 1, 2), "BF16", 8) and found["number"].shape == ()
    assert found.keys() == {"a", "b", "nothing", "number"}


# ---------------------------------------------------------------- folders


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A folder of two shards with an index; tensors a, b and c, d."""
    for number, names in ((1, "ab"), (2, "cd")):
        tensors = {name: torch.zeros(2) for name in names}
        save_file(tensors, tmp_path / f"model-{number:05}-of-00002.safetensors")
    write_index(tmp_path, {name: f"model-{1 + (name > 'b'):05}-of-00002.safetensors" for name in "abcd"})
    return tmp_path


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def index_of(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return found


def test_shards_with_and_without_index(shards: Path) -> None:
    save_file({"stray": torch.zeros(1)}, shards / "consolidated.safetensors")  # not named by the index, not read
    found = read_tensors(shards)
    assert {name: tensor.file.name[6:11] for name, tensor in found.items()} == {
        **dict.fromkeys("ab", "00001"),
        **dict.fromkeys("cd", "00002"),
    }
    (shards / INDEX).unlink()
    (shards / "consolidated.safetensors").unlink()
    assert read_tensors(shards) == found


def test_missing_shards(shards: Path) -> None:
    (shards / "model-00002-of-00002.safetensors").unlink()
    assert error_of(lambda: read_tensors(shards)) == (
        f"{shards}: 1 of 2 shards named by {INDEX} are missing: model-00002-of-00002.safetensors; download the "
        "model again"
    )
    (shards / INDEX).unlink()
    assert error_of(lambda: read_tensors(shards)) == (
        f"{shards}: 1 of 2 shards named by their numbers are missing: model-00002-of-00002.safetensors; download the "
        "model again"
    )


def test_an_index_that_does_not_fit(shards: Path) -> None:
    write_index(shards, {**index_of(shards), "e": "model-00001-of-00002.safetensors"})
    assert error_of(lambda: read_tensors(shards)) == (
        f"{shards}/model-00001-of-00002.safetensors: tensor e is missing, which {INDEX} says is in this file; download "
        "both again"
    )
    write_index(shards, {**index_of(shards), "e": "model-00001-of-00002.safetensors", "a": "x.safetensors"})
    assert "1 of 3 shards named by" in error_of(lambda: read_tensors(shards))
    write_index(
        shards, dict.fromkeys("abc", "model-00001-of-00002.safetensors") | {"d": "model-00002-of-00002.safetensors"}
    )
    assert error_of(lambda: read_tensors(shards)) == (
        f"{shards}: tensor c is in model-00002-of-00002.safetensors; {INDEX} says it is in "
        "model-00001-of-00002.safetensors: download both again"
    )


def test_a_tensor_in_two_shards(shards: Path) -> None:
    save_file({name: torch.zeros(2) for name in "bcd"}, shards / "model-00002-of-00002.safetensors")
    assert error_of(lambda: read_tensors(shards)) == (
        f"{shards}: tensor b is in two files, model-00001-of-00002.safetensors and model-00002-of-00002.safetensors; "
        "delete the file that does not belong to the model"
    )


@pytest.mark.parametrize(
    ("weight_map", "text"),
    [
        (
            {"a": "../other/model.safetensors"},
            "weight_map.a must be a .safetensors file of this folder, got ../other/mod",
        ),
        ({"a": "/etc/passwd"}, "weight_map.a must be a .safetensors file of this folder, got /etc/passwd"),
        ({"a": "sub/../../x.safetensors"}, "must be a .safetensors file of this folder, got sub/../../x.safetensors"),
        ({"a": "pytorch_model.bin"}, "must be a .safetensors file of this folder, got pytorch_model.bin"),
        ({"a": "a\0.safetensors"}, "must be a .safetensors file of this folder, got a?.safetensors"),
        ({"a": 1}, "must be a JSON object whose weight_map names the file of each tensor: Expected `str`, got `int`"),
        ([], "must be a JSON object whose weight_map names the file of each tensor: Expected `object`, got `array`"),
        ({}, "weight_map is empty; download it again"),
    ],
)
def test_an_index_that_names_what_it_must_not(shards: Path, weight_map: Any, text: str) -> None:
    write_index(shards, weight_map)
    found = error_of(lambda: read_tensors(shards))
    assert text in found and found.startswith(f"{shards / INDEX}: ")


def test_an_index_that_is_none(shards: Path) -> None:
    for content in (b"{}", b"[" * 100_000, b"{", b"\xff"):
        (shards / INDEX).write_bytes(content)
        assert "must be a JSON object whose weight_map names" in error_of(lambda: read_tensors(shards))
    with (shards / INDEX).open("wb") as out:
        out.truncate(65 << 20)
    assert "has 68,157,440 bytes; at most 67,108,864 are read of an index" in error_of(lambda: read_tensors(shards))


def test_links_out_of_the_folder_are_the_hubs_way(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    blobs = tmp_path_factory.mktemp("blobs")
    for path in sorted(shards.glob("*.safetensors")):
        os.replace(path, blobs / path.name)  # noqa: PTH105
        path.symlink_to(blobs / path.name)
    assert read_tensors(shards).keys() == set("abcd")


def test_folders_without_safetensors(tmp_path: Path) -> None:
    assert error_of(lambda: read_tensors(tmp_path)) == f"{tmp_path}: no .safetensors file"
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert error_of(lambda: read_tensors(tmp_path)).endswith(
        "; pytorch_model.bin may hold pickled code and are not read: convert them to safetensors"
    )


def test_damage_is_found_before_a_tensor_is_given(tiny_kjv: ModelFiles, tmp_path: Path) -> None:
    content = (tiny_kjv.path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:-10])
    config = read_model_config(tiny_kjv)
    files = ModelFiles("m", "folder", tmp_path)
    assert "truncated: tensor " in error_of(lambda: stored_tensors(files, config))
    with pytest.raises(WeightsError, match="download it again"):
        list(iter_weights(files, config))


# ---------------------------------------------------------------- names and comparison


@pytest.mark.parametrize(
    ("architecture", "name", "known"),
    [
        ("LlamaForCausalLM", "model.layers.0.self_attn.rotary_emb.inv_freq", None),
        ("LlamaForCausalLM", "model.rotary_emb.cos_cached", None),
        ("LlamaForCausalLM", "model.layers.0.self_attn.q_proj.bias", "model.layers.0.self_attn.q_proj.bias"),
        ("LlamaForCausalLM", "lm_head.weight", "lm_head.weight"),
        ("GPT2LMHeadModel", "h.0.attn.bias", None),
        ("GPT2LMHeadModel", "transformer.h.11.attn.masked_bias", None),
        ("GPT2LMHeadModel", "h.0.attn.c_attn.bias", "transformer.h.0.attn.c_attn.bias"),
        ("GPT2LMHeadModel", "wte.weight", "transformer.wte.weight"),
        ("GPT2LMHeadModel", "transformer.ln_f.weight", "transformer.ln_f.weight"),
        ("Gemma3ForCausalLM", "language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("Gemma3ForCausalLM", "model.language_model.norm.weight", "model.norm.weight"),
        ("Gemma3ForCausalLM", "vision_tower.vision_model.head.weight", None),
        ("Gemma3ForCausalLM", "multi_modal_projector.mm_soft_emb_norm.weight", None),
        ("Gemma3ForCausalLM", "model.norm.weight", "model.norm.weight"),
    ],
)
def test_known_names(architecture: str, name: str, known: str | None) -> None:
    assert known_name(name, ModelConfig(architecture, 8, 4, 4, 1, 1, 1, 4, 16)) == known


def test_a_tied_head_is_not_needed() -> None:
    tied = ModelConfig("LlamaForCausalLM", 8, 4, 4, 1, 1, 1, 4, 16, tie_word_embeddings=True)
    assert known_name("lm_head.weight", tied) is None


def test_one_tensor_under_two_names(tmp_path: Path) -> None:
    save_file({"wte.weight": torch.zeros(1), "transformer.wte.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    config = ModelConfig("GPT2LMHeadModel", 8, 4, 4, 1, 1, 1, 4, 16)
    found = error_of(lambda: stored_tensors(ModelFiles("m", "folder", tmp_path), config))
    assert "comes twice, under another name in model.safetensors" in found


def stored(dtype: str, *shape: int, file: str = "model.safetensors") -> StoredTensor:
    return StoredTensor(Path("/m") / file, shape, dtype, 0)


def test_a_comparison_names_file_tensor_found_and_needed() -> None:
    expected = {name: ExpectedTensor(shape) for name, shape in (("a", (2, 3)), ("b", (4,)), ("c.weight", (5,)))}
    fitting = {"a": stored("F16", 2, 3), "b": stored("Q4_K", 4), "c.weight": stored("F64", 5)}
    check_weights(expected, fitting, "/m")
    found = error_of(
        lambda: check_weights(
            expected,
            {"a": stored("F32", 3, 2), "b": stored("I32", 4, file="s.safetensors"), "c.wieght": stored("F32", 5)},
            "/m",
        )
    )
    assert found == (
        "/m: the checkpoint does not fit the model: tensors 1 missing: c.weight (the nearest there is: c.wieght); "
        "1 unexpected: c.wieght in model.safetensors; "
        "1 of the wrong shape: a in model.safetensors is [3, 2], must be [2, 3]; "
        "1 of the wrong type: b in s.safetensors is I32, must be F32, F16 or BF16"
    )


def test_fp8_is_taken_where_it_is_meant_alone() -> None:
    expected = {"a": ExpectedTensor((2,), fp8=True), "b": ExpectedTensor((2,))}
    check_weights(expected, {"a": stored("F8_E4M3", 2), "b": stored("BF16", 2)}, "/m")
    found = error_of(lambda: check_weights(expected, {"a": stored("BF16", 2), "b": stored("F8_E4M3", 2)}, "/m"))
    assert "2 of the wrong type: a in model.safetensors is BF16, must be F8_E4M3, b in model.safetensors is F8" in found


def test_thousands_of_differences_are_counted() -> None:
    expected = {f"model.layers.{index}.w": ExpectedTensor((1,)) for index in range(2000)}
    found = error_of(lambda: check_weights(expected, {}, "/m"))
    assert found.endswith("2,000 missing: " + ", ".join(f"model.layers.{i}.w" for i in range(4)) + " and 1,996 more")


def test_the_tensors_of_a_real_file(tiny_kjv: ModelFiles) -> None:
    expected = load_file(tiny_kjv.path / "model.safetensors")
    found = stored_tensors(tiny_kjv, read_model_config(tiny_kjv))
    assert found.keys() == expected.keys() - {"lm_head.weight"}
    for name, tensor in found.items():
        assert tensor.shape == tuple(expected[name].shape) and tensor.dtype == "BF16"
        assert tensor.nbytes == 2 * expected[name].numel() and tensor.file.name == "model.safetensors"
