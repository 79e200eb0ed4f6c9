"""Which tensors a checkpoint holds, under their Hugging Face names and with their shapes; no torch, nothing is loaded.

`weights.py` reads the tensors. Keeping the names and shapes apart lets a model be refused before memory is taken.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from kvern_engine.loading.config import read_json
from kvern_engine.loading.gguf import GGUFFile
from kvern_engine.loading.quantized import canonical_name, canonical_shape
from kvern_engine.loading.resolve import ModelFiles
from kvern_engine.model_config import ModelConfig

_MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own limit
_NAMES_IN_ERROR = 4

_GGUF_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_IGNORED = frozenset({"rope_freqs.weight"})  # read by config.py
_GGUF_TENSOR = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<module>\w+)\.(?P<kind>weight|bias)")


class WeightsError(ValueError):
    """A checkpoint does not hold the tensors that the model needs; the text names them."""


def hf_name(gguf_name: str) -> str | None:
    """Hugging Face name of a GGUF tensor of the Llama family; None where there is no such name."""
    match = _GGUF_TENSOR.fullmatch(gguf_name)
    if match is None:
        return None
    if match["layer"] is None:
        module = _GGUF_NAMES.get(match["module"])
        return f"{module}.{match['kind']}" if module else None
    module = _GGUF_LAYER_NAMES.get(match["module"])
    return f"model.layers.{match['layer']}.{module}.{match['kind']}" if module else None


def gguf_names(file: GGUFFile) -> dict[str, str]:
    """HF name -> GGUF name of every tensor that a model reads; a tensor without an HF name keeps its own, so that
    `check_weights` reports it."""
    return {hf_name(name) or name: name for name in file.tensors if name not in _GGUF_IGNORED}


def weight_shapes(files: ModelFiles, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors that `iter_weights` will give, read from headers alone.

    Raises WeightsError where shards are missing or damaged, GGUFError for a damaged GGUF file.
    """
    if files.kind == "gguf":
        file = GGUFFile(files.path)
        return {name: file.tensors[own].shape for name, own in gguf_names(file).items()}
    shapes: dict[str, tuple[int, ...]] = {}
    for shard in safetensors_shards(files.path):
        shapes.update(_shard_shapes(shard))
    known = ((known_name(own, config), shape) for own, shape in shapes.items())
    if config.fp8 is None:
        return {name: shape for name, shape in known if name is not None}
    return {name: canonical_shape(name, shape) for name, shape in known if name is not None}


def known_name(name: str, config: ModelConfig) -> str | None:
    """The name of a safetensors file's tensor as models know it; None for tensors that carry nothing: constants that
    old exports saved, a tied head, scales that are not used."""
    if name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight"):
        return None
    return name if config.fp8 is None else canonical_name(name)


def safetensors_shards(folder: Path) -> list[Path]:
    """The .safetensors files of a folder, from its index where it has one. Raises WeightsError."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise WeightsError(f"{index}: weight_map is missing")
        shards = [folder / name for name in sorted(set(weight_map.values()))]
        missing = [shard.name for shard in shards if not shard.is_file()]
        if missing:
            raise WeightsError(
                f"{folder}: {len(missing)} of {len(shards)} shards named by {index.name} are missing: {_some(missing)}"
            )
        return shards
    single = folder / "model.safetensors"
    shards = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if shards:
        return shards
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    hint = f"; {_some(pickled)} may hold pickled code and are not read: convert them to safetensors" if pickled else ""
    raise WeightsError(f"{folder}: no .safetensors file{hint}")


def _shard_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes from a safetensors header: 8 bytes length (little-endian), then JSON."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise WeightsError(f"{path}: not a safetensors file or truncated ({size:,} bytes); download it again")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise WeightsError(f"{path}: the safetensors header is damaged: {error}") from error
    header.pop("__metadata__", None)
    end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if end > size:
        raise WeightsError(
            f"{path}: truncated: its tensors end at byte {end:,}, the file has {size:,}; download it again"
        )
    return {name: tuple(entry["shape"]) for name, entry in header.items()}


def check_weights(expected: Mapping[str, tuple[int, ...]], available: Mapping[str, tuple[int, ...]]) -> None:
    """Compares what a model needs with what a checkpoint has; raises WeightsError naming every kind of difference."""
    missing = [name for name in expected if name not in available]
    unexpected = [name for name in available if name not in expected]
    misshapen = [
        f"{name} is {_shape(available[name])}, must be {_shape(shape)}"
        for name, shape in expected.items()
        if name in available and tuple(available[name]) != tuple(shape)
    ]
    problems = [
        f"{len(found)} {what}: {_some(found)}"
        for what, found in (("missing", missing), ("unexpected", unexpected), ("of the wrong shape", misshapen))
        if found
    ]
    if problems:
        raise WeightsError("the checkpoint does not fit the model: tensors " + "; ".join(problems))


def _shape(shape: Iterable[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_IN_ERROR])
    rest = len(names) - _NAMES_IN_ERROR
    return f"{shown} and {rest} more" if rest > 0 else shown
