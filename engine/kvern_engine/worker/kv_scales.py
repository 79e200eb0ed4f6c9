"""Scales of a KV cache in FP8 from the model itself (`--calculate-kv-scales`), where a checkpoint brings none.

vLLM takes them from the first batch that it happens to serve. Here one prompt of fixed tokens is computed at start into
a small cache of the model's own type: every rank, replica and restart finds the same scales, and an answer does not
depend on who came first. As there, the largest K becomes 200 and the largest V 100 of E4M3's 448: what other prompts
bring may be 2.2 and 4.5 times larger.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvern_engine.core.plan import AddedRow, RowSampling, StepPlan
from kvern_engine.models.registry import CausalLM
from kvern_engine.parallel.groups import TensorGroup
from kvern_engine.worker.runner import Runner
from kvern_engine.worker.tables import RowTables

MOST_TOKENS = 1024
LARGEST_K, LARGEST_V = 200.0, 100.0  # what the largest numbers seen are stored as
_LEAST = 1e-6  # a layer of zeros


def probe_plan(vocab_size: int, tokens: int, block_size: int) -> StepPlan:
    """One prompt of `tokens` tokens, none of whose answer is asked for."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab_size, (tokens,), generator=generator).tolist()
    row = AddedRow(0, "scales", ids, tokens, list(range(math.ceil(tokens / block_size))), RowSampling(seed=0))
    return StepPlan(0, [], [row], [], [], [0], [0], [tokens], [False])


def scales_of(arena: Sequence[Tensor], group: TensorGroup) -> Tensor:
    """The scales of K and V of each layer, [layers, 2] float32, by the largest numbers in `arena`, [2, Hkv, N, bs, D]
    each, of any rank of `group`."""
    largest = torch.stack([layer.abs().amax(dim=(1, 2, 3, 4)) for layer in arena]).float()
    ranks = group.all_gather(largest.view(1, -1)).view(group.size, *largest.shape)
    wanted = torch.tensor([LARGEST_K, LARGEST_V], dtype=torch.float32, device=largest.device)
    return (ranks.amax(0) / wanted).clamp(min=_LEAST)


@torch.inference_mode()
def calculate(
    model: CausalLM, tables: RowTables, group: TensorGroup, most_tokens: int, block_size: int
) -> Sequence[tuple[float, float]]:
    """Sets the scales of K and V of each layer of `model`, which must not use a cache in FP8 yet, and returns them."""
    tokens = min(MOST_TOKENS, most_tokens, tables.tokens.shape[1] - 1)
    plan = probe_plan(tables.vocab_size, tokens, block_size)
    shard, blocks = model.shard, len(plan.added[0].blocks)
    shape = (2, shard.kv_heads.size, blocks, block_size, model.config.head_dim)
    arena = [torch.zeros(shape, dtype=model.dtype, device=tables.device) for _ in range(shard.num_layers)]
    Runner(model, tables, arena, most_tokens).execute(plan).result()
    tables.clear()
    scales = scales_of(arena, group)
    model.set_kv_scales(scales)
    return [(k, v) for k, v in scales.tolist()]


def spans(scales: Sequence[tuple[float, float]]) -> tuple[float, float, float, float]:
    """The least and the largest of K and of V."""
    of_k, of_v = zip(*scales, strict=True)
    return min(of_k), max(of_k), min(of_v), max(of_v)
