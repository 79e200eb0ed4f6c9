"""Checks every kernel against its reference and times it, on one GPU, in one command:

    PYTHONPATH=kernels python benchmarks/kernels/bench_kernels.py all --out OUT --shards 12 --seconds 200

Checks run first, in parallel processes (they also compile what the timings need); a failed check ends the run. Timings
follow, most important first, until `--seconds` are over; what was left out is said. Results are JSON lines in
OUT/kernels.jsonl, and a table on the standard output. Phases: check, headline, sweep, contexts, gemm, fp8gemm, all.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))


def run_shard(index: int, count: int, phases: set[str]) -> int:
    """The checks and the compilations of one shard; prints a JSON line a check."""
    import checks

    failed = 0
    if "check" in phases:
        for number, (name, run, limit) in enumerate(checks.all_checks()):
            if number % count != index:
                continue
            try:
                value = run()
            except Exception as error:
                value, name = float("inf"), f"{name}: {type(error).__name__}: {str(error)[:300]}"
            failed += not value < limit
            print(json.dumps({"check": name, "error": float(f"{value:.3g}"), "limit": limit, "ok": value < limit}))
    for number, case in enumerate(compiled_cases(phases)):
        if number % count == index:
            try:
                case.build()[0]()
            except Exception as error:
                print(json.dumps({"compile": f"{case.kernel} {case.config}", "failed": str(error)[:200]}))
            torch.cuda.empty_cache()
    return failed


def cases_of(phase: str) -> list:
    import products
    import timing

    return list(
        {
            "headline": timing.headline,
            "sweep": timing.sweep,
            "contexts": timing.contexts,
            "gemm": products.sweep,
            "fp8gemm": products.fp8_sweep,
        }[phase]()
    )


TIMED = ("headline", "sweep", "contexts", "gemm", "fp8gemm")


def compiled_cases(phases: set[str]) -> list:
    """One case a distinct kernel among those that will be timed."""
    cases: dict[tuple, object] = {}
    for phase in TIMED:
        if phase in phases:
            for case in cases_of(phase):
                rows = case.config.get("rows", 0)
                key = (case.kernel, case.case if rows else "", min(rows, 64), case.config.get("block_size"))
                key += (str(case.config.get("tiles")),)
                # The smallest data of each: only the compilation matters.
                if key not in cases or case.bytes_moved + case.flops < cases[key].bytes_moved + cases[key].flops:
                    cases[key] = case
    return list(cases.values())


def run_shards(count: int, phases: str, out: Path) -> bool:
    command = [sys.executable, __file__, phases, "--out", str(out), "--shards", str(count), "--shard"]
    processes = [subprocess.Popen([*command, str(index)], stdout=subprocess.PIPE, text=True) for index in range(count)]
    lines = [line for process in processes for line in process.communicate()[0].splitlines() if line.startswith("{")]
    (out / "checks.jsonl").write_text("\n".join(lines) + "\n")
    results = [json.loads(line) for line in lines]
    checks = [result for result in results if "check" in result]
    for result in results:
        if not result.get("ok", False):
            print("FAILED", json.dumps(result))
    crashed = [process.returncode for process in processes if process.returncode not in (0, 1)]
    passed = sum(result["ok"] for result in checks)
    worst = max((result["error"] for result in checks if "float32" not in result["check"]), default=0.0)
    worst_full = max((result["error"] for result in checks if "float32" in result["check"]), default=0.0)
    print(f"checks: {passed} of {len(checks)} passed; worst error {worst:.2e}, in float32 {worst_full:.2e}")
    print(f"crashed shards: {crashed}")
    return passed == len(checks) and not crashed


def time_cases(phases: set[str], seconds: float, out: Path) -> None:
    started, left = time.monotonic(), 0
    device = torch.cuda.get_device_name()
    with (out / "kernels.jsonl").open("w") as file:

        def keep(phase: str, result: dict) -> None:
            file.write(json.dumps({"phase": phase, **result, "device": device}) + "\n")
            file.flush()
            print(" ".join(f"{key}={value}" for key, value in result.items()))

        for phase in TIMED:
            results = []
            for case in cases_of(phase) if phase in phases else ():
                if time.monotonic() - started > seconds:
                    left += 1
                    continue
                try:
                    results.append(case.measure())
                except Exception as error:
                    failed = str(error)[:200]
                    results.append({"kernel": case.kernel, "case": case.case, **case.config, "failed": failed})
                    torch.cuda.empty_cache()
                keep(phase, results[-1])
            if phase == "gemm" and results:
                import products

                for result in products.chains(results):
                    keep(phase, result)
    print(f"timings took {time.monotonic() - started:.0f} s; left out: {left}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("phases", help="check, headline, sweep, gemm or all; several joined by commas")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--shard", type=int)
    parser.add_argument("--seconds", type=float, default=200)
    options = parser.parse_args()
    phases = set(options.phases.replace("all", "check,headline,sweep,gemm,fp8gemm").split(","))
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing to measure", file=sys.stderr)
        return 2
    if options.shard is not None:
        return min(1, run_shard(options.shard, options.shards, phases))
    options.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    fine = run_shards(options.shards, options.phases, options.out)
    print(f"checks and compilation took {time.monotonic() - started:.0f} s", flush=True)
    if phases & set(TIMED):
        time_cases(phases, options.seconds, options.out)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
