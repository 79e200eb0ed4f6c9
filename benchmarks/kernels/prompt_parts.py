"""Parts of a step with prompts at Llama-3-8B's shapes, variants side by side: the residual added by the product or by
the norm, cuDNN's attention padded or with lengths of its own, SwiGLU in FP8.

    PYTHONPATH=kernels python benchmarks/kernels/prompt_parts.py --out OUT/prompt_parts.jsonl
"""

import argparse
import json
import statistics
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parent))
from timing import DIM, DTYPE, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, copies, time_calls

from kvern_kernels import ScaledRows, fp8, fp8_triton, norm_triton, vendor_attention


def in_turns(calls, turns=7):
    """Microseconds of each of the named calls, measured in turns."""
    times = {name: [] for name in calls}
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    for _ in range(turns):
        for name, call in calls.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1000)
    return {name: round(statistics.median(values), 1) for name, values in times.items()}


def residual_in_product(rows):
    """o and down: product, then residual + norm; or product onto the residual, then norm."""
    return {name: _residual_in_product(rows, inner) for name, inner in (("o", HIDDEN), ("down", INTERMEDIATE))}


def _residual_in_product(rows, inner):
    x = torch.randn(rows, inner, dtype=DTYPE, device="cuda")
    weight = torch.randn(HIDDEN, inner, dtype=DTYPE, device="cuda") * 0.02
    residual = torch.randn(rows, HIDDEN, dtype=DTYPE, device="cuda")
    scale = torch.ones(HIDDEN, dtype=DTYPE, device="cuda")
    return in_turns(
        {
            "norm adds": lambda: norm_triton.add_rms_norm(F.linear(x, weight), residual, scale, 1e-5),
            "product adds": lambda: norm_triton.rms_norm(residual.addmm_(x, weight.t()), scale, 1e-5),
            "product alone": lambda: F.linear(x, weight),
            "product onto": lambda: residual.addmm_(x, weight.t()),
        }
    )


def reference(q, k, v, lengths):
    out, first = [], 0
    for n in lengths:
        part = slice(first, first + n)
        args = (t[part].transpose(0, 1).unsqueeze(0).float() for t in (q, k, v))
        out.append(F.scaled_dot_product_attention(*args, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
        first += n
    return torch.cat(out)


def varlen(lengths, padded):
    """cuDNN with cumulative lengths against the padded calls that `attention_triton` makes."""
    total = sum(lengths)
    q = vendor_attention.empty_queries((total, HEADS, DIM), DTYPE, torch.device("cuda")).normal_()
    k, v = (torch.randn(total, KV_HEADS, DIM, dtype=DTYPE, device="cuda") for _ in range(2))
    starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    longest = -(-max(lengths) // 512) * 512
    op = torch.ops.aten._cudnn_attention_forward

    def ragged():
        return op(q, k, v, None, starts, starts, longest, longest, False, 0.0, True, False, scale=DIM**-0.5)[0]

    each = []
    for n in sorted(set(lengths)):
        count, size = lengths.count(n), -(-n // 512) * 512
        keys, values = (torch.zeros(count, KV_HEADS, size, DIM, dtype=DTYPE, device="cuda") for _ in range(2))
        each.append((q[: count * n], keys, values) if size == n else (q[:n], keys[:1], values[:1]))

    def padded_calls():
        for part, keys, values in each:
            for _ in range(1 if len(part) == keys.shape[0] * keys.shape[2] else lengths.count(len(part))):
                vendor_attention.causal_attention(part, keys, values, DIM**-0.5)

    calls = {"padded": padded_calls} if padded else {}
    found = {"lengths": f"{len(lengths)} x {lengths[0]}.."}
    try:
        got = ragged()
        if total <= 4096:
            expected = reference(q, k, v, lengths)
            found["error"] = float(f"{float((got.float() - expected).norm() / expected.norm()):.2g}")
        calls["ragged"] = ragged
    except Exception as error:
        found["ragged failed"] = str(error)[:300]
    return found | (in_turns(calls) if calls else {})


def pairs(count, length, padded):
    """`count` equal prompts, one cuDNN call each or one for all (their padding is what follows them)."""
    q = torch.randn(count * length + 1024, HEADS, DIM, dtype=DTYPE, device="cuda")[: count * length]
    keys, values = (torch.randn(count, KV_HEADS, padded, DIM, dtype=DTYPE, device="cuda") for _ in range(2))
    out = torch.empty_like(q)
    op = torch.ops.aten._scaled_dot_product_cudnn_attention
    row = HEADS * DIM

    def each():
        for i in range(count):
            part = slice(i * length, (i + 1) * length)
            out[part] = vendor_attention.causal_attention(q[part], keys[i : i + 1], values[i : i + 1], DIM**-0.5)

    def together():
        wide = q.as_strided((count, padded, HEADS, DIM), (length * row, row, DIM, 1), 0)
        got = op(wide.transpose(1, 2), keys, values, None, False, 0.0, True, False, scale=DIM**-0.5)[0]
        return got.transpose(1, 2)[:, :length].reshape(count * length, HEADS, DIM)

    each()
    difference = float((together() - out).float().norm() / out.float().norm())
    times = {name: round(time_calls([call, call]), 1) for name, call in (("each", each), ("together", together))}
    return {**times, "difference": difference}


def first_calls(lengths):
    """Milliseconds of the first and the second call at new lengths, and microseconds of one in a graph."""
    return {n: _first_calls(n) for n in lengths}


def _first_calls(n):
    q = torch.randn(n, HEADS, DIM, dtype=DTYPE, device="cuda")
    keys, values = (torch.randn(1, KV_HEADS, n, DIM, dtype=DTYPE, device="cuda") for _ in range(2))

    def call():
        return vendor_attention.causal_attention(q, keys, values, DIM**-0.5)

    took = []
    for _ in range(2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        took.append(round((time.perf_counter() - began) * 1e3, 2))
    return [*took, round(time_calls([call]), 1)]


@triton.jit
def _silu_folded(x_ptr, scales_ptr, out_ptr, out_scales_ptr, x_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < width
    scale = tl.load(scales_ptr + row)
    gate = tl.load(x_ptr + row * x_stride + offsets, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + width + offsets, mask=inside, other=0.0).to(tl.float32)
    # silu(gate s) up s = s^2 gate up / (1 + 2^(-gate s log2 e)); the s^2 goes into the row's scale.
    values = gate * up / (1.0 + tl.exp2(gate * (scale * -1.4426950408889634)))
    largest = tl.maximum(tl.max(tl.abs(values), axis=0), 1e-30)
    values = tl.minimum(tl.maximum(values * (448.0 / largest), -448.0), 448.0)
    tl.store(out_ptr + row * width + offsets, values.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out_scales_ptr + row, tl.maximum(largest * scale * scale / 448.0, 1e-12))


@triton.jit
def _silu_piece(x_ptr, scales_ptr, out_ptr, tops_ptr, x_stride, width, BLOCK: tl.constexpr):
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offsets = piece * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < width
    scale = tl.load(scales_ptr + row)
    gate = tl.load(x_ptr + row * x_stride + offsets, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + width + offsets, mask=inside, other=0.0).to(tl.float32)
    values = gate * up * scale * scale / (1.0 + tl.exp2(gate * (scale * -1.4426950408889634)))
    tl.store(out_ptr + row * width + offsets, values.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(tops_ptr + row * tl.num_programs(1) + piece, tl.max(tl.abs(values), axis=0))


@triton.jit
def _quantize_piece(x_ptr, tops_ptr, out_ptr, out_scales_ptr, width, PIECES: tl.constexpr, BLOCK: tl.constexpr):
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    number = tl.arange(0, PIECES)
    count = tl.num_programs(1)
    largest = tl.max(tl.load(tops_ptr + row * count + number, mask=number < count, other=0.0), axis=0)
    largest = tl.maximum(largest, 1e-30)
    offsets = piece * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < width
    values = tl.load(x_ptr + row * width + offsets, mask=inside, other=0.0).to(tl.float32) * (448.0 / largest)
    values = tl.minimum(tl.maximum(values, -448.0), 448.0)
    tl.store(out_ptr + row * width + offsets, values.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out_scales_ptr + row, largest / 448.0)


def silu_fp8(rows):
    sets = copies(3.0 * rows * INTERMEDIATE * 2)
    x = torch.randn(sets, rows, 2 * INTERMEDIATE, dtype=DTYPE, device="cuda") * 30
    scales = torch.rand(rows, device="cuda") * 0.05 + 0.01
    out = torch.empty(rows, INTERMEDIATE, dtype=fp8.FP8, device="cuda")
    kept = torch.empty(rows, INTERMEDIATE, dtype=DTYPE, device="cuda")
    out_scales, tops = torch.empty(rows, device="cuda"), torch.empty(rows, 64, device="cuda")
    size = x.stride(1), INTERMEDIATE
    found = {
        "now": time_calls([lambda i=i: fp8_triton.silu_and_mul_fp8(ScaledRows(x[i], scales)) for i in range(sets)])
    }
    expected = fp8_triton.silu_and_mul_fp8(ScaledRows(x[0], scales)).restore(torch.float32)
    for warps in (8, 16, 32):

        def folded(i, warps=warps):
            _silu_folded[(rows,)](x[i], scales, out, out_scales, *size, BLOCK=16384, num_warps=warps)

        found[f"folded, {warps} warps"] = time_calls([lambda i=i: folded(i) for i in range(sets)])
    folded(0)
    difference = (ScaledRows(out, out_scales).restore(torch.float32) - expected).norm() / expected.norm()
    for block, warps in ((1024, 4), (2048, 4), (2048, 8)):
        count = triton.cdiv(INTERMEDIATE, block)

        def pieces(i, block=block, warps=warps, count=count):
            _silu_piece[(rows, count)](x[i], scales, kept, tops, *size, BLOCK=block, num_warps=warps)
            _quantize_piece[(rows, count)](
                kept, tops, out, out_scales, INTERMEDIATE, PIECES=16, BLOCK=block, num_warps=warps
            )

        found[f"two kernels, {block} a program, {warps} warps"] = time_calls(
            [lambda i=i: pieces(i) for i in range(sets)]
        )
    pieces(0)
    other = (ScaledRows(out, out_scales).restore(torch.float32) - expected).norm() / expected.norm()
    return {name: round(us, 2) for name, us in found.items()} | {"differences": [float(difference), float(other)]}


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out", type=Path, required=True)
    ap.add_argument("--only", nargs="*")
    a = ap.parse_args()
    cases = [
        ("residual_in_product", residual_in_product, (8192,)),
        ("residual_in_product", residual_in_product, (512,)),
        ("varlen", varlen, ([1000, 77, 1300, 512], False)),
        ("varlen", varlen, ([8000], True)),
        ("pairs", pairs, (2, 4000, 4096)),
        ("pairs", pairs, (5, 1500, 1536)),
        ("pairs", pairs, (8, 1024, 1024)),
        ("first_calls", first_calls, ([8192, 8064, 8000, 4096, 4032, 4000, 2176, 1152, 1024],)),
        ("silu_fp8", silu_fp8, (1,)),
        ("silu_fp8", silu_fp8, (32,)),
        ("silu_fp8", silu_fp8, (8192,)),
    ]
    cases = [case for case in cases if not a.only or case[0] in a.only]
    with a.out.open("a") as file:
        for name, run, arguments in cases:
            try:
                line = {"part": name, "case": str(arguments)[:60], **run(*arguments)}
            except Exception as error:
                traceback.print_exc()
                line = {"part": name, "case": str(arguments)[:60], "failed": str(error)[:200]}
            file.write(json.dumps(line) + "\n")
            file.flush()
            print(json.dumps(line), flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
