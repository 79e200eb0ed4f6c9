"""Makes the helpers beside the tests importable (tests/ holds no packages) and gives tests each helm that is found."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from helm_tool import WHERE, Helm, find_helms


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "helm" in metafunc.fixturenames:
        found = find_helms()
        missing = pytest.param(None, marks=pytest.mark.skip(reason=f"no helm found: {WHERE}"), id="no helm")
        metafunc.parametrize(
            "helm", [pytest.param(h, id=h.version) for h in found] or [missing], indirect=False, scope="session"
        )


@pytest.fixture
def render(helm: Helm):
    """Objects of the chart kvern with some values."""
    return helm.template
