"""Reads a model's shapes and defaults from `config.json` and `generation_config.json`; `gguf_config.py` does so from
GGUF.

Each architecture has one reader (`families.py`), found by its name; weights are not touched. Everything is checked
here, so that a broken or unsupported model is refused with its field named before anything is allocated.
"""

import difflib
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvern_engine.loading.families import MODEL_TYPES, READERS, TEXT_PARTS, read_plugin
from kvern_engine.loading.fields import Fields, ModelConfigError, check_heads, read_json, shown
from kvern_engine.loading.gguf import GGUFFile
from kvern_engine.loading.gguf_config import gguf_model_config
from kvern_engine.loading.quantized import QuantizationError, read_quantization
from kvern_engine.loading.remote_code import remote_code
from kvern_engine.loading.resolve import ModelFiles
from kvern_engine.model_config import ModelConfig
from kvern_engine.plugins import plugin_architectures
from kvern_engine.request import SamplingParams

__all__ = [
    "ModelConfigError",
    "architecture_of",
    "json_eos",
    "read_generation_config",
    "read_json",
    "read_model_config",
]

_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_model_config(files: ModelFiles) -> ModelConfig:
    """Shapes and constants of the model. Raises ModelConfigError, GGUFError or OSError."""
    if files.kind == "gguf":
        return gguf_model_config(GGUFFile(files.path))
    path = files.path / "config.json"
    config = read_json(path)
    name = architecture_of(config, path)
    try:
        fp8 = read_quantization(config, path)
    except QuantizationError as error:
        raise ModelConfigError(str(error)) from error
    fields, eos = Fields(config, path), json_eos(files.path, config)
    if name not in READERS:
        found = read_plugin(fields, eos, name)
    else:
        found = READERS[name](_text_part(fields), eos)
    check_heads(found, path)
    for token in (found.bos_token_id, *found.eos_token_ids):
        if token is not None and token >= found.vocab_size:
            raise ModelConfigError(f"{path}: token id {token} is beyond the vocabulary of {found.vocab_size:,}")
    if fp8 is not None and found.tie_word_embeddings:
        fp8 = replace(fp8, head=False)
    return replace(found, fp8=fp8)


def architecture_of(config: dict[str, Any], path: Path) -> str:
    """The architecture of a config.json (its content; `path` for errors) by the name of its reader, or one that an
    installed plugin package brings. Raises ModelConfigError naming those there are, and the code that the folder brings
    for one that is unknown."""
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelConfigError(f"{path}: architectures must be a list of names, got {shown(names)}")
    wanted = str(names[0]) if names else config.get("model_type")
    name = TEXT_PARTS.get(str(wanted), str(wanted)) if names else MODEL_TYPES.get(str(wanted))
    plugins = plugin_architectures()
    if name in READERS or name in plugins:
        return str(name)
    supported = [*READERS, *TEXT_PARTS, *sorted(plugins)]
    near = difflib.get_close_matches(str(wanted), supported, n=1, cutoff=0.85)
    hint = f" (the nearest is {near[0]})" if near else ""
    code = remote_code(config, path.parent)
    brought = f"; {code.would_run()}, and Kvern never runs code of a model" if code else ""
    raise ModelConfigError(
        f"{path}: architecture {shown(wanted)} is not supported{hint}; supported: {', '.join(supported)}{brought}"
    )


def _text_part(fields: Fields) -> Fields:
    """The text model in a config.json of a model of text and images, with what only stands outside; else all of it."""
    names = fields.content.get("architectures")
    text = fields.inner("text_config") if names and names[0] in TEXT_PARTS else None
    if text is None:
        return fields
    outside = {
        name: fields.content[name] for name in ("dtype", "torch_dtype", "bos_token_id") if name in fields.content
    }
    return Fields({**outside, **text.content}, fields.path, text.prefix)


def read_generation_config(files: ModelFiles) -> dict[str, Any]:
    """The model's own sampling defaults, by the names of SamplingParams: any of temperature, top_p, top_k, min_p and
    repetition_penalty. Empty where the model brings none. Raises ModelConfigError for a value out of range."""
    path = files.path / "generation_config.json"
    if files.kind == "gguf" or not path.is_file():
        return {}
    content = read_json(path)
    defaults = {name: content[name] for name in _SAMPLING_DEFAULTS if content.get(name) is not None}
    try:
        SamplingParams(**defaults)
    except (ValueError, TypeError) as error:
        raise ModelConfigError(f"{path}: {error}") from error
    return defaults


def json_eos(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """End-of-sequence ids of config.json and generation_config.json together (each is an id or a list of ids)."""
    ids: dict[int, None] = {}
    path = folder / "generation_config.json"
    text = config.get("text_config")
    for content in (config, text if isinstance(text, dict) else {}, read_json(path) if path.is_file() else {}):
        value = content.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if token is None:
                continue
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise ModelConfigError(
                    f"{folder}: eos_token_id must be a token id or a list of them, got {shown(value)}"
                )
            ids[token] = None
    return tuple(ids)
