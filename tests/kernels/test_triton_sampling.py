"""Runs `sampling_cases.py` in a process in which Triton interprets if there is no GPU."""

from collections.abc import Callable

import pytest


@pytest.mark.timeout(600)
def test_triton_sampling_matches_its_reference(passed_cases: Callable[[str], int]):
    assert passed_cases("sampling_cases.py") >= 16
