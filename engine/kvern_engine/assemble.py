"""Puts an engine core over a worker that is ready; used by the core's process and by the offline API, so that both run
the same engine.
"""

from collections.abc import Collection

from kvern_engine.config import EngineConfig
from kvern_engine.core.loop import EngineCore
from kvern_engine.core.plan import WorkerReady
from kvern_engine.worker_client import GroupWorkerClient, InprocWorkerClient, NoWorker


def build_core(
    config: EngineConfig,
    engine: int,
    worker: GroupWorkerClient | InprocWorkerClient | NoWorker,
    ready: WorkerReady,
    eos_token_ids: Collection[int],
) -> EngineCore:
    """An EngineCore that plans within what the worker's tables were made for. Raises ValueError for limits that clash.

    Where a direct call computes at once, planning ahead would only hold each token back for a step: it is left out.
    """
    tokens = ready.max_num_batched_tokens
    made_for = {
        "max_num_seqs": min(ready.max_num_seqs, tokens),
        "max_num_batched_tokens": tokens,
        "async_scheduling": config.async_scheduling and worker.overlaps,
    }
    return EngineCore.from_config(engine, config.model_copy(update=made_for), ready, worker, eos_token_ids)
