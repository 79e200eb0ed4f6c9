"""The simulated device: computes nothing, takes the time that a real one would, and answers with seeded random tokens.

Scheduler, block pool, HTTP and metrics around it are the real ones. No torch. Steps queue up as on a GPU: one that is
launched while another runs begins when that one ends; only `result()` waits. Several ranks of an engine do not talk:
each gets all plans, and knows from them when every stage is busy.
"""

import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from kvern_engine.config import EngineConfig
from kvern_engine.core.plan import StepPlan, StepResult, TokenLogprobs, WorkerReady
from kvern_engine.loading.config import read_model_config
from kvern_engine.loading.resolve import ModelNotFoundError, resolve_model
from kvern_engine.parallel.layout import Layout
from kvern_engine.worker import limits, memory
from kvern_engine.worker.rng import hash64, uniform
from kvern_engine.worker.sim_profile import SimProfile, load_profile

log = logging.getLogger(__name__)

SIM_MODEL = "sim"  # a model name that needs no files
_ALTERNATIVES_SALT = 0x51D


@dataclass
class _Vocabulary:
    """Token ids that are sampled: all of `ids`; `eos` where the profile says that answers end."""

    ids: np.ndarray
    eos: int | None


@dataclass
class SimPending:
    """A step in the device's queue, which will be over at `ends` (of the clock)."""

    step_result: StepResult
    ends: float
    clock: Callable[[], float]
    sleep: Callable[[float], None]

    def result(self) -> StepResult:
        """Sleeps until the step is over."""
        while (left := self.ends - self.clock()) > 0:
            self.sleep(left)
        return self.step_result


class SimWorker:
    """Same interface as `Worker`. `clock` and `sleep` are for tests; seconds. `like`: one that has loaded the same
    model on the same device."""

    profile: SimProfile
    _vocabulary: _Vocabulary

    def __init__(
        self,
        config: EngineConfig,
        rank: int = 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        like: "SimWorker | None" = None,
    ) -> None:
        self._like = like
        self.lost_kv = False  # as `Worker`'s
        self.config, self.rank = config, rank
        self.layout = Layout.of(config)
        engine, stage, _ = self.layout.coordinates(rank)
        self.answers = rank == self.layout.answering_rank(engine)
        self.knows_tokens = stage == self.layout.pipeline - 1
        self.is_asynchronous = True
        self._clock, self._sleep = clock, sleep
        self._free_at = [-math.inf] * self.layout.pipeline  # by stage

    def load(self, progress: Callable[[str, float], None] | None = None) -> WorkerReady:
        """Reads profile and vocabulary; ready at once. Raises ValueError with a text for the user."""
        begin = time.perf_counter()
        if self._like is None:
            self.profile = self._profile()
        else:
            self.profile, self._vocabulary, self._like = self._like.profile, self._like._vocabulary, None
        self.profile.check_layout(self.layout)
        own = limits.OwnLength(self.profile.max_model_len, self.profile.max_model_len, "the profile's max_model_len")
        length = limits.choose_max_model_len(self.config.max_model_len, own, limits.allows_long(os.environ))
        self.max_model_len = length.tokens
        bounds = limits.step_limits(self.config, "sim", self.profile.device, self.max_model_len)
        size = self._size_kv_cache(length.fit)
        if length.fit:
            self.max_model_len = min(self.max_model_len, size.num_blocks * self.config.block_size)
        self._seeds = np.zeros(bounds.max_num_seqs, dtype=np.int64)
        self._num_prompt = np.zeros(bounds.max_num_seqs, dtype=np.int64)
        self._sampled_at = np.full(bounds.max_num_seqs, -math.inf)  # when a row's last token is known
        self._logprobs: dict[int, int] = {}
        self._prompt_logprobs: dict[int, tuple[int, list[int]]] = {}
        if progress is not None:
            progress("profile", 1.0)
        return WorkerReady(
            rank=self.rank,
            num_blocks=size.num_blocks,
            block_size=self.config.block_size,
            max_model_len=self.max_model_len,
            kv_bytes=size.num_bytes,
            weight_bytes=self.profile.rank_weight_bytes(self.layout),
            device=f"sim {self.profile.device}",
            dtype="bfloat16",
            load_seconds={"profile": round(time.perf_counter() - begin, 3)},
            max_num_seqs=bounds.max_num_seqs,
            max_num_batched_tokens=bounds.max_num_batched_tokens,
        )

    def execute(self, plan: StepPlan) -> SimPending:
        """Queues one step; `result()` of what is returned sleeps until it is over."""
        for row in plan.removed:
            self._forget(row)
        for new in plan.added:
            self._forget(new.row)
            self._seeds[new.row] = new.sampling.seed
            self._num_prompt[new.row] = new.num_prompt_tokens
            self._sampled_at[new.row] = -math.inf
            if new.sampling.logprobs is not None:
                self._logprobs[new.row] = new.sampling.logprobs
            if new.sampling.prompt_logprobs is not None:
                self._prompt_logprobs[new.row] = new.sampling.prompt_logprobs, new.token_ids
        ends, seconds = self._enqueue(plan)
        return SimPending(self._result(plan, seconds), ends, self._clock, self._sleep)

    def _enqueue(self, plan: StepPlan) -> tuple[float, float]:
        """(when the last stage is through with the step, how long it takes there). The first one begins when it is free
        and the tokens that the step continues are known."""
        rows, speed = np.array(plan.rows, dtype=np.int64), self.config.sim_speed
        there = max(self._clock(), float(self._sampled_at[rows].max(initial=-math.inf)))
        ends = seconds = 0.0
        for stage in range(self.layout.pipeline):
            seconds = self.profile.seconds(plan, self.layout, stage) / speed
            ends = self._free_at[stage] = max(there, self._free_at[stage]) + seconds
            there = ends + self.profile.hand_over(plan) / speed
        self._sampled_at[rows[np.array(plan.samples, dtype=np.bool_)]] = ends
        return ends, seconds

    def reset(self) -> None:
        """Forgets every row."""
        self._logprobs.clear()
        self._prompt_logprobs.clear()

    def _forget(self, row: int) -> None:
        self._logprobs.pop(row, None)
        self._prompt_logprobs.pop(row, None)

    def _profile(self) -> SimProfile:
        """The profile; where the model can be found, with its vocabulary, so that the tokens are text."""
        profile = load_profile(self.config.sim_profile)
        ids, eos = np.arange(profile.vocab_size, dtype=np.int64), None
        if self.config.model != SIM_MODEL:
            files = resolve_model(self.config.model, self.config.revision)
            model = read_model_config(files)
            special = set(model.eos_token_ids) | self._special_tokens()
            ids = np.array([i for i in range(model.vocab_size) if i not in special], dtype=np.int64)
            eos = next(iter(model.eos_token_ids), None)
            profile = replace(profile, vocab_size=model.vocab_size)
        self._vocabulary = _Vocabulary(ids, eos)
        return profile

    def _special_tokens(self) -> set[int]:
        from kvern_engine.tokenizer import TokenizerError, load_tokenizer

        try:
            tokenizer = load_tokenizer(resolve_model(self.config.model, self.config.revision), self.config.tokenizer)
        except (TokenizerError, ModelNotFoundError) as error:
            log.info("no tokenizer for the simulated device: %s", error)
            return set()
        return set(tokenizer.special_token_ids) | set(tokenizer.eos_token_ids)

    def _size_kv_cache(self, fit: bool) -> memory.KvCacheSize:
        profile, config = self.profile, self.config
        available = config.kv_cache_memory_bytes or memory.available_on_gpu(
            profile.memory_bytes, profile.rank_weight_bytes(self.layout), config.gpu_memory_utilization
        )
        return memory.size_kv_cache(
            available,
            profile.rank_kv_bytes_per_token(self.layout) * config.block_size,
            block_size=config.block_size,
            max_model_len=self.max_model_len,
            num_blocks_override=config.num_gpu_blocks_override,
            least_tokens=1 if fit else None,
        )

    def _result(self, plan: StepPlan, seconds: float) -> StepResult:
        rows = np.array(plan.rows, dtype=np.int64)
        positions = np.array(plan.starts, dtype=np.int64) + np.array(plan.counts, dtype=np.int64)
        chosen = np.array(plan.samples, dtype=np.bool_)
        rows, positions = rows[chosen], positions[chosen]
        tokens = self._tokens(self._seeds[rows], positions).tolist()
        logprobs = {}
        for row, position, token in zip(rows.tolist(), positions.tolist(), tokens, strict=True):
            if row in self._logprobs:
                logprobs[row] = [self._logprob(row, position, token, self._logprobs[row])]
        return StepResult(
            step=plan.step,
            rows=rows.tolist(),
            tokens=[[token] for token in tokens],
            seconds=seconds,
            logprobs=logprobs,
            prompt_logprobs=self._all_prompt_logprobs(plan) if self._prompt_logprobs else {},
        )

    def _tokens(self, seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """A token for each (seed, position), [R] int64; never an end-of-sequence token unless the profile has them."""
        tokens = self._vocabulary.ids[hash64(seeds, positions) % np.uint64(len(self._vocabulary.ids))]
        if self.profile.eos_probability > 0 and self._vocabulary.eos is not None:
            ends = uniform(~seeds, positions) < self.profile.eos_probability
            tokens = np.where(ends, self._vocabulary.eos, tokens)
        return np.asarray(tokens)

    def _logprob(self, row: int, position: int, token: int, alternatives: int) -> TokenLogprobs:
        """Logprobs of a uniform distribution over the vocabulary, the given token first."""
        seeds = np.full(alternatives, int(self._seeds[row]) ^ _ALTERNATIVES_SALT, dtype=np.int64)
        others = self._tokens(seeds, position * 64 + np.arange(alternatives)).tolist()
        value = -math.log(self.profile.vocab_size)
        return TokenLogprobs(token, value, 1, [token, *others][:alternatives], [value] * alternatives)

    def _all_prompt_logprobs(self, plan: StepPlan) -> dict[int, list[TokenLogprobs]]:
        found = {}
        for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            if row in self._prompt_logprobs:
                alternatives, ids = self._prompt_logprobs[row]
                end = min(start + count, int(self._num_prompt[row]) - 1)
                places = range(start + 1, end + 1)
                if places:
                    found[row] = [self._logprob(row, place, ids[place], alternatives) for place in places]
        return found
