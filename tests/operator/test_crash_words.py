"""The operator's names for crashes against the sentences that the engine really says."""

import pytest

from kvern_engine.children import how_it_ended
from kvern_engine.loading.resolve import ModelNotFoundError, resolve_model
from kvern_engine.worker.memory import too_small_message
from kvern_operator.crashes import crash_reason
from kvern_operator.loglines import telling_line

BEFORE = "time=t level=info process=supervisor msg=starting model=x\n"


def named(sentence: str, exit_code: int = 1) -> str:
    """As `kvern serve` ends: the sentence on standard error, which the kubelet keeps."""
    line = telling_line(f"{BEFORE}kvern serve: error: {sentence}\n")
    return crash_reason("engine", "CrashLoopBackOff", "", exit_code, line)


@pytest.mark.parametrize(
    "uri",
    [
        "/models/claim/no/such/folder",
        "/models/claim/file.bin",
        "builtin://nothing",
        "builtin://smollm2-135m",
        "builtin://tiny-kjv",
        "hf://org/name",
        "hf://wrong",
        "s3://bucket/path",
    ],
)
def test_a_model_that_is_not_there(uri, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("KVERN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("KVERN_MODELS_DIR", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError) as error:
        resolve_model(uri)
    assert named(str(error.value)) == "ModelNotFound", str(error.value)


def test_a_folder_without_a_model_and_a_file_of_another_kind(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"")
    for place in (tmp_path, tmp_path / "weights.bin"):
        with pytest.raises(ModelNotFoundError) as error:
            resolve_model(str(place))
        assert named(str(error.value)) == "ModelNotFound"


def test_a_model_that_does_not_fit():
    assert named(too_small_message(1 << 20, 1 << 20, block_size=16, max_model_len=4096)) == "ModelDoesNotFit"


def test_a_rank_that_the_kernel_ended():
    assert named(f"worker 0 {how_it_ended(-9)}") == "OutOfMemory"
    assert named(f"worker 0 {how_it_ended(1)}") == "CrashLoopBackOff"


def test_arguments_that_the_engine_does_not_take(capsys):
    from kvern_engine.cli import main

    code = main(["serve", "builtin://smollm2-135m", "--block-size", "3"])
    line = telling_line(capsys.readouterr().err)
    assert crash_reason("engine", "Error", "", code, line) == "BadArguments", line


def test_a_router_is_no_engine():
    assert crash_reason("router", "CrashLoopBackOff", "", 2, "kvern serve: error: model 'x'") == "CrashLoopBackOff"
