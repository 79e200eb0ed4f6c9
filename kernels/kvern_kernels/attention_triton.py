"""Paged attention on a GPU: which kernel takes which rows. The reference is `attention.py`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from . import hopper_attention, vendor_attention
from .decode_attention_triton import MAX_QUERY_LEN, decode_attention
from .fp8 import BLOCK, BlockScaledRows
from .gather_triton import gather_contexts
from .kv_cache import is_fp8
from .metadata import AttentionMetadata
from .prefill_attention_triton import prefill_attention


def paged_attention(
    q: Tensor, kv: Tensor, meta: AttentionMetadata, scale: float, kv_scales: Tensor | None = None
) -> Tensor:
    """As `attention.paged_attention`; the heads of a token must be contiguous in q. No host synchronization."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if meta.device_rows is not None:
        # Prompts get zeros from the first kernel where their token's number is a row's; the second one overwrites them.
        lens = meta.device_rows.decode_lens
        decode_attention(q, kv, meta, scale, out, meta.num_rows, 1, seq_lens=lens, kv_scales=kv_scales)
        prefill_attention(q, kv, meta, scale, out, 0, kv_scales=kv_scales)
        return out
    if meta.max_query_len <= MAX_QUERY_LEN:
        decode_attention(q, kv, meta, scale, out, meta.num_rows, max(meta.max_query_len, 1), kv_scales=kv_scales)
        return out
    decode_attention(q, kv, meta, scale, out, meta.num_decodes, 1, kv_scales=kv_scales)
    if hopper_attention.takes(q, kv, meta):
        hopper_attention.attention(q, kv, meta, scale, out, meta.num_decodes)
        return out
    for part in _parts(q, meta):
        rows, first, end = part.meta, part.first_token, part.first_token + part.tokens
        if not part.padded:
            prefill_attention(q, kv, rows, scale, out, 0, tokens_of_rows=part.tokens, kv_scales=kv_scales)
            continue
        given = (rows.block_tables, rows.seq_lens, 0, rows.num_rows, part.padded, q.dtype, kv_scales)
        keys, values = gather_contexts(kv, *given)
        prompts = vendor_attention.causal_attention(q[first:end], keys, values, scale, part.prefix)
        if part.tokens == q.shape[0]:
            return prompts.contiguous()
        out[first:end] = prompts
    return out


def gives_blocks(kv: Tensor, meta: AttentionMetadata) -> bool:
    """Whether `paged_attention_blocks` computes a step: its tokens are all the decode kernel's, a head is a block. Not
    where rows are `each_alone`: a token's bits would differ from those of the same one in a larger step. Not over a
    cache in FP8."""
    few = meta.device_rows is None and meta.max_query_len <= MAX_QUERY_LEN
    return few and kv.shape[4] == BLOCK and not is_fp8(kv) and not meta.each_alone


def paged_attention_blocks(q: Tensor, kv: Tensor, meta: AttentionMetadata, scale: float) -> BlockScaledRows:
    """As `attention.paged_attention_blocks`, where it `gives_blocks`."""
    out = BlockScaledRows.empty(q.shape[0], q.shape[1] * q.shape[2], q.device)
    longest, heads = max(meta.max_query_len, 1), out.values.view(q.shape)
    decode_attention(q, kv, meta, scale, heads, meta.num_rows, longest, out_scales=out.scales)
    return out


@dataclass(frozen=True)
class _Part:
    """Some rows of a step: their metadata, where their tokens are in the flat batch, and what `Run` says of them;
    `prefix` tokens of the context come before them (a single row's)."""

    meta: AttentionMetadata
    first_token: int
    tokens: int
    padded: int
    prefix: int


def _parts(q: Tensor, meta: AttentionMetadata) -> list[_Part]:
    """The prompts of a step by kernel, worked out once a step."""
    found = meta.plan_cache.get("parts")
    if found is None:
        found = meta.plan_cache["parts"] = _find_parts(q, meta)
    parts: list[_Part] = found
    return parts


def _find_parts(q: Tensor, meta: AttentionMetadata) -> list[_Part]:
    if meta.num_rows == meta.num_decodes:
        return []
    if meta.query_lens is None or meta.seq_lens_list is None or not vendor_attention.available(q.device):
        first = meta.num_decodes
        return [_Part(_slice(meta, first, meta.num_rows), first, q.shape[0] - first, 0, 0)]
    counts, lengths = meta.query_lens, meta.seq_lens_list
    parts, token = [], meta.num_decodes
    for run in vendor_attention.plan_runs(counts, lengths, meta.num_decodes, q.shape[2], q.element_size()):
        end = run.first + run.rows
        tokens = sum(counts[run.first : end])
        prefix = lengths[run.first] - counts[run.first]
        parts.append(_Part(_slice(meta, run.first, end), token, tokens, run.padded, prefix))
        token += tokens
    return parts


def _slice(meta: AttentionMetadata, first: int, end: int) -> AttentionMetadata:
    """Rows first..end-1 of a step; their tokens stay where they are in the flat batch. Copies, since Triton compiles
    kernels anew for pointers that are not aligned."""
    return AttentionMetadata(
        query_start=meta.query_start[first : end + 1].clone(),
        seq_lens=meta.seq_lens[first:end].clone(),
        block_tables=meta.block_tables[first:end].clone(),
        slots=meta.slots,
        num_decodes=0,
        max_query_len=meta.max_query_len,
        max_seq_len=meta.max_seq_len,
    )
