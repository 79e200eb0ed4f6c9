"""How long sequences may be on a worker that is really loaded: what fits, what is allowed, what is said; and what is
said of a model that brings code."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvern_engine.config import EngineConfig
from kvern_engine.core.plan import AddedRow, RowSampling, StepPlan, WorkerReady
from kvern_engine.worker import create_worker
from kvern_engine.worker.worker import Worker

BLOCK_BYTES = 2 * 4 * 2 * 32 * 16 * 4  # of tiny-kjv: K and V, layers, KV heads, head size, tokens, float32


def loaded(model: str, **fields: Any) -> tuple[Any, WorkerReady]:
    worker = create_worker(EngineConfig(model=model, **{"device": "cpu", "max_num_seqs": 2, **fields}))
    return worker, worker.load()


def test_auto_takes_what_fits(tiny_path: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        _, ready = loaded(tiny_path, max_model_len="auto", kv_cache_memory_bytes=10 * BLOCK_BYTES + 5)
    assert (ready.num_blocks, ready.max_model_len) == (10, 160)
    assert "max_model_len auto: 160 tokens fit, the model's own length does not" in caplog.text
    _, ready = loaded(tiny_path, max_model_len="auto", kv_cache_memory_bytes=100 * BLOCK_BYTES)
    assert (ready.num_blocks, ready.max_model_len) == (100, 512), "the model's own, where that fits"
    with pytest.raises(ValueError, match=r"the estimated maximum model length is 160$"):
        loaded(tiny_path, kv_cache_memory_bytes=10 * BLOCK_BYTES + 5)
    with pytest.raises(ValueError, match="KV cache is needed, which is larger than the available"):
        loaded(tiny_path, max_model_len="auto", kv_cache_memory_bytes=BLOCK_BYTES - 1)


def test_auto_on_the_simulated_device() -> None:
    _, ready = loaded("sim", device="sim", max_model_len="auto", kv_cache_memory_bytes=131_072 * 1000)
    assert ready.max_model_len == ready.num_blocks * 16 == 992
    _, ready = loaded("sim", device="sim", max_model_len="auto")
    assert ready.max_model_len == 8192
    with pytest.raises(
        ValueError, match=r"max_model_len must be at most 8192 \(the profile's max_model_len\), got 9000"
    ):
        loaded("sim", device="sim", max_model_len=9000)


def test_more_than_the_model_was_made_for(
    tiny_path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(
        ValueError, match=r"must be at most 512 .* KVERN_ALLOW_LONG_MAX_MODEL_LEN=1 allows them all the"
    ):
        loaded(tiny_path, max_model_len=600)
    monkeypatch.setenv("KVERN_ALLOW_LONG_MAX_MODEL_LEN", "1")
    with caplog.at_level(logging.WARNING):
        worker, ready = loaded(tiny_path, max_model_len=600, num_gpu_blocks_override=40)
    assert ready.max_model_len == 600
    assert "max_model_len 600 is above 512, the model's max_position_embeddings" in caplog.text
    row = AddedRow(0, "long", [3] * 590, 590, list(range(37)), RowSampling(seed=0, temperature=0.0))
    result = worker.execute(StepPlan(0, [], [row], [], [], [0], [0], [590], [True])).result()
    assert len(result.tokens) == 1, "positions up to the longest have a rotation"


@pytest.mark.parametrize("trusted", [False, True])
def test_code_that_a_model_brings_is_named_and_not_run(
    tiny_path: str, tmp_path: Path, trusted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(tiny_path, tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_evil.Evil"}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    (tmp_path / "model/modeling_evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with caplog.at_level(logging.INFO):
        loaded(str(tmp_path / "model"), trust_remote_code=trusted, num_gpu_blocks_override=40)
    said = [record for record in caplog.records if "modeling_evil.py (class Evil)" in record.getMessage()]
    assert [record.levelno for record in said] == [logging.WARNING if trusted else logging.INFO]
    assert not (tmp_path / "ran").exists()


def test_a_wrong_tensor_is_named_before_memory_is_taken(tiny_path: str, tmp_path: Path) -> None:
    """The model would take a terabyte; the error comes from the headers."""
    shutil.copytree(tiny_path, tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(
        json.dumps({**config, "intermediate_size": 1 << 22, "num_hidden_layers": 200})
    )
    with pytest.raises(ValueError) as caught:
        loaded(str(tmp_path / "model"))
    text = str(caught.value)
    assert text.startswith(
        f"{tmp_path}/model: the checkpoint does not fit the model: tensors 1,764 missing: model.layers.4"
    )
    assert "gate_proj.weight in model.safetensors is [384, 128], must be [4194304, 128]" in text


def test_formats_of_files(tiny_path: str) -> None:
    with pytest.raises(ValueError, match=r"load_format gguf does not fit .*tiny-kjv \(a folder\); use auto"):
        loaded(tiny_path, load_format="gguf")
    worker, _ = loaded(tiny_path, load_format="safetensors", dtype="half", num_gpu_blocks_override=40)
    assert isinstance(worker, Worker) and str(worker.model.dtype) == "torch.float16"
