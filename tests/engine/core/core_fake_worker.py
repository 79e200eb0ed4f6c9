"""A worker for tests that models what is in the KV blocks, and an oracle that knows what every choice must get.

The "K/V" of a position is a digest of all tokens up to it, so a block read in the wrong place, too early, or after
somebody else wrote to it changes what is sampled. Breaking a rule of `core/plan.py` raises AssertionError at once.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

from kvern_engine.core.plan import AddedRow, RowSampling, StepPlan, StepResult, TokenLogprobs
from kvern_engine.ipc import AddRequest

MASK = (1 << 61) - 1


def chain(digest: int, token: int) -> int:
    """The K/V of `token` behind a context with digest `digest`."""
    return (digest * 1_000_003 + token + 1) & MASK


def sample(digest: int, sampling: RowSampling, generated: int, vocab: int) -> int:
    """The next token after a context: a function of the context, the seed and what is suppressed."""
    token = chain(digest, sampling.seed) * 2_654_435_761 % (1 << 61) // 977 % vocab
    if generated < sampling.min_tokens:
        while token in sampling.suppress:
            token = (token + 1) % vocab
    return token


def context(tokens: list[int]) -> list[int]:
    """Digest after each token."""
    out, digest = [], 7
    for token in tokens:
        digest = chain(digest, token)
        out.append(digest)
    return out


@dataclass
class _Row:
    tokens: list[int]
    chain: list[int]  # digest after each position whose K/V this row has seen
    prompt: int
    blocks: list[int]
    sampling: RowSampling
    fresh: bool = True  # not computed yet: its first start says what is in its blocks already
    sampled_at: int = -1  # the last step that sampled a token for it


@dataclass
class FakeWorker:
    """Applies plans at once; results are collected later (`WorkerClient`). `rows` is the state as of the last plan."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab: int = 8
    seconds: float = 0.01
    idle: float = 0.0
    rows: dict[int, _Row] = field(default_factory=dict)
    results: deque[StepResult] = field(default_factory=deque)
    next_step: int = 0
    alive: bool = True
    plans: list[StepPlan] = field(default_factory=list)
    keep_plans: bool = False
    check_reads: bool = True
    pipeline: int = 1  # stages: see `_check_batch`
    window: int | None = None  # how many tokens a token sees; blocks behind that may be anybody's

    def __post_init__(self) -> None:
        self.kv = [[0] * self.block_size for _ in range(self.num_blocks)]

    def submit(self, plan: StepPlan) -> None:
        self.results.append(self.execute(plan))

    def collect(self, timeout: float | None = None) -> StepResult | None:
        return self.results.popleft() if self.results else None

    def close(self) -> None:
        self.alive = False

    def execute(self, plan: StepPlan) -> StepResult:
        assert plan.step == self.next_step, "plans come in order"
        self.next_step += 1
        if self.keep_plans:
            self.plans.append(plan)
        self._apply_deltas(plan)
        self._check_batch(plan)
        sampled: list[list[int]] = []
        logprobs: dict[int, list[TokenLogprobs]] = {}
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        computed = []
        # Reads are checked against the blocks as they were before this step: see AddedRow.
        for index, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            row = self.rows[index]
            self._check_read(row, start)
            computed.append(row)
            if row.sampling.prompt_logprobs is not None:
                prompt_logprobs[index] = [
                    TokenLogprobs(row.tokens[p], -float(p), 1, [], [])
                    for p in range(start + 1, min(start + count + 1, row.prompt))
                ]
        for row, start, count, samples in zip(computed, plan.starts, plan.counts, plan.samples, strict=True):
            self._write(row, start, count)
            if not samples:
                assert start + count < len(row.tokens), "a row with nothing left to compute must sample"
                sampled.append([])
                continue
            assert start + count == len(row.tokens), "a token is sampled behind the last known one"
            token = sample(row.chain[-1], row.sampling, len(row.tokens) - row.prompt, self.vocab)
            row.tokens.append(token)
            row.sampled_at = plan.step
            sampled.append([token])
        for index, row, tokens in zip(plan.rows, computed, sampled, strict=True):
            if row.sampling.logprobs is not None and tokens:
                logprobs[index] = [TokenLogprobs(tokens[0], -1.0, 1, [], [])]
        return StepResult(plan.step, plan.rows, sampled, self.seconds, logprobs, prompt_logprobs, self.idle)

    def _apply_deltas(self, plan: StepPlan) -> None:
        for index in plan.removed:
            del self.rows[index]  # KeyError: removed twice
        for added in plan.added:
            self._add(added)
        for index, first, blocks in plan.block_edits:
            table = self.rows[index].blocks
            assert first <= len(table), "a block table has no holes"
            table[first : first + len(blocks)] = blocks
        for source, target in plan.copies:
            self.kv[target] = list(self.kv[source])

    def _add(self, added: AddedRow) -> None:
        assert added.row not in self.rows, f"row {added.row} is in use"
        assert 0 <= added.row < self.max_num_seqs
        held = [block for block in added.blocks if block >= 0]
        assert len(set(held)) == len(held)
        assert len(held) == len(added.blocks) or (self.window and added.blocks[-len(held) :] == held)
        self.rows[added.row] = _Row(
            list(added.token_ids), [], added.num_prompt_tokens, list(added.blocks), added.sampling
        )

    def _check_batch(self, plan: StepPlan) -> None:
        assert plan.rows, "an empty step"
        assert len(set(plan.rows)) == len(plan.rows), "a row computes once a step"
        assert 0 < plan.num_tokens <= self.max_num_batched_tokens
        assert min(plan.counts) > 0
        assert {added.row for added in plan.added} <= set(plan.rows), "an added row computes at once"
        starts = dict(zip(plan.rows, plan.starts, strict=True))
        holders = Counter(
            block
            for index, row in self.rows.items()
            for block in row.blocks[self._first_seen(starts.get(index, len(row.chain))) :]
        )
        for index, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            row = self.rows[index]
            # The first stage has its token: as many steps as there are stages lie between, or the core has seen it.
            known = self.next_step - 1 - len(self.results)
            assert row.sampled_at < known or row.sampled_at <= plan.step - self.pipeline, "the token is not there yet"
            # Nothing but the block of the next token may be held in advance: waste is below one block.
            assert len(row.blocks) * self.block_size - max(start + count, len(row.tokens)) < self.block_size
            for position in range(start // self.block_size, (start + count - 1) // self.block_size + 1):
                assert holders[row.blocks[position]] == 1, "a block that is written has one holder"

    def _first_seen(self, start: int) -> int:
        """The first block that the tokens from `start` on see."""
        return 0 if self.window is None else max(0, start - self.window + 1) // self.block_size

    def _check_read(self, row: _Row, start: int) -> None:
        if row.fresh:
            row.chain = context(row.tokens[:start])
            row.fresh = False
        assert len(row.chain) == start, "positions are computed in order, none twice"
        size = self.block_size
        for index in range(self._first_seen(start), -(-start // size) if self.check_reads else 0):
            expected = row.chain[index * size : (index + 1) * size]
            assert self.kv[row.blocks[index]][: len(expected)] == expected, "wrong K/V in a block"

    def _write(self, row: _Row, start: int, count: int) -> None:
        digest = row.chain[-1] if row.chain else 7
        for position in range(start, start + count):
            digest = chain(digest, row.tokens[position])
            row.chain.append(digest)
            self.kv[row.blocks[position // self.block_size]][position % self.block_size] = digest


def oracle(
    request: AddRequest, seed: int, max_model_len: int, eos: frozenset[int], vocab: int = 8
) -> tuple[list[int], str, int | None]:
    """(tokens, finish_reason, stop_reason) of one choice with this seed, computed without any batching."""
    params = request.params
    ends = (frozenset() if params.ignore_eos else eos) | set(params.stop_token_ids)
    sampling = RowSampling(seed=seed, min_tokens=params.min_tokens, suppress=sorted(ends) if params.min_tokens else [])
    limit = max_model_len - len(request.prompt_token_ids)
    limit = limit if params.max_tokens is None else min(limit, params.max_tokens)
    digest, out = context(request.prompt_token_ids)[-1], []
    while True:
        token = sample(digest, sampling, len(out), vocab)
        out.append(token)
        digest = chain(digest, token)
        if token in ends and len(out) >= params.min_tokens:
            explicit = token in params.stop_token_ids and (params.ignore_eos or token not in eos)
            return out, "stop", token if explicit else None
        if len(out) >= limit:
            return out, "length", None
