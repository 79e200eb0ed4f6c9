"""What the processes of `test_peers.py` do: a module of its own, for them to import."""

import functools
import logging

import torch
import torch.distributed as dist

from kvern_engine.parallel import peers

STEPS = ("allocating", "exporting", "opening")


class Memory:
    """Stands for `PeerMemory`: rank 1's cannot be had, exported or opened, as `failing` says."""

    def __init__(self, rank: int, failing: str) -> None:
        self.handles: list[bytes] = []
        self._rank, self._failing = rank, failing
        self._fail("allocating")

    def _fail(self, step: str) -> None:
        if self._rank == 1 and step == self._failing:
            raise RuntimeError(f"CUDA: {step} failed: CUDA_ERROR_UNKNOWN\nmore")

    def handle(self) -> bytes:
        self._fail("exporting")
        return bytes([self._rank + 1]) * peers.HANDLE_BYTES

    def open(self, rank: int, handles: list[bytes]) -> None:
        self._fail("opening")
        self.handles = handles


class Sum:
    """Stands for `PeerSum`."""

    def __init__(self, rank: int, memory: Memory) -> None:
        self.handles = memory.handles

    def fits(self, width: int, dtype: torch.dtype) -> bool:
        return True


def connects(rank: int, folder: str) -> None:
    """Connects to the other rank's memory four times; all but the first time a step fails on rank 1."""
    logging.basicConfig(filename=f"{folder}/log-{rank}", level=logging.WARNING, format="%(message)s")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    peers.PeerSum = Sum  # type: ignore[misc, assignment]
    for failing in ("", *STEPS):
        peers.PeerMemory = functools.partial(_memory, rank, failing)  # type: ignore[misc, assignment]
        made = peers.connect_peers(dist.group.WORLD, 2, rank, torch.device("cpu"))
        if failing:
            assert made is None, failing
        else:
            assert isinstance(made, Sum)
            assert made.handles == [bytes([number]) * peers.HANDLE_BYTES for number in (1, 2)]
    dist.destroy_process_group()


def _memory(rank: int, failing: str, size: int, device: torch.device) -> Memory:
    return Memory(rank, failing)
