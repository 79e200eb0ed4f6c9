"""Makes the helpers beside the tests importable: tests/ holds no packages (see pyproject.toml). No test sees a cluster
of the machine that it runs on.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def no_cluster(tmp_path, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no-kubeconfig"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)


@pytest.fixture
async def api():
    """An API server in this process. Imported here: most tests need none of it."""
    from fake_apiserver import FakeApi

    server = await FakeApi().start()
    yield server
    await server.stop()


@pytest.fixture
async def bench(api):
    """The operator's pass against `api`, and the hands of a user and of a cluster."""
    from effects import Bench

    bench = Bench(api)
    yield bench
    await bench.close()
