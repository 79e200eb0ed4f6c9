"""The FP8 kernels against their references: the KV cache in FP8, and weights with a scale an output channel.

Run as `triton_cases.py` is, by `test_triton_kernels.py` in a process of its own.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parent))
pytest.importorskip("triton")

import triton
import triton.language as tl
from triton_cases import DEVICE, VENDOR_STEPS, Case, close, same_rows

from kvern_kernels import (
    AttentionMetadata,
    DecodeWorkspace,
    DeviceRows,
    ScaledRows,
    attention,
    attention_triton,
    fp8,
    fp8_triton,
    int8,
    int8_triton,
    kv_cache,
    paged_triton,
    rotary,
    rotary_triton,
    vendor_attention,
)
from kvern_kernels.decode_attention_triton import DecodeTiles, decode_attention
from kvern_kernels.gather_triton import gather_contexts
from kvern_kernels.prefill_attention_triton import PrefillTiles, prefill_attention


class Fp8Case(Case):
    """A `Case` whose cache is in FP8, each KV head with scales of its own; unused slots hold NaN."""

    def __init__(self, query_lens, seq_lens, dtype=torch.float16, **shape):
        super().__init__(query_lens, seq_lens, dtype=dtype, **shape)
        self.kv_scales = torch.rand(2, self.kv.shape[1], device=DEVICE) * 0.02 + 0.01
        self.kv = (self.kv.float() / self.kv_scales[:, :, None, None, None]).to(fp8.FP8)

    def expected(self):
        return attention.paged_attention(self.q, self.kv, self.meta, self.scale, self.kv_scales)

    def got(self):
        return attention_triton.paged_attention(self.q, self.kv, self.meta, self.scale, self.kv_scales)


@triton.jit
def _halves(words_ptr, even_ptr, odd_ptr, COUNT: tl.constexpr):
    offsets = tl.arange(0, COUNT)
    words = tl.load(words_ptr + offsets)
    even, odd = paged_triton.fp8_numbers(words)
    tl.store(even_ptr + offsets, even)
    tl.store(odd_ptr + offsets, odd)


def test_every_number_of_fp8_is_read_exactly():
    low = torch.arange(256, dtype=torch.int32)
    words = torch.stack((low, low.flip(0)), dim=1).to(torch.uint8).view(torch.int16).flatten().to(DEVICE)
    even, odd = (torch.empty(256, dtype=torch.float16, device=DEVICE) for _ in range(2))
    _halves[(1,)](words, even, odd, COUNT=256)
    exact = low.to(torch.uint8).view(fp8.FP8).float().to(DEVICE)
    number = ~exact.isnan()
    assert int(number.sum()) == 254
    assert torch.equal(even.float()[number], exact[number])
    assert torch.equal(odd.float().flip(0)[number], exact[number])


@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [([1], [1]), ([1, 1, 1], [5, 300, 128]), ([9, 40], [9, 70]), ([1, 1, 20, 3], [33, 1, 20, 19])],
)
@pytest.mark.parametrize("block_size", [4, 16, 64])
def test_mixed_steps(query_lens, seq_lens, block_size):
    case = Fp8Case(query_lens, seq_lens, block_size=block_size)
    close(case.got(), case.expected())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_query_types(dtype):
    case = Fp8Case([1, 1, 12], [40, 150, 30], dtype=dtype)
    got, expected = case.got().float(), case.expected().float()
    assert float((got - expected).norm() / expected.norm()) < 5e-3  # products are in float16


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(9, 3, 64), (3, 3, 80), (16, 1, 16), (7, 1, 96), (2, 2, 128), (2, 1, 256)]
)
def test_head_shapes(heads, kv_heads, dim):
    case = Fp8Case([1, 10], [35, 50], heads=heads, kv_heads=kv_heads, dim=dim)
    close(case.got(), case.expected())


@pytest.mark.parametrize("piece", [128, 1024])
@pytest.mark.parametrize("query_len", [1, 8])
def test_pieces_and_verification(piece, query_len):
    lens = [query_len] * 3 if query_len == 1 else [query_len, 1, 2]
    case = Fp8Case(lens, [400, 40, 131], heads=6, kv_heads=2 if query_len < 8 else 1)
    work = case.meta.workspace = DecodeWorkspace.allocate(12, 6, 16, query_len, DEVICE)
    expected = case.expected()
    work.partial.fill_(float("nan"))
    work.stats.fill_(float("nan"))
    for block_n in (32, 128) if query_len == 1 else (128,):
        out = torch.full_like(expected, float("nan"))
        tiles = DecodeTiles(block_n, 4, 2)
        common = (case.q, case.kv, case.meta, case.scale, out, 3, query_len, piece, tiles)
        decode_attention(*common, kv_scales=case.kv_scales)
        close(out, expected)


def blocks_close(got, expected):
    """Rows quantized by blocks agree but for single steps of rounding: scales are those of the same largest elements,
    and a step of E4M3 is up to a sixteenth of a number (an eighth where the interpreter truncates)."""
    assert got.values.dtype == fp8.FP8 and got.scales.stride(0) == 1
    torch.testing.assert_close(got.scales, expected.scales, rtol=4e-3, atol=1e-12)
    a, b = got.restore(torch.float32), expected.restore(torch.float32)
    assert not a.isnan().any()
    assert float((a - b).abs().max() / b.abs().max().clamp(min=1e-9)) < (0.07 if DEVICE == "cuda" else 0.15)
    assert float((a - b).norm() / b.norm().clamp(min=1e-9)) < (5e-3 if DEVICE == "cuda" else 0.1)


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "piece"),
    [
        ([1], [1], None),
        ([1, 1, 1], [5, 300, 128], 128),
        ([1] * 9, [700, *range(1, 9)], 128),
        ([8, 1, 3], [400, 9, 70], 128),
    ],
)
def test_attention_gives_rows_quantized_by_blocks(query_lens, seq_lens, piece):
    """With and without pieces that are merged; all memory is poisoned."""
    case = Case(query_lens, seq_lens, dtype=torch.float16, heads=4, kv_heads=2, dim=fp8.BLOCK)
    expected = attention.paged_attention_blocks(case.q, case.kv, case.meta, case.scale)
    assert attention_triton.gives_blocks(case.kv, case.meta)
    if piece is None:
        got = attention_triton.paged_attention_blocks(case.q, case.kv, case.meta, case.scale)
        return blocks_close(got, expected)
    got = fp8.BlockScaledRows.empty(sum(query_lens), 4 * fp8.BLOCK, DEVICE)
    got.values.copy_(torch.full(got.values.shape, float("nan")))
    got.scales.fill_(float("nan"))
    work = case.meta.workspace = DecodeWorkspace.allocate(64, 4, fp8.BLOCK, max(query_lens), DEVICE)
    work.partial.fill_(float("nan")), work.stats.fill_(float("nan"))
    common = (case.q, case.kv, case.meta, case.scale, got.values.view(case.q.shape), len(query_lens), max(query_lens))
    decode_attention(*common, piece, out_scales=got.scales)
    return blocks_close(got, expected)


def test_padded_rows_quantized_by_blocks_are_zero():
    case = Case([1, 1], [70, 1], dtype=torch.float16, dim=fp8.BLOCK)
    case.meta.seq_lens[1:] = 0
    case.meta.block_tables[1:] = 2**30  # never read
    case.meta.seq_lens_list = None
    got = attention_triton.paged_attention_blocks(case.q, case.kv, case.meta, case.scale)
    assert got.values[1].float().abs().sum() == 0 and bool((got.scales[1] == fp8.TINY).all())


def test_which_steps_are_quantized_by_blocks():
    case, narrow = (Case([1, 8], [70, 9], dtype=torch.float16, dim=dim) for dim in (128, 64))
    assert attention_triton.gives_blocks(case.kv, case.meta)
    assert not attention_triton.gives_blocks(narrow.kv, narrow.meta)  # a block would be two heads
    alone = replace(case.meta, each_alone=True)
    mixed = replace(case.meta, device_rows=DeviceRows(case.meta.seq_lens, case.meta.seq_lens[:1], 1))
    prompt = replace(case.meta, max_query_len=9)
    assert not any(attention_triton.gives_blocks(case.kv, meta) for meta in (alone, mixed, prompt))
    narrow = Fp8Case([1, 8], [70, 9], dim=128)
    assert not attention_triton.gives_blocks(narrow.kv, narrow.meta)
    out = fp8.BlockScaledRows.empty(9, 4 * 128, DEVICE)
    common = narrow.q, narrow.kv, narrow.meta, narrow.scale, out.values.view(narrow.q.shape), 2, 8
    with pytest.raises(ValueError, match="over a cache in FP8 does not write E4M3"):
        decode_attention(*common, kv_scales=narrow.kv_scales, out_scales=out.scales)


def test_blocks_of_128_columns():
    """The reference: finer scales are nearer, zeros stay zeros, and the product is that of the restored rows."""
    torch.manual_seed(5)
    x = torch.randn(5, 384, device=DEVICE) * torch.logspace(-8, 0, 384, device=DEVICE)
    x[3] = 0
    by_blocks, by_rows = fp8.quantize_blocks(x), fp8.quantize_rows(x)
    assert by_blocks.scales.shape == (5, 3) and by_blocks.scales.stride() == (1, 8)
    assert by_blocks.restore(torch.float32)[3].abs().sum() == 0
    near = [(rows.restore(torch.float32) - x)[:, :128].norm() / x[:, :128].norm() for rows in (by_blocks, by_rows)]
    assert float(near[0]) < 0.04 < 0.5 < float(near[1])
    weight = fp8.Fp8Weight.quantize(torch.randn(40, 384, device=DEVICE), per_channel=True)
    got = fp8.fp8_block_linear(by_blocks, weight, torch.float32).restore(torch.float32)
    torch.testing.assert_close(got, by_blocks.restore(torch.float32) @ weight.restore().T, rtol=1e-4, atol=1e-5)
    wide = ScaledRows(torch.randn(5, 512, device=DEVICE), torch.rand(5, device=DEVICE) + 0.5)
    exact = torch.nn.functional.silu(wide.restore(torch.float32)[:, :256]) * wide.restore(torch.float32)[:, 256:]
    gated = fp8.silu_and_mul_blocks(wide).restore(torch.float32)
    assert float((gated - exact).norm() / exact.norm()) < 0.04


def test_padded_rows_are_zero():
    case = Fp8Case([1, 1], [70, 1])
    case.meta.seq_lens[1:] = 0
    case.meta.block_tables[1:] = 2**30  # never read
    case.meta.seq_lens_list = None
    out = torch.full_like(case.q, float("nan"))
    decode_attention(case.q, case.kv, case.meta, case.scale, out, 2, 1, kv_scales=case.kv_scales)
    close(out, case.expected())
    assert out[1:].abs().sum() == 0


@pytest.mark.parametrize("tiles", [PrefillTiles(16, 16, 4, 2), PrefillTiles(32, 64, 4, 2)])
def test_prefill_tiles(tiles):
    case = Fp8Case([1, 1, 33, 2, 17], [20, 30, 33, 90, 40], heads=6)
    expected = case.expected()
    out = torch.full_like(expected, float("nan"))
    prefill_attention(case.q, case.kv, case.meta, case.scale, out, 2, tiles, kv_scales=case.kv_scales)
    close(out[2:], expected[2:])
    assert out[:2].isnan().all()


@pytest.mark.parametrize("decodes", [0, 2])
def test_rows_that_only_the_device_knows(decodes):
    query_lens = [1] * decodes + [9, 40][: 4 - decodes]
    seq_lens = [*[70, 300][:decodes], 9, 55]
    case = Fp8Case(query_lens, seq_lens, dim=32)
    total, rows = sum(query_lens), len(query_lens)
    lens = case.meta.seq_lens
    first = torch.tensor([decodes], dtype=torch.int32, device=DEVICE)
    padded = AttentionMetadata(
        query_start=case.meta.query_start,
        seq_lens=lens,
        block_tables=case.meta.block_tables,
        slots=torch.full((total,), -1, device=DEVICE),
        num_decodes=0,
        max_query_len=total,
        max_seq_len=512,
        device_rows=DeviceRows(torch.where(torch.arange(rows, device=DEVICE) < first, lens, 0), first, 3),
    )
    got = attention_triton.paged_attention(case.q, case.kv, padded, case.scale, case.kv_scales)
    close(got, case.expected())


def test_gather_contexts_in_another_type():
    case = Fp8Case([1, 3, 2], [40, 17, 33])
    given = (case.meta.block_tables, case.meta.seq_lens, 1, 2, 70, torch.float16, case.kv_scales)
    for part, got in enumerate(gather_contexts(case.kv, *given)):
        for row, length in ((1, 17), (2, 33)):
            blocks = case.meta.block_tables[row, : -(-length // 16)].long()
            stored = attention.gather_context(case.kv, blocks, length)[part].float()
            want = (stored * case.kv_scales[part, :, None, None]).half()
            torch.testing.assert_close(got[row - 1, :, :length], want, rtol=1e-3, atol=1e-6)
            assert got[row - 1, :, length:].abs().sum() == 0


@pytest.mark.parametrize(("query_lens", "seq_lens", "expected_calls"), VENDOR_STEPS[:1])
def test_long_prompts_go_to_the_vendor(monkeypatch, query_lens, seq_lens, expected_calls):
    calls = []

    def causal(q, keys, values, scale, prefix):
        calls.append((keys.shape[0], q.shape[0], keys.shape[2], prefix))
        assert keys.dtype == q.dtype
        wide = torch.zeros(1, keys.shape[2], *q.shape[1:], dtype=q.dtype)
        wide[0, prefix : prefix + q.shape[0]] = q
        out = torch.nn.functional.scaled_dot_product_attention(
            wide.transpose(1, 2), keys, values, is_causal=True, scale=scale, enable_gqa=True
        )
        return out.transpose(1, 2)[0, prefix : prefix + q.shape[0]]

    case = Fp8Case(query_lens, seq_lens, dim=64)
    monkeypatch.setattr(vendor_attention, "MIN_TOKENS", 48)
    monkeypatch.setattr(vendor_attention, "STEP", 32)
    if DEVICE == "cpu":
        monkeypatch.setattr(vendor_attention, "available", lambda device: True)
        monkeypatch.setattr(vendor_attention, "causal_attention", causal)
    close(case.got(), case.expected())
    assert calls == expected_calls or DEVICE != "cpu"


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (20, 10, 16)])
def test_rope_writes_fp8(heads, kv_heads, dim, scaled):
    """Keys and values as the reference stores them, but for single steps of rounding."""
    torch.manual_seed(heads)
    width = (heads + 2 * kv_heads) * dim
    qkv = torch.randn(5, heads + 2 * kv_heads, dim, dtype=torch.float16, device=DEVICE)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    cos_sin = torch.randn(50, dim, device=DEVICE)
    positions = torch.tensor([3, 49, 0, 7, 0], device=DEVICE)
    slots = torch.tensor([9, 0, 17, 3, -1], device=DEVICE)
    scales = torch.rand(5, device=DEVICE) + 0.5 if scaled else None
    columns = torch.rand(width, device=DEVICE) + 0.1 if scaled else None
    kv_scales = torch.rand(2, kv_heads, device=DEVICE) * 0.02 + 0.002  # the smallest ones saturate
    zeros = torch.zeros(2, 2, kv_heads, 5, 4, dim, dtype=torch.uint8, device=DEVICE)
    caches = [zeros.clone().view(fp8.FP8) for _ in range(2)]
    given = {"scales": scales, "columns": columns, "kv_scales": kv_scales}
    got = rotary_triton.rope_and_cache(q, k, v, cos_sin, positions, caches[0][1], slots, **given)
    expected = rotary.rope_and_cache(q, k, v, cos_sin, positions, caches[1][1], slots, **given)
    close(got, expected)
    stored, wanted = caches[0].float(), caches[1].float()
    assert stored[0].abs().sum() == 0 and not stored.isnan().any()
    difference = (stored - wanted).abs()
    # With scales the reference also rounds what is rotated: an error of the addends' size, not of the sum's.
    near = difference <= wanted.abs() * 0.13 + (0.5 if scaled else 2.0**-8)
    if DEVICE == "cpu":  # Triton's interpreter truncates, and halves what rounds up to a power of two
        near |= (difference <= wanted.abs() * 0.26) | ((2 * stored - wanted).abs() <= wanted.abs() * 0.13)
    assert bool(near.all())
    assert float((difference > 0).float().mean()) < 0.02 or DEVICE == "cpu"
    slots_written = stored[1].reshape(2, kv_heads, -1, dim).abs().sum(dim=(0, 1, 3)) > 0
    assert slots_written.nonzero().flatten().tolist() == [0, 3, 9, 17]


def test_columns_are_applied_by_what_reads_a_product():
    torch.manual_seed(3)
    rows, width = 4, 100
    x = torch.randn(rows, width, dtype=torch.float16, device=DEVICE)
    weight = torch.randn(width, dtype=torch.float16, device=DEVICE)
    scaled = ScaledRows(x, torch.rand(rows, device=DEVICE) + 0.5, torch.rand(width, device=DEVICE) + 0.1)
    residual = torch.randn(rows, width, dtype=torch.float16, device=DEVICE)
    expected, expected_sum = fp8.add_rms_norm_fp8(scaled, residual.clone(), weight, 1e-5)
    got, got_sum = fp8_triton.add_rms_norm_fp8(scaled, residual.clone(), weight, 1e-5)
    close(got_sum, expected_sum)
    same_rows(got, expected)
    plain = [module.add_rms_norm_scaled(scaled, residual.clone(), weight, 1e-5)[0] for module in (fp8_triton, fp8)]
    close(*plain)
    wide = torch.randn(rows, 2 * width, dtype=torch.float16, device=DEVICE)
    wide_rows = ScaledRows(wide, scaled.scales, torch.rand(2 * width, device=DEVICE) + 0.1)
    same_rows(fp8_triton.silu_and_mul_fp8(wide_rows), fp8.silu_and_mul_fp8(wide_rows))
    expected_wide = fp8.restore_rows(wide_rows, torch.float16)
    got_wide = fp8_triton.restore_rows(wide_rows, torch.float16)
    close(got_wide, expected_wide)
    assert got_wide.data_ptr() == wide.data_ptr()
    close(fp8_triton.restore_rows(ScaledRows(x, scaled.scales), torch.float32), (x.float().T * scaled.scales).T)


@triton.jit
def _signed_halves(words_ptr, even_ptr, odd_ptr, COUNT: tl.constexpr):
    offsets = tl.arange(0, COUNT)
    even, odd = int8_triton.int8_numbers(tl.load(words_ptr + offsets))
    tl.store(even_ptr + offsets, even)
    tl.store(odd_ptr + offsets, odd)


def test_every_number_of_int8_is_read_exactly():
    low = torch.arange(-128, 128, dtype=torch.int32).to(torch.int8)
    words = torch.stack((low, low.flip(0)), dim=1).view(torch.int16).flatten().to(DEVICE)
    even, odd = (torch.empty(256, dtype=torch.float16, device=DEVICE) for _ in range(2))
    _signed_halves[(1,)](words, even, odd, COUNT=256)
    assert torch.equal(even.cpu().float(), low.float())
    assert torch.equal(odd.cpu().float(), low.flip(0).float())


@pytest.mark.parametrize(("rows", "inner", "columns"), [(0, 64, 48), (1, 64, 48), (5, 1104, 70), (33, 128, 128)])
def test_int8_linear(rows, inner, columns):
    torch.manual_seed(rows)
    x = torch.randn(rows, inner + 8, dtype=torch.float16, device=DEVICE)[:, :inner]
    weight = int8.Int8Weight.quantize(torch.randn(columns, inner, device=DEVICE) * 0.3)
    got = int8_triton.int8_linear(x, weight, int8_triton.HeadTiles(64, 32, 3))
    assert got.dtype == torch.float16 and got.shape == (rows, columns)
    close(got, int8.int8_linear(x, weight))


def test_what_a_cache_in_fp8_needs():
    case = Fp8Case([1], [10])
    with pytest.raises(ValueError, match=r"needs kv_scales of shape \(2, 2\), got none"):
        attention_triton.paged_attention(case.q, case.kv, case.meta, case.scale)
    with pytest.raises(ValueError, match=r"needs kv_scales of shape \(2, 2\), got \(2,\)"):
        kv_cache.checked_scales(case.kv, torch.ones(2))
    assert kv_cache.checked_scales(case.q, torch.ones(2)) is None
