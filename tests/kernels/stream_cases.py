"""Products of few rows on Hopper against float32, compiled: `pytest tests/kernels/stream_cases.py` on such a card.

Rows that do not fill eight, inner dimensions that do not fill a step, weights with and without pieces and with more
tiles than multiprocessors; every output is poisoned.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvern_kernels import (
    AttentionMetadata,
    Fp8Weight,
    attention,
    dispatch,
    fp8,
    hopper_stream,
    large_products,
    quantize_rows,
)

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU; torch finds none here")

ROWS = [1, 5, 8, 13, 32, 33, 64]
SHAPES = [(64, 48), (960, 576), (3072, 1552), (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (17408, 1024)]
BOUND = {torch.bfloat16: 4e-3, torch.float16: 1e-3}


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    for dtype in hopper_stream.KINDS:
        hopper_stream.prepare(device, dtype, large_products.folder())


def _error(got: Tensor | None, wanted: Tensor) -> float:
    assert got is not None
    return float((got.float() - wanted).norm() / wanted.norm())


def _operands(rows: int, columns: int, inner: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.full((8 * rows * columns,), float("nan"), device="cuda")  # what the output's memory held
    x = torch.randn(rows, inner, dtype=dtype, device="cuda")
    return x, torch.randn(columns, inner, dtype=dtype, device="cuda") * inner**-0.5


def _gated(wanted: Tensor) -> Tensor:
    gate, up = wanted.chunk(2, dim=-1)
    return F.silu(gate) * up


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("columns", "inner"), SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_16_bits(rows: int, columns: int, inner: int, dtype: torch.dtype) -> None:
    x, weight = _operands(rows, columns, inner, dtype)
    wanted = x.float() @ weight.float().t()
    parts = hopper_stream.linear_parts(x, weight)
    assert parts is not None
    assert _error(parts.sum(0), wanted) < 1e-3
    assert _error(hopper_stream.gated_linear(x, weight), _gated(wanted)) < BOUND[dtype]


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize(("columns", "inner"), SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_fp8(rows: int, columns: int, inner: int, per_channel: bool) -> None:
    x, weight = _operands(rows, columns, inner, torch.bfloat16)
    x8, weight8 = quantize_rows(x), Fp8Weight.quantize(weight, per_channel)
    wanted = x8.values.float() @ weight8.restore().t() * x8.scales[:, None]
    got = hopper_stream.fp8_linear_parts(x8, weight8)
    assert got is not None
    got.values = got.values.sum(0)
    assert _error(got.restore(torch.float32), wanted) < 6e-3
    # A row of a few columns may have its error in its largest ones.
    assert _error(hopper_stream.fp8_gated_linear(x8, weight8, torch.bfloat16), _gated(wanted)) < 1e-2


BY_BLOCKS = [(128, 512), (960, 1024), (3072, 2048), (6144, 4096), (4096, 4096), (4096, 14336), (17408, 1024)]


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize(("columns", "inner"), BY_BLOCKS)
@pytest.mark.parametrize("rows", ROWS)
def test_rows_quantized_by_blocks(rows: int, columns: int, inner: int, per_channel: bool) -> None:
    """Blocks of a row of very different size, so that a scale of another block or row shows; padded scales are NaN."""
    x, weight = _operands(rows, columns, inner, torch.bfloat16)
    x *= 10 ** torch.empty(rows, inner // fp8.BLOCK, device="cuda").uniform_(-3, 1).repeat_interleave(fp8.BLOCK, 1)
    weight8 = Fp8Weight.quantize(weight, per_channel)
    quantized = fp8.quantize_blocks(x)
    padded = -(-rows // 8) * 8
    scales = torch.full((inner // fp8.BLOCK, padded), float("nan"), device="cuda")
    scales[:, :rows] = quantized.scales.t()
    x8 = fp8.BlockScaledRows(quantized.values, scales.t()[:rows])
    assert hopper_stream.takes_blocks(rows, weight8)
    got = hopper_stream.fp8_block_linear_parts(x8, weight8)
    assert got is not None
    got.values = got.values.sum(0)
    # Nearer than rows with one scale: sums of 128 columns alone stay within the tensor core.
    assert _error(got.restore(torch.float32), x8.restore(torch.float32) @ weight8.restore().t()) < 3e-3


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize(("columns", "inner"), [(28672, 4096), (17408, 1024), (67584, 528)])
@pytest.mark.parametrize("rows", ROWS)
def test_gated_rows_quantized_by_blocks(rows: int, columns: int, inner: int, per_channel: bool) -> None:
    x, weight = _operands(rows, columns, inner, torch.bfloat16)
    if rows > 1:
        x[0] = 0
    x8, weight8 = quantize_rows(x), Fp8Weight.quantize(weight, per_channel)
    exact = _gated(x8.values.float() @ weight8.restore().t() * x8.scales[:, None])
    wanted = fp8.quantize_blocks(exact)
    got = hopper_stream.fp8_gated_blocks(x8, weight8)
    assert got is not None
    assert (got.scales.shape, got.scales.stride()) == (wanted.scales.shape, wanted.scales.stride())
    torch.testing.assert_close(got.scales, wanted.scales, rtol=2e-2, atol=2e-12)
    found = got.restore(torch.float32)
    assert _error(found, exact) < 3.5e-2  # a step of E4M3 is up to an eighth
    assert _error(found, wanted.restore(torch.float32)) < 3e-2  # of few numbers another step
    if rows > 1:
        assert found[0].abs().sum() == 0


@pytest.mark.parametrize("rows", [1, 13, 32])
def test_o_behind_attention(rows: int) -> None:
    """What attention's last kernel writes, of rows that are cut and of others, is what the product reads."""
    heads, dim, block_size = 32, fp8.BLOCK, 16
    contexts = [2000 if row % 3 == 0 else 20 + row for row in range(rows)]
    need = [-(-length // block_size) for length in contexts]
    ids = iter(torch.randperm(sum(need)).tolist())
    tables = [[next(ids) for _ in range(count)] for count in need]
    meta = AttentionMetadata.build([1] * rows, contexts, tables, block_size, "cuda")
    kv = torch.randn(2, 8, sum(need), block_size, dim, dtype=torch.bfloat16, device="cuda")
    q = torch.randn(rows, heads, dim, dtype=torch.bfloat16, device="cuda") * 3
    weight = Fp8Weight.quantize(torch.randn(4096, heads * dim, dtype=torch.bfloat16, device="cuda"))
    assert dispatch.takes_blocks(rows, weight) and dispatch.attention_gives_blocks(q, kv, meta)
    got = dispatch.fp8_linear_parts(dispatch.paged_attention_blocks(q, kv, meta, dim**-0.5), weight, q.dtype)
    got.values = got.values.sum(0)
    exact = attention.paged_attention(q.float(), kv, meta, dim**-0.5).flatten(1) @ weight.restore().t()
    assert _error(got.restore(torch.float32), exact) < 4e-2


def test_what_does_not_go_by_blocks() -> None:
    x, weight = _operands(65, 512, 576, torch.bfloat16)
    odd, even = Fp8Weight.quantize(weight), Fp8Weight.quantize(weight[:, :512].contiguous())
    assert not hopper_stream.takes_blocks(8, odd)  # a step that blocks do not fill
    assert not hopper_stream.takes_blocks(65, even) and not hopper_stream.takes_blocks(0, even)
    assert hopper_stream.takes_blocks(64, even)
    assert hopper_stream.fp8_gated_blocks(quantize_rows(x[:8, :512].contiguous()), even) is None  # too few columns
    rows = fp8.quantize_blocks(x[:9, :512])
    wide = fp8.BlockScaledRows(rows.values, rows.scales.contiguous())
    assert hopper_stream.fp8_block_linear_parts(wide, even) is None  # scales row by row
    assert hopper_stream.fp8_block_linear_parts(rows, even) is not None


@pytest.mark.parametrize("rows", [1, 32, 64])
def test_the_same_bits_by_blocks_in_a_graph(rows: int) -> None:
    """As `test_the_same_bits_every_time_and_in_a_graph`, with products directly behind products."""
    shapes = (4096, 4096), (28672, 4096), (4096, 14336)
    layers = [[Fp8Weight.quantize(_operands(1, *shape, torch.bfloat16)[1]) for shape in shapes] for _ in range(4)]
    ones = torch.ones(4096, dtype=torch.bfloat16, device="cuda")
    x0 = torch.randn(rows, 4096, dtype=torch.bfloat16, device="cuda")

    def chain(by_blocks: bool) -> Tensor:
        residual = x0.clone()
        x = dispatch.rms_norm_fp8(residual, ones, 1e-5)
        for o, gate_up, down in layers:
            x, residual = dispatch.add_rms_norm_fp8(dispatch.fp8_linear_parts(x, o, x0.dtype), residual, ones, 1e-5)
            inner = dispatch.fp8_gated_linear(x, gate_up, x0.dtype, by_blocks)
            assert isinstance(inner, fp8.BlockScaledRows) == by_blocks
            out = dispatch.fp8_linear_parts(inner, down, x0.dtype)
            x, residual = dispatch.add_rms_norm_fp8(out, residual, ones, 1e-5)
        return residual

    first = chain(True)
    assert _error(first, chain(False).float()) < 1e-1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(True)
    for _ in range(50):
        out.zero_()
        graph.replay()
        assert torch.equal(out, first)


def test_rows_that_are_apart() -> None:
    """x may be a part of wider rows."""
    wide, weight = _operands(9, 512, 1024, torch.bfloat16)
    x = wide[:, 256:768]
    weight = weight[:, :512].contiguous()
    wanted = x.float() @ weight.float().t()  # between: a weight that the kernel in front writes may not be read ahead
    parts = hopper_stream.linear_parts(x, weight)
    assert parts is not None
    assert _error(parts.sum(0), wanted) < 1e-3


def test_what_it_does_not_compute() -> None:
    x, weight = _operands(65, 512, 1024, torch.bfloat16)
    assert hopper_stream.linear_parts(x, weight) is None  # too many rows
    assert hopper_stream.linear_parts(x[:0], weight) is None
    assert hopper_stream.linear_parts(x[:4], weight[:500]) is None  # half a tile
    assert hopper_stream.linear_parts(x[:4, :500], weight[:, :500].contiguous()) is None  # rows of half a line
    assert hopper_stream.linear_parts(x[:4].float(), weight.float()) is None
    assert hopper_stream.linear_parts(x[:4, 4:516], weight[:, :512].contiguous()) is None  # begins within a line


def test_the_same_bits_every_time_and_in_a_graph() -> None:
    """A race would show as results that change: chains of products and norms, each launched while the one before
    runs, whose rings hold each other's memory in turn."""
    shapes = (4096, 4096), (28672, 4096), (4096, 14336)
    layers = [[_operands(1, *shape, torch.bfloat16)[1] for shape in shapes] for _ in range(4)]
    ones = torch.ones(4096, dtype=torch.bfloat16, device="cuda")
    x0 = torch.randn(32, 4096, dtype=torch.bfloat16, device="cuda")

    def chain(linear, gated) -> Tensor:
        residual = x0.clone()
        x = dispatch.rms_norm(residual, ones, 1e-5)
        for o, gate_up, down in layers:
            x, residual = dispatch.add_rms_norm(linear(x, o), residual, ones, 1e-5)
            x, residual = dispatch.add_rms_norm(linear(gated(x, gate_up), down), residual, ones, 1e-5)
        return x

    wanted = chain(F.linear, lambda x, weight: dispatch.silu_and_mul(F.linear(x, weight)))
    first = chain(dispatch.linear_parts, dispatch.gated_linear)
    assert _error(first, wanted.float()) < 2e-2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(dispatch.linear_parts, dispatch.gated_linear)
    for _ in range(50):
        out.zero_()
        graph.replay()
        assert torch.equal(out, first)
