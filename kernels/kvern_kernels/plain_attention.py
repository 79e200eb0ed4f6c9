"""Paged attention with windows and soft caps in plain torch operations: what a GPU runs where its kernels know neither.
The reference is `attention.py`.

Decode rows are computed together, prompts one by one and a piece of their tokens at a time, so that neither a gathered
context nor the scores outgrow what the device has to spare. Lengths come from the host: a CUDA graph cannot record it.
"""

import torch
from torch import Tensor

from .attention import first_seen, soft_cap
from .kv_cache import as_bytes, checked_scales
from .metadata import AttentionMetadata

MOST_NUMBERS = 1 << 26  # of K and V, or of scores, in float32 at a time


def paged_attention(
    q: Tensor,
    kv: Tensor,
    meta: AttentionMetadata,
    scale: float,
    kv_scales: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """As `attention.paged_attention`."""
    kv_scales = checked_scales(kv, kv_scales)
    query_lens, seq_lens = meta.lengths()
    out = torch.zeros_like(q)
    _, kv_heads, _, size, dim = kv.shape
    row = 0
    while row < len(query_lens) and query_lens[row] == 1:
        blocks = _width(seq_lens[row], window, size)
        last = row + 1
        while last < len(query_lens) and query_lens[last] == 1:
            wider = max(blocks, _width(seq_lens[last], window, size))
            if 2 * kv_heads * dim * size * wider * (last + 1 - row) > MOST_NUMBERS:
                break
            blocks, last = wider, last + 1
        ones = [1] * (last - row)
        _attend(out, q, kv, meta, row, row, ones, seq_lens[row:last], scale, kv_scales, window, softcap)
        row = last
    start = row
    for number in range(row, len(query_lens)):
        count, length = query_lens[number], seq_lens[number]
        step = max(1, MOST_NUMBERS // (q.shape[1] * max(length, 1)))
        for first in range(0, count, step):
            piece = min(step, count - first)
            end = length - count + first + piece
            _attend(out, q, kv, meta, number, start + first, [piece], [end], scale, kv_scales, window, softcap)
        start += count
    return out


def _width(length: int, window: int | None, size: int) -> int:
    """Blocks that the last of `length` tokens sees anything of."""
    return -(-length // size) - first_seen(length, 1, window, size)


def _attend(
    out: Tensor,
    q: Tensor,
    kv: Tensor,
    meta: AttentionMetadata,
    row: int,
    token: int,
    counts: list[int],
    lengths: list[int],
    scale: float,
    kv_scales: Tensor | None,
    window: int | None,
    softcap: float | None,
) -> None:
    """Attention of the rows from `row` on, equally many tokens each from `token` on, which are the last of the first
    `lengths` of their contexts. Rows of length 0 are left as they are."""
    _, kv_heads, _, size, dim = kv.shape
    rows, count, device = len(counts), counts[0], q.device
    firsts = [first_seen(length, count, window, size) for length in lengths]
    width = max(-(-length // size) - first for length, first in zip(lengths, firsts, strict=True))
    if width <= 0:
        return
    begin, ends = torch.tensor([firsts, lengths], device=device).unsqueeze(2).unbind(0)  # [R, 1] each
    table = meta.block_tables[row : row + rows]
    places = (begin + torch.arange(width, device=device)).clamp_(max=table.shape[1] - 1)
    blocks = table.gather(1, places).clamp_(min=0).flatten()
    picked = as_bytes(kv).index_select(2, blocks).view(kv.dtype).view(2, kv_heads, rows, width * size, dim).float()
    if kv_scales is not None:
        picked *= kv_scales[:, :, None, None, None]
    keys, values = picked  # [Hkv, R, L, D]
    group = q.shape[1] // kv_heads
    # [R * n, Hq, D] -> [Hkv, R, n * group, D]: the heads of a group are query tokens of their KV head.
    query = q[token : token + rows * count].float().view(rows, count, kv_heads, group, dim)
    query = query.permute(2, 0, 1, 3, 4).reshape(kv_heads, rows, count * group, dim)
    scores = soft_cap(query @ keys.transpose(-1, -2) * scale, softcap)
    seen_from = begin * size + torch.arange(width * size, device=device)  # [R, L] positions
    own = (ends - count + torch.arange(count, device=device)).unsqueeze(2)  # [R, n, 1] positions of the tokens
    hidden = seen_from.unsqueeze(1) > own
    if window is not None:
        hidden |= seen_from.unsqueeze(1) <= own - window
    scores = scores.view(kv_heads, rows, count, group, -1).masked_fill_(hidden[None, :, :, None], float("-inf"))
    found = scores.softmax(dim=-1).view(kv_heads, rows, count * group, -1) @ values
    found = found.view(kv_heads, rows, count, group, dim).permute(1, 2, 0, 3, 4).reshape(rows * count, -1, dim)
    idle = (ends == 0).repeat_interleave(count, dim=0).unsqueeze(2)
    out[token : token + rows * count] = found.masked_fill(idle, 0).to(q.dtype)
