"""Every Triton kernel against its float32 reference on a GPU, over many shapes. Used by `bench_kernels.py`.

The error is |got - expected| / |expected| (norms over all elements). Outputs are poisoned: the allocator is handed NaN
memory of the output's size before each call; unused cache slots hold NaN too.
"""

import itertools
import random
from collections.abc import Callable, Iterator

import torch

from kvern_kernels import (
    AttentionMetadata,
    DecodeWorkspace,
    activation,
    activation_triton,
    attention,
    attention_triton,
    norm,
    norm_triton,
    rotary,
    rotary_triton,
    split_kv,
)
from kvern_kernels.decode_attention_triton import sm_count

LIMIT = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
Check = tuple[str, Callable[[], float], float]


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (got.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)
    return float(difference) if torch.isfinite(difference) else float("inf")


def poison(like: torch.Tensor) -> None:
    torch.full_like(like, float("nan"))


def paged_case(query_lens, seq_lens, heads, kv_heads, dim, block_size, dtype, seed=0):
    """Random q, cache and metadata on the GPU; blocks in random order, unused slots NaN."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    need = [-(-length // block_size) for length in seq_lens]
    ids = list(range(sum(need) + 3))
    rng.shuffle(ids)
    tables = [[ids.pop() for _ in range(count)] for count in need]
    meta = AttentionMetadata.build(query_lens, seq_lens, tables, block_size, "cuda")
    kv = torch.full((2, kv_heads, sum(need) + 3, block_size, dim), float("nan"), dtype=dtype, device="cuda")
    flat = kv.view(2, kv_heads, -1, dim)
    for length, table in zip(seq_lens, tables, strict=True):
        first = torch.tensor(table, device="cuda").mul_(block_size)
        slots = (first[:, None] + torch.arange(block_size, device="cuda")).flatten()[:length]
        flat[:, :, slots] = torch.randn(2, kv_heads, length, dim, dtype=dtype, device="cuda")
    q = torch.randn(sum(query_lens), heads + 2 * kv_heads, dim, dtype=dtype, device="cuda")[:, :heads] * 2
    return q, kv, meta


STEPS = {
    "decode": ([1] * 6, [1, 17, 383, 4095, 64, 1000]),
    "decode_long": ([1, 1], [32768, 5]),
    "verify": ([8, 1, 3, 5], [8, 300, 2049, 131]),
    "mixed": ([1, 1, 200, 9, 33], [129, 2000, 200, 500, 33]),
    "chunk": ([300], [4396]),
    "fresh_long": ([1, 4700], [77, 4700]),
    "fresh_whole": ([4096], [4096]),
}


def attention_check(step, heads, kv_heads, dim, block_size, dtype):
    def run() -> float:
        query_lens, seq_lens = STEPS[step]
        q, kv, meta = paged_case(query_lens, seq_lens, heads, kv_heads, dim, block_size, dtype)
        expected = attention.paged_attention(q.float(), kv.float(), meta, dim**-0.5)
        worst = 0.0
        for _ in range(3):  # again: no run depends on what the last one left behind
            poison(q.contiguous())
            worst = max(worst, error(attention_triton.paged_attention(q, kv, meta, dim**-0.5), expected))
        return worst

    name = f"attention {step} Hq{heads} Hkv{kv_heads} D{dim} bs{block_size} {str(dtype)[6:]}"
    return name, run, LIMIT[dtype]


def graph_check() -> float:
    """A captured decode step of 8 padded rows, replayed over changed lengths, tables and caches."""
    q, kv, meta = paged_case([1] * 8, [4096] * 8, 32, 8, 128, 16, torch.bfloat16)
    kv.copy_(torch.randn_like(kv))
    pieces = split_kv.most_pieces(8, 4096, 8, sm_count(q.device))
    meta.workspace = DecodeWorkspace.allocate(pieces, 32, 128, 1, "cuda")
    q = q.contiguous()
    attention_triton.paged_attention(q, kv, meta, 128**-0.5)
    graph = torch.cuda.CUDAGraph()
    meta.plan_cache.clear()  # a step of its own: what it cuts is worked out at each replay
    with torch.cuda.graph(graph):
        out = attention_triton.paged_attention(q, kv, meta, 128**-0.5)
    worst = 0.0
    for seed in range(6):
        rng = random.Random(seed)
        lengths = [rng.choice([0, 1, 63, 64, 700, 4096]) for _ in range(7)] + [rng.randint(1, 4096)]
        q.copy_(torch.randn_like(q))
        meta.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        meta.seq_lens_list = None
        out.fill_(float("nan"))
        graph.replay()
        worst = max(worst, error(out, attention.paged_attention(q.float(), kv.float(), meta, 128**-0.5)))
    return worst


def norm_check(rows, width, dtype):
    def run() -> float:
        x = torch.randn(rows, width, dtype=dtype, device="cuda")
        residual, weight = torch.randn_like(x), torch.randn(width, dtype=dtype, device="cuda")
        total = (x.float() + residual.float()).to(dtype)
        poison(x)
        got, got_sum = norm_triton.add_rms_norm(x, residual, weight, 1e-5)
        worst = max(error(got_sum, total), error(got, norm.rms_norm(total.float(), weight.float(), 1e-5)))
        poison(x)
        plain = norm_triton.rms_norm(x, weight, 1e-5)
        return max(worst, error(plain, norm.rms_norm(x.float(), weight.float(), 1e-5)))

    return f"norm {rows}x{width} {str(dtype)[6:]}", run, LIMIT[dtype]


def silu_check(rows, width, dtype):
    def run() -> float:
        x = torch.randn(rows, 2 * width, dtype=dtype, device="cuda") * 3
        poison(x[:, :width])
        return error(activation_triton.silu_and_mul(x), activation.silu_and_mul(x.float()))

    return f"silu {rows}x{width} {str(dtype)[6:]}", run, LIMIT[dtype]


def rope_check(tokens, heads, kv_heads, dim, block_size, dtype, normed):
    def run() -> float:
        qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, dtype=dtype, device="cuda")
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
        angles = torch.rand(4096, dim // 2, device="cuda") * 6
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
        positions = torch.randint(0, 4096, (tokens,), device="cuda")
        blocks = -(-tokens // block_size) + 2
        slots = torch.randperm(blocks * block_size, device="cuda")[:tokens]
        slots[::7] = -1
        norms = [torch.randn(dim, dtype=dtype, device="cuda") for _ in range(2)] if normed else [None, None]
        kv = torch.zeros(3, 2, kv_heads, blocks, block_size, dim, dtype=dtype, device="cuda")
        expected_kv = kv.clone()
        expected = rotary.rope_and_cache(q, k, v, cos_sin, positions, expected_kv[1], slots, *norms)
        poison(expected)
        got = rotary_triton.rope_and_cache(q, k, v, cos_sin, positions, kv[1], slots, *norms)
        return max(error(got, expected), error(kv, expected_kv))

    return f"rope T{tokens} Hq{heads} Hkv{kv_heads} D{dim} norm={normed} {str(dtype)[6:]}", run, LIMIT[dtype]


def all_checks() -> Iterator[Check]:
    """Ordered so that equal kernels lie apart: shards compile different ones."""
    half, full = torch.bfloat16, torch.float32
    shapes = [(32, 8, 128), (8, 8, 64), (9, 3, 64), (32, 4, 96), (16, 1, 128), (8, 4, 256), (64, 8, 128), (12, 12, 96)]
    for (heads, kv_heads, dim), block_size in zip(shapes, itertools.cycle((16, 32, 64))):
        for step in ("decode", "decode_long", "verify", "mixed", "chunk"):
            yield attention_check(step, heads, kv_heads, dim, block_size, half)
    for block_size in (16, 32, 64):
        for step in ("decode", "mixed"):
            yield attention_check(step, 32, 8, 128, block_size, half)
    for heads, kv_heads, dim, block_size in ((32, 8, 128, 16), (9, 3, 64, 16), (4, 2, 256, 32), (6, 1, 96, 64)):
        for step in ("decode", "verify", "mixed"):
            yield attention_check(step, heads, kv_heads, dim, block_size, full)
    for step in ("fresh_long", "fresh_whole"):
        yield attention_check(step, 8, 2, 128, 16, half)
        yield attention_check(step, 6, 2, 64, 32, torch.float16)
    yield attention_check("mixed", 32, 8, 128, 16, torch.float16)
    yield attention_check("decode", 10, 2, 80, 16, half)
    yield "captured decode over changed rows", graph_check, LIMIT[half]
    for dtype in (full, half):
        for rows, width in ((1, 4096), (32, 576), (257, 4096), (3, 100), (2, 16384)):
            yield norm_check(rows, width, dtype)
        for rows, width in ((1, 14336), (33, 1536), (3, 77)):
            yield silu_check(rows, width, dtype)
        for normed in (False, True):
            yield rope_check(300, 32, 8, 128, 16, dtype, normed)
            yield rope_check(33, 9, 3, 64, 16, dtype, normed)
            yield rope_check(5, 10, 2, 80, 32, dtype, normed)
