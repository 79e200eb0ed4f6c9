"""What this pod has for its ranks, without loading torch: accelerators (from CUDA_VISIBLE_DEVICES or the device files)
and shared memory.

Each rank takes one accelerator in order (`start_worker.py`); more ranks than accelerators are refused.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from kvern_engine.config import EngineConfig


def devices_visible(environ: Mapping[str, str], device_files: Path = Path("/dev")) -> int:
    """NVIDIA devices that a process with this environment can use."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    present = len([path for path in device_files.glob("nvidia[0-9]*") if path.name[6:].isdecimal()])
    if listed is None:
        return present
    names: list[str] = []
    for name in (part.strip() for part in listed.split(",")):
        if not name or name.startswith("-"):  # as CUDA does: what stands behind an invalid one is not visible
            break
        names.append(name)
    return min(len(names), present) if present else 0


def shared_memory_note(config: EngineConfig, devices: int, free: int | None) -> str | None:
    """What to tell where NCCL may run out of shared memory: `free` bytes of /dev/shm (None: not known)."""
    several = config.tensor_parallel_size * config.pipeline_parallel_size > 1
    wanted = 64 << 20
    if config.device not in ("cuda", "auto") or devices == 0 or not several or free is None or free >= wanted:
        return None
    return (
        f"/dev/shm has {free >> 20} MiB free; NCCL between the ranks of an engine may need more than that: give the "
        "pod an emptyDir of medium Memory there (docker: --shm-size)"
    )


def free_shared_memory() -> int | None:
    """Bytes free in /dev/shm; None where there is none."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def check_devices(config: EngineConfig, devices: int) -> None:
    """Raises ValueError where this pod's ranks outnumber its devices. Ranks on CPUs share the cores."""
    if config.device not in ("cuda", "auto") or devices == 0:  # none, or none that we can see: the worker will tell
        return
    sizes = config.data_parallel_size, config.pipeline_parallel_size, config.tensor_parallel_size
    world = sizes[0] * sizes[1] * sizes[2]
    ranks = world // config.nnodes
    if ranks > devices:
        spread = f" over {config.nnodes} nodes" if config.nnodes > 1 else ""
        raise ValueError(
            f"data x pipeline x tensor parallel size {sizes[0]} x {sizes[1]} x {sizes[2]}{spread} needs {ranks} "
            f"device{'s' if ranks > 1 else ''} in this pod, which has {devices} (CUDA_VISIBLE_DEVICES counts): lower "
            "one of the sizes, or give the pod more devices"
        )
