"""How long the stages of a pipeline stand idle: the real scheduler and core loop over the simulated device.

    python benchmarks/pipeline.py [--stages 2 4 8] [--batch 1 2 4 16 64] [--real]

For each number of stages and each batch (requests that decode at once; as many as the stages' number times the factor
given) it prints one JSON line: the share of time that the first, the last and the idlest stage waited while all
requests decoded, and tokens a second. By default time is simulated, so that only what the schedule itself wastes is
counted, whatever else this machine does; --real keeps real time: planning, and the way of results, count as well.
"""

import argparse
import json
import time
from collections.abc import Callable

from kvern_engine.assemble import build_core
from kvern_engine.config import EngineConfig
from kvern_engine.core.plan import StepPlan
from kvern_engine.ipc import AddRequest
from kvern_engine.parallel.layout import Layout
from kvern_engine.request import SamplingParams
from kvern_engine.worker.sim import SIM_MODEL, SimWorker
from kvern_engine.worker_client import InprocWorkerClient


class Clock:
    """Time that passes only when somebody sleeps; seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class WatchedWorker(SimWorker):
    """Adds up how long each stage computes."""

    def __init__(self, config: EngineConfig, rank: int, clock: Callable[[], float], sleep: Callable[[float], None]):
        super().__init__(config, rank, clock, sleep)
        self.busy = [0.0] * config.pipeline_parallel_size

    def _enqueue(self, plan: StepPlan) -> tuple[float, float]:
        for stage in range(self.layout.pipeline):
            self.busy[stage] += self.profile.seconds(plan, self.layout, stage) / self.config.sim_speed
        return super()._enqueue(plan)


def measure(stages: int, batch: int, real: bool = False, tokens: int = 200, prompt: int = 64) -> dict[str, float]:
    """`batch` requests of `prompt` tokens that each generate `tokens`; counted while all of them decode."""
    config = EngineConfig(model=SIM_MODEL, device="sim", pipeline_parallel_size=stages)
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    if not real:
        clock = virtual = Clock()
        sleep = virtual.sleep
    worker = WatchedWorker(config, Layout.of(config).answering_rank(0), clock, sleep)
    client = InprocWorkerClient(worker)
    core = build_core(config, 0, client, client.wait_ready(), ())
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0)
    for index in range(batch):
        core.add_request(AddRequest(f"r{index}", 0, [index] * prompt, params, 0.0))
    counts: dict[str, int] = {}
    begin = end = begin_tokens = end_tokens = 0.0
    busy = [0.0] * stages
    while not core.idle:
        for outputs in core.step().values():
            for output in outputs:
                counts[output.request_id] = counts.get(output.request_id, 0) + len(output.token_ids)
        least, most = min(counts.values(), default=0) if len(counts) == batch else 0, max(counts.values(), default=0)
        if begin == 0.0 and least >= 8:  # evened out
            begin, begin_tokens, busy = clock(), sum(counts.values()), list(worker.busy)
        if most <= tokens - 8:
            end, end_tokens, ended = clock(), sum(counts.values()), list(worker.busy)
    idle = [1 - (after - before) / (end - begin) for before, after in zip(busy, ended, strict=True)]
    return {
        "stages": stages,
        "batch": batch,
        "idle_first": round(idle[0], 4),
        "idle_last": round(idle[-1], 4),
        "idle_most": round(max(idle), 4),
        "tokens_per_second": round((end_tokens - begin_tokens) / (end - begin), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 16], help="requests a stage")
    parser.add_argument("--real", action="store_true", help="in real time")
    args = parser.parse_args()
    for stages in args.stages:
        for factor in args.batch:
            figures = measure(stages, factor * stages, args.real)
            print(json.dumps({"kind": "pipeline", "real_time": args.real, **figures}), flush=True)


if __name__ == "__main__":
    main()
