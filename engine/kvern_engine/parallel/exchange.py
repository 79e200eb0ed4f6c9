"""How ranks give each other what a plan of moves says: in rounds, by send and receive.

On CPUs all ranks of a pod meet in a group of their own for the time of a switch, beside the groups of their engines,
and make the groups of the engines to come; ranks on GPUs stay connected (`pod_groups.py`).
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from kvern_engine.parallel.groups import OPERATION_SECONDS, ParallelContext, TensorGroup, meet, open_store
from kvern_engine.parallel.layout import Layout
from kvern_engine.parallel.messages import GIVEN_UP

_POLL_SECONDS = 0.004  # everything stands still meanwhile


class Between(Protocol):
    """A move from one rank to another."""

    @property
    def source(self) -> int: ...

    @property
    def target(self) -> int: ...


M = TypeVar("M", bound=Between)


def join_pod(layout: Layout, rank: int, rendezvous: str, timeout: float) -> tuple[Any, ParallelContext]:
    """The group of all ranks of the pod, whose operations fail after `timeout` seconds, and this rank's place in
    `layout`, which has one stage. `rendezvous`: a file that has not been used before; once there is one of that name
    with GIVEN_UP behind it, nobody waits any more. Raises RankMissingError."""
    engine, _, tensor_rank = layout.coordinates(rank)
    begin = time.monotonic()
    store = open_store(rendezvous, rank == 0, rank, 0, timeout)
    given_up = given_up_file(rendezvous).exists
    meet(store, range(layout.world), rank, engine, rendezvous, begin + timeout, given_up, _POLL_SECONDS)
    pod = _gloo(PrefixStore("pod", store), rank, layout.world, timeout)
    if layout.tensor == 1:
        return pod, ParallelContext.single(rank, layout)
    own = _gloo(PrefixStore(f"engine-{engine}", store), tensor_rank, layout.tensor, OPERATION_SECONDS)
    return pod, ParallelContext(layout, rank, TensorGroup(layout.tensor, tensor_rank, own), group=own)


def meet_again(layout: Layout, rank: int, rendezvous: str, timeout: float) -> None:
    """As `join_pod`, for ranks that are connected: returns when all of them are there. Raises RankMissingError."""
    store, deadline = open_store(rendezvous, rank == 0, rank, 0, timeout), time.monotonic() + timeout
    engine = layout.coordinates(rank)[0]
    meet(
        store, range(layout.world), rank, engine, rendezvous, deadline, given_up_file(rendezvous).exists, _POLL_SECONDS
    )


def given_up_file(rendezvous: str) -> Path:
    """What there is once nobody waits at `rendezvous` any more."""
    return Path(urlsplit(rendezvous).path + GIVEN_UP)


def _gloo(store: Any, rank: int, size: int, timeout: float) -> Any:
    """A process group beside torch's default one, of which there can be only one."""
    backend = dist.ProcessGroup.BackendType.GLOO
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(backend)
    gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))
    group._register_backend(torch.device("cpu"), backend, gloo)
    return group


# Sends to peers and fills the buffers of what they send, by rank; with the number of the round.
Transfer = Callable[[Mapping[int, Tensor], Mapping[int, Tensor], int], None]


def over_gloo(group: Any) -> Transfer:
    """A transfer in a group that `join_pod` has made. Raises RuntimeError where a peer is gone or late."""

    def transfer(outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], number: int) -> None:
        waiting = [group.recv([buffer], peer, number) for peer, buffer in incoming.items()]
        waiting += [group.send([data], peer, number) for peer, data in outgoing.items()]
        for work in waiting:
            work.wait()

    return transfer


def exchange(
    transfer: Transfer,
    rank: int,
    rounds: Sequence[Sequence[M]],
    nbytes: Callable[[M], int],
    pack: Callable[[M], Tensor],
    unpack: Callable[[M, Tensor], None],
    device: torch.device | None = None,
) -> int:
    """Sends what this rank is the source of and takes what it is the target of; returns the bytes it has received.

    `pack` gives a move's `nbytes` bytes as a flat uint8 tensor on `device`, `unpack` puts them where they belong. All
    ranks must call this with the same rounds.
    """
    received = 0
    for number, moves in enumerate(rounds):
        outgoing: dict[int, list[M]] = defaultdict(list)
        incoming: dict[int, list[M]] = defaultdict(list)
        for move in moves:
            if move.source == rank:
                outgoing[move.target].append(move)
            elif move.target == rank:
                incoming[move.source].append(move)
        buffers = {
            peer: torch.empty(sum(map(nbytes, theirs)), dtype=torch.uint8, device=device)
            for peer, theirs in incoming.items()
        }
        transfer({peer: torch.cat([pack(m) for m in ours]) for peer, ours in outgoing.items()}, buffers, number)
        for peer, theirs in incoming.items():
            at = 0
            for move in theirs:
                unpack(move, buffers[peer][at : at + nbytes(move)])
                at += nbytes(move)
            received += at
    return received


def as_bytes(tensor: Tensor) -> Tensor:
    """Its numbers in order as flat uint8, of a copy where it is not contiguous."""
    return tensor.reshape(-1).contiguous().view(torch.uint8)
