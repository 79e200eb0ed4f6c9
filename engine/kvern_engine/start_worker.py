"""Starting the process of one rank, for the supervisor, a follower and the offline API alike."""

import os
import sys
from collections.abc import Mapping

from kvern_engine import children
from kvern_engine.child import ChildSpec
from kvern_engine.children import Child
from kvern_engine.config import EngineConfig


def start_worker(
    config: EngineConfig,
    rank: int,
    engine: int,
    folder: str,
    local_rank: int,
    local_world: int,
    environ: Mapping[str, str] = {},
) -> Child:
    """Start `rank` of `engine` with its sockets in `folder`. `local_rank` of the `local_world` ranks of this pod says
    which device is its own (of those that CUDA_VISIBLE_DEVICES leaves) and its share of the CPU's cores.
    """
    spec = ChildSpec(
        kind="worker",
        index=rank,
        engine=engine,
        socket_dir=folder,
        supervisor_pid=os.getpid(),
        config=config.model_dump_json(),
        human_logs=sys.stderr.isatty(),
    )
    local = {"KVERN_LOCAL_RANK": str(local_rank), "KVERN_LOCAL_WORLD": str(local_world)}
    return children.start(spec, (), {**local, **environ})
