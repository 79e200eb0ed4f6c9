"""Causal attention over the paged KV cache, written for clarity: the reference every other path is tested against.

`cpu_attention.py` is the fast path on a CPU, `decode_attention_triton.py` and `prefill_attention_triton.py` on a GPU.
"""

import torch
from torch import Tensor

from .fp8 import BlockScaledRows, quantize_blocks
from .kv_cache import as_bytes, checked_scales
from .metadata import AttentionMetadata


def gather_context(kv: Tensor, blocks: Tensor, length: int) -> Tensor:
    """The first `length` tokens of the blocks: `kv` [2, Hkv, N, bs, D], `blocks` [n] -> [2, Hkv, length, D]."""
    picked = as_bytes(kv).index_select(2, blocks).view(kv.dtype)
    return picked.reshape(2, kv.shape[1], -1, kv.shape[-1])[:, :, :length]


def soft_cap(scores: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(scores / cap) (Gemma 2, arXiv 2408.00118), in place; None: the scores as they are."""
    return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)


def first_seen(length: int, count: int, window: int | None, block_size: int) -> int:
    """The first block that the last `count` of `length` tokens see anything of through `window`."""
    return 0 if window is None else max(0, length - count - window + 1) // block_size


def paged_attention(
    q: Tensor,
    kv: Tensor,
    meta: AttentionMetadata,
    scale: float,
    kv_scales: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """softmax(scale q K^T) V of each row's last tokens over its context, causal; float32 inside.

    `q` [T, Hq, D]; `kv` [2, Hkv, N, bs, D]; query head h reads KV head h // (Hq / Hkv). `kv_scales` [2, Hkv]: of a
    cache in FP8, see `kv_cache.py`. `window`: a token sees itself and the `window - 1` before it; blocks behind that
    are not read, whatever the block table says. `softcap`: see `soft_cap`. Returns [T, Hq, D], q's dtype; the tokens of
    rows with seq_len 0 are zero.
    """
    kv_scales = checked_scales(kv, kv_scales)
    out = torch.zeros_like(q)
    heads, kv_heads, size = q.shape[1], kv.shape[1], kv.shape[3]
    query_lens, seq_lens = meta.lengths()
    start = 0
    for row, (count, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        if length > 0:
            first = first_seen(length, count, window, size)
            blocks = meta.block_tables[row, first : -(-length // size)].long()
            begin = first * size
            context = gather_context(kv, blocks, length - begin).float()
            if kv_scales is not None:
                context *= kv_scales[:, :, None, None]
            keys, values = context.repeat_interleave(heads // kv_heads, dim=1)
            scores = torch.einsum("qhd,hkd->hqk", q[start : start + count].float(), keys) * scale
            scores = soft_cap(scores, softcap)
            ends = torch.arange(length - count, length, device=q.device)[:, None]
            places = torch.arange(begin, length, device=q.device)[None, :]
            hidden = places > ends
            if window is not None:
                hidden |= places <= ends - window
            weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
            out[start : start + count] = torch.einsum("hqk,hkd->qhd", weights, values).to(q.dtype)
        start += count
    return out


def paged_attention_blocks(q: Tensor, kv: Tensor, meta: AttentionMetadata, scale: float) -> BlockScaledRows:
    """`paged_attention` in FP8, [T, Hq * D], quantized by blocks: heads of `fp8.BLOCK` dimensions by themselves."""
    return quantize_blocks(paged_attention(q.float(), kv, meta, scale).flatten(1))
