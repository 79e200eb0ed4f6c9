"""The cases that `benchmarks/sanitizer.py` runs on a GPU machine by name are there."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_chosen_case_is_there(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from sanitizer import CHOSEN

    names = [f"tests/kernels/{file}::{case}" for file, cases in CHOSEN.items() for case in cases]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *names]
    environment = {**os.environ, "KVERN_TEST_FULL": "1"}  # as on a GPU: each case with each type
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{len(names)} tests collected" in run.stdout
