"""How a decode step's contexts are cut: bounds, what is covered, and the cases it exists for."""

import heapq
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvern_kernels.split_kv import (
    CANDIDATES,
    LEAST_PIECE,
    MAX_PIECES,
    MERGE_PRICE,
    PIECE_PRICE,
    PROGRAMS,
    TAIL_SHIFT,
    Cut,
    choose_piece,
    cut_row,
    estimate,
    fixed_piece,
    most_pieces,
    plan,
)

RESIDENT = PROGRAMS * 132  # of an H200
lengths = st.lists(st.one_of(st.integers(0, 300), st.integers(0, 130_000)), min_size=1, max_size=40)
tiles = st.sampled_from([16, 32, 64, 128])


def cut_for(contexts, kv_heads=8, sms=132, tile=64, piece=None):
    capacity = most_pieces(len(contexts), max([*contexts, 1]), kv_heads, sms, piece)
    return Cut(tile, capacity, PROGRAMS * sms, kv_heads, piece)


@given(contexts=lengths, kv_heads=st.integers(1, 32), sms=st.integers(1, 300), tile=tiles, fixed=st.booleans())
def test_pieces_cover_every_context_once_and_fit_the_launch(contexts, kv_heads, sms, tile, fixed):
    piece = fixed_piece(len(contexts), sms) if fixed else None
    cut = cut_for(contexts, kv_heads, sms, tile, piece)
    pieces = plan(contexts, cut)
    assert len(pieces) <= cut.capacity
    for row, context in enumerate(contexts):
        own = [p for p in pieces if p.row == row]
        assert [p.begin for p in own] == [0, *(p.end for p in own[:-1])] and own[-1].end == context
        assert {p.pieces for p in own} == {len(own)} and len(own) <= MAX_PIECES
        assert context == 0 or all(p.begin < p.end for p in own)
        assert all(p.end % tile == 0 for p in own[:-1])
    first = [p.end - p.begin for p in pieces if p.begin == 0]
    assert [-(-x // tile) for x in first] == sorted((-(-x // tile) for x in first), reverse=True), "longest first"


@given(contexts=lengths, more=st.integers(0, 100_000))
def test_where_rows_may_not_depend_on_others_they_do_not(contexts, more):
    rows = len(contexts) + 1
    piece = fixed_piece(rows, 132)
    alone = [cut_row(context, piece, 64) for context in contexts]
    cut = Cut(64, most_pieces(rows, 200_000, 8, 132, piece), RESIDENT, 8, piece)
    together = plan([*contexts, more], cut)
    for row, (pieces, each) in enumerate(alone):
        own = [p for p in together if p.row == row]
        assert len(own) == pieces and all(p.end - p.begin <= each for p in own)


def over(contexts, piece, cut):
    """When the last piece of `piece` tokens ends, in tokens of one program, where programs take them in turn."""
    forced = Cut(cut.tile, cut.capacity, cut.resident, cut.kv_heads, piece)
    programs = [0.0] * max(1, cut.resident // cut.kv_heads)
    for part in plan(contexts, forced):
        heapq.heapreplace(programs, programs[0] + part.end - part.begin + PIECE_PRICE)
    return max(programs)


def fitting(contexts, cut):
    return [piece for piece in CANDIDATES if estimate(contexts, piece, cut) is not None]


@given(contexts=lengths, kv_heads=st.sampled_from([1, 2, 4, 8, 32]))
def test_no_other_length_is_over_much_sooner(contexts, kv_heads):
    """By Graham's bound, with what the estimate adds for a merge and for the end of a step."""
    cut = cut_for(contexts, kv_heads)
    chosen = over(contexts, choose_piece(contexts, cut), cut)
    best = min(over(contexts, piece, cut) for piece in fitting(contexts, cut))
    assert chosen <= 2 * (1 + 1 / (1 << TAIL_SHIFT)) * best + 2 * (MERGE_PRICE + cut.tile)


@pytest.mark.parametrize("rows", [8, 16, 32, 40, 64, 128, 256])
def test_of_running_chats_hardly_any_length_is_over_sooner(rows):
    rng = random.Random(rows)
    for _ in range(10):
        contexts = [min(3072, 8 + int(rng.lognormvariate(5.6, 0.9))) for _ in range(rows)]
        cut = cut_for(contexts)
        chosen = over(contexts, choose_piece(contexts, cut), cut)
        assert chosen <= 1.25 * min(over(contexts, piece, cut) for piece in fitting(contexts, cut))
        assert chosen <= 1.01 * over(contexts, 1 << 30, cut), "cutting pays"


def tokens(contexts, **kw):
    """Of the longest piece."""
    return max(p.end - p.begin for p in plan(contexts, cut_for(contexts, **kw)))


def test_one_long_row_is_read_by_the_whole_card():
    pieces = plan([4096], cut_for([4096], tile=128))
    assert len(pieces) == 32 and tokens([4096], tile=128) == LEAST_PIECE
    assert tokens([8192], tile=128) <= 256


def test_rows_of_one_length_that_fill_the_card_are_whole():
    for rows, context in ((32, 384), (32, 640), (64, 640), (128, 384), (256, 640)):
        assert tokens([context] * rows) == context, (rows, context)


def test_long_rows_are_cut_so_that_the_end_is_even():
    assert 512 <= tokens([4096] * 32) <= 2048


def test_one_long_row_among_short_ones_does_not_outlast_them():
    """Measured on an H200: 40 rows of 16,911 tokens, the longest of 2,021: 63 us whole, 29 us in pieces of 512."""
    contexts = [2021, 1500, *([380] * 38)]
    assert tokens(contexts) <= 640
    assert {p.pieces for p in plan(contexts, cut_for(contexts)) if p.row > 1} == {1}


def test_many_rows_are_not_cut_for_a_row_that_begins_early():
    contexts = [200, 300] * 120 + [1900]
    pieces = plan(contexts, cut_for(contexts))
    assert pieces[0].row == 240 and len(pieces) <= len(contexts) + 4


def test_rows_that_may_have_no_token_leave_programs_to_the_others():
    assert most_pieces(256, 8192, 8, 132) == 256 + 17
    assert most_pieces(256, 8192, 8, 132, padded=True) == 256 + 99


def test_nothing_to_read():
    assert [(p.begin, p.end, p.pieces) for p in plan([0, 0], cut_for([0, 0]))] == [(0, 0, 1), (0, 0, 1)]
