"""Grouped-query attention over the paged KV cache: splits the merged projection and calls the kernels."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvern_kernels import (
    AttentionMetadata,
    BlockScaledRows,
    ScaledRows,
    attention_gives_blocks,
    paged_attention,
    paged_attention_blocks,
    quantize_rows,
    rope_and_cache,
)


@dataclass
class Wanted:
    """The only tokens whose hidden states a step needs, S of them: `index` [S] int64 in the flat batch, and `meta`, in
    which each is a row of its own with one query token. The last layer computes no others."""

    index: Tensor
    meta: AttentionMetadata


class Attention:
    """`num_heads` query heads share `num_kv_heads` KV heads of `head_dim` (Ainslie et al., arXiv 2305.13245).

    `window`: a token sees itself and the `window - 1` before it (Beltagy et al., arXiv 2004.05150; None: all). Scores
    are multiplied by `scale`, then softly capped at `softcap` (None: not).

    `kv_scales` [2, num_kv_heads] float32: what K and V of each head are divided by in a cache in FP8. `q_norm`,
    `k_norm` [head_dim]: weights of an RMSNorm of each head of q and k with `norm_eps` (Henry et al., arXiv 2010.04245).
    """

    __slots__ = (
        "_dtype",
        "_split",
        "head_dim",
        "k_norm",
        "kv_scales",
        "norm_eps",
        "num_kv_heads",
        "q_norm",
        "scale",
        "softcap",
        "window",
    )

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> None:
        self._dtype = dtype
        self._split = [num_heads, num_kv_heads, num_kv_heads]
        self.head_dim, self.num_kv_heads = head_dim, num_kv_heads
        self.scale = head_dim**-0.5 if scale is None else scale
        self.window, self.softcap = window, softcap
        self.kv_scales: Tensor | None = None
        self.q_norm: Tensor | None = None
        self.k_norm: Tensor | None = None
        self.norm_eps = 0.0

    def __call__(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        kv: Tensor,
        meta: AttentionMetadata,
        wanted: Wanted | None = None,
    ) -> Tensor:
        """`qkv` [T, (Hq + 2 Hkv) * D], maybe in parts to add up [P, T, ...] float32, `positions` [T] int64, `cos_sin`
        [max_positions, D] float32, `kv` [2, Hkv, N, bs, D] (K and V of this step are written to it) -> [T, Hq * D], or
        [S, Hq * D] where S tokens are wanted."""
        q = self._queries(qkv, positions, cos_sin, kv, meta)
        return self._attend(q, kv, meta, wanted)

    def fp8(
        self,
        qkv: ScaledRows,
        positions: Tensor,
        cos_sin: Tensor,
        kv: Tensor,
        meta: AttentionMetadata,
        wanted: Wanted | None,
        by_blocks: bool,
    ) -> ScaledRows | BlockScaledRows:
        """As a call with a product in FP8, `qkv`; the result in FP8 too, quantized by blocks where `by_blocks` and the
        kernels do that, or by rows."""
        q = self._queries(qkv.values, positions, cos_sin, kv, meta, qkv.scales, qkv.columns)
        step = meta if wanted is None else wanted.meta
        if by_blocks and attention_gives_blocks(q, kv, step, self.window, self.softcap):
            q = q if wanted is None else q.index_select(0, wanted.index)
            return paged_attention_blocks(q, kv, step, self.scale)
        return quantize_rows(self._attend(q, kv, meta, wanted))

    def _queries(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        kv: Tensor,
        meta: AttentionMetadata,
        scales: Tensor | None = None,
        columns: Tensor | None = None,
    ) -> Tensor:
        """The rotated queries [T, Hq, D]; K and V are written. `scales` [T] and `columns` [(Hq + 2 Hkv) * D] float32:
        what `qkv` is still to be multiplied by."""
        q, k, v = torch.split(qkv.view(*qkv.shape[:-1], -1, self.head_dim), self._split, dim=-2)
        return rope_and_cache(
            q,
            k,
            v,
            cos_sin,
            positions,
            kv,
            meta.slots,
            self.q_norm,
            self.k_norm,
            self.norm_eps,
            cache=meta.plan_cache,
            scales=scales,
            columns=columns,
            kv_scales=self.kv_scales,
            dtype=self._dtype,
        )

    def _attend(self, q: Tensor, kv: Tensor, meta: AttentionMetadata, wanted: Wanted | None) -> Tensor:
        """[T, Hq * D], or [S, Hq * D] of the tokens that are wanted."""
        if wanted is not None:
            q, meta = q.index_select(0, wanted.index), wanted.meta
        out = paged_attention(q, kv, meta, self.scale, self.kv_scales, self.window, self.softcap)
        return out.view(q.shape[0], self._split[0] * self.head_dim)
