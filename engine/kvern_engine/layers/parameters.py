"""Where a checkpoint's tensors go: the parameters of layers, cut as the ranks of a stage share them.

A layer is split by its outputs (rows of the weight: each rank computes some of them) or by its inputs (columns: each
rank computes a part of the sum), as in Megatron-LM (Shoeybi et al., arXiv 1909.08053).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvern_engine.layers.linear import Linear
from kvern_engine.loading.parts import WeightPart
from kvern_engine.parallel.layout import Slice


class Destination(NamedTuple):
    """`tensor` takes `part` of a checkpoint's tensor, or what `prepare` makes of that part; it is a view of parameters
    and has the same shape, or takes a single number everywhere."""

    tensor: Tensor
    part: WeightPart
    prepare: Callable[[Tensor], Tensor] | None = None

    def store(self, part: Tensor) -> None:
        """Takes the part as it comes from the checkpoint, in any dtype."""
        self.tensor.copy_(part if self.prepare is None else self.prepare(part))


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


@dataclass(frozen=True)
class FusedRows:
    """The rows that a rank holds of a tensor in which several matrices stand one below the other: `parts` are (outputs
    held, outputs in all). `order`: see `fused_outputs`. `transposed`: they are columns of the tensor."""

    parts: tuple[tuple[Slice, int], ...]
    order: Tensor | None = None
    transposed: bool = False

    def __call__(self, stored: Tensor) -> Tensor:
        if stored.dtype == torch.float8_e4m3fn:  # few of torch's operations move that type
            return self(stored.view(torch.uint8)).view(stored.dtype)
        if self.transposed:
            stored = stored.t()
        found = []
        sizes = [total for _, total in self.parts]
        for number, ((held, _), rows) in enumerate(zip(self.parts, torch.split(stored, sizes), strict=True)):
            rows = rows[held.start : held.stop]
            if self.order is not None and number + 1 < len(self.parts):
                rows = rows.view(-1, len(self.order), *rows.shape[1:])[:, self.order].flatten(0, 1)
            found.append(F.pad(rows, (*[0] * (2 * rows.dim() - 1), held.size - held.count)))
        return torch.cat(found)


def pieces(destinations: Destinations) -> dict[str, tuple[Tensor, WeightPart]]:
    """The parameters as ranks exchange them: name -> (view of a parameter, the region of the whole that it holds), the
    same names and regions at every layout. A checkpoint's name, followed by `#` and a number where several matrices
    are one tensor there. Raises ValueError for what cannot be moved: weights that were quantized after loading, scales.
    """
    found: dict[str, tuple[Tensor, WeightPart]] = {}
    for name, (tensor, part, prepare) in destinations.items():
        if isinstance(prepare, FusedRows):
            at = 0
            for number, (held, total) in enumerate(prepare.parts):
                ranges = ((held.start, held.stop), *((0, size) for size in tensor.shape[1:]))
                whole_part = WeightPart((total, *tensor.shape[1:]), ranges)
                found[f"{name}#{number}"] = tensor[at : at + held.count], whole_part
                at += held.size
        else:
            found[name] = tensor, part
    for name, (tensor, part) in found.items():
        if tuple(tensor.shape) != part.part_shape:
            raise ValueError(f"{name} cannot be moved between ranks: it is kept as {list(tensor.shape)}, quantized")
    return found


def fused_outputs(
    name: str,
    layer: Linear,
    parts: Sequence[tuple[Slice, int]],
    order: Tensor | None = None,
    transposed: bool = False,
    scales_of_rows: bool = False,
) -> Destinations:
    """A layer whose parts, given as (outputs held, outputs in all), are one tensor in the checkpoint too, one below the
    other. `order`: of each part but the last, the outputs are stored in this order within each len(order) of them.
    `transposed`: the checkpoint's weight is [in_features, outputs]. With the scales of weights that come in FP8."""
    pick = FusedRows(tuple(parts), order)
    sizes = [total for _, total in parts]
    shape = (sum(sizes), layer.in_features)
    part = WeightPart.whole(*(shape[::-1] if transposed else shape))
    destinations = {f"{name}.weight": Destination(layer.weight, part, replace(pick, transposed=transposed))}
    if layer.bias is not None:
        destinations[f"{name}.bias"] = Destination(layer.bias, WeightPart.whole(shape[0]), pick)
    if layer.scales is not None:
        rows = Destination(layer.scales, WeightPart.whole(shape[0]), pick)
        destinations[f"{name}.weight_scale"] = rows if scales_of_rows else Destination(layer.scales, WeightPart.whole())
    return destinations


def transposed_by_inputs(name: str, layer: Linear, held: Slice, total: int) -> Destinations:
    """`split_by_inputs` of a layer whose weight is [in_features, out_features] in the checkpoint."""
    part = WeightPart((total, layer.out_features), ((held.start, held.stop), (0, layer.out_features)))
    found = {f"{name}.weight": Destination(layer.weight[:, : held.count].t(), part)}
    if layer.bias is not None:
        found[f"{name}.bias"] = whole(layer.bias)
    return found


def clear_padding(layer: Linear, held: Slice) -> None:
    """Zeros, before loading, in a layer that holds more inputs or outputs than the model has: they add nothing."""
    if held.count < held.size:
        layer.weight.zero_()
        if layer.bias is not None:
            layer.bias.zero_()
