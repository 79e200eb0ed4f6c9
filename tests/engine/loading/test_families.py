"""Every family's config.json: as transformers writes it today, and as well-known models have had it for years."""

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvern_engine.loading.config import ModelConfigError, read_model_config
from kvern_engine.loading.families import READERS, TEXT_PARTS
from kvern_engine.loading.remote_code import remote_code, remote_code_note
from kvern_engine.loading.resolve import ModelFiles
from kvern_engine.model_config import Experts, ModelConfig

Write = Callable[[dict[str, Any]], ModelFiles]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def make(content: dict[str, Any]) -> ModelFiles:
        (tmp_path / "config.json").write_text(json.dumps(content))
        return ModelFiles("m", "folder", tmp_path)

    return make


SHAPES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
COMMON = ModelConfig("?", 1000, 64, 96, 4, 4, 2, 16, 512, rms_norm_eps=1e-6, eos_token_ids=(2,), bos_token_id=1)
SLIDING = (False, False, True, True)
GEMMA = replace(
    COMMON,
    hidden_act="gelu_tanh",
    tie_word_embeddings=True,
    embedding_scale=8.0,
    attention_scale=24**-0.5,
    sliding_window=32,
)

# Class of transformers' configuration, its arguments beside SHAPES, what comes out.
WRITTEN: dict[str, tuple[str, dict[str, Any], ModelConfig]] = {
    "LlamaForCausalLM": (
        "LlamaConfig",
        {"attention_bias": True, "mlp_bias": True, "rope_theta": 5e5},
        replace(COMMON, rope_theta=5e5, attention_bias=True, attention_out_bias=True, mlp_bias=True),
    ),
    "MistralForCausalLM": ("MistralConfig", {"sliding_window": 64}, replace(COMMON, sliding_window=64)),
    "MixtralForCausalLM": (
        "MixtralConfig",
        {"num_local_experts": 4, "rms_norm_eps": 1e-6, "rope_theta": 1e6},
        replace(COMMON, rope_theta=1e6, experts=Experts(4, 2, 96)),
    ),
    "Qwen2ForCausalLM": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2, "head_dim": None},
        replace(COMMON, attention_bias=True, sliding_window=32, sliding_layers=SLIDING),
    ),
    "Qwen3ForCausalLM": ("Qwen3Config", {"sliding_window": 32}, replace(COMMON, qk_norm=True)),
    "Qwen3MoeForCausalLM": (
        "Qwen3MoeConfig",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [2],
            "decoder_sparse_step": 2,
            "norm_topk_prob": True,
        },
        replace(COMMON, qk_norm=True, experts=Experts(8, 3, 24, True, (0, 2))),
    ),
    "Gemma2ForCausalLM": (
        "Gemma2Config",
        {"sliding_window": 32, "query_pre_attn_scalar": 24},
        replace(GEMMA, sliding_layers=(True, False) * 2, attention_softcap=50.0, logit_softcap=30.0),
    ),
    "Gemma3ForCausalLM": (
        "Gemma3TextConfig",
        {
            "sliding_window": 32,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
            },
        },
        replace(
            GEMMA,
            sliding_layers=(True, True, True, False),
            qk_norm=True,
            rope_theta=2e6,
            rope_scaling={"rope_type": "linear", "factor": 8.0},
            local_rope_theta=3e4,
        ),
    ),
    "Phi3ForCausalLM": (
        "Phi3Config",
        {
            "sliding_window": 64,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 128,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.5] * 6},
            "head_dim": None,
            "rms_norm_eps": 1e-6,
        },
        replace(
            COMMON,
            sliding_window=64,
            rotary_dim=12,
            rope_scaling={
                "rope_type": "longrope",
                "short_factor": [1.0] * 6,
                "long_factor": [2.5] * 6,
                "original_max_position_embeddings": 128,
                "factor": 4.0,
            },
        ),
    ),
    "GPT2LMHeadModel": (
        "GPT2Config",
        {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512, "activation_function": "gelu"},
        replace(
            COMMON,
            intermediate_size=256,
            num_kv_heads=4,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            attention_bias=True,
            attention_out_bias=True,
            mlp_bias=True,
            hidden_act="gelu",
        ),
    ),
}


def test_every_family_has_a_case() -> None:
    assert WRITTEN.keys() == READERS.keys()


@pytest.mark.parametrize("architecture", WRITTEN)
def test_each_family(architecture: str, tmp_path: Path) -> None:
    """KVERN_TEST_FULL=1: as transformers' classes write it, too (eleven seconds to import; the tests of models read
    such files anyhow)."""
    name, arguments, expected = WRITTEN[architecture]
    given = {} if architecture == "GPT2LMHeadModel" else SHAPES
    given = {key: value for key, value in {**given, **arguments}.items() if value is not None}
    given |= {"vocab_size": 1000, "eos_token_id": 2, "bos_token_id": 1, "architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(given))
    files = ModelFiles("m", "folder", tmp_path)
    assert read_model_config(files) == replace(expected, architecture=architecture)
    if os.environ.get("KVERN_TEST_FULL") == "1":
        import transformers

        getattr(transformers, name)(**given).save_pretrained(tmp_path)
        assert read_model_config(files) == replace(expected, architecture=architecture)


def test_qwen2_5_with_yarn(write: Write) -> None:
    content = {
        "architectures": ["Qwen2ForCausalLM"],
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_act": "silu",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 32768,
        "max_window_layers": 28,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 152064,
    }
    found = read_model_config(write(content))
    assert found == ModelConfig(
        "Qwen2ForCausalLM", 152064, 3584, 18944, 28, 28, 4, 128, 32768,
        rms_norm_eps=1e-6, rope_theta=1e6, attention_bias=True, dtype="bfloat16", bos_token_id=151643,
        eos_token_ids=(151645,),
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    )  # fmt: skip


def test_gemma_3_of_text_and_images(write: Write) -> None:
    """Its file leaves out whatever is as in transformers' class, and most of the rest stands in text_config."""
    content = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152},
    }
    found = read_model_config(write(content))
    assert found.architecture == TEXT_PARTS["Gemma3ForConditionalGeneration"] == "Gemma3ForCausalLM"
    assert (found.vocab_size, found.hidden_size, found.num_layers) == (262_208, 2560, 34)
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (8, 4, 256)
    assert (found.rope_theta, found.local_rope_theta, found.sliding_window) == (1e6, 1e4, 1024)
    assert found.rope_scaling == {"rope_type": "linear", "factor": 8.0} and found.dtype == "bfloat16"
    assert [layer for layer, slides in enumerate(found.sliding_layers) if not slides] == [5, 11, 17, 23, 29]
    assert found.eos_token_ids == (1, 106) and found.tie_word_embeddings
    assert found.attention_scale == 1 / 16 and found.embedding_scale == math.sqrt(2560)
    content["text_config"]["hidden_size"] = "2560"  # type: ignore[index]
    with pytest.raises(ModelConfigError, match=r"text_config\.hidden_size must be a whole number above 0, got '2560'"):
        read_model_config(write(content))


def test_phi_3_mini_128k_and_4k(write: Write) -> None:
    factors = [1.0 + index / 48 for index in range(48)]
    content = {
        "architectures": ["Phi3ForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM", "AutoConfig": "configuration_phi3.X"},
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {"long_factor": factors, "short_factor": factors, "type": "su"},
        "sliding_window": 262144,
        "vocab_size": 32064,
    }
    found = read_model_config(write(content))
    assert found.rope_scaling is not None and found.rope_scaling["rope_type"] == "longrope"
    assert found.rope_scaling["factor"] == 32.0 and found.rope_scaling["original_max_position_embeddings"] == 4096
    assert found.sliding_window is None, "no sequence fills a window that is longer than the model's own length"
    short = {**content, "max_position_embeddings": 4096, "rope_scaling": None, "sliding_window": 2047}
    assert read_model_config(write(short)).window_of_all == 2047


def base(architecture: str, **changes: Any) -> dict[str, Any]:
    content = {"architectures": [architecture], **SHAPES, **changes}
    return {key: value for key, value in content.items() if value is not None}


def test_windows(write: Write) -> None:
    def windows(architecture: str, **changes: Any) -> list[int | None]:
        found = read_model_config(write(base(architecture, **changes)))
        return [found.window(layer) for layer in range(4)]

    assert windows("MistralForCausalLM", sliding_window=None) == [None] * 4
    assert windows("MistralForCausalLM", sliding_window=64) == [64] * 4
    assert windows("MistralForCausalLM", sliding_window=512) == [None] * 4
    assert windows("Qwen2ForCausalLM", sliding_window=64) == [None] * 4
    on = {"use_sliding_window": True, "sliding_window": 64}
    assert windows("Qwen2ForCausalLM", **on, max_window_layers=4) == [None] * 4
    assert windows("Qwen2ForCausalLM", **on, max_window_layers=0) == [64] * 4
    assert windows("Qwen2ForCausalLM", **on, max_window_layers=3) == [None, None, None, 64]
    types = ["full_attention", "sliding_attention"] * 2
    assert windows("Qwen3ForCausalLM", **on, layer_types=types) == [None, 64, None, 64]
    assert windows("Gemma2ForCausalLM", sliding_window=64) == [64, None, 64, None]
    assert windows("Gemma3ForCausalLM", sliding_window=64, sliding_window_pattern=3) == [64, 64, None, 64]


def test_a_null_softcap_is_none(write: Write) -> None:
    content = base("Gemma2ForCausalLM", sliding_window=None)
    found = read_model_config(write({**content, "attn_logit_softcapping": None, "final_logit_softcapping": None}))
    assert found.attention_softcap is None and found.logit_softcap is None
    found = read_model_config(write(content))
    assert (found.attention_softcap, found.logit_softcap) == (50.0, 30.0)


MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (
            base("Qwen3MoeForCausalLM", **{**MOE, "num_experts_per_tok": 9}),
            "num_experts_per_tok must be a whole number ",
        ),
        (
            base("Qwen3MoeForCausalLM", **{**MOE, "num_experts": 10**6}),
            "num_experts must be a whole number above 0 and",
        ),
        (
            base("Qwen3MoeForCausalLM", **MOE, mlp_only_layers=[7]),
            "mlp_only_layers must be a list of layers from 0 to 3",
        ),
        (base("MixtralForCausalLM"), "num_local_experts is missing; it must be a whole number above 0"),
        (base("Qwen3ForCausalLM", use_sliding_window=True, sliding_window=8, layer_types=["x"]), "a list of 4 types"),
        (
            base("Qwen3ForCausalLM", use_sliding_window=True, sliding_window=8, layer_types=[[]] * 4),
            "list of sliding_a",
        ),
        (base("Gemma3ForCausalLM", use_bidirectional_attention=True), "must be false: it is an embedding model"),
        (base("MistralForCausalLM", sliding_window=-5), "sliding_window must be a whole number above 0, got -5"),
        (
            base("Gemma2ForCausalLM", hidden_activation="silu"),
            "hidden_activation must be one of gelu, gelu_pytorch_tanh",
        ),
        ({"architectures": ["GPT2LMHeadModel"], "n_embd": 65, "n_head": 4}, "n_embd must be a multiple of n_head (4)"),
        (
            {"architectures": ["GPT2LMHeadModel"], "scale_attn_weights": False},
            "scale_attn_weights must be true, got Fa",
        ),
        ({"architectures": ["GPT2LMHeadModel"], "add_cross_attention": True}, "add_cross_attention must be false"),
    ],
)
def test_errors_name_field_and_rule(write: Write, content: dict[str, Any], text: str) -> None:
    files = write(content)
    with pytest.raises(ModelConfigError) as caught:
        read_model_config(files)
    assert text in str(caught.value) and str(caught.value).startswith(f"{files.path / 'config.json'}: ")


def test_code_that_a_folder_brings(write: Write) -> None:
    """It is named, never run; an architecture that Kvern has works all the same."""
    auto_map = {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.XForCausalLM"}
    files = write({**base("LlamaForCausalLM"), "auto_map": auto_map})
    (files.path / "modeling_x.py").write_text("raise SystemExit('run!')")
    assert read_model_config(files).architecture == "LlamaForCausalLM"
    assert remote_code_note(files, trusted=False) == (
        "the model brings code, modeling_x.py (class XForCausalLM), which is not run: Kvern computes it with its own "
        "implementation of the architecture"
    )
    assert remote_code_note(files, trusted=True) == (
        "trust_remote_code has no effect: elsewhere it would run modeling_x.py (class XForCausalLM) of the model; "
        "Kvern never runs code of a model, and computes this one with its own implementation of the architecture"
    )
    unknown = write({"architectures": ["XForCausalLM"], "auto_map": auto_map})
    with pytest.raises(ModelConfigError) as caught:
        read_model_config(unknown)
    assert str(caught.value).endswith(
        "; trust_remote_code would run modeling_x.py (class XForCausalLM) of the folder, and Kvern never runs code of "
        "a model"
    )
    assert remote_code_note(write(base("LlamaForCausalLM")), trusted=True) is None


@pytest.mark.parametrize(
    ("auto_map", "text"),
    [
        (
            {"AutoModelForCausalLM": "org/repo--modeling_y.Y"},
            "modeling_y.py (class Y) of org/repo, a repository of the",
        ),
        (
            {"AutoTokenizer": [None, "tokenization_y.Fast"]},
            "tokenization_y.py (class Fast) of the folder, which lacks it",
        ),
        ({"AutoModel": "m" * 500 + ".C"}, "run " + "m" * 120 + " (class C) of the folder, which lacks it"),
    ],
)
def test_how_code_is_named(auto_map: dict[str, Any], text: str, tmp_path: Path) -> None:
    code = remote_code({"auto_map": auto_map}, tmp_path)
    assert code is not None and text in code.would_run()


@pytest.mark.parametrize("auto_map", [None, {}, "modeling.X", {"AutoModel": None}, {"AutoModel": [1, {}]}])
def test_no_code(auto_map: Any, tmp_path: Path) -> None:
    assert remote_code({"auto_map": auto_map}, tmp_path) is None
