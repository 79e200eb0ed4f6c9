"""How many pieces a decode step cuts its contexts into, so that all of a GPU reads: pure arithmetic.

One program reads one row, one KV head and one piece ("split") of the context. Few rows with long contexts would leave
most multiprocessors idle unless contexts are split; a split costs a merge. So the least length of a piece grows with
the number of programs there are without splitting, and a long context always makes about the same number of programs
a multiprocessor, whatever the batch: enough to fill the card, and to even out rows of unequal length.

The number of splits is fixed for a launch (and a captured graph); each row uses as many of them as its own length is
worth (`row_splits`, computed on the device).
"""

MAX_SPLITS = 64
# A piece shorter than this is not worth its merge, even where the card is idle.
MIN_SPLIT_TOKENS = 128
# At this many programs a multiprocessor the card reads at full speed without splits of short contexts. Measured on an
# H200 with 8 KV heads: 256 programs of 384 tokens take 18.7 us whole and 23 us in halves, of 4,096 tokens 141 and 133.
_FULL = 4


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def min_split_tokens(programs: int, sm_count: int) -> int:
    """The least tokens of a piece where a launch has `programs` (rows x KV heads) without splits; a power of two times
    MIN_SPLIT_TOKENS.
    """
    share = max(1, ceil_div(programs * _FULL, sm_count))
    return MIN_SPLIT_TOKENS * (1 << (share - 1).bit_length())


def choose_splits(max_context: int, min_tokens: int) -> int:
    """The number of KV splits, 1..MAX_SPLITS, of a launch whose longest context is `max_context` tokens."""
    return min(MAX_SPLITS, max(1, ceil_div(max_context, min_tokens)))


def row_splits(context: int, splits: int, min_tokens: int, tile: int) -> tuple[int, int]:
    """(pieces used, tokens a piece) of one row in a launch of `splits`, pieces being whole tiles; the kernel's rule."""
    tiles = ceil_div(context, tile)
    each = max(ceil_div(tiles, splits), ceil_div(min_tokens, tile))
    return max(ceil_div(tiles, each), 1), each * tile
