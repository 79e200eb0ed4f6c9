"""What a `quantization_config` says: the FP8 layouts that are read, and the text of every refusal."""

from pathlib import Path
from typing import Any

import pytest

from kvern_engine.loading.quantized import QuantizationError, canonical_name, canonical_shape, read_quantization
from kvern_engine.model_config import Fp8Checkpoint

PATH = Path("config.json")


def group(**changes: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, **changes}
    return {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear"], "weights": weights}}}


def read(quantization: Any) -> Fp8Checkpoint | None:
    return read_quantization({"quantization_config": quantization}, PATH)


def test_what_is_read() -> None:
    assert read_quantization({}, PATH) is None and read(None) is None
    assert read({**group(), "ignore": ["lm_head"]}) == Fp8Checkpoint(per_channel=True)
    assert read(group(strategy="tensor")) == Fp8Checkpoint(head=True)
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    assert read({**group(), "ignore": ["re:.*lm_head"], "kv_cache_scheme": scheme}) == Fp8Checkpoint(
        per_channel=True, kv_scales=True
    )
    native = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    assert read(native) == Fp8Checkpoint()
    assert read({**native, "kv_cache_scheme": "static"}) == Fp8Checkpoint(kv_scales=True)


@pytest.mark.parametrize(
    ("quantization", "text"),
    [
        ({"quant_method": "awq"}, "quantization_config.quant_method is 'awq', which is not supported; use the unquant"),
        ({}, "quantization_config.quant_method is 'unknown'"),
        ("fp8", "quantization_config must be an object, got 'fp8'"),
        ({**group(), "format": "pack-quantized"}, "format is 'pack-quantized', which is not supported; supported: 'fl"),
        ({**group(), "config_groups": {}}, "config_groups must hold one group for all linear layers, got 0"),
        (group(num_bits=4), "config_groups.g.weights.num_bits must be 8, got 4"),
        (group(type="int"), "config_groups.g.weights.type must be 'float', got 'int'"),
        (group(strategy="block"), "weights.strategy is 'block', which is not supported; supported: 'tensor', 'chan"),
        ({**group(), "ignore": ["lm_head", "re:.*down"]}, "ignore names 're:.*down': decoder layers that stay"),
        ({**group(), "kv_cache_scheme": {"num_bits": 4}}, "kv_cache_scheme.num_bits must be 8, got 4"),
        ({**group(), "config_groups": {"g": 5}}, "config_groups.g must be an object, got 5"),
        (
            {**group(), "config_groups": {"g": {"targets": ["Linear"], "weights": [1]}}},
            "g.weights must be an object, got",
        ),
        ({**group(), "kv_cache_scheme": "static"}, "kv_cache_scheme must be an object, got 'static'"),
        ({**group(), "ignore": "lm_head"}, "ignore must be a list of layers, got 'lm_head'"),
        ({**group(), "ignore": [{}]}, "ignore names {}: decoder layers that stay unquantized"),
        ({"quant_method": ["x"] * 1000}, "quant_method is a list of 1,000 entries, which is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "weight_block_size is [128, 128]: scales of blocks"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["re:.*mlp.*"]}}},
            "config_groups.g.targets must be ['Linear'], got ['re:.*mlp.*']",
        ),
    ],
)
def test_refusals_name_field_and_value(quantization: Any, text: str) -> None:
    with pytest.raises(QuantizationError) as caught:
        read(quantization)
    assert str(caught.value).startswith("config.json: quantization_config") and text in str(caught.value)


def test_names_and_shapes() -> None:
    prefix = "model.layers.3.self_attn."
    for own in ("k_scale", "attn.k_scale", "k_proj.k_scale", "qkv_proj.k_scale", "k_proj.output_scale"):
        assert canonical_name(prefix + own) == f"{prefix}k_scale"
    assert canonical_name(f"{prefix}v_proj.output_scale") == f"{prefix}v_scale"
    for own in ("q_proj.weight", "q_proj.weight_scale", "k_proj.weight_scale", "o_proj.bias"):
        assert canonical_name(prefix + own) == prefix + own
    for own in ("q_proj.input_scale", "q_scale", "attn.prob_scale"):
        assert canonical_name(prefix + own) is None
    assert canonical_shape("a.weight_scale", (1,)) == canonical_shape("a.weight_scale", ()) == ()
    assert canonical_shape("a.weight_scale", (96, 1)) == canonical_shape("a.weight_scale", (96,)) == (96,)
    assert canonical_shape("a.weight", (96, 1)) == (96, 1)
