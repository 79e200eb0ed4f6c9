"""Models and workers shared by the tests of this folder; one thread, so that results are the same on every machine."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("KVERN_CPU_THREADS", "1")

from worker_harness import LoadedModel, load_model

from kvern_engine.loading.resolve import ModelNotFoundError, resolve_model

TINY = str(Path(__file__).parents[1] / "models_data" / "tiny-kjv")


@pytest.fixture(scope="session")
def tiny_path() -> str:
    return TINY


@pytest.fixture(scope="session")
def tiny() -> Iterator[LoadedModel]:
    yield load_model(TINY)


@pytest.fixture(scope="session")
def smol() -> Iterator[LoadedModel]:
    try:
        resolve_model("builtin://smollm2-135m")
    except ModelNotFoundError as error:
        pytest.skip(str(error))
    yield load_model("builtin://smollm2-135m")
