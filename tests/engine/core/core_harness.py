"""A scheduler over a fake worker, run by hand: what the tests of the scheduler share."""

from collections import defaultdict
from typing import Any

from core_fake_worker import FakeWorker, oracle

from kvern_engine.core.block_pool import BlockPool
from kvern_engine.core.limits import SchedulerConfig
from kvern_engine.core.loop import EngineCore
from kvern_engine.core.plan import StepPlan
from kvern_engine.core.scheduler import Scheduler
from kvern_engine.core.sequence import choice_seed
from kvern_engine.ipc import AddRequest, TokenOutput
from kvern_engine.request import SamplingParams


class Engine:
    """`config` overrides SchedulerConfig; tokens never end a request unless `eos` says so."""

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        depth: int = 1,
        eos: tuple[int, ...] = (),
        caching: bool = True,
        vocab: int = 1000,
        **config: Any,
    ) -> None:
        defaults: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256}
        self.config = SchedulerConfig(**{**defaults, **config})
        self.pool = BlockPool(num_blocks, block_size, caching)
        self.worker = FakeWorker(
            num_blocks,
            block_size,
            self.config.max_num_seqs,
            self.config.max_num_batched_tokens,
            vocab,
            keep_plans=True,
            window=self.config.sliding_window,
        )
        self.scheduler = Scheduler(self.config, self.pool, eos)
        self.core = EngineCore(0, self.scheduler, self.worker, max_inflight=depth, clock=lambda: 1.0)
        self.outputs: dict[str, list[TokenOutput]] = defaultdict(list)
        self.messages: dict[str, AddRequest] = {}

    @property
    def plans(self) -> list[StepPlan]:
        return self.worker.plans

    def add(
        self, name: str, prompt: int | list[int], priority: int = 0, salt: str = "", client: int = 0, **params: Any
    ) -> AddRequest:
        """A request with `prompt` tokens (a number: as many, of this name alone)."""
        tokens = [sum(name.encode()) * 100 + i for i in range(prompt)] if isinstance(prompt, int) else prompt
        message = AddRequest(name, client, tokens, SamplingParams(**params), 0.0, priority, salt)
        self.messages[name] = message
        self.core.add_request(message)
        return message

    def step(self, count: int = 1) -> StepPlan:
        """Steps of the core; returns the newest plan."""
        for _ in range(count):
            for outputs in self.core.step().values():
                for output in outputs:
                    self.outputs[output.request_id].append(output)
        return self.plans[-1]

    def run(self, limit: int = 2000) -> None:
        """Until everything has ended."""
        for _ in range(limit):
            if self.core.idle:
                return
            self.step()
        raise AssertionError(f"not done after {limit} steps")

    def tokens(self, name: str, index: int = 0) -> list[int]:
        return [t for output in self.outputs[name] if output.index == index for t in output.token_ids]

    def reasons(self, name: str) -> dict[int, str]:
        """finish_reason by choice; more than one for a choice is an error."""
        ends = [(output.index, output.finish_reason) for output in self.outputs[name] if output.finish_reason]
        assert len(dict(ends)) == len(ends)
        return dict(ends)  # type: ignore[arg-type]

    def first_step(self, name: str) -> int:
        """Step in which the request was first placed."""
        return next(plan.step for plan in self.plans if any(row.request_id == name for row in plan.added))

    def placements(self, name: str) -> int:
        return sum(row.request_id == name for plan in self.plans for row in plan.added)


def expected(engine: Engine, name: str, index: int = 0, eos: tuple[int, ...] = ()) -> list[int]:
    """Tokens that the oracle says a choice must get."""
    message = engine.messages[name]
    seed = choice_seed(message.params, name, engine.config.seed, index)
    tokens, _, _ = oracle(message, seed, engine.scheduler.max_model_len, frozenset(eos), engine.worker.vocab)
    return tokens
