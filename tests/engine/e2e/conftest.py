"""One server a model for all tests of this folder, and short-lived ones for tests that kill or configure theirs."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for the helpers beside this file

from e2e_harness import TINY, Serve

BLOCKS = ("--num-gpu-blocks-override", "600")
SHARED: dict[str, tuple[str, ...]] = {
    "smol": ("builtin://smollm2-135m", "--max-model-len", "1024", "--kv-cache-memory-bytes", "268435456"),
    # Small on purpose: a pool of two and a half contexts, so that requests preempt each other.
    "tiny": (str(TINY), "--device", "cpu", "--max-model-len", "256", "--num-gpu-blocks-override", "40"),
    # A thousand tokens take minutes: time enough to look at requests that run and to leave them.
    "slow": (str(TINY), "--device", "sim", "--sim-speed", "0.05", "--max-num-seqs", "8", *BLOCKS),
    # Ten times an H200's speed: this machine, not the simulated one, sets the pace.
    "sim": (str(TINY), "--device", "sim", "--sim-speed", "10", "--api-server-count", "2", "--data-parallel-size", "2"),
}

THREADS = {"smol": {"OMP_NUM_THREADS": "2"}}


class Fleet(dict[str, Serve]):
    """The shared servers by name, each started when a test first asks for it: where several processes share the tests,
    each of them would start all of them otherwise."""

    def __init__(self, folder_of: Callable[[str], Path]) -> None:
        super().__init__()
        self._folder_of = folder_of

    def __missing__(self, name: str) -> Serve:
        self[name] = Serve(*SHARED[name], tmp=self._folder_of(name), env=THREADS.get(name))
        return self[name]


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    servers = Fleet(tmp_path_factory.mktemp)
    yield servers
    for server in servers.values():
        server.stop()
    for server in servers.values():
        assert "Traceback" not in server.text(), server.text()


def _at_rest(fleet: Fleet, name: str) -> Iterator[Serve]:
    """Every test finds its server at rest and leaves it so."""
    fleet[name].assert_at_rest()
    yield fleet[name]
    fleet[name].assert_at_rest()
    assert fleet[name].process.poll() is None


@pytest.fixture
def smol(fleet: Fleet) -> Iterator[Serve]:
    yield from _at_rest(fleet, "smol")


@pytest.fixture
def tiny(fleet: Fleet) -> Iterator[Serve]:
    yield from _at_rest(fleet, "tiny")


@pytest.fixture
def slow(fleet: Fleet) -> Iterator[Serve]:
    yield from _at_rest(fleet, "slow")


@pytest.fixture
def sim(fleet: Fleet) -> Iterator[Serve]:
    yield from _at_rest(fleet, "sim")


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Serve]]:
    """Start a server of one's own on the simulated device; nothing of it may be left at the end."""
    started: list[Serve] = []

    def start(*flags: str, **options: Any) -> Serve:
        server = Serve(str(TINY), "--device", "sim", *flags, tmp=tmp_path, **options)
        started.append(server)
        return server

    yield start
    for server in started:
        server.stop()
        assert "Traceback" not in server.text(), server.text()
    assert not list(tmp_path.glob("kvern-*")), "the socket folder is left over"
