"""Products of 16-bit activations with a weight in INT8, one scale an output: torch reference. For the LM head.

A weight that is read once for a few rows costs what its bytes cost. INT8 has the same error everywhere in a row, E4M3 a
relative one: of the logits of a small model the first changes 1 %, the second 5 %. The Triton kernel is in
`int8_triton.py`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

INT8_MAX = 127.0
MOST_ROWS = 64  # up to here the kernel beats the vendor's product in 16 bits
TINY = 1e-12


@dataclass
class Int8Weight:
    """Row n is `values[n]` * `scales[n]`: `values` [N, K] int8, `scales` [N] float32."""

    values: Tensor
    scales: Tensor

    @classmethod
    def quantize(cls, weight: Tensor) -> "Int8Weight":
        """`weight` [N, K] of any float type, each row by its largest element; 256 MB at a time need float32."""
        scales = (weight.abs().amax(dim=1).float() / INT8_MAX).clamp(min=TINY)
        values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        step = max(1, (1 << 26) // weight.shape[1])
        for first in range(0, weight.shape[0], step):
            part = weight[first : first + step].float() / scales[first : first + step, None]
            values[first : first + step] = part.round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)
        return cls(values, scales)


def int8_linear(x: Tensor, weight: Int8Weight) -> Tensor:
    """`x` [T, K] times `weight` [N, K] transposed: [T, N] in x's dtype."""
    return ((x.float() @ weight.values.float().t()) * weight.scales).to(x.dtype)
