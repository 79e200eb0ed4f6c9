"""What a layout to come needs of a GPU is made at the start: kernels compiled and loaded, libraries warm. In the pause
of a switch nothing of that is to be waited for.

A rank of each other size is played by a model of one layer, alone: sums over ranks that are not there are left out.
"""

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvern_engine.models.registry import CausalLM, model_class
from kvern_engine.parallel.groups import ParallelContext, TensorGroup
from kvern_engine.parallel.layout import Layout, possible_sizes
from kvern_engine.worker.load import random_weights
from kvern_engine.worker.profile_plan import profile_plan
from kvern_engine.worker.runner import Runner
from kvern_engine.worker.tables import RowTables
from kvern_kernels import Fp8Weight, add_rms_norm

if TYPE_CHECKING:
    from kvern_engine.worker.worker import Worker

log = logging.getLogger(__name__)

_DECODES = (256, 128, 64, 32, 16, 8, 4, 2, 1)  # rows, the largest first
_MIXED = 6  # so many of the graphs with prompts, spread over the sizes


class AloneGroup(TensorGroup):
    """One rank of several, the others left out; what it runs is what a rank of `like` would."""

    def __init__(self, size: int, rank: int, like: TensorGroup | None) -> None:
        super().__init__(size, rank)
        self._like = like

    def sums_in_norm(self, width: int, dtype: torch.dtype) -> bool:
        return self._like is not None and self._like.sums_in_norm(width, dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, weight, eps)

    def all_reduce(self, x: Tensor) -> Tensor:
        """`x`, as it is."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """`x` [R, n] in place of every rank's."""
        return x.repeat(1, self.size)


def other_layouts(worker: "Worker") -> list[Layout]:
    """The layouts that the worker's pod could change to."""
    world, own = worker.layout.world, worker.layout.tensor
    sizes = possible_sizes(worker.model.config, world, worker.config.batch_invariant)
    return [Layout(world // size, size) for size in sizes if world % size == 0 and size != own]


def warm_other_layouts(worker: "Worker") -> list[Tensor | Fp8Weight]:
    """Connects the ranks of each other layout and runs a layer of its shapes; the weights of one, to choose kernels
    for."""
    products: list[Tensor | Fp8Weight] = []
    for layout in other_layouts(worker):
        like = None if worker.groups is None else worker.groups.context(layout).tensor
        if like is not None:
            like.all_reduce(torch.ones(1, device=worker.device))
        model = _one_layer(worker, layout, like)
        products += model.products()
        _run(worker, model)
        log.debug("warmed up for %s", layout)
    return products


def _one_layer(worker: "Worker", layout: Layout, like: TensorGroup | None) -> CausalLM:
    config = replace(worker.model.config, num_layers=1)
    group = AloneGroup(layout.tensor, layout.coordinates(worker.rank)[2], like)
    model = model_class(config.architecture)(
        config,
        max_positions=worker.max_model_len,
        dtype=worker.model.dtype,
        device=worker.device,
        parallel=ParallelContext(layout, worker.rank, group),
        invariant=worker.config.batch_invariant,
    )
    random_weights(model, 0)
    return model


@torch.inference_mode()
def _run(worker: "Worker", model: CausalLM) -> None:
    tokens, limits = worker.step_limits.max_num_batched_tokens, worker.step_limits
    size, head_dim, heads = worker.config.block_size, model.config.head_dim, model.shard.kv_heads.size
    tables = RowTables(
        max_num_seqs=limits.max_num_seqs,
        max_model_len=worker.max_model_len,
        block_size=size,
        vocab_size=model.config.vocab_size,
        device=worker.device,
    )
    layer = torch.zeros(2, heads, 1, size, head_dim, dtype=model.dtype, device=worker.device)
    runner = Runner(model, tables, [layer], tokens, invariant=worker.config.batch_invariant)
    runner.execute(profile_plan(tokens, limits.max_num_seqs, worker.max_model_len, size)).result()
    if worker.uses_graphs:
        decode, mixed = runner.add_graphs()
        decode.capture([rows for rows in _DECODES if rows in decode.sizes])
        mixed.capture(mixed.sizes[:: max(1, len(mixed.sizes) // _MIXED)])
        torch.cuda.synchronize(worker.device)
