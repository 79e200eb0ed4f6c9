"""Kvern's inference engine: paged KV cache, continuous batching, OpenAI-compatible server.

The offline API is imported lazily, so that the API server and the core never load torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvern_engine.llm import LLM
    from kvern_engine.request import SamplingParams

__version__ = "0.1.0"

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from kvern_engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from kvern_engine.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
