"""The sizes that bound a scheduler.

`EngineConfig` says what the user asked for (None: choose for me) and the worker what its tables were made for; a
`SchedulerConfig` says what holds.
"""

from dataclasses import dataclass
from typing import Literal

from kvern_engine.config import EngineConfig
from kvern_engine.core.plan import WorkerReady

# Where the chunk governor aims. Promised of 99 in 100 gaps between tokens are at most 3 decode steps on a CPU and 2.5
# on a GPU, unless a crowd waits (`ChunkGovernor.cap`): steps are not all equal, and one in 200 may be longer.
#
# What a step may take is a multiple of decode steps, which have become shorter; what a prompt costs has not. The GPU's
# is chosen by what it brings there. Simulated with an H200's step times at 32 requests/s (docs/performance-h200.md):
#
#     factor                        1.8   1.9   2.0   2.1   2.2   2.4
#     TTFT p99, ms                 67.4  62.5  59.9  59.2  57.8  57.5
#     ITL p99, ms                   9.0   9.5   9.9  10.3  10.8  11.6
#     99th gap, in decode steps    1.93  2.04  2.13  2.22  2.32  2.50
#
# 2.1 is the most that keeps the promise at 60 requests/s too (2.33), with what gaps over HTTP are longer than these.
# Beyond it little is to be gained: long prompts take 50 ms in whatever steps, and others wait for such a step.
CPU_ITL_FACTOR = 2.9
GPU_ITL_FACTOR = 2.1


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What a scheduler keeps to. Sizes in tokens or sequences; raises ValueError naming the field that cannot hold.

    `patience`: how many requests may overtake one that does not fit yet before admission waits for it.
    `itl_factor`: how many times longer than a decode-only step a step with a prompt in it may take, but for those few
    that compute a long prompt at once (`governor.py`).
    `pipeline`: stages of the model, and so micro-batches on their way at once.
    `sliding_window`: how many tokens a token sees, itself included, where all layers of the model have that.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int | None = None
    policy: Literal["fcfs", "priority"] = "fcfs"
    itl_factor: float = CPU_ITL_FACTOR
    patience: int = 16
    seed: int = 0
    pipeline: int = 1
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "pipeline"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens must be at least max_num_seqs ({self.max_num_seqs}), "
                f"got {self.max_num_batched_tokens}"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"without chunked prefill max_num_batched_tokens must be at least max_model_len "
                f"({self.max_model_len}), got {self.max_num_batched_tokens}: raise it, lower max_model_len or leave "
                f"enable_chunked_prefill on"
            )

    @classmethod
    def from_engine(cls, config: EngineConfig, ready: WorkerReady) -> "SchedulerConfig":
        """The config of an engine over this worker: its limits hold, whatever they were chosen from."""
        return cls(
            max_num_seqs=min(ready.max_num_seqs, ready.max_num_batched_tokens),
            max_num_batched_tokens=ready.max_num_batched_tokens,
            max_model_len=ready.max_model_len,
            enable_chunked_prefill=config.enable_chunked_prefill,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            policy=config.scheduling_policy,
            itl_factor=CPU_ITL_FACTOR if ready.device.startswith("cpu") else GPU_ITL_FACTOR,
            seed=config.seed,
            pipeline=config.pipeline_parallel_size,
            sliding_window=ready.sliding_window,
        )
