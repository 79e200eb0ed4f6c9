"""The loop of an engine core: plan the next step while the device computes the last one.

Thin effects around the scheduler: it hands plans to a worker, waits for results and measures both. Sockets, processes
and torch are behind `WorkerClient`; the clock is a parameter.
"""

import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Protocol

import msgspec

from kvern_engine.config import EngineConfig
from kvern_engine.core.block_pool import BlockPool
from kvern_engine.core.device_time import DeviceTime
from kvern_engine.core.handed import Handover
from kvern_engine.core.limits import SchedulerConfig
from kvern_engine.core.plan import StepPlan, StepResult, WorkerReady
from kvern_engine.core.recording import PlanRecorder, read_plans
from kvern_engine.core.scheduler import OutputsByClient, Scheduler
from kvern_engine.ipc import AddRequest, EngineStats

__all__ = ["EngineCore", "OutputsByClient", "WorkerClient", "WorkerDiedError", "read_plans"]


class WorkerDiedError(RuntimeError):
    """The worker of `rank` is gone or gave up; `reason` is for people. Call `EngineCore.fail_all` with it."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"worker {rank} died: {reason}")
        self.rank = rank
        self.reason = reason


class WorkerClient(Protocol):
    """How a core reaches its worker. Every call raises WorkerDiedError once the worker is gone."""

    def submit(self, plan: StepPlan) -> None:
        """Hand over a plan; returns at once where the worker runs beside the core."""

    def collect(self, timeout: float | None = None) -> StepResult | None:
        """The result of the oldest plan not yet collected; None after `timeout` seconds (None: wait for it)."""

    @property
    def alive(self) -> bool:
        """The worker can be expected to answer."""

    def close(self) -> None:
        """Let go of the worker; it may live on."""


class EngineCore:
    """One engine: a scheduler, a worker, and up to `max_inflight` plans between them (1: no overlap).

    Outputs of `add_request` (refusals) and `abort` come with those of the next `step`; `idle` is False until then.
    WorkerDiedError passes through `step`; the caller answers it with `fail_all`.
    """

    def __init__(
        self,
        engine: int,
        scheduler: Scheduler,
        worker: WorkerClient,
        *,
        max_inflight: int = 2,
        record_step_plans: str | Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if max_inflight < 1:
            raise ValueError(f"max_inflight must be at least 1, got {max_inflight}")
        self.engine = engine
        self.scheduler = scheduler
        self.worker = worker
        self.max_inflight = max_inflight
        self.heartbeat = clock()
        self._clock = clock
        self._recorder = PlanRecorder(record_step_plans) if record_step_plans else None
        self._outbox: OutputsByClient = {}
        self._seconds = {"schedule": 0.0, "submit": 0.0, "wait": 0.0, "emit": 0.0}
        self.device_time = DeviceTime()
        self._resting = True

    @classmethod
    def from_config(
        cls,
        engine: int,
        config: EngineConfig,
        ready: WorkerReady,
        worker: WorkerClient,
        eos_token_ids: Collection[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> "EngineCore":
        """An engine over a worker that has reported its pool. Raises ValueError where config and worker do not fit.

        With several engines each but the first records its plans in a file of its own (`<path>.<engine>`).
        """
        pool = BlockPool(ready.num_blocks, ready.block_size, config.enable_prefix_caching)
        limits = SchedulerConfig.from_engine(config, ready)
        record = config.record_step_plans
        return cls(
            engine,
            Scheduler(limits, pool, eos_token_ids),
            worker,
            # One plan a stage of the pipeline, and one more to be planned while they are computed.
            max_inflight=config.pipeline_parallel_size + config.async_scheduling,
            record_step_plans=f"{record}.{engine}" if record and engine else record,
            clock=clock,
        )

    def add_request(self, request: AddRequest) -> None:
        """Queue a request. Raises ValueError where its id is in use."""
        self._post(self.scheduler.add(request))

    def abort(self, request_ids: Iterable[str], choices: Iterable[tuple[str, int]] = ()) -> None:
        """End these requests, and these choices (request id, index) of others; what is unknown is ignored."""
        self._post(self.scheduler.abort(request_ids, choices))

    @property
    def idle(self) -> bool:
        """`step` has nothing to do: no request, no plan in flight, no output to deliver."""
        return not (self.scheduler.has_work or self.scheduler.num_in_flight or self._outbox)

    def step(self, timeout: float | None = None) -> OutputsByClient:
        """Schedule N+1, submit it, read back N, emit N: the outputs of step N by client.

        Waits at most `timeout` seconds for N (None: until it is there); what was not back yet is for the next call.
        """
        begin = self.heartbeat = self._clock()
        room = self.scheduler.num_in_flight < self.max_inflight
        plan = self.scheduler.schedule(begin) if room else None
        scheduled = self._clock()
        if plan is not None:
            self._submit(plan)
        submitted = self._clock()
        in_flight = self.scheduler.num_in_flight
        due = in_flight > 0 and (plan is None or in_flight >= self.max_inflight)
        result = self.worker.collect(timeout) if due else None
        collected = self._clock()
        if result is not None:
            self.device_time.add(result.step, result.seconds, result.idle)
            self._post(self.scheduler.update(result))
        self._resting = not (self.scheduler.has_work or self.scheduler.num_in_flight)
        outputs, self._outbox = self._outbox, {}
        self._measure(begin, scheduled, submitted, collected, self._clock())
        return outputs

    def settle(self) -> OutputsByClient:
        """Read back every plan that is in flight and plan no more: before `hand_over`. Raises WorkerDiedError."""
        while self.scheduler.num_in_flight:
            result = self.worker.collect(None)
            if result is not None:
                self._post(self.scheduler.update(result))
        outputs, self._outbox = self._outbox, {}
        return outputs

    def hand_over(self) -> Handover:
        """Everything that this core holds, for others to go on with. `settle` comes first; RuntimeError else."""
        return self.scheduler.hand_over(self.engine)

    def fail_all(self, reason: str) -> OutputsByClient:
        """After WorkerDiedError: an error for every open choice, and whatever had not been delivered."""
        self._post(self.scheduler.fail_all(reason))
        outputs, self._outbox = self._outbox, {}
        return outputs

    def stats(self) -> EngineStats:
        """For a report: counters since start, the sizes of the steps since the last report, and the heartbeat."""
        stats, device = self.scheduler.stats(self.engine), self.device_time
        return msgspec.structs.replace(
            stats,
            heartbeat=self.heartbeat,
            step_seconds=dict(self._seconds),
            device_seconds={"busy": device.busy, "idle": device.idle},
            device_idle_fraction=device.idle_fraction,
        )

    def beat(self) -> None:
        """The owner of an idle core turns its loop: it lives."""
        self.heartbeat = self._clock()

    def close(self) -> None:
        """Close the recording and let go of the worker."""
        if self._recorder is not None:
            self._recorder.close()
        self.worker.close()

    def _submit(self, plan: StepPlan) -> None:
        if self._resting:
            self.device_time.rest(plan.step)
        if self._recorder is not None:
            self._recorder.write(plan)
        self.worker.submit(plan)

    def _post(self, outputs: OutputsByClient) -> None:
        if not self._outbox:
            self._outbox = outputs
            return
        for client, items in outputs.items():
            self._outbox.setdefault(client, []).extend(items)

    def _measure(self, begin: float, scheduled: float, submitted: float, collected: float, end: float) -> None:
        seconds = self._seconds
        seconds["schedule"] += scheduled - begin
        seconds["submit"] += submitted - scheduled
        seconds["wait"] += collected - submitted
        seconds["emit"] += end - collected
