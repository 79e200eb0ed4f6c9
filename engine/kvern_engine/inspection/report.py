"""Puts together what `kvern inspect` tells about a model: from its headers and from arithmetic."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvern_engine.config import EngineConfig
from kvern_engine.inspection.cards import CARDS, Card
from kvern_engine.inspection.fit import Fit, Needs, fit
from kvern_engine.inspection.sizes import active_parameters, kv_bytes_per_token, parameters
from kvern_engine.loading.checkpoint import WeightsError, known_tensors, stored_tensors
from kvern_engine.loading.config import read_model_config
from kvern_engine.loading.gguf import GGUFError, GGUFFile
from kvern_engine.loading.remote_code import remote_code_note
from kvern_engine.loading.resolve import ModelFiles
from kvern_engine.loading.safetensors_files import read_tensors
from kvern_engine.model_config import ModelConfig
from kvern_engine.parallel.layout import feasible_tensor_sizes
from kvern_engine.worker import limits

SIZES = (1, 2, 4, 8)
_WORDS = {
    "Gemma2": "Gemma 2",
    "Gemma3": "Gemma 3",
    "Phi3": "Phi-3",
    "GPT2": "GPT-2",
    "Qwen2": "Qwen 2",
    "Qwen3": "Qwen 3",
}


@dataclass(frozen=True)
class Stored:
    """Tensors of one type in the files: how many, and their bytes."""

    dtype: str
    tensors: int
    nbytes: int


@dataclass(frozen=True)
class Report:
    """`weights_error`: what is wrong with the files of weights; where they could not be read, `stored` is empty and
    `parameters` is computed from the description. `max_model_len` is what is asked for, or usual for the model;
    `tensor_sizes` are the tensor parallel sizes up to 8 that the model can be split into."""

    name: str
    path: str
    kind: str
    model: ModelConfig
    parameters: int
    active_parameters: int
    stored: list[Stored]
    weights_error: str | None
    dtype: str
    kv_dtype: str
    kv_bytes_per_token: int
    own_length: limits.OwnLength
    max_model_len: int
    tensor_sizes: list[int]
    fits: list[Fit] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def family(self) -> str:
        """As people call it: Llama, Gemma 3, Qwen 3 (mixture of experts)."""
        stem = self.model.architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
        word = _WORDS.get(stem.removesuffix("Moe"), stem)
        return f"{word} (mixture of experts)" if self.model.experts is not None else word

    def as_json(self) -> dict[str, Any]:
        """Plain values for `--json`: sizes in bytes, lengths in tokens."""
        return {"family": self.family, **asdict(self)}


def inspect_model(files: ModelFiles, config: EngineConfig, tensor: int | None, cards: Sequence[Card] = CARDS) -> Report:
    """Everything about the model in `files`, for engines with `config`; on `tensor` ranks, or (None) on every size up
    to 8 that it can be split into. Raises ValueError with a text for the user where its description is wrong, where it
    cannot be split so, or where a flag does not fit the model."""
    model = read_model_config(files)
    dtype = limits.choose_dtype(config.dtype, "cuda", (9, 0), model.architecture).dtype
    _, fp8_kv = limits.fp8_choice(config, model)
    element_bytes = limits.DTYPE_BYTES[dtype]
    kv_bytes = 1 if fp8_kv else element_bytes
    own = limits.own_length(model)
    length = limits.choose_max_model_len(config.max_model_len, own, allow_long=True)
    sizes = feasible_tensor_sizes(model, max(SIZES))
    wanted = [size for size in SIZES if size in sizes] if tensor is None else [tensor]
    needs = Needs(model, config, element_bytes, kv_bytes, length.tokens)
    stored, counted, error = _stored(files, model)
    notes = [note for note in (length.note, remote_code_note(files, config.trust_remote_code)) if note]
    return Report(
        name=files.name,
        path=str(files.path),
        kind="GGUF" if files.kind == "gguf" else "safetensors",
        model=model,
        parameters=counted or parameters(model),
        active_parameters=active_parameters(model),
        stored=stored,
        weights_error=error,
        dtype=dtype,
        kv_dtype="float8_e4m3" if fp8_kv else dtype,
        kv_bytes_per_token=kv_bytes_per_token(model, kv_bytes),
        own_length=own,
        max_model_len=length.tokens,
        tensor_sizes=sizes,
        fits=[fit(needs, card, size) for card in cards for size in wanted],
        notes=notes,
    )


def _stored(files: ModelFiles, model: ModelConfig) -> tuple[list[Stored], int, str | None]:
    """(what is in the files by type, the largest first; parameters among it; what is wrong with the files)."""
    try:
        if files.kind == "gguf":
            known = stored_tensors(files, model)
            found = [(info.type_name, info.nbytes) for info in GGUFFile(files.path).tensors.values()]
        else:
            own = read_tensors(files.path)
            known = known_tensors(own, model)
            found = [(tensor.dtype, tensor.nbytes) for tensor in own.values()]
    except (WeightsError, GGUFError) as error:
        return [], 0, str(error)
    by_type: dict[str, list[int]] = defaultdict(list)
    for dtype, nbytes in found:
        by_type[dtype].append(nbytes)
    stored = [Stored(dtype, len(sizes), sum(sizes)) for dtype, sizes in by_type.items()]
    counted = sum(math.prod(tensor.shape) for name, tensor in known.items() if not name.endswith("_scale"))
    return sorted(stored, key=lambda item: -item.nbytes), counted, None
