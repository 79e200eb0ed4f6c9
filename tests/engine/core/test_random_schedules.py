"""Ten thousand random schedules: nothing leaks, no block has two writers, every choice ends once with the right tokens.

Each episode is a small engine with a pool of a few blocks, so that requests preempt, fork, hit prefixes and are aborted
all the time. The fake worker checks each plan; the tokens are compared to an oracle that knows no batches.
"""

import random
from collections import defaultdict

import pytest
from core_fake_worker import FakeWorker, oracle

from kvern_engine.core.block_pool import BlockPool
from kvern_engine.core.limits import SchedulerConfig
from kvern_engine.core.loop import EngineCore
from kvern_engine.core.scheduler import Scheduler
from kvern_engine.core.sequence import choice_seed
from kvern_engine.ipc import AddRequest, TokenOutput
from kvern_engine.request import SamplingParams

EOS = frozenset({0})
EPISODES = 10_000
SHARDS = 10


class Episode:
    """One random engine and its requests, run to the end; a third of them with a window."""

    def __init__(self, seed: int) -> None:
        self.random = rng = random.Random(seed)
        window = random.Random(f"window {seed}").choice((None, None, None, None, 1, 3, 5, 9))
        self.block_size = rng.choice((1, 2, 4, 4))
        num_blocks = rng.randint(4, 12)
        tokens = rng.choice((4, 8, 16, 64))
        self.config = SchedulerConfig(
            max_num_seqs=rng.randint(1, min(4, tokens)),
            max_num_batched_tokens=tokens,
            max_model_len=rng.randint(6, 40),
            long_prefill_token_threshold=rng.choice((None, None, 1, 3)),
            policy=rng.choice(("fcfs", "priority")),
            patience=rng.choice((0, 1, 16)),
            seed=seed,
            pipeline=rng.choice((1, 1, 2, 3, 4)),
            sliding_window=window,
        )
        self.pool = BlockPool(num_blocks, self.block_size, rng.random() < 0.8)
        self.worker = FakeWorker(
            num_blocks, self.block_size, self.config.max_num_seqs, tokens, pipeline=self.config.pipeline, window=window
        )
        self.scheduler = Scheduler(self.config, self.pool, EOS)
        self.depth = rng.choice((1, 2, 2, 2, 3, 4)) + rng.choice((0, self.config.pipeline - 1))
        self.core = EngineCore(0, self.scheduler, self.worker, max_inflight=self.depth, clock=lambda: 0.0)
        self.requests: dict[str, AddRequest] = {}
        self.aborted: set[str] = set()
        self.outputs: dict[tuple[str, int], list[TokenOutput]] = defaultdict(list)
        self.stem = [rng.randrange(8) for _ in range(40)]
        self.steps = 0

    def add(self) -> None:
        rng = self.random
        prompt = self.stem[: rng.randint(0, 20)] + [rng.randrange(8) for _ in range(rng.choice((0, 1, 1, 4)))]
        params = SamplingParams(
            n=rng.choice((1, 1, 1, 2, 3)),
            max_tokens=rng.choice((None, 1, 2, 5, 12)),
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=rng.choice(((), (), (3,))),
            seed=rng.choice((None, 1, 2)),
            logprobs=rng.choice((None, None, None, 1)),
            prompt_logprobs=rng.choice((None, None, None, 1)),
        )
        request_id = f"r{len(self.requests)}"
        request = AddRequest(request_id, rng.randrange(2), prompt, params, 0.0, rng.randrange(3))
        self.requests[request_id] = request
        self.core.add_request(request)

    def run(self) -> "Episode":
        rng = self.random
        for _ in range(rng.randint(1, 6)):
            self.add()
        late, aborts, stalled = rng.randint(0, 4), rng.randint(0, 2), 0
        while not self.core.idle:
            self.steps += 1
            assert self.steps < 3000, "no progress"
            if late and rng.random() < 0.2:
                late -= 1
                self.add()
            if aborts and rng.random() < 0.1:
                aborts -= 1
                chosen = rng.choice(list(self.requests))
                self.aborted.add(chosen)
                self.core.abort([chosen, "unknown"])
            plans = self.worker.next_step
            delivered = self.core.step()
            busy = delivered or self.scheduler.num_in_flight or self.worker.next_step > plans
            stalled = 0 if busy else stalled + 1
            assert stalled < 3, "requests wait and nothing runs"
            for client, outputs in delivered.items():
                for output in outputs:
                    assert self.requests[output.request_id].client == client
                    self.outputs[output.request_id, output.index].append(output)
        return self

    def check(self) -> None:
        pool = self.pool
        assert pool.num_free == pool.num_blocks, "a block leaked"
        assert sorted(pool.free_order()) == list(range(pool.num_blocks))
        stats = self.core.stats()
        assert stats.num_running == stats.num_waiting == stats.num_waiting_deferred == 0
        assert stats.kv_cache_usage == 0
        for request in self.requests.values():
            for index in range(request.params.n):
                self.check_choice(request, index)

    def check_choice(self, request: AddRequest, index: int) -> None:
        outputs = self.outputs[request.request_id, index]
        tokens = [token for output in outputs for token in output.token_ids]
        assert [output.finish_reason is None for output in outputs] == [True] * (len(outputs) - 1) + [False]
        reason = outputs[-1].finish_reason
        prompt = request.prompt_token_ids
        if not prompt or len(prompt) + 1 > self.scheduler.max_model_len:
            assert reason == "error" and not tokens and outputs[-1].error
            return
        seed = choice_seed(request.params, request.request_id, self.config.seed, index)
        expected, why, stop_reason = oracle(request, seed, self.scheduler.max_model_len, EOS)
        if reason == "abort":
            assert request.request_id in self.aborted
            assert tokens == expected[: len(tokens)] and len(tokens) < len(expected)
            return
        assert (tokens, reason, outputs[-1].stop_reason) == (expected, why, stop_reason)
        if request.params.logprobs is not None:
            assert [p.token_id for output in outputs for p in output.logprobs or []] == tokens
        if index == 0:
            wanted = prompt[1:] if request.params.prompt_logprobs is not None else None
            reported = outputs[0].prompt_logprobs
            assert (reported and [p.token_id for p in reported]) == (wanted if wanted != [] else reported)
            assert outputs[0].num_cached_tokens is not None and outputs[0].num_cached_tokens < len(prompt)


@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_schedules(shard: int) -> None:
    preemptions = hits = steps = 0
    for seed in range(shard * EPISODES // SHARDS, (shard + 1) * EPISODES // SHARDS):
        try:
            episode = Episode(seed).run()
            episode.check()
        except Exception as error:
            raise AssertionError(f"episode {seed}: {error}") from error
        stats = episode.core.stats()
        preemptions += stats.preemptions
        hits += stats.prefix_hits
        steps += stats.steps
    # The episodes exercise what they are meant to.
    assert preemptions > 30 and hits > 1000 and steps > 10_000
