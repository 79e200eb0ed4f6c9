"""The Triton kernels against their references: interpreted on a CPU, compiled where there is a GPU.

Triton decides at its first import whether it interprets, and other packages import it too, so `test_triton_kernels.py`
runs this file in a process of its own; `pytest tests/kernels/triton_cases.py` runs it directly.
"""

import os
import random

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from kvern_kernels import (
    AttentionMetadata,
    DecodeWorkspace,
    DeviceRows,
    ScaledRows,
    activation,
    activation_triton,
    attention,
    attention_triton,
    fp8,
    fp8_triton,
    invariant_gemm,
    invariant_gemm_triton,
    norm,
    norm_triton,
    rotary,
    rotary_triton,
    small_gemm_triton,
    split_kv,
    vendor_attention,
)
from kvern_kernels.decode_attention_triton import DecodeTiles, decode_attention
from kvern_kernels.decode_plan_triton import plan_decode
from kvern_kernels.gather_triton import gather_contexts
from kvern_kernels.prefill_attention_triton import PrefillTiles, prefill_attention

torch.set_num_threads(1)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FULL = DEVICE == "cuda" or os.environ.get("KVERN_TEST_FULL") == "1"
# The interpreter has no products of bfloat16.
PRODUCTS = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def close(got, expected):
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("rows", "width"), [(1, 576), (3, 100), (5, 1)])
def test_rms_norm(rows, width, dtype):
    torch.manual_seed(rows)
    x = torch.randn(rows, 2 * width, dtype=dtype, device=DEVICE)[:, :width]
    weight = torch.randn(width, dtype=dtype, device=DEVICE)
    close(norm_triton.rms_norm(x, weight, 1e-5), norm.rms_norm(x, weight, 1e-5))
    residual = torch.randn(rows, width, dtype=dtype, device=DEVICE)
    expected, expected_sum = norm.add_rms_norm(x, residual.clone(), weight, 1e-5)
    got, got_sum = norm_triton.add_rms_norm(x, residual, weight, 1e-5)
    close(got, expected)
    close(got_sum, expected_sum)
    assert got_sum is residual


def test_rms_norm_of_heads_and_of_nothing():
    x, weight = torch.randn(3, 4, 8, device=DEVICE), torch.randn(8, device=DEVICE)
    close(norm_triton.rms_norm(x, weight, 1e-6), norm.rms_norm(x, weight, 1e-6))
    assert norm_triton.rms_norm(x[:0, 0], weight, 1e-6).shape == (0, 8)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("rows", "width"), [(1, 1536), (3, 77)])
def test_silu_and_mul(rows, width, dtype):
    torch.manual_seed(rows)
    x = torch.randn(rows, 2 * width, dtype=dtype, device=DEVICE) * 4
    close(activation_triton.silu_and_mul(x), activation.silu_and_mul(x))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 80), (2, 1, 6), (20, 10, 16)])
def test_rope_and_cache(heads, kv_heads, dim, dtype, normed):
    torch.manual_seed(heads)
    tokens, block_size = 5, 4
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, dtype=dtype, device=DEVICE)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    angles = torch.rand(50, dim // 2, device=DEVICE) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.tensor([3, 49, 0, 7, 0], device=DEVICE)
    slots = torch.tensor([9, 0, 17, 3, -1], device=DEVICE)
    norms = [torch.randn(dim, dtype=dtype, device=DEVICE) for _ in range(2)] if normed else [None, None]
    # A layer's cache is a view of the arena: its heads and its K and V lie apart.
    expected_kv = torch.zeros(2, 2, kv_heads, 5, block_size, dim, dtype=dtype, device=DEVICE)
    kv = expected_kv.clone()
    expected = rotary.rope_and_cache(q, k, v, cos_sin, positions, expected_kv[1], slots, *norms)
    got = rotary_triton.rope_and_cache(q, k, v, cos_sin, positions, kv[1], slots, *norms)
    close(got, expected)
    close(kv, expected_kv)
    assert kv[0].abs().sum() == 0


class Case:
    """Random queries and a random paged cache; unused slots hold NaN, as uninitialized memory may."""

    def __init__(self, query_lens, seq_lens, heads=4, kv_heads=2, dim=16, block_size=16, dtype=torch.float32, seed=0):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        need = [-(-length // block_size) for length in seq_lens]
        ids = list(range(sum(need) + 2))
        rng.shuffle(ids)
        tables = [[ids.pop() for _ in range(count)] for count in need]
        self.meta = AttentionMetadata.build(query_lens, seq_lens, tables, block_size, DEVICE)
        kv = torch.full((2, kv_heads, sum(need) + 2, block_size, dim), float("nan"), dtype=dtype)
        flat = kv.view(2, kv_heads, -1, dim)
        for length, table in zip(seq_lens, tables, strict=True):
            slots = [table[p // block_size] * block_size + p % block_size for p in range(length)]
            flat[:, :, slots] = torch.randn(2, kv_heads, length, dim, dtype=dtype)
        self.kv = kv.to(DEVICE)
        # Queries are a view of a wider row, as in a merged projection.
        self.q = torch.randn(sum(query_lens), heads + 1, dim, dtype=dtype, device=DEVICE)[:, :heads] * 3
        self.scale = dim**-0.5

    def expected(self):
        return attention.paged_attention(self.q, self.kv, self.meta, self.scale)


@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [([1], [1]), ([1, 1, 1], [5, 300, 128]), ([9, 40], [9, 70]), ([1, 1, 20, 3], [33, 1, 20, 19])],
)
@pytest.mark.parametrize("block_size", [4, 16, 64])
def test_mixed_steps(query_lens, seq_lens, block_size):
    case = Case(query_lens, seq_lens, block_size=block_size)
    close(attention_triton.paged_attention(case.q, case.kv, case.meta, case.scale), case.expected())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    if dtype == torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("Triton's interpreter cannot multiply bfloat16 matrices; this runs on a GPU")
    case = Case([1, 1, 12], [40, 150, 30], dtype=dtype)
    close(attention_triton.paged_attention(case.q, case.kv, case.meta, case.scale), case.expected())


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(9, 3, 64), (3, 3, 80), (16, 1, 16), (7, 1, 96), (2, 2, 128), (2, 1, 256)]
)
def test_head_shapes(heads, kv_heads, dim):
    case = Case([1, 10], [35, 50], heads=heads, kv_heads=kv_heads, dim=dim)
    close(attention_triton.paged_attention(case.q, case.kv, case.meta, case.scale), case.expected())


@pytest.mark.parametrize("piece", [None, 128, 1024])
@pytest.mark.parametrize("query_len", [1, 3, 8])
def test_pieces_and_verification(piece, query_len):
    lens = [query_len] * 3 if query_len == 1 else [query_len, 1, 2]
    case = Case(lens, [400, 40, 131], heads=6, kv_heads=2 if query_len < 8 else 1)
    work = DecodeWorkspace.allocate(12, 6, 16, query_len, DEVICE)
    case.meta.workspace = work
    expected = case.expected()
    for _ in range(2 if FULL else 1):
        work.partial.fill_(float("nan"))
        work.stats.fill_(float("nan"))
        out = torch.full_like(expected, float("nan"))
        decode_attention(case.q, case.kv, case.meta, case.scale, out, 3, query_len, piece)
        close(out, expected)


def test_padded_rows_are_zero_and_write_nothing():
    case = Case([1, 1, 1], [70, 1, 1])
    case.meta.seq_lens[1:] = 0
    case.meta.block_tables[1:] = 2**30  # never read
    case.meta.seq_lens_list = None
    out = torch.full((3, 4, 16), float("nan"), device=DEVICE)
    decode_attention(case.q, case.kv, case.meta, case.scale, out, 3, 1)
    close(out, case.expected())
    assert out[1:].abs().sum() == 0


@pytest.mark.parametrize("tiles", [PrefillTiles(16, 16, 4, 2), PrefillTiles(32, 64, 4, 2)])
def test_prefill_tiles(tiles):
    case = Case([1, 1, 33, 2, 17], [20, 30, 33, 90, 40], heads=6, block_size=16)
    expected = case.expected()
    out = torch.full_like(expected, float("nan"))
    prefill_attention(case.q, case.kv, case.meta, case.scale, out, 2, tiles)
    close(out[2:], expected[2:])
    assert out[:2].isnan().all()


def test_decode_tiles_within_and_across_blocks():
    case = Case([1, 1], [77, 300], block_size=32)
    for block_n in (16, 32, 64):
        out = torch.full_like(case.q, float("nan"))
        decode_attention(case.q, case.kv, case.meta, case.scale, out, 2, 1, 128, DecodeTiles(block_n, 4, 2))
        close(out, case.expected())


def test_errors_say_what_would_fit():
    case = Case([1], [1000])
    case.meta.workspace = DecodeWorkspace.allocate(1, 4, 16, 1, DEVICE)
    with pytest.raises(ValueError, match="too small for 8 pieces x 4 heads x 1 query tokens of head_dim 16"):
        decode_attention(case.q, case.kv, case.meta, 1.0, case.q, 1, 1, 128)
    with pytest.raises(ValueError, match="query_len must be at most 8, got 9"):
        decode_attention(case.q, case.kv, case.meta, 1.0, case.q, 1, 9)


PLANNED = [
    [1],
    [0, 0, 0],
    [8192],
    [4096] * 32,
    [2021, 1500, *([380] * 38)],
    [200, 300] * 120 + [1900],
    random.Random(1).choices([0, 1, 64, 700, 3000, 120_000], k=97),
    random.Random(2).choices([0, 5, 300, 900, 8000], k=300),
    [0, 131_072, 0, 129],
]


@pytest.mark.parametrize(("kv_heads", "tile", "piece"), [(8, 64, None), (8, 64, 512), (1, 128, None), (2, 16, None)])
@pytest.mark.parametrize("contexts", PLANNED, ids=lambda contexts: f"{len(contexts)}x{max(contexts)}")
def test_the_device_plans_as_the_reference(contexts, kv_heads, tile, piece):
    rows = len(contexts)
    capacity = split_kv.most_pieces(rows, max(*contexts, 1, 1), kv_heads, 132, piece)
    cut = split_kv.Cut(tile, capacity, 264, kv_heads, piece)
    lengths = torch.tensor([*contexts, 77_777], dtype=torch.int32, device=DEVICE)  # what comes behind is not looked at
    found = plan_decode(lengths, rows, cut)
    expected = split_kv.plan(contexts, cut)
    entries = found.pieces.tolist()
    assert entries[: len(expected)] == [[p.row, p.begin, p.end, p.pieces] for p in expected]
    assert {entry[0] for entry in entries[len(expected) :]} <= {-1}
    firsts = {p.row: number for number, p in reversed(list(enumerate(expected)))}
    several = sorted({(p.row, firsts[p.row], p.pieces) for p in expected if p.pieces > 1})
    if found.merges is None:
        assert not several
    else:
        assert found.merges[0, 0] == len(several)
        assert found.merges[1 : 1 + len(several)].tolist() == [list(entry) for entry in several]


def test_layers_of_a_step_share_a_plan_and_unequal_rows_are_right():
    lengths = [900, 3, 64, 0, 130, 515, 1, 40]
    case = Case([1] * 8, [max(n, 1) for n in lengths])
    case.meta.seq_lens[3] = 0
    case.meta.seq_lens_list = None
    close(attention_triton.paged_attention(case.q, case.kv, case.meta, case.scale), case.expected())
    plans = [value for key, value in case.meta.plan_cache.items() if key[0] == "decode"]
    assert len(plans) == 1 and (plans[0].pieces[:, 3] > 1).any(), "some row is cut"
    plans[0].pieces[:, 0] = -1  # no work for any program
    out = torch.full_like(case.q, 7.0)
    decode_attention(case.q, case.kv, case.meta, case.scale, out, 8, 1)
    assert (out[3] == 7).all(), "the second layer reads the first one's plan"


def test_each_alone_a_row_has_the_same_bits_whatever_the_others_are():
    """And with half of the heads, as one of two ranks has them."""
    long, outputs = [1400, 9, 700], []
    for others in (1, 300):
        case = Case([1] * 12, [*long, *[others] * 9], heads=4, kv_heads=2)
        torch.manual_seed(7)
        fresh = torch.randn(2, 2, 1400 + 700 + 9, 16, device=DEVICE)
        for row, start in enumerate((0, 1400, 1409)):
            table = case.meta.block_tables[row].long()
            for position in range(long[row]):
                block, offset = table[position // 16], position % 16
                case.kv[:, :, block, offset] = fresh[:, :, start + position]
        q = torch.randn(12, 4, 16, device=DEVICE)
        case.meta.each_alone = True
        for heads, kv_heads in ((4, 2), (2, 1)):
            case.meta.plan_cache.clear()
            own = q[:, :heads].contiguous()
            out = torch.full_like(own, float("nan"))
            decode_attention(own, case.kv[:, :kv_heads], case.meta, case.scale, out, 12, 1)
            outputs.append(out[:3, :2])
    assert all(torch.equal(out, outputs[0]) for out in outputs[1:])


@pytest.mark.parametrize("query_len", [1, 3])
def test_many_pieces_of_rows_among_many(query_len):
    """More pieces than a warp merges at once, and more rows of several than there are programs for."""
    case = Case([query_len] * 40, [1500, 9, *([260, 300] * 19)], heads=2, kv_heads=1)
    out = torch.full_like(case.q, float("nan"))
    decode_attention(case.q, case.kv, case.meta, case.scale, out, 40, query_len, 128)
    close(out, case.expected())


def test_gather_contexts():
    case = Case([1, 3, 2], [40, 17, 33], block_size=16)
    keys, values = gather_contexts(case.kv, case.meta.block_tables, case.meta.seq_lens, 1, 2, 70)
    for row, length in ((1, 17), (2, 33)):
        blocks = case.meta.block_tables[row, : -(-length // 16)].long()
        expected = attention.gather_context(case.kv, blocks, length)
        for got, want in ((keys, expected[0]), (values, expected[1])):
            assert torch.equal(got[row - 1, :, :length], want)
            assert got[row - 1, :, length:].abs().sum() == 0


@pytest.mark.parametrize("decodes", [0, 2, 4])
def test_rows_that_only_the_device_knows(decodes):
    """A padded step with prompts: tokens and rows behind those there are, one token and prompts told apart there."""
    query_lens = [1] * decodes + [9, 40][: 4 - decodes]
    seq_lens = [70, 3, 40, 300][:decodes] + [9, 55][: 4 - decodes]
    case = Case(query_lens, seq_lens, dim=32)
    total, rows, padded_rows, padded_tokens = sum(query_lens), len(query_lens), 6, 64
    meta = case.meta
    tables = torch.zeros(padded_rows, meta.block_tables.shape[1], dtype=torch.int32, device=DEVICE)
    tables[:rows] = meta.block_tables
    lens = torch.tensor([*seq_lens, *[0] * (padded_rows - rows)], dtype=torch.int32, device=DEVICE)
    starts = torch.full((padded_rows + 1,), total, dtype=torch.int32, device=DEVICE)
    starts[: rows + 1] = meta.query_start
    first = torch.tensor([decodes], dtype=torch.int32, device=DEVICE)
    decode_lens = torch.where(torch.arange(padded_rows, device=DEVICE) < first, lens, 0)
    padded = AttentionMetadata(
        query_start=starts,
        seq_lens=lens,
        block_tables=tables,
        slots=torch.full((padded_tokens,), -1, device=DEVICE),
        num_decodes=0,
        max_query_len=padded_tokens,
        max_seq_len=512,
        device_rows=DeviceRows(decode_lens, first, 3),
    )
    q = torch.zeros(padded_tokens, *case.q.shape[1:], dtype=case.q.dtype, device=DEVICE)
    q[:total] = case.q
    got = attention_triton.paged_attention(q, case.kv, padded, case.scale)
    close(got[:total], case.expected())


def same_rows(got, expected):
    """Rows in FP8 agree but for single steps of rounding; Triton's interpreter truncates where the GPU rounds."""
    torch.testing.assert_close(got.scales, expected.scales, rtol=1e-5, atol=1e-12)
    a, b = got.restore(torch.float32), expected.restore(torch.float32)
    assert float((a - b).abs().max() / b.abs().max().clamp(min=1e-9)) < (0.07 if DEVICE == "cuda" else 0.15)
    # The bits that are stored: scales may differ in their last bit, and all restored values with them.
    other = got.values.float() != expected.values.float()
    assert float(other.float().mean()) < 0.02 or DEVICE == "cpu"


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 100)])
def test_fp8_rows(rows, width):
    torch.manual_seed(rows)
    x = torch.randn(rows, width, dtype=torch.float16, device=DEVICE)
    x[0] = 0
    weight = torch.randn(width, dtype=torch.float16, device=DEVICE)
    same_rows(fp8_triton.quantize_rows(x), fp8.quantize_rows(x))
    x[0] = 1
    same_rows(fp8_triton.rms_norm_fp8(x, weight, 1e-5), fp8.rms_norm_fp8(x, weight, 1e-5))
    scaled = ScaledRows(x, torch.rand(rows, device=DEVICE) + 0.5)
    residual = torch.randn(rows, width, dtype=torch.float16, device=DEVICE)
    expected, expected_sum = fp8.add_rms_norm_fp8(scaled, residual.clone(), weight, 1e-5)
    own = residual.clone()
    got, got_sum = fp8_triton.add_rms_norm_fp8(scaled, own, weight, 1e-5)
    assert got_sum is own
    close(got_sum, expected_sum)
    same_rows(got, expected)
    plain, _ = fp8_triton.add_rms_norm_scaled(scaled, residual.clone(), weight, 1e-5)
    close(plain, fp8.add_rms_norm_scaled(scaled, residual.clone(), weight, 1e-5)[0])
    wide = ScaledRows(torch.randn(rows, 2 * width, dtype=torch.float16, device=DEVICE), scaled.scales)
    same_rows(fp8_triton.silu_and_mul_fp8(wide), fp8.silu_and_mul_fp8(wide))


@pytest.mark.skipif(DEVICE == "cpu", reason="the vendor's FP8 product needs a GPU")
@pytest.mark.parametrize("rows", [0, 1, 13, 509])
def test_fp8_linear(rows):
    x = torch.randn(rows, 256, dtype=torch.bfloat16, device=DEVICE)
    weight = fp8.Fp8Weight.quantize(torch.randn(96, 256, dtype=torch.bfloat16, device=DEVICE))
    quantized = fp8.quantize_rows(x)
    got = fp8_triton.fp8_linear(quantized, weight, torch.bfloat16).restore(torch.float32)
    expected = fp8.fp8_linear(quantized, weight, torch.float32).restore(torch.float32)
    assert got.shape == (rows, 96)
    if rows:
        assert float((got - expected).norm() / expected.norm()) < 1e-2


def test_rope_of_scaled_rows():
    torch.manual_seed(1)
    qkv = torch.randn(5, 8, 16, dtype=torch.float16, device=DEVICE)
    q, k, v = qkv.split((4, 2, 2), dim=1)
    cos_sin = torch.randn(20, 16, device=DEVICE)
    positions, slots = torch.arange(5, device=DEVICE) * 3, torch.tensor([3, 0, -1, 7, 9], device=DEVICE)
    scales = torch.rand(5, device=DEVICE) + 0.5
    caches = [torch.zeros(2, 2, 3, 4, 16, dtype=torch.float16, device=DEVICE) for _ in range(2)]
    got = rotary_triton.rope_and_cache(q, k, v, cos_sin, positions, caches[0], slots, scales=scales)
    expected = rotary.rope_and_cache(q, k, v, cos_sin, positions, caches[1], slots, scales=scales)
    close(got, expected)
    close(caches[0], caches[1])


VENDOR_STEPS = [
    ([1, 1, 70], [40, 7, 70], [(1, 70, 96, 0)]),
    ([64], [64], [(1, 64, 64, 0)]),
    ([33], [33], []),
    ([1, 64, 64, 64, 9, 50], [5, 64, 64, 64, 30, 60], [(2, 128, 64, 0), (1, 64, 64, 0), (1, 50, 64, 10)]),
    ([20, 64, 20], [70, 64, 25], [(1, 64, 64, 0)]),
    ([1, 130, 130, 130, 50], [3, 130, 130, 130, 50], [(2, 260, 130, 0), (1, 130, 160, 0), (1, 50, 64, 0)]),
]


@pytest.mark.parametrize(("query_lens", "seq_lens", "expected_calls"), VENDOR_STEPS)
def test_long_prompts_go_to_the_vendor(monkeypatch, query_lens, seq_lens, expected_calls):
    """With a stand-in for the vendor's kernel where there is no GPU: what is gathered and padded for it."""
    calls = []

    def causal(q, keys, values, scale, prefix):
        rows, length = keys.shape[0], keys.shape[2]
        calls.append((rows, q.shape[0], length, prefix))
        each = q.shape[0] // rows
        assert keys[:, :, prefix + each :].abs().sum() == 0 and values[:, :, prefix + each :].abs().sum() == 0
        wide = torch.zeros(rows, length, *q.shape[1:], dtype=q.dtype)
        wide[:, prefix : prefix + each] = q.view(rows, each, *q.shape[1:])
        out = torch.nn.functional.scaled_dot_product_attention(
            wide.transpose(1, 2), keys, values, is_causal=True, scale=scale, enable_gqa=True
        )
        return out.transpose(1, 2)[:, prefix : prefix + each].reshape(q.shape)

    case = Case(query_lens, seq_lens, dim=64, dtype=torch.float16)
    monkeypatch.setattr(vendor_attention, "MIN_TOKENS", 48)
    monkeypatch.setattr(vendor_attention, "STEP", 32)
    if DEVICE == "cpu":
        monkeypatch.setattr(vendor_attention, "available", lambda device: True)
        monkeypatch.setattr(vendor_attention, "causal_attention", causal)
    for _ in range(2):  # the second layer finds the parts worked out
        close(attention_triton.paged_attention(case.q, case.kv, case.meta, case.scale), case.expected())
    if DEVICE == "cpu":
        assert calls == 2 * expected_calls


@pytest.mark.parametrize(
    ("arguments", "tokens"),
    [
        ((8192, 8192, 128, 2), 8192),
        ((5000, 5000, 64, 2), 5056),
        ((4000, 4000, 64, 2), 4096),
        ((1023, 1023, 128, 2), 0),
        ((4096, 8192, 128, 2), 8192),  # a cached prefix, not longer than the rest
        ((4095, 8192, 128, 2), 0),
        ((8192, 8192, 96, 2), 0),
        ((8192, 8192, 128, 4), 0),
    ],
)
def test_which_prompts_go_to_the_vendor(arguments, tokens):
    assert vendor_attention.vendor_tokens(*arguments) == tokens


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("rows", "inner", "columns"), [(1, 64, 48), (5, 100, 40), (70, 32, 16)])
def test_linear_parts(rows, inner, columns, splits):
    tiles = small_gemm_triton.ProductTiles(32, 32, splits, 4, 2)
    x = torch.randn(rows, inner + 8, dtype=torch.float16, device=DEVICE)[:, :inner]
    weight = torch.randn(columns, inner, dtype=torch.float16, device=DEVICE)
    parts = small_gemm_triton.linear_parts(x, weight, tiles)
    assert parts.shape == (splits, rows, columns) and parts.dtype == torch.float32
    torch.testing.assert_close(parts.sum(0), x.float() @ weight.float().T, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", PRODUCTS)
@pytest.mark.parametrize(("rows", "inner", "columns", "pieces"), [(1, 64, 48, 1), (5, 100, 40, 2), (130, 256, 70, 2)])
def test_invariant_linear(rows, inner, columns, pieces, dtype):
    torch.manual_seed(inner)
    x = torch.randn(rows, inner + 8, dtype=dtype, device=DEVICE)[:, :inner]
    weight = torch.randn(columns, inner, dtype=dtype, device=DEVICE) * inner**-0.5
    bias = torch.randn(columns, dtype=dtype, device=DEVICE)
    for given in (bias, None):
        got = invariant_gemm_triton.invariant_linear(x, weight, given, pieces)
        close(got, invariant_gemm.invariant_linear(x, weight, given, pieces))
        exact = x.double() @ weight.double().T + (0 if given is None else given.double())
        close(got, exact.to(dtype))
    assert invariant_gemm_triton.invariant_linear(x[:0], weight, bias, pieces).shape == (0, columns)


@pytest.mark.parametrize("dtype", PRODUCTS)
def test_invariant_products_of_one_rank_are_those_of_two(dtype):
    """To the last bit: each rank has half of the outputs, or half of the inputs of which shares are added up."""
    torch.manual_seed(0)
    product = invariant_gemm_triton.invariant_linear
    x = torch.randn(128, 1024 + 4096 * FULL, dtype=dtype, device=DEVICE)
    weight = torch.randn(256 + 768 * FULL, x.shape[1], dtype=dtype, device=DEVICE)
    for pieces in (1, 2):
        whole = product(x, weight, None, pieces)
        halves = [product(x, half.contiguous(), None, pieces) for half in weight.chunk(2)]
        assert torch.equal(torch.cat(halves, 1), whole)
        assert torch.equal(product(x[:7], weight, None, pieces), whole[:7])
    shares = [
        product(a.contiguous(), b.contiguous(), None, 1) for a, b in zip(x.chunk(2, 1), weight.chunk(2, 1), strict=True)
    ]
    assert torch.equal((shares[0].float() + shares[1].float()).to(dtype), whole)
    assert not torch.equal(product(x, weight, None, 1), whole) or dtype == torch.float32


@pytest.mark.parametrize(("rows", "inner", "width"), [(1, 64, 48), (5, 100, 20), (70, 32, 16)])
def test_gated_linear(rows, inner, width):
    tiles = small_gemm_triton.ProductTiles(32, 32, 1, 4, 2)
    x = torch.randn(rows, inner, dtype=torch.float16, device=DEVICE)
    weight = torch.randn(2 * width, inner, dtype=torch.float16, device=DEVICE) * 0.3
    got = small_gemm_triton.gated_linear(x, weight, tiles)
    close(got, activation.silu_and_mul(x.float() @ weight.float().T))
    with pytest.raises(ValueError, match="splits must be 1, got 2"):
        small_gemm_triton.gated_linear(x, weight, small_gemm_triton.ProductTiles(32, 32, 2, 4, 2))


@pytest.mark.parametrize("count", [1, 3])
def test_parts_are_added_by_what_follows(count):
    dtype, heads, kv_heads, dim = torch.float16, 4, 2, 8
    parts = torch.randn(count, 3, (heads + 2 * kv_heads) * dim, device=DEVICE)
    whole = parts.sum(0).to(dtype)
    weight = torch.randn(whole.shape[1], dtype=dtype, device=DEVICE)
    residual = torch.randn_like(whole)
    expected, expected_sum = norm.add_rms_norm(whole, residual.clone(), weight, 1e-5)
    got, got_sum = norm_triton.add_rms_norm_parts(parts, residual, weight, 1e-5)
    close(got, expected)
    close(got_sum, expected_sum)
    q, k, v = whole.view(3, -1, dim).split((heads, kv_heads, kv_heads), dim=1)
    cos_sin = torch.randn(9, dim, device=DEVICE)
    positions, slots = torch.tensor([0, 8, 3], device=DEVICE), torch.tensor([4, -1, 7], device=DEVICE)
    kv = torch.zeros(2, kv_heads, 2, 4, dim, dtype=dtype, device=DEVICE)
    expected_kv = kv.clone()
    expected = rotary.rope_and_cache(q, k, v, cos_sin, positions, expected_kv, slots)
    q, k, v = parts.view(count, 3, -1, dim).split((heads, kv_heads, kv_heads), dim=-2)
    close(rotary_triton.rope_and_cache(q, k, v, cos_sin, positions, kv, slots, dtype=dtype), expected)
    close(kv, expected_kv)


@pytest.mark.parametrize(
    ("rows", "columns", "inner", "gated", "expected"),
    [
        (1, 6144, 4096, False, (64, 128, 2, 4, 4)),
        (32, 4096, 4096, False, (64, 128, 4, 4, 4)),
        (16, 14336, 4096, True, (64, 128, 1, 4, 3)),
        (32, 14336, 4096, True, (128, 64, 1, 8, 4)),
        (64, 14336, 4096, True, (64, 64, 1, 4, 4)),
        (8, 64, 576, False, (64, 128, 8, 4, 4)),  # never more than 8 parts
        (33, 4096, 14336, False, (64, 128, 2, 4, 4)),
        (33, 4096, 4096, False, None),
        (65, 4096, 14336, False, None),
        (65, 14336, 4096, True, None),
    ],
)
def test_which_products_are_ours(rows, columns, inner, gated, expected):
    tiles = small_gemm_triton.choose_tiles(rows, columns, inner, gated, 132)
    assert tiles == (expected and small_gemm_triton.ProductTiles(*expected))


@pytest.mark.parametrize(
    ("rows", "columns", "gated", "expected"),
    [
        (1, 6144, False, (64, 128, 2, 4, 5, 256)),
        (32, 4096, False, (64, 128, 4, 4, 5, 256)),
        (32, 14336, True, (64, 128, 1, 4, 4, 256)),
        (33, 4096, False, None),
    ],
)
def test_which_fp8_products_are_ours(rows, columns, gated, expected):
    tiles = small_gemm_triton.choose_fp8_tiles(rows, columns, gated, 132)
    assert tiles == (expected and small_gemm_triton.ProductTiles(*expected))


@pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter cannot multiply FP8 matrices")
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize(("rows", "inner"), [(1, 256), (13, 4096), (32, 320)])
def test_small_fp8_products(rows, inner, per_channel):
    torch.manual_seed(rows)
    x = fp8.quantize_rows(torch.randn(rows, inner, dtype=torch.bfloat16, device=DEVICE))
    weight = fp8.Fp8Weight.quantize(torch.randn(192, inner, device=DEVICE) * 0.1, per_channel)
    tiles = small_gemm_triton.tiles_for(x.values, 192, False)
    got = small_gemm_triton.fp8_linear_parts(x, weight, tiles)
    summed = ScaledRows(got.values.sum(0), got.scales, got.columns).restore(torch.float32)
    expected = x.restore(torch.float32) @ weight.restore().T
    assert float((summed - expected).norm() / expected.norm()) < 1e-2
    tiles = small_gemm_triton.tiles_for(x.values, 96, True)
    gated = small_gemm_triton.fp8_gated_linear(x, weight, torch.bfloat16, tiles)
    expected = activation.silu_and_mul(expected)
    assert float((gated.float() - expected).norm() / expected.norm()) < 2e-2


def test_fp8_rows_in_parts():
    """The norm adds up the parts of a product before it scales them."""
    torch.manual_seed(3)
    parts, scales = torch.randn(3, 4, 64, device=DEVICE), torch.rand(4, device=DEVICE) + 0.5
    columns = torch.rand(64, device=DEVICE)
    residual = torch.randn(4, 64, dtype=torch.float16, device=DEVICE)
    weight = torch.randn(64, dtype=torch.float16, device=DEVICE)
    whole = ScaledRows(parts.sum(0), scales, columns)
    expected, expected_sum = fp8.add_rms_norm_fp8(whole, residual.clone(), weight, 1e-5)
    got, got_sum = fp8_triton.add_rms_norm_fp8(ScaledRows(parts, scales, columns), residual, weight, 1e-5)
    close(got_sum, expected_sum)
    same_rows(got, expected)
