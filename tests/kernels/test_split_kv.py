"""The choice of KV splits: bounds, monotony and the cases it exists for."""

from hypothesis import given
from hypothesis import strategies as st

from kvern_kernels.split_kv import MAX_SPLITS, MIN_SPLIT_TOKENS, ceil_div, choose_splits, min_split_tokens, row_splits

programs = st.integers(0, 1 << 16)
sms = st.integers(1, 200)
contexts = st.integers(0, 200_000)


@given(programs=programs, sms=sms, context=contexts)
def test_bounds(programs, sms, context):
    least = min_split_tokens(programs, sms)
    splits = choose_splits(context, least)
    assert least >= MIN_SPLIT_TOKENS and least % MIN_SPLIT_TOKENS == 0
    assert 1 <= splits <= MAX_SPLITS
    assert splits == 1 or context > least * (splits - 1)


@given(programs=programs, sms=sms, context=contexts, more=st.integers(0, 10_000))
def test_longer_contexts_are_cut_more_and_larger_batches_less(programs, sms, context, more):
    least = min_split_tokens(programs, sms)
    assert choose_splits(context + more, least) >= choose_splits(context, least)
    assert min_split_tokens(programs + more, sms) >= least


@given(rows=st.integers(1, 512), kv_heads=st.integers(1, 16), context=st.integers(4096, 200_000))
def test_long_contexts_fill_the_card_at_any_batch(rows, kv_heads, context):
    least = min_split_tokens(rows * kv_heads, 132)
    splits = choose_splits(context, least)
    # Two programs a multiprocessor, or as many as the limit allows.
    assert rows * kv_heads * splits >= 264 or splits == MAX_SPLITS or context // splits < 2 * MIN_SPLIT_TOKENS


def splits_of(rows, context):
    return choose_splits(context, min_split_tokens(rows * 8, 132))


def test_the_cases_it_exists_for():
    assert splits_of(1, 8192) == 64  # one long row: the whole card reads
    assert splits_of(24, 8192) == 8  # more than 16 sequences are still split
    assert splits_of(32, 4096) == 4
    assert splits_of(32, 384) == 1  # 256 programs of little work each
    assert splits_of(128, 384) == 1
    assert splits_of(1, 100) == 1  # nothing to split


@given(
    context=contexts,
    splits=st.integers(1, MAX_SPLITS),
    least=st.sampled_from([128, 512, 4096]),
    tile=st.sampled_from([16, 32, 64, 128]),
)
def test_a_rows_pieces_cover_its_context_without_an_empty_one(context, splits, least, tile):
    used, each = row_splits(context, splits, least, tile)
    assert 1 <= used <= splits
    assert used * each >= context and each % tile == 0
    assert context == 0 or (used - 1) * each < context
    assert used == 1 or each >= least
    assert used == 1 or used >= ceil_div(context, each)
