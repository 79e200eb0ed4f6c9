#!/usr/bin/env python3
"""Products of long prompts: our kernel for Hopper beside cuBLAS, under load: correctness first, then alternating
stretches of one and the other, each long enough for the card to be at its power limit. JSON lines.

    PYTHONPATH=kernels python benchmarks/kernels/long_products.py --rows 16384 8000
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from kvern_kernels import activation_triton, fp8_triton, hopper_product, large_products
from kvern_kernels.fp8 import Fp8Weight

HIDDEN, INNER, QKV = 4096, 14336, 6144
SHAPES = {"gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER), "qkv": (QKV, HIDDEN), "o": (HIDDEN, HIDDEN)}


def milliseconds(call: Callable[[], object], least: float) -> float:
    """Of one call, in a stretch of `least` milliseconds of them."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    count = max(2, round(least / max(start.elapsed_time(end), 1e-3)))
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative, of the whole matrix."""
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


def check() -> dict[str, float]:
    """Relative errors over odd numbers of rows, of fresh data, every output poisoned before."""
    found = {}
    for rows, columns, inner in (
        (1, 256, 64),
        (130, 512, 128),
        (257, 1024, 4096),
        (1000, 2048, 640),
        (3001, 28672, 4096),
    ):
        x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(columns, inner, device="cuda", dtype=torch.bfloat16) * inner**-0.5
        wanted = x.float() @ w.float().t()
        gate, up = wanted.chunk(2, dim=-1)
        residual = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
        total = residual.clone()
        hopper_product.add_linear(x, w, total)
        name = f"{rows}x{columns}x{inner}"
        found[f"{name} plain"] = error(hopper_product.linear(x, w), wanted)
        found[f"{name} gated"] = error(hopper_product.gated_linear(x, w), F.silu(gate) * up)
        found[f"{name} add"] = error(total, wanted + residual.float())
        if inner % 128 == 0:
            rows8, w8 = fp8_triton.quantize_rows(x), Fp8Weight.quantize(w)
            wide = rows8.values.float() @ w8.values.float().t() * w8.scale
            found[f"{name} fp8"] = error(hopper_product.linear(rows8.values, w8.values, w8.scale), wide)
            gate, up = (wide * rows8.scales[:, None]).chunk(2, dim=-1)
            got = hopper_product.gated_linear(rows8.values, w8.values, rows8.scales, w8.scale)
            found[f"{name} fp8 gated"] = error(got, F.silu(gate) * up)
    return found


def calls(shape: str, rows: int, fp8: bool) -> dict[str, Callable[[], object]]:
    columns, inner = SHAPES[shape]
    x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(columns, inner, device="cuda", dtype=torch.bfloat16) * 0.02
    if fp8:
        rows8, w8 = fp8_triton.quantize_rows(x), Fp8Weight.quantize(w)
        found = {
            "vendor": lambda: fp8_triton.fp8_linear(rows8, w8, torch.bfloat16),
            "ours": lambda: hopper_product.linear(rows8.values, w8.values, w8.scale),
        }
        if shape == "gate_up":
            args = rows8.values, w8.values, rows8.scales, w8.scale
            found["vendor, silu"] = lambda: fp8_triton.silu_and_mul_fp8(
                fp8_triton.fp8_linear(rows8, w8, torch.bfloat16)
            )
            found["ours gated"] = lambda: hopper_product.gated_linear(*args)
            found["ours gated, quantize"] = lambda: fp8_triton.quantize_rows(hopper_product.gated_linear(*args))
        return found

    def vendor() -> torch.Tensor:
        chosen = large_products.linear(x, w, torch.bfloat16)
        return F.linear(x, w) if chosen is None else chosen

    found = {"vendor": vendor, "ours": lambda: hopper_product.linear(x, w)}
    if shape == "gate_up":
        found["vendor, silu"] = lambda: activation_triton.silu_and_mul(vendor())
        found["ours gated"] = lambda: hopper_product.gated_linear(x, w)
    if shape in ("o", "down"):
        residual = torch.zeros(rows, columns, device="cuda", dtype=torch.bfloat16)
        found["vendor add"] = lambda: residual.addmm_(x, w.t())
        found["ours add"] = lambda: hopper_product.add_linear(x, w, residual)
    return found


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--rows", type=int, nargs="*", default=[16384, 8000])
    ap.add_argument("--shapes", nargs="*", default=list(SHAPES))
    ap.add_argument("--kinds", nargs="*", default=["bf16", "fp8"])
    ap.add_argument("--ms", type=float, default=150)
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--out", type=Path)
    a = ap.parse_args()
    folder, device = large_products.folder(), torch.device("cuda", torch.cuda.current_device())
    for fp8, gated, add in ((0, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 0), (1, 1, 0)):
        hopper_product.load(device, hopper_product.Variant(bool(fp8), bool(gated), bool(add)), folder)
    lines = [{"errors": check()}]
    print(json.dumps(lines[0]), flush=True)
    torch.cuda.synchronize()
    for kind in a.kinds:
        large_products._chosen.clear()
        weights = [torch.randn(*size, device="cuda", dtype=torch.bfloat16) * 0.02 for size in SHAPES.values()]
        stored = [Fp8Weight.quantize(w) for w in weights] if kind == "fp8" else weights
        large_products.choose(stored, 16384, torch.bfloat16)
        del weights, stored
        for rows in a.rows:
            for shape in a.shapes:
                flops = 2.0 * rows * SHAPES[shape][0] * SHAPES[shape][1]
                work = calls(shape, rows, kind == "fp8")
                for call in work.values():
                    call()
                times = {name: [] for name in work}
                for _ in range(a.rounds):
                    for name, call in work.items():
                        times[name].append(milliseconds(call, a.ms))
                took = {name: statistics.median(all_) for name, all_ in times.items()}
                line = {"kind": kind, "rows": rows, "shape": shape}
                line |= {"us": {k: round(1000 * v, 1) for k, v in took.items()}}
                line |= {"tflop_s": {k: round(flops / v / 1e9) for k, v in took.items()}}
                lines.append(line)
                print(json.dumps(line), flush=True)
    if a.out:
        a.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
