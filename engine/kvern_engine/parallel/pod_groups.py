"""The groups of a pod whose ranks stay connected: made when its workers load, used by every layout that comes.

An NCCL communicator takes 1.3 s to make, a second one 0.2: too long for the pause of a switch. So the ranks of a pod
meet once, in torch's default group, over which they exchange weights and KV; the groups of engines are parts of it and
are kept once there are any. The same over gloo, so that all of it can be tried on a CPU.
"""

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from kvern_engine.parallel.groups import OPERATION_SECONDS, ParallelContext, TensorGroup, meet, open_store, tensor_group
from kvern_engine.parallel.layout import Layout

_LOOK_SECONDS = 0.0005  # how often it is looked whether the device is through


class PodGroups:
    """One rank's connections to all ranks of its pod. Every rank must ask for the same layouts in the same order."""

    def __init__(self, rank: int, world: int, device: torch.device, through_peers: bool = True) -> None:
        self.rank, self.world, self.device = rank, world, device
        self._through_peers = through_peers
        self._by_size: dict[int, tuple[Any, TensorGroup]] = {}  # tensor size -> this rank's group

    @classmethod
    def join(
        cls,
        rank: int,
        world: int,
        rendezvous: str,
        device: torch.device,
        timeout: float,
        through_peers: bool = True,
    ) -> "PodGroups":
        """Meets all ranks of the pod at `rendezvous`, as `init_parallel` does those of an engine; `timeout` in seconds.
        Raises RankMissingError, and ValueError for a bad rendezvous."""
        begin = time.monotonic()
        store = open_store(rendezvous, rank == 0, rank, 0, timeout)
        meet(store, range(world), rank, 0, rendezvous, begin + timeout)
        cuda = device.type == "cuda"
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=PrefixStore("pod", store),
            rank=rank,
            world_size=world,
            device_id=device if cuda else None,
            timeout=timedelta(seconds=OPERATION_SECONDS),
        )
        made = cls(rank, world, device, through_peers)
        made._first_contact()
        return made

    def _first_contact(self) -> None:
        """A little to and from every peer: what connects them on first use is not to be waited for later."""
        others = [rank for rank in range(self.world) if rank != self.rank]
        outgoing = {rank: torch.zeros(1 << 16, dtype=torch.uint8, device=self.device) for rank in others}
        self.transfer(outgoing, {rank: torch.empty_like(data) for rank, data in outgoing.items()}, 0)
        TensorGroup(self.world, self.rank, dist.group.WORLD).all_reduce(torch.ones(1, device=self.device))

    def context(self, layout: Layout) -> ParallelContext:
        """This rank's place in `layout`, which has one stage."""
        if layout.tensor == 1:
            return ParallelContext.single(self.rank, layout)
        if layout.tensor not in self._by_size:
            group = self._make(layout)
            self._by_size[layout.tensor] = (
                group,
                tensor_group(layout, self.rank, group, self.device, self._through_peers),
            )
        group, tensor = self._by_size[layout.tensor]
        device = self.device if self.device.type == "cuda" else None
        return ParallelContext(layout, self.rank, tensor, device=device, group=group)

    def _make(self, layout: Layout) -> Any:
        if layout.data == 1:
            return dist.group.WORLD
        made = [dist.new_group(layout.ranks_of(engine)) for engine in range(layout.data)]
        return made[layout.coordinates(self.rank)[0]]

    def transfer(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], _: int) -> None:
        """Sends to and receives from peers, by rank; on a GPU what follows on its stream comes behind that."""
        wanted = [dist.P2POp(dist.irecv, buffer, peer) for peer, buffer in sorted(incoming.items())]
        wanted += [dist.P2POp(dist.isend, data, peer) for peer, data in sorted(outgoing.items())]
        if wanted:
            for work in dist.batch_isend_irecv(wanted):
                work.wait()

    def settle(self, given_up: Callable[[], bool], timeout: float) -> None:
        """Until all that was exchanged is there. Raises RuntimeError where that takes more than `timeout` seconds or
        `given_up` says that a peer is gone: the connections are then lost, and there will be no other switch."""
        if self.device.type != "cuda":
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        deadline = time.monotonic() + timeout
        while not event.query():  # type: ignore[no-untyped-call]
            if given_up() or time.monotonic() > deadline:
                assert dist.group.WORLD is not None
                dist.group.WORLD.abort()  # only this one: engines that are whole go on over theirs
                raise RuntimeError("a rank of the pod is gone or late: what it was to send has not come")
            time.sleep(_LOOK_SECONDS)
