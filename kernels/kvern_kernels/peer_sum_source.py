"""What `peer_sum.cu` is compiled with: arithmetic, for `peer_sum.py` and for tests without a GPU."""

from dataclasses import dataclass
from pathlib import Path

SLOTS = 3
_MOST_THREADS = 1024


@dataclass(frozen=True)
class Variant:
    """Ranks, numbers a row, float16 (bfloat16 otherwise), and bytes of the room that a sender has in a slot."""

    ranks: int
    width: int
    half: bool = False
    slot_bytes: int = 0

    @property
    def threads(self) -> int:
        """Of a block, which computes a row: 16 bytes each where that many can be, whole warps."""
        return min(_MOST_THREADS, -(-self.width // 256) * 32)


def source() -> str:
    return Path(__file__).with_name("peer_sum.cu").read_text()


def options(variant: Variant, capability: str) -> list[str]:
    """NVRTC's for a device of this compute capability, e.g. "90"."""
    sizes = {
        "RANKS": variant.ranks,
        "WIDTH": variant.width,
        "THREADS": variant.threads,
        "HALF": int(variant.half),
        "SLOT_BYTES": variant.slot_bytes,
    }
    defines = [f"-D{name}={value}" for name, value in sizes.items()]
    return [f"--gpu-architecture=sm_{capability}", "-std=c++17", *defines]
