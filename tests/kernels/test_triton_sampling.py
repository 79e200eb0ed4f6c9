"""Runs `sampling_cases.py` in a process in which Triton interprets if there is no GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CASES = Path(__file__).with_name("sampling_cases.py")


@pytest.mark.timeout(600)
def test_triton_sampling_matches_its_reference():
    pytest.importorskip("triton")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=300", str(CASES)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed and int(passed.group(1)) >= 24
