"""Rotary embedding (Su et al., arXiv 2104.09864), optional QK-norm, and the write of K and V into the paged cache:
torch reference. The Triton kernel is in `rotary_triton.py`.

Rotation is in halves, as in Hugging Face's Llama: (x1 | x2) -> (x1 cos - x2 sin | x2 cos + x1 sin).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .kv_cache import as_bytes, checked_scales, quantize
from .norm import rms_norm


@dataclass
class _Rows:
    """What the layers of a step share: (cos | cos) and (-sin | sin) [T, 1, D], and where K and V are written."""

    cos: Tensor
    sin: Tensor
    slot: int | None  # of a single token
    slots: Tensor
    kept: Tensor | None  # the tokens that are written, where not all are

    @classmethod
    def of(cls, cos_sin: Tensor, positions: Tensor, slots: Tensor) -> "_Rows":
        cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
        slot = int(slots[0]) if slots.shape[0] == 1 else None
        kept = None
        if slot is None and bool((slots < 0).any()):
            kept = (slots >= 0).nonzero().squeeze(1)
            slots = slots[kept]
        return cls(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1), slot, slots, kept)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` [T, H, D] rotated by (cos | cos) and (-sin | sin), [T, 1, D]; float32 inside, x's dtype out."""
    wide = x.float()
    swapped = wide.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(wide * cos, swapped, sin).to(x.dtype)


def _write(part: Tensor, arena: Tensor, rows: _Rows, scales: Tensor | None) -> None:
    """Write `part` [T, Hkv, D] to `arena` [Hkv, N, bs, D] at the rows' slots; `scales` [Hkv] of an arena in FP8."""
    if scales is not None:
        part, arena = as_bytes(quantize(part, scales)), as_bytes(arena)
    heads, _, _, dim = arena.shape
    if rows.slot is not None:
        if rows.slot >= 0:
            offset = arena.storage_offset() + rows.slot * dim
            arena.as_strided((heads, dim), (arena.stride(0), 1), offset).copy_(part[0])
        return
    if rows.kept is not None:
        part = part.index_select(0, rows.kept)
    arena.view(heads, -1, dim).index_copy_(1, rows.slots, part.transpose(0, 1).to(arena.dtype))


def _adjacent(q: Tensor, k: Tensor) -> bool:
    """Whether k's heads follow q's in memory, as in views of one projection's output."""
    gap = k.data_ptr() - q.data_ptr()
    return q.stride() == k.stride() and q.stride(2) == 1 and gap == q.shape[1] * q.stride(1) * q.element_size()


def _scaled(parts: tuple[Tensor, ...], scales: Tensor, columns: Tensor | None) -> list[Tensor]:
    """The `parts` [T, H, D] of a projection times the `scales` of their rows and the `columns` of their outputs."""
    found: list[Tensor] = []
    at = 0
    for part in parts:
        wide = part.float() * scales.view(-1, 1, 1)
        width = part.shape[1] * part.shape[2]
        if columns is not None:
            wide *= columns[at : at + width].view(part.shape[1:])
        at += width
        found.append(wide.to(part.dtype))
    return found


def rope_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    kv: Tensor,
    slots: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    cache: dict[Any, Any] | None = None,
    scales: Tensor | None = None,
    columns: Tensor | None = None,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Rotate q and k at `positions`, write k and v to the cache, return q rotated.

    Shapes: `q` [T, Hq, D], `k` and `v` [T, Hkv, D] (strided views are fine), `cos_sin` [max_pos, D] float32 (cos of the
    D/2 frequencies, then sin), `positions` [T] int64, `kv` [2, Hkv, N, bs, D], `slots` [T] int64 (-1: write nothing).
    `q_norm` and `k_norm` [D]: RMSNorm weights applied a head before the rotation (Qwen3). Returns [T, Hq, D] in q's
    dtype. `scales` [T] and `columns` [(Hq + 2 Hkv) D] float32: q, k and v are still to be multiplied by them
    (`ScaledRows`). `kv_scales` [2, Hkv]: of a cache in FP8, see `kv_cache.py`. `cache`, a step's
    `AttentionMetadata.plan_cache`, lets a step's layers share what depends on the positions and slots alone.
    """
    kv_scales = checked_scales(kv, kv_scales)
    if scales is not None:
        q, k, v = _scaled((q, k, v), scales, columns)
    key = ("rotary", cos_sin.data_ptr())
    rows = cache.get(key) if cache is not None else None
    if rows is None:
        rows = _Rows.of(cos_sin, positions, slots)
        if cache is not None:
            cache[key] = rows
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
    heads, kv_heads = q.shape[1], k.shape[1]
    if _adjacent(q, k):
        both = q.as_strided((q.shape[0], heads + kv_heads, q.shape[2]), q.stride())
    else:
        both = torch.cat((q, k), dim=1)
    rotated = rotate(both, rows.cos, rows.sin)
    of_keys, of_values = (None, None) if kv_scales is None else kv_scales.unbind(0)
    _write(rotated[:, heads:], kv[0], rows, of_keys)
    _write(v, kv[1], rows, of_values)
    return rotated[:, :heads]
