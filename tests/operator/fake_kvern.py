"""Stands for `kvern` in the tests of local mode that fetch a model: the real `kvern fetch`, the fake engine else."""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    if sys.argv[1] == "fetch":
        from kvern_engine.cli import main

        raise SystemExit(main(sys.argv[1:]))
    runpy.run_path(str(Path(__file__).with_name("fake_engine.py")), run_name="__main__")
