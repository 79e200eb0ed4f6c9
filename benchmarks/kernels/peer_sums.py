#!/usr/bin/env python3
"""Two GPUs: an all-reduce with residual and RMSNorm behind it, by NCCL and Triton and through peers' memory, inside a
CUDA graph; microseconds, the median of the replays of the slower rank.

    PYTHONPATH=kernels:engine python benchmarks/kernels/peer_sums.py --out peer_sums.jsonl
"""

import argparse
import json
import os
import statistics
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from kvern_engine.parallel.groups import TensorGroup, init_parallel
from kvern_engine.parallel.layout import Layout

ROWS = [1, 8, 32, 64, 128, 192, 256, 512, 1024, 2048, 8192]
CALLS, EPS = 64, 1e-5


def time_graph(call, least=12):
    """Microseconds of one of CALLS calls."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            call()
    graph.replay()
    took = []
    for _ in range(least):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        took.append(begin.elapsed_time(end) * 1e3 / CALLS)
    slowest = torch.tensor(statistics.median(took), device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return round(slowest.item(), 2)


def measure(rank, meeting, width, out):
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    peers = init_parallel(Layout(1, 2, 1), 0, rank, f"file://{meeting}", device).tensor
    nccl = TensorGroup(2, rank, dist.group.WORLD)
    weight = torch.ones(width, device=device, dtype=torch.bfloat16)
    for rows in ROWS:
        x = torch.zeros(rows, width, device=device, dtype=torch.bfloat16)
        parts = torch.zeros(4, rows, width, device=device) if rows <= 64 else None
        stream = torch.zeros_like(x)
        found = {"rows": rows, "width": width}
        for name, group in (("nccl", nccl), ("peers", peers)):
            found[f"{name}_sum"] = time_graph(partial(group.all_reduce, x))
            found[f"{name}_norm"] = time_graph(partial(group.add_rms_norm, x, stream, weight, EPS))
            if parts is not None:
                found[f"{name}_4_parts"] = time_graph(partial(group.add_rms_norm, parts, stream, weight, EPS))
        if rank == 0:
            print(json.dumps(found), flush=True)
            if out is not None:
                with out.open("a") as file:
                    print(json.dumps(found), file=file)
    dist.destroy_process_group()


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--out", type=Path)
    ap.add_argument("--width", type=int, default=4096)
    a = ap.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(measure, (f"{folder}/meet", a.width, a.out), nprocs=2)


if __name__ == "__main__":
    main()
