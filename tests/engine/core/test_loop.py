"""The core's loop: what is submitted when, timings and heartbeat, recording, and a worker that dies."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from core_fake_worker import FakeWorker
from core_harness import Engine

from kvern_engine.config import EngineConfig
from kvern_engine.core.block_pool import BlockPool
from kvern_engine.core.limits import CPU_ITL_FACTOR, GPU_ITL_FACTOR, SchedulerConfig
from kvern_engine.core.loop import EngineCore, WorkerDiedError, read_plans
from kvern_engine.core.plan import StepPlan, StepResult, WorkerReady
from kvern_engine.core.scheduler import Scheduler
from kvern_engine.ipc import AddRequest
from kvern_engine.request import SamplingParams


class LoggingWorker(FakeWorker):
    """Notes the order of calls; `late` makes collect come back empty that many times; `dies_at` a step."""

    def prepare(self, late: int = 0, dies_at: int | None = None) -> "LoggingWorker":
        self.log: list[str] = []
        self.late, self.dies_at = late, dies_at
        return self

    def submit(self, plan: StepPlan) -> None:
        self.log.append(f"submit {plan.step}")
        super().submit(plan)

    def collect(self, timeout: float | None = None) -> StepResult | None:
        if self.dies_at is not None and self.results and self.results[0].step >= self.dies_at:
            raise WorkerDiedError(3, "out of memory")
        if self.late:
            self.late -= 1
            self.log.append(f"nothing within {timeout}")
            return None
        result = super().collect()
        assert result is not None
        self.log.append(f"collect {result.step}")
        return result


def ticking(step: float = 1.0) -> Iterator[float]:
    now = 0.0
    while True:
        yield now
        now += step


def make(depth: int = 2, record: Path | None = None, **prepare: int | None) -> tuple[EngineCore, LoggingWorker]:
    worker = LoggingWorker(16, 4, 4, 32, vocab=1000).prepare(**prepare)  # type: ignore[arg-type]
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64)
    clock = ticking()
    core = EngineCore(
        0,
        Scheduler(config, BlockPool(16, 4)),
        worker,
        max_inflight=depth,
        record_step_plans=record,
        clock=lambda: next(clock),
    )
    return core, worker


def request(name: str = "a", client: int = 0, **params: object) -> AddRequest:
    return AddRequest(name, client, [1, 2, 3], SamplingParams(**params), 0.0)  # type: ignore[arg-type]


def run(core: EngineCore) -> None:
    while not core.idle:
        core.step()


def test_the_next_step_is_submitted_before_the_last_one_is_read_back() -> None:
    core, worker = make(depth=2)
    core.add_request(request(max_tokens=3))
    run(core)
    assert worker.log == ["submit 0", "submit 1", "collect 0", "submit 2", "collect 1", "collect 2"]


def test_without_overlap_each_step_is_read_back_first() -> None:
    core, worker = make(depth=1)
    core.add_request(request(max_tokens=2))
    run(core)
    assert worker.log == ["submit 0", "collect 0", "submit 1", "collect 1"]


def test_a_step_that_is_not_back_in_time_is_collected_by_the_next_call() -> None:
    core, worker = make(depth=2, late=2)
    core.add_request(request(max_tokens=3))
    core.step(0.5)
    assert core.step(0.5) == {} == core.step(0.5)
    assert worker.log == ["submit 0", "submit 1", "nothing within 0.5", "nothing within 0.5"]
    run(core)
    assert worker.log[4:] == ["collect 0", "submit 2", "collect 1", "collect 2"]


def test_idle_time_on_the_device_counts_while_there_is_work() -> None:
    core, worker = make(depth=2)
    worker.idle = 0.002
    for _ in range(2):  # the second request comes after a rest: what was before its first step does not count
        core.add_request(request(max_tokens=3))
        run(core)
    stats = core.stats()
    assert stats.device_seconds["idle"] == pytest.approx(2 * 2 * 0.002)
    assert stats.device_seconds["busy"] == pytest.approx(6 * worker.seconds)


def test_outputs_are_grouped_by_client_and_refusals_come_with_the_next_step() -> None:
    core, _ = make(depth=1)
    core.add_request(request("a", client=0, max_tokens=1))
    core.add_request(request("b", client=2, max_tokens=1))
    core.add_request(AddRequest("long", 2, list(range(64)), SamplingParams(), 0.0))
    core.abort(["a"])
    outputs = core.step()
    assert {c: [(o.request_id, o.finish_reason) for o in items] for c, items in outputs.items()} == {
        0: [("a", "abort")],
        2: [("long", "error"), ("b", "length")],
    }
    assert core.idle


def test_an_abort_alone_is_delivered() -> None:
    core, worker = make()
    core.add_request(request())
    core.abort(["a"])
    assert not core.idle
    assert [o.finish_reason for o in core.step()[0]] == ["abort"]
    assert core.idle and worker.log == []


def test_phases_and_heartbeat_are_measured() -> None:
    core, _ = make(depth=1)
    core.add_request(request(max_tokens=2))
    core.step()
    stats = core.stats()
    assert stats.step_seconds == {"schedule": 1.0, "submit": 1.0, "wait": 1.0, "emit": 1.0}
    assert stats.heartbeat == 1.0  # 0 was the start; the turn began at 1
    core.beat()
    assert core.stats().heartbeat == 6.0
    assert (stats.engine, stats.steps, stats.iteration_tokens) == (0, 1, [3])


@pytest.mark.parametrize("depth", [1, 2])
def test_a_dead_worker_ends_every_request_with_its_reason(depth: int) -> None:
    core, _ = make(depth=depth, dies_at=1)
    core.add_request(request("a", client=0, n=2, max_tokens=9))
    core.add_request(request("b", client=1, max_tokens=9))
    with pytest.raises(WorkerDiedError, match="worker 3 died: out of memory") as died:
        while True:
            core.step()
    assert died.value.rank == 3
    outputs = core.fail_all(died.value.reason)
    ends = [(o.request_id, o.index, o.finish_reason, o.error) for items in outputs.values() for o in items]
    assert sorted(end for end in ends if end[2]) == [
        ("a", 0, "error", "out of memory"),
        ("a", 1, "error", "out of memory"),
        ("b", 0, "error", "out of memory"),
    ]
    assert core.idle
    assert core.scheduler.pool.num_free == 16


def test_recorded_plans_replay_to_the_same_tokens(tmp_path: Path) -> None:
    path = tmp_path / "plans"
    core, worker = make(depth=2, record=path)
    results: list[StepResult] = []
    collect = worker.collect

    def spy(timeout: float | None = None) -> StepResult | None:
        result = collect(timeout)
        results.extend([result] if result else [])
        return result

    worker.collect = spy  # type: ignore[method-assign]
    for name in "abc":
        core.add_request(request(name, n=2, max_tokens=12))
    run(core)
    core.close()
    replay = FakeWorker(16, 4, 4, 32, vocab=1000)
    assert [replay.execute(plan) for plan in read_plans(path)] == results


def test_a_recording_cut_off_says_so_after_the_whole_plans(tmp_path: Path) -> None:
    path = tmp_path / "plans"
    core, _ = make(record=path)
    core.add_request(request(max_tokens=3))
    run(core)
    core.close()
    whole = list(read_plans(path))
    path.write_bytes(path.read_bytes()[:-3])
    plans = read_plans(path)
    assert [next(plans) for _ in whole[:-1]] == whole[:-1]
    with pytest.raises(ValueError, match=r"the last plan is cut off \(\d+ bytes of \d+\)"):
        next(plans)


def test_from_config_keeps_to_what_the_worker_was_made_for(tmp_path: Path) -> None:
    config = EngineConfig(
        model="x",
        async_scheduling=False,
        enable_prefix_caching=False,
        scheduling_policy="priority",
        seed=7,
        record_step_plans=str(tmp_path / "plans"),
    )
    ready = WorkerReady(0, 20, 8, 100, 0, 0, "cpu", "float32", max_num_seqs=12, max_num_batched_tokens=300)
    worker = FakeWorker(20, 8, 12, 300)
    core = EngineCore.from_config(1, config, ready, worker, (5,))
    limits = core.scheduler.config
    assert (limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_model_len) == (12, 300, 100)
    assert (limits.policy, limits.seed, limits.itl_factor) == ("priority", 7, CPU_ITL_FACTOR)
    assert (core.scheduler.pool.num_blocks, core.scheduler.pool.block_size) == (20, 8)
    assert not core.scheduler.pool.enable_prefix_caching
    assert core.max_inflight == 1
    assert (tmp_path / "plans.1").exists()
    core.close()
    assert not worker.alive
    gpu = WorkerReady(0, 20, 8, 100, 0, 0, "cuda:0 NVIDIA H200", "bfloat16", max_num_seqs=1024)
    assert SchedulerConfig.from_engine(EngineConfig(model="x"), gpu).itl_factor == GPU_ITL_FACTOR


def test_max_inflight_must_be_positive() -> None:
    with pytest.raises(ValueError, match="max_inflight must be at least 1, got 0"):
        make(depth=0)


def test_deeper_pipelines_keep_more_steps_in_flight() -> None:
    engine = Engine(depth=4)
    engine.add("a", 3, max_tokens=9)
    engine.step(4)
    assert engine.scheduler.num_in_flight == 3
    engine.run()
    assert len(engine.tokens("a")) == 9 and len(engine.plans) == 9
