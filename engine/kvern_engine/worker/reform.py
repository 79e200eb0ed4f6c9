"""A worker becomes a rank of another layout: a second one is built beside it, over the same device, and gets weights
and KV from those that have them; then one of the two is let go.

What goes where is planned in `parallel/reshard.py` and `parallel/kv_reshard.py`; every rank makes the same plan, from
models without memory (torch's meta device). Until the second one serves, nothing of the first is touched.
"""

import functools
import gc
import logging
import sys
import time
import traceback
from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from kvern_engine.core.plan import WorkerReady
from kvern_engine.layers.parameters import pieces
from kvern_engine.loading.parts import WeightPart
from kvern_engine.logs import fields
from kvern_engine.models.registry import CausalLM, model_class
from kvern_engine.parallel.exchange import (
    Transfer,
    as_bytes,
    exchange,
    given_up_file,
    join_pod,
    meet_again,
    over_gloo,
)
from kvern_engine.parallel.groups import ParallelContext, TensorGroup
from kvern_engine.parallel.kv_reshard import KvMove, in_slices, kv_rounds, plan_kv_moves
from kvern_engine.parallel.layout import Layout, check_layout
from kvern_engine.parallel.messages import Reform
from kvern_engine.parallel.reshard import Move, Pieces, plan_moves, rounds
from kvern_engine.worker.kv_store import ArenaKv, KvSource, StagedKv, as_integers
from kvern_engine.worker.load import parameter_bytes
from kvern_engine.worker.memory import KvCacheSize, most_beside
from kvern_engine.worker.tables import RowTables
from kvern_engine.worker.worker import CPU_LAYOUT_BYTES, Worker

log = logging.getLogger(__name__)

SLICE_BYTES = 32 << 20  # what a pair of ranks has on its way at once
GPU_SLICE_BYTES = 256 << 20  # the same between GPUs
MARGIN_BYTES = 3 << 29  # on a GPU, left to graphs, buffers of a slice and libraries


def why_not(worker: Worker) -> str | None:
    """Why this worker's layout cannot be changed while it serves; None where it can."""
    if worker.device.type != "cpu" and worker.groups is None:
        return f"ranks on {worker.device.type} do not stay connected (see KVERN_GPU_LAYOUT_SWITCH)"
    if worker.layout.pipeline > 1:
        return f"the model is a pipeline of {worker.layout.pipeline} stages"
    if worker._quantization is not None:
        return f"the weights are quantized ({worker._quantization})"
    if worker.config.cpu_offload_gb > 0:
        return "some of the weights are in the host's memory (cpu_offload_gb)"
    return None


class Reformed:
    """The worker that `before` becomes: `worker`, which has loaded and reported `ready`. `move_kv` comes next.

    Where there is no room for two arenas (`Reform.kept`), the old one is freed as the blocks that are to outlive it are
    taken out of it; `undo` makes it anew. Where there is not even room for these and the new one, the new one is made
    layer by layer while they move, and what has moved is let go: after that `undo` finds K and V lost
    (`Worker.lost_kv`).
    """

    worker: Worker

    def __init__(self, before: Worker, ready: WorkerReady, message: Reform) -> None:
        reason = why_not(before)
        if reason is not None:
            raise ValueError(f"the layout cannot be changed: {reason}")
        self._before, self._message, self._blocks = before, message, ready.num_blocks
        self._staged: StagedKv | None = None
        self._gave_up_arena = self._in_turn = False
        self.seconds: dict[str, float] = {}
        after = Layout(message.data, message.tensor, before.layout.pipeline)
        check_layout(before.model.config, after)
        with self._measured("groups"):
            self._transfer, context = self._connect(after)
        try:
            self.ready = self._build(ready, after, context)
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # they hold what was built
            self.undo()
            raise

    def _build(self, ready: WorkerReady, after: Layout, context: ParallelContext) -> WorkerReady:
        before, kept = self._before, self._message.kept
        if kept is not None:
            with self._measured("staging"):
                self._stage(kept[before.layout.coordinates(before.rank)[0]])
        with self._measured("build"):
            self.worker = _beside(before, after, context)
        with self._measured("weights"):
            log.debug("%d bytes of weights have come from other ranks", self._move_weights())
        with self._measured("layouts"):
            weight_bytes = parameter_bytes(self.worker.model)
            if before.device.type == "cpu" and weight_bytes <= CPU_LAYOUT_BYTES:
                self.worker.model.add_cpu_layouts()
        with self._measured("kv_cache"):
            self.worker.memory_used = before.memory_used + weight_bytes - parameter_bytes(before.model)
            size = self._size_kv_cache()
            arena: list[Tensor] = [] if self._in_turn else self.worker._arena(size.num_blocks)
            self.worker.runner = self.worker._make_runner(arena)
            if self.worker.uses_graphs:
                self.worker.runner.add_graphs()  # captured as steps need them: all ranks get the same steps
        return msgspec.structs.replace(
            ready,
            num_blocks=size.num_blocks,
            kv_bytes=size.num_bytes,
            weight_bytes=weight_bytes,
            load_seconds=dict(self.seconds),
        )

    def _measured(self, name: str) -> "_Stopwatch":
        return _Stopwatch(self.seconds, name, self._before.device)

    # ------------------------------------------------------------ ranks

    def _connect(self, after: Layout) -> tuple[Transfer, ParallelContext]:
        """When all ranks of the pod have come. Raises RankMissingError."""
        before, message = self._before, self._message
        if before.groups is None:
            pod, context = join_pod(after, before.rank, message.rendezvous, message.timeout)
            return over_gloo(pod), context
        meet_again(after, before.rank, message.rendezvous, message.timeout)
        return before.groups.transfer, before.groups.context(after)

    def _settle(self) -> None:
        """Until what was exchanged is there. Raises RuntimeError where a rank is gone."""
        if self._before.groups is not None:
            self._before.groups.settle(given_up_file(self._message.rendezvous).exists, self._message.timeout)

    @property
    def _slice(self) -> int:
        return GPU_SLICE_BYTES if self._before.device.type == "cuda" else SLICE_BYTES

    # ------------------------------------------------------------ memory

    def _size_kv_cache(self) -> KvCacheSize:
        """All ranks of an engine must call this. Decides whether the arena is made in turn with what was staged."""
        worker, used = self.worker, self.worker.memory_used
        if self._staged is None:
            return worker._size_kv_cache(used)
        room, wanted = self._room(), worker._available(worker._block_bytes, used)
        worker.most_kv_bytes = most_beside(room, wanted, self._staged.device_bytes)
        size = worker._size_kv_cache(used)
        self._in_turn = size.num_bytes > room
        return size

    @torch.inference_mode()
    def _stage(self, blocks: Sequence[int]) -> None:
        """Take the blocks out of the old arena and free it, with the graphs that were recorded over it."""
        before = self._before
        assert before.runner is not None
        self._had_graphs = before.runner.graphs is not None
        self._gave_up_arena = True
        arena, before.runner = before.runner.arena, None  # nothing of a runner holds itself: its graphs are gone
        room = self._room()
        staged = self._staged = StagedKv(arena, blocks, room, self._empty_cache)
        sizes = {"bytes": staged.nbytes, "room_bytes": room, "host_bytes": staged.host_bytes}
        log.info("layout: KV that outlives its arena", extra=fields(**sizes))
        if staged.host_bytes:
            log.warning("the host keeps %d bytes of KV while the layout changes", staged.host_bytes)

    def _room(self) -> int:
        """Bytes that can be taken on the device now."""
        device = self._before.device
        if device.type != "cuda":
            return sys.maxsize
        self._empty_cache()
        return max(0, torch.cuda.mem_get_info(device)[0] - MARGIN_BYTES)

    def _empty_cache(self) -> None:
        if self._before.device.type == "cuda":
            torch.cuda.synchronize(self._before.device)
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def undo(self) -> None:
        """The old worker can compute again: its arena is made anew where it was given up."""
        before = self._before
        if hasattr(self, "worker"):
            del self.worker
        if not self._gave_up_arena:
            return
        gc.collect()
        self._empty_cache()
        staged, self._staged = self._staged, None
        if staged is not None and staged.is_whole:
            arena = staged.put_back(lambda: before.arena_layer(self._blocks), self._empty_cache)
        else:
            before.lost_kv, staged = True, None
            arena = before._arena(self._blocks)
        before.runner = before._make_runner(arena)
        if self._had_graphs:
            before.runner.add_graphs()

    def settle(self) -> None:
        """The new worker has taken over: what the old one had is given back to the device."""
        device = self._before.device
        del self._before
        self._staged = None
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    # ------------------------------------------------------------ what moves

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

        received = exchange(
            self._transfer,
            before.rank,
            rounds(moves, self._slice // size),
            lambda move: move.size * (want if move.target == before.rank else have)[move.name][0].itemsize,
            lambda move: as_bytes(_part(have, move)),
            unpack,
            before.device,
        )
        self._settle()
        return received

    @torch.inference_mode()
    def move_kv(self, moves: Sequence[tuple[int, int, list[tuple[int, int]]]]) -> dict[str, float]:
        """Bring the blocks where they belong; seconds by what took them."""
        before, after = self._before, self.worker
        seconds: dict[str, float] = {}
        with _Stopwatch(seconds, "kv", before.device):
            blocks = {(old, new): pairs for old, new, pairs in moves}
            plan = plan_kv_moves(before.model.config, before.layout, after.layout, blocks)
            assert after.runner is not None
            layers = _Layers(plan, self._kv_source(), before, after, self._slice)
            for number in range(after.model.shard.num_layers):
                if self._in_turn:
                    after.runner.arena.append(after.arena_layer(self.ready.num_blocks))
                layers.move(number, after.runner.arena[number], self._transfer)
                if self._in_turn:
                    self._let_go(number)
            self._settle()
        del self._transfer  # the ranks are done with each other
        return seconds

    def _let_go(self, layer: int) -> None:
        """Of what was staged, once others have what they need of it."""
        assert self._staged is not None
        self._settle()
        self._staged.let_go(layer)
        self._empty_cache()

    def _kv_source(self) -> KvSource:
        if self._staged is not None:
            return self._staged
        assert self._before.runner is not None
        return ArenaKv(self._before.runner.arena)


class _Layers:
    """What `plan` asks of this rank, one layer after the other: blocks that it keeps, gives and gets, in slices of at
    most about `most_bytes`."""

    def __init__(
        self, plan: Sequence[KvMove], source: KvSource, before: Worker, after: Worker, most_bytes: int
    ) -> None:
        self._source, self._rank, self._device = source, before.rank, before.device
        self._held = before.model.shard.kv_heads.start, after.model.shard.kv_heads.start
        # [2, heads, blocks, block_size, head_dim]: what one head of one block takes.
        self._each = 2 * after.config.block_size * after.model.config.head_dim * after._kv_dtype.itemsize
        own = (move for move in plan if move.source == move.target == before.rank)
        self._own = [part for move in own for part in in_slices(move, self._each, most_bytes)]
        self._rounds = kv_rounds(plan, self._each, most_bytes)
        self._places = functools.cache(source.places)
        self._index = functools.cache(lambda blocks: torch.tensor(blocks, dtype=torch.int64, device=before.device))

    def move(self, number: int, layer: Tensor, transfer: Transfer) -> None:
        """Fills `layer`, the new arena's of this number, [2, heads, blocks, block_size, head_dim]; gives others what
        they need of it."""
        into = as_integers(layer)

        def take(move: KvMove) -> Tensor:
            first, end = (head - self._held[0] for head in move.heads)
            return self._source.take(number, slice(first, end), self._places(move.old))

        def put(move: KvMove, data: Tensor) -> None:
            first, end = (head - self._held[1] for head in move.heads)
            into[:, first:end].index_copy_(2, self._index(move.new), data)

        def unpack(move: KvMove, data: Tensor) -> None:
            shape = 2, move.heads[1] - move.heads[0], len(move.new), *into.shape[3:]
            put(move, data.view(into.dtype).view(shape))

        for part in self._own:
            put(part, take(part))
        exchange(
            transfer,
            self._rank,
            self._rounds,
            lambda move: self._each * (move.heads[1] - move.heads[0]) * len(move.old),
            lambda move: as_bytes(take(move)),
            unpack,
            self._device,
        )


class _Stopwatch:
    """Seconds of a block of code, with what it had the device do."""

    def __init__(self, seconds: dict[str, float], name: str, device: torch.device) -> None:
        self._seconds, self._name, self._device = seconds, name, device

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, failed: object, *_: object) -> None:
        if self._device.type == "cuda" and failed is None:
            torch.cuda.synchronize(self._device)
        self._seconds[self._name] = round(time.perf_counter() - self._begin, 6)


def _beside(before: Worker, after: Layout, context: ParallelContext) -> Worker:
    """A worker of the layout `after` with a model whose weights are still to come."""
    sizes = {"data_parallel_size": after.data, "tensor_parallel_size": after.tensor}
    made = Worker(before.config.model_copy(update=sizes), before.rank, context)
    made.max_model_len, made.step_limits = before.max_model_len, before.step_limits
    made._quantization, made._fp8_kv, made._fit = before._quantization, before._fp8_kv, before._fit
    made.groups = before.groups
    config = before.model.config
    made.model = model_class(config.architecture)(
        config,
        max_positions=made.max_model_len,
        dtype=before.model.dtype,
        device=made.device,
        parallel=context,
        invariant=made.config.batch_invariant,
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
