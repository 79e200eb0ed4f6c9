"""How a scheduler hands over what it holds, and how another one goes on with it (`handed.py`).

No tensor is touched: K and V lie, or have been brought, where the blocks say. The new scheduler's first plan tells its
worker of every row that it took over, as it would of resumed ones.
"""

from collections.abc import Mapping

from kvern_engine.core.block_pool import BlockPool
from kvern_engine.core.handed import Handover, HeldChoice, HeldRequest, Share
from kvern_engine.core.sequence import Request, Sequence, State
from kvern_engine.core.state import Books
from kvern_engine.core.window import NO_BLOCK


def hand_over(engine: int, books: Books, requests: Mapping[str, Request], max_model_len: int) -> Handover:
    """What the books hold, while no plan is in flight. The books are to be given up afterwards."""
    held = [HeldRequest(r.message, _choices(r), r.scheduled_at) for r in requests.values()]
    return Handover(engine, held, books.pool.cached_blocks(), max_model_len)


def _choices(request: Request) -> list[HeldChoice]:
    return [_held(seq) for seq in request.choices if seq.state is not State.FINISHED]


def _held(seq: Sequence) -> HeldChoice:
    running = seq.state in (State.PREFILL, State.DECODE)
    deferred = seq.state is State.DEFERRED
    return HeldChoice(
        index=seq.index,
        state="running" if running else "deferred" if deferred else "waiting",
        tokens=seq.tokens[seq.num_prompt :],
        blocks=list(seq.blocks) if running else [],
        computed=seq.num_computed if running else 0,
        cached=seq.num_cached,
        lost=seq.lost,
        told=not seq.first_output,
        prompt_logprobs=seq.prompt_logprobs,
    )


def restore_blocks(pool: BlockPool, share: Share) -> None:
    """In a fresh pool: the blocks of the share are taken, as often as its choices hold them; its prefixes are free and
    can be found."""
    for request in share.requests:
        for choice in request.choices:
            pool.share(block for block in choice.blocks if block != NO_BLOCK)
    for digest, block in share.cached:  # the least recently used first, as they stood
        pool.share([block])
        pool.publish(block, digest)
        pool.release([block])


def restore_choice(books: Books, seq: Sequence, held: HeldChoice) -> None:
    """Give a new sequence the state that `held` has; its blocks are in the pool (`restore_blocks`)."""
    seq.num_cached, seq.lost, seq.first_output = held.cached, held.lost, not held.told
    if held.prompt_logprobs is not None:
        seq.prompt_logprobs = list(held.prompt_logprobs)
    if held.state == "deferred":
        books.defer(seq)
        return
    if held.tokens or held.state == "running":
        seq.own_tokens()
        seq.tokens.extend(held.tokens)
    if held.state == "waiting":
        seq.state = State.PREEMPTED if held.told or held.lost else State.WAITING
        books.enqueue(seq)
    else:
        books.take_over(seq, list(held.blocks), held.computed)
