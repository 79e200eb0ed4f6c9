"""Which KV heads of which blocks go from which rank to which when engines change; what ranks copy for themselves.

Pure. Blocks are renumbered where engines merge or split: `core/placement.py` says which block of an old engine becomes
which block of a new one. A block is moved head by head: to each rank of the new engine the heads that it will hold,
from a rank of the old engine that holds them, from itself where it does.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from kvern_engine.model_config import ModelConfig
from kvern_engine.parallel.layout import Layout, model_shard

# (old engine, new engine) -> (old block, new block) of each block that goes from the one to the other.
BlockMoves = Mapping[tuple[int, int], Sequence[tuple[int, int]]]


@dataclass(frozen=True)
class KvMove:
    """The KV heads [start, stop) (of the model's) of some blocks, all layers of the stage: from rank `source`, where
    the blocks are called `old`, to rank `target`, where they are called `new`."""

    source: int
    target: int
    heads: tuple[int, int]
    old: tuple[int, ...]
    new: tuple[int, ...]


def plan_kv_moves(model: ModelConfig, before: Layout, after: Layout, blocks: BlockMoves) -> list[KvMove]:
    """Moves that bring every block to every rank of its new engine, in the same order whoever plans. Stages keep their
    layers: `pipeline` must be the same before and after, else ValueError."""
    if before.pipeline != after.pipeline or before.world != after.world:
        raise ValueError(f"a switch keeps devices and stages: from {before} to {after}")
    found: list[KvMove] = []
    sent = dict.fromkeys(range(before.world), 0)
    for (old_engine, new_engine), pairs in sorted(blocks.items()):
        if not pairs:
            continue
        old, new = tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)
        for stage in range(before.pipeline):
            holders = _holders(model, before, old_engine, stage)
            for target in after.stage_ranks(new_engine, stage):
                wanted = _heads(model, after, target)
                sources = []
                for head in range(*wanted):
                    able = [rank for rank, heads in holders.items() if heads[0] <= head < heads[1]]
                    source = target if target in able else min(able, key=lambda rank: (sent[rank], rank))
                    sources.append((source, head))
                    sent[source] += len(pairs) * (source != target)
                for source, run in groupby(sources, key=lambda pair: pair[0]):
                    heads = [head for _, head in run]
                    found.append(KvMove(source, target, (heads[0], heads[-1] + 1), old, new))
    return found


def _holders(model: ModelConfig, layout: Layout, engine: int, stage: int) -> dict[int, tuple[int, int]]:
    return {rank: _heads(model, layout, rank) for rank in layout.stage_ranks(engine, stage)}


def _heads(model: ModelConfig, layout: Layout, rank: int) -> tuple[int, int]:
    _, stage, tensor_rank = layout.coordinates(rank)
    held = model_shard(model, layout, stage, tensor_rank).kv_heads
    return held.start, held.stop


def in_slices(move: KvMove, block_bytes_of_head: int, most_bytes: int) -> Iterator[KvMove]:
    """The move in parts of at most about `most_bytes`."""
    step = max(1, most_bytes // (block_bytes_of_head * (move.heads[1] - move.heads[0])))
    for at in range(0, len(move.old), step):
        yield KvMove(move.source, move.target, move.heads, move.old[at : at + step], move.new[at : at + step])


def kv_rounds(moves: Sequence[KvMove], block_bytes_of_head: int, most_bytes: int) -> list[list[KvMove]]:
    """Moves between different ranks, in rounds of at most about `most_bytes` a pair. `block_bytes_of_head`: K and V of
    one head of one block, all layers of the stage."""
    found: list[list[KvMove]] = []
    filled: dict[tuple[int, int], tuple[int, int]] = {}
    for move in moves:
        if move.source == move.target:
            continue
        each = block_bytes_of_head * (move.heads[1] - move.heads[0])
        for part in in_slices(move, block_bytes_of_head, most_bytes):
            pair, size = (move.source, move.target), len(part.old) * each
            round_, there = filled.get(pair, (0, 0))
            if there and there + size > most_bytes:
                round_, there = round_ + 1, 0
            filled[pair] = round_, there + size
            while len(found) <= round_:
                found.append([])
            found[round_].append(part)
    return found
