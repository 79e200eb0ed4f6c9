"""Fits `seconds = a + b * tokens + c * context` of a step to measured workloads, for `--device sim`.

    python benchmarks/fit_sim_profile.py BASELINE.jsonl --engine vllm-bf16

Each workload (`workloads.py`) is replayed by a plain continuous-batching schedule (all requests at once, first come
first served, chunked prefill, at most 8,192 tokens a step): its wall time is then linear in a, b and c, with the number
of steps, the tokens computed and the sum of all rows' contexts as factors. Least squares on relative errors over the
workloads with one prompt length gives the coefficients; the error of each workload is printed.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from workloads import WORKLOADS

FITTED = ("decode_1", "decode_32", "decode_128", "decode_256", "ctx4k_32", "prefill_8k", "prefill_1k_x64")
CHECKED = ("sharegpt_1000",)


def factors(requests: Iterable[tuple[int, int]], max_seqs: int = 256, budget: int = 8192) -> tuple[int, int, int]:
    """(steps, tokens, sum of contexts) of serving `requests` (prompt length, output length), all there at the start."""
    waiting = [[n_in, n_out, 0] for n_in, n_out in requests]  # prompt, outputs left, tokens computed
    running: list[list[int]] = []
    steps = tokens = context = 0
    while waiting or running:
        room = budget
        for row in running:  # decodes and unfinished prompts first
            count = max(1, min(row[0] - row[2], room))
            row[2], room = row[2] + count, room - count
        while waiting and room > 0 and len(running) < max_seqs:
            row = waiting.pop(0)
            row[2] = min(row[0], room)
            room -= row[2]
            running.append(row)
        steps, tokens, context = steps + 1, tokens + budget - room, context + sum(row[2] for row in running)
        for row in running:
            row[1] -= row[2] >= row[0]
        running = [row for row in running if row[1] > 0]
    return steps, tokens, context


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("baseline", type=Path)
    parser.add_argument("--engine", default="vllm-bf16")
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.baseline.read_text().splitlines() if line.strip()]
    measured = {row["w"]: row["s"] for row in rows if row.get("engine") == args.engine and "w" in row}
    work = {name: factors([(len(ids), out) for ids, out in WORKLOADS[name]()]) for name in (*FITTED, *CHECKED)}
    matrix = np.array([work[name] for name in FITTED], dtype=np.float64)
    seconds = np.array([measured[name] for name in FITTED])
    (a, b, c), *_ = np.linalg.lstsq(matrix / seconds[:, None], np.ones(len(seconds)), rcond=None)
    print(json.dumps({"step_seconds": a, "token_seconds": b, "context_seconds": c}))
    for name in (*FITTED, *CHECKED):
        predicted = float(np.dot(work[name], (a, b, c)))
        note = "fitted" if name in FITTED else "not fitted"
        print(
            f"{name:16} {work[name]} measured {measured[name]:.3f} s, sim {predicted:.3f} s "
            f"({predicted / measured[name] - 1:+.0%}, {note})"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
