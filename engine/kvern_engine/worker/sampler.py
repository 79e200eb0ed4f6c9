"""Logits to tokens: which features of a batch's rows apply, in which order. The filters are in `filters.py`.

Order: logit_bias, min_tokens, penalties; then greedy rows take the largest; random rows divide by the temperature, cut
by min-p, top-k and top-p, and draw by inverting the distribution function at the row's own random number. A row's
result depends on its own state alone, not on the batch around it. On a GPU one kernel does all after the penalties.
"""

import numpy as np
from torch import Tensor

from kvern_engine.worker.batch import SamplingBatch
from kvern_engine.worker.filters import apply_penalties, draw, mask_min_p, mask_top_k_top_p
from kvern_engine.worker.staging import to_device
from kvern_engine.worker.tables import Feature, RowTables
from kvern_kernels import sample_tokens

_SHAPING = Feature.LOGIT_BIAS | Feature.MIN_TOKENS | Feature.PENALTIES


class Sampler:
    """Samples with the sampling state in `tables`."""

    def __init__(self, tables: RowTables) -> None:
        self._tables = tables

    def __call__(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """`logits` [S, V] of any float dtype, not changed -> token ids [S] int64."""
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
        tables, host = self._tables, self._tables.host
        if batch.union & (Feature.LOGIT_BIAS | Feature.MIN_TOKENS):
            generated = batch.positions - host.num_prompt[batch.rows]
            banned = generated < host.min_tokens[batch.rows]
            special = (batch.features & int(Feature.LOGIT_BIAS | Feature.MIN_TOKENS)) != 0
            for i in special.nonzero()[0]:
                extras = host.extras[int(batch.rows[i])]
                scores[i].index_add_(0, extras.bias_ids, extras.bias_values)
                if banned[i]:
                    scores[i].index_fill_(0, extras.suppress_ids, float("-inf"))
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
            scores = mask_min_p(scores, tables.min_p[rows])
        if batch.union & (Feature.TOP_K | Feature.TOP_P):
            uses = (features & int(Feature.TOP_K | Feature.TOP_P)) != 0
            largest = int(tables.host.top_k[host_rows[uses]].max())
            if uses.all():
                return draw(mask_top_k_top_p(scores, tables.top_k[rows], tables.top_p[rows], largest), numbers)
            some = to_device(np.flatnonzero(uses), tables.device)
            own = rows[some]
            cut = mask_top_k_top_p(scores[some], tables.top_k[own], tables.top_p[own], largest)
            scores = scores.index_copy_(0, some, cut)
        return draw(scores, numbers)
