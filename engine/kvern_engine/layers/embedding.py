"""Token embedding: ids to rows of a table, whose rows the ranks of a stage share."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kvern_engine.parallel.groups import TensorGroup
from kvern_engine.parallel.layout import Slice


class Embedding:
    """`weight` [vocab.size, hidden_size], the rows of the tokens in `vocab` and padding; uninitialized until loaded."""

    __slots__ = ("_group", "_vocab", "weight")

    def __init__(
        self, vocab: Slice, hidden_size: int, group: TensorGroup, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._vocab, self._group = vocab, group
        self.weight: Tensor = torch.empty(vocab.size, hidden_size, dtype=dtype, device=device)
        if vocab.count < vocab.size:
            self.weight.zero_()

    def __call__(self, token_ids: Tensor) -> Tensor:
        """`token_ids` [T] int32 or int64 -> [T, hidden_size]."""
        if self._group.size == 1:
            return F.embedding(token_ids, self.weight)
        places = token_ids - self._vocab.start
        elsewhere = (places < 0) | (places >= self._vocab.count)
        found = F.embedding(places.masked_fill_(elsewhere, 0), self.weight)
        # One rank has the row, the others add zeros: the sum is exact.
        return self._group.all_reduce(found.masked_fill_(elsewhere.unsqueeze(1), 0))
