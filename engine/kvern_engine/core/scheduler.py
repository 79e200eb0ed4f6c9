"""The scheduler: which sequences compute how many tokens in the next step, and in which blocks.

Pure policy: plain values in, StepPlans and TokenOutputs out; no torch, no socket, no clock. The batch is re-formed for
every step (continuous batching, Orca, OSDI 2022), prompts are computed in chunks beside the decodes (Sarathi-Serve,
OSDI 2024), memory is paged (PagedAttention, SOSP 2023).

Steps overlap: step N+1 is scheduled while N runs, before its tokens are known. Lengths are known ahead, so nothing is
scheduled past them; an EOS is seen late, and the one token computed behind it is dropped. Workers apply plans in order,
so a block or row freed now may be given away in the next plan although a plan in flight still writes to it. What comes
back is matched by step: each plan in flight remembers the sequences of its rows. Where the model is a pipeline of p
stages, p such plans are on their way at once, each for another part of the sequences (`lanes.py`).

A step: decodes first (each grows by a block where one is due, if need be by preempting), then forks, then prompts
(`admission.py`). Only the first part preempts, before any row of the step is written down.
"""

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from kvern_engine.core.admission import fork_deferred, schedule_prompts, wanted_tokens
from kvern_engine.core.block_pool import BlockPool
from kvern_engine.core.governor import ChunkGovernor
from kvern_engine.core.handed import Handover, Share
from kvern_engine.core.handover import hand_over, restore_blocks, restore_choice
from kvern_engine.core.lanes import Lane
from kvern_engine.core.limits import SchedulerConfig
from kvern_engine.core.plan import StepPlan, StepResult, TokenLogprobs
from kvern_engine.core.sequence import Request, Sequence, State, choice_seed
from kvern_engine.core.state import Books, Draft
from kvern_engine.ipc import AddRequest, EngineStats, TokenOutput

OutputsByClient = dict[int, list[TokenOutput]]

_NO_CROWD = 8  # requests that wait with rows to go to: fewer do not make running streams wait for them
_ITERATIONS_KEPT = 8192  # step sizes kept for the next report


@dataclass(slots=True)
class _InFlight:
    """A submitted plan: whose rows they were, and what the governor wants to know once it is done."""

    step: int
    rows: list[int]
    seqs: list[Sequence]
    decode_rows: int
    prefill_tokens: int
    prompt_logprobs: list[tuple[int, Sequence, int]]


class Scheduler:
    """Schedules the requests of one engine over `pool`.

    `eos_token_ids` and its own end every request that does not ignore them. Call `schedule` for the next plan, submit
    it, and hand its result to `update`, in the order of the plans; any number of plans may be in flight. `add`,
    `abort`, `update` and `fail_all` return outputs by client. Each choice gets exactly one output with a finish_reason.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        eos_token_ids: Collection[int] = (),
        governor: ChunkGovernor | None = None,
    ) -> None:
        self.config = config
        self.pool = pool
        self.governor = governor or ChunkGovernor(
            config.itl_factor, config.max_num_batched_tokens, pipeline=config.pipeline
        )
        self.max_model_len = min(config.max_model_len, pool.num_blocks * pool.block_size)
        self._eos = frozenset(eos_token_ids)
        self._books = Books(pool, config.max_num_seqs, config.pipeline, config.sliding_window)
        self._requests: dict[str, Request] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._ones: list[int] = []
        self._trues: list[bool] = []
        self._arrivals = 0
        self._step = 0
        self._step_tokens = 0
        self._prefix_queries = 0
        self._prefix_hits = 0
        self._iterations: deque[int] = deque(maxlen=_ITERATIONS_KEPT)

    # -- requests ----------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Some request has not ended."""
        return bool(self._requests)

    @property
    def num_in_flight(self) -> int:
        """Plans whose results have not been handed to `update`."""
        return len(self._in_flight)

    def add(self, message: AddRequest) -> OutputsByClient:
        """Queue a request; one that can never run is refused at once with error outputs.

        Raises ValueError where a request of this id is running (ids are the callers' to keep unique).
        """
        if message.request_id in self._requests:
            raise ValueError(f"request_id must be unique, {message.request_id!r} is running already")
        n = message.params.n
        problem = self._refusal(len(message.prompt_token_ids))
        if problem is not None:
            return {
                message.client: [
                    TokenOutput(message.request_id, index, [], finish_reason="error", error=problem)
                    for index in range(n)
                ]
            }
        for seq in self._enter(message).choices:
            if seq.index == 0:
                self._books.enqueue(seq)
            else:
                self._books.defer(seq)
        return {}

    def _enter(self, message: AddRequest) -> Request:
        """The request with its choices, none of which is anywhere yet."""
        priority = message.priority if self.config.policy == "priority" else 0
        request = Request(message, (priority, self._arrivals), self._eos)
        self._arrivals += 1
        for index in range(message.params.n):
            seed = choice_seed(message.params, request.id, self.config.seed, index)
            request.choices.append(Sequence(request, index, self.max_model_len, seed))
        request.live = message.params.n
        self._requests[request.id] = request
        return request

    def hand_over(self, engine: int) -> Handover:
        """Everything that this scheduler holds, for others to go on with; it must not be used afterwards. Raises
        RuntimeError while a plan is in flight."""
        if self._in_flight:
            raise RuntimeError(f"{len(self._in_flight)} plans are in flight: their tokens are not known")
        return hand_over(engine, self._books, self._requests, self.max_model_len)

    def take_over(self, share: Share) -> None:
        """Go on with what others have handed over; before anything else is added."""
        restore_blocks(self.pool, share)
        for held in share.requests:
            request = self._enter(held.message)
            request.scheduled_at = held.scheduled_at
            left = {choice.index: choice for choice in held.choices}
            request.live = len(left)
            for seq in request.choices:
                if seq.index in left:
                    restore_choice(self._books, seq, left[seq.index])
                else:
                    seq.state = State.FINISHED
            self._books.promote_deferred(request)

    def _refusal(self, prompt_len: int) -> str | None:
        if prompt_len == 0:
            return "the prompt has no tokens; give at least one"
        if prompt_len + 1 <= self.max_model_len:
            return None
        pool = self.pool
        return (
            f"the prompt has {prompt_len} tokens and needs room for one more, but a request may have at most "
            f"{self.max_model_len} (max_model_len {self.config.max_model_len}, KV cache {pool.num_blocks} blocks of "
            f"{pool.block_size} tokens): shorten the prompt to {self.max_model_len - 1} tokens"
        )

    def abort(self, request_ids: Iterable[str], choices: Iterable[tuple[str, int]] = ()) -> OutputsByClient:
        """End these requests, and these choices (request id, index) of others: open choices get finish_reason "abort".

        Unknown requests and choices, and those that have ended, are ignored.
        """
        outputs: OutputsByClient = defaultdict(list)
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._end_request(request, "abort", None, outputs)
        for request_id, index in choices:
            request = self._requests.get(request_id)
            if request is not None and 0 <= index < len(request.choices):
                self._end_choice(request.choices[index], "abort", None, outputs)
        return outputs

    def fail_all(self, reason: str) -> OutputsByClient:
        """The worker is gone: every open choice ends with finish_reason "error", and nothing is in flight any more."""
        outputs: OutputsByClient = defaultdict(list)
        for request in list(self._requests.values()):
            self._end_request(request, "error", reason, outputs)
        self._in_flight.clear()
        return outputs

    def _end_request(self, request: Request, reason: str, error: str | None, outputs: OutputsByClient) -> None:
        for seq in reversed(request.choices):  # deferred ones first, so that none is promoted on the way
            self._end_choice(seq, reason, error, outputs)

    def _end_choice(self, seq: Sequence, reason: str, error: str | None, outputs: OutputsByClient) -> None:
        if seq.state is not State.FINISHED:
            self._end(seq)
            output = TokenOutput(seq.request_id, seq.index, [], finish_reason=reason, error=error)
            outputs.setdefault(seq.client, []).append(output)

    def _end(self, seq: Sequence) -> None:
        """One choice has ended; with the last one its request."""
        self._books.release(seq, State.FINISHED)
        request = seq.request
        request.live -= 1
        if request.live == 0:
            del self._requests[request.id]
        else:
            self._books.promote_deferred(request)

    # -- one step ----------------------------------------------------------------------------------------------------

    def schedule(self, now: float = 0.0) -> StepPlan | None:
        """The next plan, or None where nothing can be computed before another result arrives. `now` in seconds."""
        books = self._books
        lane = books.begin_step(self._step, self._in_flight[0].step if self._in_flight else self._step)
        books.adapt_lookahead()
        if books.window is not None:
            for seq in books.prefills:
                books.drop_behind_window(seq)
        edits = self._grow(lane) if lane.due else []
        draft = self._draft_decodes(lane)
        draft.block_edits = edits
        if books.waiting or books.prefills or books.forking:
            self._schedule_prompts(draft, now)
        if not draft.rows:
            return None
        self.governor.planned(draft.decode_rows, draft.prefill_tokens)
        draft.added = books.newcomers(draft.rows) + draft.added
        plan = StepPlan(
            self._step,
            books.removed_rows,
            draft.added,
            draft.block_edits,
            draft.copies,
            draft.rows,
            draft.starts,
            draft.counts,
            draft.samples,
        )
        books.removed_rows = []
        lane.last_step = self._step
        self._in_flight.append(
            _InFlight(
                self._step, draft.rows, draft.seqs, draft.decode_rows, draft.prefill_tokens, draft.prompt_logprobs
            )
        )
        tokens = draft.decode_rows + draft.prefill_tokens
        self._step += 1
        self._step_tokens += tokens
        self._iterations.append(tokens)
        return plan

    def _draft_decodes(self, lane: Lane) -> Draft:
        """A draft in which each sequence of the lane computes one token. Shares lists with other plans: see below."""
        seqs, due = lane.decodes, lane.due
        starts = []
        for seq in seqs:
            start = seq.num_computed
            starts.append(start)
            seq.num_computed = start = start + 1
            if start == seq.limit:
                due.append(seq)
        count = len(seqs)
        if len(self._ones) != count:
            self._ones, self._trues = [1] * count, [True] * count
        return Draft(lane.rows, seqs, starts, self._ones, self._trues, decode_rows=count)

    def _schedule_prompts(self, draft: Draft, now: float) -> None:
        # From here on rows are appended; those of the decodes belong to other plans as well.
        draft.rows, draft.seqs = list(draft.rows), list(draft.seqs)
        draft.counts, draft.samples = list(draft.counts), list(draft.samples)
        books, config = self._books, self.config
        budget = config.max_num_batched_tokens - draft.decode_rows
        if books.forking:
            budget = fork_deferred(books, draft, budget)
        per_request = budget
        if draft.decode_rows and config.enable_chunked_prefill:
            if config.long_prefill_token_threshold is not None:
                per_request = min(budget, config.long_prefill_token_threshold)
            else:
                idle = max(0, min(len(books.waiting), len(books.free_rows)) - _NO_CROWD) / config.max_num_seqs
                most = 0.0 if idle else self.governor.long_tokens(draft.decode_rows)
                wanted = wanted_tokens(books, most) if most else []
                budget = per_request = min(budget, self.governor.cap(draft.decode_rows, idle, wanted, most))
        if budget > 0:
            schedule_prompts(books, draft, budget, per_request, config)
        for row in draft.added:
            request = self._requests[row.request_id]
            if request.scheduled_at is None:
                request.scheduled_at = now
        for seq in draft.admitted:
            if seq.num_cached < 0:
                self._count_prefix(seq)

    def _count_prefix(self, seq: Sequence) -> None:
        """A first admission (not a resumption): how much of the prompt was found."""
        seq.num_cached = seq.num_hits
        if self.pool.enable_prefix_caching and seq.reads_prefix_cache:
            self._prefix_queries += seq.num_prompt
            self._prefix_hits += seq.num_hits

    # -- memory ------------------------------------------------------------------------------------------------------

    def _grow(self, lane: Lane) -> list[tuple[int, int, list[int]]]:
        """Sequences that are due have reached their end or need a block; returns the plan's block edits."""
        books, pool = self._books, self.pool
        growing = []
        due, lane.due = lane.due, []
        for seq in due:
            if seq.state is not State.DECODE:
                continue
            if seq.num_computed == seq.stop_len - 1:
                books.drain(seq)
            else:
                growing.append(seq)
        if books.window is not None:
            for seq in growing:
                books.drop_behind_window(seq)
        if pool.num_free >= len(growing):
            edits = []
            for seq, block in zip(growing, pool.allocate(len(growing)), strict=True):
                edits.append((seq.row, len(seq.blocks), [block]))
                seq.blocks.append(block)
                seq.set_limit(pool.block_size)
            books.refresh_decodes()
            return edits
        for seq in sorted(growing, key=lambda seq: seq.key):
            if pool.num_free == 0:
                self._make_room(seq)
            if seq.state is State.DECODE:
                seq.blocks += pool.allocate(1)
                seq.set_limit(pool.block_size)
        books.refresh_decodes()
        # Only now: one that grew may have been preempted for another, and its row may be another's in this plan.
        return [(s.row, len(s.blocks) - 1, s.blocks[-1:]) for s in growing if s.state is State.DECODE]

    def _make_room(self, seq: Sequence) -> None:
        """Free at least one block for `seq`, or preempt `seq` itself where it is the one that loses least."""
        books = self._books
        while self.pool.num_free == 0 and seq.state is State.DECODE:
            if books.draining:  # finished but for the arrival of their last tokens: nothing is lost
                books.release(books.draining[0], State.DRAINING)
            else:
                books.preempt(self._victim(seq))

    def _victim(self, seq: Sequence) -> Sequence:
        """The running sequence that loses the least computed work, among those of the lowest priority.

        What is shared with others is not lost, and frees nothing. What a sequence has lost before counts as well, so
        that the same one is not chosen again and again. `seq`, which needs the block, is a candidate like any other.
        """
        refs, size = self.pool.ref_counts, self.pool.block_size

        def cost(candidate: Sequence) -> tuple[int, int, int]:
            held = candidate.blocks[candidate.first_block :]
            shared = bisect_left(held, True, key=lambda block: refs[block] == 1)  # a prefix is shared
            work = max(candidate.num_computed - shared * size, 0) + candidate.lost
            return -candidate.key[0], work, -candidate.key[1]

        books = self._books
        running = [s for s in books.decodes if s.state is State.DECODE] + books.prefills
        return min((s for s in running if s is seq or refs[s.blocks[-1]] == 1), key=cost)

    # -- results -----------------------------------------------------------------------------------------------------

    def update(self, result: StepResult) -> OutputsByClient:
        """Take in the result of the oldest plan in flight. Raises RuntimeError where it is another step's."""
        if not self._in_flight or self._in_flight[0].step != result.step:
            expected = self._in_flight[0].step if self._in_flight else "none"
            raise RuntimeError(f"result of step {result.step} where that of step {expected} was due")
        record = self._in_flight.popleft()
        self.governor.observe(record.decode_rows, record.prefill_tokens, result.seconds)
        for row, seq, start in record.prompt_logprobs:
            seq.add_prompt_logprobs(start, result.prompt_logprobs.get(row, []))
        outputs: OutputsByClient = defaultdict(list)
        if result.logprobs or result.rows != record.rows:
            by_row = dict(zip(record.rows, record.seqs, strict=True))
            for row, tokens in zip(result.rows, result.tokens, strict=True):
                if tokens:
                    self._append(by_row[row], tokens, result.logprobs.get(row), outputs)
            return outputs
        client: int | None = None
        for seq, sampled in zip(record.seqs, result.tokens, strict=True):
            known = seq.tokens
            if len(known) >= seq.alarm or sampled[0] in seq.stops:
                if sampled:
                    self._append(seq, sampled, None, outputs)
                continue
            known.append(sampled[0])
            if seq.client != client:
                client = seq.client
                deliver = outputs[client].append
            deliver(TokenOutput(seq.request_id, seq.index, sampled))
        return outputs

    def _append(
        self, seq: Sequence, sampled: list[int], logprobs: list[TokenLogprobs] | None, outputs: OutputsByClient
    ) -> None:
        """One sampled token of a sequence, with all that may follow from it."""
        state = seq.state
        if state is State.FINISHED:
            return  # computed behind an EOS or after an abort
        (token,) = sampled
        seq.tokens.append(token)
        if state is State.PREEMPTED:
            seq.in_flight -= 1
        elif seq.blocks:
            self._books.publish(seq, len(seq.tokens) - 1)
            seq.set_alarm(self.pool.block_size)
        reason, stop_reason = seq.stop(token)
        if reason is None and logprobs is None and not seq.first_output:
            outputs[seq.client].append(TokenOutput(seq.request_id, seq.index, sampled))
            return
        first, seq.first_output = seq.first_output, False
        leads = first and seq.index == 0
        outputs[seq.client].append(
            TokenOutput(
                seq.request_id,
                seq.index,
                sampled,
                finish_reason=reason,
                stop_reason=stop_reason,
                logprobs=logprobs,
                prompt_logprobs=seq.prompt_logprobs if leads else None,
                num_cached_tokens=seq.num_cached if leads else None,
                scheduled=seq.request.scheduled_at if leads else None,
            )
        )
        if reason is not None:
            self._end(seq)

    # -- reports -----------------------------------------------------------------------------------------------------

    def stats(self, engine: int) -> EngineStats:
        """The present state; `iteration_tokens` are those since the last call. The loop adds times and heartbeat."""
        books, pool = self._books, self.pool.stats()
        books.refresh_decodes()
        running = books.decodes + books.prefills + books.draining
        wasted = 0
        for seq in running:
            held = max(seq.num_computed, len(seq.tokens) if seq.state is State.PREFILL else 0)
            wasted += max(len(seq.blocks) * self.pool.block_size - held, 0)
        deferred = sum(len(request.deferred) for request in books.forking)
        iterations = list(self._iterations)
        self._iterations.clear()
        return EngineStats(
            engine=engine,
            num_running=books.num_running,
            num_waiting=len(books.waiting) + deferred,
            num_waiting_deferred=deferred,
            kv_cache_usage=pool.used / pool.total,
            blocks_total=pool.total,
            blocks_free=pool.free,
            blocks_cached=pool.cached,
            kv_waste=wasted / (pool.used * self.pool.block_size) if pool.used else 0.0,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            preemptions=books.preemptions,
            steps=self._step,
            step_tokens=self._step_tokens,
            iteration_tokens=iterations,
        )
