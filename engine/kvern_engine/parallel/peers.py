"""Memory of one GPU that the others of its engine write to: what `kvern_kernels.peer_sum` sums through."""

import logging
import os
from typing import Any

import torch
import torch.distributed as dist

from kvern_kernels.peer_sum import PeerSum, buffer_bytes

log = logging.getLogger(__name__)

# Nothing here multicasts, and torch would set it up with the memory.
_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


def connect_peers(group: Any, size: int, rank: int, device: torch.device) -> PeerSum | None:
    """This rank's end of the sums over `group`, whose `size` ranks, all on this machine, must all call this. None where
    a GPU cannot reach another one's memory, or a kernel cannot be compiled: the log says why, NCCL sums."""
    os.environ.setdefault(_NO_MULTICAST, "1")
    made: PeerSum | None = None
    try:
        made = _connect(group, size, rank, device)
    except Exception as error:  # torch's and the driver's own kinds; what they mean is the same
        log.warning("sums over GPUs go through NCCL, not through peers' memory: %s", str(error).splitlines()[0])
    agreed = torch.tensor(int(made is not None), device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=group)  # behind it every buffer is clear
    return made if agreed.item() else None


def _connect(group: Any, size: int, rank: int, device: torch.device) -> PeerSum:
    import torch.distributed._symmetric_memory as symmetric_memory

    buffer = symmetric_memory.empty(buffer_bytes(size) // 4, dtype=torch.int32, device=device)
    mapping = symmetric_memory.rendezvous(buffer, group)
    made = PeerSum(rank, list(mapping.buffer_ptrs), buffer, mapping)
    made.clear()
    made.fits(256, torch.bfloat16)  # the compiler and the driver work, here and now
    return made
