"""The GPUs of this machine and who has them. Counts device files: no driver library is loaded."""

import os
import re
from collections.abc import Mapping
from pathlib import Path


def visible_gpus(environ: Mapping[str, str] | None = None, devices: Path = Path("/dev")) -> tuple[int, ...]:
    """Indexes of the NVIDIA GPUs that this process may use."""
    environ = os.environ if environ is None else environ
    try:
        names = [entry.name for entry in devices.iterdir()]
    except OSError:
        names = []
    present = sorted(int(name.removeprefix("nvidia")) for name in names if re.fullmatch(r"nvidia\d+", name))
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return tuple(range(len(present)))
    parts = [part.strip() for part in chosen.split(",")]
    return tuple(int(part) for part in parts if part.isdigit() and int(part) < len(present))


class GpuPool:
    """Hands out GPUs. Giving back twice does no harm."""

    def __init__(self, gpus: tuple[int, ...]) -> None:
        self.all = gpus
        self._free = list(gpus)

    @property
    def free(self) -> int:
        """How many nobody has."""
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...] | None:
        """The lowest free ones; None where there are not enough."""
        if count > len(self._free):
            return None
        taken, self._free = tuple(self._free[:count]), self._free[count:]
        return taken

    def give_back(self, gpus: tuple[int, ...]) -> None:
        """Make them free again."""
        self._free = sorted(set(self._free) | (set(gpus) & set(self.all)))
