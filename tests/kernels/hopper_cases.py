"""Products of long prompts on Hopper against float32, compiled: `pytest tests/kernels/hopper_cases.py` on such a card.

Rows that do not fill a tile, one and many tiles, contexts of the ring's length and more; every output is poisoned.
"""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvern_kernels import Fp8Weight, dispatch, hopper_product, large_products, quantize_rows
from kvern_kernels.hopper_product import Variant

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU; torch finds none here")

SHAPES = [(1, 256, 64), (130, 512, 128), (257, 1024, 4096), (1000, 2304, 640), (2048, 7168, 512)]


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    for variant in (Variant(), Variant(gated=True), Variant(add=True), Variant(True), Variant(True, gated=True)):
        hopper_product.load(device, variant, large_products.folder())


def _error(got: Tensor, wanted: Tensor) -> float:
    return float((got.float() - wanted).norm() / wanted.norm())


def _operands(rows: int, columns: int, inner: int) -> tuple[Tensor, Tensor]:
    torch.full((rows, columns), float("nan"), dtype=torch.bfloat16, device="cuda")  # what the output's memory held
    x = torch.randn(rows, inner, dtype=torch.bfloat16, device="cuda")
    return x, torch.randn(columns, inner, dtype=torch.bfloat16, device="cuda") * inner**-0.5


@pytest.mark.parametrize(("rows", "columns", "inner"), SHAPES)
def test_bfloat16(rows: int, columns: int, inner: int) -> None:
    x, weight = _operands(rows, columns, inner)
    wanted = x.float() @ weight.float().t()
    gate, up = wanted.chunk(2, dim=-1)
    residual = torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda")
    total = residual.clone()
    hopper_product.add_linear(x, weight, total)
    assert _error(hopper_product.linear(x, weight), wanted) < 3e-3
    assert _error(hopper_product.gated_linear(x, weight), F.silu(gate) * up) < 3e-3
    assert _error(total, wanted + residual.float()) < 4e-3


@pytest.mark.parametrize(("rows", "columns", "inner"), SHAPES[1:])
def test_fp8(rows: int, columns: int, inner: int) -> None:
    x, weight = _operands(rows, columns, inner)
    x8, weight8 = quantize_rows(x), Fp8Weight.quantize(weight)
    wanted = x8.values.float() @ weight8.restore().t()
    assert _error(hopper_product.linear(x8.values, weight8.values, weight8.scale), wanted) < 4e-3
    gate, up = (wanted * x8.scales[:, None]).chunk(2, dim=-1)
    got = hopper_product.gated_linear(x8.values, weight8.values, x8.scales, weight8.scale)
    assert _error(got, F.silu(gate) * up) < 5e-3


def test_extreme_gates() -> None:
    """silu of large numbers of either sign: no NaN, and -0 where the gate is shut."""
    x = torch.zeros(256, 64, dtype=torch.bfloat16, device="cuda")
    x[:, 0] = torch.linspace(-300, 300, 256)
    weight = torch.zeros(512, 64, dtype=torch.bfloat16, device="cuda")
    weight[:, 0] = 1
    wide = x[:, :1].float()
    wanted = (F.silu(wide) * wide).expand(256, 256)
    got = hopper_product.gated_linear(x, weight).float()
    torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-6)


def test_the_same_bits_every_time() -> None:
    """A race would show as results that change."""
    x, weight = _operands(1500, 3584, 2048)
    first = hopper_product.gated_linear(x, weight)
    for _ in range(20):
        assert torch.equal(hopper_product.gated_linear(x, weight), first)


def test_in_a_graph() -> None:
    """Replays read what its inputs hold then."""
    x, weight = _operands(8192, 28672, 512)
    assert hopper_product.gates(x, weight)
    dispatch.gated_linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = dispatch.gated_linear(x, weight)
    x.copy_(torch.randn_like(x))
    graph.replay()
    gate, up = (x.float() @ weight.float().t()).chunk(2, dim=-1)
    assert _error(out, F.silu(gate) * up) < 3e-3


def test_compiled_once(tmp_path: Path) -> None:
    """What one start compiles the next one reads."""
    from kvern_kernels import nvrtc

    source = 'extern "C" __global__ void nothing() {}'
    code = nvrtc.compiled(source, ["--gpu-architecture=sm_90a"], tmp_path)
    (kept,) = tmp_path.glob("*.cubin")
    assert kept.read_bytes() == code
    nvrtc.Kernel(code, "nothing", 1024).launch(1, 32, [])
    with pytest.raises(nvrtc.CudaError, match="expected"):
        nvrtc.compile_source("no such thing", ["--gpu-architecture=sm_90a"])
