"""Rotary embedding (Su et al., arXiv 2104.09864), optional QK-norm, and the write of K and V into the paged cache:
torch reference. The Triton kernel is in `rotary_triton.py`.

Rotation is in halves, as in Hugging Face's Llama: (x1 | x2) -> (x1 cos - x2 sin | x2 cos + x1 sin).
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` [T, H, D] rotated by `cos` and `sin` [T, 1, D/2]; float32 inside, x's dtype out."""
    half = cos.shape[-1]
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    first, second = x[..., :half].float(), x[..., half:].float()
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
    return out.to(x.dtype)


def write_kv(k: Tensor, v: Tensor, kv: Tensor, slots: Tensor) -> None:
    """Write `k` and `v` [T, Hkv, D] at `slots` [T] of `kv` [2, Hkv, N, bs, D]; slots of -1 are left out."""
    flat = kv.view(2, kv.shape[1], -1, kv.shape[-1])
    if slots.shape[0] == 1:
        slot = int(slots[0])
        if slot >= 0:
            flat[0, :, slot].copy_(k[0])
            flat[1, :, slot].copy_(v[0])
        return
    if bool((slots < 0).any()):
        keep = slots >= 0
        k, v, slots = k[keep], v[keep], slots[keep]
    flat[0].index_copy_(1, slots, k.transpose(0, 1).to(kv.dtype))
    flat[1].index_copy_(1, slots, v.transpose(0, 1).to(kv.dtype))


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
) -> Tensor:
    """Rotate q and k at `positions`, write k and v to the cache, return q rotated.

    Shapes: `q` [T, Hq, D], `k` and `v` [T, Hkv, D] (strided views are fine), `cos_sin` [max_pos, D] float32 (cos of the
    D/2 frequencies, then sin), `positions` [T] int64, `kv` [2, Hkv, N, bs, D], `slots` [T] int64 (-1: write nothing).
    `q_norm` and `k_norm` [D]: RMSNorm weights applied a head before the rotation (Qwen3). Returns [T, Hq, D] of q's dtype.
    """
    if q_norm is not None:
        q = F.rms_norm(q, q_norm.shape, q_norm, eps)
    if k_norm is not None:
        k = F.rms_norm(k, k_norm.shape, k_norm, eps)
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    write_kv(rotate(k, cos, sin), v, kv, slots)
    return rotate(q, cos, sin)
