"""Overrides merged into a pod template: maps key by key, lists of named items by name, the rest replaced. Pure."""

from typing import Any


def merged(base: Any, override: Any) -> Any:
    """`override` laid over `base`; a null removes the key. Neither is changed."""
    if isinstance(base, dict) and isinstance(override, dict):
        out = dict(base)
        for key, value in override.items():
            if value is None:
                out.pop(key, None)
            else:
                out[key] = merged(base[key], value) if key in base else value
        return out
    if _named(base) and _named(override):
        items = {item["name"]: item for item in base}
        for item in override:
            items[item["name"]] = merged(items[item["name"]], item) if item["name"] in items else item
        return list(items.values())
    return override


def _named(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(i, dict) and "name" in i for i in value)
