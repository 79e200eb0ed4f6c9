"""Which implementation an operation runs: Triton on CUDA, the CPU path on a CPU, the plain reference on demand.

KVERN_KERNELS=reference forces the plain torch references everywhere; KVERN_KERNELS=triton forces the Triton kernels,
also on CPU tensors (with TRITON_INTERPRET=1). Read once, at import. Triton is imported only where it is used.
"""

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import (
    activation,
    attention,
    cpu_attention,
    decode_inputs,
    fp8,
    hopper_product,
    hopper_stream,
    int8,
    large_products,
    norm,
    plain_attention,
    rotary,
    sampling,
)
from .decode_inputs import DecodeInputs
from .each_alone import attend_each_alone
from .fp8 import BlockScaledRows, Fp8Weight, ScaledRows
from .int8 import Int8Weight
from .invariant_gemm import invariant_linear as plain_invariant_linear
from .metadata import AttentionMetadata
from .sampling import SamplingTables

CHOICES = ("", "auto", "reference", "triton")
_FORCED = os.environ.get("KVERN_KERNELS", "")
if _FORCED not in CHOICES:
    raise ValueError(f"KVERN_KERNELS must be 'auto', 'reference' or 'triton', got {_FORCED!r}")


_ADDING_ROWS = 1024


def _triton(x: Tensor) -> bool:
    return _FORCED == "triton" or (x.is_cuda and _FORCED != "reference")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight. `x` [T, H], `weight` [H]; returns [T, H]."""
    if _triton(x):
        from . import norm_triton

        return norm_triton.rms_norm(x, weight, eps)
    return norm.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual). All [T, H]; the sum overwrites `residual`. `x` may come in parts, see
    `linear_parts`."""
    if _triton(x):
        from . import norm_triton

        if x.dim() == 3:
            return norm_triton.add_rms_norm_parts(x, residual, weight, eps)
        return norm_triton.add_rms_norm(x, residual, weight, eps)
    return norm.add_rms_norm(x, residual, weight, eps)


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
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Optional QK-norm, rotary embedding of q and k, and the write of k and v to the cache; see `rotary.py`.

    q, k and v may come in parts that `linear_parts` gives, [P, T, H, D]; `dtype` is then that of the result.
    `cache`: the step's `AttentionMetadata.plan_cache`, where the caller has one; on a CPU its layers share work by it.
    """
    common = (q, k, v, cos_sin, positions, kv, slots, q_norm, k_norm, eps)
    if _triton(q):
        from . import rotary_triton

        return rotary_triton.rope_and_cache(*common, scales, columns, kv_scales, dtype)
    return rotary.rope_and_cache(*common, cache, scales, columns, kv_scales)


def paged_attention(
    q: Tensor,
    kv: Tensor,
    meta: AttentionMetadata,
    scale: float,
    kv_scales: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention of decode and prefill rows over the paged cache in one call; see `attention.py`. `kv_scales`
    [2, Hkv] float32: of a cache in FP8.

    The Triton kernels know neither windows nor soft caps: on a GPU such layers run plain operations
    (`plain_attention.py`), which a CUDA graph cannot record. Raises RuntimeError in one.
    """
    if meta.each_alone and not (_triton(q) and window is None and softcap is None):
        return attend_each_alone(
            q, meta, lambda row, own: paged_attention(row, kv, own, scale, kv_scales, window, softcap)
        )
    if _triton(q):
        if window is None and softcap is None:
            from . import attention_triton

            return attention_triton.paged_attention(q, kv, meta, scale, kv_scales)
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("attention with a window or a soft cap cannot be recorded in a CUDA graph")
        return plain_attention.paged_attention(q, kv, meta, scale, kv_scales, window, softcap)
    if _FORCED == "reference":
        return attention.paged_attention(q, kv, meta, scale, kv_scales, window, softcap)
    return cpu_attention.paged_attention(q, kv, meta, scale, kv_scales, window, softcap)


def attention_gives_blocks(
    q: Tensor, kv: Tensor, meta: AttentionMetadata, window: int | None = None, softcap: float | None = None
) -> bool:
    """Whether `paged_attention_blocks` computes a step."""
    if not _triton(q) or window is not None or softcap is not None:
        return False
    from . import attention_triton

    return attention_triton.gives_blocks(kv, meta)


def paged_attention_blocks(q: Tensor, kv: Tensor, meta: AttentionMetadata, scale: float) -> BlockScaledRows:
    """`paged_attention` of few query tokens a row in FP8, quantized by blocks, for `fp8_linear_parts`; asked only where
    `attention_gives_blocks`."""
    from . import attention_triton

    return attention_triton.paged_attention_blocks(q, kv, meta, scale)


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up. `x` [T, 2F] = gate | up; returns [T, F]."""
    if _triton(x):
        from . import activation_triton

        return activation_triton.silu_and_mul(x)
    return activation.silu_and_mul(x)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    found = large_products.linear(x, weight, x.dtype) if x.is_cuda else None
    return F.linear(x, weight) if found is None else found


def linear_parts(x: Tensor, weight: Tensor) -> Tensor:
    """`x` [T, K] times `weight` [N, K] transposed for an operation that adds parts up (`add_rms_norm`,
    `rope_and_cache`): [T, N], or in parts, [P, T, N] float32, where few rows make that faster."""
    if x.is_cuda and _FORCED != "reference" and x.dtype != torch.float32:
        streamed = hopper_stream.linear_parts(x, weight)
        if streamed is not None:
            return streamed
        from . import small_gemm_triton

        tiles = small_gemm_triton.tiles_for(x, weight.shape[0], False)
        if tiles is not None:
            return small_gemm_triton.linear_parts(x, weight, tiles)
    return _linear(x, weight)


def gated_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`silu_and_mul` of `x` [T, K] times `weight` [2F, K] = gate | up transposed; returns [T, F]."""
    if x.is_cuda and _FORCED != "reference" and x.dtype != torch.float32:
        streamed = hopper_stream.gated_linear(x, weight)
        if streamed is not None:
            return streamed
        from . import small_gemm_triton

        tiles = small_gemm_triton.tiles_for(x, weight.shape[0] // 2, True)
        if tiles is not None:
            return small_gemm_triton.gated_linear(x, weight, tiles)
        if hopper_product.gates(x, weight):
            return hopper_product.gated_linear(x, weight)
    return silu_and_mul(_linear(x, weight))


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None, pieces: int) -> Tensor:
    """`x` [T, K] times `weight` [N, K] transposed plus `bias` [N], added up in one order; see `invariant_gemm.py`."""
    if _triton(x):
        from . import invariant_gemm_triton

        return invariant_gemm_triton.invariant_linear(x, weight, bias, pieces)
    return plain_invariant_linear(x, weight, bias, pieces)


def add_linear(x: Tensor, weight: Tensor, residual: Tensor) -> bool:
    """Adds `x` [T, K] times `weight` [N, K] transposed to `residual` [T, N], where that is faster than to let the norm
    behind it add; whether it did.

    Measured on an H200, product and norm at 8,192 rows, us: o 408 where the norm adds 429, down 1,248 where 1,273; at
    512 rows no difference.
    """
    if not x.is_cuda or x.shape[0] < _ADDING_ROWS:
        return False
    if hopper_product.adds(x, weight, residual):
        hopper_product.add_linear(x, weight, residual)
    else:
        residual.addmm_(x, weight.t())
    return True


def gather_decode_inputs(
    rows: Tensor, positions: Tensor, tokens: Tensor, block_tables: Tensor, block_size: int, with_tables: bool = True
) -> DecodeInputs:
    """A decode step's inputs from the row tables; see `decode_inputs.py`."""
    if _triton(rows):
        from . import decode_inputs_triton

        return decode_inputs_triton.decode_inputs(rows, positions, tokens, block_tables, block_size, with_tables)
    return decode_inputs.decode_inputs(rows, positions, tokens, block_tables, block_size, with_tables)


def sample_tokens(
    logits: Tensor,
    rows: Tensor,
    state: SamplingTables,
    uniform: Tensor | None,
    tokens: Tensor,
    places: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """Greedy or random tokens by each row's sampling state, also written to the token table; see `sampling.py`."""
    if _triton(logits):
        from . import sampling_triton

        return sampling_triton.sample_tokens(logits, rows, state, uniform, tokens, places, out)
    return sampling.sample_tokens(logits, rows, state, uniform, tokens, places, out)


def _fp8(x: Tensor) -> Any:
    """The module that computes FP8 operations on `x`."""
    if _triton(x):
        from . import fp8_triton

        return fp8_triton
    return fp8


def quantize_rows(x: Tensor) -> ScaledRows:
    """`x` [T, K] in FP8, each row by its largest element."""
    rows: ScaledRows = _fp8(x).quantize_rows(x)
    return rows


def int8_linear(x: Tensor, weight: Int8Weight) -> Tensor:
    """`x` [T, K] in 16 bits times `weight` [N, K] transposed: [T, N]; see `int8.py`."""
    if _triton(x):
        from . import int8_triton

        return int8_triton.int8_linear(x, weight)
    return int8.int8_linear(x, weight)


def restore_rows(x: ScaledRows, dtype: torch.dtype) -> Tensor:
    """`x` [T, K] multiplied by its scales, in `dtype`; where that is the type of its values, they are overwritten."""
    out: Tensor = _fp8(x.values).restore_rows(x, dtype)
    return out


def rms_norm_fp8(x: Tensor, weight: Tensor, eps: float) -> ScaledRows:
    """The norm of `x` [T, H], quantized by rows."""
    rows: ScaledRows = _fp8(x).rms_norm_fp8(x, weight, eps)
    return rows


def add_rms_norm_fp8(x: ScaledRows, residual: Tensor, weight: Tensor, eps: float) -> tuple[ScaledRows, Tensor]:
    """(norm of x + residual, quantized by rows; x + residual, which overwrites `residual`). All [T, H]."""
    found: tuple[ScaledRows, Tensor] = _fp8(residual).add_rms_norm_fp8(x, residual, weight, eps)
    return found


def add_rms_norm_scaled(x: ScaledRows, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` of an `x` that is still to be multiplied by its rows' scales."""
    found: tuple[Tensor, Tensor] = _fp8(residual).add_rms_norm_scaled(x, residual, weight, eps)
    return found


def silu_and_mul_fp8(x: ScaledRows) -> ScaledRows:
    """silu(gate) * up of `x` [T, 2F], quantized by rows: [T, F]."""
    rows: ScaledRows = _fp8(x.values).silu_and_mul_fp8(x)
    return rows


def takes_blocks(rows: int, weight: Fp8Weight) -> bool:
    """Whether `rows` rows are better quantized by blocks than as a whole for `fp8_linear_parts` with `weight`."""
    return _FORCED != "reference" and hopper_stream.takes_blocks(rows, weight)


def fp8_linear_parts(x: ScaledRows | BlockScaledRows, weight: Fp8Weight, dtype: torch.dtype) -> ScaledRows:
    """`fp8_linear`, its values maybe in parts to add up, [P, T, N] float32; see `linear_parts`."""
    if isinstance(x, BlockScaledRows):
        parts = hopper_stream.fp8_block_linear_parts(x, weight)
        return fp8.fp8_block_linear(x, weight, dtype) if parts is None else parts
    if x.values.is_cuda and _FORCED != "reference":
        streamed = hopper_stream.fp8_linear_parts(x, weight)
        if streamed is not None:
            return streamed
        from . import small_gemm_triton

        tiles = small_gemm_triton.tiles_for(x.values, weight.values.shape[0], False)
        if tiles is not None:
            return small_gemm_triton.fp8_linear_parts(x, weight, tiles)
    return fp8_linear(x, weight, dtype)


def fp8_gated_linear(
    x: ScaledRows, weight: Fp8Weight, dtype: torch.dtype, by_blocks: bool = False
) -> ScaledRows | BlockScaledRows:
    """`silu_and_mul_fp8` of `x` [T, K] times `weight` [2F, K] = gate | up transposed: [T, F] in FP8. `by_blocks`: what
    reads it takes rows that are quantized by blocks, too."""
    if x.values.is_cuda and _FORCED != "reference":
        blocks = hopper_stream.fp8_gated_blocks(x, weight) if by_blocks else None
        if blocks is not None:
            return blocks
        streamed = hopper_stream.fp8_gated_linear(x, weight, dtype)
        if streamed is not None:
            return quantize_rows(streamed)
        from . import small_gemm_triton

        tiles = small_gemm_triton.tiles_for(x.values, weight.values.shape[0] // 2, True)
        if tiles is not None:
            return quantize_rows(small_gemm_triton.fp8_gated_linear(x, weight, dtype, tiles))
        if dtype == torch.bfloat16 and weight.columns is None and hopper_product.gates(x.values, weight.values):
            return quantize_rows(hopper_product.gated_linear(x.values, weight.values, x.scales, weight.scale))
    return silu_and_mul_fp8(fp8_linear(x, weight, dtype))


def fp8_linear(x: ScaledRows, weight: Fp8Weight, dtype: torch.dtype) -> ScaledRows:
    """`x` [T, K] times `weight` [N, K] transposed in FP8; see `fp8.py`."""
    if x.values.is_cuda and _FORCED != "reference":
        from . import fp8_triton

        return fp8_triton.fp8_linear(x, weight, dtype)
    return fp8.fp8_linear(x, weight, dtype)
