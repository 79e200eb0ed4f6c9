"""What the processes of `test_peer_sum.py` do: a module of its own, for them to import."""

import os
import random

import torch
import torch.distributed as dist
from torch import Tensor

from kvern_engine.parallel.groups import OwnShare, TensorGroup, init_parallel
from kvern_engine.parallel.layout import Layout

EPS = 1e-5
ROWS = [1, 2, 3, 8, 31, 32, 64, 128, 257, 1024, 1025, 4100]


def _meet(rank: int, meeting: str) -> tuple[TensorGroup, torch.device]:
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = init_parallel(Layout(1, 2, 1), 0, rank, f"file://{meeting}", device).tensor
    assert group.sums_in_norm(4096, torch.bfloat16), "peers could not be connected"
    return group, device


def _of_all(x: Tensor) -> Tensor:
    """The sum over the ranks in float32."""
    total = x.float()
    dist.all_reduce(total)
    return total


def _same_everywhere(x: Tensor) -> None:
    both = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(both, x.contiguous())
    assert torch.equal(both[0], both[1])


def _shares(rows: int, width: int, dtype: torch.dtype, parts: int, device: torch.device) -> Tensor:
    if not parts:
        x = torch.randn(rows, width, device=device).to(dtype)
        x[:, ::7] = -0.0  # what has not arrived looks like this
        return x
    return torch.randn(parts, rows, width, device=device)


def check_norms(rank: int, meeting: str, width: int, dtype: torch.dtype) -> None:
    """Sums alone, and with the norm behind them, against sums in float32."""
    group, device = _meet(rank, meeting)
    torch.manual_seed(5 + rank)
    shared = torch.Generator(device).manual_seed(1)
    weight = torch.randn(width, device=device, generator=shared).to(dtype)
    order = random.Random(3)
    # As coarse as the type: the sum is rounded twice (a share in parts three times), the norm once.
    tolerance = {"rtol": 3 * torch.finfo(dtype).eps, "atol": 8 * torch.finfo(dtype).eps}
    for turn in range(60):
        rows, parts = order.choice(ROWS), order.choice([0, 0, 1, 4])
        x = _shares(rows, width, dtype, parts, device)
        residual = torch.randn(rows, width, device=device, generator=shared).to(dtype)
        own = x if not parts else x.sum(0).to(dtype)
        total = _of_all(own) + residual.float()
        share = OwnShare(x, group)
        normed, stream = group.add_rms_norm(share.x, residual, weight, EPS)
        torch.testing.assert_close(stream.float(), total, **tolerance)
        expected = torch.nn.functional.rms_norm(stream.float(), (width,), weight.float(), EPS)
        torch.testing.assert_close(normed.float(), expected, **tolerance)
        _same_everywhere(stream)
        if turn % 3 == 0:
            plain = _shares(rows, width, dtype, 0, device)
            expected = _of_all(plain)
            torch.testing.assert_close(group.all_reduce(plain).float(), expected, **tolerance)
            _same_everywhere(plain)
    dist.destroy_process_group()


def check_graphs(rank: int, meeting: str, width: int, dtype: torch.dtype) -> None:
    """Steps of several sizes in graphs, replayed in any order, many calls in a row: nothing is lost or read twice."""
    group, device = _meet(rank, meeting)
    weight = torch.ones(width, device=device, dtype=dtype)
    graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
    for rows in (128, 32, 8, 1):
        x = torch.zeros(rows, width, device=device, dtype=dtype)
        stream = torch.zeros_like(x)
        group.add_rms_norm(x, stream, weight, EPS)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(64):
                group.add_rms_norm(x, stream, weight, EPS)
        graphs[rows] = graph, x, stream
    order = random.Random(4)
    for turn in range(300):
        rows = order.choice(list(graphs))
        graph, x, stream = graphs[rows]
        x.fill_((rank + 1) / 64)
        stream.zero_()
        if rank == turn % 2 and turn % 20 == 0:
            torch.cuda._sleep(20_000_000)  # a rank that comes late
        graph.replay()
        if turn % 5 == 0:
            assert torch.equal(stream, torch.full_like(stream, 3.0)), turn  # 64 sums of 1/64 and 2/64
        if turn % 7 == 0:
            plain = torch.full((order.choice(ROWS), width), float(rank + 1), device=device, dtype=dtype)
            assert torch.equal(group.all_reduce(plain), torch.full_like(plain, 3.0)), turn
    dist.destroy_process_group()
