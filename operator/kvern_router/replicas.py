"""The file of replicas: its format, its errors and its watch. Written by the operator or `kvern up`, atomically.

    {"model": "smollm2", "replicas": [{"name": "smollm2-0", "url": "http://10.0.0.7:8000", "weight": 1.0,
                                       "state": "ready", "uid": "..."}]}

`name` and `url` are required; `state` is "ready" or "draining" (gets nothing new); `weight` is the share of load, 0 for
none; `uid` tells a replaced pod from the old one. Beside them there may be:

    "hosts": [{"name": "smollm2-0", "host": "smollm2-0.smollm2-engines.default.svc.cluster.local", "port": 8000}]

the DNS names of all replicas that shall serve, loading ones too: where a name has no address under "replicas", or one
that does not answer, the router looks it up and asks whom it finds whether it is ready. So it finds a replica once it
answers, and a replaced one also while nobody writes this file.

    "limits": {"requestsPerMinute": 60, "tokensPerMinute": 100000}, "routers": ["10.0.0.9:8000"]

limits of a tenant, and the routers that share them. Fields that this version does not know are ignored, so that a newer
operator can write for an older router.
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

from kvern_router.limits import Limits

log = logging.getLogger("kvern.router")
STATES = ("ready", "draining")
NO_LIMITS = Limits()
FOUND = "found"  # by its DNS name: its own word decides whether it is ready


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
class HostSpec:
    """A replica by its DNS name."""

    name: str
    host: str
    port: int
    weight: float = 1.0

    def at(self, address: str) -> ReplicaSpec:
        """The replica where the name leads to."""
        return ReplicaSpec(self.name, address, self.port, "", self.weight, FOUND)


@dataclass(frozen=True, slots=True)
class ReplicaList:
    """The whole file; `model` may be ""."""

    model: str = ""
    replicas: tuple[ReplicaSpec, ...] = ()
    hosts: tuple[HostSpec, ...] = ()
    limits: Limits = NO_LIMITS
    routers: tuple[tuple[str, int], ...] = ()


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
    hosts = tuple(_host(f"hosts[{i}]", entry) for i, entry in enumerate(_list(document, "hosts")))
    for field, names in (("replicas", [r.name for r in replicas]), ("hosts", [h.name for h in hosts])):
        for name in names:
            if names.count(name) > 1:
                raise ReplicasError(f"{field}: the name {name!r} occurs {names.count(name)} times; names must differ")
    routers = tuple(_router(f"routers[{i}]", entry) for i, entry in enumerate(_list(document, "routers")))
    return ReplicaList(model, replicas, hosts, _limits(document.get("limits")), routers)


def _list(document: dict[str, Any], field: str) -> list[Any]:
    value = document.get(field, [])
    if not isinstance(value, list):
        raise ReplicasError(f"{field}: {value!r}; expected a list")
    return value


def _limits(value: Any) -> Limits:
    if value is None:
        return NO_LIMITS
    if not isinstance(value, dict):
        raise ReplicasError(f"limits: {value!r}; expected an object")
    found = []
    for field in ("requestsPerMinute", "tokensPerMinute"):
        number = value.get(field)
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ReplicasError(f"limits.{field}: {number!r}; expected a whole number of at least 1")
        found.append(number)
    return Limits(*found)


def _host(path: str, entry: Any) -> HostSpec:
    if not isinstance(entry, dict):
        raise ReplicasError(f'{path}: {entry!r}; expected an object with "name", "host" and "port"')
    host, port = entry.get("host"), entry.get("port")
    if not isinstance(host, str) or not host:
        raise ReplicasError(f"{path}.host: {host!r}; expected a non-empty string")
    if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
        raise ReplicasError(f"{path}.port: {port!r}; expected a number from 1 to 65535")
    return HostSpec(_name(path, entry), host, port, _weight(path, entry))


def _router(path: str, value: Any) -> tuple[str, int]:
    host, port, base = _split(path, f"http://{value}")
    if base:
        raise ReplicasError(f"{path}: {value!r}; expected host:port")
    return host, port


def _name(path: str, entry: dict[str, Any]) -> str:
    name = entry.get("name")
    if not isinstance(name, str) or not name:
        raise ReplicasError(f"{path}.name: {name!r}; expected a non-empty string")
    return name


def _weight(path: str, entry: dict[str, Any]) -> float:
    weight = entry.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight) or weight < 0:
        raise ReplicasError(f"{path}.weight: {weight!r}; expected a number of at least 0")
    return float(weight)


def _entry(path: str, entry: Any) -> ReplicaSpec:
    if not isinstance(entry, dict):
        raise ReplicasError(f'{path}: {entry!r}; expected an object with "name" and "url"')
    name, uid, state = _name(path, entry), entry.get("uid", ""), entry.get("state", "ready")
    if not isinstance(uid, str):
        raise ReplicasError(f"{path}.uid: {uid!r}; expected a string")
    if state not in STATES:
        raise ReplicasError(f"{path}.state: {state!r}; expected one of {', '.join(STATES)}")
    weight = _weight(path, entry)
    host, port, base = _split(f"{path}.url", entry.get("url"))
    return ReplicaSpec(name, host, port, base, weight, state, uid)


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
