"""The harnesses of worker and parallel tests serve here too; one thread a rank, so that results are the same
everywhere."""

import os
import sys
from pathlib import Path

os.environ.setdefault("KVERN_CPU_THREADS", "1")
for folder in (".", "../parallel"):
    sys.path.insert(0, str((Path(__file__).parent / folder).resolve()))
