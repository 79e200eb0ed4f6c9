"""Whatever bytes and values stand in a model's files: they are read, or refused in words; nothing else is raised, and
what is accepted makes sense."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvern_engine.inspection.sizes import kv_bytes_per_token, parameters
from kvern_engine.loading.config import ModelConfigError, read_generation_config, read_model_config
from kvern_engine.loading.families import MOST, READERS
from kvern_engine.loading.resolve import ModelFiles
from kvern_engine.loading.safetensors_files import INDEX, WeightsError, read_header, read_tensors

EXAMPLES = 3000 if os.environ.get("KVERN_TEST_FULL") == "1" else 60
relaxed = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

FIELDS: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "original_max_position_embeddings": 128,
    "rope_theta": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "rms_norm_eps": 1e-6,
    "sliding_window": 32,
    "use_sliding_window": True,
    "max_window_layers": 2,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "mlp_only_layers": [0],
    "decoder_sparse_step": 1,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "eos_token_id": [2],
    "bos_token_id": 1,
    "torch_dtype": "bfloat16",
    "query_pre_attn_scalar": 16,
    "attn_logit_softcapping": 50.0,
    "sliding_window_pattern": 2,
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 512,
    "quantization_config": None,
    "auto_map": {"AutoConfig": "configuration_x.X"},
    "text_config": {},
}
NUMBERS = st.one_of(
    st.integers(-3, 9), st.integers(), st.floats(), st.sampled_from([0, -1, 1 << 31, 1 << 63, 1 << 64, 10**30, 0.5])
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=6), st.sampled_from(["linear", "yarn", "longrope"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.one_of(st.text(max_size=4), st.sampled_from(["type", "rope_type", "factor"])), inner, max_size=4
        ),
    ),
    max_leaves=6,
)


@pytest.fixture
def folder(tmp_path: Path) -> ModelFiles:
    return ModelFiles("m", "folder", tmp_path)


@relaxed
@given(
    architecture=st.sampled_from([*READERS, "Gemma3ForConditionalGeneration"]),
    changes=st.dictionaries(st.sampled_from([*FIELDS, "rope_parameters", "layer_types"]), VALUES, max_size=3),
)
def test_any_value_in_any_field_of_a_config(folder: ModelFiles, architecture: str, changes: dict[str, Any]) -> None:
    content = {"architectures": [architecture], **FIELDS, **changes}
    (folder.path / "config.json").write_text(json.dumps(content))
    try:
        config = read_model_config(folder)
    except ModelConfigError as error:
        assert str(folder.path) in str(error) and len(str(error)) < 2000
        return
    assert config.num_layers <= MOST["num_hidden_layers"] and config.num_heads % config.num_kv_heads == 0
    assert config.max_position_embeddings <= MOST["max_position_embeddings"]
    assert parameters(config) > 0 and kv_bytes_per_token(config, 2) > 0
    assert all(0 <= token < config.vocab_size for token in config.eos_token_ids)
    assert len(config.sliding_layers) in (0, config.num_layers)


@relaxed
@given(st.dictionaries(st.sampled_from(["temperature", "top_p", "top_k", "min_p", "repetition_penalty"]), VALUES))
def test_any_value_in_a_generation_config(folder: ModelFiles, content: dict[str, Any]) -> None:
    (folder.path / "generation_config.json").write_text(json.dumps(content))
    try:
        assert read_generation_config(folder).keys() <= content.keys()
    except ModelConfigError as error:
        assert "generation_config.json: " in str(error)


@relaxed
@given(st.binary(max_size=40))
def test_any_bytes_as_a_config(folder: ModelFiles, content: bytes) -> None:
    (folder.path / "config.json").write_bytes(content)
    with pytest.raises(ModelConfigError):
        read_model_config(folder)


HEADER = json.dumps(
    {
        "__metadata__": {"format": "pt"},
        "model.norm.weight": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]},
        "lm_head.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [8, 24]},
    }
).encode()


@relaxed
@given(
    st.lists(st.tuples(st.integers(0, 8 + len(HEADER) + 23), st.integers(0, 255)), max_size=6),
    st.integers(0, 8 + len(HEADER) + 24),
)
def test_any_damage_to_a_safetensors_file(
    tmp_path_factory: pytest.TempPathFactory, damage: list[tuple[int, int]], cut: int
) -> None:
    content = bytearray(len(HEADER).to_bytes(8, "little") + HEADER + bytes(24))
    for place, byte in damage:
        content[place] = byte
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    for data in (bytes(content), bytes(content[:cut])):
        path.write_bytes(data)
        try:
            found = read_header(path)
        except WeightsError as error:
            assert str(path) in str(error) and len(str(error)) < 1500
        else:
            assert sum(tensor.nbytes for tensor in found.values()) <= 24


@relaxed
@given(st.one_of(VALUES, st.dictionaries(st.text(max_size=5), VALUES, max_size=3)))
def test_any_value_as_an_index(folder: ModelFiles, weight_map: Any) -> None:
    (folder.path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(WeightsError):
        read_tensors(folder.path)
