"""Memory of one GPU that the others of its engine write to: what `kvern_kernels.peer_sum` sums through."""

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kvern_engine.parallel.groups import TensorGroup
from kvern_kernels.peer_memory import HANDLE_BYTES, PeerMemory
from kvern_kernels.peer_sum import PeerSum, buffer_bytes

log = logging.getLogger(__name__)


def connect_peers(group: Any, size: int, rank: int, device: torch.device) -> PeerSum | None:
    """This rank's end of the sums over `group`, whose `size` ranks, all on this machine, must all call this. None where
    a GPU cannot reach another one's memory, or a kernel cannot be compiled: the log says why, NCCL sums."""
    own = torch.zeros(HANDLE_BYTES, dtype=torch.uint8, device=device)
    memory = made = None
    try:
        memory = PeerMemory(buffer_bytes(size), device)
        own = torch.frombuffer(bytearray(memory.handle()), dtype=torch.uint8).to(device)
    except Exception as error:  # the driver's own kinds and a missing library; what they mean is the same
        _warn(error)
    handles = TensorGroup(size, rank, group).all_gather(own.unsqueeze(0))
    if memory is not None and _all_exported(handles, size):
        try:
            memory.open(rank, [bytes(handle) for handle in handles.view(size, -1).cpu().numpy()])
            made = PeerSum(rank, memory)
            made.fits(256, torch.bfloat16)  # the compiler and the driver work, here and now
        except Exception as error:
            made = None
            _warn(error)
    agreed = torch.tensor(int(made is not None), device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=group)  # behind it every rank's memory is clear
    return made if agreed.item() else None


def _all_exported(handles: Tensor, size: int) -> bool:
    return bool(handles.view(size, -1).any(dim=1).all().item())


def _warn(error: Exception) -> None:
    said = str(error).splitlines() or [type(error).__name__]
    log.warning("sums over GPUs go through NCCL, not through peers' memory: %s", said[0])
