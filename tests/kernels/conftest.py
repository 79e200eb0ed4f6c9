"""Shared by the tests that run a file of Triton cases in a process of its own."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch


@pytest.fixture
def passed_cases() -> Callable[[str], int]:
    """How many cases of a file beside this one pass, where all must; Triton interprets them if there is no GPU."""

    def run_cases(name: str) -> int:
        pytest.importorskip("triton")
        # Plugins that these cases have no use for take seconds to import.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        if not torch.cuda.is_available():
            environment["TRITON_INTERPRET"] = "1"
        cases = str(Path(__file__).with_name(name))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "pytest_timeout"]
        command += ["--timeout=300", cases]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580)
        assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
        passed = re.search(r"(\d+) passed", run.stdout)
        assert passed, run.stdout[-2000:]
        return int(passed.group(1))

    return run_cases
