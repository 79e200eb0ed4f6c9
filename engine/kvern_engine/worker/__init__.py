"""The worker: one device, its weights, KV arena and sampler, behind StepPlan and StepResult.

Importing this package loads no torch; `create_worker` does where the device is a real one.
"""

import os
from typing import TYPE_CHECKING, Union

from kvern_engine.config import EngineConfig

if TYPE_CHECKING:
    from kvern_engine.worker.sim import SimWorker
    from kvern_engine.worker.worker import Worker


def create_worker(config: EngineConfig, rank: int = 0, rendezvous: str | None = None) -> Union["Worker", "SimWorker"]:
    """The worker for `config.device`: a simulated one for "sim", else one with torch. Nothing is loaded yet.

    `rendezvous`: where the ranks of its engine meet (`parallel.groups.init_parallel`), if there are several.
    """
    if config.device == "sim":
        from kvern_engine.worker.sim import SimWorker

        return SimWorker(config, rank)
    # Read by OpenMP when torch is loaded: its threads must sleep while they wait. Spinning, they would take the cores
    # from the core and server processes beside them, and then wait for each other to be scheduled again.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from kvern_engine.worker.worker import Worker

    return Worker(config, rank, rendezvous=rendezvous)
