"""Blocks taken out of an arena: the same numbers as in it, and the same arena when they are put back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvern_engine.core.handed import Handover, HeldChoice, HeldRequest
from kvern_engine.core.placement import kept_blocks, with_recent_prefixes
from kvern_engine.ipc import AddRequest
from kvern_engine.parallel.kv_reshard import KvMove, in_slices
from kvern_engine.request import SamplingParams
from kvern_engine.worker.kv_store import ArenaKv, StagedKv

SHAPE = (3, 2, 4, 10, 8, 16)  # layers, K and V, heads, blocks, block_size, head_dim


def arena(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("room", [1 << 40, 40_000, 0], ids=["device", "some", "host"])
def test_what_is_staged_is_what_was_there(dtype: torch.dtype, room: int) -> None:
    whole = arena(dtype)
    staged = StagedKv(whole, [7, 2, 5], room)
    if dtype == torch.float32:
        each = 2 * 4 * 3 * 8 * 16 * 4
        assert staged.nbytes == 3 * each
        assert staged.host_bytes == max(0, 3 - room // each) * each
    for heads, blocks in ((slice(0, 4), [5, 2]), (slice(1, 3), [7]), (slice(2, 3), [2, 7, 5])):
        taken = staged.take(heads, blocks)
        assert torch.equal(taken, ArenaKv(whole).take(heads, blocks))
        assert taken.shape == (3, 2, heads.stop - heads.start, len(blocks), 8, 16)
    again = torch.zeros(SHAPE).to(dtype)
    staged.put_back(again)
    assert torch.equal(ArenaKv(again).take(slice(0, 4), [2, 5, 7]), ArenaKv(whole).take(slice(0, 4), [2, 5, 7]))
    assert not ArenaKv(again).take(slice(0, 4), [0, 1, 3]).any()
    with pytest.raises(KeyError):
        staged.take(slice(0, 4), [1])


@given(st.lists(st.integers(0, 99), unique=True, max_size=30), st.integers(1, 4), st.integers(1, 5000))
def test_slices_are_the_move(old: list[int], heads: int, most: int) -> None:
    move = KvMove(0, 1, (2, 2 + heads), tuple(old), tuple(reversed(old)))
    parts = list(in_slices(move, 100, most))
    assert [b for part in parts for b in part.old] == old and [b for part in parts for b in part.new] == old[::-1]
    assert all(100 * heads * len(part.old) <= max(most, 100 * heads) for part in parts)
    assert {(part.source, part.target, part.heads) for part in parts} <= {(0, 1, (2, 2 + heads))}


def test_blocks_that_hold_something() -> None:
    running = HeldChoice(0, "running", [1], [4, -1, 9, 3], computed=33)
    sibling = HeldChoice(1, "running", [1], [4, 8], computed=20)
    waiting = HeldChoice(0, "waiting")
    message = AddRequest("r", 0, [1] * 30, SamplingParams(n=2), 0.0)
    prefixes = [(b"old", 6), (b"new", 2)]
    handover = Handover(0, [HeldRequest(message, [running, sibling]), HeldRequest(message, [waiting])], prefixes)
    assert kept_blocks(handover, 16) == [4, 9, 8, 6, 2], "what a token is yet to be written to holds nothing"
    assert with_recent_prefixes(handover, 1).cached == [(b"new", 2)]
    assert with_recent_prefixes(handover, 0).cached == []
    assert with_recent_prefixes(handover, 5).cached == prefixes
