"""Settings of all tests."""

import contextlib
import functools
import os
import ssl
from pathlib import Path
from typing import Any

import pytest

# An example may take as long as the machine has other things to do: how long it took says nothing about what is tested.
with contextlib.suppress(ImportError):  # where only some tests are to run
    from hypothesis import settings

    settings.register_profile("kvern", deadline=None)
    settings.load_profile("kvern")

# Where several processes share the files and the processors, threads of torch would wait for each other, spinning.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Every client of httpx and openai reads the certificates of the world's authorities, 30 ms of a processor, and tests
# make thousands of clients of servers on loopback: here they are read once.
with contextlib.suppress(ImportError):
    import certifi

    _make_context = ssl.create_default_context
    _read_once = functools.cache(lambda file: _make_context(cafile=file))
    _WORLDS = {certifi.where(), os.environ.get("SSL_CERT_FILE") or certifi.where()}

    def _create_default_context(*args: Any, **options: Any) -> ssl.SSLContext:
        file = options.get("cafile")
        worlds = not args and len(options) == 1 and isinstance(file, str) and file in _WORLDS
        return _read_once(file) if worlds else _make_context(*args, **options)

    ssl.create_default_context = _create_default_context

# Several processes share the files (`make unit`): a long one that begins last would have the end to itself.
_LONG_FIRST = (
    "engine/parallel_pod",
    "kernels/test_triton",
    "engine/e2e",
    "engine/parallel",
    "engine/processes",
    "operator/test_local",
    "operator/test_whole_path",
    "operator",
    "router",
    "engine/server",
)
_TESTS = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    file = item.path.relative_to(_TESTS).as_posix() if item.path.is_relative_to(_TESTS) else ""
    return next((i for i, start in enumerate(_LONG_FIRST) if file.startswith(start)), len(_LONG_FIRST))
