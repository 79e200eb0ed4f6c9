"""Matrix products whose numbers depend neither on the other rows nor on how a matrix is cut for tensor parallel ranks.

Each element is added up along the inner dimension in one order, in `pieces`: the sum of each piece is rounded to the
type of the rows, as a rank's share of a sum is before it is sent, then the pieces are added up and rounded. So a rank
that holds all inputs gives, in two pieces, to the last bit what two ranks give that hold half of them each. Outputs
can be cut anywhere. (Zhang et al., Deterministic Inference across Tensor Parallel Sizes, arXiv 2511.17826, do so for
any number of ranks, with a tree of pieces.)

The Triton kernel is `invariant_gemm_triton.py`; here is its reference.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def piece_size(inner: int, pieces: int) -> int:
    """Inner elements of each piece but maybe the last. Raises ValueError for less than one piece."""
    if pieces < 1:
        raise ValueError(f"pieces must be at least 1, got {pieces}")
    return -(-inner // pieces)


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None, pieces: int) -> Tensor:
    """`x` [T, K] times `weight` [N, K] transposed plus `bias` [N]: [T, N] of the same type. The bias belongs to the
    first piece."""
    size = piece_size(x.shape[1], pieces)
    total = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    for start in range(0, x.shape[1], size):
        own = bias if start == 0 else None
        total += F.linear(x[:, start : start + size], weight[:, start : start + size], own).float()
    return total.to(x.dtype)
