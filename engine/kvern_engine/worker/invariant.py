"""Forward passes whose numbers for a token do not depend on what is computed beside it (`--batch-invariant`).

Matrix products, norms and sums add in an order that follows from their shapes: the same row of two batches of
different sizes differs in its last bits, and now and then in a token (Horace He, Defeating Nondeterminism in LLM
Inference, 2025). So every step is computed in tiles of one fixed number of tokens, the last one padded: no operation
ever sees another shape. In a tile each token is a row of its own with one query token, whether it belongs to a prompt
or an answer, so that attention is cut by its own context alone. That makes chunks, prefix hits, preemptions and
neighbours all the same.

What a tile cannot even out (whether the place within it matters) is tried at start, on the machine at hand, with the
model at hand: `probe_plans` are the plans, `first_difference` says what they must not show.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from kvern_engine.core.plan import AddedRow, RowSampling, StepPlan
from kvern_engine.models.registry import CausalLM
from kvern_engine.worker.batch import StepBatch
from kvern_engine.worker.tables import RowTables
from kvern_kernels import AttentionMetadata

# On a CPU a tile costs about what its products cost; a GPU reads the weights for 128 tokens as fast as for one.
CPU_TILE, GPU_TILE = 16, 128


def tile_size(device: torch.device) -> int:
    """Tokens of a tile on `device`."""
    return CPU_TILE if device.type == "cpu" else GPU_TILE


class Tiles:
    """Runs `model` over `kv_caches` in tiles of `size` tokens."""

    def __init__(self, model: CausalLM, tables: RowTables, kv_caches: Sequence[Tensor], size: int) -> None:
        self._model, self._tables, self._kv_caches, self._size = model, tables, kv_caches, size
        self._longest = tables.tokens.shape[1] - 1  # max_model_len
        self._query_start = torch.arange(size + 1, dtype=torch.int32, device=tables.device)

    def forward(self, batch: StepBatch, residual: Tensor | None = None) -> Tensor:
        """As `CausalLM.forward` of all tokens of `batch`, none left out."""
        rows = np.repeat(np.arange(len(batch.rows)), batch.counts)
        offsets = np.arange(len(rows)) - np.repeat(batch.query_start[:-1], batch.counts)
        lengths = np.repeat(batch.starts, batch.counts) + offsets + 1
        parts = []
        for start in range(0, len(rows), self._size):
            end = min(start + self._size, len(rows))
            given = None if residual is None else self._padded(residual[start:end])
            hidden = self._model.forward(
                self._padded(batch.token_ids[start:end]),
                self._padded(batch.positions[start:end]),
                self._kv_caches,
                self._metadata(batch.meta, rows[start:end], lengths[start:end].tolist(), start),
                None,
                *(() if given is None else (given,)),
            )
            parts.append(hidden[: end - start])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """As `CausalLM.compute_logits`."""
        parts = []
        for start in range(0, max(hidden.shape[0], 1), self._size):
            part = hidden[start : start + self._size]
            parts.append(self._model.compute_logits(self._padded(part))[: part.shape[0]])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _padded(self, part: Tensor, value: int = 0) -> Tensor:
        """`part` [n, ...] in new memory of `size` rows, which begins where all such memory does (at a boundary that
        vector instructions like: another beginning could be another order)."""
        padded = part.new_full((self._size, *part.shape[1:]), value)
        padded[: part.shape[0]] = part
        return padded

    def _metadata(self, meta: AttentionMetadata, rows: np.ndarray, lengths: list[int], start: int) -> AttentionMetadata:
        """Each token as a row of its own: `rows` are those of `meta` that it belongs to, `lengths` its contexts."""
        device, size, count = self._tables.device, self._size, len(lengths)
        index = torch.from_numpy(rows).to(device)
        lens = lengths + [0] * (size - count)
        return AttentionMetadata(
            query_start=self._query_start,
            seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
            block_tables=self._padded(meta.block_tables.index_select(0, index)),
            slots=self._padded(meta.slots[start : start + count], -1),
            num_decodes=size,
            max_query_len=1,
            max_seq_len=self._longest,  # of no launch's choices may follow from the longest context that is there
            query_lens=[1] * size,
            seq_lens_list=lens,
            each_alone=True,
        )


def _probe(step: int, added: list[AddedRow], rows: list[tuple[int, int, int]]) -> StepPlan:
    """Rows (row, start, count) compute, none samples."""
    return StepPlan(
        step=step,
        removed=[],
        added=added,
        block_edits=[],
        copies=[],
        rows=[row for row, _, _ in rows],
        starts=[start for _, start, _ in rows],
        counts=[count for _, _, count in rows],
        samples=[False] * len(rows),
    )


def probe_plans(
    vocab_size: int, max_num_seqs: int, max_model_len: int, block_size: int, num_blocks: int
) -> list[list[StepPlan]]:
    """Ways to compute the same sequence, in row 0: at once and alone, then in pieces beside others and at other places
    of its tiles. Each way begins with empty tables."""
    length = max(min(40, max_model_len - 1, num_blocks * block_size), 1)
    blocks = -(-length // block_size)
    numbers = np.random.default_rng(0)
    others = min(max_num_seqs - 1, num_blocks // blocks - 1, 3)
    rows = []
    for row in range(others + 1):
        ids = numbers.integers(0, vocab_size, length).tolist()
        own = list(range(row * blocks, (row + 1) * blocks))
        rows.append(AddedRow(row, f"probe-{row}", ids, length, own, RowSampling(seed=0)))
    alone = [_probe(0, rows[:1], [(0, 0, length)])]
    cuts = sorted({0, 1, 2, length // 3, length // 2, length})
    beside = []
    for step, (start, end) in enumerate(pairwise(cuts)):
        pieces = [(0, start, end - start), *((row, start, end - start) for row in range(1, others + 1))]
        # The others come first in every other step, so that row 0 is found at all places.
        ordered = sorted(pieces[::-1] if step % 2 else pieces, key=lambda piece: piece[2] > 1)
        beside.append(_probe(step, rows if step == 0 else [], ordered))
    return [alone, beside]


def first_difference(ways: Sequence[Sequence[Tensor]]) -> float | None:
    """The largest difference between the logits of row 0, [positions, V] in pieces, of the first way and any other;
    None where all are equal to the last bit."""
    wholes = [torch.cat(list(pieces)) for pieces in ways]
    worst = max(float((whole - wholes[0]).abs().max()) for whole in wholes)
    return worst if worst > 0 else None
