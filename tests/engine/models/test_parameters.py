"""Where tensors go that a checkpoint holds in another form than a layer keeps them: fused, transposed, reordered."""

import pytest
import torch

from kvern_engine.layers.linear import Linear
from kvern_engine.layers.norm import CenteredRMSNorm
from kvern_engine.layers.parameters import Destinations, fused_outputs, transposed_by_inputs
from kvern_engine.layers.rotary import rotary_order
from kvern_engine.parallel.layout import Slice

CPU = torch.device("cpu")


def linear(inputs: int, outputs: int, bias: bool = False, fp8: bool = False) -> Linear:
    layer = Linear(inputs, outputs, bias=bias, dtype=torch.float32, device=CPU, fp8=fp8)
    layer.weight.view(torch.uint8).fill_(0)
    return layer


def store(destinations: Destinations, **given: torch.Tensor) -> None:
    assert {name.partition(".")[2] for name in destinations} == set(given)
    for name, destination in destinations.items():
        tensor = given[name.partition(".")[2]]
        assert destination.part.shape == tuple(tensor.shape)
        destination.store(tensor[destination.part.slices])


def test_parts_of_a_fused_tensor() -> None:
    """Rank 1 of 2 of a q of 8 rows and a k of 5, of which it holds 3..5 and a row of padding."""
    layer = linear(3, 4 + 3, bias=True)
    weight, bias = torch.randn(13, 3), torch.randn(13)
    store(fused_outputs("m", layer, [(Slice(4, 8, 4), 8), (Slice(3, 5, 3), 5)]), weight=weight, bias=bias)
    rows = [4, 5, 6, 7, 11, 12]
    assert torch.equal(layer.weight[:6], weight[rows]) and not layer.weight[6].any()
    assert layer.bias is not None
    assert torch.equal(layer.bias[:6], bias[rows]) and layer.bias[6] == 0


@pytest.mark.parametrize("transposed", [False, True])
def test_heads_are_reordered_but_not_the_last_part(transposed: bool) -> None:
    layer, weight, order = linear(3, 16), torch.randn(16, 3), rotary_order(4, 2)
    parts = [(Slice(0, 8, 8), 8), (Slice(0, 4, 4), 4), (Slice(0, 4, 4), 4)]
    given = weight.t().contiguous() if transposed else weight
    store(fused_outputs("m", layer, parts, order, transposed), weight=given)
    expected = [4 * head + int(place) for head in range(3) for place in order] + [12, 13, 14, 15]
    assert torch.equal(layer.weight, weight[expected])


def test_a_transposed_tensor_split_by_inputs() -> None:
    layer, weight = linear(3, 2), torch.randn(5, 2)  # of 5 inputs it sees 3..5
    store(transposed_by_inputs("m", layer, Slice(3, 5, 3), 5), weight=weight)
    assert torch.equal(layer.weight[:, :2], weight[3:5].t()) and not layer.weight[:, 2].any()


@pytest.mark.parametrize("per_channel", [False, True])
def test_fused_weights_in_fp8_come_with_their_scales(per_channel: bool) -> None:
    layer = linear(3, 6, fp8=True)
    weight = torch.randn(8, 3).to(torch.float8_e4m3fn)
    scales = torch.rand(8) if per_channel else torch.tensor(0.25)
    parts = [(Slice(0, 4, 4), 4), (Slice(2, 4, 2), 4)]
    store(fused_outputs("m", layer, parts, scales_of_rows=per_channel), weight=weight, weight_scale=scales)
    rows = [0, 1, 2, 3, 6, 7]
    assert torch.equal(layer.weight.float(), weight.float()[rows])
    assert layer.scales is not None
    assert torch.equal(layer.scales, scales[rows] if per_channel else torch.full((6,), 0.25))


def test_a_centered_norm_adds_one_in_float32() -> None:
    norm = CenteredRMSNorm(4, 1e-6, dtype=torch.bfloat16, device=CPU)
    stored = torch.tensor([0.0, 0.001, -0.002, 3.0], dtype=torch.bfloat16)
    store(norm.destinations("m"), weight=stored)
    assert norm.weight.dtype == torch.float32
    assert torch.equal(norm.weight, 1 + stored.float())
