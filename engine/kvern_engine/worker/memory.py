"""How large the KV cache becomes: pure arithmetic in bytes, tokens and blocks, and one look at the machine's memory.

The arena is taken once, at start. Too small a one is an error that names the longest sequence that would fit.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30
CPU_SHARE = 0.25  # of the memory that is available
CPU_MOST = 4 * GIB
SWITCH_SHARE = 0.05
WAY_BACK_SHARE = 0.9


@dataclass(frozen=True)
class KvCacheSize:
    """The arena: `num_blocks` blocks, `num_bytes` in all."""

    num_blocks: int
    num_bytes: int


def block_bytes(layers: int, kv_heads: int, head_dim: int, block_size: int, element_bytes: int) -> int:
    """Bytes of K and V of one block over the layers and KV heads that a rank has."""
    return 2 * layers * kv_heads * head_dim * block_size * element_bytes


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that a sequence of `tokens` takes."""
    return -(-tokens // block_size)


def available_on_gpu(total: int, used: int, utilization: float, graphs: int = 0) -> int:
    """Bytes for the KV cache on a device of `total` bytes, of which `utilization` may be used: what is left beside
    `used`, the peak of weights and profile run with whatever else lives on the device, and `graphs`, the pools of
    captured CUDA graphs."""
    return max(0, int(total * utilization) - used - graphs)


def switch_reserve(total: int) -> int:
    """Bytes of a device of `total` bytes that stay free for changes of the layout: beside what `gpu_memory_utilization`
    leaves, K and V of running requests are kept there while the arena is made anew. What finds no room is kept by the
    host, which takes a second for 1.3 GB."""
    return int(total * SWITCH_SHARE)


def most_in_turn(room: int, leaving: Sequence[int]) -> int:
    """The largest arena, in bytes, that can be made where another one leaves layer by layer: its layers are of one
    size, each is made before the one of its number in `leaving` (bytes) goes, and `room` bytes can be taken at the
    beginning."""
    gone, most = 0, room
    for count, size in enumerate(leaving, start=1):
        most = min(most, (room + gone) // count)
        gone += size
    return most * len(leaving)


def most_beside(room: int, wanted: int, staged: Sequence[int]) -> int:
    """Bytes that the arena after a switch may take, of `wanted`, where `room` bytes are free beside what was staged of
    the old one (bytes of each layer): all that is free; but where that is less than WAY_BACK_SHARE of what could be had
    by letting go of what was staged layer by layer, that. What was staged is the way back that computes nothing again,
    for the moment; the arena stays."""
    in_turn = most_in_turn(room, staged)
    return room if room >= WAY_BACK_SHARE * min(wanted, in_turn) else in_turn


def available_on_cpu(free: int, ranks: int, needed: int) -> int:
    """Bytes for the KV cache of one of `ranks` ranks on a machine with `free` bytes of memory available: a quarter, at
    most 4 GiB, and not more than `needed`, what all sequences at their longest take."""
    return max(0, min(int(free * CPU_SHARE) // ranks, CPU_MOST, needed))


def size_kv_cache(
    available: int,
    per_block: int,
    *,
    block_size: int,
    max_model_len: int,
    num_blocks_override: int | None = None,
    least_tokens: int | None = None,
) -> KvCacheSize:
    """As many blocks of `per_block` bytes as `available` bytes hold; `num_blocks_override` is taken as it is. Raises
    ValueError where one sequence of `max_model_len` tokens, or of `least_tokens` if that is given, does not fit.
    """
    if num_blocks_override is not None:
        return KvCacheSize(num_blocks_override, num_blocks_override * per_block)
    blocks = available // per_block
    needed = blocks_for(max_model_len if least_tokens is None else least_tokens, block_size)
    if blocks < needed:
        raise ValueError(too_small_message(available, per_block, block_size=block_size, max_model_len=max_model_len))
    return KvCacheSize(blocks, blocks * per_block)


def too_small_message(available: int, per_block: int, *, block_size: int, max_model_len: int) -> str:
    """Says what one sequence needs, what there is, what to do, and ends with the longest feasible length."""
    needed = blocks_for(max_model_len, block_size) * per_block
    longest = available // per_block * block_size
    return (
        f"To serve at least one request with the model's max seq len ({max_model_len}), "
        f"{_gib(needed)} KV cache is needed, which is larger than the available KV cache memory ({_gib(available)}). "
        "Increase gpu_memory_utilization or kv_cache_memory_bytes, or decrease max_model_len: "
        f"the estimated maximum model length is {longest}"
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB // 100 else f"{size / (1 << 20):.2f} MiB"


def cgroup_room(limits: Iterable[tuple[str, str, str]]) -> int | None:
    """Bytes left under the tightest of cgroup v2 `limits`: the contents of memory.max, memory.current and memory.stat
    of each level; None where nothing limits. Cached files count as free: the kernel drops them on demand."""
    rooms = []
    for most, used, stat in limits:
        if most.strip() != "max":
            values = dict(line.split() for line in stat.splitlines())
            cached = int(values.get("inactive_file", 0)) + int(values.get("active_file", 0))
            rooms.append(max(0, int(most) - max(0, int(used) - cached)))
    return min(rooms, default=None)


def available_host_memory() -> int:
    """Bytes that this process may still take: the machine's available memory, or its container's if that is less."""
    import psutil

    free = int(psutil.virtual_memory().available)
    room = cgroup_room(_own_cgroups())
    return free if room is None else min(free, room)


def _own_cgroups() -> list[tuple[str, str, str]]:
    root = Path("/sys/fs/cgroup")
    try:
        own = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2]
    except OSError:
        return []
    found = []
    place = root / own.lstrip("/")
    for folder in (place, *place.parents):
        if folder.is_relative_to(root):
            try:
                most, used, stat = ((folder / f"memory.{name}").read_text() for name in ("max", "current", "stat"))
            except OSError:
                continue
            found.append((most, used, stat))
    return found
