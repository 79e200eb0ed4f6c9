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
# The smallest shape of each kernel that has full and partial tiles: others run the same code.
CHOSEN = {
    "triton_cases.py": [
        "test_rms_norm[3-100-dtype1]",
        "test_silu_and_mul[3-77-dtype1]",
        "test_rope_and_cache[2-1-6-dtype1-True]",
        "test_mixed_steps[16-query_lens3-seq_lens3]",
        "test_half_precision[dtype1]",
        "test_pieces_and_verification[3-128]",
        "test_the_device_plans_as_the_reference[40x2021-8-64-None]",
        "test_padded_rows_are_zero_and_write_nothing",
        "test_gather_contexts",
        "test_rows_that_only_the_device_knows[2]",
        "test_fp8_rows[5-100]",
        "test_linear_parts[5-100-40-3]",
        "test_invariant_linear[5-100-40-2-dtype1]",
        "test_gated_linear[5-100-20]",
        "test_small_fp8_products[13-4096-True]",
        "test_parts_are_added_by_what_follows[3]",
    ],
    "fp8_cases.py": [
        "test_mixed_steps[16-query_lens3-seq_lens3]",
        "test_head_shapes[3-3-80]",
        "test_pieces_and_verification[8-128]",
        "test_padded_rows_are_zero",
        "test_gather_contexts_in_another_type",
        "test_rows_that_only_the_device_knows[2]",
        "test_rope_writes_fp8[9-3-64-True]",
        "test_columns_are_applied_by_what_reads_a_product",
        "test_attention_gives_rows_quantized_by_blocks[query_lens2-seq_lens2-128]",
        "test_attention_gives_rows_quantized_by_blocks[query_lens3-seq_lens3-128]",
        "test_int8_linear[5-1104-70]",
        "test_int8_linear[33-128-128]",
    ],
    "sampling_cases.py": [
        "test_greedy_takes_the_first_of_the_largest[100-bfloat16]",
        "test_draws_as_the_reference[top_k-top_p-min_p-bfloat16]",
        "test_decode_inputs[16]",
    ],
    "stream_cases.py": [
        "test_16_bits[5-64-48-dtype0]",
        "test_16_bits[13-960-576-dtype1]",
        "test_fp8[33-960-576-True]",
        "test_rows_quantized_by_blocks[33-960-1024-True]",
        "test_gated_rows_quantized_by_blocks[13-17408-1024-True]",
        "test_rows_that_are_apart",
    ],
    "attention_cases.py": [
        "test_prompts[query_lens5-seq_lens5-16-4]",
        "test_prompts[query_lens9-seq_lens9-32-8]",
        "test_heads[3-1]",
    ],
    "hopper_cases.py": ["test_bfloat16[130-512-128]", "test_fp8[130-512-128]", "test_bfloat16[257-1024-4096]"],
}


def find_tool():
    found = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *PLACES]))
    if found is None:
        found = next((str(p) for p in Path("/usr/local").glob("cuda*/**/compute-sanitizer") if p.is_file()), None)
    return found


def check(tool, kind, name, out, limit):
    """(what to print, whether it is fine)."""
    command = [tool, "--tool", kind, "--error-exitcode", "86", "--print-limit", "20"]
    command += [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=600"]
    command += [f"{ROOT / 'tests/kernels' / name}::{case}" for case in CHOSEN[name]]
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
    ap.add_argument("--files", nargs="+", default=list(CHOSEN), choices=list(CHOSEN))
    ap.add_argument("--tools", nargs="+", default=["memcheck", "racecheck"], choices=["memcheck", "racecheck"])
    ap.add_argument("--seconds", type=float, default=240, help="for all together; what is left out is said")
    a = ap.parse_args()
    tool = find_tool()
    if tool is None:
        print("compute-sanitizer is not on this machine")
        return 2
    began, fine = time.monotonic(), True
    for kind in a.tools:
        for name in a.files:
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
