"""Loading: what a worker reports, what it refuses, dummy weights; and that creating a simulated one needs no torch."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from worker_harness import GREEDY, plan

from kvern_engine.config import EngineConfig
from kvern_engine.core.plan import AddedRow
from kvern_engine.worker import create_worker
from kvern_engine.worker.profile_plan import profile_plan
from kvern_engine.worker.worker import Worker


def worker(model: str | Path, **fields: object) -> Worker:
    fields = {"device": "cpu", "num_gpu_blocks_override": 8, "max_num_seqs": 2, **fields}
    return Worker(EngineConfig(model=str(model), **fields))  # type: ignore[arg-type]


def test_ready(tiny_path: str) -> None:
    seen: list[tuple[str, float]] = []
    made = worker(tiny_path, num_gpu_blocks_override=None, kv_cache_memory_bytes=1 << 20, max_num_batched_tokens=300)
    ready = made.load(lambda phase, share: seen.append((phase, share)))
    per_token = 2 * 4 * 2 * 32 * 4  # K and V, 4 layers, 2 KV heads of 32, float32
    assert (ready.device, ready.dtype, ready.max_model_len, ready.block_size) == ("cpu", "float32", 512, 16)
    assert (ready.max_num_seqs, ready.max_num_batched_tokens) == (2, 300)
    assert ready.num_blocks == (1 << 20) // (16 * per_token)
    assert ready.kv_bytes == ready.num_blocks * 16 * per_token
    assert made.runner is not None
    assert [layer.shape for layer in made.runner.arena] == [(2, 2, ready.num_blocks, 16, 32)] * 4
    assert sum(layer.nbytes for layer in made.runner.arena) == ready.kv_bytes
    assert len({layer.untyped_storage().data_ptr() for layer in made.runner.arena}) == 4, "each has memory of its own"
    assert ready.weight_bytes == 4 * sum(t.numel() for t in load_file(Path(tiny_path) / "model.safetensors").values())
    assert list(ready.load_seconds) == ["resolve", "weights", "profile", "kv_cache"]
    shares = [share for phase, share in seen if phase == "weights"]
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] == 1
    assert not made.is_asynchronous


def test_the_default_pool_on_a_cpu(tiny_path: str) -> None:
    """Not more than all sequences at their longest take."""
    ready = worker(tiny_path, num_gpu_blocks_override=None, max_model_len=100).load()
    assert ready.num_blocks == 2 * 7
    assert ready.max_model_len == 100


def test_too_small_a_pool(tiny_path: str) -> None:
    with pytest.raises(ValueError, match="To serve at least one request with the model's max seq len") as caught:
        worker(tiny_path, num_gpu_blocks_override=None, kv_cache_memory_bytes=300_000).load()
    assert str(caught.value).endswith("the estimated maximum model length is 144")
    assert worker(tiny_path, num_gpu_blocks_override=None, kv_cache_memory_bytes=300_000, max_model_len=144).load()


def test_refusals_before_loading(tiny_path: str) -> None:
    with pytest.raises(ValueError, match="max_model_len must be at most 512"):
        worker(tiny_path, max_model_len=513).load()
    with pytest.raises(ValueError, match=r"load_format gguf does not fit .*tiny-kjv \(a folder\); use auto"):
        worker(tiny_path, load_format="gguf").load()
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device cuda: torch finds no CUDA device here; use --device cpu or auto"):
            worker(tiny_path, device="cuda")


def test_weights_that_do_not_fit_are_named(tiny_path: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_path, folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    weights["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(8, 128)
    weights["model.extra.weight"] = torch.zeros(2)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match="does not fit the model") as caught:
        worker(folder).load()
    text = str(caught.value)
    assert "1 missing: model.layers.2.mlp.up_proj.weight" in text
    assert "1 unexpected: model.extra.weight" in text
    assert "model.layers.0.self_attn.k_proj.weight in model.safetensors is [8, 128], must be [64, 128]" in text


def test_dummy_weights_need_only_a_config(tiny_path: str, tmp_path: Path) -> None:
    config = json.loads((Path(tiny_path) / "config.json").read_text())
    config |= {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}
    (tmp_path / "config.json").write_text(json.dumps(config))

    def logits() -> torch.Tensor:
        made = worker(tmp_path, load_format="dummy", dtype="bfloat16")
        assert made.load().dtype == "bfloat16"
        pending = made.execute(plan(0, [(0, 0, 3, True)], added=[AddedRow(0, "a", [5, 6, 7], 3, [0], GREEDY)]), True)
        assert pending.result().rows == [0]
        assert pending.logits is not None
        return pending.logits[0]

    first = logits()
    assert first.isfinite().all() and first.std() > 0.01
    assert torch.equal(first, logits())


def test_biases_and_an_untied_head_as_in_transformers(tiny_path: str, tmp_path: Path) -> None:
    """The parts of Llama that the test models do not have."""
    from worker_harness import load_model

    config = json.loads((Path(tiny_path) / "config.json").read_text())
    config |= {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True, "num_hidden_layers": 2}
    config["rope_parameters"] = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(tiny_path) / name, tmp_path / name)
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = worker(tmp_path, load_format="dummy")
    shapes.load()
    generator = torch.Generator().manual_seed(1)
    random = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in expected_shapes(config).items()}
    save_file(random, tmp_path / "model.safetensors")
    loaded = load_model(str(tmp_path))
    ids = list(range(40, 70))
    pending = loaded.worker.execute(
        plan(0, [(0, 0, 30, True)], added=[AddedRow(0, "a", ids, 30, [1, 2], GREEDY)]), True
    )
    assert pending.logits is not None
    assert (pending.logits[0] - loaded.expected(ids)).abs().max() < 1e-3


def expected_shapes(config: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama checkpoint with all biases."""
    hidden, inner, kv = 128, 384, 64
    modules = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (2048, hidden), "lm_head.weight": (2048, hidden)}
    shapes["model.norm.weight"] = (hidden,)
    for layer in range(config["num_hidden_layers"]):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{norm}.weight"] = (hidden,)
        for name, shape in modules.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
            shapes[f"model.layers.{layer}.{name}.bias"] = shape[:1]
    return shapes


def test_profile_plan_fills_a_step() -> None:
    made = profile_plan(tokens=8192, max_num_seqs=256, max_model_len=4096, block_size=16)
    assert made.num_tokens == 8192 and len(made.rows) == 256
    assert {len(row.blocks) for row in made.added} == {2}
    assert profile_plan(tokens=100, max_num_seqs=1, max_model_len=64, block_size=16).counts == [64]


def test_reset_forgets_rows(tiny_path: str) -> None:
    made = worker(tiny_path)
    with pytest.raises(RuntimeError, match=r"load\(\) comes before execute\(\)"):
        made.execute(plan(0))
    made.load()
    made.execute(plan(0, [(0, 0, 1, True)], added=[AddedRow(0, "a", [1], 1, [0], GREEDY)]))
    made.reset()
    assert not made.tables.host.features.any() and not made.tables.host.extras


def test_a_simulated_worker_imports_no_torch() -> None:
    code = (
        "import sys; from kvern_engine.config import EngineConfig; from kvern_engine.worker import create_worker\n"
        "import kvern_engine.worker.process\n"
        "create_worker(EngineConfig(model='sim', device='sim')).load()\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_create_worker(tiny_path: str) -> None:
    assert isinstance(create_worker(EngineConfig(model=tiny_path, device="cpu")), Worker)
