"""The CPU's paged attention and its plan against the plain reference."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvern_kernels import AttentionMetadata, attention, cpu_attention, cpu_plan

torch.set_num_threads(1)


def make_tables(rng, seq_lens, block_size, num_blocks, shared=0, consecutive=False):
    """Block tables over distinct random (or consecutive) blocks; the first `shared` blocks are common to all rows."""
    ids = list(range(1, num_blocks))
    if not consecutive:
        rng.shuffle(ids)
    prefix = [ids.pop(0) for _ in range(shared)]
    return [prefix + [ids.pop(0) for _ in range(max(-(-length // block_size) - shared, 0))] for length in seq_lens]


def check(query_lens, seq_lens, *, heads=6, kv_heads=2, dim=16, block_size=4, dtype=torch.float32, seed=0, **tables):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    num_blocks = 2 + tables.get("shared", 0) + sum(-(-length // block_size) for length in seq_lens)
    block_tables = make_tables(rng, seq_lens, block_size, num_blocks, **tables)
    meta = AttentionMetadata.build(query_lens, seq_lens, block_tables, block_size)
    kv = torch.randn(2, kv_heads, num_blocks, block_size, dim, dtype=dtype)
    q = torch.randn(sum(query_lens), heads, dim, dtype=dtype) * 3
    expected = attention.paged_attention(q.float(), kv.float(), meta, dim**-0.5)
    for _ in range(2):  # the second call runs the cached plan
        got = cpu_attention.paged_attention(q, kv, meta, dim**-0.5)
        assert got.dtype == dtype and got.shape == q.shape
        tolerance = 2e-5 if dtype == torch.float32 else 4e-2
        torch.testing.assert_close(got.float(), expected, atol=tolerance, rtol=tolerance)
    return next(iter(meta.plan_cache.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("consecutive", [True, False])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [
        ([1], [1]),
        ([1], [37]),
        ([1], [700]),
        ([1, 1, 1], [5, 900, 33]),
        ([9], [9]),
        ([9], [30]),
        ([1, 1, 3, 7, 1], [17, 4, 20, 7, 5]),
        ([5, 5], [5, 640]),
        ([12, 9, 16, 2, 1], [12, 30, 250, 2, 90]),
    ],
)
def test_matches_reference(query_lens, seq_lens, consecutive, dtype):
    check(query_lens, seq_lens, consecutive=consecutive, dtype=dtype)


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size"), [(9, 3, 64, 16), (4, 4, 8, 1), (16, 1, 80, 32)])
def test_shapes(heads, kv_heads, dim, block_size):
    check([1, 1, 4], [40, 3, 21], heads=heads, kv_heads=kv_heads, dim=dim, block_size=block_size)


@pytest.mark.parametrize("consecutive", [True, False])
def test_shared_prefix_is_read_once(consecutive):
    step = check([1] * 14 + [3, 5], [170 + i for i in range(14)] + [171, 166], shared=40, consecutive=consecutive)
    assert len(step.prefixes) == 1
    assert step.prefixes[0].context.tokens == 160


def test_short_chunks_share_a_call():
    step = check([17, 20, 32, 18], [17, 20, 40, 100])
    assert len(step.calls) == 1


def test_short_shared_prefix_is_not_split_off():
    step = check([1, 1], [50, 60], shared=4)
    assert step.prefixes == []


def test_padded_rows_are_zero():
    meta = AttentionMetadata.build([1, 1], [5, 6], [[1, 2], [3, 4]], 4)
    meta.seq_lens[1] = 0
    meta.seq_lens_list = None
    kv, q = torch.randn(2, 1, 5, 4, 8), torch.randn(2, 2, 8)
    got = cpu_attention.paged_attention(q, kv, meta, 1.0)
    torch.testing.assert_close(got, attention.paged_attention(q, kv, meta, 1.0))
    assert got[1].abs().sum() == 0 and got[0].abs().sum() > 0


rows = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 1200)), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(rows=rows, block_size=st.sampled_from([1, 4, 16]), shared=st.integers(0, 60), seed=st.integers(0, 99))
def test_plan_covers_every_context_exactly_once(rows, block_size, shared, seed):
    query_lens = [count if seed % 2 else 1 for count, _ in rows]
    seq_lens = [
        count + cached + (shared * block_size if seed % 3 else 0)
        for (_, cached), count in zip(rows, query_lens, strict=True)
    ]
    rng = random.Random(seed)
    need = [-(-length // block_size) for length in seq_lens]
    tables = make_tables(rng, seq_lens, block_size, 2 + shared + sum(need), shared if seed % 3 else 0, seed % 5 == 0)
    plan = cpu_plan.plan_step(query_lens, seq_lens, tables, block_size)
    prefix = {token: call.blocks for call in plan.prefixes for token in call.tokens}
    assert len(prefix) == sum(len(call.tokens) for call in plan.prefixes)
    seen = {}
    assert all(count == 1 for call in plan.decodes for count in call.counts)
    for call in plan.decodes + plan.shorts:
        width = len(call.blocks[0])
        padded = 0
        for start, count, blocks, length in zip(call.starts, call.counts, call.blocks, call.lengths, strict=True):
            assert len(blocks) == width
            used = -(-length // block_size)
            padded += (width - used) * block_size
            shared_blocks = prefix.get(start, [])
            for token in range(start, start + count):
                assert token not in seen
                seen[token] = (shared_blocks + blocks[:used], length + len(shared_blocks) * block_size)
        total = width * block_size * len(call.starts)
        assert padded <= max(cpu_plan.FREE_PADDING_TOKENS, total // 4)
        assert len(call.starts) == 1 or total <= cpu_plan.MAX_GATHER_TOKENS
        assert max(call.counts) < 2 * min(call.counts) or max(call.counts) == 2 * min(call.counts)
    for call in plan.extends:
        shared_blocks = prefix.get(call.start, [])
        for i in range(call.count):
            seen[call.start + i] = (shared_blocks + call.blocks, call.length + len(shared_blocks) * block_size)
    token = 0
    for count, length, table in zip(query_lens, seq_lens, tables, strict=True):
        for _ in range(count):
            assert seen.pop(token) == (table[: -(-length // block_size)], length)
            token += 1
    assert not seen


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "tables", "message"),
    [
        ([1, 1], [3], [[1]], "one entry a row, got 2, 1 and 1"),
        ([4], [3], [[1]], r"row 0: query_lens must be in 1\.\.3 \(its seq_len\), got 4"),
        ([1], [9], [[1, 2]], "row 0: 9 tokens need 3 blocks of 4, its block table has 2"),
    ],
)
def test_metadata_errors_say_what_would_fit(query_lens, seq_lens, tables, message):
    with pytest.raises(ValueError, match=message):
        AttentionMetadata.build(query_lens, seq_lens, tables, 4)
