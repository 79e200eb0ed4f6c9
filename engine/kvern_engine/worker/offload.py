"""Layers whose weights stay in host memory (`--cpu-offload-gb`), for models that do not fit on the device.

Each such layer has its weights in one piece of pinned memory. On the device they share two slots: while one layer
computes in its slot, the next one's weights are copied into the other, on a stream of their own. The layers are spread
evenly over the model, so that those between them, which stay on the device, give the copies time.

A layer's tensors are views of its slot for good: nothing is rebound while the model runs. Which layers are chosen and
when a copy may begin is decided here; `CudaCopies` alone talks to the device.
"""

import math
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kvern_engine.model_config import ModelConfig
from kvern_engine.models.registry import CausalLM
from kvern_engine.parallel.groups import ParallelContext
from kvern_engine.worker.memory import GIB

SLOTS = 2
_ALIGNMENT = 256  # bytes, of each tensor in its layer's piece
_FOREIGN = ("torch", "builtins", "numpy", "typing", "collections", "functools")  # whose objects hold no weights of ours


@dataclass(frozen=True)
class OffloadPlan:
    """`layers`, of the `count` layers of a rank by their index in the model, live on the host, with `host_bytes` in
    all; `slot_bytes` each of the two slots takes on the device, which has `freed` bytes more than with all of them."""

    layers: tuple[int, ...] = ()
    count: int = 0
    host_bytes: int = 0
    slot_bytes: int = 0
    freed: int = 0

    def __str__(self) -> str:
        return (
            f"{len(self.layers)} of {self.count} layers stay in host memory ({self.host_bytes / GIB:.2f} GiB), which "
            f"frees {self.freed / GIB:.2f} GiB on the device; steps run without CUDA graphs"
        )


NO_OFFLOAD = OffloadPlan()


def plan_offload(sizes_by_layer: Mapping[int, int], wanted: int) -> OffloadPlan:
    """The fewest of a rank's layers, evenly spread, that free `wanted` bytes on the device, or all of them where that
    is less. `sizes_by_layer` are the bytes of each layer's weights. The two slots stay on the device, so that only
    models of three layers and more free anything."""
    held = sorted(sizes_by_layer)
    best = NO_OFFLOAD
    for number in range(SLOTS + 1, len(held) + 1):
        layers = tuple(held[(2 * i + 1) * len(held) // (2 * number)] for i in range(number))
        sizes = [sizes_by_layer[index] for index in layers]
        freed = sum(sizes) - SLOTS * max(sizes)
        if freed > best.freed:
            best = OffloadPlan(layers, len(held), sum(sizes), max(sizes), freed)
        if best.freed >= wanted:
            break
    return best


def layer_bytes(
    build: type[CausalLM], config: ModelConfig, dtype: torch.dtype, parallel: ParallelContext
) -> dict[int, int]:
    """Bytes of the weights of each layer that a rank holds, by its index in the model; nothing is allocated."""
    meta: Any = build(config, max_positions=1, dtype=dtype, device=torch.device("meta"), parallel=parallel)
    return {
        index: sum(held.tensor.numel() * held.tensor.element_size() for held in layer.destinations("").values())
        for index, layer in zip(meta.shard.layers, meta.layers, strict=True)
    }


def check_host_memory(plan: OffloadPlan, gib: float, available: int) -> None:
    """Raises MemoryError where `available` bytes of host memory do not hold what is planned for cpu_offload_gb=`gib`,
    ValueError where nothing can be planned."""
    if not plan.layers:
        raise ValueError(f"cpu_offload_gb={gib:g} frees nothing: a rank needs at least {SLOTS + 1} layers for that")
    if plan.host_bytes > available:
        raise MemoryError(
            f"cpu_offload_gb={gib:g} needs {plan.host_bytes / GIB:.2f} GiB of host memory for a rank, "
            f"{available / GIB:.2f} GiB are available to it: lower it, or give the pod more memory"
        )


class Copies(Protocol):
    """Copies from the host to slots on the device, in a queue of their own."""

    def start(self, slot: int, into: Tensor, source: Tensor) -> None:
        """Begins a copy to `slot`, after all that the device has been given to compute so far."""

    def wait(self, slot: int) -> None:
        """All that the device is given to compute from now on waits for the last copy to `slot`."""


class CudaCopies:
    """Copies on a side stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copied = [torch.cuda.Event() for _ in range(SLOTS)]  # type: ignore[no-untyped-call]

    def start(self, slot: int, into: Tensor, source: Tensor) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(into.device))
        with torch.cuda.stream(self._stream):
            into.copy_(source, non_blocking=True)
            self._copied[slot].record(self._stream)

    def wait(self, slot: int) -> None:
        self._copied[slot].wait()


class Ring:
    """Which layer's weights are in which slot, and which come next. `pieces` are the layers' weights on the host, uint8
    [n] each, in the order in which the layers run; `slots` are as large as the largest of them."""

    def __init__(self, pieces: Sequence[Tensor], slots: Sequence[Tensor], copies: Copies) -> None:
        self._pieces, self._slots, self._copies = pieces, slots, copies
        self._held: list[int | None] = [None] * len(slots)  # by slot: the layer whose copy was started last

    def slot_of(self, turn: int) -> int:
        return turn % len(self._slots)

    def enter(self, turn: int) -> None:
        """Before a layer computes: its weights will be there. Only the first step, or one after a step that was broken
        off, has to start the copy here."""
        slot = self.slot_of(turn)
        if self._held[slot] != turn:
            self._start(turn)
        self._copies.wait(slot)

    def leave(self, turn: int) -> None:
        """After it: the next layer with the same slot, of this step or the one after, may take it."""
        following = turn + len(self._slots)
        self._start(following if following < len(self._pieces) else self.slot_of(turn))

    def _start(self, turn: int) -> None:
        slot, piece = self.slot_of(turn), self._pieces[turn]
        self._held[slot] = turn
        self._copies.start(slot, self._slots[slot][: piece.numel()], piece)


class OffloadedLayer:
    """Stands in for a layer in `model.layers`: calls go through the ring, everything else to the layer itself."""

    def __init__(self, layer: Any, ring: Ring, turn: int) -> None:
        self._layer, self._ring, self._turn = layer, ring, turn

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        self._ring.enter(self._turn)
        out = self._layer(*args, **keywords)
        self._ring.leave(self._turn)
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def offload(model: Any, plan: OffloadPlan, copies: Copies, pin: Callable[[Tensor], None]) -> None:
    """After loading: replaces the planned layers of a `model`, whose weights were built and loaded on the host, by
    layers that compute on the model's device. `pin` locks a piece of memory, so that copies from it need no processor.
    """
    layers, device = model.layers, model.device
    planned = [index - model.shard.layers.start for index in plan.layers]
    found = [list(tensors_of(layers[index])) for index in planned]
    places = [_places(tensors) for tensors in found]
    slots = [torch.empty(max(end for _, end in places), dtype=torch.uint8, device=device) for _ in range(SLOTS)]
    pieces: list[Tensor] = []
    ring = Ring(pieces, slots, copies)
    for turn, (index, tensors, (starts, end)) in enumerate(zip(planned, found, places, strict=True)):
        piece = torch.empty(end, dtype=torch.uint8)
        pin(piece)
        slot = slots[ring.slot_of(turn)]
        for tensor, start in zip(tensors, starts, strict=True):
            _view(piece, tensor, start).copy_(tensor)
            tensor.data = _view(slot, tensor, start)  # frees what it was
        pieces.append(piece)
        layers[index] = OffloadedLayer(layers[index], ring, turn)


def _places(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Where each tensor begins in its layer's piece, and the bytes of the piece."""
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
    return starts, end


def _view(piece: Tensor, like: Tensor, start: int) -> Tensor:
    size = math.prod(like.shape) * like.element_size()
    return piece[start : start + size].view(like.dtype).view(like.shape)


def tensors_of(layer: Any) -> Iterator[Tensor]:
    """The tensors on the host that an object holds in its attributes, or in those of the objects there, each once."""
    seen: set[int] = set()
    pending = [layer]
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            if value.device.type == "cpu" and value.numel():
                yield value
        elif isinstance(value, list | tuple):
            pending += value
        elif isinstance(value, dict):
            pending += value.values()
        elif not isinstance(value, type | types.FunctionType | types.MethodType | types.ModuleType):
            pending += _attributes(value)


def _attributes(value: Any) -> list[Any]:
    if type(value).__module__.partition(".")[0] in _FOREIGN:
        return []
    slots = [name for base in type(value).__mro__ for name in getattr(base, "__slots__", ()) if hasattr(value, name)]
    return [*(getattr(value, name) for name in slots), *getattr(value, "__dict__", {}).values()]


def pin_for_cuda(piece: Tensor) -> None:
    """Locks the memory of `piece` for as long as it lives. Not torch's pinned allocator, which rounds sizes up to
    powers of two. Raises MemoryError where the system refuses."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    result = runtime.cudaHostRegister(piece.data_ptr(), piece.numel(), 0)
    if int(result) != 0:
        raise MemoryError(
            f"the system would not lock {piece.numel():,} bytes of host memory for cpu_offload_gb (CUDA error "
            f"{int(result)}): lower it, or raise the limit of locked memory (ulimit -l)"
        )
    # Before the allocator gives the addresses to others: to CUDA they would still be locked memory.
    unlock = weakref.finalize(piece.untyped_storage(), runtime.cudaHostUnregister, piece.data_ptr())
    unlock.atexit = False
