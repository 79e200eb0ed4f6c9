"""Every architecture in GGUF: small models that transformers saves, converted as llama.cpp's converters do it (names
from the `gguf` package's own map), must come back tensor for tensor, with the configuration that the folder gives."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from kvern_engine.loading.config import read_model_config
from kvern_engine.loading.gguf import GGUFError, GGUFFile
from kvern_engine.loading.gguf_config import gguf_eos
from kvern_engine.loading.parts import WeightPart
from kvern_engine.loading.resolve import ModelFiles, resolve_model
from kvern_engine.loading.weights import iter_weights, weight_shapes
from kvern_engine.models.registry import model_class
from kvern_engine.worker.load import check_checkpoint, load_weights

LAYERS = 3
SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [2.0 + 0.5 * i for i in range(6)],
    "original_max_position_embeddings": 128,
    "partial_rotary_factor": 0.75,
    "rope_theta": 10000.0,
}
# Architecture in GGUF (":" and a variant) -> transformers' classes and what differs from SHAPE.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_theta": 500000.0}),
    "llama:mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3moe": (
        "Qwen3Moe",
        {
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "gemma2": ("Gemma2", {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 32}),
    "gemma3": (
        "Gemma3",
        {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 32, "num_hidden_layers": 7},
    ),
    "phi3": ("Phi3", {"sliding_window": 31, **IDS}),
    "phi3:longrope": (
        "Phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128, **IDS},
    ),
    "gpt2": ("GPT2", {}),
}


def save(variant: str, folder: Path) -> ModelFiles:
    kind, changes = MODELS[variant]
    if kind == "GPT2":
        config = transformers.GPT2Config(vocab_size=96, n_positions=128, n_embd=64, n_layer=LAYERS, n_head=4, **IDS)
        model: Any = transformers.GPT2LMHeadModel
    else:
        name = f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config"
        config = getattr(transformers, name)(**{**SHAPE, **changes})
        model = getattr(transformers, f"{kind}ForCausalLM")
    torch.manual_seed(3)
    made = model(config)
    with torch.no_grad():
        for parameter in made.parameters():  # norms and biases too: those of 1 and 0 would hide a mistake
            parameter.normal_(0.0, 0.5)
    made.save_pretrained(folder)
    return ModelFiles("m", "folder", folder)


def stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts' matrices on top of one another."""
    out: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            out[name] = tensor
            continue
        head, _, rest = name.partition(".experts.")
        _, _, matrix = rest.partition(".")
        if "block_sparse_moe" in head:  # the converter's own names of Mixtral
            head = head.replace("model.", "").replace("block_sparse_moe", "feed_forward")
        out.setdefault(f"{head}.experts.{matrix}", []).append(tensor)
    return {name: np.stack(tensor) if isinstance(tensor, list) else tensor for name, tensor in out.items()}


def rotary_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def convert(files: ModelFiles, variant: str, path: Path, quant: str = "F32", **options: Any) -> Path:
    """Writes the folder's model as GGUF: tensors of two and more dimensions in `quant`, the others in F32."""
    name = variant.partition(":")[0]
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    config = read_model_config(files)
    writer = gguf.GGUFWriter(path, name, **options)
    names = gguf.get_tensor_name_map(arch, config.num_layers)
    tensors = {key: tensor.float().numpy() for key, tensor in load_file(files.path / "model.safetensors").items()}
    add_metadata(writer, variant, config, files)
    for key, tensor in stacked(tensors).items():
        if name == "llama" and ("q_proj" in key or "k_proj" in key):
            tensor = rotary_pairs(tensor, config.num_heads if "q_proj" in key else config.num_kv_heads)
        if name.startswith("gemma") and key.endswith("norm.weight"):
            tensor = tensor + np.float32(1)
        if name == "gpt2" and tensor.ndim == 2 and key.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            tensor = np.ascontiguousarray(tensor.T)
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        own = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert own is not None, key
        kind = gguf.GGMLQuantizationType[quant if tensor.ndim > 1 else "F32"]
        writer.add_tensor(own, tensor if kind == 0 else gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_metadata(writer: gguf.GGUFWriter, variant: str, config: Any, files: ModelFiles) -> None:
    name = variant.partition(":")[0]
    raw = transformers.AutoConfig.from_pretrained(files.path)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    if name == "gpt2":
        writer.add_layer_norm_eps(raw.layer_norm_epsilon)
        return
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(raw.rms_norm_eps)
    if name != "gemma2":  # whose converter relies on the default
        writer.add_rope_freq_base(config.rope_theta)
    if name in ("qwen3", "qwen3moe", "gemma2", "gemma3"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if name == "llama":
        writer.add_rope_dimension_count(config.head_dim)
    if config.experts is not None:
        writer.add_expert_count(config.experts.num_experts)
        writer.add_expert_used_count(config.experts.per_token)
        if name == "qwen3moe":
            writer.add_expert_feed_forward_length(config.experts.intermediate_size)
    if name.startswith("gemma"):
        writer.add_sliding_window(raw.sliding_window)
    if name == "gemma2":
        writer.add_attn_logit_softcapping(raw.attn_logit_softcapping)
        writer.add_final_logit_softcapping(raw.final_logit_softcapping)
    if name == "phi3":
        writer.add_sliding_window(raw.sliding_window or 0)
        writer.add_rope_dimension_count(config.rotary_dim or config.head_dim)
        writer.add_rope_scaling_orig_ctx_len(128 if "longrope" in variant else config.max_position_embeddings)
    if "longrope" in variant:
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(4) / math.log(128)))
        for length in ("long", "short"):
            factors = np.array(LONGROPE[f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, ModelFiles] = {}

    def get(variant: str) -> ModelFiles:
        if variant not in made:
            made[variant] = save(variant, tmp_path_factory.mktemp("model"))
        return made[variant]

    return get


def comparable(files: ModelFiles) -> dict[str, Any]:
    """What both formats state: of ids and dtypes GGUF says its own."""
    config = read_model_config(files)
    fields = {key: value for key, value in asdict(config).items() if key not in ("extra", "dtype")}
    fields = {key: value for key, value in fields.items() if not key.endswith(("token_id", "token_ids"))}
    fields["attention_scale"] = config.attention_scale or config.head_dim**-0.5
    fields["windows"] = [config.window(layer) for layer in range(config.num_layers)]
    fields["embedding_scale"] = pytest.approx(config.embedding_scale)
    if config.rope_scaling and "attention_factor" in config.rope_scaling:
        assert config.rope_scaling["attention_factor"] == pytest.approx(math.sqrt(1 + math.log(4) / math.log(128)))
        fields["rope_scaling"] = {k: v for k, v in config.rope_scaling.items() if k != "attention_factor"}
    for redundant in ("sliding_layers", "sliding_window", "local_rope_theta"):
        if config.sliding_window is None or redundant == "sliding_layers":
            del fields[redundant]
    return fields


@pytest.mark.parametrize("variant", MODELS)
def test_tensors_and_configuration_come_back(models: Any, variant: str, tmp_path: Path) -> None:
    folder = models(variant)
    files = ModelFiles("m", "gguf", convert(folder, variant, tmp_path / "m.gguf"))
    assert comparable(files) == comparable(folder)
    config = read_model_config(files)
    expected = load_file(folder.path / "model.safetensors")
    if config.tie_word_embeddings:
        expected.pop("lm_head.weight", None)
    own = dict(iter_weights(files, config))
    assert set(own) == set(expected)
    assert weight_shapes(files, config) == {name: tuple(tensor.shape) for name, tensor in expected.items()}
    for name, tensor in own.items():
        if "norm" in name and variant.startswith("gemma"):  # 1 was added and taken off again
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=2e-7)
        else:
            assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("variant", MODELS)
def test_models_are_filled_as_from_the_folder(models: Any, variant: str, tmp_path: Path) -> None:
    folder = models(variant)
    filled = []
    for files in (folder, ModelFiles("m", "gguf", convert(folder, variant, tmp_path / "m.gguf"))):
        config = read_model_config(files)
        model = model_class(config.architecture)(
            config, max_positions=64, dtype=torch.float32, device=torch.device("cpu")
        )
        check_checkpoint(model_class(config.architecture), config, torch.float32, files)
        assert load_weights(model, files, lambda share: None) > 0
        filled.append({name: destination.tensor for name, destination in model.destinations().items()})
    assert filled[0].keys() == filled[1].keys() and len(filled[0]) > 20
    for name, tensor in filled[0].items():
        torch.testing.assert_close(filled[1][name], tensor, rtol=0, atol=1e-6 if "norm" in name else 0)


@pytest.mark.parametrize("variant", ["qwen3moe", "gpt2"])
def test_parts_of_experts_and_transposed_matrices(models: Any, variant: str, tmp_path: Path) -> None:
    files = ModelFiles("m", "gguf", convert(models(variant), variant, tmp_path / "m.gguf", "Q8_0"))
    config = read_model_config(files)
    whole = dict(iter_weights(files, config))
    parts = {}
    for name, tensor in whole.items():
        ranges = tuple((size // 4, size // 4 + max(1, size // 3)) for size in tensor.shape)
        parts[name] = WeightPart(tuple(tensor.shape), ranges)
    found = dict(iter_weights(files, config, parts))
    assert found.keys() == parts.keys()
    for name, part in parts.items():
        assert torch.equal(found[name], whole[name][part.slices]), name


def test_experts_of_old_files_have_a_tensor_each(models: Any, tmp_path: Path) -> None:
    files = ModelFiles("m", "gguf", convert(models("llama:mixtral"), "llama:mixtral", tmp_path / "m.gguf"))
    merged = GGUFFile(files.path)
    writer = gguf.GGUFWriter(tmp_path / "old.gguf", "llama")
    for key, value in merged.metadata.items():
        if key.startswith("llama."):
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(key, value)
    for name, info in merged.tensors.items():
        tensor = merged.dequantize(name)
        if name.endswith("_exps.weight"):
            for expert in range(info.shape[0]):
                writer.add_tensor(name.replace("_exps.weight", f".{expert}.weight"), tensor[expert].copy())
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    old = ModelFiles("m", "gguf", tmp_path / "old.gguf")
    config = read_model_config(files)
    assert read_model_config(old) == config
    expected, own = dict(iter_weights(files, config)), dict(iter_weights(old, config))
    assert own.keys() == expected.keys() and all(torch.equal(own[name], expected[name]) for name in own)


def test_split_models(models: Any, tmp_path: Path) -> None:
    whole = ModelFiles("m", "gguf", convert(models("qwen2"), "qwen2", tmp_path / "m.gguf"))
    (tmp_path / "parts").mkdir()
    convert(models("qwen2"), "qwen2", tmp_path / "parts" / "m.gguf", split_max_tensors=10)
    paths = sorted((tmp_path / "parts").iterdir())
    assert [path.name for path in paths] == [f"m-{i:05}-of-{len(paths):05}.gguf" for i in range(1, len(paths) + 1)]
    assert len(paths) > 2
    config = read_model_config(whole)
    expected = dict(iter_weights(whole, config))
    for path in (paths[0], paths[-1], tmp_path / "parts"):  # any part, or the folder, stands for the model
        files = resolve_model(str(path))
        assert files.kind == "gguf" and read_model_config(files) == config
        own = dict(iter_weights(files, config))
        assert own.keys() == expected.keys() and all(torch.equal(own[name], expected[name]) for name in own)
    assert resolve_model(str(paths[1])).name == "m" and resolve_model(str(tmp_path / "parts")).name == "parts"
    misnamed = tmp_path / "parts" / "other.gguf"
    misnamed.write_bytes(paths[1].read_bytes())
    expect(misnamed, "it is a part of a model in", "must be called NAME-00002-of-")
    swapped = paths[2].read_bytes()
    paths[2].write_bytes(paths[1].read_bytes())
    expect(paths[0], str(paths[2]), "its split.no and split.count are 1 and", "they must be 2 and")
    paths[2].write_bytes(swapped[: len(swapped) // 2])
    expect(paths[0], str(paths[2]), "truncated GGUF file")
    paths[2].unlink()
    expect(paths[0], str(paths[0]), f"the model has {len(paths)} files and {paths[2].name} is missing; download it too")
    expect(paths[1], f"{paths[2].name} is missing")


def expect(path: Path, *texts: str) -> None:
    with pytest.raises(GGUFError) as caught:
        GGUFFile(path)
    for text in texts:
        assert text in str(caught.value)


def test_ends_of_turns_are_found_where_the_file_names_none() -> None:
    def ends(tokens: list[str], kinds: list[int], **ids: int) -> tuple[int, ...]:
        values = {f"tokenizer.ggml.{name}_token_id": index for name, index in ids.items()}
        return gguf_eos({"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds, **values})

    phi, kinds = ["a", "<|endoftext|>", "<|end|>", "<|im_end|>"], [1, 3, 3, 1]
    assert ends(phi, kinds, eos=1) == (1, 2)  # ordinary text that looks like an end is none
    assert ends(phi, kinds, eos=1, eot=0) == (1, 0) and ends(phi, kinds, eos=2) == (2,)
    assert ends(["<end_of_turn>"], [3]) == (0,) and ends(phi, kinds, eos=2, eom=1) == (2, 1)
