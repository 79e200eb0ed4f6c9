"""y = x W^T + b: the place where a matrix product is dispatched (memory layouts on a CPU, FP8).

On a CPU a float32 layer with many outputs is kept in two layouts, each at home in one regime: transposed for one or
two rows, where the product streams the weights once, and packed by oneDNN for more rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kvern_engine.parallel.groups import TensorGroup
from kvern_kernels import (
    INT8_ROWS,
    BlockScaledRows,
    Fp8Weight,
    Int8Weight,
    ScaledRows,
    add_linear,
    fp8_gated_linear,
    fp8_linear,
    fp8_linear_parts,
    gated_linear,
    int8_linear,
    invariant_linear,
    largest_of,
    linear_parts,
    restore_rows,
    silu_and_mul,
    silu_and_mul_fp8,
    takes_blocks,
    unscaled,
)

_PACK_ROWS = 32  # oneDNN chooses its blocking for about this many rows
_STREAM_ROWS = 2  # up to here the transposed layout is the fastest
_GRAINS = ((32, 4), (128, 8), (512, 32), (2048, 64), (1 << 62, 256))  # rows up to, padded to multiples of
_WIDE = 1.5  # outputs over inputs from which the second layout pays


def padded_rows(rows: int) -> int:
    """How many rows oneDNN is to multiply for `rows` > 0: it keeps a program of about half a megabyte for every number
    that it meets, a thousand of them in all, and does not give back what one took. These are 80 up to 8,192 rows."""
    grain = next(grain for limit, grain in _GRAINS if rows <= limit)
    return -(-rows // grain) * grain


def _can_pack() -> bool:
    return torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


class Linear:
    """A linear layer. `weight` [out_features, in_features], `bias` [out_features] or None; filled by the loader.

    One that comes in FP8 (`fp8`) also has `scales` [out_features] float32 of its outputs, and needs `quantize_fp8`.

    `pieces`: sums are made in one order, in so many pieces (`kvern_kernels.invariant_linear`); 0: as is fastest.
    """

    __slots__ = (
        "_dtype",
        "_fp8",
        "_int8",
        "_packed",
        "_pieces",
        "_transposed",
        "bias",
        "in_features",
        "out_features",
        "scales",
        "weight",
    )

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device,
        fp8: bool = False,
        pieces: int = 0,
    ) -> None:
        self.in_features, self.out_features, self._dtype, self._pieces = in_features, out_features, dtype, pieces
        stored = torch.float8_e4m3fn if fp8 else dtype
        self.weight: Tensor = torch.empty(out_features, in_features, dtype=stored, device=device)
        self.scales: Tensor | None = torch.ones(out_features, dtype=torch.float32, device=device) if fp8 else None
        self.bias: Tensor | None = torch.empty(out_features, dtype=dtype, device=device) if bias else None
        self._transposed: Tensor | None = None
        self._packed: Tensor | None = None
        self._fp8: Fp8Weight | None = None
        self._int8: Int8Weight | None = None

    @classmethod
    def sharing(cls, weight: Tensor, pieces: int = 0) -> "Linear":
        """A layer without bias over the weights of another one (a tied LM head). `weight` [out, in]."""
        layer = cls.__new__(cls)
        layer.out_features, layer.in_features = weight.shape
        layer.weight, layer.bias, layer._transposed, layer._packed = weight, None, None, None
        layer._fp8, layer._int8, layer.scales, layer._dtype, layer._pieces = None, None, None, weight.dtype, pieces
        return layer

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [T, in_features] -> [T, out_features], same dtype."""
        if self._int8 is not None and x.shape[0] <= INT8_ROWS:
            return int8_linear(x, self._int8)
        if self._pieces:
            return invariant_linear(x, self.weight, self.bias, self._pieces)
        if self._packed is None:
            return F.linear(x, self.weight, self.bias)
        if x.shape[0] <= _STREAM_ROWS:
            assert self._transposed is not None
            if self.bias is None:
                return torch.mm(x, self._transposed)
            return torch.addmm(self.bias, x, self._transposed)
        rows = x.shape[0]
        if more := padded_rows(rows) - rows:
            x = F.pad(x, (0, 0, 0, more))
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out[:rows] if more else out

    def parts(self, x: Tensor) -> Tensor:
        """As a call, for an operation that adds up parts: maybe [P, T, out_features] float32, see
        `kvern_kernels.linear_parts`."""
        return linear_parts(x, self.weight) if self._is_plain else self(x)

    def before_norm(self, x: Tensor, residual: Tensor) -> Tensor | None:
        """As `parts`, for the norm that adds it to `residual` [T, out_features]; None: it has been added."""
        if self._is_plain and add_linear(x, self.weight, residual):
            return None
        return self.parts(x)

    def gated(self, x: Tensor) -> Tensor:
        """silu(gate) * up of `x` [T, in_features], where the layer gives gate | up: [T, out_features / 2]."""
        return gated_linear(x, self.weight) if self._is_plain else silu_and_mul(self(x))

    @property
    def _is_plain(self) -> bool:
        """A product with `weight` and no more, in whatever way is fastest."""
        return self.bias is None and self._packed is None and not self._pieces

    @property
    def stored(self) -> Tensor | Fp8Weight:
        """The weights as products take them."""
        return self.weight if self._fp8 is None else self._fp8

    @property
    def is_fp8(self) -> bool:
        """`quantize_fp8` has been called: `scaled` computes the layer."""
        return self._fp8 is not None

    def scaled(self, x: ScaledRows) -> ScaledRows:
        """The layer after `quantize_fp8`: `x` [T, in_features] in FP8 -> [T, out_features], to be multiplied by the
        scales of the rows and columns."""
        assert self._fp8 is not None
        out = fp8_linear(x, self._fp8, self._dtype)
        return out if self.bias is None else self._with_bias(out)

    def takes_blocks(self, rows: int, group: TensorGroup) -> bool:
        """`rows` rows for `scaled_sum` over `group` are better quantized by blocks than as a whole. Never for sums over
        ranks, nor where numbers must not depend on how many rows a step has."""
        if group.size > 1 or self.bias is not None or self._pieces or self._fp8 is None:
            return False
        return takes_blocks(rows, self._fp8)

    def scaled_parts(self, x: ScaledRows | BlockScaledRows) -> ScaledRows:
        """As `scaled`, for an operation that adds up parts; of rows quantized by blocks where it `takes_blocks`."""
        assert self._fp8 is not None
        if self.bias is None:
            return fp8_linear_parts(x, self._fp8, self._dtype)
        assert isinstance(x, ScaledRows), "no blocks behind which a bias is added"
        return self.scaled(x)

    def scaled_sum(self, x: ScaledRows | BlockScaledRows, group: TensorGroup) -> ScaledRows:
        """As `scaled_parts` of a layer of whose inputs each rank of `group` has some: the sum over the ranks."""
        if group.size == 1:
            return self.scaled_parts(x)
        assert isinstance(x, ScaledRows), "no blocks for a sum over ranks"
        return unscaled(group.all_reduce(restore_rows(self.scaled(x), self._dtype)))

    def gated_fp8(self, x: ScaledRows, by_blocks: bool = False) -> ScaledRows | BlockScaledRows:
        """As `gated` after `quantize_fp8`, quantized by rows; by blocks where `by_blocks` and the product does that."""
        if self.bias is not None:
            return silu_and_mul_fp8(self.scaled(x))
        assert self._fp8 is not None
        return fp8_gated_linear(x, self._fp8, self._dtype, by_blocks)

    def _with_bias(self, out: ScaledRows) -> ScaledRows:
        assert self.bias is not None
        return unscaled(out.restore(self._dtype) + self.bias)

    def quantize_fp8(self, per_channel: bool = False, group: TensorGroup | None = None) -> int:
        """Keep the loaded weights in FP8 in place of `weight`, with one scale, or with one an output; bytes that are
        saved. What has come in FP8 keeps its own scales. `group`: the ranks that hold the rest of what has one scale.
        """
        before = self.weight.numel() * self.weight.element_size()
        if self.scales is None:
            largest = largest_of(self.weight, per_channel)
            if group is not None and group.size > 1:
                largest = group.all_gather(largest.unsqueeze(0)).view(group.size, -1).amax(0)
            self._fp8 = Fp8Weight.quantize(self.weight, per_channel, largest)
        else:
            self._fp8 = Fp8Weight.of(self.weight, self.scales)
        self.weight = torch.empty(0, self.in_features, dtype=self._dtype, device=self.weight.device)
        return before - self._fp8.values.numel()

    def add_int8(self) -> int:
        """Keep the loaded weights in INT8 too, for calls of up to INT8_ROWS rows; bytes that this takes."""
        self._int8 = Int8Weight.quantize(self.weight)
        return self._int8.values.numel() + 4 * self._int8.scales.numel()

    def add_cpu_layouts(self) -> None:
        """Keep the loaded weights in the two layouts that a CPU multiplies fastest, in place of `weight`, where that
        pays: float32 and clearly more outputs than inputs. Takes twice the memory of such layers."""
        wide = self.out_features >= _WIDE * self.in_features
        if not wide or self.weight.dtype != torch.float32 or self.weight.device.type != "cpu" or not _can_pack():
            return
        self._transposed = self.weight.t().contiguous()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, _PACK_ROWS)
        self.weight = self._transposed.t()  # the numbers once more, without memory of their own
