"""What the processes of `test_connecting.py` do: a module of its own, for them to import."""

import time
from multiprocessing.connection import Connection

import torch

from kvern_engine.parallel import groups
from kvern_engine.parallel.groups import RankMissingError, init_parallel
from kvern_engine.parallel.layout import Layout


def adds_up(pipe: Connection, rank: int, url: str) -> None:
    """Meets, adds up, and tells the sum and how long an operation may take."""
    context = init_parallel(Layout(1, 2, 1), 0, rank, url, timeout=60.0)
    x = context.tensor.all_reduce(torch.ones(3))
    backend = context.tensor._group._get_backend(torch.device("cpu"))
    pipe.send((x.tolist(), backend.options._timeout.total_seconds()))
    context.close()


def hangs_midway(pipe: Connection, rank: int, url: str) -> None:
    """Rank 1 is in the group of all, then does not come to the pipeline's. Tells what the other one says."""
    maker = groups._GroupMaker
    if rank == 1:
        maker.make = lambda self, ranks: time.sleep(600)  # type: ignore[method-assign]
    else:  # there is time to meet, and little to connect
        groups._GroupMaker = lambda store, _, device: maker(store, time.monotonic() + 3.0, device)  # type: ignore
    try:
        init_parallel(Layout(1, 1, 2), 0, rank, url, timeout=60.0)
    except RankMissingError as error:
        pipe.send(str(error))
