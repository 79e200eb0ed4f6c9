"""Times of the kernels at Llama-3-8B shapes on a GPU: one CUDA graph a case, over enough distinct data that nothing is
found in the L2 cache. Used by `bench_kernels.py`.
"""

import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F

from kvern_kernels import (
    AttentionMetadata,
    activation_triton,
    attention_triton,
    norm_triton,
    rotary_triton,
    split_kv,
)
from kvern_kernels.decode_attention_triton import DecodeTiles, decode_attention
from kvern_kernels.gather_triton import gather_contexts
from kvern_kernels.prefill_attention_triton import PrefillTiles, prefill_attention

sys.path.insert(0, str(Path(__file__).parent.parent))
from workloads import sharegpt_like

COPY_TB_S, MATMUL_TFLOP_S = 4.3, 790.0  # the card's ceilings as measured, see docs/performance-kernels.md
HEADS, KV_HEADS, DIM, HIDDEN, INTERMEDIATE = 32, 8, 128, 4096, 14336
DTYPE = torch.bfloat16
ROTATE_BYTES = 300e6  # five times the L2


@dataclass
class Timing:
    """One case: `build` makes the data and returns the calls that one graph runs, each over other data."""

    kernel: str
    case: str
    build: Callable[[], list[Callable[[], object]]]
    bytes_moved: float = 0.0
    flops: float = 0.0
    config: dict = field(default_factory=dict)

    def measure(self) -> dict:
        us = time_calls(self.build())
        torch.cuda.empty_cache()
        result = {"kernel": self.kernel, "case": self.case, "us": round(us, 2), **self.config}
        memory_us, compute_us = self.bytes_moved / COPY_TB_S / 1e6, self.flops / MATMUL_TFLOP_S / 1e6
        if self.bytes_moved:
            result["tb_s"] = round(self.bytes_moved / us / 1e6, 3)
        if self.flops:
            result["tflop_s"] = round(self.flops / us / 1e6, 1)
        result["floor_us"] = round(max(memory_us, compute_us), 2)
        result["percent_of_ceiling"] = round(100 * max(memory_us, compute_us) / us, 1)
        return result


def time_calls(calls: list[Callable[[], object]]) -> float:
    """Microseconds a call: the median of 7 timings of a graph of all calls, each at least 3 ms long."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    replays = 1
    timings = []
    for attempt in range(9):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        took = start.elapsed_time(end)
        if attempt == 1:
            replays = max(1, math.ceil(3.0 / max(took, 1e-3)))
        elif attempt > 1:
            timings.append(took / replays)
    del kept
    return statistics.median(timings) * 1000 / len(calls)


def copies(bytes_each: float) -> int:
    """How many distinct data sets a case rotates through."""
    return max(1, min(64, math.ceil(ROTATE_BYTES / max(bytes_each, 1))))


def paged(query_lens: list[int], seq_lens: list[int], block_size: int, sets: int):
    """q, metadata and `sets` layers of cache; blocks in random order."""
    generator = torch.Generator().manual_seed(0)
    need = [-(-length // block_size) for length in seq_lens]
    order = torch.randperm(sum(need), generator=generator, dtype=torch.int32)
    tables = torch.zeros(len(need), max(need), dtype=torch.int32)
    for row, ids in enumerate(order.split(need)):
        tables[row, : need[row]] = ids
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    meta = AttentionMetadata(
        query_start=starts.cuda(),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32).cuda(),
        block_tables=tables.cuda(),
        slots=torch.zeros(sum(query_lens), dtype=torch.int64).cuda(),
        num_decodes=sum(count == 1 for count in query_lens),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        query_lens=query_lens,
        seq_lens_list=seq_lens,
    )
    q = torch.randn(sum(query_lens), HEADS, DIM, dtype=DTYPE, device="cuda")
    arena = torch.empty(sets, 2, KV_HEADS, sum(need), block_size, DIM, dtype=DTYPE, device="cuda")
    for layer in arena:
        layer.normal_()
    return q, arena, meta


def decode(
    name: str,
    seq_lens: list[int],
    block_size: int = 16,
    splits: int | None = None,
    tiles: DecodeTiles | None = None,
) -> Timing:
    rows = len(seq_lens)
    moved = 2.0 * KV_HEADS * DIM * 2 * sum(seq_lens) + 2.0 * rows * HEADS * DIM * 2
    piece = split_kv.ceil_div(max(seq_lens), splits) if splits else None

    def build() -> list[Callable[[], object]]:
        q, arena, meta = paged([1] * rows, seq_lens, block_size, copies(moved))
        out = torch.empty_like(q)

        def call(kv: torch.Tensor) -> Callable[[], object]:
            return lambda: decode_attention(q, kv, meta, DIM**-0.5, out, rows, 1, piece, tiles)

        return [call(kv) for kv in arena]

    config = {"block_size": block_size} | ({"splits": splits} if splits else {})
    if tiles:
        config |= {"tiles": [tiles.block_n, tiles.num_warps, tiles.num_stages]}
    return Timing("decode_attention", name, build, moved, 0.0, config)


def gathered(kv: torch.Tensor, meta: AttentionMetadata) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as [rows, Hkv, tokens, D] copies; all rows equally long."""
    rows = meta.num_rows
    picked = kv.index_select(2, meta.block_tables.view(-1)).view(2, KV_HEADS, rows, -1, DIM)[
        :, :, :, : meta.max_seq_len
    ]
    keys, values = picked.transpose(1, 2)
    return keys, values


def decode_by_sdpa(name: str, seq_lens: list[int], block_size: int) -> Timing:
    moved = 2.0 * KV_HEADS * DIM * 2 * sum(seq_lens)

    def build() -> list[Callable[[], object]]:
        q, arena, meta = paged([1] * len(seq_lens), seq_lens, block_size, copies(moved))

        def call(kv: torch.Tensor) -> object:
            keys, values = gathered(kv, meta)
            # The query heads of a KV head as the query dimension: no copy of K and V for them.
            return F.scaled_dot_product_attention(q.view(len(seq_lens), KV_HEADS, -1, DIM), keys, values)

        return [lambda kv=kv: call(kv) for kv in arena]

    return Timing("decode_by_gather_and_sdpa", name, build, moved, 0.0, {"block_size": block_size})


def visible_pairs(query_lens: list[int], seq_lens: list[int]) -> float:
    return sum(
        count * (length - count) + count * (count + 1) / 2 for count, length in zip(query_lens, seq_lens, strict=True)
    )


PREFILLS = {
    "fresh 8k": ([8192], [8192]),
    "64 x 1k": ([1024] * 64, [1024] * 64),
    "2k after 6k": ([2048], [8192]),
    "fresh 8,000 beside 8 decodes": ([1] * 8 + [8000], [2000] * 8 + [8000]),
}


def prefill(name: str, block_size: int, tiles: PrefillTiles | None = None) -> Timing:
    query_lens, seq_lens = PREFILLS[name]

    def build() -> list[Callable[[], object]]:
        q, arena, meta = paged(query_lens, seq_lens, block_size, 2)
        out = torch.empty_like(q)
        return [lambda kv=kv: prefill_attention(q, kv, meta, DIM**-0.5, out, 0, tiles) for kv in arena]

    config = {"block_size": block_size}
    if tiles:
        config |= {"tiles": [tiles.block_m, tiles.block_n, tiles.num_warps, tiles.num_stages]}
    flops = 4.0 * HEADS * DIM * visible_pairs(query_lens, seq_lens)
    return Timing("prefill_attention", name, build, 0.0, flops, config)


PLAIN_PREFILLS = ("fresh 8k", "64 x 1k", "2k after 6k")


def dispatched(name: str) -> Timing:
    """What the engine calls: the choice between our kernel and the vendor's included."""
    query_lens, seq_lens = PREFILLS[name]

    def build() -> list[Callable[[], object]]:
        q, arena, meta = paged(query_lens, seq_lens, 16, 2)
        return [lambda kv=kv: attention_triton.paged_attention(q, kv, meta, DIM**-0.5) for kv in arena]

    return Timing("paged_attention", name, build, 0.0, 4.0 * HEADS * DIM * visible_pairs(query_lens, seq_lens))


def prefill_by_vendor(name: str, vendor: str, block_size: int = 16) -> Timing:
    """The gather of K and V and torch's attention: `flash` (FlashAttention-2, aligned at the end) or `cudnn`."""
    query_lens, seq_lens = PREFILLS[name]

    def build() -> list[Callable[[], object]]:
        q, arena, meta = paged(query_lens, seq_lens, block_size, 2)
        rows = len(query_lens)
        query = q.view(rows, -1, HEADS, DIM).transpose(1, 2)

        def call(kv: torch.Tensor) -> object:
            keys, values = gather_contexts(kv, meta.block_tables, meta.seq_lens, 0, rows, meta.max_seq_len)
            if vendor == "flash":
                op = torch.ops.aten._scaled_dot_product_flash_attention
                return op(query, keys, values, 0.0, True, False, scale=DIM**-0.5)
            op = torch.ops.aten._scaled_dot_product_cudnn_attention
            return op(query, keys, values, None, True, 0.0, True, False, scale=DIM**-0.5)

        return [lambda kv=kv: call(kv) for kv in arena]

    flops = 4.0 * HEADS * DIM * visible_pairs(query_lens, seq_lens)
    return Timing(f"prefill_by_gather_and_{vendor}", name, build, 0.0, flops, {"block_size": block_size})


def gather_alone(name: str, block_size: int) -> Timing:
    query_lens, seq_lens = PREFILLS[name]
    moved = 2 * 2.0 * KV_HEADS * DIM * 2 * sum(seq_lens)

    def build() -> list[Callable[[], object]]:
        _, arena, meta = paged(query_lens, seq_lens, block_size, copies(moved))
        rows, length = len(query_lens), meta.max_seq_len
        return [lambda kv=kv: gather_contexts(kv, meta.block_tables, meta.seq_lens, 0, rows, length) for kv in arena]

    return Timing("gather", name, build, moved, 0.0, {"block_size": block_size})


def elementwise(rows: int) -> Iterator[Timing]:
    size = rows * HIDDEN * 2.0

    def norm() -> list[Callable[[], object]]:
        sets = copies(4 * size)
        x, residual = (torch.randn(sets, rows, HIDDEN, dtype=DTYPE, device="cuda") for _ in range(2))
        weight = torch.randn(HIDDEN, dtype=DTYPE, device="cuda")
        return [lambda i=i: norm_triton.add_rms_norm(x[i], residual[i], weight, 1e-5) for i in range(sets)]

    yield Timing("add_rms_norm", f"T{rows}", norm, 4 * size)

    qkv_size = rows * (HEADS + 2 * KV_HEADS) * DIM * 2.0

    def rope() -> list[Callable[[], object]]:
        sets = copies(2 * qkv_size)
        qkv = torch.randn(sets, rows, HEADS + 2 * KV_HEADS, DIM, dtype=DTYPE, device="cuda")
        cos_sin = torch.randn(8192, DIM, device="cuda")
        positions = torch.arange(rows, device="cuda") % 8192
        blocks = max(64, -(-rows // 16) * 4)
        slots = torch.randperm(blocks * 16, device="cuda")[:rows]
        kv = torch.zeros(sets, 2, KV_HEADS, blocks, 16, DIM, dtype=DTYPE, device="cuda")

        def call(i: int) -> object:
            q, k, v = qkv[i].split((HEADS, KV_HEADS, KV_HEADS), dim=1)
            return rotary_triton.rope_and_cache(q, k, v, cos_sin, positions, kv[i], slots)

        return [lambda i=i: call(i) for i in range(sets)]

    yield Timing("rope_and_cache", f"T{rows}", rope, 2 * qkv_size)

    gate_size = rows * INTERMEDIATE * 2.0

    def silu() -> list[Callable[[], object]]:
        sets = copies(3 * gate_size)
        x = torch.randn(sets, rows, 2 * INTERMEDIATE, dtype=DTYPE, device="cuda")
        return [lambda i=i: activation_triton.silu_and_mul(x[i]) for i in range(sets)]

    yield Timing("silu_and_mul", f"T{rows}", silu, 3 * gate_size)


def uneven(rows: int, longest: int) -> list[int]:
    """Context lengths spread evenly over 64..longest, in mixed order."""
    return [64 + (i * 37 % rows) * (longest - 64) // max(rows - 1, 1) for i in range(rows)]


def chats(rows: int, seed: int = 1) -> list[int]:
    """Context lengths of `rows` running requests of the sharegpt workload, at a moment of a steady load."""
    rng = random.Random(seed)
    lengths = [(len(prompt), most) for prompt, most in sharegpt_like(2000)]
    picked = rng.choices(lengths, weights=[most for _, most in lengths], k=rows)
    return [prompt + rng.randint(1, most) for prompt, most in picked]


DECODE_TILES = [DecodeTiles(*t) for t in ((64, 2, 5), (64, 4, 3), (32, 2, 4), (128, 4, 3), (32, 1, 4), (64, 1, 4))]
PREFILL_TILES = [
    PrefillTiles(*t) for t in ((128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3), (128, 64, 4, 3), (128, 64, 8, 2))
]


def headline() -> Iterator[Timing]:
    """The cases that are reported, with the default choices."""
    for block_size in (16, 32, 64):
        for rows in (1, 32, 128, 256):
            for context in (384, 4096, 8192):
                yield decode(f"b{rows} ctx{context}", [context] * rows, block_size)
        yield decode("b64 ctx 64..8192", uneven(64, 8192), block_size)
        for rows in (16, 32, 40, 64, 128, 256):
            yield decode(f"b{rows} of chats", chats(rows), block_size)
    for name in PREFILLS:
        yield dispatched(name)
    for name in PLAIN_PREFILLS:
        for block_size in (16, 64):
            yield prefill(name, block_size)
        yield prefill_by_vendor(name, "flash")
        if name != "2k after 6k":  # cuDNN's causal mask is aligned at the start
            yield prefill_by_vendor(name, "cudnn")
        yield gather_alone(name, 16)
    for rows in (1, 32, 256, 8192):
        yield from elementwise(rows)
    yield decode_by_sdpa("b32 ctx4096", [4096] * 32, 16)


def sweep() -> Iterator[Timing]:
    """Splits and tiles around the defaults."""
    cases = [(rows, [context] * rows) for rows, context in SWEPT] + [(64, uneven(64, 8192)), (32, uneven(32, 2048))]
    for rows, seq_lens in cases:
        name = f"b{rows} ctx{seq_lens[0]}" if len(set(seq_lens)) == 1 else f"b{rows} ctx 64..{max(seq_lens)}"
        for splits in (1, 2, 4, 8, 16, 32, 64):
            if splits == 1 or (max(seq_lens) >= splits * 64 and rows * splits <= 512):
                yield decode(name, seq_lens, 16, splits)
        for tiles in DECODE_TILES:
            yield decode(name, seq_lens, 16, None, tiles)
    for name in PLAIN_PREFILLS:
        for tiles in PREFILL_TILES:
            for block_size in (16, 64):
                yield prefill(name, block_size, tiles)


CONTEXT_TILES = [
    DecodeTiles(*t)
    for t in ((128, 4, 3), (128, 4, 2), (128, 8, 3), (64, 4, 3), (64, 4, 2), (64, 2, 3), (32, 4, 4), (32, 2, 4))
]


def contexts() -> Iterator[Timing]:
    """Tiles and splits at 32 rows, from short to long contexts, and at one row."""
    for rows, context, splits in (
        (32, 216, (1, 2)), (32, 384, (1,)), (32, 1024, (1, 2)), (32, 4088, (2, 3, 4, 8)), (1, 216, (2,)),
    ):  # fmt: skip
        for split in splits:
            for tiles in CONTEXT_TILES:
                yield decode(f"b{rows} ctx{context}", [context] * rows, 16, split, tiles)


SWEPT = [
    (1, 128), (1, 384), (1, 1024), (1, 4096), (1, 8192), (4, 384), (8, 384), (8, 4096), (16, 384), (16, 2048),
    (32, 384), (32, 1024), (32, 4096), (64, 384), (128, 384),
]  # fmt: skip
