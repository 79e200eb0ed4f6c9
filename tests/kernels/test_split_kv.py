"""The choice of KV splits: bounds, monotony and the cases it exists for."""

from hypothesis import given
from hypothesis import strategies as st

from kvern_kernels.split_kv import MAX_SPLITS, MIN_SPLIT_TOKENS, ceil_div, choose_splits, row_splits

sizes = {
    "rows": st.integers(1, 1024),
    "kv_heads": st.integers(1, 64),
    "context": st.integers(0, 200_000),
    "sms": st.integers(1, 200),
    "each": st.integers(1, 8),
}


def busy(programs, slots):
    return programs / (ceil_div(programs, slots) * slots)


@given(**sizes)
def test_splits_stay_in_bounds_and_fill_the_card_as_well_as_can_be(rows, kv_heads, context, sms, each):
    splits = choose_splits(rows, kv_heads, context, sms, each)
    most = min(MAX_SPLITS, max(1, ceil_div(context, MIN_SPLIT_TOKENS)))
    assert 1 <= splits <= most
    best = max(busy(rows * kv_heads * n, sms * each) for n in range(1, most + 1))
    assert busy(rows * kv_heads * splits, sms * each) >= 0.95 * best


@given(**sizes, more=st.integers(0, 100_000))
def test_longer_contexts_never_fill_the_card_less(rows, kv_heads, context, sms, each, more):
    short = choose_splits(rows, kv_heads, context, sms, each)
    long = choose_splits(rows, kv_heads, context + more, sms, each)
    assert busy(rows * kv_heads * long, sms * each) >= 0.95 * busy(rows * kv_heads * short, sms * each)


def test_the_cases_it_exists_for():
    assert choose_splits(1, 8, 8192, 132) >= 16  # one long row: nearly the whole card reads
    assert choose_splits(24, 8, 8192, 132) > 1  # more than 16 sequences are still split
    assert choose_splits(32, 8, 4096, 132, 2) == 1  # 256 programs fill 264 slots
    assert choose_splits(32, 8, 4096, 132, 4) == 2  # and half of 528
    assert choose_splits(1, 8, 100, 132) == 1  # nothing to split
    assert choose_splits(0, 8, 8192, 132) == 1


@given(context=st.integers(0, 200_000), splits=st.integers(1, MAX_SPLITS), tile=st.sampled_from([16, 32, 64, 128]))
def test_a_rows_pieces_cover_its_context_without_an_empty_one(context, splits, tile):
    used, each = row_splits(context, splits, tile)
    assert 1 <= used <= splits
    assert used * each >= context and each % tile == 0
    assert context == 0 or (used - 1) * each < context
    assert used == 1 or each >= MIN_SPLIT_TOKENS
