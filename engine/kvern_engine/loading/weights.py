"""Reads a checkpoint's tensors, or parts of them, one at a time under their Hugging Face names. The only module here
with torch.

Whoever builds a model compares its tensors with `stored_tensors` first (`check_weights`), then copies what
`iter_weights` gives: tensors are never all in memory twice. Files are mapped: several ranks that read one file at the
same time share its pages, each touching those of its own parts.
"""

from collections.abc import Iterator, Mapping

import torch

from kvern_engine.loading.checkpoint import WeightsError, known_name, safetensors_shards, weight_shapes
from kvern_engine.loading.gguf import GGUFFile
from kvern_engine.loading.gguf_names import hf_sources, read_source
from kvern_engine.loading.parts import WeightPart
from kvern_engine.loading.quantized import canonical_shape
from kvern_engine.loading.resolve import ModelFiles
from kvern_engine.model_config import ModelConfig

__all__ = ["WeightsError", "iter_weights", "weight_shapes"]

Parts = Mapping[str, WeightPart]


def iter_weights(
    files: ModelFiles, config: ModelConfig, parts: Parts | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) for every tensor of the checkpoint, on the CPU; with `parts`, for those that it names, the
    part that it says.

    Safetensors come in their own dtype and stay mapped to the file; GGUF tensors come dequantized to float32 (of a part
    no more than its rows and columns, rounded to quantization blocks). Parts of rotary projections must hold whole
    heads. A tied `lm_head.weight` is not given. Treat them as read-only. Raises WeightsError, GGUFError.
    """
    return _gguf_weights(files, config, parts) if files.kind == "gguf" else _safetensors_weights(files, config, parts)


def _safetensors_weights(
    files: ModelFiles, config: ModelConfig, parts: Parts | None
) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    for path in safetensors_shards(files.path):
        try:
            with safe_open(path, framework="pt") as shard:
                for own in shard.keys():  # noqa: SIM118 - a shard is not iterable
                    name = known_name(own, config)
                    if name is None or (parts is not None and name not in parts):
                        continue
                    tensor = shard.get_tensor(own)
                    if config.fp8 is not None:
                        tensor = tensor.view(canonical_shape(name, tuple(tensor.shape)))
                    yield name, tensor if parts is None else tensor[parts[name].slices]
        except SafetensorError as error:
            raise WeightsError(f"{path}: {error}; download it again") from error


def _gguf_weights(files: ModelFiles, config: ModelConfig, parts: Parts | None) -> Iterator[tuple[str, torch.Tensor]]:
    file = GGUFFile(files.path)
    for name, source in hf_sources(file).items():
        if parts is None or name in parts:
            part = parts[name] if parts is not None else WeightPart.whole(*source.shape)
            yield name, torch.from_numpy(read_source(file, source, part, config.head_dim))
