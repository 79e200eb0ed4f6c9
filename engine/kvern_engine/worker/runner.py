"""One step on the device: apply the plan, run the model, sample, keep the tokens for the next step.

Nothing here reads the device back: a step is only launched, and the next one may be launched before it is over.
"""

import numpy as np
import torch
from torch import Tensor

from kvern_engine.core.plan import StepPlan
from kvern_engine.layers.attention import Wanted
from kvern_engine.models.registry import CausalLM
from kvern_engine.worker.batch import BatchBuilder, SamplingBatch, StepBatch
from kvern_engine.worker.graphs import IN_GRAPH, DecodeGraphs, Edits, GraphRecorder
from kvern_engine.worker.invariant import Tiles, tile_size
from kvern_engine.worker.kv_store import as_integers
from kvern_engine.worker.logprobs import LogprobTensors, compute_in_chunks, compute_logprobs
from kvern_engine.worker.mixed_graphs import MixedGraphs, MixedStep
from kvern_engine.worker.pending import DeviceClock, Pending, RowLogprobs, to_host
from kvern_engine.worker.sampler import Sampler
from kvern_engine.worker.stages import StageLink
from kvern_engine.worker.staging import to_device
from kvern_engine.worker.tables import Feature, RowTables


class Runner:
    """Runs steps of `model` over `arena`, a layer [2, Hkv, N, bs, D] each, with the state in `tables`. The list may be
    filled later, before the first step.

    `link`: the model is one stage of several; what only the last one knows (tokens, logprobs, logits) is missing in the
    others' results. `invariant`: a row's numbers do not depend on the others (`invariant.py`).
    """

    def __init__(
        self,
        model: CausalLM,
        tables: RowTables,
        arena: list[Tensor],
        max_num_batched_tokens: int,
        link: StageLink | None = None,
        invariant: bool = False,
    ) -> None:
        self.model, self.tables, self.arena = model, tables, arena
        self._link = link
        self._builder = BatchBuilder(tables, max_num_batched_tokens)
        self._tiles = Tiles(model, tables, arena, tile_size(tables.device)) if invariant else None
        self._compute_logits = model.compute_logits if self._tiles is None else self._tiles.compute_logits
        self._sampler = Sampler(tables, fixed_shapes=invariant)
        self._max_num_batched_tokens = max_num_batched_tokens
        self._clock: DeviceClock | None = None  # of the last step
        self.graphs: DecodeGraphs | None = None
        self.mixed_graphs: MixedGraphs | None = None

    def add_graphs(self) -> tuple[DecodeGraphs, MixedGraphs]:
        """From now on steps run as CUDA graphs where they can, captured when they are first needed if not before."""
        recorder = GraphRecorder(self.tables.device)
        common = (self.model, self.tables, self.arena, recorder)
        self.graphs = DecodeGraphs(*common)
        self.mixed_graphs = MixedGraphs(*common, self._max_num_batched_tokens)
        return self.graphs, self.mixed_graphs

    @torch.inference_mode()
    def execute(self, plan: StepPlan, return_logits: bool = False) -> Pending:
        """Launches one step. `return_logits` (for tests) adds the logits of all its tokens to the result."""
        clock = self._clock = DeviceClock(self.tables.device, self._clock)
        if self._link is not None:
            self._link.catch_up(plan)
        edits = self.tables.apply(plan)
        if plan.copies:
            self._copy_blocks(plan.copies)
        if not plan.rows:
            if edits is not None:
                self.tables.set_blocks(*(to_device(part, self.tables.device) for part in edits))
            clock.stop()
            return Pending(plan.step, clock, [], None)
        if self.graphs is not None and not return_logits and (replayed := self._replay(plan, edits, clock)):
            return replayed
        batch = self._builder.build(plan, edits)
        wants_all = return_logits or bool((self.tables.host.features[batch.rows] & int(Feature.PROMPT_LOGPROBS)).any())
        wanted = None if wants_all or self._tiles is not None else batch.wanted
        pending = Pending(plan.step, clock, [], None)
        hidden = self._forward(batch, wanted, clock)
        if hidden is None:
            return pending
        if batch.sampling is not None:
            if wanted is None and batch.sampling.hidden_index is not None:
                sampled = hidden.index_select(0, batch.sampling.hidden_index)
            else:
                sampled = hidden
            self._sample_from(self._compute_logits(sampled), batch.sampling, pending)
        if wants_all:
            self._prompt_logprobs(hidden, batch, pending)
        if return_logits:
            pending.logits = self._all_logits(hidden, batch)
        clock.stop()
        return pending

    def _forward(self, batch: StepBatch, wanted: Wanted | None, clock: DeviceClock) -> Tensor | None:
        """Hidden states after the last norm, of the tokens that are `wanted`; None where that is another stage's."""
        if self._link is None:
            return self._compute(batch, wanted, None)
        residual = self._link.receive(len(batch.positions))
        clock.start()
        hidden = self._compute(batch, wanted, residual)
        if self.model.shard.is_last:
            return hidden
        clock.stop()
        self._link.pass_on(hidden, batch.sampling)
        return None

    def _compute(self, batch: StepBatch, wanted: Wanted | None, residual: Tensor | None) -> Tensor:
        if self._tiles is not None:
            return self._tiles.forward(batch, residual)
        arguments = batch.token_ids, batch.positions, self.arena, batch.meta, wanted
        return self.model.forward(*arguments) if residual is None else self.model.forward(*arguments, residual)

    def _replay(self, plan: StepPlan, edits: Edits | None, clock: DeviceClock) -> Pending | None:
        """The step as a captured graph; None, and nothing is done, where it is not one that graphs can do."""
        assert self.graphs is not None
        if not (len(plan.rows) <= self.graphs.sizes[-1] and max(plan.counts) == 1 and all(plan.samples)):
            return self._replay_mixed(plan, edits, clock)
        host, pending = self.tables.host, Pending(plan.step, clock, plan.rows, None)
        rows, positions = np.array(plan.rows, dtype=np.int64), np.array(plan.starts, dtype=np.int64)
        features = Feature(int(np.bitwise_or.reduce(host.features[rows])))
        if features & Feature.PROMPT_LOGPROBS and (positions < host.num_prompt[rows] - 1).any():
            return None
        if features & ~(IN_GRAPH | Feature.PROMPT_LOGPROBS):
            batch = self._builder.build(plan, edits)
            assert batch.sampling is not None
            logits = self.graphs.launch(rows, positions, features, None, sample=False)
            self._sample_from(logits, batch.sampling, pending)
        else:
            if not plan.added and not plan.copies:
                clock.start()  # nothing has been launched: what the host has taken until here, the device was idle
            pending.tokens = to_host(self.graphs.launch(rows, positions, features, edits, sample=True))
        clock.stop()
        return pending

    def _replay_mixed(self, plan: StepPlan, edits: Edits | None, clock: DeviceClock) -> Pending | None:
        """A step in which some row computes more than one token, or does not sample; None as in `_replay`."""
        assert self.mixed_graphs is not None
        step = mixed_step(plan, self.tables.host.features)
        size = None if step.features & ~IN_GRAPH else self.mixed_graphs.size_for(step)
        if size is None:
            return None
        tokens = to_host(self.mixed_graphs.launch(step, size, edits))
        sampling = step.samples.nonzero()[0]
        clock.stop()
        return Pending(plan.step, clock, step.rows[sampling].tolist(), tokens, picked=sampling.tolist())

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copies whole blocks within each layer, all reads before all writes."""
        source, target = to_device(np.array(copies, dtype=np.int64), self.tables.device).unbind(1)
        for layer in map(as_integers, self.arena):
            layer.index_copy_(2, target, layer.index_select(2, source))

    def _sample_from(self, logits: Tensor, sampling: SamplingBatch, pending: Pending) -> None:
        tokens = self._sampler(logits, sampling)
        self.tables.flat_tokens.index_copy_(0, sampling.places, tokens.int())
        if self._link is not None:
            self._link.share(tokens)
        pending.rows, pending.tokens = sampling.rows.tolist(), to_host(tokens)
        if sampling.union & Feature.LOGPROBS:
            pending.logprobs = self._sampled_logprobs(logits, tokens, sampling)

    def _sampled_logprobs(self, logits: Tensor, tokens: Tensor, sampling: SamplingBatch) -> RowLogprobs:
        asked = ((sampling.features & int(Feature.LOGPROBS)) != 0).nonzero()[0]
        rows = sampling.rows[asked]
        alternatives = self.tables.host.logprobs[rows]
        index = to_device(asked, logits.device) if len(asked) < len(sampling.rows) else None
        found = compute_logprobs(logits, tokens, int(alternatives.max()), index)
        return RowLogprobs(rows.tolist(), [1] * len(rows), alternatives.tolist(), found.map(to_host))

    def _prompt_logprobs(self, hidden: Tensor, batch: StepBatch, pending: Pending) -> None:
        """Of each row that asked: the prompt tokens at starts+1 .. starts+counts, predicted by this step's tokens."""
        host = self.tables.host
        asks = (host.features[batch.rows] & int(Feature.PROMPT_LOGPROBS)) != 0
        if not asks.any():
            return
        counts = np.minimum(batch.counts, host.num_prompt[batch.rows] - 1 - batch.starts)
        chosen = (asks & (counts > 0)).nonzero()[0]
        if not len(chosen):
            return
        rows, alternatives = batch.rows[chosen], host.prompt_logprobs[batch.rows[chosen]]
        parts: list[LogprobTensors] = []
        for row, start, count, first in zip(
            rows.tolist(),
            batch.starts[chosen].tolist(),
            counts[chosen].tolist(),
            batch.query_start[chosen].tolist(),
            strict=True,
        ):
            given = self.tables.tokens[row, start + 1 : start + 1 + count].long()
            states = hidden[first : first + count]
            most = int(alternatives.max())
            parts.append(compute_in_chunks(states, self._compute_logits, given, most, self.tables.vocab_size))
        joined = LogprobTensors.concatenate(parts).map(to_host)
        pending.prompt_logprobs = RowLogprobs(rows.tolist(), counts[chosen].tolist(), alternatives.tolist(), joined)

    def _all_logits(self, hidden: Tensor, batch: StepBatch) -> dict[int, Tensor]:
        logits = self._compute_logits(hidden).float()
        spans = zip(batch.rows.tolist(), batch.query_start[:-1].tolist(), batch.query_start[1:].tolist(), strict=True)
        return {row: logits[first:end].clone() for row, first, end in spans}


def mixed_step(plan: StepPlan, features: np.ndarray) -> MixedStep:
    """The rows of a plan, those with one token first. `features` are the rows' by table row; of those that do not
    sample only prompt logprobs count."""
    rows, starts = np.array(plan.rows, dtype=np.int64), np.array(plan.starts, dtype=np.int64)
    counts, samples = np.array(plan.counts, dtype=np.int64), np.array(plan.samples, dtype=np.bool_)
    order = np.argsort(counts > 1, kind="stable")
    rows, starts, counts, samples = rows[order], starts[order], counts[order], samples[order]
    own = features[rows]
    union = np.bitwise_or.reduce(np.where(samples, own, own & int(Feature.PROMPT_LOGPROBS)), initial=0)
    return MixedStep(rows, starts, counts, samples, Feature(int(union)))
