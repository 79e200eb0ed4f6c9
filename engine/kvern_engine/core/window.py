"""Sliding windows: which blocks of a sequence are never read again, and behind which cached prefix one can start.

For models that have a window in all layers: a token at position p sees the positions p - window + 1 .. p, in every
layer, so that the blocks before are not needed by it or by any token after it. Pure arithmetic.
"""

from collections.abc import Sequence

NO_BLOCK = -1  # in a sequence's list of blocks: one that it has given back, or never had


def first_needed(position: int, window: int, block_size: int) -> int:
    """The first block of which the token at `position`, or one after it, sees anything."""
    return max(0, position - window + 1) // block_size


def usable_prefix(known: Sequence[int | None], window: int, block_size: int) -> list[int]:
    """The blocks of the longest prefix behind which a sequence can start.

    `known[i]` is the block that holds the i-th full block of its tokens, None where there is none any more. All blocks
    that the token behind the prefix sees must be known; for those before it, which nobody reads, stands NO_BLOCK.
    """
    best = run = 0  # `run`: known blocks in a row, up to the one looked at
    for count, block in enumerate(known, start=1):
        run = run + 1 if block is not None else 0
        if run >= count - first_needed(count * block_size, window, block_size):
            best = count
    first = first_needed(best * block_size, window, block_size)
    return [NO_BLOCK] * min(first, best) + [block for block in known[first:best] if block is not None]
