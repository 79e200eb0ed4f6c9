"""Random engines that hand over to the engines of another layout in the middle of their work, and again: every choice
gets the tokens that it would have had, no block has two holders by mistake, nothing is left over."""

import random
from collections import defaultdict

import msgspec
import pytest
from core_fake_worker import FakeWorker, oracle
from core_harness import Engine

from kvern_engine.core.block_pool import BlockPool
from kvern_engine.core.handed import Handover, Share
from kvern_engine.core.limits import SchedulerConfig
from kvern_engine.core.loop import EngineCore
from kvern_engine.core.placement import Placement, Room, overlapping, place
from kvern_engine.core.scheduler import Scheduler
from kvern_engine.core.sequence import choice_seed
from kvern_engine.ipc import AddRequest, TokenOutput
from kvern_engine.parallel.layout import Layout
from kvern_engine.request import SamplingParams

EOS = frozenset({0})
LONGEST = 32


class Pod:
    """Four devices, as engines of one size after the other; blocks grow with the size, as they do on devices."""

    def __init__(self, seed: int) -> None:
        self.random = rng = random.Random(seed)
        self.seed = seed
        self.block_size = rng.choice((1, 2, 4))
        self.window = rng.choice((None, None, None, 3, 9))
        self.blocks = rng.randint(-(-LONGEST // self.block_size), 20 + 32 // self.block_size)
        self.caching = rng.random() < 0.8
        self.tokens = rng.choice((4, 8, 64))
        self.rows = rng.randint(1, 4)
        self.depth = rng.choice((1, 2, 2))
        self.layout = Layout(4, 1, 1)
        self.cores = [self.core(e, self.room(self.layout)) for e in range(4)]
        self.requests: dict[str, AddRequest] = {}
        self.engine_of: dict[str, int] = {}
        self.aborted: set[str] = set()
        self.outputs: dict[tuple[str, int], list[TokenOutput]] = defaultdict(list)
        self.stem = [rng.randrange(8) for _ in range(20)]
        self.kept = self.recomputed = self.hits = 0

    def room(self, layout: Layout) -> Room:
        return Room(self.blocks * layout.tensor, self.block_size, self.rows)

    def core(self, engine: int, room: Room) -> EngineCore:
        config = SchedulerConfig(
            max_num_seqs=room.max_num_seqs,
            max_num_batched_tokens=self.tokens,
            max_model_len=LONGEST,
            seed=self.seed,
            sliding_window=self.window,
        )
        worker = FakeWorker(room.num_blocks, self.block_size, self.rows, self.tokens, window=self.window)
        scheduler = Scheduler(config, BlockPool(room.num_blocks, self.block_size, self.caching), EOS)
        return EngineCore(engine, scheduler, worker, max_inflight=self.depth, clock=lambda: 0.0)

    def add(self) -> None:
        rng = self.random
        prompt = self.stem[: rng.randint(0, 16)] + [rng.randrange(8) for _ in range(rng.choice((1, 1, 4)))]
        params = SamplingParams(
            n=rng.choice((1, 1, 1, 2, 3)),
            max_tokens=rng.choice((None, 2, 5, 12)),
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=rng.choice(((), (), (3,))),
            seed=rng.choice((None, 1, 2)),
            logprobs=rng.choice((None, None, 1)),
            prompt_logprobs=rng.choice((None, None, None, 1)),
        )
        name = f"r{len(self.requests)}"
        request = self.requests[name] = AddRequest(name, rng.randrange(2), prompt, params, float(len(self.requests)))
        self.engine_of[name] = rng.randrange(len(self.cores))
        self.cores[self.engine_of[name]].add_request(request)

    def take(self, outputs: dict[int, list[TokenOutput]]) -> None:
        for items in outputs.values():
            for output in items:
                self.outputs[output.request_id, output.index].append(output)

    def turn(self) -> None:
        for core in self.cores:
            if not core.idle:
                self.take(core.step())

    def switch(self, tensor: int) -> Placement:
        """What supervisor, cores and workers do together."""
        after = Layout(4 // tensor, tensor, 1)
        handovers = []
        for core in self.cores:
            self.take(core.settle())
            handovers.append(msgspec.msgpack.decode(msgspec.msgpack.encode(core.hand_over()), type=Handover))
        placed = place(handovers, self.layout, after, [self.room(after)] * after.data)
        cores = [self.core(engine, self.room(after)) for engine in range(after.data)]
        for (old, new), pairs in placed.moves.items():
            assert len({target for _, target in pairs}) == len(pairs)
            for source, target in pairs:
                cores[new].worker.kv[target] = list(self.cores[old].worker.kv[source])  # type: ignore[attr-defined]
        for core, share in zip(cores, placed.shares, strict=True):
            core.scheduler.take_over(msgspec.msgpack.decode(msgspec.msgpack.encode(share), type=Share))
            used = {b for r in share.requests for c in r.choices for b in c.blocks if b >= 0}
            assert core.scheduler.pool.num_used == len(used)
        for name, engine in placed.engine_of.items():
            assert engine in overlapping(self.layout, after, self.engine_of[name])
        self.engine_of |= placed.engine_of
        self.layout, self.cores = after, cores
        self.kept, self.recomputed = self.kept + placed.kept, self.recomputed + placed.recomputed
        return placed

    def turn_back(self) -> None:
        """A switch that has come to nothing: everybody goes on with what there was, in the blocks where it was."""
        handovers = []
        for core in self.cores:
            self.take(core.settle())
            handovers.append(core.hand_over())
        old, self.cores = self.cores, [self.core(e, self.room(self.layout)) for e in range(self.layout.data)]
        for core, before, handover in zip(self.cores, old, handovers, strict=True):
            core.worker.kv = before.worker.kv  # type: ignore[attr-defined]
            core.scheduler.take_over(handover.unmoved())
            assert core.scheduler.pool.num_used == before.scheduler.pool.num_used
            assert core.scheduler.pool.cached_blocks() == before.scheduler.pool.cached_blocks()

    def run(self) -> "Pod":
        rng, sizes = self.random, [1, 2, 4]
        for _ in range(rng.randint(1, 4)):
            for _ in range(rng.randint(0, 5)):
                self.add()
            for _ in range(rng.randint(0, 8)):
                self.turn()
            if self.requests and rng.random() < 0.2:
                name = rng.choice(list(self.requests))
                self.aborted.add(name)
                for core in self.cores:  # it may have ended under an earlier layout
                    core.abort([name])
            if rng.random() < 0.2:
                self.turn_back()
            else:
                self.switch(rng.choice(sizes))
        for _ in range(2000):
            if all(core.idle for core in self.cores):
                return self
            self.turn()
        raise AssertionError("not done")

    def check(self) -> None:
        for name, request in self.requests.items():
            for index in range(request.params.n):
                outputs = self.outputs[name, index]
                assert [bool(o.finish_reason) for o in outputs].count(True) == 1 and outputs[-1].finish_reason, name
                found = [token for output in outputs for token in output.token_ids]
                seed = choice_seed(request.params, name, self.seed, index)
                wanted, reason, _ = oracle(request, seed, LONGEST, EOS)
                assert found == wanted[: len(found)]
                if outputs[-1].finish_reason != "abort":
                    assert (found, outputs[-1].finish_reason) == (wanted, reason)
                else:
                    assert name in self.aborted
                if request.params.logprobs is not None:
                    assert sum(len(o.logprobs or []) for o in outputs) == len(found)
                told = [o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None]
                if request.params.prompt_logprobs is not None and index == 0 and found:
                    assert [len(each) for each in told] == [len(request.prompt_token_ids) - 1]
        for core in self.cores:
            assert core.scheduler.pool.num_used == 0
            assert sorted(core.scheduler.pool.free_order()) == list(range(core.scheduler.pool.num_blocks))
            assert core.scheduler._books.num_running == 0


@pytest.mark.parametrize("shard", range(4))
def test_random_switches(shard: int) -> None:
    kept = recomputed = 0
    for seed in range(shard, 320, 4):
        pod = Pod(seed).run()
        pod.check()
        kept, recomputed = kept + pod.kept, recomputed + pod.recomputed
    assert kept > 60 and recomputed > 2  # both ways were taken


def handover(engine: Engine, number: int = 0) -> Handover:
    engine.core.settle()
    return engine.scheduler.hand_over(number)


def test_a_running_request_computes_nothing_again() -> None:
    engine = Engine(num_blocks=64, block_size=4)
    engine.add("long", 40, max_tokens=20)
    engine.step(5)
    placed = place([handover(engine)], Layout(), Layout(), [Room(64, 4, 8)])
    assert (placed.kept, placed.recomputed) == (1, 0)
    follower = Engine(num_blocks=64, block_size=4)
    for source, target in placed.moves[0, 0]:
        follower.worker.kv[target] = list(engine.worker.kv[source])
    follower.scheduler.take_over(placed.shares[0])
    plan = follower.step()
    assert (plan.counts, plan.starts) == ([1], [44])
    assert [row.request_id for row in plan.added] == ["long"]
    assert not follower.step().added


def test_what_does_not_fit_is_computed_again_and_the_largest_stay() -> None:
    engines = [Engine(num_blocks=16, block_size=4) for _ in range(2)]
    engines[0].add("large", 40, max_tokens=8)
    engines[1].add("small", 12, max_tokens=8)
    for engine in engines:
        engine.step(3)
    placed = place([handover(e, i) for i, e in enumerate(engines)], Layout(2, 1), Layout(1, 2), [Room(12, 4, 8)])
    assert (placed.kept, placed.recomputed) == (1, 1)
    states = {r.message.request_id: r.choices[0].state for r in placed.shares[0].requests}
    assert states == {"large": "running", "small": "waiting"}


def test_an_idle_prefix_is_found_again() -> None:
    engine = Engine(num_blocks=64, block_size=4)
    engine.add("first", list(range(40)), max_tokens=2)
    engine.run()
    placed = place([handover(engine)], Layout(1, 2), Layout(2, 1), [Room(64, 4, 8)] * 2)
    for share in placed.shares:  # both halves have it
        follower = Engine(num_blocks=64, block_size=4)
        for source, target in placed.moves[0, share.engine]:
            follower.worker.kv[target] = list(engine.worker.kv[source])
        follower.scheduler.take_over(share)
        assert follower.pool.num_used == 0 and follower.pool.num_cached == 10
        follower.add("second", list(range(40)), max_tokens=2)
        follower.run()
        assert follower.outputs["second"][0].num_cached_tokens == 36


def test_plans_in_flight_are_not_handed_over() -> None:
    engine = Engine(depth=2)
    engine.add("r", 8, max_tokens=8)
    engine.core.step()
    with pytest.raises(RuntimeError, match="1 plans are in flight: their tokens are not known"):
        engine.core.hand_over()
