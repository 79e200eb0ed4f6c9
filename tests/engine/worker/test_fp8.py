"""`--quantization fp8` on the torch references: the model's logits against the same model with dequantized weights."""

import pytest
import torch
from worker_harness import GREEDY, plan

from kvern_engine.config import EngineConfig
from kvern_engine.core.plan import AddedRow
from kvern_engine.layers import attention as attention_layer
from kvern_engine.layers import linear as linear_layer
from kvern_engine.layers.linear import Linear
from kvern_engine.parallel.groups import TensorGroup
from kvern_engine.worker import limits
from kvern_engine.worker.worker import Worker
from kvern_kernels import INT8_ROWS, BlockScaledRows, Fp8Weight, ScaledRows, attention, dispatch, fp8


def make(spec: str, **config: object) -> Worker:
    worker = Worker(EngineConfig(model=spec, device="cpu", num_gpu_blocks_override=16, max_num_seqs=4, **config))
    worker.load()
    return worker


def logits(worker: Worker, ids: list[int]) -> torch.Tensor:
    """Of a prompt in two chunks, the second beside another row."""
    added = [AddedRow(0, "a", ids, len(ids), [1, 2, 3], GREEDY), AddedRow(1, "b", ids[:5], 5, [4], GREEDY)]
    first = worker.execute(plan(0, [(0, 0, 20, False)], added=added), return_logits=True)
    second = worker.execute(plan(1, [(0, 20, len(ids) - 20, True), (1, 0, 5, True)]), return_logits=True)
    assert first.logits is not None and second.logits is not None
    return torch.cat([first.logits[0], second.logits[0], second.logits[1]])


@pytest.mark.parametrize("quantization", ["fp8", "fp8_per_channel"])
def test_logits_are_near_those_of_the_dequantized_weights(tiny_path: str, quantization: str) -> None:
    ids = [(7 * i * i + 3) % 2000 for i in range(40)]
    quantized = make(tiny_path, quantization=quantization)
    plain = make(tiny_path)
    exact = logits(plain, ids)
    for layer in plain.model.layers:  # type: ignore[attr-defined]
        for linear in (layer.attention.qkv_proj, layer.attention.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj):
            packed = Fp8Weight.quantize(_weight(linear), quantization == "fp8_per_channel")
            assert (packed.columns is not None) == (quantization == "fp8_per_channel")
            linear.weight = packed.restore()
            linear._packed = linear._transposed = None
    reference, got = logits(plain, ids), logits(quantized, ids)
    assert float((got - reference).norm() / reference.norm()) < 0.08  # what activations in FP8 cost
    assert 0 < float((reference - exact).norm() / exact.norm()) < 0.1  # what weights in FP8 cost
    assert float((got.argmax(-1) == reference.argmax(-1)).float().mean()) > 0.7


def _weight(linear: Linear) -> torch.Tensor:
    return linear.weight if linear._transposed is None else linear._transposed.t().contiguous()


def test_weights_take_half_the_memory(tiny_path: str) -> None:
    worker = Worker(EngineConfig(model=tiny_path, device="cpu", num_gpu_blocks_override=16, max_num_seqs=4))
    plain = worker.load().weight_bytes
    worker = Worker(
        EngineConfig(model=tiny_path, device="cpu", num_gpu_blocks_override=16, max_num_seqs=4, quantization="fp8")
    )
    quantized = worker.load().weight_bytes
    layers = 4 * (128 * 256 + 128 * 128 + 3 * 128 * 384)  # elements of the layers' matrices; float32 before
    assert plain - quantized == 3 * layers


def test_rows_do_not_depend_on_their_neighbours() -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)) * torch.tensor([[1.0], [1e3], [1e-3]])
    alone = [fp8.quantize_rows(x[i : i + 1]) for i in range(3)]
    together = fp8.quantize_rows(x)
    for i in range(3):
        assert torch.equal(together.values[i].float(), alone[i].values[0].float())
        assert float((together.restore(torch.float32)[i] - x[i]).abs().max() / x[i].abs().max()) < 0.04
    assert fp8.quantize_rows(torch.zeros(1, 8)).restore(torch.float32).abs().sum() == 0


def test_a_scale_an_output_is_nearer() -> None:
    """Rows of very different size: their own scales keep the small ones."""
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(48, 64, generator=generator) * torch.logspace(-5, 0, 48)[:, None]
    errors = []
    for per_channel in (False, True):
        packed = Fp8Weight.quantize(weight, per_channel)
        assert packed.columns is None or float(packed.columns.max()) == 1.0
        errors.append(((packed.restore() - weight).norm(dim=1) / weight.norm(dim=1)).max())
    assert errors[0] > 0.1 > 0.04 > errors[1]
    x = torch.randn(5, 64, generator=generator)
    product = fp8.fp8_linear(fp8.quantize_rows(x), Fp8Weight.quantize(weight, True), torch.float32)
    exact = fp8.quantize_rows(x).restore(torch.float32) @ Fp8Weight.quantize(weight, True).restore().T
    torch.testing.assert_close(product.restore(torch.float32), exact, rtol=1e-4, atol=1e-5)
    picked = product.index_select(torch.tensor([3]))
    torch.testing.assert_close(picked.restore(torch.float32), exact[3:4], rtol=1e-4, atol=1e-5)
    whole, parts = product.restore(torch.float32), product.columns
    assert parts is not None and torch.equal(fp8.restore_rows(product, torch.float32), whole)


def test_a_head_in_int8_keeps_the_logits(tiny_path: str) -> None:
    """What a GPU does for few rows, by the reference: nearer than FP8 by far, the same memory."""
    worker = make(tiny_path, dtype="bfloat16")
    head = worker.model.lm_head  # type: ignore[attr-defined]
    x = torch.randn(INT8_ROWS + 1, head.in_features, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = x.float() @ head.weight.float().T
    weight = head.weight.clone()
    assert head.add_int8() == head.weight.numel() + 4 * head.out_features
    assert torch.equal(head.weight, weight)
    few = head(x[:INT8_ROWS]).float()
    error = (few - exact[:INT8_ROWS]).norm() / exact[:INT8_ROWS].norm()
    assert 1e-3 < float(error) < 0.012
    assert float((few.argmax(-1) == exact[:INT8_ROWS].argmax(-1)).float().mean()) > 0.9
    assert torch.equal(head(x), torch.nn.functional.linear(x, weight))  # more rows: in 16 bits


def test_a_bias_is_added_to_the_scaled_product() -> None:
    torch.manual_seed(2)
    layer = Linear(64, 32, bias=True, dtype=torch.float32, device=torch.device("cpu"))
    layer.weight.normal_()
    assert layer.bias is not None
    layer.bias.normal_()
    x = torch.randn(5, 64)
    expected = layer(x)
    assert layer.quantize_fp8() == 3 * 64 * 32
    got = layer.scaled(fp8.quantize_rows(x)).restore(torch.float32)
    assert float((got - expected).norm() / expected.norm()) < 0.06


@pytest.fixture
def blocks_asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """A machine whose kernels take and give rows quantized by blocks, as the references do: (who, rows) of each."""
    asked: list[tuple[str, int]] = []

    def gives(q: torch.Tensor, kv: torch.Tensor, *rest: object) -> bool:
        asked.append(("attention", q.shape[0]))
        return True

    def gated(x: ScaledRows, weight: Fp8Weight, dtype: torch.dtype, by_blocks: bool = False) -> object:
        if not by_blocks:
            return dispatch.fp8_gated_linear(x, weight, dtype)
        asked.append(("gate_up", x.values.shape[0]))
        return fp8.silu_and_mul_blocks(fp8.fp8_linear(x, weight, dtype))

    monkeypatch.setattr(linear_layer, "takes_blocks", lambda rows, weight: rows <= 8)
    monkeypatch.setattr(linear_layer, "fp8_gated_linear", gated)
    monkeypatch.setattr(attention_layer, "attention_gives_blocks", gives)
    monkeypatch.setattr(attention_layer, "paged_attention_blocks", attention.paged_attention_blocks)
    return asked


def test_steps_of_few_rows_go_by_blocks(
    tiny_path: str, blocks_asked: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Near what rows with one scale give; steps of more rows have those."""
    ids = [(7 * i * i + 3) % 2000 for i in range(30)]

    def run() -> torch.Tensor:
        worker = make(tiny_path, quantization="fp8")
        added = [AddedRow(0, "a", ids, len(ids), [1, 2, 3], GREEDY)]
        steps = [plan(0, [(0, 0, 25, True)], added=added), plan(1, [(0, 25, 5, True)])]
        found = [worker.execute(step, return_logits=True).logits for step in steps]
        return torch.cat([logits[0][-1:] for logits in found if logits is not None])

    by_blocks = run()
    prompt = [one for one in blocks_asked if one[1] == 25]
    assert prompt == [] and ("gate_up", 5) in blocks_asked and ("attention", 5) in blocks_asked
    blocks_asked.clear()
    monkeypatch.setattr(linear_layer, "takes_blocks", lambda rows, weight: False)
    by_rows = run()
    assert blocks_asked == []
    assert 0 < float((by_blocks - by_rows).norm() / by_rows.norm()) < 0.08


def test_which_layers_take_blocks(blocks_asked: list[tuple[str, int]]) -> None:
    """One rank's own sums alone, without a bias, where numbers may depend on how many rows a step has."""

    def layer(**changes: object) -> Linear:
        found = Linear(128, 32, dtype=torch.float32, device=torch.device("cpu"), **changes)  # type: ignore[arg-type]
        found.weight.normal_()
        found.quantize_fp8()
        return found

    one, two = TensorGroup(), TensorGroup(2)
    assert layer().takes_blocks(8, one)
    assert not layer().takes_blocks(9, one)  # as the kernels say
    assert not layer().takes_blocks(8, two)
    assert not layer(bias=True).takes_blocks(8, one)
    assert not layer(pieces=2).takes_blocks(8, one)
    assert not Linear(128, 32, dtype=torch.float32, device=torch.device("cpu")).takes_blocks(8, one)
    x = torch.randn(5, 128)
    got = layer().scaled_sum(fp8.quantize_blocks(x), one)
    assert isinstance(got, ScaledRows) and got.restore(torch.float32).shape == (5, 32)
    with pytest.raises(AssertionError, match="no blocks"):
        layer(bias=True).scaled_parts(BlockScaledRows.empty(5, 128, x.device))


def test_scales_of_one_stay_where_they_are() -> None:
    """Graphs hold their address, also when later steps need more of them; parts have those of their rows."""
    few = fp8.unscaled(torch.zeros(3, 4))
    many = fp8.unscaled(torch.zeros(2, 5000, 4)).scales
    assert many.shape == (5000,) and bool((many == 1).all())
    assert any(few.scales.data_ptr() == kept.data_ptr() for kept in fp8._ones[few.values.device])


def test_what_cannot_be_done_is_said() -> None:
    with pytest.raises(ValueError, match=r"quantization=fp8 needs a GPU of compute capability 8\.9 or later, .* 8\.0"):
        limits.check_fp8("fp8", "cuda", (8, 0))
    limits.check_fp8("fp8", "cuda", (9, 0))
    limits.check_fp8("fp8", "cpu", None)
    limits.check_fp8(None, "cuda", (7, 5))
