"""Token embedding: ids to rows of a table."""

import torch
import torch.nn.functional as F
from torch import Tensor


class Embedding:
    """`weight` [vocab_size, hidden_size]; uninitialized until loaded."""

    __slots__ = ("weight",)

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight: Tensor = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """`token_ids` [T] int32 or int64 -> [T, hidden_size]."""
        return F.embedding(token_ids, self.weight)
