"""Settings of all tests."""

import contextlib
import functools
import os
import ssl
from typing import Any

# An example may take as long as the machine has other things to do: how long it took says nothing about what is tested.
with contextlib.suppress(ImportError):  # where only some tests are to run
    from hypothesis import settings

    settings.register_profile("kvern", deadline=None)
    settings.load_profile("kvern")

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
