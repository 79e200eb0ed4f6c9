#!/usr/bin/env python3
"""A decode step of tensor-parallel ranks, kernel by kernel: JSON lines as `h200.py --timeline` writes them for one GPU.

    PYTHONPATH=kernels:engine:operator python benchmarks/rank_timeline.py --rows 32 128 --out timelines.jsonl

The plans are recorded on the simulated device, then each rank replays them in a process of its own, where the profiler
sees its GPU. A sum waits for the rank that comes later, so that its time holds the difference between the two.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.multiprocessing as multiprocessing

sys.path.insert(0, str(Path(__file__).parent))
from h200 import PRECISIONS, write_model
from timeline import by_group, floors, kernels, longest
from workloads import fixed

from kvern_engine import LLM, SamplingParams
from kvern_engine.bench import commit
from kvern_engine.config import EngineConfig
from kvern_engine.core.recording import read_plans
from kvern_engine.worker.worker import Worker

TOKENS, STEPS = 60, 10
SETTINGS = {"max_model_len": 8192, "max_num_seqs": 256, "num_gpu_blocks_override": 8192, "load_format": "dummy"}


def record(model, rows, path):
    """The plans of `rows` requests of 128 tokens in and TOKENS out."""
    with LLM(model, device="sim", sim_speed=100, record_step_plans=str(path), **SETTINGS) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": ids} for ids, _ in fixed(rows, 128, TOKENS, rows)]
        llm.generate(prompts, params, use_tqdm=False)


def replay(rank, folder, fields, out, precision, revision):
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    config = EngineConfig(model=folder, device="cuda", tensor_parallel_size=2, **SETTINGS, **fields)
    worker = Worker(config, rank, rendezvous=f"file://{folder}/meet")
    worker.load()
    for path in sorted(Path(folder).glob("plans-*")):
        plans = list(read_plans(path))
        first = len(plans) - 4 * STEPS
        for plan in plans[:first]:
            worker.execute(plan).result()
        torch.cuda.synchronize()
        begin, pending = time.perf_counter(), None
        for plan in plans[first : first + STEPS]:  # one ahead, as the engine's loop is
            launched = worker.execute(plan)
            if pending is not None:
                pending.result()
            pending = launched
        pending.result()
        wall = time.perf_counter() - begin

        def steps(some=plans[first + STEPS : first + 2 * STEPS]):
            for pending in [worker.execute(plan) for plan in some]:
                pending.result()

        found, busy, idle, _ = kernels(steps, STEPS)
        for plan in plans[first + 2 * STEPS :]:
            worker.execute(plan).result()
        worker.reset()
        rows = int(path.name.removeprefix("plans-"))
        groups = by_group(found)
        line = {
            "engine": f"kvern-{precision}-tp2",
            "timeline": "decode",
            "rank": rank,
            "rows": rows,
            "step_us": round(wall / STEPS * 1e6, 1),
            "busy_us": round(busy, 1),
            "idle_us": round(idle, 1),
            "sum_share": round(groups.get("sums", 0.0) / max(busy, 1e-9), 4),
            "groups": groups,
            "floors": {name: us / 2 for name, us in floors(worker.model.config, rows, 160, bool(fields)).items()},
            "kernels": longest(found, 20),
            "commit": revision,
        }
        with out.open("a") as file:
            print(json.dumps(line), file=file)
        if rank == 0:
            print(json.dumps(line), flush=True)
    worker.parallel.close()


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--rows", type=int, nargs="+", default=[32, 128])
    ap.add_argument("--precision", default="bf16", choices=sorted(PRECISIONS))
    ap.add_argument("--engine-args", type=json.loads, default={})
    ap.add_argument("--out", type=Path, required=True)
    a = ap.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(folder)
        for rows in a.rows:
            record(model, rows, Path(folder) / f"plans-{rows}")
        given = (folder, PRECISIONS[a.precision] | a.engine_args, a.out, a.precision, commit())
        multiprocessing.spawn(replay, given, nprocs=2)


if __name__ == "__main__":
    main()
