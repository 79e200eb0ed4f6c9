"""Paged attention on a GPU: which kernel takes which rows. The reference is `attention.py`."""

import torch
from torch import Tensor

from .decode_attention_triton import MAX_QUERY_LEN, decode_attention
from .metadata import AttentionMetadata
from .prefill_attention_triton import prefill_attention


def paged_attention(q: Tensor, kv: Tensor, meta: AttentionMetadata, scale: float) -> Tensor:
    """As `attention.paged_attention`; the heads of a token must be contiguous in q. No host synchronization."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if meta.max_query_len <= MAX_QUERY_LEN:
        decode_attention(q, kv, meta, scale, out, meta.num_rows, max(meta.max_query_len, 1))
    else:
        decode_attention(q, kv, meta, scale, out, meta.num_decodes, 1)
        prefill_attention(q, kv, meta, scale, out, meta.num_decodes)
    return out
