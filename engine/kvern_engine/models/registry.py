"""Architecture name -> class that computes it. A further family is a file beside `llama.py` and a line here."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvern_engine.layers.attention import Wanted
from kvern_engine.layers.parameters import Destinations
from kvern_engine.model_config import ModelConfig
from kvern_engine.models.llama import LlamaForCausalLM
from kvern_engine.parallel.groups import ParallelContext
from kvern_engine.parallel.layout import ModelShard
from kvern_kernels import AttentionMetadata, Fp8Weight


class CausalLM(Protocol):
    """What the worker needs of a model; shapes as in `LlamaForCausalLM`."""

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

    def use_fp8_kv(self) -> None: ...

    def add_cpu_layouts(self) -> None: ...


MODELS: dict[str, type[CausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
}


def model_class(architecture: str) -> type[CausalLM]:
    """The class for a config's architecture; raises ValueError naming those there are."""
    if architecture not in MODELS:
        raise ValueError(f"architecture {architecture!r} is not supported; supported: {', '.join(sorted(MODELS))}")
    return MODELS[architecture]
