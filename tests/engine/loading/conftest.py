"""Models that these tests read: tiny-kjv, SmolLM2 as installed, and GGUF files written by the `gguf` package."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from kvern_engine.loading.gguf import GGUFFile
from kvern_engine.loading.resolve import ModelFiles, resolve_model

sys.path.insert(0, str(Path(__file__).parent))

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB = 128, 96, 4, 2, 32, 2, 320


@pytest.fixture(scope="session")
def smollm2() -> ModelFiles:
    return resolve_model("builtin://smollm2-135m")


@pytest.fixture(scope="session")
def smollm2_file(smollm2: ModelFiles) -> GGUFFile:
    return GGUFFile(smollm2.path)


@pytest.fixture(scope="session")
def tiny_kjv() -> ModelFiles:
    return resolve_model(str(Path(__file__).parents[1] / "models_data" / "tiny-kjv"))


def llama_tensors(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Tensors of a two-layer Llama by their GGUF names."""
    shapes = {"token_embd": (VOCAB, HIDDEN), "output_norm": (HIDDEN,), "output": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        for name, shape in {
            "attn_norm": (HIDDEN,),
            "attn_q": (HEADS * HEAD_DIM, HIDDEN),
            "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output": (HIDDEN, HEADS * HEAD_DIM),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (FFN, HIDDEN),
            "ffn_up": (FFN, HIDDEN),
            "ffn_down": (HIDDEN, FFN),
        }.items():
            shapes[f"blk.{layer}.{name}"] = shape
    return {f"{name}.weight": rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """write_gguf(tensors, quant="F32", name=..., **metadata) -> path of a llama GGUF file.

    Metadata keys are written with "__" for "." and replace the defaults; None leaves a default out. 1-D tensors stay
    F32.
    """

    def write(
        tensors: dict[str, np.ndarray] | None = None,
        quant: str = "F32",
        name: str = "tiny.gguf",
        architecture: str = "llama",
        **metadata: Any,
    ) -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, architecture)
        values: dict[str, Any] = {
            f"{architecture}.block_count": LAYERS,
            f"{architecture}.context_length": 256,
            f"{architecture}.embedding_length": HIDDEN,
            f"{architecture}.feed_forward_length": FFN,
            f"{architecture}.attention.head_count": HEADS,
            f"{architecture}.attention.head_count_kv": KV_HEADS,
            f"{architecture}.attention.layer_norm_rms_epsilon": 1e-6,
            **{key.replace("__", "."): value for key, value in metadata.items()},
        }
        for key, value in values.items():
            if value is None:
                continue
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            else:
                writer.add_array(key, value)
        kind = gguf.GGMLQuantizationType[quant]
        chosen = llama_tensors(np.random.default_rng(0)) if tensors is None else tensors
        for tensor_name, tensor in chosen.items():
            if tensor.ndim == 1 or quant == "F32":
                writer.add_tensor(tensor_name, tensor)
            else:
                writer.add_tensor(tensor_name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
