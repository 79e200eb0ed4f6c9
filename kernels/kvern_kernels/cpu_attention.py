"""Paged attention on a CPU, for speed: what a step needs is planned once (`cpu_plan.py`) and run by every layer.

Ideas: a run of consecutive block ids is a view of the arena, so nothing is copied; other contexts are gathered in
pieces that stay in the cache; decode rows of similar length share one call; the query heads of a KV head are folded
into the query dimension (GQA), K and V are never repeated; rows that share a prefix of blocks attend to it once, and
the parts are merged by their log-sum-exp (Juravsky et al., Hydragen, arXiv 2402.05099).

A window hides more of the mask, after the plan has cut off the blocks that nobody sees. Soft-capped scores take the
place of torch's fused attention by plain products.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .attention import soft_cap
from .cpu_plan import BatchCall, ExtendCall, PrefixCall, is_run, plan_step
from .kv_cache import as_bytes, checked_scales, is_fp8
from .metadata import AttentionMetadata

# torch's fused CPU attention. Called directly because it returns the log-sum-exp, by which parts are merged.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_scratch = threading.local()
_MOST_SCORES = 1 << 23  # scores that are in memory at once where they are computed plainly

Index = slice | Tensor
# Attention of query [B, H, Q, D] over keys and values [B, H or 1, K, D], causal (Q = K) or by an additive mask
# [B, 1, 1 or Q, K], with scores multiplied by a scale: output and log-sum-exp.
Attend = Callable[[Tensor, Tensor, Tensor, bool, Tensor | None, float], tuple[Tensor, Tensor]]


def _fused(
    query: Tensor, keys: Tensor, values: Tensor, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse = _flash(query, keys, values, 0.0, causal, attn_mask=mask, scale=scale)
    return out, lse


def _capped(
    cap: float, query: Tensor, keys: Tensor, values: Tensor, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """`_fused` with softly capped scores; a few queries at a time, so that the scores stay small."""
    batch, heads, count, _ = query.shape
    out = torch.empty_like(query, dtype=torch.float32)
    lse = torch.empty(query.shape[:3], dtype=torch.float32)
    step = max(1, _MOST_SCORES // (batch * heads * keys.shape[2]))
    wide_keys, wide_values = keys.float().transpose(-1, -2), values.float()
    for first in range(0, count, step):
        some = slice(first, first + step)
        scores = soft_cap(query[:, :, some].float() @ wide_keys * scale, cap)
        if causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu_(first + 1)
            scores.masked_fill_(later, -torch.inf)
        elif mask is not None:
            scores += mask if mask.shape[2] == 1 else mask[:, :, some]
        lse[:, :, some] = scores.logsumexp(dim=-1)
        out[:, :, some] = scores.softmax(dim=-1) @ wide_values
    return out.to(query.dtype), lse


@dataclass
class _Context:
    """Where K and V of a call of `rows` rows and `tokens` tokens a row lie: the first of a run of blocks, or ids."""

    first: int
    blocks: Tensor | None
    rows: int
    tokens: int

    def read(self, kv: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """K and V as [rows, Hkv, tokens, D] in `dtype`. A gather is valid until the thread's next one."""
        _, heads, _, size, dim = kv.shape
        if self.blocks is None:
            strides = (kv.stride(0), 0, kv.stride(1), kv.stride(3), 1)
            offset = kv.storage_offset() + self.first * kv.stride(2)
            both = kv.as_strided((2, 1, heads, self.tokens, dim), strides, offset)
        else:
            stored = as_bytes(kv)
            picked = _scratch_like(stored, 2 * heads * self.blocks.shape[0] * size * dim)
            shape = (2, heads, self.blocks.shape[0], size, dim)
            torch.index_select(stored, 2, self.blocks, out=picked.view(shape))
            whole = picked.view(kv.dtype).view(2, heads, self.rows, -1, dim)
            both = whole[:, :, :, : self.tokens].transpose(1, 2)
        if is_fp8(kv):
            both = both.to(dtype)
        return both[0], both[1]


def _scratch_like(kv: Tensor, numel: int) -> Tensor:
    """Memory kept between calls: fresh pages of a large allocation cost more than the copy into them."""
    buffers: dict[torch.dtype, Tensor] | None = getattr(_scratch, "buffers", None)
    if buffers is None:
        buffers = _scratch.buffers = {}
    buffer = buffers.get(kv.dtype)
    if buffer is None or buffer.numel() < numel:
        with torch.inference_mode(False):  # to be written in and outside of that mode
            buffer = buffers[kv.dtype] = torch.empty(numel, dtype=kv.dtype)
    return buffer[:numel]


def _index(tokens: list[int]) -> Index:
    """A slice where the tokens are consecutive: a view instead of a copy."""
    if is_run(tokens):
        return slice(tokens[0], tokens[-1] + 1)
    return torch.tensor(tokens)


class _Decode:
    def __init__(self, call: BatchCall, dtype: torch.dtype, window: int | None, attend: Attend) -> None:
        self.attend = attend
        self.index = _index(call.starts)
        longest = max(call.lengths)
        rows = len(call.starts)
        if rows == 1 and is_run(call.blocks[0]):
            self.context = _Context(call.blocks[0][0], None, 1, longest)
        else:
            ids = torch.tensor([block for row in call.blocks for block in row])
            self.context = _Context(0, ids, rows, longest)
        self.mask: Tensor | None = None
        if min(call.lengths) < longest or (window is not None and window < longest):
            lengths, places = torch.tensor(call.lengths)[:, None], torch.arange(longest)[None, :]
            hidden = places >= lengths
            if window is not None:
                hidden |= places < lengths - window
            self.mask = torch.zeros(rows, 1, 1, longest, dtype=dtype).masked_fill_(hidden[:, None, None, :], -torch.inf)

    def run(self, q: Tensor, kv: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Output [rows, Hq, D] and log-sum-exp [rows, Hq] of the call's tokens."""
        keys, values = self.context.read(kv, q.dtype)
        picked = q[self.index]
        rows, heads, dim = picked.shape
        kv_heads = keys.shape[1]
        if rows == 1:
            # One row: a task a query head keeps more cores busy, and the output needs no copy.
            keys = keys.transpose(0, 1).expand(kv_heads, heads // kv_heads, -1, dim)
            values = values.transpose(0, 1).expand(kv_heads, heads // kv_heads, -1, dim)
            folded = picked.reshape(kv_heads, -1, 1, dim)
        else:
            folded = picked.reshape(rows, kv_heads, -1, dim)
        out, lse = self.attend(folded, keys, values, False, self.mask, scale)
        return out.reshape(rows, heads, dim), lse.reshape(rows, heads)


class _Short:
    """Rows of a few query tokens, padded to the longest by repeating their last token."""

    def __init__(self, call: BatchCall, dtype: torch.dtype, window: int | None, attend: Attend) -> None:
        self.attend = attend
        rows, count, longest = len(call.starts), max(call.counts), max(call.lengths)
        starts, counts = torch.tensor(call.starts)[:, None], torch.tensor(call.counts)[:, None]
        number = torch.arange(count)[None, :].minimum(counts - 1)
        self.padded = (starts + number).flatten()
        self.kept = (torch.arange(count)[None, :] < counts).flatten().nonzero().squeeze(1)
        self.index: Index = _index(self.padded[self.kept].tolist())
        self.rows, self.count = rows, count
        ids = torch.tensor([block for row in call.blocks for block in row])
        self.context = _Context(0, ids, rows, longest)
        last = torch.tensor(call.lengths)[:, None] - counts + number
        places = torch.arange(longest)[None, None, :]
        hidden = places > last[:, :, None]
        if window is not None:
            hidden |= places <= last[:, :, None] - window
        self.mask = torch.zeros(rows, 1, count, 1, longest, dtype=dtype)
        self.mask.masked_fill_(hidden[:, None, :, None, :], -torch.inf)

    def run(self, q: Tensor, kv: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Output [tokens, Hq, D] and log-sum-exp [tokens, Hq] of the call's tokens."""
        keys, values = self.context.read(kv, q.dtype)
        rows, count, heads, dim = self.rows, self.count, q.shape[1], q.shape[2]
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        query = q.index_select(0, self.padded).view(rows, count, kv_heads, group, dim)
        query = query.transpose(1, 2).reshape(rows, kv_heads, count * group, dim)
        mask = self.mask.expand(-1, -1, -1, group, -1).reshape(rows, 1, count * group, -1)
        out, lse = self.attend(query, keys, values, False, mask, scale)
        out = out.view(rows, kv_heads, count, group, dim).transpose(1, 2).reshape(-1, heads, dim)
        lse = lse.view(rows, kv_heads, count, group).transpose(1, 2).reshape(-1, heads)
        return out.index_select(0, self.kept), lse.index_select(0, self.kept)


class _Extend:
    def __init__(self, call: ExtendCall, dtype: torch.dtype, window: int | None, attend: Attend) -> None:
        self.attend = attend
        self.index = slice(call.start, call.start + call.count)
        self.count, self.cached = call.count, call.length - call.count
        if is_run(call.blocks):
            self.context = _Context(call.blocks[0], None, 1, call.length)
        else:
            self.context = _Context(0, torch.tensor(call.blocks), 1, call.length)
        self.mask: Tensor | None = None  # where a window hides some of the context
        if window is not None and call.length > window:
            places, ends = torch.arange(call.length)[None, :], torch.arange(self.cached, call.length)[:, None]
            hidden = (places > ends) | (places <= ends - window)
            self.mask = torch.zeros(1, 1, call.count, call.length, dtype=dtype).masked_fill_(hidden, -torch.inf)

    def run(self, q: Tensor, kv: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Output [count, Hq, D] and log-sum-exp [count, Hq]: the chunk itself causally, what was cached in full."""
        keys, values = self.context.read(kv, q.dtype)
        count, heads, dim = self.count, q.shape[1], q.shape[2]
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        # KV heads as the batch, their query heads as heads over one K and V (stride 0).
        query = q[self.index].reshape(count, kv_heads, group, dim).permute(1, 2, 0, 3)

        def shared(x: Tensor) -> Tensor:
            return x.transpose(0, 1).expand(kv_heads, group, -1, dim)

        cached, attend = self.cached, self.attend
        if self.mask is not None:
            out, lse = attend(query, shared(keys), shared(values), False, self.mask, scale)
            return out.permute(2, 0, 1, 3).reshape(count, heads, dim), lse.permute(2, 0, 1).reshape(count, heads)
        out, lse = attend(query, shared(keys[:, :, cached:]), shared(values[:, :, cached:]), True, None, scale)
        if cached:
            before, before_lse = attend(
                query, shared(keys[:, :, :cached]), shared(values[:, :, :cached]), False, None, scale
            )
            out, lse = _merge(out, lse, before, before_lse)
        return out.permute(2, 0, 1, 3).reshape(count, heads, dim), lse.permute(2, 0, 1).reshape(count, heads)


class _Prefix:
    def __init__(self, call: PrefixCall, block_size: int, attend: Attend) -> None:
        self.attend = attend
        self.index = _index(call.tokens)
        tokens = len(call.blocks) * block_size
        if is_run(call.blocks):
            self.context = _Context(call.blocks[0], None, 1, tokens)
        else:
            self.context = _Context(0, torch.tensor(call.blocks), 1, tokens)

    def run(self, q: Tensor, kv: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Output [tokens, Hq, D] and log-sum-exp [tokens, Hq] over the shared prefix alone."""
        keys, values = self.context.read(kv, q.dtype)
        picked = q[self.index]
        rows, heads, dim = picked.shape
        kv_heads = keys.shape[1]
        # All rows and the group's heads become the query dimension: one matrix product a KV head.
        folded = picked.reshape(rows, kv_heads, -1, dim).transpose(0, 1).reshape(1, kv_heads, -1, dim)
        out, lse = self.attend(folded, keys, values, False, None, scale)
        out = out.view(kv_heads, rows, -1, dim).transpose(0, 1).reshape(rows, heads, dim)
        return out, lse.view(kv_heads, rows, -1).transpose(0, 1).reshape(rows, heads)


def _merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint contexts; outputs [..., D] with log-sum-exps [...]."""
    weight = torch.sigmoid(other_lse - lse).unsqueeze(-1)
    merged = torch.lerp(out.float(), other.float(), weight.float()).to(out.dtype)
    return merged, torch.logaddexp(lse, other_lse)


class _Step:
    """A step's plan with its index tensors and masks made."""

    def __init__(
        self,
        meta: AttentionMetadata,
        block_size: int,
        dtype: torch.dtype,
        window: int | None,
        softcap: float | None,
    ) -> None:
        query_lens, seq_lens = meta.lengths()
        attend = _fused if softcap is None else partial(_capped, softcap)
        how = dtype, window, attend
        width = -(-max(seq_lens, default=0) // block_size)
        plan = plan_step(query_lens, seq_lens, meta.block_tables[:, :width].tolist(), block_size, window)
        self.idle = _index(plan.idle) if plan.idle else None
        self.calls: list[_Decode | _Short | _Extend] = [_Decode(call, *how) for call in plan.decodes]
        self.calls += [_Short(call, *how) for call in plan.shorts]
        self.calls += [_Extend(call, *how) for call in plan.extends]
        self.prefixes = [_Prefix(call, block_size, attend) for call in plan.prefixes]
        self.single = len(self.calls) == 1 and not self.prefixes and self.idle is None

    def run(self, q: Tensor, kv: Tensor, scale: float) -> Tensor:
        if self.single:
            return self.calls[0].run(q, kv, scale)[0]
        out = torch.empty_like(q)
        lses = torch.empty(q.shape[:2], dtype=torch.float32) if self.prefixes else None
        for call in self.calls:
            out[call.index], lse = call.run(q, kv, scale)
            if lses is not None:
                lses[call.index] = lse
        for prefix in self.prefixes:
            assert lses is not None
            part, lse = prefix.run(q, kv, scale)
            out[prefix.index] = _merge(out[prefix.index], lses[prefix.index], part, lse)[0]
        if self.idle is not None:
            out[self.idle] = 0
        return out


def paged_attention(
    q: Tensor,
    kv: Tensor,
    meta: AttentionMetadata,
    scale: float,
    kv_scales: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """As `attention.paged_attention`, on CPU tensors of one dtype (float32, bfloat16 or float16; the cache may be in
    FP8), float32 inside."""
    key = ("cpu", kv.shape[3], q.dtype, window, softcap)
    step: _Step | None = meta.plan_cache.get(key)
    if step is None:
        step = meta.plan_cache[key] = _Step(meta, kv.shape[3], q.dtype, window, softcap)
    kv_scales = checked_scales(kv, kv_scales)
    if kv_scales is None:
        return step.run(q, kv, scale)
    # The scales of K and V belong to heads: to multiply q and the result by them is less work.
    of_heads = kv_scales.repeat_interleave(q.shape[1] // kv.shape[1], dim=1).to(q.dtype).unsqueeze(-1)
    return step.run(q * of_heads[0], kv, scale) * of_heads[1]
