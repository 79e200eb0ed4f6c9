"""Typed, bounded access to what the description of a model says (config.json, GGUF metadata), so that a hostile or
careless value is refused by its name.

Every error names the file, the field, the value and what would be right. Nothing here knows an architecture.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvern_engine.model_config import ModelConfig

MOST_JSON_BYTES = 16 << 20  # of a config.json; those of real models are a few thousand
_SHOWN = 80  # characters of a value in an error


class ModelConfigError(ValueError):
    """The model's description is missing something, contradicts itself or is of a kind that Kvern does not run."""


def read_json(path: Path, most_bytes: int = MOST_JSON_BYTES) -> dict[str, Any]:
    """A JSON object from `path`; raises ModelConfigError where the file is missing, unreadable, larger than
    `most_bytes`, nested too deeply or not a JSON object."""
    try:
        size = path.stat().st_size
        if size > most_bytes:
            raise ModelConfigError(f"{path}: has {size:,} bytes; at most {most_bytes:,} are read of such a file")
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise ModelConfigError(f"{path}: no such file") from error
    except OSError as error:
        raise ModelConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except RecursionError:
        raise ModelConfigError(f"{path}: not valid JSON: nested too deeply") from None
    except ModelConfigError:
        raise
    except ValueError as error:
        raise ModelConfigError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelConfigError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


class Fields:
    """Access to a JSON object, or to the like, by type; `prefix` is what stands before its fields in errors
    (`rope_scaling.`)."""

    def __init__(self, content: Mapping[str, Any], path: Path, prefix: str = "") -> None:
        self.content = content
        self.path = path
        self.prefix = prefix

    def fail(self, field: str, rule: str) -> ModelConfigError:
        """The error for a `field` that is missing or not `rule`."""
        if field not in self.content:
            return ModelConfigError(f"{self.path}: {self.prefix}{field} is missing; it must be {rule}")
        return ModelConfigError(f"{self.path}: {self.prefix}{field} must be {rule}, got {shown(self.content[field])}")

    def count(self, field: str, default: int | None = None, *, least: int = 1, most: int | None = None) -> int:
        """A whole number from `least` to `most`; `default` where the field is missing or null (None: it must be
        there)."""
        value = self.content.get(field)
        value = default if value is None else value
        rule = f"a whole number above {least - 1}"
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.fail(field, rule)
        if most is not None and value > most:
            raise self.fail(field, f"{rule} and at most {most:,}")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.content.get(field)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.fail(field, "a number above 0")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or number <= 0:
            raise self.fail(field, "a number above 0")
        return number

    def flag(self, field: str, default: bool = False) -> bool:
        """true or false."""
        value = self.content.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(field, "true or false")
        return value

    def text(self, field: str, default: str, allowed: Iterable[str] | None = None) -> str:
        """A string, one of `allowed`."""
        value = self.content.get(field)
        value = default if value is None else value
        if allowed is not None and (not isinstance(value, str) or value not in allowed):
            raise self.fail(field, f"one of {', '.join(allowed)}")
        if not isinstance(value, str):
            raise self.fail(field, "a string")
        return value

    def token(self, field: str) -> int | None:
        """A token id or None."""
        value = self.content.get(field)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise self.fail(field, "a token id")
        return value

    def inner(self, field: str) -> "Fields | None":
        """The object in `field`; None where it is missing or null."""
        value = self.content.get(field)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(field, "an object")
        return Fields(value, self.path, f"{self.prefix}{field}.")


def check_heads(config: ModelConfig, path: Path) -> None:
    """Raises ModelConfigError where the parts of a model do not fit together; `path` is what the error names."""
    if config.num_heads % config.num_kv_heads:
        raise ModelConfigError(
            f"{path}: {config.num_heads} attention heads cannot be shared by {config.num_kv_heads} KV heads; "
            "the first must be a multiple of the second"
        )
    if config.head_dim % 2:
        raise ModelConfigError(f"{path}: head_dim must be even for rotary embeddings, got {config.head_dim}")
    if config.rotary_dim is not None and (config.rotary_dim < 2 or config.rotary_dim % 2):
        raise ModelConfigError(
            f"{path}: an even number of the {config.head_dim} dimensions of a head must be rotated, got "
            f"{config.rotary_dim} (partial_rotary_factor)"
        )


def shown(value: object) -> str:
    """A value as errors show it: Python's spelling, cut where it is long. A long list or text is never rendered."""
    if isinstance(value, list | dict) and len(value) > _SHOWN // 4:
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value):,} entries"
    if isinstance(value, str) and len(value) > _SHOWN:
        return f"{value[:_SHOWN]!r}... ({len(value):,} characters)"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length():,} bits"
    text = repr(value)
    return text if len(text) <= 2 * _SHOWN else f"{text[: 2 * _SHOWN]}..."
