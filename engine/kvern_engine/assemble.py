"""Puts one engine core together: block pool, scheduler and loop over a worker that is ready. Used by the core's
process and by the offline API, so that both run the same engine.
"""

from kvern_engine.config import EngineConfig
from kvern_engine.core.block_pool import BlockPool
from kvern_engine.core.limits import SchedulerConfig
from kvern_engine.core.loop import EngineCore, WorkerClient
from kvern_engine.core.plan import WorkerReady
from kvern_engine.core.scheduler import Scheduler
from kvern_engine.model_config import ModelConfig


def build_core(
    config: EngineConfig, engine: int, worker: WorkerClient, ready: WorkerReady, model_config: ModelConfig
) -> EngineCore:
    """An EngineCore over `worker`, as large as its tables and arena. Raises ValueError for limits that clash."""
    limits = SchedulerConfig.from_engine(config, ready.max_model_len, ready.device)
    pool = BlockPool(ready.num_blocks, ready.block_size, config.enable_prefix_caching)
    return EngineCore(engine, Scheduler(limits, pool), worker)
