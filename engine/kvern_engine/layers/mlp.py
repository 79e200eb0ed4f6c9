"""The MLP of a decoder layer: gated (SwiGLU, GeGLU) or plain."""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from kvern_engine.layers.build import Build
from kvern_engine.layers.linear import Linear
from kvern_engine.layers.parameters import Destinations, clear_padding, split_by_inputs, split_by_outputs
from kvern_engine.parallel.groups import OwnShare
from kvern_engine.parallel.layout import Slice
from kvern_kernels import ScaledRows

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """Raises ValueError naming those there are."""
    if name not in ACTIVATIONS:
        raise ValueError(f"hidden_act {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


class GatedMLP:
    """down(act(gate(x)) * up(x)): SwiGLU or GeGLU (Shazeer, arXiv 2002.05202). `gate_up_proj` holds the rows of gate,
    then those of up, each for the units in `held` of `total`."""

    def __init__(self, build: Build, held: Slice | None = None, total: int | None = None) -> None:
        config = build.config
        self.inner, self.total = held or build.shard.inner, total or config.intermediate_size
        self._group = build.group
        self._in_parts, self._sums_in_norm = build.in_parts, build.sums_in_norm
        self._act = activation(config.hidden_act)
        self._is_silu = config.hidden_act == "silu"
        self._scales_of_rows = config.fp8 is not None and config.fp8.per_channel
        hidden, inner, bias, fp8 = config.hidden_size, self.inner.size, config.mlp_bias, config.fp8 is not None
        dtype, device = build.dtype, build.device
        self.gate_up_proj = Linear(
            hidden, 2 * inner, bias=bias, dtype=dtype, device=device, fp8=fp8, pieces=build.output_pieces
        )
        down_bias = bias and build.group.rank == 0
        self.down_proj = Linear(inner, hidden, bias=down_bias, dtype=dtype, device=device, fp8=fp8, pieces=build.pieces)
        clear_padding(self.gate_up_proj, self.inner)
        clear_padding(self.down_proj, self.inner)

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor | OwnShare | None:
        """For the norm that adds it to `residual`; None: it has been added."""
        if self._in_parts:
            return self.down_proj.before_norm(self.gated(x), residual)
        if self._sums_in_norm:
            return OwnShare(self.down_proj.parts(self.gated(x)), self._group)
        return self.project(x)

    def project(self, x: Tensor) -> Tensor:
        """The MLP of `x` [T, H], whoever reads it."""
        return self._group.all_reduce(self.own_share(x))

    def own_share(self, x: Tensor) -> Tensor:
        """This rank's part of the sum that the MLP is."""
        return self.down_proj(self.gated(x))

    def gated(self, x: Tensor) -> Tensor:
        """act(gate(x)) * up(x), [T, inner]."""
        if self._is_silu:
            return self.gate_up_proj.gated(x)
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self._act(gate) * up

    def fp8(self, x: ScaledRows) -> ScaledRows:
        assert self._is_silu, "only SwiGLU has a kernel in FP8"
        by_blocks = self.down_proj.takes_blocks(x.values.shape[0], self._group)
        return self.down_proj.scaled_sum(self.gate_up_proj.gated_fp8(x, by_blocks), self._group)

    def linears(self) -> list[Linear]:
        return [self.gate_up_proj, self.down_proj]

    def destinations(
        self, prefix: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    ) -> Destinations:
        """`prefix` is that of the MLP's tensors, e.g. "model.layers.0.mlp."; `names` are those of gate, up and down."""
        gate, up, down = names
        merged = [(gate, self.inner, self.total), (up, self.inner, self.total)]
        rows = self._scales_of_rows
        return split_by_outputs(prefix, self.gate_up_proj, merged, rows) | split_by_inputs(
            prefix, self.down_proj, down, self.inner, self.total, rows
        )


class PlainMLP:
    """down(act(up(x))), with biases where the configuration has them."""

    def __init__(self, build: Build) -> None:
        config, dtype, device = build.config, build.dtype, build.device
        self.inner, self._group = build.shard.inner, build.group
        self._act = activation(config.hidden_act)
        hidden, bias = config.hidden_size, config.mlp_bias
        self.up_proj = Linear(
            hidden, self.inner.size, bias=bias, dtype=dtype, device=device, pieces=build.output_pieces
        )
        down_bias = bias and build.group.rank == 0
        self.down_proj = Linear(
            self.inner.size, hidden, bias=down_bias, dtype=dtype, device=device, pieces=build.pieces
        )
        clear_padding(self.up_proj, self.inner)
        clear_padding(self.down_proj, self.inner)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        return self._group.all_reduce(self.down_proj(self._act(self.up_proj(x))))
