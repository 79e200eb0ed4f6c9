"""A hub on loopback, and a cache folder of the test's own."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for the helpers beside this file

from fake_hub import FILES, FakeHub

from kvern_engine.fetching.download import Patience
from kvern_engine.fetching.obtain import Ways


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nothing of this machine's own caches, tokens and proxies. Returns the cache folder."""
    for name in (
        *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE"),
        *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"),
        *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION"),
        *("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_REGION", "AWS_ROLE_ARN", "KVERN_CACHE_LIMIT"),
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("KVERN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def cache(alone: Path) -> Path:
    """The cache folder."""
    return alone


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A running hub with the model org/name."""
    made = FakeHub()
    made.add("org/name", dict(FILES))
    with made.running():
        monkeypatch.setenv("HF_ENDPOINT", made.url)
        yield made


@pytest.fixture
def ways() -> Ways:
    """In a hurry."""
    return Ways(patience=Patience(tries=4, first=0.01, longest=0.02), beat=0.05, stale=0.6, poll=0.02)


@pytest.fixture
def message() -> Callable[..., str]:
    """What an error says that a call must raise."""

    def of(call: Callable[[], object]) -> str:
        with pytest.raises(ValueError) as caught:
            call()
        return str(caught.value)

    return of
