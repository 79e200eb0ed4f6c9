"""Makes the helpers beside the tests importable: tests/ holds no packages (see pyproject.toml)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
