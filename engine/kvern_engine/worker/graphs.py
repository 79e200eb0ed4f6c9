"""CUDA graphs of whole decode steps: gather the inputs from the row tables, run the model, sample, write the tokens.

One graph a padded batch size, captured at start up to `CAPTURED_AT_START` rows (larger first, sharing one memory pool)
and beyond that when a size is first needed. A step then costs the host one small upload, one launch and one read-back.
Padding rows have position -1: nothing is written for them and their output is not read.

A graph serves every context length: into which pieces contexts are cut is worked out on the device
(`kvern_kernels.split_kv`), and programs beyond that end at once. Rows that ask for more than temperature, min-p, top-k
and top-p (penalties, bias, logprobs) run a second kind of graph, which ends at the logits.
"""

import gc
from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from kvern_engine.models.registry import CausalLM
from kvern_engine.worker.rng import uniform
from kvern_engine.worker.staging import Staging, to_device
from kvern_engine.worker.tables import Feature, RowTables
from kvern_kernels import AttentionMetadata, DecodeWorkspace, gather_decode_inputs, sample_tokens, split_kv

CAPTURED_AT_START = 256
IN_GRAPH = Feature.RANDOM | Feature.TOP_K | Feature.TOP_P | Feature.MIN_P  # what a graph's sampler does

Edits = tuple[np.ndarray, np.ndarray]


def graph_sizes(most: int) -> list[int]:
    """Batch sizes to capture for up to `most` rows, rising: 1, 2, 4, then every 8th to 256, every 16th to 512, every
    32nd beyond, and `most`."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(544, most + 1, 32)]
    return [*(size for size in sizes if size < most), most]


def padded_size(rows: int, sizes: Sequence[int]) -> int:
    """The smallest of the rising `sizes` that holds `rows`, at most the last of them."""
    return sizes[bisect_left(sizes, rows)]


class GraphRecorder:
    """Records steps on one stream into one pool of memory, which all graphs share: they never run at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = capture_stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Runs `step` once eagerly, which loads the libraries' kernels, and once to record it. It must be harmless."""
        graph = torch.cuda.CUDAGraph()
        current, stream = torch.cuda.current_stream(), self._stream
        stream.wait_stream(current)
        collecting = gc.isenabled()
        gc.disable()  # nothing may be freed on the device while it records
        try:
            with torch.cuda.stream(stream), torch.inference_mode():
                step()
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    step()
                finally:
                    graph.capture_end()
        finally:
            if collecting:
                gc.enable()
        current.wait_stream(stream)
        return graph


class DecodeGraphs:
    """Graphs of decode steps of `model` over `kv_caches` with the state in `tables`; sampled tokens of the last step
    are in `tokens` [max_num_seqs] int64, or its logits in `logits` [max_num_seqs, V], until the next one."""

    def __init__(
        self, model: CausalLM, tables: RowTables, kv_caches: Sequence[Tensor], recorder: GraphRecorder
    ) -> None:
        self._model, self._tables, self._kv_caches = model, tables, kv_caches
        most, device = tables.max_num_seqs, tables.device
        self.sizes = graph_sizes(most)
        self._longest = tables.tokens.shape[1] - 1  # max_model_len
        self.tokens = torch.zeros(most, dtype=torch.int64, device=device)
        self._logits: Tensor | None = None
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._staging = Staging(device, 32 * most + 256)
        self._most_edits = most
        self._host_rows = np.full(most, most, dtype=np.int32)
        self._host_positions = np.full(most, -1, dtype=np.int32)
        self._host_uniform = np.zeros(most, dtype=np.float64)
        self._inputs = self._upload(None)[:3]  # at fixed addresses: every upload lands there
        self._query_start = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._workspace = make_workspace(model, tables, self.sizes)
        self._recorder = recorder

    # ------------------------------------------------------------ running

    def launch(
        self, rows: np.ndarray, positions: np.ndarray, features: Feature, edits: Edits | None, sample: bool
    ) -> Tensor:
        """Launches one decode step: `rows` [n] compute the tokens at `positions` [n], n at most `sizes[-1]`.

        `features` is what any of the rows asks for; `edits` are block table entries (`RowTables.set_blocks`) due before
        it. With `sample` the tokens are sampled and written to the tables; returns them, [n] int64, else the logits
        [n, V]; both valid until the next launch.
        """
        count = len(rows)
        size = padded_size(count, self.sizes)
        graph = self._graphs.get((size, sample)) or self._capture(size, sample)
        self._host_rows[:count], self._host_rows[count:size] = rows, self._tables.max_num_seqs
        self._host_positions[:count], self._host_positions[count:size] = positions, -1
        if features & Feature.RANDOM:
            self._host_uniform[:count] = uniform(self._tables.host.seed[rows], positions + 1)
        uploaded = self._upload(edits)
        if edits is not None:
            self._tables.set_blocks(uploaded[-2], uploaded[-1])
        graph.replay()
        if sample:
            return self.tokens[:count]
        assert self._logits is not None
        return self._logits[:count]

    def _upload(self, edits: Edits | None) -> list[Tensor]:
        """Rows, positions and random numbers to their fixed places, and `edits` behind them."""
        if edits is not None and len(edits[0]) > self._most_edits:
            self._tables.set_blocks(*(to_device(part, self._tables.device) for part in edits))
            edits = (edits[0][:1], edits[1][:1])  # once more, so that callers find them in either case
        return self._staging.upload(self._host_rows, self._host_positions, self._host_uniform, *(edits or ()))

    # ------------------------------------------------------------ capturing

    def capture(self, sizes: Sequence[int], report: Callable[[float], None] = lambda share: None) -> None:
        """Captures the sampling graphs of `sizes`, larger first. `report` gets the share that is done."""
        for done, size in enumerate(sorted(sizes, reverse=True), start=1):
            if (size, True) not in self._graphs:
                self._capture(size, True)
            report(done / len(sizes))

    def _capture(self, size: int, sample: bool) -> torch.cuda.CUDAGraph:
        """Records the step of `size` rows, all of them padding."""
        if not sample and self._logits is None:
            shape = (self._tables.max_num_seqs, self._tables.vocab_size)
            self._logits = torch.empty(shape, dtype=self._model.dtype, device=self._tables.device)
        self._host_rows[:size], self._host_positions[:size] = self._tables.max_num_seqs, -1
        self._upload(None)
        graph = self._graphs[size, sample] = self._recorder.record(lambda: self._step(size, sample))
        return graph

    def _step(self, size: int, sample: bool) -> None:
        tables = self._tables
        rows, positions, numbers = (part[:size] for part in self._inputs)
        inputs = gather_decode_inputs(rows, positions, tables.tokens, tables.block_tables, tables.block_size)
        meta = AttentionMetadata(
            query_start=self._query_start[: size + 1],
            seq_lens=inputs.seq_lens,
            block_tables=inputs.block_tables,
            slots=inputs.slots,
            num_decodes=size,
            max_query_len=1,
            max_seq_len=self._longest,
            workspace=self._workspace,
        )
        hidden = self._model.forward(inputs.token_ids, inputs.positions, self._kv_caches, meta)
        logits = self._model.compute_logits(hidden)
        if sample:
            sample_tokens(logits, rows, tables.sampling, numbers, tables.tokens, inputs.places, self.tokens[:size])
        else:
            assert self._logits is not None
            self._logits[:size].copy_(logits)


def make_workspace(model: CausalLM, tables: RowTables, sizes: Sequence[int], padded: bool = False) -> DecodeWorkspace:
    """Scratch memory for decode attention of any of `sizes` rows; `padded` as `split_kv.most_pieces` has it."""
    shard, device = model.shard, tables.device
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    longest = tables.tokens.shape[1] - 1  # max_model_len
    heads = shard.kv_heads.size
    pieces = [split_kv.most_pieces(size, longest, heads, multiprocessors, padded=padded) for size in sizes]
    return DecodeWorkspace.allocate(max(pieces, default=1), shard.heads.size, model.config.head_dim, 1, device)


_streams: dict[torch.device, torch.cuda.Stream] = {}


def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream of `device` that graphs are recorded on: libraries keep a workspace for each stream they see."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]
