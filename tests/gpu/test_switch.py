"""Two GPUs whose layout changes while requests run: the tokens of one that is left alone, over NCCL.

    python -m pytest tests/gpu/test_switch.py

The ranks are processes, cores are in this one (`tests/engine/parallel/switch_harness.py`); a whole server under load is
`benchmarks/switch_h200.py`.
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "engine" / "parallel"))

from made_model import make_model
from switch_harness import SwitchingPod, left_alone

from kvern_engine.config import EngineConfig
from kvern_engine.ipc import AddRequest
from kvern_engine.parallel.layout import Layout
from kvern_engine.request import SamplingParams
from kvern_engine.worker.warm_up import warm_other_layouts
from kvern_engine.worker.worker import Worker

two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def config(model: str, data: int, tensor: int, **fields: Any) -> EngineConfig:
    small = {"max_num_seqs": 8, "num_gpu_blocks_override": 160, "max_num_batched_tokens": 64, "dtype": "float32"}
    sizes = {"data_parallel_size": data, "tensor_parallel_size": tensor}
    return EngineConfig(model=model, device="cuda", **{**small, **fields}, **sizes)


def requests(count: int, tokens: int = 60) -> list[AddRequest]:
    found = []
    for i in range(count):
        prompt = list(range(2, 34)) + [100 + i] * 5 if i % 2 else [200 + i] * (9 + i)
        params = SamplingParams(temperature=0.0, seed=i, max_tokens=tokens, ignore_eos=True, n=3 if i == 4 else 1)
        found.append(AddRequest(f"r{i}", 0, prompt, params, float(i)))
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("made"))


@two
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_streams_go_on_between_two_gpus(model: str, tmp_path: Path, eager: bool) -> None:
    expected = left_alone(config(model, 1, 1, enforce_eager=eager), requests(6))
    torch.cuda.empty_cache()
    pod = SwitchingPod(config(model, 2, 1, enforce_eager=eager), tmp_path, count=2, tight=True, method="spawn")
    try:
        for i, request in enumerate(requests(6)):
            pod.add(i % 2, request)
        pod.steps(4)
        kept = recomputed = 0
        for tensor in (2, 1, 2, 1):
            placed = pod.switch(tensor)
            kept, recomputed = kept + placed.kept, recomputed + placed.recomputed
            assert [r.num_blocks for r in pod.ready] == [160, 160]
            pod.steps(4)
        pod.switch(2, keep=False)
        assert pod.layout == Layout(2, 1)
        pod.run()
        assert pod.tokens() == expected
        assert kept > 0 and recomputed == 0
        assert all(core.scheduler.pool.num_used == 0 for core in pod.cores)
    finally:
        pod.close()


@two
def test_text_in_bfloat16_is_that_of_no_switch(model: str, tmp_path: Path) -> None:
    """Of an engine of one GPU that nobody switched, to the last token: `batch_invariant` gives sums one order."""
    fields = {"dtype": "bfloat16", "batch_invariant": True}
    expected = left_alone(config(model, 1, 1, **fields), requests(6, tokens=200))
    torch.cuda.empty_cache()
    pod = SwitchingPod(config(model, 2, 1, **fields), tmp_path, count=2, tight=True, method="spawn")
    try:
        for i, request in enumerate(requests(6, tokens=200)):
            pod.add(i % 2, request)
        for tensor in (2, 1, 2, 1):
            pod.steps(20)
            assert pod.switch(tensor).recomputed == 0
        pod.run()
        assert pod.tokens() == expected
    finally:
        pod.close()


@two
def test_the_arena_is_made_anew_without_a_bound(model: str, tmp_path: Path) -> None:
    """Sized from the card's memory, there and back: nothing leaks from switch to switch."""
    fields = {"num_gpu_blocks_override": None, "gpu_memory_utilization": 0.8, "max_num_batched_tokens": 512}
    pod = SwitchingPod(config(model, 2, 1, **fields), tmp_path, count=2, tight=True, method="spawn")
    try:
        blocks = []
        for tensor in (2, 1, 2, 1, 2, 1):
            pod.switch(tensor)
            blocks.append(pod.ready[0].num_blocks)
        assert blocks[1] == blocks[3] == blocks[5] and blocks[2] == blocks[4]
        pod.switch(2, keep=False)
        for i, request in enumerate(requests(4, tokens=5)):
            pod.add(i % 2, request)
        pod.run()
        assert all(len(tokens) == 5 for tokens in pod.tokens().values())
    finally:
        pod.close()


def test_other_layouts_are_warmed_up_on_one_gpu(model: str) -> None:
    worker = Worker(config(model, 1, 1))
    worker.load()
    worker.layout = Layout(2, 1)
    before = torch.cuda.memory_allocated()
    assert {tuple(weight.shape) for weight in warm_other_layouts(worker) if isinstance(weight, torch.Tensor)}
    assert torch.cuda.memory_allocated() - before < 64 << 20
