"""A worker becomes a rank of another layout: a second one is built beside it, over the same device, and gets weights
and KV from those that have them; then one of the two is let go.

What goes where is planned in `parallel/reshard.py` and `parallel/kv_reshard.py`; every rank makes the same plan, from
models without memory (torch's meta device). Until the second one serves, nothing of the first is touched.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from kvern_engine.core.plan import WorkerReady
from kvern_engine.layers.parameters import pieces
from kvern_engine.loading.parts import WeightPart
from kvern_engine.models.registry import CausalLM, model_class
from kvern_engine.parallel.exchange import as_bytes, exchange, join_pod
from kvern_engine.parallel.groups import ParallelContext, TensorGroup
from kvern_engine.parallel.kv_reshard import KvMove, kv_rounds, plan_kv_moves
from kvern_engine.parallel.layout import Layout, check_layout
from kvern_engine.parallel.messages import Reform
from kvern_engine.parallel.reshard import Move, Pieces, plan_moves, rounds
from kvern_engine.worker.load import parameter_bytes
from kvern_engine.worker.tables import RowTables
from kvern_engine.worker.worker import CPU_LAYOUT_BYTES, Worker

SLICE_BYTES = 32 << 20  # what a pair of ranks has on its way at once


def why_not(worker: Worker) -> str | None:
    """Why this worker's layout cannot be changed while it serves; None where it can."""
    if worker.device.type != "cpu":
        return "ranks exchange weights over gloo, between CPUs only"
    if worker.layout.pipeline > 1:
        return f"the model is a pipeline of {worker.layout.pipeline} stages"
    if worker._quantization is not None:
        return f"the weights are quantized ({worker._quantization})"
    return None


class Reformed:
    """The worker that `before` becomes: `worker`, which has loaded and reported `ready`. `move_kv` comes next."""

    def __init__(self, before: Worker, ready: WorkerReady, message: Reform) -> None:
        reason = why_not(before)
        if reason is not None:
            raise ValueError(f"the layout cannot be changed: {reason}")
        self._before = before
        self.seconds: dict[str, float] = {}
        after = Layout(message.data, message.tensor, before.layout.pipeline)
        check_layout(before.model.config, after)
        with self._measured("groups"):
            self._pod, context = join_pod(after, before.rank, message.rendezvous, message.timeout)
        with self._measured("build"):
            self.worker = _beside(before, after, context)
        with self._measured("weights"):
            self.bytes_received = self._move_weights()
        with self._measured("layouts"):
            weight_bytes = parameter_bytes(self.worker.model)
            if weight_bytes <= CPU_LAYOUT_BYTES:
                self.worker.model.add_cpu_layouts()
        with self._measured("kv_cache"):
            size = self.worker._size_kv_cache(0)
            self.worker.runner = self.worker._make_runner(size.num_blocks)
        self.ready = msgspec.structs.replace(
            ready,
            num_blocks=size.num_blocks,
            kv_bytes=size.num_bytes,
            weight_bytes=weight_bytes,
            load_seconds=dict(self.seconds),
        )

    def _measured(self, name: str) -> "_Stopwatch":
        return _Stopwatch(self.seconds, name)

    @torch.inference_mode()
    def _move_weights(self) -> int:
        before, after = self._before, self.worker
        moves = plan_moves(_held(before.model, before.layout), _held(after.model, after.layout))
        have, want = pieces(before.model.destinations()), pieces(after.model.destinations())
        size = before.model.dtype.itemsize
        for move in moves:
            if move.source == move.target == before.rank:
                _part(want, move).copy_(_part(have, move))

        def unpack(move: Move, data: Tensor) -> None:
            view = _part(want, move)
            view.copy_(data.view(view.dtype).view(view.shape))

        return exchange(
            self._pod,
            before.rank,
            rounds(moves, SLICE_BYTES // size),
            lambda move: move.size * (want if move.target == before.rank else have)[move.name][0].itemsize,
            lambda move: as_bytes(_part(have, move)),
            unpack,
        )

    @torch.inference_mode()
    def move_kv(self, moves: Sequence[tuple[int, int, list[tuple[int, int]]]]) -> dict[str, float]:
        """Bring the blocks where they belong; seconds by what took them."""
        before, after = self._before, self.worker
        assert before.runner is not None and after.runner is not None
        seconds: dict[str, float] = {}
        with _Stopwatch(seconds, "kv"):
            blocks = {(old, new): pairs for old, new, pairs in moves}
            plan = plan_kv_moves(before.model.config, before.layout, after.layout, blocks)
            have, want = _as_integers(before.runner.arena), _as_integers(after.runner.arena)
            held = before.model.shard.kv_heads.start, after.model.shard.kv_heads.start
            # [layers, 2, heads, blocks, block_size, head_dim]: what one head of one block takes.
            each = have.shape[0] * 2 * have.shape[4] * have.shape[5] * have.itemsize

            def take(move: KvMove) -> Tensor:
                heads = have[:, :, move.heads[0] - held[0] : move.heads[1] - held[0]]
                return heads.index_select(3, torch.tensor(move.old))

            def put(move: KvMove, data: Tensor) -> None:
                heads = want[:, :, move.heads[0] - held[1] : move.heads[1] - held[1]]
                heads.index_copy_(3, torch.tensor(move.new), data)

            def unpack(move: KvMove, data: Tensor) -> None:
                shape = have.shape[0], 2, move.heads[1] - move.heads[0], len(move.new), *have.shape[4:]
                put(move, data.view(want.dtype).view(shape))

            for move in plan:
                if move.source == move.target == before.rank:
                    put(move, take(move))
            exchange(
                self._pod,
                before.rank,
                kv_rounds(plan, each, SLICE_BYTES),
                lambda move: each * (move.heads[1] - move.heads[0]) * len(move.old),
                lambda move: as_bytes(take(move)),
                unpack,
            )
        self._pod = None  # the ranks are done with each other
        return seconds


class _Stopwatch:
    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self._seconds, self._name = seconds, name

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, *_: Any) -> None:
        self._seconds[self._name] = round(time.perf_counter() - self._begin, 6)


def _beside(before: Worker, after: Layout, context: ParallelContext) -> Worker:
    """A worker of the layout `after` with a model whose weights are still to come."""
    sizes = {"data_parallel_size": after.data, "tensor_parallel_size": after.tensor}
    made = Worker(before.config.model_copy(update=sizes), before.rank, context)
    made.max_model_len, made.step_limits = before.max_model_len, before.step_limits
    made._quantization, made._fp8_kv, made._fit = before._quantization, before._fp8_kv, before._fit
    config = before.model.config
    made.model = model_class(config.architecture)(
        config, max_positions=made.max_model_len, dtype=before.model.dtype, device=made.device, parallel=context
    )
    made.tables = RowTables(
        max_num_seqs=made.step_limits.max_num_seqs,
        max_model_len=made.max_model_len,
        block_size=made.config.block_size,
        vocab_size=config.vocab_size,
        device=made.device,
    )
    return made


def _held(model: CausalLM, layout: Layout) -> Pieces:
    """What each rank of the layout holds; `model` is that of any of them. Ranks at the same place in their engines hold
    the same."""
    build = model_class(model.config.architecture)
    by_place: dict[int, dict[str, WeightPart]] = {}
    for place in range(layout.tensor):
        context = ParallelContext(layout, place, TensorGroup(layout.tensor, place))
        made = build(model.config, max_positions=1, dtype=model.dtype, device=torch.device("meta"), parallel=context)
        by_place[place] = {name: part for name, (_, part) in pieces(made.destinations()).items()}
    return {rank: by_place[layout.coordinates(rank)[2]] for rank in range(layout.world)}


def _part(found: Mapping[str, tuple[Tensor, WeightPart]], move: Move) -> Tensor:
    """The view of a parameter that a move reads or writes."""
    view, part = found[move.name]
    return view[tuple(slice(a - first, b - first) for (a, b), (first, _) in zip(move.ranges, part.ranges, strict=True))]


def _as_integers(arena: Tensor) -> Tensor:
    """torch does not index tensors in FP8."""
    return arena.view(torch.uint8) if arena.itemsize == 1 else arena
