"""Fixtures of the API server's tests."""

import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for the helpers beside this file

from server_harness import MODEL, Setup, saying

from kvern_engine.loading.resolve import resolve_model
from kvern_engine.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture
def setup() -> Iterator[Setup]:
    made = Setup()
    yield made
    made.close()


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model(str(MODEL)))


@pytest.fixture(scope="module")
def shared(tokenizer: Tokenizer) -> Iterator[Setup]:
    """One server and one core for the tests of a module; they are reset by `live`."""
    made = Setup()
    made.core()
    made.server().wait_for(200)
    yield made
    made.close()


@pytest.fixture
def live(shared: Setup, tokenizer: Tokenizer) -> Setup:
    core = shared.cores[0]
    core.refuse, core.cached_tokens, core.step_seconds = None, 0, 0.0005
    core.requests.clear()
    core.aborts.clear()
    core.aborted_choices.clear()
    core.running.set()
    core.reply = saying(tokenizer, "In the beginning God created the heaven and the earth.")
    return shared


@pytest.fixture
def http(live: Setup) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.servers[0].url, timeout=20) as client:
        yield client
