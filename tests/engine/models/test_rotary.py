"""Rotary tables against transformers' rules, for every scaling; partial rotation; messages."""

import math
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvern_engine.layers.rotary import cos_sin_table, frequencies, rope_table, rotary_order
from kvern_engine.model_config import ModelConfig

CPU = torch.device("cpu")
DIM = 16
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1 + 0.25 * i for i in range(8)],
    "long_factor": [1 + 2.5 * i for i in range(8)],
    "original_max_position_embeddings": 64,
    "factor": 8.0,
}
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 512},
    YARN,
    YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    YARN | {"attention_factor": 1.25},
    YARN | {"mscale": 0.7, "mscale_all_dim": 0.4},
    YARN | {"factor": 1.0},
    LLAMA3 | {"original_max_position_embeddings": 128},
    LONGROPE,
    LONGROPE | {"attention_factor": 1.5},
]


@pytest.mark.parametrize("longest", [40, 512, 3000])
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"])
def test_frequencies_are_transformers(scaling: dict[str, Any], longest: int) -> None:
    config = transformers.LlamaConfig(
        head_dim=DIM, max_position_embeddings=512, rope_parameters={"rope_theta": 500.0, **scaling}
    )
    expected, magnitude = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, CPU, seq_len=longest)
    found, ours = frequencies(DIM, 500.0, scaling, longest)
    torch.testing.assert_close(found.float(), expected, atol=1e-6, rtol=1e-5)
    assert math.isclose(ours, magnitude, rel_tol=1e-6)


def test_the_table_holds_angles_and_magnitude() -> None:
    scaling = YARN | {"attention_factor": 1.25}
    freqs, _ = frequencies(DIM, 500.0, scaling, 30)
    table = cos_sin_table(DIM, 30, 500.0, scaling, CPU)
    assert table.shape == (30, DIM) and table.dtype == torch.float32
    torch.testing.assert_close(table[7], torch.cat(((7 * freqs).cos(), (7 * freqs).sin())).float() * 1.25)


def test_partial_rotation_is_that_of_the_reordered_head() -> None:
    """Rotating the first 6 of 10 dimensions, in pairs (i, i + 3), as our kernel rotates the reordered 10."""
    torch.manual_seed(0)
    x = torch.randn(10)
    table = cos_sin_table(10, 20, 100.0, None, CPU, rotary_dim=6)
    cos, sin = table[13].chunk(2)
    order = rotary_order(10, 6)
    first, second = x[order].chunk(2)
    ours = torch.cat((first * cos - second * sin, second * cos + first * sin))
    angles = 13 * frequencies(6, 100.0, None, 20)[0].float()
    a, b = x[:3], x[3:6]
    expected = torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin(), x[6:]))
    torch.testing.assert_close(ours, expected[order])
    assert sorted(order.tolist()) == list(range(10))


def test_layers_with_a_window_have_their_own_base_and_no_scaling() -> None:
    config = ModelConfig("Gemma3ForCausalLM", 9, 8, 8, 1, 1, 1, 8, 64, rope_theta=1e6, local_rope_theta=10.0)
    scaled = ModelConfig(**{**config.__dict__, "rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    local = cos_sin_table(8, 50, 10.0, None, CPU)
    assert torch.equal(rope_table(config, 50, CPU, local=True), local)
    assert torch.equal(rope_table(scaled, 50, CPU, local=True), local)
    assert torch.equal(
        rope_table(scaled, 50, CPU), cos_sin_table(8, 50, 1e6, {"rope_type": "linear", "factor": 8}, CPU)
    )


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (
            {"rope_type": "spiral"},
            "rope_scaling.rope_type 'spiral' is not supported; supported: default, linear, dynamic, yarn, llama3, long",
        ),
        ({"rope_type": "linear"}, "rope_scaling.factor must be a number above 0 where rope_type is 'linear', got None"),
        (
            {"rope_type": "yarn", "factor": -2, "original_max_position_embeddings": 8},
            "rope_scaling.factor must be .*-2",
        ),
        ({"rope_type": "yarn", "factor": 2}, "rope_scaling.original_max_position_embeddings must be a number above 0"),
        (
            LONGROPE | {"long_factor": [1.0]},
            r"rope_scaling.long_factor must be a list of 8 numbers \(one a rotated pair\), got 1 of them",
        ),
        (LONGROPE | {"long_factor": None}, "rope_scaling.long_factor must be a list of 8 numbers .* got None"),
    ],
)
def test_messages(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        frequencies(DIM, 1e4, scaling, 100)


@pytest.mark.parametrize(
    ("dim", "theta", "scaling"),
    [
        (2, 1e4, {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8}),
        (DIM, 1.0, {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8}),
        (DIM, 1e300, {"rope_type": "dynamic", "factor": 1e300, "original_max_position_embeddings": 1}),
        (DIM, 1e4, {"rope_type": "linear", "factor": 5e-324}),
        (DIM, 1e4, LONGROPE | {"original_max_position_embeddings": 1}),
    ],
)
def test_numbers_that_make_no_sense_together(dim: int, theta: float, scaling: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^rope_theta \S+ and the fields of rope_scaling \(\w+\) give no finite freq"):
        frequencies(dim, theta, scaling, 100)
