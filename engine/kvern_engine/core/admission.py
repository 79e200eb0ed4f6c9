"""Prompts: how a step's tokens are shared among them, who leaves the queue, and when choices fork.

Decides for prompts only; decodes have had their tokens before, and nothing here preempts anybody.

*No thrashing*: a sequence is admitted only where its whole prompt fits and it and every running sequence can still grow
by some blocks, more of them the more had to be preempted lately; while a preempted one waits for room, nobody behind it
is let in.
*No starvation*: those behind a sequence that does not fit may overtake it a bounded number of times, then admission
waits for it. *Long prompts delay nobody*: the first prompt in the order gets half of the tokens where others want some;
the other half goes to the shortest first, and what they leave goes back to the first.
"""

from kvern_engine.core.limits import SchedulerConfig
from kvern_engine.core.sequence import Sequence, State
from kvern_engine.core.state import Books, Draft
from kvern_engine.core.window import NO_BLOCK

_WINDOW = 16  # sequences of the queue looked at in one step, beyond those admitted
_SLIVER = 8  # a prompt does not begin with less than this part of itself, where the step is as full as that without it


def share_budget(wanted: list[int], budget: int, contested: bool) -> list[int]:
    """Tokens for each of the prompts in order, which want `wanted` (all > 0); together at most `budget`.

    Contested: the first one leaves half to the others, the shortest of which come first; some may be left over.
    """
    takes = [0] * len(wanted)
    if wanted:
        takes[0] = min(wanted[0], -(-budget // 2) if contested else budget)
        budget -= takes[0]
    for index in sorted(range(1, len(wanted)), key=wanted.__getitem__):
        takes[index] = min(wanted[index], budget)
        budget -= takes[index]
    return takes


def wanted_tokens(books: Books, most: float) -> list[int]:
    """Tokens that prompts still need: of those that run, and of the first in the queue while there is room for them.
    It does not look further once they are more than `most` together."""
    found = [len(seq.tokens) - seq.num_computed for seq in books.prefills]
    if not books.room_changed:
        return found
    free = books.pool.num_free - books.reserve()
    for seq in books.waiting[: min(len(books.free_rows), _WINDOW)]:
        if seq.in_flight or sum(found) > most:
            break
        hits = books.cached_prefix(seq)
        free -= sum(_blocks_for(books, seq, hits))
        if free < 0:
            break
        found.append(len(seq.tokens) - len(hits) * books.pool.block_size)
    return found


def _blocks_for(books: Books, seq: Sequence, hits: list[int]) -> tuple[int, int]:
    """Free blocks that a sequence takes which found `hits`, and those that it may grow into."""
    total = books.pool.blocks_for(len(seq.tokens))
    return total - len(hits) + books.pool.num_idle(hits[hits.count(NO_BLOCK) :]), books.growth(seq, total)


def fork_deferred(books: Books, draft: Draft, budget: int) -> int:
    """Let deferred choices fork from a sibling whose prompt is computed; returns what is left of the budget."""
    head = books.waiting[0] if books.waiting else None
    for request in list(books.forking):
        if head is not None and head.state is State.PREEMPTED and head.key < request.deferred[0].key:
            break
        parent = request.prompt_holder()
        if parent is None:
            continue
        blocks = books.pool.blocks_for(len(request.prompt))
        need = 1 + books.growth(parent, blocks)  # the copy of the last block, and what each child may grow into
        room = books.pool.num_free - books.reserve()
        while request.deferred and budget and books.free_rows and room >= need:
            books.fork(request.deferred[0], parent, draft)
            budget -= 1
            room -= need
    return budget


def schedule_prompts(books: Books, draft: Draft, budget: int, per_request: int, config: SchedulerConfig) -> None:
    """Write prompt chunks into the draft: running prefills, then admissions, then what is left to the first again."""
    takes: dict[Sequence, int] = {}
    prefills = list(books.prefills)
    wanted = [min(len(seq.tokens) - seq.num_computed, per_request) for seq in prefills]
    contested = len(prefills) > 1 or bool(books.waiting and books.free_rows)
    for seq, take in zip(prefills, share_budget(wanted, budget, contested), strict=True):
        takes[seq] = take
        budget -= take
        books.publish(seq, seq.num_computed + take, draft.fresh)
    lead_left = len(prefills[0].tokens) - prefills[0].num_computed - takes[prefills[0]] if prefills else 0
    if books.waiting and books.free_rows and books.room_changed:
        budget = _admit(books, draft, takes, budget, per_request, lead_left // 2 if lead_left else None, config)
    for seq in list(books.prefills):
        more = min(len(seq.tokens) - seq.num_computed, per_request) - takes[seq]
        takes[seq] += min(more, budget)
        budget -= min(more, budget)
        if takes[seq]:
            _compute_chunk(books, draft, seq, takes[seq])


def _compute_chunk(books: Books, draft: Draft, seq: Sequence, count: int) -> None:
    if seq.wants_prompt_logprobs:
        draft.prompt_logprobs.append((seq.row, seq, seq.num_computed))
    last = seq.num_computed + count == len(seq.tokens)
    draft.compute(seq, count, last)
    draft.prefill_tokens += count
    books.publish(seq, seq.num_computed, draft.fresh)
    if last:
        books.start_decoding(seq)


def _admit(
    books: Books,
    draft: Draft,
    takes: dict[Sequence, int],
    budget: int,
    per_request: int,
    longest: int | None,
    config: SchedulerConfig,
) -> int:
    """Place sequences of the queue while tokens, rows and blocks last; returns what is left of the budget.

    `longest`: most tokens that one may still have to compute, where a long prompt is on its way already.
    """
    pool = books.pool
    reserve = books.reserve()
    passed: list[Sequence] = []
    only_room_lacked = True
    position = 0
    while budget > 0 and books.free_rows and position < min(len(books.waiting), _WINDOW):
        seq = books.waiting[position]
        if seq.in_flight:  # preempted, and its last token is not known yet
            only_room_lacked = False
            break
        hits = books.cached_prefix(seq)
        if not draft.fresh.isdisjoint(hits):  # its prefix is being computed in this step: the next one finds it
            only_room_lacked = False
            position += 1
            continue
        rest = len(seq.tokens) - len(hits) * pool.block_size
        if not config.enable_chunked_prefill and rest > budget:
            only_room_lacked = False
            break
        if budget * _SLIVER <= min(rest, sum(takes.values())):
            # Cut in two, its attention is slower, and the step is full enough: it is the next one's first.
            only_room_lacked = False
            break
        need, growth = _blocks_for(books, seq, hits)
        short_enough = longest is None or rest <= longest
        fits = need + growth + reserve <= pool.num_free  # where nobody runs, whatever was not refused fits
        if any(other.passed_over >= config.patience for other in passed):
            break
        if not (short_enough and fits):
            only_room_lacked &= short_enough
            if seq.state is State.PREEMPTED or seq.passed_over >= config.patience:
                break
            passed.append(seq)
            position += 1
            continue
        books.place(seq, hits, draft)
        reserve += growth
        takes[seq] = min(rest, per_request, budget)
        budget -= takes[seq]
        books.publish(seq, seq.num_computed + takes[seq], draft.fresh)
        for other in passed:
            other.passed_over += 1
    if only_room_lacked and budget > 0 and books.free_rows:
        books.room_changed = False
    return budget
