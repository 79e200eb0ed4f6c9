"""The names of split GGUF files. Pure; apart from what reads them, so that a download need not load it."""

import re

_SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)


def split_name(name: str) -> tuple[str, int, int] | None:
    """(stem, number from 1, count) of a split GGUF model's file name, NAME-00001-of-00003.gguf; None for any other."""
    match = _SPLIT_NAME.fullmatch(name)
    return (match["stem"], int(match["number"]), int(match["count"])) if match else None
