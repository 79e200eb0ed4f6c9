"""Ready-made FP8 checkpoints: what is kept of them, and the logits against the same model with dequantized weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from worker_harness import GREEDY, plan

from kvern_engine.config import EngineConfig
from kvern_engine.core.plan import AddedRow
from kvern_engine.loading.weights import WeightsError
from kvern_engine.worker import limits
from kvern_engine.worker.worker import Worker
from kvern_kernels.fp8 import FP8, FP8_MAX

SIZES: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LINEAR = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (96, 64),
    "mlp.up_proj": (96, 64),
    "mlp.down_proj": (64, 96),
}
IDS = [(11 * i * i + 5) % 320 for i in range(30)]


def quantization(strategy: str = "tensor", ignore: list[str] | None = None, kv: bool = False) -> dict[str, Any]:
    """A quantization_config as llm-compressor writes it."""
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    inputs = {**weights, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"] if ignore is None else ignore,
        "kv_cache_scheme": {**weights, "strategy": "tensor"} if kv else None,
        "quantization_status": "compressed",
    }


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**SIZES, **config}))
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def make(folder: Path, strategy: str, head: bool, kv: bool = False, extra: str | None = None) -> tuple[str, str]:
    """(a checkpoint in FP8, the same dequantized). `extra`: scales of inputs under this name beside each weight."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    packed = {
        "model.embed_tokens.weight": random(320, 64),
        "model.norm.weight": 1 + 0.1 * random(64),
        "lm_head.weight": random(320, 64) / 8,
    }
    names = {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in LINEAR.items()}
    for i in range(2):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            packed[f"model.layers.{i}.{norm}.weight"] = 1 + 0.1 * random(64)
        if kv:
            packed[f"model.layers.{i}.self_attn.k_scale"] = torch.tensor([0.02 + 0.01 * i])
            packed[f"model.layers.{i}.self_attn.v_scale"] = torch.tensor([0.015])
    plain = dict(packed)
    if head:
        names["lm_head"] = (320, 64)
    for name, (outputs, inputs) in names.items():
        # Rows of very different size, so that it shows which scale belongs to which.
        weight = random(outputs, inputs) * 1.2 / inputs**0.5 * torch.linspace(0.5, 2, outputs)[:, None]
        largest = weight.abs().amax(1, keepdim=True) if strategy == "channel" else weight.abs().amax().view(1)
        scale = (largest / FP8_MAX).to(torch.bfloat16)
        values = (weight / scale.float()).clamp(-FP8_MAX, FP8_MAX).to(FP8)
        packed[f"{name}.weight"], packed[f"{name}.weight_scale"] = values, scale
        plain[f"{name}.weight"] = values.float() * scale.float()
        if extra:
            packed[f"{name}.{extra}"] = torch.tensor([0.1])
        if "self_attn" in name:
            plain[f"{name}.bias"] = packed[f"{name}.bias"] = 0.2 * random(outputs)
    config = {"quantization_config": quantization(strategy, [] if head else None, kv)}
    return write(folder / "fp8", config, packed), write(folder / "plain", {}, plain)


def load(spec: str, **config: object) -> Worker:
    worker = Worker(
        EngineConfig(model=spec, device="cpu", num_gpu_blocks_override=16, max_num_seqs=4, **config)  # type: ignore[arg-type]
    )
    worker.load()
    return worker


def logits(worker: Worker) -> torch.Tensor:
    added = [AddedRow(0, "a", IDS, len(IDS), [1, 2], GREEDY)]
    pending = worker.execute(plan(0, [(0, 0, len(IDS), True)], added=added), return_logits=True)
    assert pending.logits is not None
    return pending.logits[0]


@pytest.mark.parametrize(("strategy", "head"), [("tensor", False), ("channel", False), ("channel", True)])
def test_logits_are_near_those_of_the_dequantized_model(tmp_path: Path, strategy: str, head: bool) -> None:
    packed, plain = make(tmp_path, strategy, head, extra="input_scale")
    quantized, reference = load(packed), load(plain)
    found, wanted = logits(quantized), logits(reference)
    assert 0 < float((found - wanted).norm() / wanted.norm()) < 0.2  # what activations in FP8 cost; wrong scales: 1
    model, tensors = quantized.model, load_file(Path(plain) / "model.safetensors")
    for index, layer in enumerate(model.layers):  # type: ignore[attr-defined]
        prefix = f"model.layers.{index}."
        for linear, parts in (
            (layer.attention.qkv_proj, ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
            (layer.attention.o_proj, ["self_attn.o_proj"]),
            (layer.mlp.gate_up_proj, ["mlp.gate_proj", "mlp.up_proj"]),
            (layer.mlp.down_proj, ["mlp.down_proj"]),
        ):
            expected = torch.cat([tensors[f"{prefix}{part}.weight"] for part in parts])
            torch.testing.assert_close(linear._fp8.restore(), expected, rtol=1e-6, atol=1e-9)
    assert model.lm_head.is_fp8 == head  # type: ignore[attr-defined]


def test_weights_are_never_wider_than_they_come(tmp_path: Path) -> None:
    packed, _ = make(tmp_path, "channel", False)
    ready = Worker(EngineConfig(model=packed, device="cpu", num_gpu_blocks_override=16, max_num_seqs=4)).load()
    narrow = 2 * sum(outputs * inputs + 4 * outputs for outputs, inputs in LINEAR.values())
    wide = 4 * (2 * 320 * 64 + 64 + 2 * (2 * 64 + 64 + 32 + 32 + 64))
    assert ready.weight_bytes == narrow + wide


def test_scales_of_the_kv_cache_come_from_the_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    packed, _ = make(tmp_path, "tensor", False, kv=True)
    worker = load(packed)  # auto: the checkpoint says so
    assert worker.runner is not None and worker.runner.arena[0].dtype == FP8
    layers = worker.model.layers  # type: ignore[attr-defined]
    assert torch.allclose(layers[1].attention.attention.kv_scales, torch.tensor([[0.03, 0.03], [0.015, 0.015]]))
    assert "brings no scales" not in caplog.text
    wide, narrow = logits(load(make(tmp_path / "wide", "tensor", False)[0])), logits(worker)
    assert 0 < float((narrow - wide).norm() / wide.norm()) < 0.3  # wrong scales: above 1


def test_dummy_weights_in_fp8(tmp_path: Path) -> None:
    packed, _ = make(tmp_path, "channel", True, kv=True)
    assert logits(load(packed, load_format="dummy")).isfinite().all()


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    packed, _ = make(tmp_path, "channel", False)
    load(packed, quantization="fp8_per_channel")
    text = r"quantization=fp8_per_tensor does not fit a checkpoint that is quantized already \(fp8_per_channel\); leave"
    with pytest.raises(ValueError, match=text):
        load(packed, quantization="fp8_per_tensor")
    text = (
        r"the checkpoint is in FP8, which needs a GPU of compute capability 8\.9 or later, this one has 8\.0; use the"
    )
    with pytest.raises(ValueError, match=text):
        limits.check_fp8(None, "cuda", (8, 0), ready_made=True)
    limits.check_fp8(None, "cuda", (9, 0), ready_made=True)
    tensors = load_file(Path(packed) / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name].float()}, Path(packed) / "model.safetensors")
    with pytest.raises(WeightsError, match=rf"{name} in model\.safetensors is F32, must be F8_E4M3"):
        load(packed)
    del tensors[f"{name}_scale"]
    save_file(tensors, Path(packed) / "model.safetensors")
    with pytest.raises(WeightsError, match=rf"1 missing: {name}_scale"):
        load(packed)
