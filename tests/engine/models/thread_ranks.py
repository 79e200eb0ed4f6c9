"""The ranks of an engine as threads of one process: what a worker computes at a layout, without processes and sockets.

`parallel.groups` talks through torch.distributed; here the ranks meet at a barrier. How ranks really talk is tested in
tests/engine/parallel.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvern_engine.config import EngineConfig
from kvern_engine.core.plan import StepPlan, StepResult
from kvern_engine.parallel.groups import ParallelContext, Pipeline, TensorGroup
from kvern_engine.parallel.layout import Layout
from kvern_engine.worker.worker import Worker

PATIENCE = 120.0


class _Meeting:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.given: list[Any] = [None] * size

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        """What every rank gives, in rank order."""
        self.given[rank] = x
        self.barrier.wait(PATIENCE)
        found = list(self.given)
        self.barrier.wait(PATIENCE)
        return found


class _Group(TensorGroup):
    def __init__(self, rank: int, meeting: _Meeting, sums_in_norm: bool) -> None:
        super().__init__(len(meeting.given), rank)
        self._meeting, self._sums_in_norm = meeting, sums_in_norm

    def sums_in_norm(self, width: int, dtype: torch.dtype) -> bool:
        return self._sums_in_norm

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.size > 1 and x.numel():
            x.copy_(torch.stack(self._meeting.exchange(self.rank, x.clone())).sum(0))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._meeting.exchange(self.rank, x), dim=1) if self.size > 1 else x


class _Pipes(Pipeline):
    """Of one column of the layout: `hidden` [stage] and `tokens` [stage] are what is on its way to a stage."""

    def __init__(self, stage: int, hidden: Sequence[Any], tokens: Sequence[Any]) -> None:
        self.stage, self._to_hidden, self._to_tokens = stage, hidden, tokens

    def receive_hidden(self, buffer: Tensor) -> Tensor:
        return buffer.copy_(self._to_hidden[self.stage].get(timeout=PATIENCE))

    def send_hidden(self, hidden: Tensor) -> None:
        self._to_hidden[self.stage + 1].put(hidden.clone())

    def send_tokens(self, tokens: Tensor) -> None:
        for waiting in self._to_tokens[:-1]:
            waiting.put(tokens.clone())

    def expect_tokens(self, buffer: Tensor) -> Callable[[], Any]:
        @torch.inference_mode()
        def wait() -> None:
            buffer.copy_(self._to_tokens[self.stage].get(timeout=PATIENCE))

        return wait


class _Context(ParallelContext):
    def smallest(self, value: int) -> int:
        return value

    def close(self) -> None:
        pass


def run_ranks(
    config: EngineConfig, plans: Sequence[StepPlan], sums_in_norm: bool = False
) -> tuple[list[StepResult], list[dict[int, Any]]]:
    """Results and logits (by row, of each plan) of the last stage's ranks, which must all have the same.
    `sums_in_norm`: as on GPUs that reach each other's memory (`TensorGroup`)."""
    layout = Layout.of(config)
    meetings = [_Meeting(layout.tensor) for _ in range(layout.pipeline)]
    pipes = [[[queue.SimpleQueue() for _ in range(layout.pipeline)] for _ in range(2)] for _ in range(layout.tensor)]
    answers: dict[int, Any] = {}

    def rank_main(rank: int) -> None:
        _, stage, tensor_rank = layout.coordinates(rank)
        try:
            pipeline = _Pipes(stage, *pipes[tensor_rank]) if layout.pipeline > 1 else None
            parallel = _Context(layout, rank, _Group(tensor_rank, meetings[stage], sums_in_norm), pipeline)
            worker = Worker(config, rank, parallel=parallel)
            worker.load()
            pending = [worker.execute(plan, return_logits=worker.knows_tokens) for plan in plans]
            answers[rank] = [one.result() for one in pending], [one.logits for one in pending]
        except BaseException as error:
            answers[rank] = error
            for meeting in meetings:
                meeting.barrier.abort()
            for waiting in (one for column in pipes for kind in column for one in kind):
                waiting.put(None)  # whoever takes it fails too

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(layout.world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    errors = [error for error in answers.values() if isinstance(error, BaseException)]
    if errors:
        raise errors[0]  # it made the others fail
    ends = layout.stage_ranks(0, layout.pipeline - 1)
    results, logits = answers[ends[0]]
    for rank in ends[1:]:
        assert [one.tokens for one in answers[rank][0]] == [one.tokens for one in results], "ranks disagree"
    return results, logits
