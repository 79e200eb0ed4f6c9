"""StepPlan: the only thing a worker ever sees of the scheduler, and StepResult, the only thing it answers.

A plan is a delta against the worker's state tables plus the list of rows to compute. A *row* is an index into
those tables (0 <= row < max_num_seqs); it holds one sequence: its token ids, block table and sampling state. Plans are
applied strictly in the order of `step`. Within a plan the order is:

1. `removed`: rows whose state is forgotten;
2. `added`: rows (re)initialized as a whole: new, resumed after preemption, or forked;
3. `block_edits`: block-table entries set (appended blocks, or the private copy in place of a shared block);
4. `copies`: block contents copied, source to destination, all layers, before anything is computed;
5. compute: for each i, row `rows[i]` computes the tokens at positions starts[i] .. starts[i]+counts[i]-1. Token ids
   come from the row's table; the id at a position not yet known to the scheduler is the one that the previous step
   sampled for this row (it is on the device; the CPU need not have seen it). Where `samples[i]`, the row then samples
   the token at position starts[i]+counts[i], appends it to its table and reports it.

The same sequence of plans, replayed in another process, gives the same tokens and logits: nothing else influences a
worker. All ranks of an engine get the same plans; rank 0 answers.
"""

import msgspec


class RowSampling(msgspec.Struct, array_like=True, frozen=True):
    """The numeric sampling state of a row. The random number for the token at position p depends on (seed, p) alone."""

    seed: int
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = no limit
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    min_tokens: int = 0  # while fewer tokens are generated, `suppress` is banned
    suppress: list[int] = []  # EOS and stop token ids
    logprobs: int | None = None  # alternatives to report for each sampled token
    prompt_logprobs: int | None = None  # alternatives to report for each prompt token computed
    allowed: list[int] | None = None  # the only tokens that may be sampled
    bad_words: list[list[int]] = []  # the last token of each is banned where the others are the last generated ones


class AddedRow(msgspec.Struct, array_like=True, frozen=True):
    """A row's whole state. `token_ids` is prompt + everything generated so far; `blocks` covers at least the tokens
    that this step computes; KV of positions < the row's `start` is already in those blocks. A block that no token sees
    any more, because the model has a window, may be -1.
    """

    row: int
    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    blocks: list[int]
    sampling: RowSampling


class StepPlan(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """One step of one engine; see the module's docstring for the order in which the fields apply."""

    step: int
    removed: list[int]
    added: list[AddedRow]
    block_edits: list[tuple[int, int, list[int]]]  # row, first block-table index, block ids
    copies: list[tuple[int, int]]  # source block, destination block
    rows: list[int]
    starts: list[int]
    counts: list[int]
    samples: list[bool]

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Logprobs at one position: the chosen (or given) token's, its rank (1 = most likely), and the most likely ones."""

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class StepResult(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """What a step produced. `tokens[i]` are the tokens row `rows[i]` sampled (one, or several under speculation).

    `logprobs` and `prompt_logprobs` are keyed by row and hold only rows that asked; prompt logprobs are those of the
    prompt positions among starts+1 .. starts+counts. `seconds` is the time the device took, for the chunk governor,
    `idle` the time in which it had nothing to do before that (see `device_time.py`).
    """

    step: int
    rows: list[int]
    tokens: list[list[int]]
    seconds: float
    logprobs: dict[int, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    idle: float = 0.0


class Reset(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """A new core takes the worker over: forget every row. Weights, arena and graphs stay."""

    engine: int


class WorkerReady(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """A worker has loaded its weights and sized its arena.

    `max_num_seqs` and `max_num_batched_tokens` are what its tables and buffers were made for: the configuration's, or
    the device's defaults. The core plans within them. `sliding_window`: how many tokens a token sees, itself included,
    where all layers of the model have that, so that blocks behind it are never read again.
    """

    rank: int
    num_blocks: int
    block_size: int
    max_model_len: int
    kv_bytes: int
    weight_bytes: int
    device: str
    dtype: str
    load_seconds: dict[str, float] = {}  # phase -> seconds, for the start-up report
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    sliding_window: int | None = None


class WorkerFailed(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """A worker gives up: `message` is for people, `during` the phase (load, profile, step)."""

    rank: int
    during: str
    message: str


class WorkerProgress(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """How far a worker is on its way to WorkerReady: the phase it is in and the share of it that is done (0..1)."""

    rank: int
    phase: str
    fraction: float


ToWorker = StepPlan | Reset
FromWorker = StepResult | WorkerReady | WorkerFailed | WorkerProgress
