"""Time of scheduler and block pool in a step: 64 running requests that decode, nothing else.

Prints one JSON line. `step_us` is what `schedule` and `update` take together, the mean over all steps: growth by
blocks, digests and outputs included. `step_us_best` is the mean over the best stretch (ten blocks' worth of steps):
the figure of a machine that has nothing else to do. `admit_us` is the time to queue one request, place its prompt and
publish its blocks. All are CPU time of the thread.

    python benchmarks/scheduler.py [--seqs 64] [--steps 2000] [--prompt 512] [--block-size 16]
"""

import argparse
import json
import statistics
import time

from kvern_engine.core.block_pool import BlockPool
from kvern_engine.core.limits import SchedulerConfig
from kvern_engine.core.plan import StepPlan, StepResult
from kvern_engine.core.scheduler import Scheduler
from kvern_engine.ipc import AddRequest
from kvern_engine.request import SamplingParams


def answer(plan: StepPlan) -> StepResult:
    tokens = [[1000 + plan.step % 7] if samples else [] for samples in plan.samples]
    return StepResult(plan.step, plan.rows, tokens, 0.01)


def run(seqs: int, steps: int, prompt: int, block_size: int) -> dict[str, float]:
    length = prompt + block_size + steps + 64  # the first ones decode while the last ones still compute their prompts
    pool = BlockPool(seqs * (length // block_size + 2), block_size)
    config = SchedulerConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=max(8192, seqs),
        max_model_len=length,
        long_prefill_token_threshold=prompt + block_size,
    )
    scheduler = Scheduler(config, pool, eos_token_ids=(2,))
    params = SamplingParams(max_tokens=None, ignore_eos=False)
    begin = time.thread_time()
    for index in range(seqs):
        # Lengths differ, so that blocks fill in different steps as they do in service.
        tokens = [(index * 7919 + p * 104729) % 32000 + 3 for p in range(prompt + index % block_size)]
        scheduler.add(AddRequest(f"request-{index}", 0, tokens, params, 0.0))
    while len(scheduler._books.decodes) < seqs:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.update(answer(plan))
    admitted = time.thread_time()
    seconds = []
    previous = scheduler.schedule()
    for _ in range(steps - 8):
        start = time.thread_time()
        plan = scheduler.schedule()
        scheduled = time.thread_time()
        assert plan is not None and previous is not None and len(plan.rows) == seqs
        result = answer(previous)
        computed = time.thread_time()
        scheduler.update(result)
        seconds.append(scheduled - start + time.thread_time() - computed)
        previous = plan
    window = 10 * block_size
    best = min(statistics.fmean(seconds[at : at + window]) for at in range(0, len(seconds) - window + 1, window))
    seconds.sort()
    return {
        "step_us": round(statistics.fmean(seconds) * 1e6, 1),
        "step_us_best": round(best * 1e6, 1),
        "step_us_p50": round(seconds[len(seconds) // 2] * 1e6, 1),
        "step_us_p99": round(seconds[len(seconds) * 99 // 100] * 1e6, 1),
        "admit_us": round((admitted - begin) / seqs * 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqs", type=int, default=64, help="requests that decode at once")
    parser.add_argument("--steps", type=int, default=2000, help="steps to time")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--block-size", type=int, default=16)
    args = parser.parse_args()
    figures = run(args.seqs, args.steps, args.prompt, args.block_size)
    print(json.dumps({"kind": "scheduler", "seqs": args.seqs, "prompt": args.prompt, **figures}))


if __name__ == "__main__":
    main()
