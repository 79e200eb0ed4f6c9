"""The simulated device: its times against the measurements they were fitted to, its queue, its tokens."""

import json
from pathlib import Path

import pytest
from worker_harness import plan

from kvern_engine.config import EngineConfig
from kvern_engine.core.plan import AddedRow, RowSampling, StepPlan
from kvern_engine.parallel.layout import Layout
from kvern_engine.worker.sim import SimWorker
from kvern_engine.worker.sim_profile import load_profile

H200 = load_profile("h200-llama3-8b")


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def sim(clock: Clock | None = None, rank: int = 0, **fields: object) -> SimWorker:
    clock = clock or Clock()
    config = EngineConfig(**{"model": "sim", "device": "sim", **fields})  # type: ignore[arg-type]
    return SimWorker(config, rank, clock=clock, sleep=clock.sleep)


def steps_of(requests: int, prompt: int, output: int) -> list[StepPlan]:
    """The steps of `requests` equal requests that come at once: prompts in steps of 8,192 tokens, then decodes."""
    plans, waiting, computed = [], list(range(requests)), 0
    room, rows = 8192, []
    while waiting:
        count = min(prompt - computed, room)
        rows.append((waiting[0], computed, count, computed + count == prompt))
        computed, room = computed + count, room - count
        if computed == prompt:
            computed = 0
            waiting.pop(0)
        if room == 0 or not waiting:
            plans.append(plan(0, rows))
            room, rows = 8192, []
    plans += [plan(0, [(row, prompt + n, 1, True) for row in range(requests)]) for n in range(output - 1)]
    return plans


@pytest.mark.parametrize(
    ("requests", "prompt", "output", "measured"),
    [
        (1, 128, 256, 1.2672),
        (32, 128, 512, 2.9904),
        (128, 128, 512, 4.4265),
        (256, 128, 512, 7.0066),
        (1, 8000, 1, 0.2150),
        (64, 1024, 1, 1.5222),
        (32, 4000, 256, 5.4787),
    ],
)
def test_times_are_those_that_were_measured(requests: int, prompt: int, output: int, measured: float) -> None:
    """Wall times of vLLM 0.26.0 in bfloat16 on one H200, Llama-3-8B shapes, within 10 %."""
    simulated = sum(H200.seconds(made) for made in steps_of(requests, prompt, output))
    assert simulated == pytest.approx(measured, rel=0.10)


def test_ready_as_an_h200_would_be() -> None:
    ready = sim().load()
    assert (ready.max_model_len, ready.max_num_seqs, ready.max_num_batched_tokens) == (8192, 1024, 8192)
    assert ready.device == "sim NVIDIA H200"
    assert 55_000 < ready.num_blocks < 60_000  # (0.92 x 139 GiB - 16 GB) / 131 kB a token / 16
    assert sim(gpu_memory_utilization=0.2).load().num_blocks < ready.num_blocks / 5
    assert sim(num_gpu_blocks_override=10, max_model_len=64, max_num_seqs=3).load().num_blocks == 10
    with pytest.raises(ValueError, match=r"To serve at least one request .* \(8192\).*length is 1024$"):
        sim(kv_cache_memory_bytes=1 << 27).load()


def test_steps_queue_up_and_only_result_waits() -> None:
    clock = Clock()
    worker = sim(clock)
    worker.load()
    one = plan(0, [(0, 0, 10, True)], added=[AddedRow(0, "a", list(range(10)), 10, [0], RowSampling(seed=1))])
    first, second = worker.execute(one), worker.execute(plan(1, [(0, 10, 1, True)]))
    assert clock.now == 100.0
    took = H200.seconds(one)
    assert first.result().seconds == pytest.approx(took)
    assert clock.now == pytest.approx(100.0 + took)
    second.result()
    assert clock.now == pytest.approx(100.0 + took + H200.seconds(plan(1, [(0, 10, 1, True)])))
    clock.now += 5.0  # idle: the next step begins now, not where the last one ended
    begin = clock.now
    third = worker.execute(plan(2, [(0, 11, 1, True)]))
    third.result()
    assert clock.now == pytest.approx(begin + H200.seconds(plan(2, [(0, 11, 1, True)])))


def test_sim_speed() -> None:
    fast = sim(sim_speed=4.0)
    fast.load()
    made = plan(0, [(0, 0, 1, True)], added=[AddedRow(0, "a", [0], 1, [0], RowSampling(seed=1))])
    assert fast.execute(made).result().seconds == pytest.approx(H200.seconds(made) / 4)


def tokens_of(worker: SimWorker, seed: int, prompt: int, count: int) -> list[int]:
    sampling = RowSampling(seed=seed)
    added = [AddedRow(0, "a", [0] * prompt, prompt, [0], sampling)]
    out = worker.execute(plan(0, [(0, 0, prompt, True)], added=added)).result().tokens[0]
    for n in range(1, count):
        out += worker.execute(plan(n, [(0, prompt + n - 1, 1, True)])).result().tokens[0]
    return out


def test_tokens_depend_on_seed_and_position() -> None:
    worker = sim()
    worker.load()
    whole = tokens_of(worker, 7, 5, 20)
    assert tokens_of(worker, 7, 5, 20) == whole
    assert tokens_of(worker, 7, 9, 16) == whole[4:]
    assert tokens_of(worker, 8, 5, 20) != whole
    assert len(set(whole)) > 15 and all(0 <= token < 128256 for token in whole)


def test_tokens_of_a_real_vocabulary_are_text(tiny_path: str, tmp_path: Path) -> None:
    worker = sim(model=tiny_path)
    worker.load()
    assert all(0 < token < 2048 for token in tokens_of(worker, 3, 1, 400))  # 0 is the end-of-text token
    profile = json.loads(
        (Path(load_profile.__code__.co_filename).parent / "sim_profiles/h200-llama3-8b.json").read_text()
    )
    path = tmp_path / "ends.json"
    path.write_text(json.dumps(profile | {"eos_probability": 0.1}))
    worker = sim(model=tiny_path, sim_profile=str(path))
    worker.load()
    assert 20 <= tokens_of(worker, 3, 1, 400).count(0) <= 65


def test_logprobs_where_asked() -> None:
    worker = sim()
    worker.load()
    sampling = RowSampling(seed=1, logprobs=2, prompt_logprobs=1)
    added = [AddedRow(0, "a", [4, 5, 6], 3, [0], sampling), AddedRow(1, "b", [1], 1, [1], RowSampling(seed=2))]
    result = worker.execute(plan(0, [(0, 0, 3, True), (1, 0, 1, True)], added=added)).result()
    assert result.rows == [0, 1]
    (entry,) = result.logprobs[0]
    assert entry.token_id == result.tokens[0][0] == entry.top_ids[0] and len(entry.top_ids) == 2
    assert [e.token_id for e in result.prompt_logprobs[0]] == [5, 6]
    assert result.logprobs.keys() == result.prompt_logprobs.keys() == {0}
    assert worker.execute(plan(1, [(1, 1, 1, True)], removed=[0])).result().logprobs == {}


def test_profile_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sim_profile 'h300'.*shipped profiles: h200-llama3-8b"):
        load_profile("h300")
    good = {f: getattr(H200, f) for f in H200.__dataclass_fields__}
    path = tmp_path / "p.json"
    for change, text in (
        ({"step_seconds": -1.0}, "step_seconds must not be negative, got -1.0"),
        ({"vocab_size": 0}, "vocab_size must be above 0, got 0"),
        ({"eos_probability": 2}, "eos_probability must be between 0 and 1"),
        ({"sped": 1}, "unknown field 'sped'"),
        ({"memory_bytes": "much"}, "memory_bytes"),
    ):
        path.write_text(json.dumps(good | change))
        with pytest.raises(ValueError, match=text):
            load_profile(str(path))


@pytest.mark.parametrize(
    ("requests", "prompt", "output", "measured"),
    [(1, 128, 256, 0.8968), (32, 128, 512, 2.0832), (128, 128, 512, 2.8918), (1, 8000, 1, 0.1276)],
)
def test_times_of_two_devices(requests: int, prompt: int, output: int, measured: float) -> None:
    """vLLM 0.26.0 in bfloat16 with two tensor parallel H200s, within 10 %."""
    simulated = sum(H200.seconds(made, Layout(tensor=2)) for made in steps_of(requests, prompt, output))
    assert simulated == pytest.approx(measured, rel=0.10)


def test_more_ranks_gain_less_and_less() -> None:
    decode, prefill = plan(0, [(row, 500, 1, True) for row in range(32)]), plan(0, [(0, 0, 8000, True)])
    for made in (decode, prefill):
        one, two, four, eight = (H200.seconds(made, Layout(tensor=n)) for n in (1, 2, 4, 8))
        assert one > two > four > eight
        assert one / two < 2 and two / four < one / two


def test_stages_share_the_layers() -> None:
    made = plan(0, [(row, 500, 1, True) for row in range(32)])
    stages = [H200.seconds(made, Layout(pipeline=3), stage) for stage in range(3)]
    assert sum(stages) == pytest.approx(H200.seconds(made))
    assert stages[0] == pytest.approx(stages[2] * 11 / 10)


def test_memory_of_several_devices() -> None:
    one, two, stages = sim().load(), sim(tensor_parallel_size=2).load(), sim(pipeline_parallel_size=2).load()
    assert two.weight_bytes == stages.weight_bytes == one.weight_bytes // 2
    assert two.num_blocks == stages.num_blocks > 2 * one.num_blocks
    assert H200.rank_kv_bytes_per_token(Layout(tensor=16)) == H200.kv_bytes_per_token // 8  # a head on two ranks each
    with pytest.raises(ValueError, match=r"tensor_parallel_size=3 .* 32 attention heads; .*: 1, 2, 4, 8, 16, 32"):
        sim(tensor_parallel_size=3).load()


def rows_of(first: int, step: int) -> StepPlan:
    added = []
    if step == 0:
        added = [AddedRow(row, f"r{row}", [1], 1, [0], RowSampling(seed=row)) for row in range(first, first + 16)]
    return plan(step, [(row, step, 1, True) for row in range(first, first + 16)], added=added)


def test_micro_batches_fill_the_stages() -> None:
    """Two micro-batches over two stages: both compute all the time. One alone: each stage waits for the other."""
    clock = Clock()
    worker = sim(clock, pipeline_parallel_size=2)
    worker.load()
    steps = 20
    pending = [worker.execute(rows_of(first, step)) for step in range(steps) for first in (0, 16)]
    for each in pending:
        each.result()
    stage = H200.seconds(rows_of(0, 1), Layout(pipeline=2), 1)
    busy = 2 * steps * stage
    assert busy / (clock.now - 100.0) > 0.9
    begin = clock.now
    pending = [worker.execute(rows_of(0, step)) for step in range(steps, 2 * steps)]
    for each in pending:
        each.result()
    alone = 2 * H200.seconds(rows_of(0, steps), Layout(pipeline=2)) + H200.hand_over(rows_of(0, steps))
    assert (clock.now - begin) == pytest.approx(steps * alone, rel=0.01)


def test_who_answers() -> None:
    ranks = [sim(rank=rank, tensor_parallel_size=2, pipeline_parallel_size=2) for rank in range(4)]
    assert [worker.answers for worker in ranks] == [False, False, True, False]
    assert [worker.knows_tokens for worker in ranks] == [False, False, True, True]
