"""Compiles the kernels of a decode step for a Hopper GPU, on any machine: the interpreter, which runs them in tests,
takes what the compiler refuses. Run by `test_compiled_for_hopper.py`.
"""

import re

import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from kvern_kernels import launch_triton, split_kv

launch_triton._EARLY = tl.constexpr(True)  # before the kernels see it: there is no such GPU here

from kvern_kernels import (  # noqa: E402
    decode_attention_triton,
    decode_fp8_triton,
    decode_plan_triton,
    fp8_triton,
    norm_triton,
    rotary_triton,
)

HOPPER = GPUTarget("cuda", 90, 32)
INTS = ("pieces_ptr", "table_ptr", "query_start_ptr", "seq_lens_ptr", "merges_ptr", "lengths_ptr", "candidates_ptr")
TYPES = {
    **dict.fromkeys(INTS, "*i32"),
    **dict.fromkeys(("q_ptr", "kv_ptr", "out_ptr"), "*bf16"),
    **dict.fromkeys(("partial_ptr", "stats_ptr", "kv_scales_ptr", "out_scales_ptr"), "*fp32"),
    "scale_log2": "fp32",
}


def compiled(kernel, constants, types=(), **options):
    """The machine code of `kernel`; what is neither constant nor named is an int32."""
    named = {**TYPES, **dict(types)}
    signature = {name: "constexpr" if name in constants else named.get(name, "i32") for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    made = compile(source, target=HOPPER, options={"launch_pdl": True, **options})
    ahead, wait, _ = made.asm["ptx"].partition("griddepcontrol.wait")
    assert wait
    # Whatever came earlier has ended behind the wait alone: nothing is written sooner, so that nobody still reads it.
    assert not re.search(r"\b(st|atom|red)\.", ahead)
    made.ahead = re.findall(r"\bld\.global\S*", ahead)
    return made


heads = {"GROUP": 4, "D": 128}
tile = {**heads, "KV_HEADS": 8, "BS": 16, "BLOCK_M": 16}
for max_q in (1, 8):
    case = {**tile, "MAX_Q": max_q, "BLOCK_M": max(16, 4 * max_q)}
    half = {**case, "WORDS": 64, "BLOCK_N": 128}
    compiled(decode_fp8_triton.decode_fp8_kernel, half, {"kv_ptr": "*i16"}, num_warps=4, num_stages=2)
    for quantize, out in ((False, "*bf16"), (True, "*fp8e4nv")):
        full = {**case, "D_BLOCK": 128, "BLOCK_N": 64, "PRECISION": "tf32", "QUANTIZE": quantize}
        compiled(decode_attention_triton._decode_kernel, full, {"out_ptr": out}, num_warps=4, num_stages=3)
        for pieces, warps in ((split_kv.MAX_PIECES, 4), (8, 1)):
            merge = {**heads, "HEADS": 32, "MAX_Q": max_q, "D_BLOCK": 128, "PIECES": pieces, "QUANTIZE": quantize}
            compiled(decode_attention_triton._merge_kernel, merge, {"out_ptr": out}, num_warps=warps)
for rows, given in ((16, False), (256, False), (1024, False), (64, True)):
    plan = {"GIVEN": given, "TILE": 64, "ROWS": rows, "EACH": 16}
    compiled(decode_plan_triton._plan_kernel, plan, num_warps=4 if rows <= 64 else 8)
norm_types = {
    **dict.fromkeys(("residual_ptr", "weight_ptr", "out_ptr"), "*bf16"),
    **dict.fromkeys(("scales_ptr", "columns_ptr", "out_scales_ptr"), "*fp32"),
    "eps": "fp32",
}
for parts, x_type in ((1, "*bf16"), (2, "*fp32")):
    summed = {"PARTS": parts, "ADD": True, "BLOCK": 4096}
    plain = compiled(norm_triton._rms_norm_kernel, summed, {**norm_types, "x_ptr": x_type}, num_warps=8)
    fp8_norm = {**summed, "SCALED": True, "COLUMNS": True, "NORM": True, "QUANTIZE": True}
    types = {**norm_types, "x_ptr": x_type, "out_ptr": "*fp8e4nv"}
    quantized = compiled(fp8_triton._norm_kernel, fp8_norm, types, num_warps=8)
    rope = {"SCALED": parts > 1, "COLUMNS": False, "QUANTIZE": False, "HEADS": 32, "KV_HEADS": 8, "HALF": 64}
    rope |= {"HALF_BLOCK": 64, "HEAD_BLOCK": 4, "Q_NORM": False, "K_NORM": True, "PARTS": parts}
    types = {
        **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), x_type),
        **dict.fromkeys(("out_ptr", "kv_ptr", "q_norm_ptr", "k_norm_ptr"), "*bf16"),
        **dict.fromkeys(("cos_sin_ptr", "scales_ptr", "columns_ptr", "kv_scales_ptr"), "*fp32"),
        **dict.fromkeys(("positions_ptr", "slots_ptr"), "*i64"),
        "eps": "fp32",
    }
    rotary = compiled(rotary_triton._rope_kernel, rope, types, num_warps=4)
    # What a step writes is read ahead behind a product alone, past the L1 cache.
    for made in (plain, quantized, rotary):
        assert any(".cg" in load for load in made.ahead) == (parts > 1)
    assert parts > 1 or not rotary.ahead
print("compiled")
