"""A step that was launched: its results are on their way from the device; only `result()` waits for them."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvern_engine.core.plan import StepResult, TokenLogprobs
from kvern_engine.worker.logprobs import LogprobTensors


class DeviceClock:
    """Times a step and marks its end: events on CUDA, the wall clock on a CPU (where the step is over on return).

    `before` is the clock of the step before it, whose `wait` comes first.
    """

    def __init__(self, device: torch.device, before: "DeviceClock | None" = None) -> None:
        self._cuda = device.type == "cuda"
        self._before = before
        self._begin: Any = None
        self._end: Any = None
        if self._cuda:
            self._begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.start()

    def start(self) -> None:
        """The step begins now, not when the clock was made: it waited for another device until here."""
        if self._cuda:
            self._begin.record()
        else:
            self._begin = time.perf_counter()

    def stop(self) -> None:
        """The step's last operation has been issued."""
        if self._cuda:
            self._end.record()
        else:
            self._end = time.perf_counter()

    def wait(self) -> tuple[float, float]:
        """Blocks until the step is over; seconds it took on the device, and seconds that the device had nothing to do
        between the step before it and this one."""
        if self._cuda:
            self._end.synchronize()
        before, self._before = self._before, None
        idle = 0.0 if before is None else max(0.0, self._seconds(before._end, self._begin))
        return self._seconds(self._begin, self._end), idle

    def _seconds(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1e3 if self._cuda else float(end - begin)


def to_host(tensor: Tensor) -> Tensor:
    """A host copy that is valid once the step's clock says so (CUDA: pinned memory, not waited for)."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


@dataclass
class RowLogprobs:
    """Logprobs of some rows: row `rows[i]` has `counts[i]` consecutive positions of `tensors` and wants
    `alternatives[i]` alternatives."""

    rows: list[int]
    counts: list[int]
    alternatives: list[int]
    tensors: LogprobTensors

    def to_messages(self) -> dict[int, list[TokenLogprobs]]:
        each = [n for n, count in zip(self.alternatives, self.counts, strict=True) for _ in range(count)]
        messages = self.tensors.to_messages(each)
        ends = np.cumsum(self.counts).tolist()
        spans = zip(self.rows, self.counts, ends, strict=True)
        return {row: messages[end - count : end] for row, count, end in spans}


@dataclass
class Pending:
    """Results of step `step` on their way. `tokens` [S] int64 on the host are those that `rows` sampled, or those at
    `picked` of them are.

    `logits` is for tests: row -> [count, V] float32 of all tokens the step computed, where asked for.
    """

    step: int
    clock: DeviceClock
    rows: list[int]
    tokens: Tensor | None
    logprobs: RowLogprobs | None = None
    prompt_logprobs: RowLogprobs | None = None
    logits: dict[int, Tensor] | None = None
    picked: list[int] | None = None

    def result(self) -> StepResult:
        """Waits for the step and reads it back."""
        seconds, idle = self.clock.wait()
        sampled = [] if self.tokens is None else self.tokens.tolist()
        if self.picked is not None:
            sampled = [sampled[place] for place in self.picked]
        return StepResult(
            step=self.step,
            rows=self.rows,
            tokens=[[token] for token in sampled],
            seconds=seconds,
            idle=idle,
            logprobs=self.logprobs.to_messages() if self.logprobs else {},
            prompt_logprobs=self.prompt_logprobs.to_messages() if self.prompt_logprobs else {},
        )
