"""How the ranks of one engine meet and talk: torch.distributed, gloo on CPUs and NCCL on CUDA devices.

`ParallelContext` is what a worker and its model know of the other ranks. Within a stage, ranks sum and gather
(`TensorGroup`); between stages, hidden states go down and sampled tokens come back (`Pipeline`). With one rank every
operation is the identity and torch.distributed is not touched. What a rank computes is decided in `layout.py`.

All ranks run the same plans in the same order, so that operations match by order alone. Nobody waits to send: a stage
waits only for what the stage before it, or the last stage at an earlier step, has computed. Each wait is thus for a
smaller (step, stage), and any number of steps may be under way at once without a deadlock.
"""

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore

from kvern_engine.model_config import ModelConfig
from kvern_engine.parallel.interfaces import use_interface
from kvern_engine.parallel.layout import Layout, ModelShard, model_shard
from kvern_kernels import add_rms_norm

if TYPE_CHECKING:
    from kvern_kernels.peer_sum import PeerSum

JOIN_SECONDS = 120.0  # how long a rank waits for the others of its engine
_POLL_SECONDS = 0.05
_LEAST_CONNECT_SECONDS = 30.0  # to connect in, however late the last rank came
OPERATION_SECONDS = 1800.0  # torch's own default for gloo; that a rank is gone is noticed by others, and sooner
_MOST_SENDS = 8  # unfinished sends after which the oldest is waited for: what bounds the memory they hold


# Its name since torch 2.13; the older one warns there.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class RankMissingError(ValueError):
    """Ranks of an engine did not join, or could not be connected to, in time; the text says which, where and for how
    long this one waited."""


class TensorGroup:
    """The ranks that share the layers of a stage. `size` 1: every operation gives back what it got. `peers`: GPUs that
    write to each other's memory, which sums what it takes; the rest goes through torch.distributed."""

    def __init__(self, size: int = 1, rank: int = 0, group: Any = None, peers: "PeerSum | None" = None) -> None:
        self.size, self.rank, self._group, self._peers = size, rank, group, peers

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in `x` itself; the same bits on every rank."""
        if self.size > 1 and x.numel():
            if self._peers is not None and self._peers.takes(x):
                return self._peers.add_up(x)
            dist.all_reduce(x, group=self._group)
        return x

    def sums_in_norm(self, width: int, dtype: torch.dtype) -> bool:
        """A sum of rows of `width` numbers is fastest made by the norm behind it: `add_rms_norm`."""
        return self._peers is not None and self._peers.fits(width, dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`kvern_kernels.add_rms_norm` of the sum of `x` over the ranks, where `sums_in_norm`."""
        if not residual.numel():
            return residual, residual
        if self._peers is not None and weight.dtype == residual.dtype and self._peers.takes(residual):
            return self._peers.add_rms_norm(x, residual, weight, eps)
        own = x if x.dim() == 2 else x.sum(0).to(residual.dtype)
        return add_rms_norm(self.all_reduce(own), residual, weight, eps)

    def all_gather(self, x: Tensor) -> Tensor:
        """`x` [R, n] of every rank side by side, [R, size * n], in rank order."""
        if self.size == 1:
            return x
        rows, width = x.shape
        gathered = x.new_empty(self.size * rows, width)
        _all_gather(gathered, x.contiguous(), group=self._group)
        return gathered.view(self.size, rows, width).transpose(0, 1).reshape(rows, self.size * width)


@dataclass(frozen=True)
class OwnShare:
    """What a rank has of a sum over the ranks of `group` that is still to be made: `x` [T, H], or in parts to be added
    up, [P, T, H] float32."""

    x: Tensor
    group: TensorGroup


class Pipeline:
    """The ranks with this one's tensor rank, one a stage, as `ranks` of the engine's process group.

    `groups` are the process groups for hidden states and for tokens: NCCL runs what goes through one group in order,
    and tokens must not wait for hidden states of later steps.
    """

    def __init__(self, stage: int, ranks: Sequence[int], groups: tuple[Any, Any]) -> None:
        self.stage, self._ranks = stage, list(ranks)
        self._hidden, self._tokens = groups
        self._sends: deque[tuple[Any, Tensor]] = deque()

    def receive_hidden(self, buffer: Tensor) -> Tensor:
        """Fills `buffer` with what the stage before sent next."""
        dist.recv(buffer, self._ranks[self.stage - 1], group=self._hidden)
        return buffer

    def send_hidden(self, hidden: Tensor) -> None:
        """To the next stage; `hidden` must not be changed afterwards."""
        self._send(hidden, self._ranks[self.stage + 1], self._hidden)

    def send_tokens(self, tokens: Tensor) -> None:
        """From the last stage to all others; `tokens` must not be changed afterwards."""
        for rank in self._ranks[:-1]:
            self._send(tokens, rank, self._tokens)

    def expect_tokens(self, buffer: Tensor) -> Callable[[], Any]:
        """The last stage's next tokens will be in `buffer` once what is returned has been called."""
        work: Any = dist.irecv(buffer, self._ranks[-1], group=self._tokens)
        wait: Callable[[], Any] = work.wait
        return wait

    def _send(self, tensor: Tensor, rank: int, group: Any) -> None:
        self._sends.append((dist.isend(tensor, rank, group=group), tensor))
        while len(self._sends) > _MOST_SENDS * len(self._ranks):
            self._sends.popleft()[0].wait()


@dataclass(frozen=True)
class ParallelContext:
    """One rank's place in its engine. `pipeline` is None where there is one stage."""

    layout: Layout
    rank: int
    tensor: TensorGroup
    pipeline: Pipeline | None = None
    device: torch.device | None = None  # where numbers that ranks compare must lie: NCCL takes nothing else
    group: Any = None  # all ranks of the engine, where that is not torch's default group

    @classmethod
    def single(cls, rank: int = 0, layout: Layout | None = None) -> "ParallelContext":
        """A rank that is an engine by itself."""
        return cls(layout or Layout(data=rank + 1), rank, TensorGroup())

    @property
    def engine(self) -> int:
        return self.layout.coordinates(self.rank)[0]

    @property
    def stage(self) -> int:
        return self.layout.coordinates(self.rank)[1]

    @property
    def tensor_rank(self) -> int:
        return self.layout.coordinates(self.rank)[2]

    @property
    def answers(self) -> bool:
        """This rank's StepResults are the engine's."""
        return self.rank == self.layout.answering_rank(self.engine)

    def shard(self, model: ModelConfig) -> ModelShard:
        """What this rank holds of `model`. Raises ValueError where the layout does not fit the model."""
        return model_shard(model, self.layout, self.stage, self.tensor_rank)

    def smallest(self, value: int) -> int:
        """The smallest `value` of all ranks of the engine, which must all call this."""
        if self.layout.engine_size == 1:
            return value
        found = torch.tensor(value, dtype=torch.int64, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MIN, group=self.group)
        return int(found.item())

    def close(self) -> None:
        """Leave the process groups. The other ranks need not be there any more."""
        if self.group is None and self.layout.engine_size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def init_parallel(
    layout: Layout,
    engine: int,
    rank: int,
    rendezvous: str,
    device: torch.device | None = None,
    timeout: float = JOIN_SECONDS,
    through_peers: bool = True,
) -> ParallelContext:
    """Meets the other ranks of `engine` and connects to them; one engine of a process.

    `rendezvous` is where: `file:///path` within a pod (a file that no earlier engine has used), `tcp://host:port`
    across pods, where the engine's first rank listens. `device`: where this rank computes; a CUDA device is talked to
    through NCCL and must be the current one. `timeout` in seconds, for meeting and connecting. `through_peers`: GPUs of
    one pod may sum by writing to each other's memory. Raises RankMissingError; ValueError for a bad rendezvous or a
    port that is taken.
    """
    if layout.coordinates(rank)[0] != engine:
        raise ValueError(f"rank {rank} is not one of engine {engine} in {layout}")
    if layout.engine_size == 1:
        return ParallelContext.single(rank, layout)
    within, size = rank - layout.ranks_of(engine)[0], layout.engine_size
    begin = time.monotonic()
    store = open_store(rendezvous, within == 0, rank, layout.ranks_of(engine)[0], timeout)
    meet(store, layout.ranks_of(engine), rank, engine, rendezvous, begin + timeout)
    met = time.monotonic()
    maker = _GroupMaker(store, max(begin + timeout, met + _LEAST_CONNECT_SECONDS), device)
    try:
        maker.make_world(within, size)
        one_pod = urlsplit(rendezvous).scheme == "file"
        context = _connect(layout, engine, rank, maker, through_peers and one_pod)
        maker.finish(timeout)
    except RuntimeError as error:
        if not maker.is_late:
            raise
        raise RankMissingError(
            f"rank {rank} of engine {engine} met all {size} ranks at {rendezvous} but could not connect to them within "
            f"{time.monotonic() - met:.0f} s: {_first_line(error)}"
        ) from error
    return context


class _GroupMaker:
    """Makes process groups of the ranks that met in `store`, until `deadline` (time.monotonic()): after it RuntimeError
    is raised and `is_late`. Without that torch would wait for half an hour for a rank that hangs.

    gloo keeps one timeout for connecting and for each later operation; `finish` sets the latter to its own. NCCL's is
    for operations alone, and what it exchanges to connect is waited for by the store's.
    """

    def __init__(self, store: Any, deadline: float, device: torch.device | None) -> None:
        self._store, self._deadline = store, deadline
        self.device = device if device is not None and device.type == "cuda" else None
        self._mine: list[Any] = []  # gloo's groups that this rank is in

    @property
    def is_late(self) -> bool:
        return time.monotonic() >= self._deadline - 0.5  # torch was given what was left, in milliseconds

    def _limit(self) -> timedelta | None:
        left = timedelta(seconds=max(0.1, self._deadline - time.monotonic()))
        self._store.set_timeout(left)
        return None if self.device is not None else left

    def make_world(self, rank: int, size: int) -> None:
        """The group of all of them."""
        backend, store = "nccl" if self.device is not None else "gloo", PrefixStore("groups", self._store)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, device_id=self.device, timeout=self._limit()
        )
        self._mine.append(dist.group.WORLD)

    def make(self, ranks: list[int]) -> Any:
        """A group of some of them; all must call this."""
        group = dist.new_group(ranks, timeout=self._limit())
        if dist.get_rank() in ranks:
            self._mine.append(group)
        return group

    def finish(self, timeout: float) -> None:
        """All are made: from now on time is given to operations. `timeout` for what NCCL connects on first use."""
        self._store.set_timeout(timedelta(seconds=timeout))
        for group in self._mine if self.device is None else ():
            group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=OPERATION_SECONDS))


def tensor_group(
    layout: Layout, rank: int, group: Any, device: torch.device | None, through_peers: bool
) -> TensorGroup:
    """Of the ranks of `group`, which share the layers of a stage and must all call this."""
    tensor_rank = layout.coordinates(rank)[2]
    if layout.tensor == 1 or device is None or device.type != "cuda" or not through_peers:
        return TensorGroup(layout.tensor, tensor_rank, group)
    from kvern_engine.parallel.peers import connect_peers  # Triton comes along, which a CPU has no use for

    return TensorGroup(layout.tensor, tensor_rank, group, connect_peers(group, layout.tensor, tensor_rank, device))


def _connect(layout: Layout, engine: int, rank: int, maker: _GroupMaker, through_peers: bool) -> ParallelContext:
    """The process groups of every stage and column; all ranks make all of them, in the same order."""
    device, first = maker.device, layout.ranks_of(engine)[0]
    _, stage, tensor_rank = layout.coordinates(rank)
    stages = [[r - first for r in layout.stage_ranks(engine, s)] for s in range(layout.pipeline)]
    if layout.pipeline == 1:
        whole = tensor_group(layout, rank, dist.group.WORLD, device, through_peers)
        return ParallelContext(layout, rank, whole, device=device)
    tensor_groups = [maker.make(ranks) if layout.tensor > 1 else None for ranks in stages]
    columns = [list(ranks) for ranks in zip(*stages, strict=True)]
    pipelines = [(maker.make(ranks), maker.make(ranks)) for ranks in columns]
    return ParallelContext(
        layout,
        rank,
        tensor_group(layout, rank, tensor_groups[stage], device, through_peers),
        Pipeline(stage, columns[tensor_rank], pipelines[tensor_rank]),
        device,
    )


def open_store(rendezvous: str, is_first: bool, rank: int, first: int, timeout: float) -> Any:
    """The store at which ranks meet; see `init_parallel`."""
    url = urlsplit(rendezvous)
    if url.scheme == "file" and url.path:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nobody outside this machine has to reach us
        return FileStore(url.path)
    if url.scheme != "tcp" or not url.hostname or not url.port:
        raise ValueError(f"rendezvous must be file:///path or tcp://host:port, got {rendezvous!r}")
    try:
        use_interface()
        return TCPStore(
            url.hostname,
            url.port,
            is_master=is_first,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            # By itself it would listen on all interfaces.
            master_listen_fd=_listen(url.hostname, url.port) if is_first else None,
        )
    except (dist.DistError, TimeoutError, RuntimeError, OSError) as error:
        if is_first:
            raise ValueError(f"rank {rank} cannot listen at {rendezvous}: {_first_line(error)}") from error
        raise RankMissingError(
            f"rank {rank} waited {timeout:.0f} s for rank {first} at {rendezvous}, which never answered"
        ) from error


def _listen(host: str, port: int) -> int:
    """File descriptor of a socket that listens at this address alone; its owner closes it. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family).detach()


def meet(
    store: Any,
    ranks: Sequence[int],
    rank: int,
    engine: int,
    rendezvous: str,
    deadline: float,
    given_up: Callable[[], bool] = lambda: False,
    poll: float = _POLL_SECONDS,
) -> None:
    """Returns when all `ranks` have come, looking every `poll` seconds. Raises RankMissingError naming those that have
    not by `deadline`, or when `given_up` says that nobody waits for this any more."""
    begin = time.monotonic()
    store.set(f"joined/{rank}", "1")
    missing = list(ranks)
    while missing := [r for r in missing if not store.check([f"joined/{r}"])]:
        if given_up():
            raise RankMissingError("the others have given up")
        if time.monotonic() > deadline:
            named = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
            raise RankMissingError(
                f"{named} of engine {engine} did not join within {time.monotonic() - begin:.0f} s; rank {rank} waited "
                f"at {rendezvous} and met {len(ranks) - len(missing)} of {len(ranks)} ranks"
            )
        time.sleep(poll)


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
