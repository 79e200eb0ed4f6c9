"""Kvern's kernels: the operations of a decoder-only transformer over a paged KV cache, on CPUs and GPUs.

The KV cache of one layer is `kv` [2, num_kv_heads, num_blocks, block_size, head_dim], 0 = K and 1 = V; a slot is
block * block_size + offset. Importing this package does not import Triton.
"""

from .decode_inputs import DecodeInputs
from .dispatch import (
    add_linear,
    add_rms_norm,
    add_rms_norm_fp8,
    add_rms_norm_scaled,
    attention_gives_blocks,
    fp8_gated_linear,
    fp8_linear,
    fp8_linear_parts,
    gated_linear,
    gather_decode_inputs,
    int8_linear,
    invariant_linear,
    linear_parts,
    paged_attention,
    paged_attention_blocks,
    quantize_rows,
    restore_rows,
    rms_norm,
    rms_norm_fp8,
    rope_and_cache,
    sample_tokens,
    silu_and_mul,
    silu_and_mul_fp8,
    takes_blocks,
)
from .fp8 import BlockScaledRows, Fp8Weight, ScaledRows, largest_of, unscaled
from .int8 import MOST_ROWS as INT8_ROWS
from .int8 import Int8Weight
from .metadata import AttentionMetadata, DecodeWorkspace, DeviceRows
from .sampling import SamplingTables

__all__ = [
    "INT8_ROWS",
    "AttentionMetadata",
    "BlockScaledRows",
    "DecodeInputs",
    "DecodeWorkspace",
    "DeviceRows",
    "Fp8Weight",
    "Int8Weight",
    "SamplingTables",
    "ScaledRows",
    "add_linear",
    "add_rms_norm",
    "add_rms_norm_fp8",
    "add_rms_norm_scaled",
    "attention_gives_blocks",
    "fp8_gated_linear",
    "fp8_linear",
    "fp8_linear_parts",
    "gated_linear",
    "gather_decode_inputs",
    "int8_linear",
    "invariant_linear",
    "largest_of",
    "linear_parts",
    "paged_attention",
    "paged_attention_blocks",
    "quantize_rows",
    "restore_rows",
    "rms_norm",
    "rms_norm_fp8",
    "rope_and_cache",
    "sample_tokens",
    "silu_and_mul",
    "silu_and_mul_fp8",
    "takes_blocks",
    "unscaled",
]
