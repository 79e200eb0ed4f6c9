"""The vendor's matrix products of one Llama-3-8B layer by layout and precision: what `Linear` should store.

TN: weights [N, K] (as checkpoints have them); NN: stored transposed, [K, N]; fp8: `_scaled_mm` with one scale a tensor.
Times are of a captured graph over enough copies of the weights that none is found in the L2 cache.

    python benchmarks/kernels/gemm_layouts.py [--rows 32 256 8192]
"""

import argparse
import json

import torch
import torch.nn.functional as F

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
FP8 = torch.float8_e4m3fn


def time_us(calls, least_ms=4.0):
    """Microseconds a call in a graph of all calls; the median of 5."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    times, repeats = [], 1
    for attempt in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        end.synchronize()
        took = begin.elapsed_time(end) / repeats
        if attempt == 1:
            repeats = max(1, int(least_ms / took) + 1)
        elif attempt > 1:
            times.append(took)
    del kept
    return sorted(times)[len(times) // 2] * 1e3 / len(calls)


def measure(kind, rows, n, k, copies):
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(copies)]
    if kind == "TN":
        return time_us([lambda w=w: F.linear(x, w) for w in weights])
    if kind == "NN":
        turned = [w.t().contiguous() for w in weights]
        return time_us([lambda w=w: torch.mm(x, w) for w in turned])
    one = torch.ones((), device="cuda")
    x8, w8 = (x.clamp(-4, 4) * 100).to(FP8), [(w * 2000).clamp(-448, 448).to(FP8) for w in weights]
    return time_us(
        [
            lambda w=w: torch._scaled_mm(
                x8, w.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
            )
            for w in w8
        ]
    )


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32, 128, 256, 512, 8000, 8192])
    ap.add_argument("--kinds", nargs="*", default=["TN", "NN", "fp8"])
    a = ap.parse_args()
    for rows in a.rows:
        for kind in a.kinds:
            found = {}
            for name, (n, k) in SHAPES.items():
                copies = max(2, int(200e6 / (n * k * 2)) + 1) if rows <= 1024 else 2
                try:
                    found[name] = round(measure(kind, rows, n, k, copies), 1)
                except Exception as error:
                    found[name] = str(error)[:120]
            times = [value for value in found.values() if isinstance(value, float)]
            flops = sum(2 * rows * n * k for n, k in SHAPES.values())
            total = round(sum(times), 1) if len(times) == len(SHAPES) else None
            rate = round(flops / total / 1e6, 1) if total else None
            print(json.dumps({"rows": rows, "kind": kind, "layer_us": total, "tflop_s": rate, **found}), flush=True)


if __name__ == "__main__":
    main()
