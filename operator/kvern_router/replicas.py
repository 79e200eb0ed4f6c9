"""The file of replicas: its format, its errors and its watch. Written by the operator or `kvern up`, atomically.

    {"model": "smollm2", "replicas": [{"name": "smollm2-0", "url": "http://10.0.0.7:8000", "weight": 1.0,
                                       "state": "ready", "uid": "..."}]}

`name` and `url` are required; `state` is "ready" or "draining" (gets nothing new); `weight` is the share of load, 0 for
none; `uid` tells a replaced pod from the old one. Fields that this version does not know are ignored, so that a newer
operator can write for an older router. EndpointSlices can become a second source of the same `ReplicaList`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

log = logging.getLogger("kvern.router")
STATES = ("ready", "draining")


class ReplicasError(ValueError):
    """The file says something else than it should; the message names the field, the value and what would be right."""


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """One entry: `host`, `port` and `base` (a path prefix, "" as a rule) come from its URL."""

    name: str
    host: str
    port: int
    base: str = ""
    weight: float = 1.0
    state: str = "ready"
    uid: str = ""

    @property
    def identity(self) -> tuple[str, str, int, str, str]:
        """What must be equal for an entry to be the same running replica."""
        return (self.name, self.host, self.port, self.base, self.uid)


@dataclass(frozen=True, slots=True)
class ReplicaList:
    """The whole file; `model` may be ""."""

    model: str = ""
    replicas: tuple[ReplicaSpec, ...] = ()


def parse_replicas(text: str) -> ReplicaList:
    """The list in a file's text. Raises ReplicasError."""
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ReplicasError(f"not JSON: {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get("replicas"), list):
        raise ReplicasError('expected an object {"model": "...", "replicas": [...]}')
    model = document.get("model", "")
    if not isinstance(model, str):
        raise ReplicasError(f"model: {model!r}; expected a string")
    replicas = tuple(_entry(f"replicas[{i}]", entry) for i, entry in enumerate(document["replicas"]))
    names = [r.name for r in replicas]
    for name in names:
        if names.count(name) > 1:
            raise ReplicasError(f"replicas: the name {name!r} occurs {names.count(name)} times; names must differ")
    return ReplicaList(model, replicas)


def _entry(path: str, entry: Any) -> ReplicaSpec:
    if not isinstance(entry, dict):
        raise ReplicasError(f'{path}: {entry!r}; expected an object with "name" and "url"')
    name, uid, state = entry.get("name"), entry.get("uid", ""), entry.get("state", "ready")
    if not isinstance(name, str) or not name:
        raise ReplicasError(f"{path}.name: {name!r}; expected a non-empty string")
    if not isinstance(uid, str):
        raise ReplicasError(f"{path}.uid: {uid!r}; expected a string")
    if state not in STATES:
        raise ReplicasError(f"{path}.state: {state!r}; expected one of {', '.join(STATES)}")
    weight = entry.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight) or weight < 0:
        raise ReplicasError(f"{path}.weight: {weight!r}; expected a number of at least 0")
    host, port, base = _split(f"{path}.url", entry.get("url"))
    return ReplicaSpec(name, host, port, base, float(weight), state, uid)


def _split(path: str, url: Any) -> tuple[str, int, str]:
    wanted = "expected http://host:port"
    if not isinstance(url, str):
        raise ReplicasError(f"{path}: {url!r}; {wanted}")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ReplicasError(f"{path}: {url!r}; {wanted}") from None
    if parts.scheme != "http" or not host or parts.query or parts.fragment or parts.username:
        raise ReplicasError(f"{path}: {url!r}; {wanted}")
    return host, port or 80, parts.path.rstrip("/")


class WatchedFile:
    """Calls `load(text)` when the file's content may have changed.

    A file that is missing, unreadable or refused by `load` (ValueError) is logged once a change, and whatever was
    loaded before stays. Polled rather than watched: a ConfigMap mount is swapped by symlinks, which stat() follows.
    """

    def __init__(self, path: Path, load: Callable[[str], None]) -> None:
        self._path = path
        self._load = load
        self._seen: tuple[int, int, int] | None = None
        self._complaint = ""

    def poll(self) -> None:
        """Look once; blocks for as long as a stat() of a local file, and a read after a change."""
        try:
            stat = self._path.stat()
            stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if stamp == self._seen:
                return
            text = self._path.read_text()
            self._seen = stamp
            self._load(text)
            self._complaint = ""
        except (OSError, ValueError) as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                log.warning("%s: %s (what was loaded before stays in use)", self._path, error)

    async def watch(self, interval: float = 0.1) -> None:
        """Poll now and every `interval` seconds, until cancelled."""
        while True:
            self.poll()
            await asyncio.sleep(interval)
