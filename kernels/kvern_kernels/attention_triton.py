"""Paged attention on a GPU: which kernel takes which rows. The reference is `attention.py`."""

import torch
from torch import Tensor

from . import vendor_attention
from .decode_attention_triton import MAX_QUERY_LEN, decode_attention
from .gather_triton import gather_contexts
from .metadata import AttentionMetadata
from .prefill_attention_triton import prefill_attention


def paged_attention(q: Tensor, kv: Tensor, meta: AttentionMetadata, scale: float) -> Tensor:
    """As `attention.paged_attention`; the heads of a token must be contiguous in q. No host synchronization."""
    if meta.max_query_len <= MAX_QUERY_LEN:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        decode_attention(q, kv, meta, scale, out, meta.num_rows, max(meta.max_query_len, 1))
        return out
    padded = _vendor_tokens(q, meta)
    row = meta.num_decodes
    if not padded:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        decode_attention(q, kv, meta, scale, out, row, 1)
        prefill_attention(q, kv, meta, scale, out, row)
        return out
    # The prompt is the last row, and the rows before it have one token each.
    keys, values = gather_contexts(kv, meta.block_tables, meta.seq_lens, row, 1, padded)
    prompt = vendor_attention.causal_attention(q[row:], keys, values, scale)
    if row == 0:
        return prompt.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    decode_attention(q, kv, meta, scale, out, row, 1)
    out[row:] = prompt
    return out


def _vendor_tokens(q: Tensor, meta: AttentionMetadata) -> int:
    """The padded length of the prompt for the vendor's kernel in a step of one long fresh prompt beside any decodes; 0
    where our own kernel takes all.
    """
    if meta.query_lens is None or meta.seq_lens_list is None or meta.num_rows - meta.num_decodes != 1:
        return 0
    query_len, seq_len = meta.query_lens[-1], meta.seq_lens_list[-1]
    tokens = vendor_attention.vendor_tokens(query_len, seq_len, q.shape[2], q.element_size())
    return tokens if tokens and vendor_attention.available(q.device) else 0
