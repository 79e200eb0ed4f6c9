"""CUDA graphs of steps in which prompts are computed, alone or beside decodes, up to MOST_TOKENS tokens.

Launching such a step kernel by kernel takes the host longer than the device takes to compute it. A graph is captured
for a padded number of tokens and of rows; rows with one token come first, and where the prompts begin is known on the
device only (`kvern_kernels.DeviceRows`). Every row's last token goes through the last layer and the sampler; what rows
sample that are not at the end of their prompt is not written anywhere.

Larger steps keep the device busy for longer than their launches take, and run eagerly.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvern_engine.layers.attention import Wanted
from kvern_engine.models.registry import CausalLM
from kvern_engine.worker.graphs import Edits, GraphRecorder, make_workspace
from kvern_engine.worker.rng import uniform
from kvern_engine.worker.staging import Staging, to_device
from kvern_engine.worker.tables import Feature, RowTables
from kvern_kernels import AttentionMetadata, DeviceRows, gather_decode_inputs, sample_tokens

MOST_TOKENS = 1024
MOST_PROMPTS = 16  # rows with more than one token
_ROWS = (16, 64, 256)
_TOKENS = {
    16: (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024),
    64: (64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 1024),
    256: (*range(256, 641, 32), 704, 768, 832, 896, 960, 1024),
}


def mixed_sizes(max_num_seqs: int, max_num_batched_tokens: int) -> list[tuple[int, int]]:
    """(tokens, rows) to capture, rising in rows, then in tokens: rows up to `max_num_seqs` or 256, whichever is less,
    and no more tokens than a step may have."""
    most_rows = min(max_num_seqs, _ROWS[-1])
    fitting = [rows for rows in _ROWS if rows < most_rows]
    sizes = []
    for rows in [*fitting, most_rows]:
        table = _TOKENS[next(known for known in _ROWS if known >= rows)]
        limit = min(MOST_TOKENS, max_num_batched_tokens)
        tokens = [count for count in table if rows <= count <= limit]
        if rows < table[0] and rows <= limit:
            tokens.insert(0, rows)
        sizes += [(count, rows) for count in tokens]
    return sizes


@dataclass
class MixedStep:
    """A step as the host knows it, rows in batch order (those with one token first): `rows`, `starts`, `counts` [R]
    int64, `samples` [R] bool, and the union of the rows' features."""

    rows: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    samples: np.ndarray
    features: Feature

    @property
    def num_prompts(self) -> int:
        return int((self.counts > 1).sum())


class MixedGraphs:
    """Graphs of steps with prompts of `model` over `kv_caches` with the state in `tables`; what the last step sampled
    is in `tokens` [rows] int64 until the next one."""

    def __init__(
        self,
        model: CausalLM,
        tables: RowTables,
        kv_caches: Sequence[Tensor],
        recorder: GraphRecorder,
        max_num_batched_tokens: int,
    ) -> None:
        self._model, self._tables, self._kv_caches, self._recorder = model, tables, kv_caches, recorder
        self.sizes = mixed_sizes(tables.max_num_seqs, max_num_batched_tokens)
        device = tables.device
        self._most_rows = self.sizes[-1][1] if self.sizes else 0
        self._most_tokens = max((tokens for tokens, _ in self.sizes), default=0)
        self.tokens = torch.zeros(self._most_rows, dtype=torch.int64, device=device)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._longest = tables.tokens.shape[1] - 1  # max_model_len
        rows, tokens = self._most_rows, self._most_tokens
        self._staging = Staging(device, 64 * rows + 8 * tokens + 1024)
        self._host_tokens = np.zeros((2, tokens), dtype=np.int32)  # row and position of each token
        self._host_rows = np.zeros(
            (3, rows), dtype=np.int32
        )  # table row, position of the last token, whether it samples
        self._host_starts = np.zeros(rows + 2, dtype=np.int32)  # query_start, and the first prompt's row
        self._host_uniform = np.zeros(rows, dtype=np.float64)
        self._clear_host()
        self._inputs = self._upload(None)[:4]  # at fixed addresses: every upload lands there
        self._numbers = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._workspace = make_workspace(model, tables, sorted({rows for _, rows in self.sizes}), padded=True)

    # ------------------------------------------------------------ running

    def size_for(self, step: MixedStep) -> tuple[int, int] | None:
        """(tokens, rows) of the graph for a step; None where none is large enough."""
        total, rows = int(step.counts.sum()), len(step.rows)
        if total > self._most_tokens or rows > self._most_rows or step.num_prompts > MOST_PROMPTS:
            return None
        padded_rows = next(count for count in sorted({count for _, count in self.sizes}) if count >= rows)
        tokens = [count for count, of in self.sizes if of == padded_rows]
        place = bisect_left(tokens, total)
        return (tokens[place], padded_rows) if place < len(tokens) else None

    def launch(self, step: MixedStep, size: tuple[int, int], edits: Edits | None) -> Tensor:
        """Launches a step by the graph of `size`; `edits` are block table entries due before it. Returns what each row
        samples, [R] int64, valid until the next launch; only rows with `samples` get it written to their tables."""
        graph = self._graphs.get(size) or self._capture(size)
        count, total = len(step.rows), int(step.counts.sum())
        self._clear_host()
        ends = np.cumsum(step.counts)
        begins = ends - step.counts
        self._host_tokens[0, :total] = np.repeat(step.rows, step.counts)
        self._host_tokens[1, :total] = np.arange(total) + np.repeat(step.starts - begins, step.counts)
        last = step.starts + step.counts - 1
        self._host_rows[:, :count] = step.rows, last, step.samples
        self._host_starts[1 : count + 1] = ends
        self._host_starts[count + 1 : -1] = total
        self._host_starts[-1] = count - step.num_prompts
        if step.features & Feature.RANDOM:
            self._host_uniform[:count] = uniform(self._tables.host.seed[step.rows], last + 1)
        uploaded = self._upload(edits)
        if edits is not None:
            self._tables.set_blocks(uploaded[-2], uploaded[-1])
        graph.replay()
        return self.tokens[:count]

    def _clear_host(self) -> None:
        """Padding everywhere: positions of -1, rows of no tokens."""
        self._host_tokens[0], self._host_tokens[1] = self._tables.max_num_seqs, -1
        self._host_rows[0], self._host_rows[1], self._host_rows[2] = self._tables.max_num_seqs, -1, 0
        self._host_starts[:] = 0

    def _upload(self, edits: Edits | None) -> list[Tensor]:
        if edits is not None and len(edits[0]) > self._most_rows:
            self._tables.set_blocks(*(to_device(part, self._tables.device) for part in edits))
            edits = (edits[0][:1], edits[1][:1])  # once more, so that callers find them in either case
        return self._staging.upload(
            self._host_tokens, self._host_rows, self._host_starts, self._host_uniform, *(edits or ())
        )

    # ------------------------------------------------------------ capturing

    def capture(self, sizes: Sequence[tuple[int, int]], report: Callable[[float], None] = lambda share: None) -> None:
        """Captures the graphs of `sizes`, larger first. `report` gets the share that is done."""
        for done, size in enumerate(sorted(sizes, reverse=True), start=1):
            if size not in self._graphs:
                self._capture(size)
            report(done / len(sizes))

    def _capture(self, size: tuple[int, int]) -> torch.cuda.CUDAGraph:
        """Records the step of `size`, all of it padding."""
        self._clear_host()
        self._upload(None)
        graph = self._graphs[size] = self._recorder.record(lambda: self._step(*size))
        return graph

    def _step(self, num_tokens: int, num_rows: int) -> None:
        tables = self._tables
        of_tokens, of_rows, starts, numbers = self._inputs
        token_rows, positions = (part[:num_tokens] for part in of_tokens)
        rows, last, samples = (part[:num_rows] for part in of_rows)
        query_start, first_prompt = starts[: num_rows + 1], starts[-1:]
        size = tables.block_size
        each = gather_decode_inputs(token_rows, positions, tables.tokens, tables.block_tables, size, False)
        row = gather_decode_inputs(rows, last, tables.tokens, tables.block_tables, size)
        places = torch.where(samples > 0, row.places, -1)
        decode_lens = torch.where(self._numbers[:num_rows] < first_prompt, row.seq_lens, 0)
        meta = AttentionMetadata(
            query_start=query_start,
            seq_lens=row.seq_lens,
            block_tables=row.block_tables,
            slots=each.slots,
            num_decodes=0,
            max_query_len=num_tokens,
            max_seq_len=self._longest,
            workspace=self._workspace,
            device_rows=DeviceRows(decode_lens, first_prompt, min(MOST_PROMPTS, num_rows)),
        )
        one_each = AttentionMetadata(
            query_start=self._numbers[: num_rows + 1],
            seq_lens=row.seq_lens,
            block_tables=row.block_tables,
            slots=each.slots[:0],
            num_decodes=num_rows,
            max_query_len=1,
            max_seq_len=self._longest,
            workspace=self._workspace,
        )
        index = (query_start[1:] - 1).clamp_(min=0).long()
        wanted = Wanted(index, one_each)
        hidden = self._model.forward(each.token_ids, each.positions, self._kv_caches, meta, wanted)
        logits = self._model.compute_logits(hidden)
        out = self.tokens[:num_rows]
        sample_tokens(logits, rows, tables.sampling, numbers[:num_rows], tables.tokens, places, out)
