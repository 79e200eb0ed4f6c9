"""How a decode step's contexts are cut: bounds, what is covered, and the cases it exists for."""

from hypothesis import given
from hypothesis import strategies as st

from kvern_kernels.split_kv import (
    LEAST_PIECE,
    MAX_PIECES,
    PIECE_PRICE,
    PROGRAMS,
    Cut,
    choose_piece,
    cut_row,
    estimate,
    fixed_piece,
    most_pieces,
    plan,
)

SLOTS = PROGRAMS * 132  # of an H200
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
    cut = Cut(64, most_pieces(rows, 200_000, 8, 132, piece), SLOTS, 8, piece)
    together = plan([*contexts, more], cut)
    for row, (pieces, each) in enumerate(alone):
        own = [p for p in together if p.row == row]
        assert len(own) == pieces and all(p.end - p.begin <= each for p in own)


@given(contexts=lengths, kv_heads=st.sampled_from([1, 2, 4, 8, 32]))
def test_no_candidate_would_be_over_sooner(contexts, kv_heads):
    cut = cut_for(contexts, kv_heads)
    chosen = estimate(contexts, choose_piece(contexts, cut), cut)
    assert chosen is not None
    for piece in (128, 512, 1024, 4096, 1 << 30):
        other = estimate(contexts, piece, cut)
        assert other is None or other >= chosen
    # Never longer than the longest context read by one program beside an even load.
    load = (sum(contexts) + PIECE_PRICE * len(contexts)) * kv_heads
    longest = max(contexts) + 64 + PIECE_PRICE
    assert chosen <= load + longest * SLOTS * 9 / 8


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


def test_nothing_to_read():
    assert [(p.begin, p.end, p.pieces) for p in plan([0, 0], cut_for([0, 0]))] == [(0, 0, 1), (0, 0, 1)]
