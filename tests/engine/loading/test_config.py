"""Model descriptions: exact values of both test models, both spellings of everything, and each error's text."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvern_engine.loading.config import ModelConfigError, read_generation_config, read_model_config
from kvern_engine.loading.resolve import ModelFiles
from kvern_engine.model_config import ModelConfig

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 128,
}


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., ModelFiles]:
    """folder(field=value, ...) -> a model folder; None takes a field out."""

    def make(generation: dict[str, Any] | None = None, **changes: Any) -> ModelFiles:
        config = {key: value for key, value in {**BASE, **changes}.items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(config))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return ModelFiles("m", "folder", tmp_path)

    return make


def test_smollm2(smollm2: ModelFiles) -> None:
    assert read_model_config(smollm2) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_word_embeddings=True,
        dtype="float32",
        bos_token_id=1,
        eos_token_ids=(2,),
    )
    assert read_generation_config(smollm2) == {}


def test_tiny_kjv(tiny_kjv: ModelFiles) -> None:
    assert read_model_config(tiny_kjv) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=384,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        dtype="bfloat16",
        bos_token_id=0,
        eos_token_ids=(0,),
    )
    assert read_generation_config(tiny_kjv) == {}


def test_defaults_of_a_bare_config(folder: Callable[..., ModelFiles]) -> None:
    config = read_model_config(folder())
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps, config.rope_theta) == (8, 32, 1e-6, 10000.0)
    assert (config.dtype, config.tie_word_embeddings, config.eos_token_ids, config.bos_token_id) == (
        "float32",
        False,
        (),
        None,
    )


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 500000, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "llama3", **LLAMA3}},
    ],
)
def test_every_spelling_of_rope(folder: Callable[..., ModelFiles], fields: dict[str, Any]) -> None:
    config = read_model_config(folder(**fields))
    assert config.rope_theta == 500000.0 and config.rope_scaling == {"rope_type": "llama3", **LLAMA3}


def test_a_file_that_names_only_its_type(folder: Callable[..., ModelFiles]) -> None:
    for names in ([], None):
        found = read_model_config(folder(architectures=names, model_type="qwen2"))
        assert found.architecture == "Qwen2ForCausalLM" and found.attention_bias


def test_eos_ids_are_united(folder: Callable[..., ModelFiles]) -> None:
    files = folder(eos_token_id=[7, 8], generation={"eos_token_id": [8, 9]}, torch_dtype="float16", bos_token_id=1)
    config = read_model_config(files)
    assert config.eos_token_ids == (7, 8, 9) and config.dtype == "float16" and config.bos_token_id == 1


def test_generation_defaults(folder: Callable[..., ModelFiles]) -> None:
    files = folder(generation={"temperature": 0.6, "top_p": 0.9, "top_k": 50, "do_sample": True, "min_p": None})
    assert read_generation_config(files) == {"temperature": 0.6, "top_p": 0.9, "top_k": 50}
    with pytest.raises(ModelConfigError, match=r"generation_config.json: top_p must be above 0 and at most 1, got 7"):
        read_generation_config(folder(generation={"top_p": 7}))
    with pytest.raises(ModelConfigError, match=r"generation_config.json: "):
        read_generation_config(folder(generation={"top_p": "high"}))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"architectures": ["BertModel"]}, "'BertModel' is not supported; supported: LlamaForCausalLM, Mist"),
        ({"architectures": ["Qwen3NextForCausalLM"]}, "is not supported (the nearest is Qwen3ForCausalLM); supported"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list of names, got 'LlamaForCausalLM'"),
        ({"architectures": None}, "architecture None is not supported"),
        ({"architectures": [], "model_type": ["llama"]}, "architecture ['llama'] is not supported"),
        ({"eos_token_id": 1000}, "token id 1000 is beyond the vocabulary of 1,000"),
        ({"bos_token_id": 5000}, "token id 5000 is beyond the vocabulary of 1,000"),
        ({"architectures": [], "model_type": "mamba"}, "architecture 'mamba' is not supported"),
        ({"hidden_size": None}, "hidden_size is missing; it must be a whole number above 0"),
        ({"vocab_size": "many"}, "vocab_size must be a whole number above 0, got 'many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number above 0, got 0"),
        ({"num_hidden_layers": -2}, "num_hidden_layers must be a whole number above 0, got -2"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number above 0, got True"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers must be a whole number above 0, got 2.0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be a whole number above 0 and at most 4,096, got 10000"),
        (
            {"vocab_size": 1 << 300},
            "vocab_size must be a whole number above 0 and at most 16,777,216, got a number of 3",
        ),
        ({"hidden_size": 1 << 40}, "hidden_size must be a whole number above 0 and at most 262,144, got 1099511627776"),
        ({"intermediate_size": "512"}, "intermediate_size must be a whole number above 0, got '512'"),
        ({"max_position_embeddings": [128]}, "max_position_embeddings must be a whole number above 0, got [128]"),
        ({"vocab_size": "9" * 1000}, "got '" + "9" * 80 + "'... (1,000 characters)"),
        ({"num_attention_heads": 1 << 20}, "num_attention_heads must be a whole number above 0 and at most 4,096"),
        ({"num_key_value_heads": 3}, "8 attention heads cannot be shared by 3 KV heads"),
        ({"hidden_size": 250}, "head_dim is missing and hidden_size 250 is not a multiple of num_attention_heads 8"),
        ({"head_dim": 33}, "head_dim must be even for rotary embeddings, got 33"),
        ({"hidden_act": "gelu"}, "hidden_act must be one of silu, swish, got 'gelu'"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a number above 0, got -1"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number above 0, got nan"),
        ({"rope_theta": "big"}, "rope_theta must be a number above 0, got 'big'"),
        ({"rope_theta": float("inf")}, "rope_theta must be a number above 0, got inf"),
        ({"rope_theta": 10**400}, "rope_theta must be a number above 0, got a number of"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, got 'no'"),
        ({"bos_token_id": -1}, "bos_token_id must be a token id, got -1"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object, got 'linear'"),
        ({"rope_scaling": {"type": "spiral"}}, "rope_scaling.type must be one of default, linear, dynamic, yarn, "),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing; it must be a number above 0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": -4}}, "rope_scaling.factor must be a number above 0, got -4"),
        ({"rope_scaling": {**LONGROPE, "long_factor": [1.0]}}, "rope_scaling.long_factor must be a list of 16 numbers"),
        (
            {"rope_scaling": {**LONGROPE, "long_factor": [0] * 16}},
            "rope_scaling.long_factor.0 must be a number above 0",
        ),
        ({"rope_scaling": {**LONGROPE, "short_mscale": 1}}, "rope_scaling.short_mscale must be absent: it is not supp"),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1}},
            "must be above low_freq_factor (1",
        ),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor must be above 0 and at most 1, got 1.5"),
        ({"partial_rotary_factor": 0.1}, "an even number of the 32 dimensions of a head must be rotated, got 3"),
        ({"dtype": "int8"}, "dtype must be one of float32, float16, bfloat16, got 'int8'"),
        ({"torch_dtype": "float64"}, "torch_dtype must be one of float32, float16, bfloat16, got 'float64'"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id must be a token id or a list of them, got ['</s>']"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method is 'awq', which is not supported"),
    ],
)
def test_errors_name_field_value_and_rule(
    folder: Callable[..., ModelFiles], changes: dict[str, Any], text: str
) -> None:
    files = folder(**changes)
    with pytest.raises(ModelConfigError) as caught:
        read_model_config(files)
    assert text in str(caught.value) and str(files.path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"{", "not valid JSON: Expecting property name enclosed in double quotes: line 1 column 2"),
        (b'{"vocab_size": 1,\n "hidden_size" 2}', "not valid JSON: Expecting ':' delimiter: line 2 column 16"),
        (b"[]", "expected a JSON object, got list"),
        (b"\xff\xfe{}", "not valid JSON: 'utf-8' codec can't decode byte 0xff"),
        (b"", "not valid JSON: Expecting value: line 1 column 1"),
        (b'{"a":' + b"[" * 200_000, "not valid JSON: nested too deeply"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "not valid JSON: Exceeds the limit (4300 digits)"),
        (b'{"a": "' + b"x" * (16 << 20) + b'"}', "has 16,777,225 bytes; at most 16,777,216 are read of such a file"),
    ],
)
def test_unreadable_files(folder: Callable[..., ModelFiles], content: bytes, text: str) -> None:
    files = folder()
    (files.path / "config.json").write_bytes(content)
    with pytest.raises(ModelConfigError) as caught:
        read_model_config(files)
    assert str(caught.value).startswith(f"{files.path / 'config.json'}: {text}")


def test_files_that_are_none(folder: Callable[..., ModelFiles]) -> None:
    files = folder()
    path = files.path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # a byte order mark, as some editors write it
    assert read_model_config(files).vocab_size == 1000
    path.unlink()
    with pytest.raises(ModelConfigError, match=r"config\.json: no such file"):
        read_model_config(files)
    path.mkdir()
    with pytest.raises(ModelConfigError, match=r"config\.json: cannot be read: Is a directory"):
        read_model_config(files)


def gguf_config(path: Path) -> ModelConfig:
    return read_model_config(ModelFiles("m", "gguf", path))


def test_gguf_defaults_and_end_ids(write_gguf: Callable[..., Path]) -> None:
    config = gguf_config(
        write_gguf(
            llama__attention__head_count_kv=None,
            **{f"tokenizer.ggml.{name}_token_id": index for index, name in enumerate(("bos", "eos", "eot", "eom"), 1)},
        )
    )
    assert (config.num_kv_heads, config.head_dim, config.rope_theta, config.tie_word_embeddings) == (4, 32, 1e4, False)
    assert (config.vocab_size, config.rms_norm_eps, config.bos_token_id) == (320, 1e-6, 1)
    assert config.eos_token_ids == (2, 3, 4)


def llama3_factors(scale: float, head_dim: int = 32, base: float = 10000.0) -> np.ndarray:
    """Divisors of the rotary frequencies, from the wavelengths as Llama 3.1 states its rule."""
    wavelength = 2 * np.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (8192 / wavelength - 1) / (4 - 1)
    between = 1 / ((1 - smooth) / scale + smooth)
    factors = np.where(wavelength < 8192 / 4, 1.0, np.where(wavelength > 8192 / 1, scale, between))
    return factors.astype(np.float32)


def test_gguf_rope_scaling(write_gguf: Callable[..., Path]) -> None:
    embedding = {"token_embd.weight": np.zeros((320, 128), np.float32)}
    factors = llama3_factors(8.0)
    assert 1.0 in factors and 8.0 in factors and len(np.unique(factors)) > 2
    assert gguf_config(write_gguf({**embedding, "rope_freqs.weight": factors})).rope_scaling == {
        "rope_type": "llama3",
        **LLAMA3,
    }
    linear = write_gguf(embedding, llama__rope__scaling__type="linear", llama__rope__scaling__factor=2.0)
    assert gguf_config(linear).rope_scaling == {"rope_type": "linear", "factor": 2.0}
    for old in ("llama__rope__scaling__factor", "llama__rope__scale_linear"):  # as llama.cpp reads old files
        assert gguf_config(write_gguf(embedding, **{old: 4.0})).rope_scaling == {"rope_type": "linear", "factor": 4.0}
        assert gguf_config(write_gguf(embedding, **{old: 1.0})).rope_scaling is None
    none = write_gguf(embedding, llama__rope__scaling__type="none", llama__rope__scaling__factor=4.0)
    assert gguf_config(none).rope_scaling is None
    yarn = {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 4.0}
    assert gguf_config(
        write_gguf(embedding, llama__rope__scaling__original_context_length=64, **yarn)
    ).rope_scaling == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    factors[5] *= 1.5
    with pytest.raises(ModelConfigError, match="frequency factors of an unknown rule"):
        gguf_config(write_gguf({**embedding, "rope_freqs.weight": factors}))
    for odd in (np.inf, np.nan, 0.0, -1.0):
        factors[5] = odd
        with pytest.raises(ModelConfigError, match=r"tensor 'rope_freqs\.weight' must hold finite numbers above 0"):
            gguf_config(write_gguf({**embedding, "rope_freqs.weight": factors}))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"architecture": "mamba"}, "GGUF architecture 'mamba' is not supported; supported: llama, qwen2, qwen3"),
        ({"llama__block_count": None}, "block_count is missing"),
        ({"llama__attention__layer_norm_rms_epsilon": None}, "attention.layer_norm_rms_epsilon is missing"),
        ({"llama__rope__dimension_count": 16, "llama__attention__key_length": 32}, "partial rotary is not supported"),
        ({"llama__expert_count": 8}, "expert_used_count is missing; it must be a whole number above 0"),
        (
            {"llama__expert_count": 4, "llama__expert_used_count": 5},
            "expert_used_count must be a whole number above 0 and at most 4, got 5",
        ),
        (
            {"llama__expert_count": 4, "llama__expert_used_count": 2, "llama__expert_gating_func": 2},
            "expert_gating_func must be absent or 1: others are not supported, got 2",
        ),
        ({"llama__rope__scaling__type": "odd"}, "rope.scaling.type must be none, linear, yarn or longrope, got 'odd'"),
        ({"llama__attention__value_length": 64}, "attention.value_length must be that of keys (32)"),
        ({"tokenizer__ggml__bos_token_id": "x"}, "tokenizer.ggml.bos_token_id must be a token id, got 'x'"),
        ({"tensors": {}}, "tensor 'token_embd.weight' is missing"),
    ],
)
def test_gguf_errors(write_gguf: Callable[..., Path], changes: dict[str, Any], text: str) -> None:
    path = write_gguf(**changes)
    with pytest.raises(ModelConfigError) as caught:
        gguf_config(path)
    assert text in str(caught.value) and str(path) in str(caught.value)
