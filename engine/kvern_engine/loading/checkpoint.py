"""Which tensors a checkpoint holds, under the names that models know, and how they differ from what a model needs; no
torch, nothing is loaded.

`weights.py` reads the tensors. Keeping names, shapes and types apart lets a model be refused before memory is taken.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvern_engine.loading.gguf import GGUFFile
from kvern_engine.loading.gguf_names import hf_sources
from kvern_engine.loading.quantized import canonical_name, canonical_shape
from kvern_engine.loading.resolve import ModelFiles
from kvern_engine.loading.safetensors_files import (
    NAMES_IN_ERROR,
    StoredTensor,
    WeightsError,
    read_tensors,
    safetensors_shards,
    some,
)
from kvern_engine.model_config import ModelConfig

__all__ = [
    "ExpectedTensor",
    "StoredTensor",
    "WeightsError",
    "check_weights",
    "known_name",
    "known_tensors",
    "safetensors_shards",
    "stored_tensors",
    "weight_shapes",
]

_FP8 = "F8_E4M3"
_WHOLE_NUMBERS = frozenset(("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"))
_NOT_FLOATS = _WHOLE_NUMBERS | {"C64", "F4", "F6_E2M3", "F6_E3M2", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
_NEAR = 2000  # names among which the nearest one is looked for

# Constants that old exports saved as tensors: models compute them.
_CONSTANTS = re.compile(r".*\.rotary_emb\.(?:inv_freq|cos_cached|sin_cached)|.*\.attn\.(?:bias|masked_bias)")
_GPT2_BARE = re.compile(r"(?:h\.\d+|wte|wpe|ln_f)\..*")
_IMAGE_PARTS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
_TEXT_PREFIXES = {"model.language_model.": "model.", "language_model.model.": "model.", "language_model.": ""}


@dataclass(frozen=True)
class ExpectedTensor:
    """A tensor that a model needs: its `shape`, and whether it must be stored in FP8 (E4M3) rather than in any type of
    floating point from 16 bits on or, in a GGUF file, in quantized blocks."""

    shape: tuple[int, ...]
    fp8: bool = False

    def takes(self, dtype: str) -> bool:
        """Whether a tensor stored as `dtype` will do."""
        return dtype == _FP8 if self.fp8 else dtype != _FP8 and dtype not in _NOT_FLOATS


def stored_tensors(files: ModelFiles, config: ModelConfig) -> dict[str, StoredTensor]:
    """All tensors that `iter_weights` will give, by the names that models know, read from headers alone.

    Raises WeightsError where shards are missing or damaged, GGUFError for a damaged GGUF file.
    """
    if files.kind == "gguf":
        file = GGUFFile(files.path)
        return {
            name: StoredTensor(files.path, source.shape, file.tensors[source.tensor].type_name, 0)
            for name, source in hf_sources(file).items()
        }
    return known_tensors(read_tensors(files.path), config)


def known_tensors(stored: Mapping[str, StoredTensor], config: ModelConfig) -> dict[str, StoredTensor]:
    """What models know of the tensors in safetensors files, by their names there. Raises WeightsError."""
    found: dict[str, StoredTensor] = {}
    for own, tensor in stored.items():
        name = known_name(own, config)
        if name is None:
            continue
        if name in found:
            raise WeightsError(
                f"{tensor.file}: tensor {own} comes twice, under another name in {found[name].file.name}"
            )
        if config.fp8 is not None:
            shape = canonical_shape(name, tensor.shape)
            tensor = StoredTensor(tensor.file, shape, tensor.dtype, tensor.nbytes)
        found[name] = tensor
    return found


def weight_shapes(files: ModelFiles, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of `stored_tensors`."""
    return {name: tensor.shape for name, tensor in stored_tensors(files, config).items()}


def known_name(name: str, config: ModelConfig) -> str | None:
    """The name of a safetensors file's tensor as models know it; None for tensors that carry nothing: constants that
    old exports saved, a tied head, scales that are not used, the image part of a model of text and images."""
    if config.architecture == "Gemma3ForCausalLM":
        if name.startswith(_IMAGE_PARTS):
            return None
        for prefix, instead in _TEXT_PREFIXES.items():
            if name.startswith(prefix):
                name = instead + name.removeprefix(prefix)
                break
    if config.architecture == "GPT2LMHeadModel" and _GPT2_BARE.fullmatch(name):
        name = f"transformer.{name}"  # files of the bare model, as the original ones are
    if _CONSTANTS.fullmatch(name) and not (name.endswith(".bias") and config.architecture != "GPT2LMHeadModel"):
        return None
    if config.tie_word_embeddings and name == "lm_head.weight":
        return None
    return name if config.fp8 is None else canonical_name(name)


def check_weights(
    expected: Mapping[str, ExpectedTensor], stored: Mapping[str, StoredTensor], place: Path | str
) -> None:
    """Compares what a model needs with what its checkpoint at `place` has; raises WeightsError naming every kind of
    difference: file, tensor, what was found, what is needed, the nearest name."""
    missing = [name for name in expected if name not in stored]
    unexpected = [name for name in stored if name not in expected]
    misshapen, mistyped = [], []
    for name, tensor in stored.items():
        wanted = expected.get(name)
        if wanted is None:
            continue
        if tensor.shape != wanted.shape:
            misshapen.append(f"{_in_file(name, tensor)} is {_shape(tensor.shape)}, must be {_shape(wanted.shape)}")
        elif not wanted.takes(tensor.dtype):
            types = _FP8 if wanted.fp8 else "F32, F16 or BF16"
            mistyped.append(f"{_in_file(name, tensor)} is {tensor.dtype}, must be {types}")
    problems = [
        f"{len(found):,} {what}: {some(shown)}"
        for what, found, shown in (
            ("missing", missing, _with_near(missing, unexpected)),
            ("unexpected", unexpected, [_in_file(name, stored[name]) for name in unexpected]),
            ("of the wrong shape", misshapen, misshapen),
            ("of the wrong type", mistyped, mistyped),
        )
        if found
    ]
    if problems:
        raise WeightsError(f"{place}: the checkpoint does not fit the model: tensors " + "; ".join(problems))


def _with_near(missing: list[str], unexpected: list[str]) -> list[str]:
    """The missing names, those that will be shown with the unexpected name that is nearest to them."""
    shown = []
    for name in missing[:NAMES_IN_ERROR]:
        near = difflib.get_close_matches(name, unexpected[:_NEAR], n=1, cutoff=0.7)
        shown.append(f"{name} (the nearest there is: {near[0]})" if near else name)
    return shown + missing[NAMES_IN_ERROR:]


def _in_file(name: str, tensor: StoredTensor) -> str:
    return f"{name} in {tensor.file.name}"


def _shape(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
