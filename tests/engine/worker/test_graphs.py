"""Decode steps as captured graphs, with a stand-in for CUDA whose graphs run what was recorded: padding, inputs at
fixed places, which steps are replayed. What a real GPU makes of it is tested in `tests/gpu/`."""

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from worker_harness import FixedRunner, plan

from kvern_engine.core.plan import AddedRow, RowSampling
from kvern_engine.model_config import ModelConfig
from kvern_engine.parallel.layout import ModelShard
from kvern_engine.worker.graphs import DecodeGraphs, graph_sizes, padded_size


class FakeStream:
    def wait_stream(self, other: Any) -> None:
        pass


class FakeGraph:
    """`step` is set by the patched `DecodeGraphs._step` while it records."""

    recording: "FakeGraph | None" = None

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.replays = 0

    def capture_begin(self, **_: Any) -> None:
        FakeGraph.recording = self

    def capture_end(self) -> None:
        FakeGraph.recording = None

    def replay(self) -> None:
        self.replays += 1
        for step in self.steps:
            step()


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        multi_processor_count = 132

    cuda = torch.cuda
    monkeypatch.setattr(cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(cuda, "Stream", lambda device: FakeStream())
    monkeypatch.setattr(cuda, "current_stream", lambda: FakeStream())
    monkeypatch.setattr(cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(cuda, "get_device_properties", lambda device: Properties)
    run = DecodeGraphs._step

    def step(self: DecodeGraphs, size: int, sample: bool) -> None:
        if FakeGraph.recording is not None:
            FakeGraph.recording.steps.append(lambda: run(self, size, sample))
        else:
            run(self, size, sample)

    monkeypatch.setattr(DecodeGraphs, "_step", step)


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


def test_a_step_that_is_no_plain_decode_runs_eagerly(fake_cuda: None) -> None:
    fixed = make(True)
    graphs = fixed.runner.graphs
    assert graphs is not None
    graphs.capture([6])
    added = [AddedRow(0, "a", [1, 2, 3], 3, [0], KINDS[0]), AddedRow(1, "b", [4, 5, 6], 3, [0], KINDS[0])]
    assert fixed.runner.execute(plan(0, [(0, 0, 2, False), (1, 0, 3, True)], added=added)).result().rows == [1]
    fixed.runner.execute(plan(1, [(0, 2, 1, False)])).result()  # one token, but nothing is sampled
    assert all(graph.replays == 0 for graph in graphs._graphs.values())
    fixed.runner.execute(plan(2, [(0, 3, 1, True), (1, 4, 1, True)])).result()
    assert sum(graph.replays for graph in graphs._graphs.values()) == 1


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


def test_padding_is_what_the_last_step_left_nothing_of(fake_cuda: None) -> None:
    """A smaller batch after a larger one: the rows that are gone are not computed again."""
    fixed = make(True)
    fixed.results(PROMPTS[:4], KINDS[:4], steps=3)
    graphs = fixed.runner.graphs
    assert graphs is not None
    before = fixed.tables.tokens.clone()
    graphs.launch(np.array([2, 0, 1]), np.array([5, 6, 7]), 0, None, sample=True)  # type: ignore[arg-type]
    changed = (fixed.tables.tokens != before).any(dim=1).nonzero().flatten().tolist()
    assert set(changed) <= {0, 1, 2}
