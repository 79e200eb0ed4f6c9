"""Logits to tokens: which features of a batch's rows apply, in which order. The filters are in `filters.py`.

Order: allowed tokens, logit_bias, bad words and min_tokens (which give way where they would leave nothing), penalties;
then greedy rows take the largest; random rows divide by the temperature, cut by min-p, top-k and top-p, and draw by
inverting the distribution function at the row's own random number. A row's result depends on its own state alone, not
on the batch around it. On a GPU one kernel does all after the penalties.

What has float32 scores of its own (`_SHAPING`) is computed for as many rows at once as SHAPING_BYTES hold: sampling
must not decide how much memory a step takes.
"""

import numpy as np
import torch
from torch import Tensor

from kvern_engine.worker.batch import SamplingBatch
from kvern_engine.worker.filters import (
    apply_penalties,
    ban_words,
    draw,
    keep_allowed,
    mask_min_p,
    mask_top_k_top_p,
    unless_empty,
)
from kvern_engine.worker.staging import to_device
from kvern_engine.worker.tables import OWN_EXTRAS, Feature, RowTables
from kvern_kernels import sample_tokens

SHAPING_BYTES = 512 << 20
_PER_SCORE = 32  # bytes: the score, counts of tokens in prompt and output, and what stands between
_SHAPING = OWN_EXTRAS | Feature.PENALTIES
_ALIGNED = 16  # rows: kernels are compiled anew for pointers that are not aligned


class Sampler:
    """Samples with the sampling state in `tables`. `fixed_shapes`: on a CPU nothing is sized by what other rows ask
    for, so that a row's sums have the same order in any company (a GPU's kernel takes each row alone anyway)."""

    def __init__(self, tables: RowTables, fixed_shapes: bool = False) -> None:
        self._tables = tables
        self._fixed_shapes = fixed_shapes

    def __call__(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """`logits` [S, V] of any float dtype, not changed -> token ids [S] int64."""
        rows = rows_at_once(logits.shape[1])
        if not batch.union & _SHAPING or logits.shape[0] <= rows:
            return self._sample(logits, batch)
        starts = range(0, logits.shape[0], rows)
        return torch.cat([self._sample(logits[at : at + rows], batch.part(at, at + rows)) for at in starts])

    def _sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        union = batch.union
        if logits.is_cuda:
            return self._by_kernel(logits, batch)
        if not union & (Feature.RANDOM | _SHAPING):
            return logits.argmax(dim=-1)
        scores = logits.float()
        if union & _SHAPING:
            scores = self._shape(scores.clone() if scores is logits else scores, batch)
        if not union & Feature.RANDOM:
            return scores.argmax(dim=-1)
        random = self._index(batch, Feature.RANDOM)
        if random is None:
            return self._draw(scores, batch, None)
        tokens = scores.argmax(dim=-1)
        return tokens.index_copy_(0, random, self._draw(scores[random], batch, random))

    def _by_kernel(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """What captured graphs run too, so that a row gets the same tokens in either; writes them to the tables."""
        if batch.union & _SHAPING:
            scores = logits.float()
            logits = self._shape(scores.clone() if scores is logits else scores, batch)
        tables = self._tables
        return sample_tokens(logits, batch.rows_device, tables.sampling, batch.uniform, tables.tokens, batch.places)

    def _index(self, batch: SamplingBatch, feature: Feature) -> Tensor | None:
        """Which of the S rows use any bit of `feature`, [n] int64 on the device; None: all of them."""
        uses = (batch.features & int(feature)) != 0
        return None if uses.all() else to_device(uses.nonzero()[0], self._tables.device)

    def _shape(self, scores: Tensor, batch: SamplingBatch) -> Tensor:
        """`scores` [S, V] float32, changed in place."""
        tables = self._tables
        for i in ((batch.features & int(OWN_EXTRAS)) != 0).nonzero()[0].tolist():
            self._apply_extras(scores[i], int(batch.rows[i]), int(batch.positions[i]))
        if batch.union & Feature.PENALTIES:
            index = self._index(batch, Feature.PENALTIES)
            uses = (batch.features & int(Feature.PENALTIES)) != 0
            rows = batch.rows_device if index is None else batch.rows_device[index]
            lengths = to_device(batch.positions[uses], tables.device)
            part = apply_penalties(
                scores if index is None else scores[index],
                tables.tokens[:, : int(batch.positions[uses].max())].index_select(0, rows),
                tables.num_prompt[rows],
                lengths,
                presence=tables.presence[rows],
                frequency=tables.frequency[rows],
                repetition=tables.repetition[rows],
            )
            scores = part if index is None else scores.index_copy_(0, index, part)
        return scores

    def _apply_extras(self, scores: Tensor, row: int, position: int) -> None:
        """To `scores` [V] of the token at `position` of a row, in place: what it may choose from."""
        tables, host = self._tables, self._tables.host
        extras = host.extras[row]
        generated = position - int(host.num_prompt[row])
        if extras.allowed_ids is not None:
            keep_allowed(scores, extras.allowed_ids)
        scores.index_add_(0, extras.bias_ids, extras.bias_values)
        words = extras.bad_words
        too_soon = generated < host.min_tokens[row] and extras.suppress_ids.shape[0] > 0
        if not (words is not None or too_soon):
            return
        banned = scores.clone()
        if words is not None:
            known = min(generated, words.before.shape[1])
            ban_words(banned, tables.tokens[row, position - known : position], words.before, words.last)
        if too_soon:
            banned.index_fill_(0, extras.suppress_ids, float("-inf"))
        scores.copy_(unless_empty(banned, scores))

    def _draw(self, scores: Tensor, batch: SamplingBatch, index: Tensor | None) -> Tensor:
        """A token for each of `scores` [n, V], the rows `index` of the batch -> [n] int64."""
        tables = self._tables
        assert batch.uniform is not None
        rows = batch.rows_device if index is None else batch.rows_device[index]
        numbers = batch.uniform if index is None else batch.uniform[index]
        random = (batch.features & int(Feature.RANDOM)) != 0
        features, host_rows = batch.features[random], batch.rows[random]
        scores = scores / tables.temperature[rows].unsqueeze(1)
        if batch.union & Feature.MIN_P:
            logs = to_device(tables.host.log_min_p[host_rows], tables.device)
            scores = mask_min_p(scores, logs)
        if batch.union & (Feature.TOP_K | Feature.TOP_P):
            uses = (features & int(Feature.TOP_K | Feature.TOP_P)) != 0
            largest = scores.shape[1] if self._fixed_shapes else int(tables.host.top_k[host_rows[uses]].max())
            if uses.all():
                return draw(mask_top_k_top_p(scores, tables.top_k[rows], tables.top_p[rows], largest), numbers)
            some = to_device(np.flatnonzero(uses), tables.device)
            own = rows[some]
            cut = mask_top_k_top_p(scores[some], tables.top_k[own], tables.top_p[own], largest)
            scores = scores.index_copy_(0, some, cut)
        return draw(scores, numbers)


def rows_at_once(vocab_size: int) -> int:
    """How many rows are given float32 scores of their own at once, a multiple of 16."""
    return max(SHAPING_BYTES // (_PER_SCORE * vocab_size) // _ALIGNED, 1) * _ALIGNED
