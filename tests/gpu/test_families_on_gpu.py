"""Every family on a GPU against itself on a CPU, in float32: the same plans, with chunks, decodes and a resumed row.

Weights are random and in a file, so that both have the same. Families with windows, soft caps or experts run without
CUDA graphs.
"""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "engine" / "models"))

from bare_models import BARE, VOCAB, write_bare

from kvern_engine.config import EngineConfig
from kvern_engine.core.plan import AddedRow, RowSampling, StepPlan
from kvern_engine.loading.config import read_model_config
from kvern_engine.loading.resolve import resolve_model
from kvern_engine.models.registry import model_class
from kvern_engine.worker.worker import Worker

GREEDY = RowSampling(seed=0, temperature=0.0)
DEVICE = "cuda"


def make(architecture: str, folder: Path) -> str:
    path = write_bare(architecture, folder)
    config = read_model_config(resolve_model(path))
    meta = model_class(architecture)(config, max_positions=1, dtype=torch.float32, device=torch.device("meta"))
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, destination in meta.destinations().items():
        noise = torch.randn(destination.part.shape, generator=generator)
        tensors[name] = 0.2 * noise + (not name.endswith("bias")) if noise.dim() == 1 else noise / 6
    save_file(tensors, folder / "model.safetensors")
    return path


def logits(model: str, device: str) -> list[torch.Tensor]:
    """Of a step with a chunk and a prompt, one with the rest beside a decode, decodes, and a row computed again."""
    worker = Worker(
        EngineConfig(model=model, device=device, dtype="float32", num_gpu_blocks_override=40, max_num_seqs=4)
    )
    worker.load()
    long, short = [(7 * i * i + 3) % VOCAB for i in range(60)], [(5 * i + 2) % VOCAB for i in range(9)]
    added = [AddedRow(0, "a", long, 60, [3, 9, 4, 11, 20], GREEDY), AddedRow(1, "b", short, 9, [7, 8], GREEDY)]
    steps = [([(0, 0, 33, False), (1, 0, 9, True)], added, []), ([(0, 33, 27, True), (1, 9, 1, True)], [], [])]
    steps += [([(0, 60 + i, 1, True), (1, 10 + i, 1, True)], [], []) for i in range(4)]
    steps += [([(2, 0, 50, True)], [AddedRow(2, "c", long[:50], 50, [30, 31, 32, 33], GREEDY)], [0])]
    found = []
    for number, (rows, new, removed) in enumerate(steps):
        plan = StepPlan(number, removed, new, [], [], *(list(part) for part in zip(*rows, strict=True)))
        pending = worker.execute(plan, return_logits=True)
        pending.result()
        assert pending.logits is not None
        found += [pending.logits[row].cpu() for row, *_ in rows]
    return found


@pytest.mark.parametrize("architecture", BARE)
def test_a_gpu_computes_what_a_cpu_does(architecture: str, tmp_path: Path) -> None:
    model = make(architecture, tmp_path)
    for ours, theirs in zip(logits(model, DEVICE), logits(model, "cpu"), strict=True):
        assert theirs.std() > 0.05
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=2e-3)
