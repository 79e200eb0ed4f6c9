"""Tests that need a CUDA device: `python -m pytest tests/gpu`. Without one they skip, saying so."""

import sys
from pathlib import Path

import pytest
import torch

TINY = str(Path(__file__).parents[1] / "engine" / "models_data" / "tiny-kjv")
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for the helpers beside the tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch finds none here"))


@pytest.fixture
def tiny_path() -> str:
    return TINY
