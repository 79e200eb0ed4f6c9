"""Runs `triton_cases.py`, the Triton kernels' tests, in a process in which Triton interprets if there is no GPU."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest


@pytest.mark.timeout(600)
def test_triton_kernels_match_their_references(passed_cases: Callable[[str], int]):
    assert passed_cases("triton_cases.py") >= 60


@pytest.mark.timeout(600)
def test_fp8_kernels_match_their_references(passed_cases: Callable[[str], int]):
    assert passed_cases("fp8_cases.py") >= 30


def test_the_cpu_path_does_not_import_triton():
    code = (
        "import sys, torch, kvern_kernels as k; k.rms_norm(torch.ones(1, 8), torch.ones(8), 1e-5); "
        "assert 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_an_unknown_choice_of_kernels_is_refused():
    run = subprocess.run(
        [sys.executable, "-c", "import kvern_kernels"],
        env={**os.environ, "KVERN_KERNELS": "cuda"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "KVERN_KERNELS must be 'auto', 'reference' or 'triton', got 'cuda'" in run.stderr


FORCED = """
import torch, kvern_kernels as k
from kvern_kernels import attention
meta = k.AttentionMetadata.build([1, 2], [5, 2], [[1, 2], [3]], 4)
kv, q = torch.randn(2, 1, 4, 4, 16), torch.randn(3, 2, 16)
torch.testing.assert_close(k.paged_attention(q, kv, meta, 0.25), attention.paged_attention(q, kv, meta, 0.25))
x, w = torch.randn(2, 8), torch.randn(8)
torch.testing.assert_close(k.rms_norm(x, w, 1e-5), torch.nn.functional.rms_norm(x, (8,), w, 1e-5))
"""


@pytest.mark.parametrize("choice", ["triton", "reference", "auto"])
def test_every_choice_of_kernels_gives_the_same(choice):
    if choice == "triton":
        pytest.importorskip("triton")
    environment = {**os.environ, "KVERN_KERNELS": choice, "TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, "-c", FORCED], env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-3000:]
