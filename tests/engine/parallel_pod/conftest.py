"""Makes the experiments in `benchmarks/` importable: the tests run the same code that writes the tables of the docs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
