#!/usr/bin/env python3
"""Attention of prompts at Llama-3-8B's shapes: our kernel for Hopper beside cuDNN's (with the gather in front of it)
and Triton's, in turns, under load. JSON lines: us and TFLOP/s of what is seen.

    PYTHONPATH=kernels python benchmarks/kernels/prompt_attention.py --out OUT/prompt_attention.jsonl
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from long_products import error, milliseconds
from timing import DIM, DTYPE, HEADS, KV_HEADS

from kvern_kernels import AttentionMetadata, attention_triton, hopper_attention, large_products, vendor_attention
from kvern_kernels.prefill_attention_triton import prefill_attention

BLOCK = 16
CHATS = [100, 300, 700, 1500, 40, 250, 900, 2100, 500, 60] * 2
CASES = {
    "16 x 1,024": ([1024] * 16, [1024] * 16),
    "4 x 4,000": ([4000] * 4, [4000] * 4),
    "8,000": ([8000], [8000]),
    "2,048 behind 6,144": ([2048], [8192]),
    "256 x 64 behind 1,024": ([64] * 256, [1088] * 256),
    "170 behind 1,000, 2 of them": ([170] * 2, [1170] * 2),
    "chats": (CHATS, CHATS),
}


def step(query_lens, seq_lens):
    """Queries, a cache and the metadata of rows with blocks in random order."""
    needed = [-(-length // BLOCK) for length in seq_lens]
    order = torch.randperm(sum(needed)).tolist()
    tables, start = [], 0
    for count in needed:
        tables.append(order[start : start + count])
        start += count
    q = vendor_attention.empty_queries((sum(query_lens), HEADS, DIM), DTYPE, torch.device("cuda")).normal_()
    kv = torch.randn(2, KV_HEADS, sum(needed), BLOCK, DIM, dtype=DTYPE, device="cuda")
    return q, kv, AttentionMetadata.build(query_lens, seq_lens, tables, BLOCK, "cuda")


def flops(query_lens, seq_lens):
    """Of the scores that are seen and what comes of them."""
    seen = sum(n * (length - n) + n * (n + 1) / 2 for n, length in zip(query_lens, seq_lens, strict=True))
    return 4 * seen * HEADS * DIM


def measure(query_lens, seq_lens, stretch_ms, turns):
    """Microseconds of a call by each way, in turns of `stretch_ms`."""
    q, kv, meta = step(query_lens, seq_lens)
    out, scale = torch.empty_like(q), DIM**-0.5
    device = q.device

    def without_own():
        own, hopper_attention._kernels = hopper_attention._kernels, {}
        result = attention_triton.paged_attention(q, kv, meta, scale)
        hopper_attention._kernels = own
        return result

    ways = {
        "own": lambda: hopper_attention.attention(q, kv, meta, scale, out, 0),
        "before": without_own,
        "triton": lambda: prefill_attention(q, kv, meta, scale, out, 0),
    }
    hopper_attention.prepare(device, HEADS, KV_HEADS, DIM, DTYPE, BLOCK, large_products.folder())
    wanted = without_own()
    ways["own"]()
    difference = error(out, wanted)
    times = {name: [] for name in ways}
    for _ in range(turns):
        for name, call in ways.items():
            call()
            times[name].append(milliseconds(call, stretch_ms) * 1000)
    us = {name: round(statistics.median(values), 1) for name, values in times.items()}
    rate = {name: round(flops(query_lens, seq_lens) / value / 1e6) for name, value in us.items()}
    return {"us": us, "tflop_s": rate, "error": round(difference, 5)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--stretch-ms", type=float, default=100, help="how long one way is called at a time")
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    for name in args.cases:
        line = json.dumps({"case": name, **measure(*CASES[name], args.stretch_ms, args.turns)})
        print(line, flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
