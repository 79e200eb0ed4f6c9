"""FP8 weights shared by several ranks: the numbers of one rank, but for the rounding of activations."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from bare_models import write_bare
from test_made_up_weights import config, plans
from thread_ranks import run_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvern_engine.config import EngineConfig
from kvern_engine.layers.linear import Linear
from kvern_engine.layers.mlp import GatedMLP
from kvern_engine.models.llama import LlamaDecoderLayer
from kvern_engine.parallel.groups import TensorGroup
from kvern_engine.parallel.layout import Layout
from kvern_kernels import Fp8Weight, unscaled

sys.path.insert(0, str(Path(__file__).parents[1] / "worker"))

from test_fp8_checkpoint import make


def prompts(made: EngineConfig) -> np.ndarray:
    """Logits of a step of two prompts; the next ones would depend on the tokens that are sampled."""
    (found,) = run_ranks(made, plans()[:1])[1]
    return np.concatenate([found[row].numpy() for row in sorted(found)])


def error(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("quantization", ["fp8", "fp8_per_channel"])
def test_ranks_compute_what_one_does(tmp_path: Path, quantization: str) -> None:
    folder = write_bare("LlamaForCausalLM", tmp_path)
    exact = prompts(config(folder))
    one = prompts(config(folder, quantization=quantization))
    two = prompts(config(folder, Layout(1, 2, 1), quantization=quantization))
    assert 0.001 < error(one, exact) < 0.15
    # Each rank rounds its part of a row by that part's largest element: nearer to the exact numbers, if anything.
    assert error(two, one) < 0.1 and error(two, exact) < 1.3 * error(one, exact)


@pytest.mark.parametrize(("strategy", "head"), [("tensor", False), ("channel", True)])
def test_a_checkpoint_in_fp8(tmp_path: Path, strategy: str, head: bool) -> None:
    """Biases, scales of outputs and a head in FP8 go to the ranks that hold them."""
    packed, plain = make(tmp_path, strategy, head)

    def logits(spec: str, ranks: int) -> np.ndarray:
        sizes: dict[str, Any] = {"num_gpu_blocks_override": 20, "block_size": 4, "max_num_seqs": 4}
        made = EngineConfig(model=spec, device="cpu", tensor_parallel_size=ranks, **sizes)
        return prompts(made)

    wanted = logits(plain, 1)
    one, two = error(logits(packed, 1), wanted), error(logits(packed, 2), wanted)
    assert 0 < one < 0.2 and 0 < two < 1.3 * one


class Known(TensorGroup):
    """The first of two ranks, where it is known what the other one gives."""

    def __init__(self, other: Tensor) -> None:
        super().__init__(2, 0)
        self._other = other

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat([x, self._other.view_as(x)], dim=1)


@pytest.mark.parametrize("per_channel", [False, True])
def test_a_shared_matrix_has_the_scales_of_the_whole(per_channel: bool) -> None:
    torch.manual_seed(2)
    whole = torch.randn(24, 64) * torch.linspace(0.1, 3, 64)  # the largest ones are the second rank's
    wanted = Fp8Weight.quantize(whole, per_channel).restore()[:, :32]
    layer = Linear(32, 24, dtype=torch.float32, device=torch.device("cpu"))
    layer.weight.copy_(whole[:, :32])
    other = whole[:, 32:].abs()
    layer.quantize_fp8(per_channel, Known(other.amax(1) if per_channel else other.amax()))
    assert isinstance(layer.stored, Fp8Weight)
    assert torch.equal(layer.stored.restore(), wanted)
    alone = Linear(32, 24, dtype=torch.float32, device=torch.device("cpu"))
    alone.weight.copy_(whole[:, :32])
    alone.quantize_fp8(per_channel)
    assert isinstance(alone.stored, Fp8Weight)
    assert not torch.equal(alone.stored.restore(), wanted)


@pytest.mark.parametrize("rows", [0, 1, 1024, 3000])
def test_rows_without_scales(rows: int) -> None:
    values = torch.randn(rows, 4)
    scaled = unscaled(values)
    assert scaled.scales.shape == (rows,) and torch.equal(scaled.restore(torch.float32), values)


@pytest.mark.parametrize("quantized", [False, True])
def test_nothing_stands_between_a_product_and_the_norm_that_adds_its_parts(
    quantized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU that norm reads the residual before the kernel in front of it has ended (`launch_triton.py`): the rows
    of it that are wanted must be chosen before the product."""
    order: list[str] = []

    class Recorded(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            order.append(str(func))
            return func(*args, **(kwargs or {}))

    class Heads:
        def __call__(self, *given: Any) -> None: ...

        def output(self, *given: Any) -> None:
            order.append("product")

        fp8 = output

    def norm(x: Any, residual: Tensor) -> tuple[Tensor, Tensor]:
        order.append("norm")
        return residual, residual

    monkeypatch.setattr(GatedMLP, "fp8", lambda self, x: x)
    monkeypatch.setattr(GatedMLP, "__call__", lambda self, x, residual: x)
    norms = SimpleNamespace(add=norm, add_fp8=norm)
    layer: Any = SimpleNamespace(
        input_norm=norms, attention=Heads(), post_attention_norm=norms, mlp=object.__new__(GatedMLP)
    )
    wanted: Any = SimpleNamespace(index=torch.tensor([1]))
    step = LlamaDecoderLayer.fp8 if quantized else LlamaDecoderLayer.__call__
    none: Any = None
    x = residual = torch.zeros(3, 4)
    with Recorded():  # type: ignore[no-untyped-call]
        step(layer, x, residual, none, none, none, none, wanted)  # type: ignore[arg-type]
    assert order == ["norm", "aten.index_select.default", "product", "norm"]
