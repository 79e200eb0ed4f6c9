"""Windows and soft caps: the reference against plain softmax over whole sequences, the CPU's attention against the
reference, and that nothing behind a window is read."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvern_kernels import (
    AttentionMetadata,
    attention,
    cpu_attention,
    cpu_plan,
    norm,
    paged_attention,
    plain_attention,
)
from kvern_kernels.attention import first_seen

torch.set_num_threads(1)


def batch(query_lens, seq_lens, *, window=None, heads=6, kv_heads=2, dim=16, block_size=4, consecutive=False, seed=0):
    """(q, kv, metadata): block tables of which the blocks that nobody sees are -1, and hold what would show."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    need = [-(-length // block_size) for length in seq_lens]
    ids = list(range(1, sum(need) + 2))
    if not consecutive:
        rng.shuffle(ids)
    tables = [[ids.pop(0) for _ in range(count)] for count in need]
    kv = torch.randn(2, kv_heads, sum(need) + 2, block_size, dim)
    for table, count, length in zip(tables, query_lens, seq_lens, strict=True):
        for index in range(first_seen(length, count, window, block_size)):
            kv[:, :, table[index]] = float("nan")
            table[index] = -1
    meta = AttentionMetadata.build(query_lens, seq_lens, tables, block_size)
    return torch.randn(sum(query_lens), heads, dim) * 3, kv, meta


def plain(q, kv, meta, scale, window, softcap):
    """Attention of each token by itself, over a context that is laid out in one piece."""
    out, token = [], 0
    for row, (count, length) in enumerate(zip(meta.query_lens, meta.seq_lens_list, strict=True)):
        for place in range(length - count, length):
            first = 0 if window is None else max(0, place - window + 1)
            slots = [int(meta.block_tables[row, p // 4]) * 4 + p % 4 for p in range(first, place + 1)]
            keys, values = kv.flatten(2, 3)[:, :, slots].repeat_interleave(q.shape[1] // kv.shape[1], dim=1)
            scores = torch.einsum("hd,hkd->hk", q[token], keys) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            out.append(torch.einsum("hk,hkd->hd", scores.softmax(-1), values))
            token += 1
    return torch.stack(out)


CASES = [
    ([1], [1]),
    ([1], [61]),
    ([1, 1, 1], [5, 90, 33]),
    ([9], [9]),
    ([9], [40]),
    ([1, 1, 3, 7, 1], [17, 4, 20, 7, 50]),
    ([12, 9, 16, 2, 1], [12, 30, 50, 2, 90]),
]


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 16])
@pytest.mark.parametrize(("query_lens", "seq_lens"), CASES)
def test_reference_is_plain_attention(query_lens, seq_lens, window, softcap):
    q, kv, meta = batch(query_lens, seq_lens, window=window)
    got = attention.paged_attention(q, kv, meta, 0.3, None, window, softcap)
    torch.testing.assert_close(got, plain(q, kv, meta, 0.3, window, softcap), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [1, 16, 300])
@pytest.mark.parametrize(("query_lens", "seq_lens"), [*CASES, ([1, 300], [700, 900]), ([600, 40], [600, 1000])])
def test_cpu_equals_reference(query_lens, seq_lens, window, softcap):
    for consecutive in (True, False):
        q, kv, meta = batch(query_lens, seq_lens, window=window, consecutive=consecutive)
        expected = attention.paged_attention(q, kv, meta, 0.3, None, window, softcap)
        got = cpu_attention.paged_attention(q, kv, meta, 0.3, None, window, softcap)
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)
        assert torch.equal(got, paged_attention(q, kv, meta, 0.3, None, window, softcap))


@pytest.mark.parametrize("most", [3000, 1 << 26])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("query_lens", "seq_lens"), CASES[2:])
def test_what_a_gpu_runs_equals_reference(query_lens, seq_lens, window, softcap, most, monkeypatch):
    monkeypatch.setattr(plain_attention, "MOST_NUMBERS", most)
    q, kv, meta = batch(query_lens, seq_lens, window=window)
    expected = attention.paged_attention(q, kv, meta, 0.3, None, window, softcap)
    got = plain_attention.paged_attention(q, kv, meta, 0.3, None, window, softcap)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_padded_rows_and_a_cache_in_fp8_on_a_gpu():
    q, kv, meta = batch([1, 1, 1, 4], [9, 7, 30, 25], window=8)
    meta.seq_lens[1] = 0
    meta.seq_lens_list = None
    stored, scales = kv.nan_to_num().to(torch.float8_e4m3fn), torch.rand(2, 2) + 0.5
    got = plain_attention.paged_attention(q.bfloat16(), stored, meta, 0.3, scales, 8, 2.0)
    expected = attention.paged_attention(q.bfloat16(), stored, meta, 0.3, scales, 8, 2.0)
    assert got.dtype == torch.bfloat16 and got[1].abs().sum() == 0
    torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 150)), min_size=1, max_size=8),
    window=st.integers(1, 130),
    softcap=st.sampled_from([None, 1.5]),
    seed=st.integers(0, 99),
)
def test_any_batch(rows, window, softcap, seed):
    query_lens = [count if seed % 3 else 1 for count, _ in rows]
    query_lens.sort(key=lambda count: count > 1)
    seq_lens = [count + cached for count, (_, cached) in zip(query_lens, rows, strict=True)]
    q, kv, meta = batch(query_lens, seq_lens, window=window, seed=seed, consecutive=seed % 2 == 0)
    expected = attention.paged_attention(q, kv, meta, 0.3, None, window, softcap)
    got = cpu_attention.paged_attention(q, kv, meta, 0.3, None, window, softcap)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)


def test_a_long_chunk_reads_its_window_not_all_of_its_context():
    plan = cpu_plan.plan_step([2000], [8000], [list(range(500))], 16, window=64)
    assert [call.count for call in plan.extends] == [256] * 7 + [208]
    assert max(call.length for call in plan.extends) <= 256 + 64 + 16
    assert not plan.prefixes


def test_a_capped_chunk_is_computed_in_pieces(monkeypatch):
    q, kv, meta = batch([50], [120])
    expected = cpu_attention.paged_attention(q, kv, meta, 0.3, None, None, 2.0)
    monkeypatch.setattr(cpu_attention, "_MOST_SCORES", 7 * 6 * 120)
    pieces = cpu_attention.paged_attention(q, kv, batch([50], [120])[2], 0.3, None, None, 2.0)
    torch.testing.assert_close(pieces, expected, atol=1e-6, rtol=1e-6)


def test_shared_prefixes_with_a_soft_cap():
    meta = AttentionMetadata.build([1] * 4, [1400 + i for i in range(4)], [[*range(350), 350 + i] for i in range(4)], 4)
    torch.manual_seed(1)
    kv, q = torch.randn(2, 2, 360, 4, 16), torch.randn(4, 6, 16)
    got = cpu_attention.paged_attention(q, kv, meta, 0.3, None, None, 2.0)
    torch.testing.assert_close(got, attention.paged_attention(q, kv, meta, 0.3, None, None, 2.0), atol=2e-5, rtol=2e-5)
    assert len(next(iter(meta.plan_cache.values())).prefixes) == 1


def test_a_norm_with_wider_weights():
    x, weight = torch.randn(5, 12).bfloat16(), 1 + 0.001 * torch.randn(12)
    got = norm.rms_norm(x, weight, 1e-6)
    wide = x.float() / (x.float().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, wide.bfloat16())
