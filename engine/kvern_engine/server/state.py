"""What the endpoints of one API server process share. Built by `main.py` (or a test), read by everybody."""

import hashlib
import time
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kvern_engine.config import EngineConfig
from kvern_engine.metrics import Metrics, PodView
from kvern_engine.server.engine_client import EngineClient
from kvern_engine.server.errors import model_not_found, unavailable
from kvern_engine.server.lifecycle import Lifecycle
from kvern_engine.server.prompts import PromptReader
from kvern_engine.server.reading import RequestReader


def kvern_version() -> str:
    try:
        return version("kvern")
    except PackageNotFoundError:  # a source tree that was never installed
        return "0"


@dataclass
class ServerState:
    """`served` are the names clients may use, `reported` those that are listed; the first is the one in answers.
    `reader` is None until the tokenizer is loaded."""

    config: EngineConfig
    served: tuple[str, ...]
    reported: tuple[str, ...]
    client: EngineClient
    metrics: Metrics
    lifecycle: Lifecycle
    requests: RequestReader
    reader: PromptReader | None = None
    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    started: int = field(default_factory=lambda: int(time.time()))
    version: str = field(default_factory=kvern_version)

    def __post_init__(self) -> None:
        config = self.config
        seen = f"{self.version}|{config.model}|{config.dtype}|{config.quantization}|{config.kv_cache_dtype}"
        self.fingerprint = "fp_" + hashlib.sha256(seen.encode()).hexdigest()[:10]

    def loaded(self) -> tuple[PromptReader, int]:
        """The prompt reader and the longest sequence in tokens. Raises ApiError 503 while either is not known."""
        capacity = self.client.capacity
        if self.reader is None or capacity is None:
            raise unavailable("The model is still loading. Please retry.", "loading", 5)
        return self.reader, capacity

    def check_model(self, name: str | None) -> str:
        """The name to report. Raises ApiError 404 for a model that is not served."""
        if name is None:
            return self.served[0]
        if name not in self.served:
            raise model_not_found(name, self.reported)
        return name


def pod_view(config: EngineConfig, client: EngineClient, lifecycle: Lifecycle) -> PodView:
    """What /metrics shows of engines and pod."""
    cache = {
        "cache_dtype": config.kv_cache_dtype,
        "enable_prefix_caching": str(config.enable_prefix_caching),
        "gpu_memory_utilization": str(config.gpu_memory_utilization),
        "num_gpu_blocks_override": str(config.num_gpu_blocks_override),
    }
    return PodView(
        engines=client.views(),
        draining=lifecycle.draining,
        layout={
            "dp": config.data_parallel_size if client.layout is None else client.layout.data,
            "tp": config.tensor_parallel_size if client.layout is None else client.layout.tensor,
            "pp": config.pipeline_parallel_size,
        },
        cache_config=cache,
        max_model_len=client.max_model_len or config.asked_model_len,
        switches=client.layout,
        past=client.past(),
    )
