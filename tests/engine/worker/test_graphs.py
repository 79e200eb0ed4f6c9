"""Decode steps as captured graphs, with a stand-in for CUDA whose graphs run what was recorded: padding, inputs at
fixed places, which steps are replayed. What a real GPU makes of it is tested in `tests/gpu/`."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from worker_harness import FixedRunner, plan

from kvern_engine.core.plan import AddedRow, RowSampling
from kvern_engine.model_config import ModelConfig
from kvern_engine.parallel.layout import ModelShard
from kvern_engine.worker import runner as runner_module
from kvern_engine.worker.graphs import graph_sizes, padded_size
from kvern_engine.worker.mixed_graphs import MixedStep, mixed_sizes
from kvern_engine.worker.tables import Feature


class FakeGraph:
    """Runs the recorded step again."""

    def __init__(self, step: Callable[[], None]) -> None:
        self.step, self.replays = step, 0

    def replay(self) -> None:
        self.replays += 1
        self.step()


class FakeRecorder:
    def __init__(self, device: torch.device) -> None:
        pass

    def record(self, step: Callable[[], None]) -> FakeGraph:
        step()
        return FakeGraph(step)


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        multi_processor_count = 132

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(runner_module, "GraphRecorder", FakeRecorder)


def test_sizes() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(5) == [1, 2, 4, 5]
    assert graph_sizes(40) == [1, 2, 4, 8, 16, 24, 32, 40]
    large = graph_sizes(1024)
    assert large[-1] == 1024 and len(large) == len(set(large)) and large == sorted(large)
    assert padded_size(9, large) == 16 and padded_size(257, large) == 272 and padded_size(1024, large) == 1024


LOGITS = torch.randn(64, 50, generator=torch.Generator().manual_seed(1)) * 2
KINDS = [
    RowSampling(seed=1, temperature=0.0),
    RowSampling(seed=2, temperature=1.0),
    RowSampling(seed=3, temperature=0.7, top_k=5, top_p=0.8),
    RowSampling(seed=4, temperature=1.5, min_p=0.05),
    RowSampling(seed=5, temperature=1.0, repetition_penalty=1.4, logprobs=2),
]
PROMPTS = [[7, 8, 9], [3], [4, 4], [1, 2, 3, 4, 5], [6]]


def make(graphs: bool, logits: torch.Tensor = LOGITS) -> FixedRunner:
    fixed = FixedRunner(logits, max_num_seqs=6)
    shape = ModelConfig("FixedModel", logits.shape[-1], 2, 2, 1, 1, 1, 2, 64)
    fixed.runner.model.config, fixed.runner.model.shard = shape, ModelShard.whole(shape)
    fixed.runner.model.dtype = torch.float32
    if graphs:
        fixed.runner.add_graphs()
    return fixed


@pytest.mark.parametrize("count", [1, 3, 4, 5])
def test_replayed_steps_give_the_tokens_of_eager_ones(fake_cuda: None, count: int) -> None:
    eager, replayed = make(False), make(True)
    expected, expected_results = eager.results(PROMPTS[:count], KINDS[:count], steps=12)
    got, results = replayed.results(PROMPTS[:count], KINDS[:count], steps=12)
    assert got == expected
    assert [r.rows for r in results] == [r.rows for r in expected_results]
    assert torch.equal(replayed.tables.tokens[:-1], eager.tables.tokens[:-1])
    assert results[5].logprobs == expected_results[5].logprobs
    graphs = replayed.runner.graphs
    assert graphs is not None
    assert set(graphs._graphs) == {({1: 1, 3: 4, 4: 4, 5: 6}[count], count < 5)}
    assert sum(graph.replays for graph in graphs._graphs.values()) >= 11  # the first step computes prompts


def test_steps_with_prompts_replay_their_own_graphs(fake_cuda: None) -> None:
    """Chunks, single tokens that do not sample and decodes in one step; tokens as of eager steps."""
    steps = [
        [(0, 0, 2, False), (1, 0, 3, True)],
        [(0, 2, 1, False), (1, 3, 1, True), (2, 0, 4, False)],
        [(2, 4, 3, True), (0, 3, 5, True), (1, 4, 1, True)],
        [(2, 7, 1, True), (0, 8, 1, True), (1, 5, 1, True)],
    ]
    rows = [
        AddedRow(0, "a", [1, 2, 3, 4, 5, 6, 7, 8], 8, [0], KINDS[2]),
        AddedRow(1, "b", [4, 5, 6], 3, [0], KINDS[1]),
        AddedRow(2, "c", [9] * 7, 7, [0], KINDS[3]),
    ]
    found = []
    for graphs in (False, True):
        fixed = make(graphs)
        results = [
            fixed.runner.execute(plan(i, step, added=rows if i == 0 else [])).result() for i, step in enumerate(steps)
        ]
        found.append(([sorted(zip(r.rows, r.tokens, strict=True)) for r in results], fixed.tables.tokens[:-1]))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])
    mixed = fixed.runner.mixed_graphs
    assert mixed is not None and sum(graph.replays for graph in mixed._graphs.values()) == 3
    assert set(mixed._graphs) == {(6, 6), (16, 6)}


def test_what_mixed_graphs_cannot_do_runs_eagerly(fake_cuda: None) -> None:
    fixed = make(True)
    mixed = fixed.runner.mixed_graphs
    assert mixed is not None
    asks = RowSampling(seed=1, temperature=1.0, repetition_penalty=1.4)
    added = [AddedRow(0, "a", [1, 2, 3], 3, [0], asks), AddedRow(1, "b", [1] * 40, 40, [0] * 3, KINDS[0])]
    fixed.runner.execute(plan(0, [(0, 0, 2, False), (1, 0, 20, False)], added=added)).result()
    assert sum(graph.replays for graph in mixed._graphs.values()) == 1  # nobody samples: no penalty is due
    fixed.runner.execute(plan(1, [(0, 2, 1, True), (1, 20, 20, True)])).result()
    assert sum(graph.replays for graph in mixed._graphs.values()) == 1


def test_mixed_sizes() -> None:
    assert mixed_sizes(256, 8192)[:3] == [(16, 16), (32, 16), (64, 16)]
    assert mixed_sizes(256, 8192)[-1] == (1024, 256)
    assert mixed_sizes(1024, 8192) == mixed_sizes(256, 8192)
    assert all(rows <= tokens <= 100 for tokens, rows in mixed_sizes(24, 100))
    assert {rows for _, rows in mixed_sizes(24, 100)} == {16, 24}
    assert len(mixed_sizes(256, 8192)) < 50


def test_size_of_a_mixed_step(fake_cuda: None) -> None:
    mixed = make(True).runner.mixed_graphs
    assert mixed is not None

    def size(counts: list[int]) -> tuple[int, int] | None:
        array = np.array(sorted(counts), dtype=np.int64)
        return mixed.size_for(MixedStep(array, array, array, array > 0, Feature(0)))

    assert size([1, 1, 3]) == (6, 6) and size([1, 6]) == (16, 6) and size([1000, 1]) == (1024, 6)
    assert size([1024, 1]) is None and size([2] * 7) is None


def test_block_edits_reach_the_tables_before_the_step(fake_cuda: None) -> None:
    fixed = make(True)
    graphs = fixed.runner.graphs
    assert graphs is not None
    added = [AddedRow(0, "a", [1] * 16, 16, [3], KINDS[0])]
    fixed.runner.execute(plan(0, [(0, 0, 16, True)], added=added)).result()
    fixed.runner.execute(plan(1, [(0, 16, 1, True)], edits=[(0, 1, [9])])).result()
    assert fixed.tables.block_tables[0, :2].tolist() == [3, 9]
    edits = [(row, 0, [row + 1, row + 2, row + 3]) for row in range(6)]  # more than there are rows
    fixed.runner.execute(plan(2, [(0, 17, 1, True)], edits=edits)).result()
    assert fixed.tables.block_tables[5, :3].tolist() == [6, 7, 8]
    assert (fixed.tables.block_tables[-1] == -1).all()
    assert sum(graph.replays for graph in graphs._graphs.values()) == 2
    long = AddedRow(1, "b", [2] * 20, 20, [5], KINDS[0])
    step = plan(3, [(0, 18, 1, True), (1, 0, 20, True)], added=[long], edits=[(1, 1, [7]), (0, 2, [8])])
    fixed.runner.execute(step).result()
    assert fixed.tables.block_tables[1, :2].tolist() == [5, 7] and fixed.tables.block_tables[0, 2] == 8


def test_padding_is_what_the_last_step_left_nothing_of(fake_cuda: None) -> None:
    """A smaller batch after a larger one: the rows that are gone are not computed again."""
    fixed = make(True)
    fixed.results(PROMPTS[:4], KINDS[:4], steps=3)
    graphs = fixed.runner.graphs
    assert graphs is not None
    before = fixed.tables.tokens.clone()
    graphs.launch(np.array([2, 0, 1]), np.array([5, 6, 7]), Feature(0), None, sample=True)
    changed = (fixed.tables.tokens != before).any(dim=1).nonzero().flatten().tolist()
    assert set(changed) <= {0, 1, 2}
