"""When a stage waits for sampled tokens: before it computes or forgets a row that has one on its way, not sooner."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvern_engine.core.plan import AddedRow, RowSampling, StepPlan
from kvern_engine.worker.batch import BatchBuilder
from kvern_engine.worker.stages import StageLink
from kvern_engine.worker.tables import RowTables

SAMPLING = RowSampling(seed=0, temperature=0.0)


class FakePipeline:
    """Tokens are there when somebody waits for them: 100 for the first step that samples, 101 for the next, ..."""

    stage = 0

    def __init__(self) -> None:
        self.sent = 0
        self.waited: list[int] = []

    def send_hidden(self, hidden: torch.Tensor) -> None:
        self.sent += 1

    def expect_tokens(self, buffer: torch.Tensor) -> Callable[[], Any]:
        number = self.sent - 1

        def wait() -> None:
            buffer.fill_(100 + number)
            self.waited.append(number)

        return wait


class FirstStage:
    """What a runner does with plans on the first stage, without a model."""

    def __init__(self) -> None:
        self.tables = RowTables(
            max_num_seqs=4, max_model_len=32, block_size=16, vocab_size=500, device=torch.device("cpu")
        )
        self.pipeline = FakePipeline()
        self.link = StageLink(self.pipeline, self.tables, 8, torch.float32)  # type: ignore[arg-type]
        self._builder = BatchBuilder(self.tables, 64)
        self._step = 0

    def run(self, *rows: tuple[int, int, int], added: tuple[int, ...] = (), removed: tuple[int, ...] = ()) -> list[int]:
        """A step of (row, start, count), all of which sample; the ids of its tokens."""
        new = [AddedRow(row, f"r{row}", [10 + row, 20 + row], 2, [row], SAMPLING) for row in added]
        columns = [list(column) for column in zip(*rows, strict=True)] or [[], [], []]
        plan = StepPlan(self._step, list(removed), new, [], [], *columns, [True] * len(rows))
        self._step += 1
        self.link.catch_up(plan)
        edits = self.tables.apply(plan)
        if not rows:
            return []
        batch = self._builder.build(plan, edits)
        assert self.link.receive(len(batch.positions)) is None
        self.link.pass_on(torch.zeros(len(batch.positions), 8), batch.sampling)
        return batch.token_ids.tolist()


@pytest.fixture
def first() -> FirstStage:
    return FirstStage()


def test_other_rows_go_on_meanwhile(first: FirstStage) -> None:
    assert first.run((0, 0, 2), added=(0,)) == [10, 20]
    assert first.run((1, 0, 2), added=(1,)) == [11, 21]
    assert first.run((2, 0, 2), added=(2,)) == [12, 22]
    assert first.pipeline.waited == []
    assert first.run((1, 2, 1)) == [101]  # what step 1 sampled; step 0 came before it on the same way
    assert first.pipeline.waited == [0, 1]
    assert first.run((0, 2, 1)) == [100]
    assert first.pipeline.waited == [0, 1]
    assert first.run((0, 3, 1), (2, 2, 1), (1, 3, 1)) == [104, 102, 103]


def test_a_row_is_not_overwritten_after_it_was_forgotten(first: FirstStage) -> None:
    first.run((0, 0, 2), added=(0,))
    first.run(removed=(0,))
    assert first.pipeline.waited == [0]
    first.run((0, 0, 2), added=(0,))
    first.run((0, 0, 2), added=(0,))  # preempted and back in one step: named by `added` alone
    assert first.pipeline.waited == [0, 1]
    assert first.run((0, 2, 1)) == [102]


def test_all_that_is_on_its_way(first: FirstStage) -> None:
    first.run((0, 0, 2), added=(0,))
    first.run((1, 0, 2), added=(1,))
    first.link.catch_up_with_all()
    assert first.pipeline.waited == [0, 1]
    np.testing.assert_array_equal(first.tables.tokens[:2, 2], [100, 101])
    first.link.catch_up_with_all()
    assert first.pipeline.waited == [0, 1]
