"""Tensors under their Hugging Face names: values against transformers' and the gguf package's own readers."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvern_engine.loading.config import read_model_config
from kvern_engine.loading.gguf import GGUFFile
from kvern_engine.loading.parts import WeightPart
from kvern_engine.loading.resolve import ModelFiles
from kvern_engine.loading.weights import iter_weights, weight_shapes


def test_tiny_kjv_equals_the_file(tiny_kjv: ModelFiles) -> None:
    config = read_model_config(tiny_kjv)
    expected = load_file(tiny_kjv.path / "model.safetensors")
    own = dict(iter_weights(tiny_kjv, config))
    assert set(own) == set(expected) - {"lm_head.weight"}
    for name, tensor in own.items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, expected[name]), name
    assert weight_shapes(tiny_kjv, config) == {name: tuple(tensor.shape) for name, tensor in own.items()}


def test_smollm2_is_complete(smollm2: ModelFiles, smollm2_file: GGUFFile) -> None:
    config = read_model_config(smollm2)
    shapes = weight_shapes(smollm2, config)
    assert len(shapes) == 272 and shapes["model.embed_tokens.weight"] == (49152, 576)
    assert "lm_head.weight" not in shapes and shapes["model.layers.29.self_attn.k_proj.weight"] == (192, 576)
    total = 0
    for name, tensor in iter_weights(smollm2, config):
        assert tuple(tensor.shape) == shapes.pop(name) and tensor.dtype == torch.float32
        total += tensor.numel()
    assert not shapes and total == 134_515_008


def test_smollm2_rotary_rows(smollm2: ModelFiles, smollm2_file: GGUFFile) -> None:
    """Row by row: rotary pair i of a head is rows (2i, 2i+1) in the file and (i, i + 32) in the result."""
    wanted = {
        "model.layers.3.self_attn.q_proj.weight": ("blk.3.attn_q.weight", 9),
        "model.layers.3.self_attn.k_proj.weight": ("blk.3.attn_k.weight", 3),
    }
    found = {name: tensor for name, tensor in iter_weights(smollm2, read_model_config(smollm2)) if name in wanted}
    for name, (own, heads) in wanted.items():
        stored = smollm2_file.dequantize(own)
        for head in range(heads):
            for pair in range(32):
                for half in range(2):
                    row = found[name][head * 64 + half * 32 + pair].numpy()
                    np.testing.assert_array_equal(row, stored[head * 64 + 2 * pair + half])
    value = "model.layers.3.self_attn.v_proj.weight"
    stored_value = smollm2_file.dequantize("blk.3.attn_v.weight")
    tensor = next(tensor for name, tensor in iter_weights(smollm2, read_model_config(smollm2)) if name == value)
    np.testing.assert_array_equal(tensor.numpy(), stored_value)


@pytest.mark.parametrize("quant", ["F32", "Q4_1"])
def test_gguf_equals_transformers_loader(write_gguf: Callable[..., Path], quant: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = write_gguf(quant=quant)
    files = ModelFiles("tiny", "gguf", path)
    config = read_model_config(files)
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_kv_heads,
            )
        )
    expected = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    own = dict(iter_weights(files, config))
    assert set(own) == set(expected) == set(model.state_dict())
    for name, tensor in own.items():
        assert torch.equal(tensor, expected[name]), name
    assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == weight_shapes(files, config)


def test_gguf_names_and_biases(write_gguf: Callable[..., Path]) -> None:
    bias = np.arange(128, dtype=np.float32)
    tensors = {
        "token_embd.weight": np.zeros((320, 128), np.float32),
        "blk.0.attn_q.bias": bias,
        "blk.0.attn_odd.weight": bias,
        "rope_freqs.weight": np.ones(16, np.float32),
    }
    files = ModelFiles("m", "gguf", write_gguf(tensors))
    config = read_model_config(files)
    assert config.attention_bias and config.tie_word_embeddings
    own = dict(iter_weights(files, config))
    assert set(own) == {"model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.bias", "blk.0.attn_odd.weight"}
    head = own["model.layers.0.self_attn.q_proj.bias"][:32].tolist()
    assert head == [*range(0, 32, 2), *range(1, 32, 2)]


@pytest.fixture
def sharded(tiny_kjv: ModelFiles, tmp_path: Path) -> ModelFiles:
    (tmp_path / "config.json").write_bytes((tiny_kjv.path / "config.json").read_bytes())
    tensors = load_file(tiny_kjv.path / "model.safetensors")
    weight_map = {}
    for index, name in enumerate(sorted(tensors)):
        weight_map[name] = f"model-{index % 2 + 1:05}-of-00002.safetensors"
    for shard in set(weight_map.values()):
        save_file({name: tensors[name] for name, place in weight_map.items() if place == shard}, tmp_path / shard)
    # What is not named by the index is not read.
    save_file({"stray.weight": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return ModelFiles("sharded", "folder", tmp_path)


def test_shards_make_one_checkpoint(sharded: ModelFiles, tiny_kjv: ModelFiles) -> None:
    config = read_model_config(sharded)
    assert weight_shapes(sharded, config) == weight_shapes(tiny_kjv, config)
    whole = dict(iter_weights(tiny_kjv, config))
    parts = dict(iter_weights(sharded, config))
    assert set(parts) == set(whole) and all(torch.equal(parts[name], whole[name]) for name in whole)


def test_a_tied_head_and_old_constants_are_left_out(tiny_kjv: ModelFiles, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_kjv.path / "config.json").read_bytes())
    extra = {"lm_head.weight": torch.zeros(2), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    save_file({"model.norm.weight": torch.ones(128), **extra}, tmp_path / "model.safetensors")
    files = ModelFiles("m", "folder", tmp_path)
    config = read_model_config(files)
    assert config.tie_word_embeddings
    assert [name for name, _ in iter_weights(files, config)] == ["model.norm.weight"]
    assert weight_shapes(files, config) == {"model.norm.weight": (128,)}


@pytest.mark.parametrize("quant", ["F32", "BF16", "Q5_1"])
def test_parts_of_a_gguf_file_are_cut_from_the_whole(write_gguf: Callable[..., Path], quant: str) -> None:
    """Rows of whole heads, columns that begin and end within quantization blocks."""
    files = ModelFiles("m", "gguf", write_gguf(quant=quant))
    config = read_model_config(files)
    whole = dict(iter_weights(files, config))
    parts = {
        "model.embed_tokens.weight": WeightPart((320, 128), ((17, 200), (0, 128))),
        "model.layers.0.self_attn.q_proj.weight": WeightPart((128, 128), ((32, 96), (0, 128))),
        "model.layers.1.self_attn.k_proj.weight": WeightPart((64, 128), ((32, 64), (0, 128))),
        "model.layers.1.self_attn.o_proj.weight": WeightPart((128, 128), ((0, 128), (40, 101))),
        "model.layers.0.mlp.down_proj.weight": WeightPart((128, 96), ((5, 9), (1, 2))),
        "model.norm.weight": WeightPart.whole(128),
    }
    found = dict(iter_weights(files, config, parts))
    assert found.keys() == parts.keys()
    for name, part in parts.items():
        assert tuple(found[name].shape) == part.part_shape
        assert torch.equal(found[name], whole[name][part.slices]), name


def test_parts_of_safetensors_stay_mapped(tiny_kjv: ModelFiles) -> None:
    config = read_model_config(tiny_kjv)
    whole = dict(iter_weights(tiny_kjv, config))
    name = "model.layers.0.mlp.down_proj.weight"
    part = WeightPart((128, 384), ((0, 128), (96, 192)))
    ((found_name, found),) = iter_weights(tiny_kjv, config, {name: part})
    assert found_name == name and torch.equal(found, whole[name][:, 96:192])
    assert found.stride() == (384, 1), "a view, not a copy of the columns"
