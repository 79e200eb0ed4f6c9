"""A runner's side of the pipeline: what a stage takes from the one before, gives to the next, and learns of sampled
tokens. How messages travel is in `parallel/groups.py`.

Every stage applies every plan to row tables of its own. The last one samples; the others write its tokens into their
tables before they compute a row that needs them, not sooner: steps of other rows go on meanwhile.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvern_engine.core.plan import StepPlan
from kvern_engine.parallel.groups import Pipeline
from kvern_engine.worker.batch import SamplingBatch
from kvern_engine.worker.tables import RowTables


@dataclass
class _Awaited:
    """Tokens on their way: `places` [S] in the flat token table will hold `tokens` [S]."""

    wait: Callable[[], Any]
    tokens: Tensor
    places: Tensor


class StageLink:
    """One stage of `pipeline`; hidden states are [T, hidden_size] of `dtype`."""

    def __init__(self, pipeline: Pipeline, tables: RowTables, hidden_size: int, dtype: torch.dtype) -> None:
        self._pipeline, self._tables = pipeline, tables
        self._hidden_size, self._dtype = hidden_size, dtype
        self._awaited: deque[_Awaited] = deque()
        self._taken = 0  # entries that have left `_awaited`
        self._latest: dict[int, int] = {}  # row -> number of the last entry with a token of its

    def catch_up(self, plan: StepPlan) -> None:
        """Before `plan` is applied: the tables get the tokens sampled so far of every row that it names. Waits for the
        last stage where it must."""
        if self._awaited:
            self._take(max((self._latest.get(row, 0) for row in _rows(plan)), default=0))

    def catch_up_with_all(self) -> None:
        """Wait for every token that is on its way."""
        self._take(self._taken + len(self._awaited))

    def receive(self, tokens: int) -> Tensor | None:
        """The residual stream of the step's `tokens`, [T, H], from the stage before; None on the first one."""
        if self._pipeline.stage == 0:
            return None
        shape = tokens, self._hidden_size
        return self._pipeline.receive_hidden(torch.empty(shape, dtype=self._dtype, device=self._tables.device))

    def pass_on(self, residual: Tensor, sampling: SamplingBatch | None) -> None:
        """The residual stream to the next stage. Where rows sample, their tokens will come back."""
        self._pipeline.send_hidden(residual)
        if sampling is None:
            return
        tokens = torch.empty(len(sampling.rows), dtype=torch.int32, device=self._tables.device)
        # The batch's tensors are good until the next step only.
        self._awaited.append(_Awaited(self._pipeline.expect_tokens(tokens), tokens, sampling.places.clone()))
        number = self._taken + len(self._awaited)
        self._latest.update((row, number) for row in sampling.rows.tolist())

    def share(self, tokens: Tensor) -> None:
        """On the last stage: `tokens` [S], which it sampled, to all others."""
        self._pipeline.send_tokens(tokens.int())

    def _take(self, number: int) -> None:
        while self._taken < number:
            entry = self._awaited.popleft()
            self._taken += 1
            entry.wait()
            self._tables.flat_tokens.index_copy_(0, entry.places, entry.tokens)


def _rows(plan: StepPlan) -> Iterator[int]:
    yield from plan.removed
    yield from (new.row for new in plan.added)
    yield from plan.rows
