"""How GPUs agree to sum through each other's memory, or not to: two ranks over gloo, with memory that is none."""

from pathlib import Path

import torch.multiprocessing as multiprocessing
from peer_ranks import STEPS, connects


def test_all_ranks_sum_through_memory_or_none_does(tmp_path: Path) -> None:
    multiprocessing.spawn(connects, (str(tmp_path),), nprocs=2)
    assert (tmp_path / "log-1").read_text().splitlines() == [
        f"sums over GPUs go through NCCL, not through peers' memory: CUDA: {step} failed: CUDA_ERROR_UNKNOWN"
        for step in STEPS
    ]
    assert (tmp_path / "log-0").read_text() == ""
