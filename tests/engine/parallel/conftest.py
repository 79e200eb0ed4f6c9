"""Models and rank processes shared by the tests of this folder."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
os.environ["KVERN_CPU_THREADS"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

from made_model import make_model
from parallel_harness import Ranks

TINY = str(Path(__file__).parents[1] / "models_data" / "tiny-kjv")


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    made = Ranks(4, tmp_path_factory.mktemp("ranks"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def made_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="session")
def tiny_path() -> str:
    return TINY
