"""A decode step's layers as the engine runs them, in one CUDA graph over distinct weights: microseconds a layer, and
kernel by kernel where asked. What a change of one kernel or of the seams between them is worth.

    PYTHONPATH=kernels:engine python benchmarks/kernels/layer_chain.py --out OUT/chain.jsonl --cases 32x216 1x216

Variants: KVERN_EARLY_LAUNCH=0 in the environment, `--products triton` or `vendor` instead of `hopper_stream`'s,
`--scales rows` instead of those of 128 columns in FP8; with `--scales rows blocks` each case one way after the other on
the same weights, and how far apart the results are (`differs`, relative).
"""

import argparse
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))
from timing import chats, paged, time_calls
from workloads import LLAMA3_8B

from kvern_engine.loading.config import read_model_config
from kvern_engine.loading.resolve import resolve_model
from kvern_engine.models.llama import LlamaForCausalLM
from kvern_engine.worker.load import random_weights
from kvern_kernels import DecodeWorkspace, hopper_stream, large_products, small_gemm_triton, split_kv

LAYERS = 8
LONGEST = 8192


def make_model(fp8):
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**LLAMA3_8B, "num_hidden_layers": LAYERS}))
        config = read_model_config(resolve_model(folder, None))
    model = LlamaForCausalLM(
        config, max_positions=LONGEST, dtype=torch.bfloat16, device=torch.device("cuda"), parallel=None
    )
    random_weights(model, 0)
    if fp8:
        model.quantize_fp8()
    return model


def inputs(contexts):
    """What a captured step of rows with these contexts has: its grid serves contexts of up to LONGEST tokens."""
    rows = len(contexts)
    _, arena, meta = paged([1] * rows, contexts, 16, LAYERS)
    last = torch.tensor(contexts, device="cuda") - 1
    blocks = meta.block_tables.gather(1, (last // 16)[:, None]).flatten().long()
    slots = blocks * 16 + last % 16
    pieces = split_kv.most_pieces(rows, LONGEST, 8, 132)
    meta = replace(
        meta,
        slots=slots,
        max_seq_len=LONGEST,
        workspace=DecodeWorkspace.allocate(pieces, 32, 128, 1, "cuda"),
        query_lens=None,
        seq_lens_list=None,
    )
    ids = torch.randint(1000, 100000, (rows,), dtype=torch.int32, device="cuda")
    return ids, last, list(arena.unbind(0)), meta


def kernel_times(call):
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    rows = [(e.key[:60], e.count, e.self_device_time_total) for e in profiler.key_averages()]
    return sorted(rows, key=lambda row: -row[2])[:14]


def measure(model, case, take_apart, ways):
    """A line for each of `ways`, name -> what makes a step go that way."""
    rows, context = case.split("x")
    contexts = chats(int(rows)) if context == "chats" else [int(context)] * int(rows)
    ids, positions, caches, meta = inputs(contexts)

    def step():
        meta.plan_cache.clear()
        return model.forward(ids, positions, caches, meta)

    first = None
    for name, choose in ways.items():
        choose()
        out = step().float()
        first = out if first is None else first
        found = {"scales": name, "rows": len(contexts), "context": context}
        found |= {"us_a_layer": round(time_calls([step]) / LAYERS, 2)}
        found |= {"differs": round(float((out - first).norm() / first.norm()), 5)} if out is not first else {}
        yield found | ({"kernels": kernel_times(step)} if take_apart else {})


def ways_of(scales, precision):
    """How rows are quantized behind attention and SwiGLU."""
    kept, never = hopper_stream.takes_blocks, lambda rows, weight: False

    def choose(function):
        hopper_stream.takes_blocks = function

    ways = {"blocks": lambda: choose(kept), "rows": lambda: choose(never)}
    return {name: ways[name] for name in scales} if precision == "fp8" else {"none": lambda: None}


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out", type=Path, required=True)
    ap.add_argument("--cases", nargs="+", default=["1x216", "32x216", "32x4088", "128x384", "40xchats"])
    ap.add_argument("--precisions", nargs="+", default=["bf16", "fp8"])
    ap.add_argument("--products", choices=["stream", "triton", "vendor"], default="stream")
    ap.add_argument("--scales", nargs="+", choices=["blocks", "rows"], default=["blocks"], help="FP8; one or both")
    ap.add_argument("--kernels", action="store_true")
    a = ap.parse_args()
    if a.products == "vendor":
        small_gemm_triton.tiles_for = lambda *sizes: None
    variant = {"early": os.environ.get("KVERN_EARLY_LAUNCH", "1") != "0", "products": a.products}
    with a.out.open("a") as file, torch.inference_mode():
        for precision in a.precisions:
            model = make_model(precision == "fp8")
            if a.products == "stream":
                stored = torch.float8_e4m3fn if precision == "fp8" else torch.bfloat16
                hopper_stream.prepare(torch.device("cuda", 0), stored, large_products.folder())
            ways = ways_of(a.scales, precision)
            for case in a.cases:
                for found in measure(model, case, a.kernels, ways):
                    line = {"precision": precision, **variant, **found}
                    file.write(json.dumps(line) + "\n")
                    file.flush()
                    print(json.dumps(line), flush=True)
                torch.cuda.empty_cache()
            del model
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
