"""Makes the helpers beside the tests importable: tests/ holds no packages (see pyproject.toml). No test sees a cluster
of the machine that it runs on.
"""

import asyncio
import contextlib
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


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A small cluster that $KUBECONFIG leads to; nothing runs locally."""
    from cluster_commands import small_cluster

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with small_cluster(tmp_path / "config") as api:
        yield api


@pytest.fixture
async def make_up(tmp_path, monkeypatch):
    """Makes a `kvern up` of the tests' service with something added to its spec; not started yet."""
    import local_up  # its manifest may be changed until a service is made of it

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("FAKE_CONTROL", str(tmp_path / "control.json"))
    (tmp_path / "control.json").write_text("{}")
    made = []

    def make(addition="", gpus=(), timing=local_up.QUICK):
        made.append(local_up.Up(tmp_path, local_up.MANIFEST + addition, gpus, timing))
        return made[-1]

    yield make
    for up in made:
        if up.task is not None and not up.task.done():
            up.runner.stop()
            up.runner.stop()
            with contextlib.suppress(Exception):
                async with asyncio.timeout(60):
                    await up.task
        up.state.__exit__()
