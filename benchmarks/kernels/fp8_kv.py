"""Times attention over a KV cache in FP8 beside one in bf16, with several tiles, on one GPU:

    PYTHONPATH=kernels python benchmarks/kernels/fp8_kv.py --out OUT

Shapes and method are those of `timing.py`. Cases are compiled in parallel processes first. JSON lines go to
OUT/fp8_kv.jsonl, a line a case to the standard output.
"""

import argparse
import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from timing import DIM, HEADS, KV_HEADS, PREFILLS, copies, paged, time_calls, visible_pairs

from kvern_kernels import attention_triton
from kvern_kernels.decode_attention_triton import DecodeTiles, decode_attention
from kvern_kernels.fp8 import FP8
from kvern_kernels.prefill_attention_triton import PrefillTiles, prefill_attention

DECODES = [(1, 384), (1, 4096), (32, 384), (32, 4096), (128, 384), (256, 384), (64, 4096)]
DECODE_TILES = [(128, 4, 3), (64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 8, 3), (256, 8, 2), (64, 2, 3)]
PREFILL_TILES = [(64, 64, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2), (64, 128, 4, 2), (64, 64, 4, 2)]


def caches(arena, fp8):
    """Layers of the arena as they are, or in FP8, with their scales."""
    if not fp8:
        return list(arena), None
    return [layer.to(FP8) for layer in arena], torch.ones(2, KV_HEADS, device="cuda")


def decode_case(rows, context, tiles, fp8):
    moved = 2.0 * KV_HEADS * DIM * (1 if fp8 else 2) * rows * context
    q, arena, meta = paged([1] * rows, [context] * rows, 16, copies(moved))
    layers, scales = caches(arena, fp8)
    del arena
    out = torch.empty_like(q)
    chosen = DecodeTiles(*tiles) if tiles else None

    def call(kv):
        return lambda: decode_attention(q, kv, meta, DIM**-0.5, out, rows, 1, tiles=chosen, kv_scales=scales)

    return [call(kv) for kv in layers], {"tb_s": moved / 1e6}


def prefill_case(name, tiles, fp8):
    query_lens, seq_lens = PREFILLS[name]
    q, arena, meta = paged(query_lens, seq_lens, 16, 2)
    layers, scales = caches(arena, fp8)
    out, scale = torch.empty_like(q), DIM**-0.5
    if tiles == "dispatched":
        calls = [lambda kv=kv: attention_triton.paged_attention(q, kv, meta, scale, scales) for kv in layers]
    else:
        chosen = PrefillTiles(*tiles) if tiles else None
        calls = [lambda kv=kv: prefill_attention(q, kv, meta, scale, out, 0, chosen, kv_scales=scales) for kv in layers]
    return calls, {"tflop_s": 4.0 * HEADS * DIM * visible_pairs(query_lens, seq_lens) / 1e6}


def all_cases():
    """(name, tiles, FP8, maker of (calls, amounts a microsecond))."""
    for rows, context in DECODES:
        for tiles, fp8 in [(None, False), (None, True), *((tiles, True) for tiles in DECODE_TILES)]:
            yield f"decode b{rows} ctx{context}", tiles, fp8, partial(decode_case, rows, context, tiles, fp8)
    for name in ("2k after 6k", "64 x 1k", "fresh 8k"):
        kinds = [(None, False), (None, True), ("dispatched", False), ("dispatched", True)]
        for tiles, fp8 in [*kinds, *((tiles, True) for tiles in PREFILL_TILES)]:
            yield f"prefill {name}", tiles, fp8, partial(prefill_case, name, tiles, fp8)


def compile_shard(index, count):
    """Runs one case of each distinct kernel once."""
    seen = set()
    for name, tiles, fp8, made in all_cases():
        if "ctx4096" in name or tiles == "dispatched" or (key := (name.split()[0], tiles, fp8)) in seen:
            continue
        seen.add(key)
        if len(seen) % count == index:
            try:
                made()[0][0]()
            except Exception as error:  # said where it is timed
                print(f"{name} {tiles}: {str(error)[:100]}", file=sys.stderr)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out", type=Path, required=True)
    ap.add_argument("--seconds", type=float, default=100)
    ap.add_argument("--shards", type=int, default=8)
    ap.add_argument("--shard", type=int)
    a = ap.parse_args()
    if a.shard is not None:
        compile_shard(a.shard, a.shards)
        return 0
    began = time.monotonic()
    command = [sys.executable, __file__, "--out", str(a.out), "--shards", str(a.shards), "--shard"]
    for process in [subprocess.Popen([*command, str(index)]) for index in range(a.shards)]:
        process.wait()
    print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
    with (a.out / "fp8_kv.jsonl").open("w") as file:
        for name, tiles, fp8, made in all_cases():
            if time.monotonic() - began > a.seconds:
                print("out of time")
                break
            line = {"case": name, "tiles": tiles, "kv": "fp8" if fp8 else "bf16"}
            try:
                calls, amounts = made()
                us = time_calls(calls)
                line |= {"us": round(us, 2)} | {unit: round(amount / us, 3) for unit, amount in amounts.items()}
            except Exception as error:
                line["failed"] = str(error)[:160]
            torch.cuda.empty_cache()
            file.write(json.dumps(line) + "\n")
            print(*line.values(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
