"""Makes `core_fake_worker` and `core_harness` importable by the tests of this folder (tests are no package)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
