#!/usr/bin/env python3
"""One call on a GPU machine: the GPU tests, then the benchmark table and timelines, each in a process of its own with
a time limit, so that one failure does not cost the rest. Logs and JSON lines go to --out; a short summary comes last.

    PYTHONPATH=kernels:engine:operator python benchmarks/gpu_checks.py --out OUT tests table timelines
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
CASES = ("triton", "fp8", "sampling", "hopper", "stream", "attention")
TIMELINES = ["decode_32", "decode_1", "decode_256", "ctx4k_32", "prefill_8k", "sharegpt_1000"]


def stages(a):
    """name -> command."""
    bench = [sys.executable, str(HERE / "h200.py"), "--out", str(a.out / "h200.jsonl"), "--precision", a.precision]
    bench += ["--engine-args", a.engine_args, "--suffix", a.suffix]
    bench += ["--quick"] if a.quick else []
    pytest = [sys.executable, "-m", "pytest", "-q", "-x" if a.first_failure else "-q", "-p", "no:cacheprovider"]
    return {
        "tests": [*pytest, "--timeout=240", str(ROOT / "tests/gpu")],
        "kernels": [*pytest, "--timeout=240", *(str(ROOT / f"tests/kernels/{name}_cases.py") for name in CASES)],
        "sanitizer": [sys.executable, str(HERE / "sanitizer.py"), "--out", str(a.out)],
        "gemm": [sys.executable, str(HERE / "kernels/gemm_layouts.py")],
        "table": [*bench, *([] if a.only is None else ["--only", *a.only]), "--timeline", *a.timeline],
        "timelines": [*bench, "--only", "--timeline", *a.timeline],
    }


def run(name, command, limit, log):
    """(exit status or 'timeout', seconds); the output goes to `log`."""
    began = time.monotonic()
    with log.open("w") as file:
        try:
            status = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            status = "timeout"
    return status, time.monotonic() - began


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("stages", nargs="+", choices=["tests", "kernels", "sanitizer", "gemm", "table", "timelines"])
    ap.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    ap.add_argument("--precision", default="bf16")
    ap.add_argument("--engine-args", default="{}")
    ap.add_argument("--only", nargs="*", help="workloads of the table")
    ap.add_argument("--timeline", nargs="*", default=TIMELINES)
    ap.add_argument("--suffix", default="")
    ap.add_argument("--quick", action="store_true")
    ap.add_argument("--first-failure", action="store_true")
    ap.add_argument("--seconds", type=float, default=540, help="for all stages together")
    ap.add_argument("--tail", type=int, default=5000, help="characters of each log to print")
    a = ap.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    began, summary = time.monotonic(), []
    for name in a.stages:
        left = a.seconds - (time.monotonic() - began)
        log = a.out / f"{name}.log"
        status, took = run(name, stages(a)[name], max(left, 1), log)
        summary.append(f"{name}: exit {status} after {took:.0f} s")
        print(f"===== {name} (exit {status}, {took:.0f} s)\n{log.read_text()[-a.tail :]}", flush=True)
    print("\n".join(summary))
    return int(any("exit 0 " not in line for line in summary))


if __name__ == "__main__":
    sys.exit(main())
