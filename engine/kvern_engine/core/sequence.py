"""What the scheduler remembers of a request: one Sequence a choice, and the Request that joins them.

Plain state and what follows from it alone (digests, seeds, stop conditions). Which sequence runs, and with which
blocks, is decided in `scheduler.py`, the only writer of the states here.

Life of a sequence:

    WAITING -> PREFILL -> DECODE -> DRAINING -> FINISHED
    DEFERRED -> DECODE (forked)      DEFERRED -> WAITING (nobody left to fork from)
    PREFILL | DECODE -> PREEMPTED -> PREFILL
"""

import enum
from collections.abc import Sequence as Items
from hashlib import sha256
from typing import TYPE_CHECKING

import msgspec

from kvern_engine.core.block_pool import block_digest, root_digest
from kvern_engine.core.plan import RowSampling, TokenLogprobs
from kvern_engine.ipc import AddRequest
from kvern_engine.request import SamplingParams

if TYPE_CHECKING:
    from kvern_engine.core.lanes import Lane


class State(enum.Enum):
    WAITING = enum.auto()  # in the queue, holds nothing
    DEFERRED = enum.auto()  # a choice that will fork from a sibling, holds nothing
    PREFILL = enum.auto()  # holds a row and the blocks of all its known tokens; some are not computed yet
    DECODE = enum.auto()  # computes one token in every step of its lane
    DRAINING = enum.auto()  # its last token is on the device; nothing is left to schedule
    PREEMPTED = enum.auto()  # back in the queue, holds nothing; tokens in flight may still arrive
    FINISHED = enum.auto()


def choice_seed(params: SamplingParams, request_id: str, engine_seed: int, index: int) -> int:
    """Seed of choice `index`: the request's (or one drawn from its id and the engine's seed) plus `index`, 64 bit."""
    seed = params.seed
    if seed is None:
        seed = int.from_bytes(sha256(f"{engine_seed}\0{request_id}".encode()).digest()[:8], "little", signed=True)
    return (seed + index + 2**63) % 2**64 - 2**63


class Request:
    """A request and its choices. `key` orders the queue: lower first. `live` counts choices that have not ended.

    `eos` are the EOS ids that end it (none under ignore_eos), `stops` those and its own stop token ids.
    """

    __slots__ = (
        "choices",
        "client",
        "deferred",
        "eos",
        "id",
        "key",
        "live",
        "message",
        "params",
        "prompt",
        "root",
        "scheduled_at",
        "stops",
    )

    def __init__(self, message: AddRequest, key: tuple[int, int], eos_token_ids: frozenset[int]) -> None:
        self.message = message
        self.id = message.request_id
        self.client = message.client
        self.params = message.params
        self.prompt = message.prompt_token_ids
        self.key = key
        eos = eos_token_ids.union(message.eos_token_ids) if message.eos_token_ids else eos_token_ids
        self.eos = frozenset() if self.params.ignore_eos else eos
        self.stops = self.eos | frozenset(self.params.stop_token_ids)
        self.root = root_digest(message.cache_salt)
        self.choices: list[Sequence] = []
        self.deferred: list[Sequence] = []
        self.live = 0
        self.scheduled_at: float | None = None

    def prompt_holder(self) -> "Sequence | None":
        """A choice whose blocks hold the whole prompt as of the plans submitted so far."""
        length = len(self.prompt)
        for choice in self.choices:
            if choice.row >= 0 and choice.num_computed >= length:
                return choice
        return None


class Sequence:
    """One choice of a request.

    `tokens` are the known ones (prompt, then generated); the next `in_flight` are on the device. `num_computed`
    positions have K/V as of the plans submitted so far. It ends at `stop_len` tokens at the latest. `limit` is the
    `num_computed` at which the scheduler must look at it again (a block or the end is due), `alarm` the number of known
    tokens at which the arrival of one more is not just an append: both keep the decode path at one comparison.
    It holds `blocks` from `first_block` on; before stands NO_BLOCK, which only happens where the model has a window.
    """

    __slots__ = (
        "alarm",
        "blocks",
        "client",
        "digests",
        "first_block",
        "first_output",
        "in_flight",
        "index",
        "key",
        "lane",
        "limit",
        "lost",
        "min_len",
        "num_cached",
        "num_computed",
        "num_hits",
        "num_prompt",
        "num_published",
        "passed_over",
        "prompt_logprobs",
        "request",
        "request_id",
        "row",
        "sampling",
        "state",
        "stop_len",
        "stops",
        "tokens",
    )

    def __init__(self, request: Request, index: int, max_model_len: int, seed: int) -> None:
        params = request.params
        self.request = request
        self.request_id = request.id
        self.client = request.client
        self.index = index
        self.key = (*request.key, index)
        self.tokens = request.prompt  # copied by `own_tokens` before the first append
        self.num_prompt = len(self.tokens)
        self.stop_len = min(self.num_prompt + (params.max_tokens or max_model_len), max_model_len)
        self.min_len = self.num_prompt + params.min_tokens
        self.stops = request.stops
        self.sampling = row_sampling(params, seed, request.stops, index)
        self.prompt_logprobs: list[TokenLogprobs] | None = [] if self.sampling.prompt_logprobs is not None else None
        self.state = State.WAITING
        self.row = -1
        self.lane: Lane | None = None  # while it decodes
        self.blocks: list[int] = []
        self.first_block = 0
        self.num_computed = 0
        self.in_flight = 0  # kept for PREEMPTED only; of a DECODE sequence it is num_computed + 1 - len(tokens)
        self.limit = 0
        self.alarm = 0
        self.digests: list[bytes] = []
        self.num_published = 0
        self.num_hits = 0  # tokens found in the cache at the last admission
        self.num_cached = -1  # prompt tokens found in the cache at the first admission
        self.lost = 0  # tokens computed and thrown away by preemptions
        self.passed_over = 0
        self.first_output = True

    def own_tokens(self) -> None:
        """Choices that wait for their turn share the prompt; one that runs appends to its own list."""
        if self.tokens is self.request.prompt:
            self.tokens = list(self.tokens)

    def block_digests(self, count: int, block_size: int) -> list[bytes]:
        """Digests of the first `count` blocks, all full and known; each is computed once."""
        digests = self.digests
        known = len(digests)
        if known < count:
            parent = digests[-1] if digests else self.request.root
            for start in range(known * block_size, count * block_size, block_size):
                parent = block_digest(parent, self.tokens[start : start + block_size])
                digests.append(parent)
        return digests if len(digests) == count else digests[:count]

    @property
    def reads_prefix_cache(self) -> bool:
        """Its tokens may be taken from the prefix cache: no prompt logprobs are due, and the caller does not mind."""
        return not (self.wants_prompt_logprobs or self.request.params.skip_reading_prefix_cache)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Prompt logprobs are asked for and incomplete: each prompt token must be computed, none taken from a cache."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt - 1

    def add_prompt_logprobs(self, start: int, items: Items[TokenLogprobs]) -> None:
        """Those of a chunk that began at `start` (its first item is position start + 1); known ones are skipped."""
        if self.prompt_logprobs is not None:
            self.prompt_logprobs.extend(items[len(self.prompt_logprobs) - start :])

    def current_sampling(self) -> RowSampling:
        """Without prompt logprobs where a resumed sequence has reported them already."""
        if self.sampling.prompt_logprobs is None or self.wants_prompt_logprobs:
            return self.sampling
        return msgspec.structs.replace(self.sampling, prompt_logprobs=None)

    def set_limit(self, block_size: int) -> None:
        self.limit = min(len(self.blocks) * block_size, self.stop_len - 1)

    def set_alarm(self, block_size: int) -> None:
        """The next token that fills a block (seen when its successor arrives) or is the last."""
        boundary = (len(self.tokens) - 1) // block_size * block_size + block_size
        self.alarm = min(boundary, self.stop_len - 1)

    def stop(self, token: int) -> tuple[str | None, int | None]:
        """(finish_reason, stop_reason) after `token`, the newest; (None, None) where it goes on."""
        length = len(self.tokens)
        if token in self.stops and length >= self.min_len:
            return "stop", None if token in self.request.eos else token
        if length >= self.stop_len:
            return "length", None
        return None, None


def row_sampling(params: SamplingParams, seed: int, stops: frozenset[int], index: int) -> RowSampling:
    """The worker's part of the parameters. Prompt logprobs are the same for all choices: only choice 0 reports them."""
    return RowSampling(
        seed=seed,
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.logit_bias,
        min_tokens=params.min_tokens,
        suppress=sorted(stops) if params.min_tokens else [],
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs if index == 0 else None,
        allowed=None if params.allowed_token_ids is None else list(params.allowed_token_ids),
        bad_words=[list(word) for word in params.bad_words_token_ids],
    )
