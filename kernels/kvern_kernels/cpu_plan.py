"""How a step's attention is cut into calls on a CPU: a pure decision over lengths and block ids, no tensors.

The costs it balances are those of a small CPU: a call into torch costs as much as copying some thousand tokens, a copy
of K and V about as much as reading them, and padding is read like anything else.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

# A decode call may pad up to a quarter of its tokens, or this many where it is small: a further call would cost more.
FREE_PADDING_TOKENS = 512
# A decode call gathers at most about this many tokens, so that what it copied is still in the cache when it is read.
MAX_GATHER_TOKENS = 4096
# From this context on a row whose blocks are consecutive is read in place, in a call of its own.
VIEW_TOKENS = 512
# Chunks of at most this many query tokens whose own context is at most this long share calls: one each would cost more
# than computing what is masked.
SHORT_QUERY_TOKENS, SHORT_CONTEXT_TOKENS = 32, 256
# The query tokens of a chunk that share a mask where there is a window: each such piece reads a context of its own.
WINDOW_TILE = 256
# A shared prefix is attended to once for all rows where that saves reading at least this many tokens.
PREFIX_SAVING_TOKENS = 2048


@dataclass(frozen=True)
class BatchCall:
    """Rows in one call. Row i's tokens starts[i]..starts[i]+counts[i]-1 are the last of the first `lengths[i]` tokens
    of `blocks[i]`, to which they attend causally; the lists of blocks are equally long, padded by a row's first block.
    """

    starts: list[int]
    counts: list[int]
    blocks: list[list[int]]
    lengths: list[int]


@dataclass(frozen=True)
class ExtendCall:
    """Tokens start..start+count-1 attend causally to the first `length` tokens of `blocks`: they are its last."""

    start: int
    count: int
    blocks: list[int]
    length: int


@dataclass(frozen=True)
class PrefixCall:
    """All of `tokens` attend to all tokens of `blocks`, in addition to their own call."""

    tokens: list[int]
    blocks: list[int]


@dataclass
class Plan:
    """The calls of a step; every token with a context is in exactly one batch or extend call and in at most one prefix
    call. All rows of `decodes` have one token, those of `shorts` a few. `idle` are the tokens of padded rows, whose
    output is zero.
    """

    decodes: list[BatchCall] = field(default_factory=list)
    shorts: list[BatchCall] = field(default_factory=list)
    extends: list[ExtendCall] = field(default_factory=list)
    prefixes: list[PrefixCall] = field(default_factory=list)
    idle: list[int] = field(default_factory=list)


@dataclass
class _Row:
    start: int
    count: int
    length: int
    blocks: list[int]


def is_run(blocks: Sequence[int]) -> bool:
    """Whether the ids are consecutive, so that the blocks are one range of the arena."""
    first = blocks[0]
    return blocks[-1] - first == len(blocks) - 1 and list(blocks) == list(range(first, first + len(blocks)))


def common_prefix(tables: Sequence[Sequence[int]], limit: int) -> int:
    """How many leading blocks, at most `limit`, all tables share."""
    first = tables[0]
    shared = limit
    for table in tables[1:]:
        if table[:shared] != first[:shared]:
            shared = next(i for i in range(shared) if table[i] != first[i])
    return shared


def plan_step(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    tables: Sequence[Sequence[int]],
    block_size: int,
    window: int | None = None,
) -> Plan:
    """Cut a step into calls. `tables[r]` holds at least ceil(seq_lens[r] / block_size) block ids.

    With a `window`, calls leave out the blocks that none of their tokens sees, and their lengths count from the first
    block that is left; what else a token does not see is the call's to hide. Prefixes are not shared then.
    """
    plan, rows, start = Plan(), list[_Row](), 0
    for count, length, table in zip(query_lens, seq_lens, tables, strict=True):
        if length > 0:
            rows += _rows(start, count, length, table, block_size, window)
        else:
            plan.idle.extend(range(start, start + count))
        start += count
    if len(rows) > 1 and window is None:
        plan.prefixes = _split_prefixes(rows, block_size)
    batched: dict[int, list[_Row]] = {}
    for row in rows:
        short = row.count <= SHORT_QUERY_TOKENS and row.length <= SHORT_CONTEXT_TOKENS
        if row.count > 1 and not short:
            plan.extends.append(ExtendCall(row.start, row.count, row.blocks, row.length))
        elif row.count == 1 and row.length >= VIEW_TOKENS and is_run(row.blocks):
            plan.decodes.append(_batch_call([row], len(row.blocks)))
        else:
            # Query tokens are padded too, so that only rows of similar counts share a call.
            batched.setdefault((row.count - 1).bit_length(), []).append(row)
    for kind, members in batched.items():
        calls = _bucket(members, block_size)
        if kind == 0:
            plan.decodes.extend(calls)
            continue
        for call in calls:
            if len(call.starts) > 1:
                plan.shorts.append(call)
            else:
                plan.extends.append(ExtendCall(call.starts[0], call.counts[0], call.blocks[0], call.lengths[0]))
    return plan


def _rows(start: int, count: int, length: int, table: Sequence[int], block_size: int, window: int | None) -> list[_Row]:
    """A row of the step, or its pieces where a window makes that less to read."""
    if window is None or length <= window:
        return [_Row(start, count, length, list(table[: -(-length // block_size)]))]
    rows = []
    for first in range(0, count, WINDOW_TILE):
        tokens = min(WINDOW_TILE, count - first)
        end = length - count + first + tokens
        hidden = max(0, end - tokens - window + 1) // block_size
        blocks = list(table[hidden : -(-end // block_size)])
        rows.append(_Row(start + first, tokens, end - hidden * block_size, blocks))
    return rows


def _split_prefixes(rows: list[_Row], block_size: int) -> list[PrefixCall]:
    """Take the blocks that rows share off their contexts where it pays."""
    calls = []
    ordered = sorted(rows, key=lambda row: row.blocks[0])
    for _, members in groupby(ordered, key=lambda row: row.blocks[0]):
        group = list(members)
        if len(group) == 1:
            continue
        # Only what every row had before this step: the rest is masked causally in the rows' own calls.
        limit = min((row.length - row.count) // block_size for row in group)
        if limit * block_size * (len(group) - 1) < PREFIX_SAVING_TOKENS:
            continue
        shared = common_prefix([row.blocks for row in group], limit)
        if shared * block_size * (len(group) - 1) < PREFIX_SAVING_TOKENS:
            continue
        tokens = sorted(token for row in group for token in range(row.start, row.start + row.count))
        calls.append(PrefixCall(tokens, group[0].blocks[:shared]))
        for row in group:
            row.blocks, row.length = row.blocks[shared:], row.length - shared * block_size
    return calls


def _bucket(rows: list[_Row], block_size: int) -> list[BatchCall]:
    """Group rows of similar context so that padding and the size of a gather stay bounded."""
    calls: list[BatchCall] = []
    bucket: list[_Row] = []
    width = padding = 0
    for row in sorted(rows, key=lambda row: -len(row.blocks)):
        waste = (width - len(row.blocks)) * block_size
        total = width * block_size * (len(bucket) + 1)
        if bucket and (total > MAX_GATHER_TOKENS or padding + waste > max(FREE_PADDING_TOKENS, total // 4)):
            calls.append(_batch_call(bucket, width))
            bucket = []
        if not bucket:
            width, padding, waste = len(row.blocks), 0, 0
        bucket.append(row)
        padding += waste
    if bucket:
        calls.append(_batch_call(bucket, width))
    return calls


def _batch_call(rows: list[_Row], width: int) -> BatchCall:
    rows = sorted(rows, key=lambda row: row.start)
    return BatchCall(
        [row.start for row in rows],
        [row.count for row in rows],
        [row.blocks + [row.blocks[0]] * (width - len(row.blocks)) for row in rows],
        [row.length for row in rows],
    )
