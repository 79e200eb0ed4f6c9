"""One step's batch: a StepPlan turned into the tensors that model, attention and sampler take.

The host computes a few small arrays with numpy; they reach the device in one copy; everything else (token ids, write
slots, block tables) is gathered there from the row tables, so that a captured graph can do it too. The model's rows are
ordered decodes first.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvern_engine.core.plan import StepPlan
from kvern_engine.layers.attention import Wanted
from kvern_engine.worker.rng import uniform
from kvern_engine.worker.staging import Staging
from kvern_engine.worker.tables import Feature, RowTables
from kvern_kernels import AttentionMetadata


@dataclass
class SamplingBatch:
    """The rows that sample in a step, S of them, in batch order.

    `hidden_index` [S] int64: each row's last token in the flat batch (None: all tokens, in order). `places` [S] int64:
    where the sampled tokens go in the flat token table. `uniform` [S] float64: each row's random number (None: nobody
    samples at random). The rest is on the host: `features` [S] int32 and their union, `positions` [S] of the new
    tokens.
    """

    rows: np.ndarray
    positions: np.ndarray
    features: np.ndarray
    union: Feature
    rows_device: Tensor
    hidden_index: Tensor | None
    places: Tensor
    uniform: Tensor | None

    def part(self, start: int, end: int) -> "SamplingBatch":
        """Rows start..end-1 alone (their `hidden_index` left out: the logits are known)."""
        features = self.features[start:end]
        return SamplingBatch(
            rows=self.rows[start:end],
            positions=self.positions[start:end],
            features=features,
            union=Feature(int(np.bitwise_or.reduce(features, initial=0))),
            rows_device=self.rows_device[start:end],
            hidden_index=None,
            places=self.places[start:end],
            uniform=None if self.uniform is None else self.uniform[start:end],
        )


@dataclass
class StepBatch:
    """What a step computes: T tokens of R rows. `rows` [R], `starts` [R], `counts` [R] and `query_start` [R+1] are
    numpy int64 in batch order; `token_ids` [T] int32 and `positions` [T] int64 are on the device. `sampling` is None
    where no row samples; `wanted` are the tokens behind which a row samples (None: all tokens)."""

    rows: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    query_start: np.ndarray
    token_ids: Tensor
    positions: Tensor
    meta: AttentionMetadata
    sampling: SamplingBatch | None
    wanted: Wanted | None


class BatchBuilder:
    """Builds batches over the row tables. `capacity` in bytes covers a decode step of all rows with its block edits."""

    def __init__(self, tables: RowTables, max_num_batched_tokens: int) -> None:
        self._tables = tables
        self._shift = tables.block_size.bit_length() - 1
        capacity = 128 * tables.max_num_seqs + 32 * max_num_batched_tokens + 4096
        self._staging = Staging(tables.device, capacity)

    def build(self, plan: StepPlan, edits: tuple[np.ndarray, np.ndarray] | None) -> StepBatch:
        """`edits`: what `RowTables.apply` returned for this plan."""
        rows = np.array(plan.rows, dtype=np.int64)
        starts = np.array(plan.starts, dtype=np.int64)
        counts = np.array(plan.counts, dtype=np.int64)
        samples = np.array(plan.samples, dtype=np.bool_)
        decodes = counts == 1
        num_decodes = int(decodes.sum())
        if not decodes[:num_decodes].all():
            order = np.argsort(~decodes, kind="stable")
            rows, starts, counts, samples = rows[order], starts[order], counts[order], samples[order]
        query_start, token_rows, positions = _flatten(rows, starts, counts, num_decodes)
        seq_lens = starts + counts
        chosen = samples.nonzero()[0]
        sample_rows, sample_positions = rows[chosen], seq_lens[chosen]
        tables = self._tables
        features = tables.host.features[sample_rows]
        union = Feature(int(np.bitwise_or.reduce(features, initial=0)))
        arrays = [
            token_rows * tables.tokens.shape[1] + positions,
            token_rows * tables.block_tables.shape[1] + (positions >> self._shift),
            positions & (tables.block_size - 1),
            positions,
            rows,
            seq_lens.astype(np.int32),
            query_start.astype(np.int32),
            sample_rows,
            sample_rows * tables.tokens.shape[1] + sample_positions,
            query_start[chosen + 1] - 1,
            chosen,
        ]
        if union & Feature.RANDOM:
            arrays.append(uniform(tables.host.seed[sample_rows], sample_positions))
        uploaded = self._staging.upload(*arrays, *(edits or ()))
        if edits is not None:
            tables.set_blocks(uploaded[-2], uploaded[-1])
        token_places, block_places, block_offsets, positions_device, *per_row = uploaded
        (
            rows_device,
            seq_lens_device,
            query_start_device,
            sample_rows_device,
            places,
            hidden_index,
            chosen_device,
            *numbers,
        ) = per_row
        token_ids = tables.flat_tokens.index_select(0, token_places)
        slots = block_offsets.add(tables.flat_block_tables.index_select(0, block_places), alpha=tables.block_size)
        meta = self._metadata(rows_device, seq_lens_device, query_start_device, slots, num_decodes, counts, seq_lens)
        all_wanted = len(chosen) == len(token_rows)
        wanted = None if all_wanted else Wanted(hidden_index, _only_last(meta, chosen_device, seq_lens[chosen]))
        sampling = None
        if len(chosen):
            sampling = SamplingBatch(
                rows=sample_rows,
                positions=sample_positions,
                features=features,
                union=union,
                rows_device=sample_rows_device,
                hidden_index=None if all_wanted else hidden_index,
                places=places,
                uniform=numbers[0] if union & Feature.RANDOM else None,
            )
        return StepBatch(rows, starts, counts, query_start, token_ids, positions_device, meta, sampling, wanted)

    def _metadata(
        self,
        rows_device: Tensor,
        seq_lens_device: Tensor,
        query_start: Tensor,
        slots: Tensor,
        num_decodes: int,
        counts: np.ndarray,
        seq_lens: np.ndarray,
    ) -> AttentionMetadata:
        longest = int(seq_lens.max())
        width = (longest + self._tables.block_size - 1) >> self._shift
        return AttentionMetadata(
            query_start=query_start,
            seq_lens=seq_lens_device,
            block_tables=self._tables.block_tables[:, :width].index_select(0, rows_device),
            slots=slots,
            num_decodes=num_decodes,
            max_query_len=int(counts.max()),
            max_seq_len=longest,
            query_lens=counts.tolist(),
            seq_lens_list=seq_lens.tolist(),
        )


def _only_last(meta: AttentionMetadata, chosen: Tensor, seq_lens: np.ndarray) -> AttentionMetadata:
    """Metadata of the last token alone of the rows `chosen` [S] int64, whose contexts are `seq_lens` [S]."""
    count = len(seq_lens)
    return AttentionMetadata(
        query_start=torch.arange(count + 1, dtype=torch.int32, device=chosen.device),
        seq_lens=meta.seq_lens.index_select(0, chosen),
        block_tables=meta.block_tables.index_select(0, chosen),
        slots=meta.slots[:0],
        num_decodes=count,
        max_query_len=1,
        max_seq_len=int(seq_lens.max(initial=0)),
        query_lens=[1] * count,
        seq_lens_list=seq_lens.tolist(),
    )


def _flatten(
    rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, num_decodes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(query_start [R+1], row of each token [T], position of each token [T])."""
    query_start = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(counts, out=query_start[1:])
    if num_decodes == len(rows):
        return query_start, rows, starts
    token_rows = np.repeat(rows, counts)
    positions = np.arange(query_start[-1]) + np.repeat(starts - query_start[:-1], counts)
    return query_start, token_rows, positions
