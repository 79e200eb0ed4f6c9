"""Who goes where when the layout changes: requests to the engines of the new layout, blocks to new numbers.

Pure: handovers in, shares out. A request stays on the devices that have its K and V: where engines merge there is one
engine that it can go to, where one is split there are several, and it goes to the one that has most room. Choices share
blocks with their siblings, so a request goes as a whole. What finds no room in the blocks of its new engine is computed
again from its tokens (`waiting`). Those that would lose most come first. Prefixes that nobody uses at present go along
as far as room is left, the most recently used first; to every part of an engine that is split.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from kvern_engine.core.handed import Handover, HeldChoice, HeldRequest, Share
from kvern_engine.core.window import NO_BLOCK
from kvern_engine.parallel.layout import Layout


@dataclass(frozen=True)
class Room:
    """What an engine of the new layout has: blocks, their tokens, and rows for running choices."""

    num_blocks: int
    block_size: int
    max_num_seqs: int


@dataclass(frozen=True)
class Placement:
    """`shares[e]` is what engine e takes over; `moves` (old engine, new engine) -> (old block, new block); `recomputed`
    counts the running choices whose K and V are given up, `kept` those whose are not."""

    shares: list[Share]
    moves: dict[tuple[int, int], list[tuple[int, int]]]
    engine_of: dict[str, int]  # request id -> engine
    kept: int
    recomputed: int


@dataclass
class _Filling:
    """An engine of the new layout as it fills up."""

    room: Room
    requests: list[HeldRequest] = field(default_factory=list)
    rows: int = 0
    taken: int = 0
    load: int = 0  # tokens of its requests
    known: dict[tuple[int, int], int] = field(default_factory=dict)  # (old engine, old block) -> new block
    cached: list[tuple[bytes, int]] = field(default_factory=list)

    @property
    def free(self) -> int:
        return self.room.num_blocks - self.taken

    def needs(self, old: int, request: HeldRequest) -> int:
        """Blocks that it would take more of."""
        return len({block for block in _blocks(request) if (old, block) not in self.known})

    def take_block(self, old: int, block: int) -> int:
        new = self.known.get((old, block))
        if new is None:
            new = self.known[old, block] = self.taken
            self.taken += 1
        return new


def place(handovers: Sequence[Handover], before: Layout, after: Layout, rooms: Sequence[Room]) -> Placement:
    """Share out everything that the engines of `before` have handed over among those of `after`, which have `rooms`."""
    filling = [_Filling(room) for room in rooms]
    moves: dict[tuple[int, int], list[tuple[int, int]]] = {}
    engine_of: dict[str, int] = {}
    kept = recomputed = 0
    parts = {h.engine: overlapping(before, after, h.engine) for h in handovers}
    everybody = [(h.engine, request) for h in handovers for request in h.requests]
    everybody.sort(key=lambda item: (-_computed(item[1]), item[1].message.arrival))
    for old, request in everybody:
        running = sum(choice.state == "running" for choice in request.choices)
        able = [e for e in parts[old] if running and _fits(filling[e], old, request, running)]
        if able:
            chosen = min(able, key=lambda e: (filling[e].taken + filling[e].needs(old, request), filling[e].load, e))
            request = _move(filling[chosen], old, chosen, request, moves)
            filling[chosen].rows += running
            kept += running
        else:
            chosen = min(parts[old], key=lambda e: (filling[e].load, e))
            request = _without_blocks(request)
            recomputed += running
        filling[chosen].requests.append(request)
        filling[chosen].load += _tokens(request)
        engine_of[request.message.request_id] = chosen
    for handover in handovers:
        for chosen in parts[handover.engine]:
            _keep_prefixes(filling[chosen], handover, chosen, moves)
    shares = [
        Share(engine, sorted(f.requests, key=lambda r: r.message.arrival), f.cached[::-1])
        for engine, f in enumerate(filling)
    ]
    return Placement(shares, moves, engine_of, kept, recomputed)


def overlapping(before: Layout, after: Layout, engine: int) -> list[int]:
    """The engines of `after` that have devices of `engine` of `before`."""
    return sorted({after.coordinates(rank)[0] for rank in before.ranks_of(engine)})


def _blocks(request: HeldRequest) -> Iterable[int]:
    return (block for choice in request.choices for block in choice.blocks if block != NO_BLOCK)


def _computed(request: HeldRequest) -> int:
    return sum(choice.computed for choice in request.choices if choice.state == "running")


def _tokens(request: HeldRequest) -> int:
    return sum(len(request.message.prompt_token_ids) + len(choice.tokens) for choice in request.choices)


def _fits(filling: _Filling, old: int, request: HeldRequest, running: int) -> bool:
    return filling.rows + running <= filling.room.max_num_seqs and filling.needs(old, request) <= filling.free


def _move(
    filling: _Filling,
    old: int,
    engine: int,
    request: HeldRequest,
    moves: dict[tuple[int, int], list[tuple[int, int]]],
) -> HeldRequest:
    """The request with its blocks under their new numbers; those that hold something are moved."""
    choices, size = [], filling.room.block_size
    for choice in request.choices:
        blocks = []
        for index, block in enumerate(choice.blocks):
            if block == NO_BLOCK:
                blocks.append(NO_BLOCK)
                continue
            is_new = (old, block) not in filling.known
            blocks.append(filling.take_block(old, block))
            if is_new and index * size < choice.computed:
                moves.setdefault((old, engine), []).append((block, blocks[-1]))
        choices.append(msgspec.structs.replace(choice, blocks=blocks))
    return msgspec.structs.replace(request, choices=choices)


def _without_blocks(request: HeldRequest) -> HeldRequest:
    """Its running choices go back to the queue; those that would have forked from them wait on."""
    return msgspec.structs.replace(request, choices=[_waiting(choice) for choice in request.choices])


def without_kv(handover: Handover) -> Share:
    """What the same engine takes back where K and V of its blocks are gone: all of it is computed again."""
    return Share(handover.engine, [_without_blocks(request) for request in handover.requests])


def _waiting(choice: HeldChoice) -> HeldChoice:
    if choice.state != "running":
        return choice
    lost = choice.lost + choice.computed
    return msgspec.structs.replace(choice, state="waiting", blocks=[], computed=0, lost=lost)


def _keep_prefixes(
    filling: _Filling, handover: Handover, engine: int, moves: dict[tuple[int, int], list[tuple[int, int]]]
) -> None:
    have = {digest for digest, _ in filling.cached}
    for digest, block in reversed(handover.cached):
        if not filling.free:
            return
        if digest in have:
            continue
        new = filling.take_block(handover.engine, block)
        filling.cached.append((digest, new))
        moves.setdefault((handover.engine, engine), []).append((block, new))


def with_recent_prefixes(handover: Handover, most: int) -> Handover:
    """The handover with `most` of the prefixes that nobody uses, those used last."""
    return msgspec.structs.replace(handover, cached=handover.cached[-most:] if most else [])


def kept_blocks(handover: Handover, block_size: int) -> list[int]:
    """The blocks that hold something: of running choices, then of prefixes; each once."""
    running = (
        block
        for request in handover.requests
        for choice in request.choices
        for index, block in enumerate(choice.blocks)
        if block != NO_BLOCK and index * block_size < choice.computed
    )
    return list(dict.fromkeys([*running, *(block for _, block in handover.cached)]))
