"""One engine, exact: the real scheduler and block pool in front of the sim profile's step times, in simulated seconds.
About a hundred times slower than fluid.py, which is measured against it; `--exact` simulates with it."""

import math
from collections import deque

from kvern_engine.core.block_pool import BlockPool
from kvern_engine.core.limits import GPU_ITL_FACTOR, SchedulerConfig
from kvern_engine.core.plan import StepResult
from kvern_engine.core.scheduler import Scheduler
from kvern_engine.ipc import AddRequest
from kvern_engine.parallel.layout import Layout
from kvern_engine.request import SamplingParams
from kvern_engine.worker.sim_profile import SimProfile
from kvern_simulator.fluid import Counters, Request, kv_capacity

_BLOCK = 16


class RealEngine:
    """The interface of FluidEngine."""

    def __init__(self, profile: SimProfile, layout: Layout, now: float, max_num_seqs: int = 1024) -> None:
        self.profile, self.layout, self.now = profile, layout, now
        self.kv_tokens = kv_capacity(profile, layout) // _BLOCK * _BLOCK
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, 8192
        self.counters = Counters()
        limits = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=profile.max_model_len,
            itl_factor=GPU_ITL_FACTOR,
        )
        self._scheduler = Scheduler(limits, BlockPool(self.kv_tokens // _BLOCK, _BLOCK, enable_prefix_caching=False))
        self._coming: deque[Request] = deque()
        self._requests: dict[str, Request] = {}
        self._last: dict[str, float] = {}
        self._number = 0

    @property
    def waiting(self) -> int:
        return self._scheduler.stats(0).num_waiting + len(self._coming)

    @property
    def running(self) -> int:
        return self._scheduler.stats(0).num_running

    @property
    def in_flight(self) -> int:
        return len(self._requests) + len(self._coming)

    @property
    def used_tokens(self) -> float:
        return float(self._scheduler.pool.num_used * _BLOCK)

    def add(self, request: Request) -> None:
        """It waits from its arrival on."""
        self._coming.append(request)

    def take_all(self) -> list[Request]:
        """Everything that is in it, taken away with what has been generated: the engine is re-formed."""
        taken = [*self._requests.values(), *self._coming]
        self._scheduler.abort(list(self._requests))
        self._requests.clear()
        self._last.clear()
        self._coming.clear()
        return taken

    def advance(self, until: float) -> None:
        """Bring the engine to `until`: one plan at a time."""
        while self.now < until:
            while self._coming and self._coming[0].arrival <= self.now:
                self._accept(self._coming.popleft())
            plan = self._scheduler.schedule(self.now)
            if plan is None:
                arrival = self._coming[0].arrival if self._coming else until
                self.now = min(max(arrival, self.now + 1e-9), until)
                continue
            seconds = self.profile.seconds(plan, self.layout)
            self.now += seconds
            self.counters.step_tokens += plan.num_tokens
            rows = [row for row, samples in zip(plan.rows, plan.samples, strict=True) if samples]
            result = StepResult(plan.step, rows, [[7] for _ in rows], seconds)
            for output in self._scheduler.update(result).get(0, []):
                self._deliver(output.request_id, output.finish_reason)
        self.counters.preemptions = self._scheduler.stats(0).preemptions

    def _accept(self, request: Request) -> None:
        name = str(self._number)
        self._number += 1
        self._requests[name] = request
        params = SamplingParams(max_tokens=request.outputs - int(request.done), ignore_eos=True)
        prompt = [self._number % 1000] * (request.inputs + int(request.done))
        self._scheduler.add(AddRequest(name, 0, prompt, params, request.arrival))

    def _deliver(self, name: str, finish: str | None) -> None:
        request = self._requests[name]
        if request.first == math.inf:
            request.first = self.now
            self.counters.began(request, self.now - request.arrival)
        elif name in self._last:
            self.counters.tokens(self.now - self._last[name], 1.0)
        self._last[name] = self.now
        request.done += 1
        if finish is not None:
            request.end = self.now
            self.counters.ended(request)
            del self._requests[name], self._last[name]
