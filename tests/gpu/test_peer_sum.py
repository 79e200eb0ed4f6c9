"""Two GPUs: sums through each other's memory, alone and with the norm behind them, against sums in float32.

python -m pytest tests/gpu/test_peer_sum.py
"""

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as multiprocessing
from peer_sum_ranks import check_graphs, check_norms

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.parametrize(("width", "dtype"), [(4096, "bfloat16"), (4096, "float16"), (576, "bfloat16")])
def test_sums_and_norms(width: int, dtype: str, tmp_path: Path) -> None:
    multiprocessing.spawn(check_norms, (str(tmp_path / "meet"), width, getattr(torch, dtype)), nprocs=2)


@pytest.mark.parametrize("width", [4096, 576, 16384])
def test_graphs_of_any_order(width: int, tmp_path: Path) -> None:
    multiprocessing.spawn(check_graphs, (str(tmp_path / "meet"), width, torch.bfloat16), nprocs=2)
