"""Code that a model's folder brings (`auto_map` in its JSON files): what `--trust-remote-code` runs elsewhere. Kvern
never does; it reads the names so that it can say what there is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvern_engine.loading.fields import read_json
from kvern_engine.loading.resolve import ModelFiles

_CAUSAL = "AutoModelForCausalLM"


@dataclass(frozen=True)
class RemoteCode:
    """The class that a folder names for text generation (else the first it names): `python_class` of `file`, or of
    another `repository` of the hub. `present`: the file lies in the folder."""

    auto_class: str
    file: str
    python_class: str
    repository: str | None
    present: bool

    def would_run(self) -> str:
        """`trust_remote_code would run modeling_x.py (class XForCausalLM) of the folder`."""
        place = f"of {self.repository}, a repository of the hub" if self.repository else "of the folder"
        missing = "" if self.present or self.repository else ", which lacks it"
        return f"trust_remote_code would run {self.file} (class {self.python_class}) {place}{missing}"


def remote_code(content: Mapping[str, Any], folder: Path) -> RemoteCode | None:
    """What `auto_map` of a config.json or tokenizer_config.json (its content) names; None where there is none."""
    entries = content.get("auto_map")
    if not isinstance(entries, Mapping):
        return None
    named = {str(name): _first(value) for name, value in entries.items()}
    auto_class = _CAUSAL if named.get(_CAUSAL) else next((name for name, value in named.items() if value), None)
    if auto_class is None:
        return None
    reference = str(named[auto_class])
    repository, separator, rest = reference.rpartition("--")
    module, _, python_class = rest.rpartition(".")
    file = f"{module or rest}.py"
    present = not separator and "/" not in file and len(file) < 256 and (folder / file).is_file()
    return RemoteCode(auto_class, _short(file), _short(python_class) or "?", _short(repository) or None, present)


def remote_code_note(files: ModelFiles, trusted: bool) -> str | None:
    """What to tell about the code that a model's folder brings, once its architecture has turned out to be one that
    Kvern runs; None where there is none. `trusted`: whether --trust-remote-code was given. Raises ModelConfigError."""
    code = None
    if files.kind == "folder":
        code = remote_code(read_json(files.path / "config.json"), files.path)
    if code is None:
        return None
    if trusted:
        return (
            f"trust_remote_code has no effect: elsewhere it would run {code.file} (class {code.python_class}) of the "
            "model; Kvern never runs code of a model, and computes this one with its own implementation of the "
            "architecture"
        )
    return (
        f"the model brings code, {code.file} (class {code.python_class}), which is not run: Kvern computes it with its "
        "own implementation of the architecture"
    )


def _first(value: object) -> str | None:
    """Tokenizers name a slow and a fast class, either of which may be null."""
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, str) and item:
            return item
    return None


def _short(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text[:120])
