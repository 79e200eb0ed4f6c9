"""How many pieces a decode step cuts its contexts into, so that all of a GPU reads: pure arithmetic.

One program reads one row, one KV head and one piece ("split") of the context. Few rows with long contexts leave most
multiprocessors idle unless contexts are split; splits cost a merge. The number is fixed for a launch (and a captured
graph); each row uses as many of them as its own length is worth (`row_splits`, computed on the device).
"""

MAX_SPLITS = 64
# A piece shorter than this is not worth its merge.
MIN_SPLIT_TOKENS = 128
# Beyond full waves, splits even out rows of unequal length; more than this many waves gain nothing.
_ENOUGH = 0.95


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def choose_splits(rows: int, kv_heads: int, max_context: int, sm_count: int, programs_per_sm: int = 4) -> int:
    """The number of KV splits of a launch: the fewest that fill the card nearly as well as the best number would.

    `rows` x `kv_heads` programs run a split; `max_context` tokens is the longest context the launch must serve well.
    Returns 1..MAX_SPLITS, never more pieces than MIN_SPLIT_TOKENS tokens of the longest context make.
    """
    programs = rows * kv_heads
    slots = sm_count * programs_per_sm
    most = min(MAX_SPLITS, max(1, ceil_div(max_context, MIN_SPLIT_TOKENS)))
    if programs <= 0:
        return 1
    filled = [_filled(programs * splits, slots) for splits in range(1, most + 1)]
    wanted = _ENOUGH * max(filled)
    return next(splits for splits, share in enumerate(filled, start=1) if share >= wanted)


def _filled(programs: int, slots: int) -> float:
    """The share of the card's program slots that are busy over the waves that `programs` equal programs take."""
    return programs / (ceil_div(programs, slots) * slots)


def row_splits(context: int, splits: int, tile: int) -> tuple[int, int]:
    """(pieces used, tokens a piece) of one row in a launch of `splits`, pieces being whole tiles; the kernel's rule."""
    tiles = ceil_div(context, tile)
    each = max(ceil_div(tiles, splits), ceil_div(MIN_SPLIT_TOKENS, tile))
    return max(ceil_div(tiles, each), 1), each * tile
