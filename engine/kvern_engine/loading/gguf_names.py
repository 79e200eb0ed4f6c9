"""Which tensor of a GGUF file holds each tensor of a Hugging Face checkpoint, and what was done to it on its way there.

llama.cpp's converters rename tensors, reorder rotary rows (Llama only), add the 1 of Gemma's norms, transpose GPT-2's
matrices and stack the matrices of experts. All of it is undone here, so that models know one convention. No torch.
"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvern_engine.loading.gguf import GGUFError, GGUFFile
from kvern_engine.loading.parts import WeightPart

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_TENSOR = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<module>\w+?)(?:\.(?P<expert>\d+))?\.(?P<kind>weight|bias)")
_IGNORED = re.compile(r"rope_freqs\.weight|rope_factors_(?:long|short)\.weight|blk\.\d+\.attn_rot_embd(?:\.\w+)?")

_MAX_EXPERTS = 4096
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
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
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {"ffn_gate_exps": 0, "ffn_up_exps": 1, "ffn_down_exps": 2, "ffn_gate": 0, "ffn_up": 1, "ffn_down": 2}
_GPT2_TOP = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_GPT2_LAYER = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}


@dataclass(frozen=True)
class _Names:
    """The names of an architecture: modules at the top and in a layer, `layers` in front of these, and the three
    matrices of an expert (gate, up, down) after `experts`."""

    layer: dict[str, str]
    top: dict[str, str]
    layers: str = "model.layers"
    router: str = ""
    experts: str = ""
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


_LLAMA = _Names(
    _LAYER,
    _TOP,
    router="block_sparse_moe.gate",  # of Mixtral, which calls itself llama too
    experts="block_sparse_moe.experts",
    matrices=("w1", "w3", "w2"),
)
_NAMES = {
    "llama": _LLAMA,
    "qwen2": _Names(_LAYER, _TOP),
    "qwen3": _Names(_LAYER | _QK_NORMS, _TOP),
    "qwen3moe": _Names(_LAYER | _QK_NORMS, _TOP, router="mlp.gate", experts="mlp.experts"),
    "gemma2": _Names(_LAYER | _GEMMA, _TOP),
    "gemma3": _Names(_LAYER | _GEMMA | _QK_NORMS, _TOP),
    "phi3": _Names(_LAYER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}, _TOP),
    "gpt2": _Names(_GPT2_LAYER, _GPT2_TOP, "transformer.h"),
}


@dataclass(frozen=True)
class Source:
    """Where a tensor of Hugging Face's shape `shape` lies: GGUF's `tensor`, whole or its matrix number `expert`,
    perhaps `transposed`, with `added` to every number, or with the rows of its heads in the order of `rotary` pairs."""

    tensor: str
    shape: tuple[int, ...]
    expert: int | None = None
    transposed: bool = False
    added: float = 0.0
    rotary: bool = False


def hf_sources(file: GGUFFile) -> dict[str, Source]:
    """Hugging Face name -> source, for every tensor that a model reads; a tensor without such a name keeps its own, so
    that a comparison with what the model needs reports it. Raises GGUFError for types that cannot be dequantized."""
    architecture = str(file.metadata.get("general.architecture"))
    names = _NAMES.get(architecture, _LLAMA)
    found: dict[str, Source] = {}
    for own in file.tensors:
        if _IGNORED.fullmatch(own) is None:
            file.require_supported(own)
            found.update(_sources(file, architecture, names, own))
    return found


def _sources(file: GGUFFile, architecture: str, names: _Names, own: str) -> dict[str, Source]:
    shape = file.tensors[own].shape
    match = _TENSOR.fullmatch(own)
    if match is None:
        return {own: Source(own, shape)}
    module, kind, layer = match["module"], match["kind"], match["layer"]
    if layer is None:
        name = names.top.get(module)
        source = Source(own, shape, added=_added(architecture, module))
        return {f"{name}.{kind}" if name and match["expert"] is None else own: source}
    prefix = f"{names.layers}.{layer}"
    if names.router and module == "ffn_gate_inp":
        return {f"{prefix}.{names.router}.{kind}": Source(own, shape)}
    if names.experts and kind == "weight" and module in _EXPERTS:
        matrix = names.matrices[_EXPERTS[module]]
        if match["expert"] is not None:  # files of early 2024 have a tensor an expert
            return {f"{prefix}.{names.experts}.{match['expert']}.{matrix}.weight": Source(own, shape)}
        if module.endswith("_exps") and len(shape) == 3:
            if shape[0] > _MAX_EXPERTS:
                raise GGUFError(
                    f"{file.path}: tensor {own!r} holds {shape[0]:,} experts; at most {_MAX_EXPERTS} are read"
                )
            return {
                f"{prefix}.{names.experts}.{index}.{matrix}.weight": Source(own, shape[1:], index)
                for index in range(shape[0])
            }
    name = names.layer.get(module)
    if name is None or match["expert"] is not None:
        return {own: Source(own, shape)}
    transposed = architecture == "gpt2" and kind == "weight" and len(shape) == 2
    source = Source(
        own,
        shape[::-1] if transposed else shape,
        transposed=transposed,
        added=_added(architecture, module),
        rotary=architecture == "llama" and module in ("attn_q", "attn_k"),
    )
    return {f"{prefix}.{name}.{kind}": source}


def _added(architecture: str, module: str) -> float:
    """Gemma's norms multiply by 1 + weight; GGUF stores the sum."""
    return -1.0 if architecture.startswith("gemma") and module.endswith("norm") else 0.0


def read_source(file: GGUFFile, source: Source, part: WeightPart, head_dim: int) -> "npt.NDArray[np.float32]":
    """The `part` of Hugging Face's tensor as float32. Parts of rotary projections must hold whole heads."""
    ranges = part.ranges[::-1] if source.transposed else part.ranges
    if source.expert is not None:
        ranges = ((source.expert, source.expert + 1), *ranges)
    stored = file.dequantize(source.tensor, WeightPart(file.tensors[source.tensor].shape, ranges))
    if source.expert is not None:
        stored = stored[0]
    if source.transposed:
        stored = stored.T
    if source.added:
        stored = stored + stored.dtype.type(source.added)
    return undo_rotary_permutation(stored, stored.shape[0] // head_dim) if source.rotary else stored


def undo_rotary_permutation(rows: "npt.NDArray[np.float32]", heads: int) -> "npt.NDArray[np.float32]":
    """Rows of a Q or K projection (weight [heads * D, in] or bias [heads * D]) from GGUF's order to Hugging Face's.

    GGUF rotates neighbours (2i, 2i+1) of a head, Hugging Face rotates (i, i + D/2): within each head, row 2i+j of
    GGUF is row j*D/2+i here.
    """
    pairs = rows.shape[0] // heads // 2
    return rows.reshape(heads, pairs, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
