"""What the attention kernels need to know of one step's batch: lengths, block tables and write slots.

It holds tensors and their CPU copies; it decides nothing about kernels (`cpu_attention.py`, `split_kv.py` and the
Triton launchers do).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class DecodeWorkspace:
    """Scratch memory of decode attention: partial outputs and (maximum, sum) of each piece of a context, float32.
    Launches that may overlap need one each.
    """

    partial: Tensor
    stats: Tensor

    @classmethod
    def allocate(
        cls, pieces: int, heads: int, head_dim: int, query_len: int, device: torch.device | str
    ) -> "DecodeWorkspace":
        """For launches of up to `pieces` pieces (`split_kv.most_pieces`) with up to `query_len` query tokens a row."""
        parts = pieces * heads * query_len
        return cls(
            torch.empty(parts * head_dim, dtype=torch.float32, device=device),
            torch.empty(parts * 2, dtype=torch.float32, device=device),
        )

    def holds(self, pieces: int, heads: int, head_dim: int, query_len: int) -> bool:
        """Whether a launch of these sizes fits."""
        parts = pieces * heads * query_len
        return self.partial.numel() >= parts * head_dim and self.stats.numel() >= parts * 2


@dataclass
class DeviceRows:
    """Which rows of a captured step have one query token and which are prompts, where only the device knows it.

    `decode_lens` [R] int32: `seq_lens` of the rows with one query token, which come first, 0 for the others;
    `first_prompt` [1] int32: the row behind them; at most `max_prompts` rows follow that have tokens.
    """

    decode_lens: Tensor
    first_prompt: Tensor
    max_prompts: int


@dataclass
class AttentionMetadata:
    """One step's batch of `R` rows and `T` tokens over a paged KV cache with blocks of `block_size` tokens.

    Rows are ordered: the first `num_decodes` have exactly one query token, the others any number. A padded row (in a
    CUDA graph) has `seq_lens` 0 and `slots` -1: nothing is written and its output is zero.

    Shapes: `query_start` [R+1] int32, the first token of each row in the flat batch; `seq_lens` [R] int32, each row's
    context including this step's tokens; `block_tables` [R, max_blocks] int32; `slots` [T] int64,
    block * block_size + offset where each token's K and V go, -1 for none.

    `query_lens` and `seq_lens_list` are CPU copies of the lengths: with them the CPU path never reads a tensor back.
    `workspace` is the scratch memory of decode attention; graphs that never run at once share one (None: allocated).
    `device_rows`: in a captured step with prompts, where `num_decodes` is not known; R is then at most T.
    `each_alone`: rows, of one query token each, must not influence each other's last bits, nor may the number of heads
    (`each_alone.py`; a GPU's decode kernel treats them so, given a fixed number of rows).
    """

    query_start: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    slots: Tensor
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    query_lens: list[int] | None = None
    seq_lens_list: list[int] | None = None
    workspace: DecodeWorkspace | None = None
    device_rows: DeviceRows | None = None
    each_alone: bool = False
    # What a path computed from the fields above on its first call of a step, reused by the step's other layers.
    plan_cache: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_rows(self) -> int:
        return int(self.seq_lens.shape[0])

    def lengths(self) -> tuple[list[int], list[int]]:
        """Query and context lengths as lists. Reads tensors back only where the CPU copies were not given."""
        if self.query_lens is None:
            self.query_lens = self.query_start.diff().tolist()
        if self.seq_lens_list is None:
            self.seq_lens_list = self.seq_lens.tolist()
        return self.query_lens, self.seq_lens_list

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> "AttentionMetadata":
        """Metadata of rows given as lists; the slots are those of each row's last `query_lens` positions.

        Raises ValueError where a row's lengths or its block table do not fit, or decode rows do not come first.
        """
        if not len(query_lens) == len(seq_lens) == len(block_tables):
            raise ValueError(
                f"query_lens, seq_lens and block_tables must have one entry a row, got {len(query_lens)}, "
                f"{len(seq_lens)} and {len(block_tables)}"
            )
        num_decodes = 0
        while num_decodes < len(query_lens) and query_lens[num_decodes] == 1:
            num_decodes += 1
        starts, slots = [0], list[int]()
        for row, (count, length, table) in enumerate(zip(query_lens, seq_lens, block_tables, strict=True)):
            if not 0 < count <= length:
                raise ValueError(f"row {row}: query_lens must be in 1..{length} (its seq_len), got {count}")
            if len(table) * block_size < length:
                raise ValueError(
                    f"row {row}: {length} tokens need {-(-length // block_size)} blocks of {block_size}, "
                    f"its block table has {len(table)}"
                )
            starts.append(starts[-1] + count)
            slots.extend(table[p // block_size] * block_size + p % block_size for p in range(length - count, length))
        width = max((len(table) for table in block_tables), default=0)
        tables = torch.zeros(len(block_tables), max(width, 1), dtype=torch.int32)
        for row, table in enumerate(block_tables):
            tables[row, : len(table)] = torch.tensor(table, dtype=torch.int32)
        return cls(
            query_start=torch.tensor(starts, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(list(seq_lens), dtype=torch.int32, device=device),
            block_tables=tables.to(device),
            slots=torch.tensor(slots, dtype=torch.int64, device=device),
            num_decodes=num_decodes,
            max_query_len=max(query_lens, default=0),
            max_seq_len=max(seq_lens, default=0),
            query_lens=list(query_lens),
            seq_lens_list=list(seq_lens),
        )
