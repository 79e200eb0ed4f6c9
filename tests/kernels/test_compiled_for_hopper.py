"""What only runs on a GPU compiles for one wherever Triton is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(300)
def test_a_decode_step_compiles_for_hopper():
    pytest.importorskip("triton")
    script = Path(__file__).with_name("compile_for_hopper.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout == "compiled\n"
