"""Where a checkpoint's tensors go: the parameters of layers, cut as the ranks of a stage share them.

A layer is split by its outputs (rows of the weight: each rank computes some of them) or by its inputs (columns: each
rank computes a part of the sum), as in Megatron-LM (Shoeybi et al., arXiv 1909.08053).
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from kvern_engine.layers.linear import Linear
from kvern_engine.loading.parts import WeightPart
from kvern_engine.parallel.layout import Slice


class Destination(NamedTuple):
    """`tensor` takes `part` of a checkpoint's tensor; it is a view of a parameter and has the part's shape, or takes a
    single number everywhere."""

    tensor: Tensor
    part: WeightPart


Destinations = dict[str, Destination]  # by the tensor's name in the checkpoint


def whole(tensor: Tensor) -> Destination:
    """A parameter that every rank holds as a whole."""
    return Destination(tensor, WeightPart.whole(*tensor.shape))


def vocabulary_rows(weight: Tensor, held: Slice, total: int) -> Destination:
    """The rows of an embedding or LM head [held.size, hidden_size] for the tokens in `held`, of `total`."""
    hidden = weight.shape[1]
    return Destination(weight[: held.count], WeightPart((total, hidden), ((held.start, held.stop), (0, hidden))))


def split_by_outputs(
    prefix: str, layer: Linear, parts: Sequence[tuple[str, Slice, int]], scales_of_rows: bool = False
) -> Destinations:
    """A layer that merges several of the checkpoint: `parts` are (name, outputs held, outputs in all) in the order of
    its rows. Weights, biases, and the scales of weights that come in FP8."""
    found: Destinations = {}
    at = 0
    for name, held, total in parts:
        rows, end = (held.start, held.stop), at + held.count
        part = WeightPart((total, layer.in_features), (rows, (0, layer.in_features)))
        found[f"{prefix}{name}.weight"] = Destination(layer.weight[at:end], part)
        if layer.bias is not None:
            found[f"{prefix}{name}.bias"] = Destination(layer.bias[at:end], WeightPart((total,), (rows,)))
        if layer.scales is not None:
            part = WeightPart((total,), (rows,)) if scales_of_rows else WeightPart.whole()
            found[f"{prefix}{name}.weight_scale"] = Destination(layer.scales[at:end], part)
        at += held.size
    return found


def split_by_inputs(
    prefix: str, layer: Linear, name: str, held: Slice, total: int, scales_of_rows: bool = False
) -> Destinations:
    """A layer that sees `held` of `total` inputs. Its bias, where the rank has it, and the scales of weights that come
    in FP8 are whole."""
    outputs = (0, layer.out_features)
    part = WeightPart((layer.out_features, total), (outputs, (held.start, held.stop)))
    found = {f"{prefix}{name}.weight": Destination(layer.weight[:, : held.count], part)}
    if layer.bias is not None:
        found[f"{prefix}{name}.bias"] = whole(layer.bias)
    if layer.scales is not None:
        shape = WeightPart.whole(layer.out_features) if scales_of_rows else WeightPart.whole()
        found[f"{prefix}{name}.weight_scale"] = Destination(layer.scales, shape)
    return found


def clear_padding(layer: Linear, held: Slice) -> None:
    """Zeros, before loading, in a layer that holds more inputs or outputs than the model has: they add nothing."""
    if held.count < held.size:
        layer.weight.zero_()
        if layer.bias is not None:
            layer.bias.zero_()
