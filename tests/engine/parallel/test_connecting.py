"""Ranks that have met and connect: one that hangs there is not waited for beyond the join's time, and that time is not
the operations'."""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from connecting_ranks import adds_up, hangs_midway
from torch._C._distributed_c10d import FileStore

from kvern_engine.parallel import groups
from kvern_engine.parallel.groups import RankMissingError, init_parallel
from kvern_engine.parallel.layout import Layout

ANSWER_SECONDS = 120.0


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Callable[[Any], list[Connection]]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvern_engine.worker.worker", "safetensors"])
    processes = []

    def start(what: Any) -> list[Connection]:
        pipes = []
        for rank in range(2):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=what, args=(theirs, rank, f"file://{tmp_path}/meet"), daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        return pipes

    yield start
    for process in processes:
        process.kill()
        process.join(10)


def _answer(pipe: Connection) -> Any:
    assert pipe.poll(ANSWER_SECONDS)
    return pipe.recv()


def test_the_time_to_connect_is_not_that_of_operations(two) -> None:
    for pipe in two(adds_up):
        assert _answer(pipe) == ([2.0, 2.0, 2.0], groups.OPERATION_SECONDS)


def test_a_rank_that_hangs_while_groups_are_made_is_not_waited_for(two) -> None:
    begin = time.monotonic()
    said = _answer(two(hangs_midway)[0])
    assert said.startswith("rank 0 of engine 0 met all 2 ranks at file:///")
    assert "but could not connect to them within " in said
    assert time.monotonic() - begin < ANSWER_SECONDS


def test_a_rank_that_came_and_went_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_LEAST_CONNECT_SECONDS", 0.0)
    FileStore(f"{tmp_path}/meet").set("joined/1", "1")
    with pytest.raises(RankMissingError, match=r"^rank 0 of engine 0 met all 2 ranks at file:///.*/meet but could not"):
        init_parallel(Layout(1, 2, 1), 0, 0, f"file://{tmp_path}/meet", timeout=1.0)
