#!/usr/bin/env python3
"""compute-sanitizer over the kernels' tests at their smallest shapes, on a GPU machine: memcheck (accesses out of
bounds, misaligned or leaked), racecheck (shared memory), initcheck is left out (torch's own buffers trip it).

    PYTHONPATH=kernels python benchmarks/sanitizer.py --out OUT [--tools memcheck racecheck] [--seconds 240]

Prints a line a tool and file; exits with 1 where something was found, 2 where there is no compute-sanitizer. torch's
caching allocator is off: every tensor is an allocation of its own, so that memcheck sees where each ends.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
PLACES = ("/usr/local/cuda/bin", "/opt/nvidia/cuda/bin", "/usr/local/cuda/compute-sanitizer")
# The smallest shape of each kernel: the rest runs the same code.
CHOSEN = {
    "triton_cases.py": "rms_norm or silu_and_mul or rope or mixed_steps or half_precision or splits or prefill_tiles "
    "or gather or device_knows or fp8_rows or fp8_linear or linear_parts or gated_linear or padded",
    "fp8_cases.py": "mixed_steps or splits or prefill_tiles or gather or device_knows or rope or columns or exactly",
    "sampling_cases.py": "",
}


def find_tool():
    found = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *PLACES]))
    if found is None:
        found = next((str(p) for p in Path("/usr/local").glob("cuda*/**/compute-sanitizer") if p.is_file()), None)
    return found


def check(tool, kind, name, out, limit):
    """(what to print, whether it is fine)."""
    chosen = ["-k", CHOSEN[name]] if CHOSEN[name] else []
    pytest = [sys.executable, "-m", "pytest", "-q", "-n", "8", "-p", "no:cacheprovider", "--timeout=600", *chosen]
    command = [tool, "--tool", kind, "--error-exitcode", "86", "--print-limit", "20", "--target-processes", "all"]
    command += [*pytest, str(ROOT / "tests/kernels" / name)]
    log, began = out / f"sanitizer-{kind}-{name.removesuffix('.py')}.log", time.monotonic()
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    with log.open("w") as file:
        try:
            code = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, timeout=limit
            ).returncode
        except subprocess.TimeoutExpired:
            code = "out of time"
    text = log.read_text()
    summary = re.findall(r"(\d+ passed[^=\n]*|ERROR SUMMARY: [^\n]*|RACECHECK SUMMARY: [^\n]*)", text)
    took = time.monotonic() - began
    return f"{kind} {name}: exit {code} after {took:.0f} s: {'; '.join(summary) or text[-300:]}", code == 0


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    ap.add_argument("--tools", nargs="+", default=["memcheck", "racecheck"], choices=["memcheck", "racecheck"])
    ap.add_argument("--seconds", type=float, default=240, help="for all together; what is left out is said")
    a = ap.parse_args()
    tool = find_tool()
    if tool is None:
        print("compute-sanitizer is not on this machine")
        return 2
    began, fine = time.monotonic(), True
    for kind in a.tools:
        for name in CHOSEN:
            left = a.seconds - (time.monotonic() - began)
            if left < 20:
                print(f"{kind} {name}: left out, no time")
                continue
            line, good = check(tool, kind, name, a.out, left)
            fine &= good
            print(line, flush=True)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
