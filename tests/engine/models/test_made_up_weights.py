"""`--load-format dummy` over every family and layout, without a file of weights; and layers whose weights stay on the
host (`--cpu-offload-gb`), which must compute the same."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bare_models import BARE, VOCAB, write_bare
from hypothesis import given
from hypothesis import strategies as st
from thread_ranks import run_ranks
from torch import Tensor

from kvern_engine.config import EngineConfig
from kvern_engine.core.plan import AddedRow, RowSampling, StepPlan
from kvern_engine.inspection.sizes import parameters, rank_elements
from kvern_engine.loading.checkpoint import WeightsError
from kvern_engine.loading.config import read_model_config
from kvern_engine.loading.families import READERS
from kvern_engine.loading.resolve import resolve_model
from kvern_engine.models.registry import model_class
from kvern_engine.parallel.groups import ParallelContext, TensorGroup
from kvern_engine.parallel.layout import Layout
from kvern_engine.worker.offload import (
    NO_OFFLOAD,
    OffloadedLayer,
    Ring,
    check_host_memory,
    layer_bytes,
    offload,
    pin_for_cuda,
    plan_offload,
)
from kvern_engine.worker.worker import Worker

GREEDY = RowSampling(seed=0, temperature=0.0)


def config(folder: str, layout: Layout | None = None, **fields: Any) -> EngineConfig:
    layout = layout or Layout()
    fields = {"load_format": "dummy", "seed": 5, "device": "cpu", "max_num_seqs": 4, **fields}
    sizes = {"tensor_parallel_size": layout.tensor, "pipeline_parallel_size": layout.pipeline}
    return EngineConfig(model=folder, num_gpu_blocks_override=20, block_size=4, **sizes, **fields)


def plans() -> list[StepPlan]:
    """Two rows: prompts of 13 and 5 tokens, then three tokens each."""
    prompts = [[(7 * i + 3) % VOCAB for i in range(13)], [(11 * i + 5) % VOCAB for i in range(5)]]
    added = [
        AddedRow(row, f"r{row}", list(prompt), len(prompt), list(range(8 * row, 8 * row + 6)), GREEDY)
        for row, prompt in enumerate(prompts)
    ]
    both = [0, 1], [True, True]
    first = StepPlan(0, [], added, [], [], both[0], [0, 0], [13, 5], both[1])
    return [first, *(StepPlan(i, [], [], [], [], both[0], [12 + i, 4 + i], [1, 1], both[1]) for i in range(1, 4))]


def run(worker: Worker) -> tuple[list[list[list[int]]], list[np.ndarray]]:
    """Tokens and logits of the steps of `plans`."""
    worker.reset()
    tokens, logits = [], []
    for plan in plans():
        pending = worker.execute(plan, return_logits=True)
        tokens.append(pending.result().tokens)
        logits += [pending.logits[row].clone().numpy() for row in plan.rows]  # type: ignore[index]
    return tokens, logits


def test_every_family_is_there() -> None:
    assert BARE.keys() == READERS.keys()


@pytest.fixture(scope="module", autouse=True)
def plain_layouts() -> Iterator[None]:
    """Weights as on a GPU, not in the layouts that a CPU multiplies fastest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvern_engine.worker.worker.CPU_LAYOUT_BYTES", 0)
        yield


@pytest.fixture(scope="module", params=BARE)
def worker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    made = Worker(config(write_bare(request.param, tmp_path_factory.mktemp(request.param))))
    made.load()
    yield made


def test_the_same_seed_gives_the_same_model(worker: Worker) -> None:
    tokens, logits = run(worker)
    assert all(np.isfinite(found).all() and found.std() > 0 for found in logits)
    again, other = Worker(worker.config), Worker(worker.config.model_copy(update={"seed": 6}))
    again.load()
    other.load()
    repeated = run(again)
    assert repeated[0] == tokens and all(np.array_equal(a, b) for a, b in zip(repeated[1], logits, strict=True))
    assert not np.array_equal(run(other)[1][0], logits[0])


@pytest.mark.parametrize("sums_in_norm", [False, True], ids=["", "sums in norms"])
def test_layouts_have_the_same_model(worker: Worker, sums_in_norm: bool) -> None:
    """One layout for each family, in turn; a rank makes what it holds and nothing else."""
    number = list(BARE).index(worker.model.config.architecture)
    layout = [Layout(1, 2, 1), Layout(1, 1, 2), Layout(1, 2, 2)][number % 3]
    tokens, logits = run(worker)
    results, found = run_ranks(config(worker.config.model, layout), plans(), sums_in_norm)
    assert [result.tokens for result in results] == tokens, str(layout)
    flat = [step[row].numpy() for step in found for row in (0, 1)]
    assert max(float(np.abs(a - b).max()) for a, b in zip(flat, logits, strict=True)) < 1e-4


def test_without_dummy_the_missing_files_are_named(worker: Worker) -> None:
    with pytest.raises(WeightsError, match=r"no \.safetensors file"):
        Worker(worker.config.model_copy(update={"load_format": "auto"})).load()


@pytest.mark.parametrize("layout", [Layout(), Layout(1, 2, 1), Layout(1, 2, 2)], ids=str)
def test_parameters_are_counted_as_they_are(worker: Worker, layout: Layout) -> None:
    """What `kvern inspect` computes is what a rank holds."""
    model = worker.model.config
    for stage in range(layout.pipeline):
        context = ParallelContext(layout, layout.rank_of(0, stage, 0), TensorGroup(layout.tensor, 0))
        build = model_class(model.architecture)
        meta = build(model, max_positions=1, dtype=torch.float32, device=torch.device("meta"), parallel=context)
        held = {name: found.tensor.numel() for name, found in meta.destinations().items()}
        assert rank_elements(model, layout, stage).total == sum(held.values()), str(layout)
    assert layout.engine_size > 1 or parameters(model) == sum(held.values())


# ---------------------------------------------------------------- layers on the host


class LateCopies:
    """A device's copies at their worst: what a slot held is spoiled as soon as a copy to it is started, and what comes
    is there no sooner than somebody has waited for it."""

    def __init__(self) -> None:
        self.pending: dict[int, tuple[Tensor, Tensor]] = {}
        self.started = 0

    def start(self, slot: int, into: Tensor, source: Tensor) -> None:
        into.fill_(0xFF)  # NaN in every type of floating point
        self.pending[slot] = into, source
        self.started += 1

    def wait(self, slot: int) -> None:
        if slot in self.pending:
            into, source = self.pending.pop(slot)
            into.copy_(source)


def test_layers_on_the_host_compute_the_same(worker: Worker) -> None:
    tokens, logits = run(worker)
    made = Worker(worker.config)
    made.load()
    sizes = layer_bytes(type(made.model), made.model.config, torch.float32, ParallelContext.single())
    plan = plan_offload(sizes, sizes[1])
    pinned: list[int] = []
    copies = LateCopies()
    offload(made.model, plan, copies, lambda piece: pinned.append(piece.numel()))
    layers: list[Any] = made.model.layers  # type: ignore[attr-defined]
    assert [isinstance(layer, OffloadedLayer) for layer in layers] == [index in plan.layers for index in range(5)]
    assert len(pinned) == len(plan.layers) >= 3 and sum(pinned) >= plan.host_bytes
    found = run(made)
    assert found[0] == tokens and all(np.array_equal(a, b) for a, b in zip(found[1], logits, strict=True))
    assert copies.started == 2 + len(plan.layers) * len(plans()), "each layer once a step, and two to begin with"
    assert np.array_equal(run(made)[1][0], logits[0])


@given(st.integers(1, 12), st.lists(st.integers(0, 3), max_size=12))
def test_a_slot_holds_what_computes(count: int, broken: list[int]) -> None:
    """Whatever steps are broken off: between enter and leave the layer's bytes are in its slot."""
    pieces = [torch.full((4 + index % 3,), index, dtype=torch.uint8) for index in range(count)]
    slots = [torch.zeros(8, dtype=torch.uint8) for _ in range(2)]
    ring = Ring(pieces, slots, LateCopies())
    for short in [*broken, 0, 0]:
        for turn in range(max(0, count - short)):
            ring.enter(turn)
            held = slots[ring.slot_of(turn)][: pieces[turn].numel()]
            assert torch.equal(held, pieces[turn])
            if turn < count - short - 1 or not short:
                ring.leave(turn)


@given(st.integers(0, 40), st.integers(1, 100), st.integers(0, 4000))
def test_plans_free_what_is_asked_for(count: int, size: int, wanted: int) -> None:
    sizes = {10 + index: size + index % 2 for index in range(count)}
    plan = plan_offload(sizes, wanted)
    assert len(set(plan.layers)) == len(plan.layers) and set(plan.layers) <= sizes.keys()
    assert list(plan.layers) == sorted(plan.layers)
    if plan.layers:
        held = [sizes[index] for index in plan.layers]
        assert plan.freed == sum(held) - 2 * max(held) > 0
        assert (plan.host_bytes, plan.slot_bytes, plan.count) == (sum(held), max(held), count)
    whole = sum(sizes.values()) - 2 * max(sizes.values(), default=0)
    assert plan.freed >= wanted or plan.freed >= whole - 2 * (size + 1) or count < 3
    if plan.layers and len(plan.layers) < count:
        gaps = [b - a for a, b in zip(plan.layers, plan.layers[1:], strict=False)]
        assert max(gaps) - min(gaps) <= 1, "evenly spread"


def test_what_cannot_be_offloaded() -> None:
    gib = 1 << 30
    plan = plan_offload(dict.fromkeys(range(32), gib // 2), 4 * gib)
    assert str(plan) == (
        "10 of 32 layers stay in host memory (5.00 GiB), which frees 4.00 GiB on the device; steps run "
        "without CUDA graphs"
    )
    check_host_memory(plan, 4, 8 * gib)
    with pytest.raises(MemoryError) as full:
        check_host_memory(plan, 4, 2 * gib)
    assert str(full.value) == (
        "cpu_offload_gb=4 needs 5.00 GiB of host memory for a rank, 2.00 GiB are available to it: lower it, or give "
        "the pod more memory"
    )
    with pytest.raises(ValueError, match="cpu_offload_gb=1 frees nothing: a rank needs at least 3 layers for that"):
        check_host_memory(plan_offload({0: 5, 1: 5}, gib), 1, gib)
    assert plan_offload({0: 5, 1: 5, 2: 5}, 1).layers == (0, 1, 2)
    assert plan_offload({}, 1) == NO_OFFLOAD


class Cudart:
    """What locking memory needs of the CUDA runtime."""

    def __init__(self, refuses: bool = False) -> None:
        self.locked: set[int] = set()
        self.refuses = refuses

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert address not in self.locked, "already locked: CUDA error 712"
        if not self.refuses:
            self.locked.add(address)
        return 2 if self.refuses else 0

    def cudaHostUnregister(self, address: int) -> int:
        self.locked.remove(address)
        return 0


def test_memory_is_locked_for_as_long_as_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its addresses may be given to others afterwards, who could neither lock nor copy them."""
    runtime = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    piece = torch.empty(1000, dtype=torch.uint8)
    pin_for_cuda(piece)
    view = piece[100:200]
    assert runtime.locked == {piece.data_ptr()}
    del piece
    assert runtime.locked, "a layer's tensors are views"
    del view
    assert not runtime.locked


def test_memory_that_cannot_be_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Cudart(refuses=True))
    with pytest.raises(MemoryError) as caught:
        pin_for_cuda(torch.empty(3000, dtype=torch.uint8))
    assert str(caught.value) == (
        "the system would not lock 3,000 bytes of host memory for cpu_offload_gb (CUDA error 2): lower it, or raise "
        "the limit of locked memory (ulimit -l)"
    )


def test_a_cpu_refuses_it(tmp_path: Path) -> None:
    folder = write_bare("LlamaForCausalLM", tmp_path)
    with pytest.raises(ValueError) as caught:
        Worker(config(folder, cpu_offload_gb=0.5)).load()
    assert str(caught.value) == (
        "cpu_offload_gb=0.5 is for GPUs: on a CPU all weights are in the host's memory; leave it out"
    )


def test_model_of_a_bare_folder(tmp_path: Path) -> None:
    """The sizes of these tests divide evenly, so that padding hides nothing."""
    model = read_model_config(resolve_model(write_bare("Qwen3MoeForCausalLM", tmp_path)))
    assert math.gcd(model.vocab_size, model.intermediate_size, model.num_heads, model.num_kv_heads) % 2 == 0
