"""The scheduler's books: who waits, who runs, who holds which row and blocks, and the plan being drawn up.

Moves between states, without deciding when: that is `scheduler.py` (decodes, preemption) and `admission.py` (prompts,
forks). Rows and blocks are given back in one place, `Books.release`, whatever ended or interrupted a sequence.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from kvern_engine.core.block_pool import BlockPool
from kvern_engine.core.lanes import Lane, even_out, whose_turn
from kvern_engine.core.plan import AddedRow
from kvern_engine.core.sequence import Request, Sequence, State
from kvern_engine.core.window import NO_BLOCK, first_needed, usable_prefix

_MAX_LOOKAHEAD = 4  # blocks; beyond it fewer sequences run at once, which costs more than recomputing saves
_CALM_STEPS = 128


def _key(seq: Sequence) -> tuple[int, int, int]:
    return seq.key


@dataclass(slots=True)
class Draft:
    """A StepPlan in the making, and beside each of its rows the sequence in it (`seqs[i]` is in `rows[i]`).

    `fresh` holds blocks that this very step fills: nobody may start behind them before the next plan.
    """

    rows: list[int]
    seqs: list[Sequence]
    starts: list[int]
    counts: list[int]
    samples: list[bool]
    added: list[AddedRow] = field(default_factory=list)
    block_edits: list[tuple[int, int, list[int]]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    fresh: set[int] = field(default_factory=set)
    decode_rows: int = 0
    prefill_tokens: int = 0
    admitted: list[Sequence] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, Sequence, int]] = field(default_factory=list)  # row, sequence, first position

    def compute(self, seq: Sequence, count: int, sample: bool) -> None:
        self.rows.append(seq.row)
        self.seqs.append(seq)
        self.starts.append(seq.num_computed)
        self.counts.append(count)
        self.samples.append(sample)
        seq.num_computed += count


class Books:
    """All sequences of an engine by state. Lists handed to a plan are replaced, never changed in place.

    waiting: WAITING and PREEMPTED, in the order of the queue. prefills: PREFILL, in the same order. lanes: DECODE, one
    lane a stage of the pipeline (`refresh_decodes` first); `lane` is that of the step being planned. draining: DRAINING
    ones that still hold a row. forking: requests with DEFERRED choices. `window`: how many tokens a token sees, where
    all layers of the model have that.
    """

    def __init__(self, pool: BlockPool, max_num_seqs: int, pipeline: int = 1, window: int | None = None) -> None:
        self.pool = pool
        self.window = window
        self.free_rows = list(range(max_num_seqs - 1, -1, -1))
        self.removed_rows: list[int] = []
        self._newcomers: dict[int, AddedRow] = {}  # by row
        self.waiting: list[Sequence] = []
        self.prefills: list[Sequence] = []
        self.draining: list[Sequence] = []
        self.forking: list[Request] = []
        self.lanes = [Lane() for _ in range(pipeline)]
        self.lane = self.lanes[0]
        self.num_rows = max_num_seqs
        self.room_changed = True  # blocks were freed or prefixes published since admission last found no room
        self.preemptions = 0
        self.lookahead = 1  # blocks that each running sequence should find free when another is let in
        self._preemptions_seen = 0
        self._calm_steps = 0

    # -- the queue ---------------------------------------------------------------------------------------------------

    def enqueue(self, seq: Sequence) -> None:
        insort(self.waiting, seq, key=_key)
        self.room_changed = True

    def promote_deferred(self, request: Request) -> None:
        """Nobody is left to fork from: the first deferred choice computes (or finds) the prompt by itself."""
        active = any(choice.state not in (State.DEFERRED, State.FINISHED) for choice in request.choices)
        if request.deferred and not active:
            seq = request.deferred[0]
            self._leave_deferred(seq)
            seq.state = State.WAITING
            self.enqueue(seq)

    def defer(self, seq: Sequence) -> None:
        seq.state = State.DEFERRED
        if not seq.request.deferred:
            self.forking.append(seq.request)
        seq.request.deferred.append(seq)

    def _leave_deferred(self, seq: Sequence) -> None:
        seq.request.deferred.remove(seq)
        if not seq.request.deferred:
            self.forking.remove(seq.request)

    # -- into the batch ----------------------------------------------------------------------------------------------

    def place(self, seq: Sequence, hits: list[int], draft: Draft) -> None:
        """Give a waiting sequence a row and blocks for all its known tokens, the first of them found in the cache."""
        self.waiting.remove(seq)
        seq.own_tokens()
        pool = self.pool
        seq.first_block = hits.count(NO_BLOCK)
        pool.share(hits[seq.first_block :])  # before allocating, which would reuse them
        seq.blocks = hits + pool.allocate(pool.blocks_for(len(seq.tokens)) - len(hits))
        seq.num_published = len(hits)
        seq.num_computed = seq.num_hits = len(hits) * pool.block_size
        seq.state = State.PREFILL
        insort(self.prefills, seq, key=_key)
        self._add_row(seq, draft)
        draft.admitted.append(seq)

    def fork(self, child: Sequence, parent: Sequence, draft: Draft) -> None:
        """Share the parent's prompt with a deferred choice, which computes only the last prompt token again.

        The block of that token is written by both, so the child gets a copy of it.
        """
        self._leave_deferred(child)
        child.own_tokens()
        pool = self.pool
        last, offset = divmod(child.num_prompt - 1, pool.block_size)
        child.blocks, child.first_block = parent.blocks[: last + 1], parent.first_block
        pool.share(child.blocks[child.first_block :])
        child.blocks[last] = pool.make_writable(child.blocks[last])
        if offset:
            draft.copies.append((parent.blocks[last], child.blocks[last]))
        child.digests = list(parent.block_digests(last, pool.block_size))
        child.num_published = last
        child.num_computed = child.num_prompt - 1
        self._add_row(child, draft)
        draft.compute(child, 1, True)
        draft.decode_rows += 1
        self.start_decoding(child)

    def _add_row(self, seq: Sequence, draft: Draft) -> None:
        seq.row = self.free_rows.pop()
        draft.added.append(
            AddedRow(
                seq.row, seq.request_id, list(seq.tokens), seq.num_prompt, list(seq.blocks), seq.current_sampling()
            )
        )

    def take_over(self, seq: Sequence, blocks: list[int], computed: int) -> None:
        """A sequence that another scheduler had let run goes on with these blocks, which hold its first `computed`
        tokens. `newcomers` tells the worker of it."""
        seq.blocks, seq.num_computed = blocks, computed
        seq.first_block = next((i for i, block in enumerate(blocks) if block != NO_BLOCK), len(blocks))
        seq.row = self.free_rows.pop()
        sampling = seq.current_sampling()
        self._newcomers[seq.row] = AddedRow(
            seq.row, seq.request_id, list(seq.tokens), seq.num_prompt, list(blocks), sampling
        )
        self.publish(seq, min(computed, len(seq.tokens)))
        if computed < len(seq.tokens) - 1 or not seq.tokens[seq.num_prompt :]:
            seq.state = State.PREFILL
            insort(self.prefills, seq, key=_key)
        else:
            self.start_decoding(seq)

    def newcomers(self, rows: list[int]) -> list[AddedRow]:
        """Those of `rows` that were taken over and that the worker has not been told of; it is now."""
        told = [row for row in rows if row in self._newcomers] if self._newcomers else []
        return [self._newcomers.pop(row) for row in told]

    def start_decoding(self, seq: Sequence) -> None:
        """Its last known token is being computed and the next one sampled: from the next step on it decodes."""
        if seq.state is State.PREFILL:
            self.prefills.remove(seq)
        seq.set_limit(self.pool.block_size)
        seq.alarm = 0  # the first token is always looked at
        seq.state = State.DECODE
        self.lane.join(seq)

    def drain(self, seq: Sequence) -> None:
        """Nothing is left to schedule for a decoding sequence: it waits for its last token."""
        seq.state = State.DRAINING
        self.draining.append(seq)
        self._leave_lane(seq)

    def _leave_lane(self, seq: Sequence) -> None:
        if seq.lane is not None:
            seq.lane.leave(seq)
            seq.lane = None

    @property
    def decodes(self) -> list[Sequence]:
        """Those of all lanes."""
        if len(self.lanes) == 1:
            return self.lane.decodes
        return [seq for lane in self.lanes for seq in lane.decodes]

    def refresh_decodes(self) -> None:
        """Make the lanes' lists current. New lists: plans in flight keep the old ones."""
        for lane in self.lanes:
            lane.refresh()

    def begin_step(self, step: int, oldest_in_flight: int) -> Lane:
        """The lane that decodes in plan `step`, up to date and of its share of the sequences."""
        self.refresh_decodes()
        if len(self.lanes) > 1:
            self.lane = whose_turn(self.lanes, step, oldest_in_flight)
            even_out(self.lane, self.lanes)
        return self.lane

    # -- out of the batch --------------------------------------------------------------------------------------------

    def release(self, seq: Sequence, to: State) -> None:
        """The one place where a sequence gives back its row, its blocks and its place in the lists. Idempotent."""
        state, seq.state = seq.state, to
        seq.alarm = 0
        if state in (State.WAITING, State.PREEMPTED):
            at = bisect_left(self.waiting, seq.key, key=_key)
            if at < len(self.waiting) and self.waiting[at] is seq:
                del self.waiting[at]
        elif state is State.PREFILL:
            self.prefills.remove(seq)
        elif state is State.DECODE:
            self._leave_lane(seq)
        elif state is State.DRAINING and seq in self.draining:
            self.draining.remove(seq)
        elif state is State.DEFERRED:
            self._leave_deferred(seq)
        if seq.row >= 0:
            if self._newcomers.pop(seq.row, None) is None:
                self.removed_rows.append(seq.row)
            self.free_rows.append(seq.row)
            seq.row = -1
        if seq.blocks:
            self.pool.release(seq.blocks[seq.first_block :])
            seq.blocks, seq.first_block = [], 0
        self.room_changed = True

    def preempt(self, seq: Sequence) -> None:
        """Take back what a running sequence holds; it will compute its tokens again (or find them in the cache)."""
        seq.in_flight = seq.num_computed + 1 - len(seq.tokens) if seq.state is State.DECODE else 0
        seq.lost += seq.num_computed
        self.release(seq, State.PREEMPTED)
        seq.num_computed = 0
        seq.num_published = 0
        self.enqueue(seq)
        self.preemptions += 1

    def drop_behind_window(self, seq: Sequence) -> None:
        """Give back the blocks that neither the next token to be planned nor any after it sees. Those that choices
        which have yet to fork from it will see are kept."""
        assert self.window is not None
        position = min(seq.num_computed, seq.num_prompt - 1) if seq.request.deferred else seq.num_computed
        first = min(first_needed(position, self.window, self.pool.block_size), len(seq.blocks))
        if first > seq.first_block:
            self.pool.release(seq.blocks[seq.first_block : first])
            seq.blocks[seq.first_block : first] = [NO_BLOCK] * (first - seq.first_block)
            seq.first_block = first
            self.room_changed = True

    # -- questions ---------------------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return self.num_rows - len(self.free_rows)

    def growth(self, seq: Sequence, blocks_held: int) -> int:
        """Blocks to keep free for a sequence that holds `blocks_held`: what it may still need, at most `lookahead`."""
        return min(self.pool.blocks_for(seq.stop_len - 1) - blocks_held, self.lookahead)

    def reserve(self) -> int:
        """Blocks to keep free for the running sequences to grow into."""
        joining = [seq for lane in self.lanes for seq in lane.joining]
        running = self.decodes + joining + self.prefills
        return sum(self.growth(seq, len(seq.blocks)) for seq in running if seq.row >= 0)

    def adapt_lookahead(self) -> None:
        """Once a step: preemptions since the last one double the lookahead, a calm stretch halves it."""
        if self.preemptions > self._preemptions_seen:
            self._preemptions_seen = self.preemptions
            self.lookahead = min(2 * self.lookahead, _MAX_LOOKAHEAD)
            self._calm_steps = 0
            return
        self._calm_steps += 1
        if self._calm_steps == _CALM_STEPS:
            self._calm_steps = 0
            if self.lookahead > 1:
                self.lookahead //= 2
                self.room_changed = True

    def cached_prefix(self, seq: Sequence) -> list[int]:
        """Blocks of the longest cached prefix, which leaves at least one token to compute (for its logits). With a
        window the first ones may be NO_BLOCK."""
        if not self.pool.enable_prefix_caching or not seq.reads_prefix_cache:
            return []
        size = self.pool.block_size
        if self.window is None:
            return self.pool.lookup(seq.block_digests((len(seq.tokens) - 1) // size, size))
        # Choices that have yet to fork need the end of the prompt, which a prefix beyond it leaves behind.
        tokens = seq.num_prompt if seq.request.deferred else len(seq.tokens)
        return usable_prefix(self.pool.known(seq.block_digests((tokens - 1) // size, size)), self.window, size)

    def publish(self, seq: Sequence, num_tokens: int, fresh: set[int] | None = None) -> None:
        """Let the full blocks among the first `num_tokens` (known, computed) tokens be found."""
        pool = self.pool
        full = num_tokens // pool.block_size
        if not pool.enable_prefix_caching or full <= seq.num_published:
            return
        digests = seq.block_digests(full, pool.block_size)
        for index in range(seq.num_published, full):
            block = seq.blocks[index]  # behind the window it may be gone before its last token is known
            if block != NO_BLOCK and pool.publish(block, digests[index]) and fresh is not None:
                fresh.add(block)
                self.room_changed = True  # somebody in the queue may need fewer blocks now
        seq.num_published = full
