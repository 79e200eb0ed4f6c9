"""Paged attention one token at a time, for numbers that do not depend on the batch: what a call computes, and in which
order, follows from its own row alone. Slower than `cpu_attention.py`'s plans, which are made of all rows of a step.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .metadata import AttentionMetadata

Attend = Callable[[Tensor, AttentionMetadata], Tensor]


def attend_each_alone(q: Tensor, meta: AttentionMetadata, attend: Attend) -> Tensor:
    """`attend(q [1, Hq, D], metadata of one row)` for each row of `meta`, which have one query token each; zero for
    padded ones. Returns [T, Hq, D]."""
    alone: list[tuple[int, AttentionMetadata]] | None = meta.plan_cache.get("alone")
    if alone is None:
        alone = meta.plan_cache["alone"] = _split(meta)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for row, own in alone:
        out[row] = attend(q[row : row + 1].clone(memory_format=torch.contiguous_format), own)[0]
    return out


def _split(meta: AttentionMetadata) -> list[tuple[int, AttentionMetadata]]:
    query_lens, seq_lens = meta.lengths()
    if any(count != 1 for count in query_lens):
        raise ValueError(f"each row must have one query token, got {query_lens}")
    query_start = torch.tensor([0, 1], dtype=torch.int32, device=meta.seq_lens.device)
    return [
        (
            row,
            AttentionMetadata(
                query_start=query_start,
                seq_lens=meta.seq_lens[row : row + 1],
                block_tables=meta.block_tables[row : row + 1],
                slots=meta.slots[row : row + 1],
                num_decodes=1,
                max_query_len=1,
                max_seq_len=length,
                query_lens=[1],
                seq_lens_list=[length],
            ),
        )
        for row, length in enumerate(seq_lens)
        if length > 0
    ]
