"""Blocks taken out of an arena: the same numbers as in it, and the same arena when they are put back."""

import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvern_engine.core.handed import Handover, HeldChoice, HeldRequest
from kvern_engine.core.placement import kept_blocks, with_recent_prefixes
from kvern_engine.ipc import AddRequest
from kvern_engine.parallel.kv_reshard import KvMove, in_slices
from kvern_engine.request import SamplingParams
from kvern_engine.worker.kv_store import ArenaKv, KvSource, StagedKv

LAYERS = 3
SHAPE = (2, 4, 10, 8, 16)  # K and V, heads, blocks, block_size, head_dim
EACH = 2 * 4 * 3 * 8 * 16 * 4  # bytes of three blocks of a layer
LAYER = 2 * 4 * 10 * 8 * 16 * 4  # of a layer


def arena(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(SHAPE, generator=generator).to(dtype) for _ in range(LAYERS)]


def taken(source: KvSource, heads: slice, blocks: list[int]) -> torch.Tensor:
    places = source.places(blocks)
    return torch.stack([source.take(layer, heads, places) for layer in range(LAYERS)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("room", [1 << 40, 0], ids=["device", "some on the host"])
def test_what_is_staged_is_what_was_there(dtype: torch.dtype, room: int) -> None:
    whole = arena(dtype)
    staged = StagedKv(list(whole), [7, 2, 5], room)
    if dtype == torch.float32:
        assert staged.nbytes == LAYERS * EACH
        assert staged.host_bytes == (0 if room else EACH), "only the first layer finds nothing that was let go before"
    for heads, blocks in ((slice(0, 4), [5, 2]), (slice(1, 3), [7]), (slice(2, 3), [2, 7, 5])):
        found = taken(staged, heads, blocks)
        assert torch.equal(found, taken(ArenaKv(whole), heads, blocks))
        assert found.shape == (LAYERS, 2, heads.stop - heads.start, len(blocks), 8, 16)
    with pytest.raises(KeyError):
        staged.places([1])
    left: list[int] = []
    again = staged.put_back(lambda: torch.zeros(SHAPE).to(dtype), lambda: left.append(staged.nbytes))
    assert torch.equal(*(taken(ArenaKv(each), slice(0, 4), [2, 5, 7]) for each in (again, whole)))
    assert not taken(ArenaKv(again), slice(0, 4), [0, 1, 3]).any()
    assert left[-1] == 0 and left == sorted(left, reverse=True), "used up in turn"


def test_what_is_let_go_does_not_come_back() -> None:
    staged = StagedKv(arena(), [7, 2, 5], 1 << 40)
    assert staged.is_whole and staged.device_bytes == [EACH] * LAYERS
    staged.let_go(1)
    assert not staged.is_whole and staged.device_bytes == [EACH, 0, EACH] and staged.nbytes == 2 * EACH
    places = staged.places([2])
    assert staged.take(2, slice(0, 1), places).shape == (2, 1, 1, 8, 16)


def test_there_is_room_for_one_layers_blocks_only() -> None:
    """When the blocks of a layer are taken, all layers before it are gone; free memory was given back in between."""
    layers = arena()
    whole = [layer.clone() for layer in layers]
    alive = [weakref.ref(layer.untyped_storage()) for layer in layers]
    left: list[list[int]] = []
    staged = StagedKv(layers, [7, 2, 5], EACH, lambda: left.append([ref() is not None for ref in alive].count(True)))
    assert left == [2, 1, 0] and layers == []
    assert staged.host_bytes == 0
    assert torch.equal(*(taken(each, slice(0, 4), [2, 5, 7]) for each in (staged, ArenaKv(whole))))


@pytest.mark.parametrize(("room", "on_host"), [(EACH - 1, 1), (EACH, 0), (0, 1)])
def test_where_it_goes(room: int, on_host: int) -> None:
    assert StagedKv(arena(), [7, 2, 5], room).host_bytes == on_host * EACH


def test_an_arena_that_is_full_finds_room_as_it_goes() -> None:
    """All blocks are in use: what a layer leaves is what the next one's blocks take."""
    assert StagedKv(arena(), list(range(10)), LAYER).host_bytes == 0
    assert StagedKv(arena(), list(range(10)), LAYER - 1).host_bytes == LAYER


def test_a_device_with_less_room_than_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = arena()
    real = torch.Tensor.index_select

    def full(self: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        if dim == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, dim, index)

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "index_select", full)
        staged = StagedKv(list(whole), [7, 2, 5], 1 << 40)
    assert staged.host_bytes == LAYERS * EACH
    assert torch.equal(*(taken(each, slice(0, 4), [2, 5, 7]) for each in (staged, ArenaKv(whole))))


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
