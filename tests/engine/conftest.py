"""For all tests of the engine."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_log_to_a_closed_stderr() -> Iterator[None]:
    """A command that ran in this process has sent the logs to the stderr that pytest captured for one test: servers of
    later tests would write to a closed file."""
    level = logging.getLogger("kvern_engine").level
    yield
    root = logging.getLogger()
    for handler in [h for h in root.handlers if type(h) is logging.StreamHandler]:
        root.removeHandler(handler)
    logging.getLogger("kvern_engine").setLevel(level)
