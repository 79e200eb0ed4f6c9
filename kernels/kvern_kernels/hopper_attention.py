"""Attention of prompts over the paged cache by our own kernel on Hopper (`hopper_attention.cu`): fresh prompts, chunks
behind a cached prefix and prompts of any lengths side by side, all in one launch, straight from the cache's blocks.

Measured on an H200, 32 query and 8 KV heads of 128, us, with cuDNN or Triton / with this: 4 x 4,000 tokens 1,001 / 861,
8,000 956 / 819, 16 x 1,024 347 / 301, 2,048 behind 6,144 649 / 374, twenty chats of 40 to 2,100 tokens 507 / 303.

`prepare` compiles it at start; `takes` says where it computes. The order of its work is `plan`'s, made once a step.
"""

import heapq
import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from . import hopper_source
from .metadata import AttentionMetadata
from .nvrtc import CudaError, Kernel, TensorMap, compiled, kept_map, on_hopper

log = logging.getLogger(__name__)

DIM, ROWS, KEYS = 128, 128, 128  # as in the .cu file
BLOCK_SIZES = (16, 32, 64, 128)
_THREADS = 384
_TILE_BYTES = KEYS * DIM * 2
SHARED_BYTES = 1024 + 6 * _TILE_BYTES + 112  # two tiles each of queries, K and V, and the barriers
_LOG2E = 1.4426950408889634
_GROUP_BYTES = 8 << 20
# Of what a tile takes, Triton's kernel needs 1.85 times as much, but its tiles are of 16 or 32 query tokens.
_LEAST_SHARE = 0.35
_ITEM_COST = 2  # of an item, beside its tiles, in tiles


@dataclass(frozen=True)
class Variant:
    """What is compiled: numbers in `dtype`, cache blocks of `block_size` tokens, two blocks that load K and V for each
    other (`shared`)."""

    dtype: torch.dtype
    block_size: int
    shared: bool


_kernels: dict[tuple[torch.device, Variant], Kernel] = {}


def source() -> str:
    """The kernel's text."""
    return hopper_source.source("hopper_attention.cu", registers=64)


def options(variant: Variant) -> list[str]:
    """NVRTC's."""
    half = int(variant.dtype == torch.float16)
    return hopper_source.options(HALF=half, BLOCK=variant.block_size, SHARED=int(variant.shared))


def fits(head_dim: int, block_size: int, dtype: torch.dtype, cache: torch.dtype) -> bool:
    """Whether the kernel computes heads of `head_dim` in `dtype` over a cache of type `cache`."""
    return head_dim == DIM and block_size in BLOCK_SIZES and dtype == cache and dtype in (torch.bfloat16, torch.float16)


class Tile(NamedTuple):
    """Up to ROWS query tokens of a row: flat number of the first one, row, tokens of the context that it sees, query
    tokens, tokens of the row's context."""

    token: int
    row: int
    seen: int
    tokens: int
    length: int

    @property
    def key_tiles(self) -> int:
        """How many tiles of the context its last token sees something of."""
        return -(-(self.seen + self.tokens - 1) // KEYS)


def packs(count: int, per_kv_head: int, each: int) -> bool:
    """Whether a tile of `count` query tokens is computed for twice `each` heads, one to a warp group."""
    return count <= ROWS // 2 and per_kv_head % (2 * each) == 0


def useful_share(query_lens: Sequence[int], seq_lens: Sequence[int], per_kv_head: int, each: int) -> float:
    """The part of the products that goes to query tokens that are there; the rest fills tiles."""
    there = filled = 0
    for count, length in zip(query_lens, seq_lens, strict=True):
        full, rest = divmod(count, ROWS)
        last = 0 if rest == 0 else ROWS // 2 if packs(rest, per_kv_head, each) else ROWS
        there += count * length
        filled += (full * ROWS + last) * length
    return there / filled if filled else 1.0


def tiles_of(query_lens: Sequence[int], seq_lens: Sequence[int], first: int) -> list[Tile]:
    """The tiles of the rows from `first` on."""
    tiles, token = [], sum(query_lens[:first])
    for row in range(first, len(query_lens)):
        count, length = query_lens[row], seq_lens[row]
        begins = range(0, count, ROWS)
        tiles += [Tile(token + b, row, length - count + b + 1, min(ROWS, count - b), length) for b in begins]
        token += count
    return tiles


def in_order(tiles: Sequence[Tile], heads: int, kv_heads: int, each: int) -> list[int]:
    """The items, as tile * heads + first head, in the order in which they should begin: those of rows and KV heads
    whose K and V fit into L2 together, the longest first. An item has `each` heads, or twice that (`packs`)."""
    begins = _groups(tiles, kv_heads)
    per_kv_head, codes = heads // kv_heads, len(tiles) * heads
    longest = max((tile.key_tiles for tile in tiles), default=0) + 1
    items: list[int] = []
    for number, tile in enumerate(tiles):
        group, together = begins[tile.row]
        step = 2 * each if packs(tile.tokens, per_kv_head, each) else each
        wait, share = longest - tile.key_tiles, per_kv_head * together
        code = number * heads
        items += [((group + h // share) * longest + wait) * codes + code + h for h in range(0, heads, step)]
    return [item % codes for item in sorted(items)]  # numbers, not tuples: a prompt waits for this


def _groups(tiles: Sequence[Tile], kv_heads: int) -> dict[int, tuple[int, int]]:
    """Of each row its first group and how many of its KV heads are in a group: whole rows as long as K and V of theirs
    take no more than _GROUP_BYTES, or a part of the heads of one row."""
    groups: dict[int, tuple[int, int]] = {}
    group, used = 0, 0
    for tile in tiles:
        if tile.row in groups:
            continue
        size = tile.length * 4 * DIM
        if used and used + size * kv_heads > _GROUP_BYTES:
            group, used = group + 1, 0
        if size * kv_heads <= _GROUP_BYTES:
            groups[tile.row] = group, kv_heads
            used += size * kv_heads
        else:
            together = max(1, _GROUP_BYTES // size)
            groups[tile.row] = group, together
            group += -(-kv_heads // together)
    return groups


def deal(costs: Sequence[int], workers: int) -> list[int]:
    """Where each item goes, as turn * workers + worker: in order, to the worker that will be free first (list
    scheduling, Graham 1966)."""
    free, turns, places = list(range(workers)), [0] * workers, []  # free: time * workers + worker
    for cost in costs:
        first = free[0]
        worker = first % workers
        heapq.heapreplace(free, first + cost * workers)
        places.append(turns[worker] * workers + worker)
        turns[worker] += 1
    return places


def plan(
    query_lens: Sequence[int], seq_lens: Sequence[int], first: int, heads: int, kv_heads: int, each: int, workers: int
) -> Tensor:
    """What each of `workers` computes, turn by turn, of the rows from `first` on: [turns, workers, 8] int32, a `Tile`,
    the first head, heads of a block and a zero; zeros where a worker has nothing left."""
    tiles = tiles_of(query_lens, seq_lens, first)
    items = in_order(tiles, heads, kv_heads, each)
    costs = [tile.key_tiles + _ITEM_COST for tile in tiles]
    places = deal([costs[item // heads] for item in items], workers)
    turns = max(places, default=-1) // workers + 1
    table = array("i", bytes(32 * turns * workers))  # not torch's indexing, whose threads take milliseconds to meet
    wide = [1 + packs(tile.tokens, heads // kv_heads, each) for tile in tiles]
    known = [array("i", (*tile, 0, blocks, 0)) for tile, blocks in zip(tiles, wide, strict=True)]
    for item, place in zip(items, places, strict=True):
        number, head = divmod(item, heads)
        table[8 * place : 8 * place + 8] = known[number]
        table[8 * place + 5] = head
    return (
        torch.frombuffer(table, dtype=torch.int32).view(turns, workers, 8)
        if turns
        else torch.empty(0, workers, 8, dtype=torch.int32)
    )


def variant_of(heads: int, kv_heads: int, dtype: torch.dtype, block_size: int) -> Variant:
    """What computes these: two blocks share K and V where an even number of heads reads each KV head."""
    return Variant(dtype, block_size, _blocks(heads // kv_heads) == 2)


def _blocks(per_kv_head: int) -> int:
    """Of a cluster, a head each."""
    return 2 - per_kv_head % 2


def prepare(
    device: torch.device, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, block_size: int, folder: Path
) -> bool:
    """Compile (or find in `folder`) and load the kernel; whether prompts use it. Where it fails, the log says why, and
    the other kernels compute all prompts."""
    if not on_hopper(device) or not fits(head_dim, block_size, dtype, dtype):
        return False
    try:
        load(device, variant_of(heads, kv_heads, dtype, block_size), folder)
    except (CudaError, OSError) as error:
        log.warning("prompts use the vendor's attention and Triton's: %s", error)
        return False
    return True


def load(device: torch.device, variant: Variant, folder: Path) -> None:
    """One variant. Raises CudaError or OSError where the compiler or the driver cannot be used."""
    if (device, variant) not in _kernels:
        with torch.cuda.device(device):
            torch.zeros(1, device=device)  # torch's context is current from now on
            code = compiled(source(), options(variant), folder)
            _kernels[device, variant] = Kernel(code, "hopper_attention", SHARED_BYTES)


def takes(q: Tensor, kv: Tensor, meta: AttentionMetadata) -> bool:
    """Whether `attention` computes the prompts of this step: it is loaded for such a cache, the host knows the lengths,
    and not too much of its tiles would be empty."""
    return (
        (q.device, variant_of(q.shape[1], kv.shape[1], q.dtype, kv.shape[3])) in _kernels
        and fits(q.shape[2], kv.shape[3], q.dtype, kv.dtype)
        and kv.is_contiguous()
        and q.is_contiguous()
        and meta.query_lens is not None
        and meta.seq_lens_list is not None
        and meta.device_rows is None
        and _pays(meta, q.shape[1], kv.shape[1])
    )


def _pays(meta: AttentionMetadata, heads: int, kv_heads: int) -> bool:
    found = meta.plan_cache.get("share")
    if found is None:
        per_kv_head = heads // kv_heads
        prompts = [lens[meta.num_decodes :] for lens in meta.lengths()]
        found = meta.plan_cache["share"] = useful_share(prompts[0], prompts[1], per_kv_head, _blocks(per_kv_head))
    share: float = found
    return share >= _LEAST_SHARE


def attention(q: Tensor, kv: Tensor, meta: AttentionMetadata, scale: float, out: Tensor, first: int) -> None:
    """Causal attention of the rows from `first` on, of any number of query tokens each, into their part of `out`
    [T, Hq, 128], contiguous; `q` [T, Hq, 128] and `kv` [2, Hkv, N, bs, 128] as `attention.paged_attention` takes them.
    `scale` > 0. Other rows' outputs are left as they are. FlashAttention-3 (arXiv 2407.08608)."""
    heads, kv_heads, block_size = q.shape[1], kv.shape[1], kv.shape[3]
    variant = variant_of(heads, kv_heads, q.dtype, block_size)
    each = _blocks(heads // kv_heads)
    from .decode_attention_triton import sm_count  # a CPU does without Triton

    workers = sm_count(q.device) // each
    items = meta.plan_cache.get("items")
    if items is None:
        table = plan(*meta.lengths(), first, heads, kv_heads, each, workers)
        items = meta.plan_cache["items"] = table.pin_memory().to(q.device, non_blocking=True)
    if items.shape[0] == 0:
        return
    cache, box = kv.view(-1, DIM), min(block_size, KEYS)
    maps = [
        kept_map(TensorMap.of_rows, q.view(q.shape[0], -1), ROWS // 2),
        kept_map(TensorMap.of_rows, cache, box),
        kept_map(TensorMap.of_halves, cache, box),
    ]
    sizes = items.shape[0], heads, kv_heads, meta.block_tables.stride(0), cache.shape[0]
    arguments = [*maps, out, items, meta.block_tables, *sizes, scale * _LOG2E]
    _kernels[q.device, variant].launch(each * workers, _THREADS, arguments)
