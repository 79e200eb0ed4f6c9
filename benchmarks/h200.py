#!/usr/bin/env python3
"""The fixed workloads (workloads.py) on one GPU, one precision at a time: JSON lines, resumable.

    python benchmarks/h200.py --precision bf16 --out results/h200.jsonl
    python benchmarks/h200.py --precision fp8 --out results/h200.jsonl --seconds 520

Llama-3-8B shapes with random weights, max_model_len 8192, max_num_seqs 256, gpu_memory_utilization 0.9; median of 3
runs after a warm-up run, the first token of every prompt changed from run to run. A workload whose line is already in
the file for this engine and commit is left out; none is begun after --seconds. Needs the source roots on PYTHONPATH
(kernels:engine:operator) or Kvern installed. Lines: engine, w, s, min, max, out_tok_s, tot_tok_s, commit; one has
start_s instead.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from workloads import LLAMA3_8B, WORKLOADS

PRECISIONS = {
    "bf16": {},
    "fp8": {"quantization": "fp8_per_tensor"},
    "fp8-channel": {"quantization": "fp8_per_channel"},
    "fp8-kv8": {"quantization": "fp8_per_tensor", "kv_cache_dtype": "fp8"},
}


def done(path, engine, commit):
    """Names of the workloads that the file holds for this engine and commit; unreadable lines are left out."""
    names = set()
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # cut off while it was written
        if row.get("engine") == engine and row.get("commit") == commit:
            names.add(row.get("w", "start"))
    return names


def drop_torn_line(path):
    """Cut off what a killed run left of its last line, so that every line of the file is whole again."""
    if path.exists() and not (data := path.read_bytes()).endswith(b"\n"):
        path.write_bytes(data[: data.rfind(b"\n") + 1])


def write_model(folder):
    """A model folder without weights: `load_format="dummy"` makes them up."""
    (Path(folder) / "config.json").write_text(json.dumps(LLAMA3_8B))
    return str(folder)


def start_details(llm):
    """What the start consisted of, and how much KV fits."""
    ready = llm.worker_ready
    phases = {phase: round(seconds, 2) for phase, seconds in ready.load_seconds.items()}
    return {
        "phases": phases,
        "kv_tokens": ready.num_blocks * ready.block_size,
        "device": ready.device,
        "memory_share": memory_share(),
    }


def memory_share():
    """The share of the card's memory in use; None without a card."""
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return round(1 - free / total, 4)


def baseline(engine, name):
    """vLLM's line for the precision of `engine` and workload `name`; empty where it was not measured."""
    wanted = engine.replace("kvern-", "vllm-", 1)
    path = Path(__file__).with_name("baseline_h200.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return next((row for row in rows if (row["engine"], row.get("w")) == (wanted, name)), {})


def ratio(line, theirs):
    """How many times faster than vLLM; None where that is not known."""
    return round(theirs["s"] / line["s"], 3) if theirs.get("s") else None


TIMELINES = {
    "decode_1": ("decode", 1, 128),
    "decode_32": ("decode", 32, 128),
    "decode_128": ("decode", 128, 128),
    "decode_256": ("decode", 256, 128),
    "ctx4k_32": ("decode", 32, 4000),
    "prefill_8k": ("prompt", 1, 8000),
    "prefill_1k_x64": ("prompt", 64, 1024),
    "ctx4k_32_prompts": ("prompt", 8, 4000),
    "sharegpt_1000": ("mixed", 0, 0),
}


def take_timelines(llm, names, engine, revision, out):
    """Each of `names` as a JSON line in the timelines' own file; one that fails costs only itself."""
    import timeline

    from kvern_engine.bench import write_line

    for name in names:
        kind, rows, n_in = TIMELINES[name]
        try:
            if kind == "decode":
                line = timeline.decode_timeline(llm, rows, n_in)
            elif kind == "prompt":
                line = timeline.prompt_timeline(llm, n_in, rows)
            else:
                line = timeline.mixed_timeline(llm, WORKLOADS[name]())
        except Exception:
            traceback.print_exc()
            continue
        write_line(out, {"engine": engine, "w": name, **line, "commit": revision})
        timeline.show(line)


def parse():
    default_out = Path(os.environ.get("OUT", Path(__file__).parent / "results")) / "h200.jsonl"
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--precision", default="bf16", choices=sorted(PRECISIONS))
    ap.add_argument("--only", nargs="*", choices=sorted(WORKLOADS), help="these workloads, or none; default: all")
    ap.add_argument("--runs", type=int, default=3)
    ap.add_argument("--seconds", type=float, default=520, help="begin no workload after this long")
    ap.add_argument("--out", type=Path, default=default_out)
    ap.add_argument("--seen", type=Path, nargs="*", default=[], help="more files whose lines count as done")
    ap.add_argument("--commit", help="default: KVERN_COMMIT or that of the checkout")
    ap.add_argument("--device", default="cuda", help="cuda, or cpu/sim to try the script out")
    ap.add_argument("--engine-args", type=json.loads, default={}, help='JSON, for example {"enforce_eager": true}')
    ap.add_argument("--quick", action="store_true", help="one timed run a workload, to look around")
    ap.add_argument("--timeline", nargs="*", choices=sorted(TIMELINES), help="also take these steps apart")
    ap.add_argument("--suffix", default="", help="appended to the engine's name, for experiments")
    return ap.parse_args()


def main():
    began = time.perf_counter()
    a = parse()
    from kvern_engine import LLM
    from kvern_engine.bench import commit, measure, write_line

    engine, revision = f"kvern-{a.precision}{a.suffix}", a.commit or commit()
    seen = set().union(*(done(path, engine, revision) for path in (a.out, *a.seen)))
    todo = [name for name in (WORKLOADS if a.only is None else a.only) if name not in seen]
    if not todo and not a.timeline:
        print(f"{engine} at {revision}: nothing left to measure", file=sys.stderr)
        return 0
    a.out.parent.mkdir(parents=True, exist_ok=True)
    drop_torn_line(a.out)
    settings = {"max_model_len": 8192, "max_num_seqs": 256, "gpu_memory_utilization": 0.9, "load_format": "dummy"}
    settings |= {"device": a.device, **PRECISIONS[a.precision], **a.engine_args}

    def told(phase, fraction):
        if fraction >= 1:
            print(f"{time.perf_counter() - began:6.1f} s  {phase}", file=sys.stderr, flush=True)

    with (
        tempfile.TemporaryDirectory() as folder,
        a.out.open("a") as out,
        LLM(write_model(folder), load_progress=told, **settings) as llm,
    ):
        if "start" not in seen:
            # From the process's first line, imports included: what somebody waits for.
            start = {"start_s": round(time.perf_counter() - began, 2), "llm_s": round(llm.start_seconds, 2)}
            write_line(out, {"engine": engine, **start, **start_details(llm), "commit": revision})
        for number, name in enumerate(todo):
            if time.perf_counter() - began > a.seconds:
                print(f"out of time; left for another call: {' '.join(todo[number:])}", file=sys.stderr)
                return 3
            try:
                found = measure(llm, WORKLOADS[name](), 1 if a.quick else a.runs)
            except Exception:
                traceback.print_exc()
                if not llm._worker.alive:
                    return 1
                continue
            line = {"engine": engine, "w": name, **found, "commit": revision}
            write_line(out, line)
            shown = {**line, "ratio": ratio(line, baseline(engine.removesuffix(a.suffix), name))}
            print(f"{time.perf_counter() - began:6.1f} s  {json.dumps(shown)}", flush=True)
        if a.timeline:
            with a.out.with_name("timelines.jsonl").open("a") as file:
                take_timelines(llm, a.timeline, engine, revision, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
