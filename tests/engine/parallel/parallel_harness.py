"""Ranks in processes of their own, started once and given one layout after another; the requests whose plans they run.

The plans come from the real scheduler over a worker with one rank (`run_scenario`); since a worker sees nothing but
plans, a layout that answers each of them alike is right.
"""

import contextlib
import multiprocessing
import time
import traceback
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from kvern_engine.config import EngineConfig
from kvern_engine.core.loop import EngineCore
from kvern_engine.core.plan import StepPlan, StepResult
from kvern_engine.ipc import AddRequest
from kvern_engine.parallel.layout import Layout
from kvern_engine.request import SamplingParams
from kvern_engine.worker.worker import Worker

ANSWER_SECONDS = 120.0


def disk_bytes() -> int:
    """Bytes that this process has had fetched from a disk."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


# ------------------------------------------------------------ in the rank's process


def _rank_main(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while (job := pipe.recv()) is not None:
        config, rank, rendezvous, plans, want_logits = job
        try:
            pipe.send(_run(config, rank, rendezvous, plans, want_logits))
        except Exception as error:
            pipe.send({"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()})


def _run(config: EngineConfig, rank: int, rendezvous: str, plans: list[StepPlan], want_logits: bool) -> dict[str, Any]:
    worker = Worker(config, rank, rendezvous=rendezvous)
    read = disk_bytes()
    try:
        ready = worker.load()
        read = disk_bytes() - read
        logits_too = want_logits and worker.knows_tokens
        pending = [worker.execute(plan, return_logits=logits_too) for plan in plans]
        results = [each.result() for each in pending]
        if worker._link is not None:
            worker._link.catch_up_with_all()
        return {
            "ready": ready,
            "answers": worker.answers,
            "knows": worker.knows_tokens,
            "results": results,
            "logits": [_as_numpy(each.logits) for each in pending] if logits_too else None,
            "tokens": worker.tables.tokens.cpu().numpy(),
            "parts": {name: held.part for name, held in worker.model.destinations().items()},
            "arena": [tuple(layer.shape) for layer in worker.runner.arena],  # type: ignore[union-attr]
            "read": read,
        }
    finally:
        if worker.parallel is not None:
            worker.parallel.close()


def _as_numpy(logits: dict[int, torch.Tensor] | None) -> dict[int, Any]:
    return {row: each.cpu().numpy() for row, each in (logits or {}).items()}


# ------------------------------------------------------------ in the test's process


class Ranks:
    """Up to `count` rank processes. `run` gives them a layout, a model and plans, and returns what each one has."""

    def __init__(self, count: int, folder: Path, method: str = "forkserver") -> None:
        context = multiprocessing.get_context(method)
        if method == "forkserver":  # torch is loaded once, not once a rank
            context.set_forkserver_preload(["kvern_engine.worker.worker", "safetensors"])
        self._folder, self._jobs = folder, 0
        self._pipes, self._processes = [], []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank_main, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(
        self,
        config: EngineConfig,
        plans: list[StepPlan],
        *,
        want_logits: bool = True,
        by_rank: dict[int, dict[str, Any]] | None = None,
    ) -> list[dict[str, Any]]:
        """The plans on all ranks of every engine of the layout. `by_rank`: what is different in a rank's config."""
        self._jobs += 1
        layout = Layout.of(config)
        ranks = list(range(layout.world))
        for rank in ranks:
            rendezvous = f"file://{self._folder}/rendezvous-{self._jobs}-{layout.coordinates(rank)[0]}"
            own = config.model_copy(update=(by_rank or {}).get(rank, {}))
            self._pipes[rank].send((own, rank, rendezvous, plans, want_logits))
        deadline = time.monotonic() + ANSWER_SECONDS
        answers = []
        for rank in ranks:
            if not self._pipes[rank].poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"rank {rank} of {layout} does not answer")
            answers.append(self._pipes[rank].recv())
        return answers

    def close(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join(5)


class _Recording:
    """A WorkerClient over a worker in this process that keeps plans, results and logits."""

    alive = True

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.plans: list[StepPlan] = []
        self.results: list[StepResult] = []
        self.logits: list[dict[int, Any]] = []
        self._pending: deque[Any] = deque()

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self._pending.append(self.worker.execute(plan, return_logits=True))

    def collect(self, timeout: float | None = None) -> StepResult | None:
        if not self._pending:
            return None
        done = self._pending.popleft()
        self.results.append(done.result())
        self.logits.append(_as_numpy(done.logits))
        return self.results[-1]

    def close(self) -> None:
        pass


@dataclass
class Scenario:
    """What one rank made of the requests."""

    config: EngineConfig
    plans: list[StepPlan]
    results: list[StepResult]
    logits: list[dict[int, Any]]
    preemptions: int
    cached_tokens: int


def requests(vocab_size: int, long: list[int], fork_tokens: int) -> list[AddRequest]:
    """Greedy and random rows with every feature, a shared prefix, forks; `long` is a prompt of over 64 tokens."""

    def of(name: str, ids: list[int], **params: Any) -> AddRequest:
        return AddRequest(name, 0, ids, SamplingParams(ignore_eos=True, **params), 0.0)

    short = long[5:12]
    return [
        of("greedy", long, temperature=0.0, max_tokens=12, logprobs=3),
        of("prefix", [*long[:48], *short], temperature=0.0, max_tokens=10, prompt_logprobs=2, logprobs=0),
        of("forks", short, n=3, seed=7, temperature=1.1, top_p=0.9, max_tokens=fork_tokens),
        of("cut", short[::-1], seed=11, temperature=0.8, top_k=12, min_p=0.02, max_tokens=24, logprobs=2),
        of("shaped", short * 2, seed=3, temperature=0.7, presence_penalty=0.4, repetition_penalty=1.2, max_tokens=12,
           logit_bias={vocab_size - 1: 2.0, 3: -4.0}, min_tokens=4, stop_token_ids=(5,)),
        of("again", [*long[:48], *short[:3]], seed=5, temperature=1.0, max_tokens=8),
    ]  # fmt: skip


def run_scenario(config: EngineConfig, long: list[int], fork_tokens: int = 28) -> Scenario:
    """Runs the requests on one rank in this process. The scheduler plans one step ahead of the tokens, as on a GPU, so
    that rows are fed tokens which the plan does not hold; there are so few blocks that it must preempt."""
    worker = Worker(config)
    ready = worker.load()
    client = _Recording(worker)
    core = EngineCore.from_config(0, config, ready, client, ())
    for request in requests(worker.model.config.vocab_size, long, fork_tokens):
        core.add_request(request)
    cached = 0
    while not core.idle:
        for outputs in core.step().values():
            assert not [output.error for output in outputs if output.error]
            cached += sum(output.num_cached_tokens or 0 for output in outputs)
    preemptions = core.stats().preemptions
    return Scenario(config, client.plans, client.results, client.logits, preemptions, cached)
