"""Architecture name -> class that computes it. A further family is a file beside `llama.py` and a line here, or a class
of another package that an entry point names (`plugins.py`)."""

from collections.abc import Collection, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from kvern_engine.layers.attention import Wanted
from kvern_engine.layers.parameters import Destinations
from kvern_engine.model_config import ModelConfig
from kvern_engine.models.gemma import Gemma2ForCausalLM, Gemma3ForCausalLM
from kvern_engine.models.gpt2 import GPT2LMHeadModel
from kvern_engine.models.llama import LlamaForCausalLM
from kvern_engine.models.mistral import MistralForCausalLM
from kvern_engine.models.mixtral import MixtralForCausalLM
from kvern_engine.models.phi3 import Phi3ForCausalLM
from kvern_engine.models.qwen2 import Qwen2ForCausalLM
from kvern_engine.models.qwen3 import Qwen3ForCausalLM, Qwen3MoeForCausalLM
from kvern_engine.parallel.groups import ParallelContext
from kvern_engine.parallel.layout import ModelShard
from kvern_engine.plugins import GROUP, plugin_architectures
from kvern_kernels import AttentionMetadata, Fp8Weight


class CausalLM(Protocol):
    """What the worker needs of a model; shapes as in `DecoderLM`, which does most of it for any family.

    `capturable`: a step reads nothing back from the device, so that a CUDA graph can record it. `quantizable`:
    `quantize_fp8` can be called, and checkpoints may come in FP8."""

    quantizable: ClassVar[bool]

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    shard: ModelShard

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        parallel: ParallelContext | None = None,
        host_layers: Collection[int] = (),
        invariant: bool = False,
    ) -> None: ...

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[Tensor],
        meta: AttentionMetadata,
        wanted: Wanted | None = None,
        residual: Tensor | None = None,
    ) -> Tensor: ...

    def compute_logits(self, hidden: Tensor) -> Tensor: ...

    def destinations(self) -> Destinations: ...

    def quantize_fp8(self, per_channel: bool = False) -> int: ...

    def products(self) -> list[Tensor | Fp8Weight]: ...

    def set_kv_scales(self, scales: Tensor) -> None: ...

    def use_fp8_kv(self) -> None: ...

    def add_cpu_layouts(self) -> None: ...

    @property
    def capturable(self) -> bool: ...


MODELS: dict[str, type[CausalLM]] = {
    "GPT2LMHeadModel": GPT2LMHeadModel,
    "Gemma2ForCausalLM": Gemma2ForCausalLM,
    "Gemma3ForCausalLM": Gemma3ForCausalLM,
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "MixtralForCausalLM": MixtralForCausalLM,
    "Phi3ForCausalLM": Phi3ForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
}

_NEEDED = ("forward", "compute_logits", "destinations", "products", "quantize_fp8", "use_fp8_kv", "add_cpu_layouts")


def model_class(architecture: str) -> type[CausalLM]:
    """The class for a config's architecture, of this package or else of a plugin (`plugins.py`), which is imported by
    this. Raises ValueError naming those there are, or what is wrong with the plugin."""
    if architecture in MODELS:
        return MODELS[architecture]
    plugins = plugin_architectures()
    if architecture not in plugins:
        known = ", ".join(sorted({*MODELS, *plugins}))
        raise ValueError(f"architecture {architecture!r} is not supported; supported: {known}")
    entry = plugins[architecture]
    where = f"the plugin for architecture {architecture!r} (entry point {GROUP}: {entry.value})"
    try:
        found = entry.load()
    except Exception as error:  # whatever a plugin's module raises when it is imported
        raise ValueError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
    missing = [name for name in _NEEDED if not hasattr(found, name)]
    if not isinstance(found, type) or missing:
        lacks = f"lacks {', '.join(missing)}" if isinstance(found, type) else "is no class"
        raise ValueError(f"{where} {lacks}; see kvern_engine.models.registry.CausalLM")
    plugin: type[CausalLM] = found
    return plugin
