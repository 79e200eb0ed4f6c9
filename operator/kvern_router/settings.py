"""The router's flags and what they are turned into. No effects but argparse's own (--help, a refused flag)."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvern_router.policy import Policy


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that can be set; times in seconds, sizes in bytes."""

    replicas_file: Path
    listen: tuple[str, int] = ("127.0.0.1", 8000)
    metrics_listen: tuple[str, int] | None = None  # None: /metrics and /-/ are answered on `listen`
    policy: Policy = Policy.PREFIX_AWARE
    load_factor: float = 1.25  # 1 + epsilon of the bounded load
    model: str = ""
    hold_timeout: float = 60.0
    max_held: int = 1024
    drain_timeout: float = 300.0
    shutdown_delay: float = 0.0
    # Clients that keep connections for less never meet a closed one: undici 4, httpx (openai) 5, aiohttp 15. Who keeps
    # them for longer looks first (urllib3) or sends again what was not read (Go).
    drain_idle: float = 20.0
    idle_timeout: float = 600.0
    keep_alive: float = 75.0
    max_body_bytes: int = 32 * 1024 * 1024
    max_header_bytes: int = 64 * 1024
    max_headers: int = 256
    max_connections: int = 16384
    max_buffered_bytes: int = 256 * 1024 * 1024  # half of a router pod's usual memory
    api_keys_file: Path | None = None
    access_log: bool = True
    probe_interval: float = 1.0
    probe_timeout: float = 2.0
    connect_timeout: float = 3.0
    upload_timeout: float = 30.0  # a head must arrive within it; a body must not pause for longer
    body_timeout: float = 120.0  # a request must arrive within it
    log_format: str = "text"


def parse_args(argv: Sequence[str] | None = None) -> Settings:
    """Settings from the command line. Exits with status 2 and a message that names the flag where one is wrong."""
    parser = argparse.ArgumentParser(
        prog="kvern-router",
        description="The proxy in front of the replicas of an InferenceService: balances, holds, retries, drains.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--listen", type=_address, default="127.0.0.1:8000", metavar="HOST:PORT", help="where clients connect")
    add("--replicas-file", type=Path, required=True, metavar="FILE", help="the replicas (JSON), re-read on change")
    add(
        "--metrics-listen",
        type=_address,
        metavar="HOST:PORT",
        help="a port of its own for /metrics, /health, /ready and /-/replicas; without it --listen answers them too",
    )
    add("--model", default="", metavar="NAME", help="the model's name in messages; without it the file's")
    defaults = Settings(replicas_file=Path())
    _choice_flags(parser.add_argument_group("choosing a replica").add_argument, defaults)
    _limit_flags(parser.add_argument_group("limits").add_argument, defaults)
    _end_flags(parser.add_argument_group("ending").add_argument, defaults)
    add = parser.add_argument_group("access").add_argument
    add("--api-keys-file", type=Path, metavar="FILE", help="one key a line, re-read on change; without it none needed")
    add("--access-log", action=argparse.BooleanOptionalAction, default=True, help="a JSON line a request on stdout")
    add("--log-format", choices=("text", "json"), default="text", help="how all else is logged, on stderr")
    a = parser.parse_args(argv)
    return Settings(
        replicas_file=a.replicas_file,
        listen=a.listen,
        metrics_listen=a.metrics_listen,
        policy=a.policy,
        load_factor=a.load_factor,
        model=a.model,
        hold_timeout=a.hold_timeout_seconds,
        max_held=a.max_held,
        drain_timeout=a.drain_timeout_seconds,
        shutdown_delay=a.shutdown_delay_seconds,
        drain_idle=a.drain_idle_seconds,
        idle_timeout=a.idle_timeout_seconds,
        keep_alive=a.keep_alive_seconds,
        max_body_bytes=a.max_body_bytes,
        max_header_bytes=a.max_header_bytes,
        max_buffered_bytes=a.max_buffered_bytes,
        api_keys_file=a.api_keys_file,
        access_log=a.access_log,
        probe_interval=a.probe_interval_seconds,
        max_headers=a.max_headers,
        max_connections=a.max_connections,
        upload_timeout=a.upload_timeout_seconds,
        body_timeout=a.body_timeout_seconds,
        log_format=a.log_format,
    )


def _choice_flags(add: Callable[..., Any], defaults: Settings) -> None:
    add("--policy", type=Policy, choices=list(Policy), default=Policy.PREFIX_AWARE, help="how replicas are chosen")
    add(
        "--load-factor",
        type=_at_least_one,
        default=defaults.load_factor,
        metavar="F",
        help="prefix affinity passes over a replica above F times the mean load",
    )
    add("--probe-interval-seconds", type=_positive, default=defaults.probe_interval, metavar="S", help="/ready probes")


def _limit_flags(add: Callable[..., Any], defaults: Settings) -> None:
    add(
        "--hold-timeout-seconds",
        type=_not_negative,
        default=defaults.hold_timeout,
        metavar="S",
        help="how long a request is held while no replica is ready",
    )
    add("--max-held", type=_count, default=defaults.max_held, metavar="N", help="requests held at once; 0: none")
    add(
        "--idle-timeout-seconds",
        type=_positive,
        default=defaults.idle_timeout,
        metavar="S",
        help="a stream without a byte, or a client that takes none, for so long is ended; there is no total timeout",
    )
    add("--keep-alive-seconds", type=_positive, default=defaults.keep_alive, metavar="S", help="idle connections")
    add("--max-body-bytes", type=_count, default=defaults.max_body_bytes, metavar="N", help="larger ones get a 413")
    add("--max-header-bytes", type=_count, default=defaults.max_header_bytes, metavar="N", help="larger ones get a 431")
    add("--max-headers", type=_count, default=defaults.max_headers, metavar="N", help="more get a 431")
    add(
        "--max-connections",
        type=_count,
        default=defaults.max_connections,
        metavar="N",
        help="connections of clients at once; one more gets a 503",
    )
    add(
        "--upload-timeout-seconds",
        type=_positive,
        default=defaults.upload_timeout,
        metavar="S",
        help="a head must arrive within it, and a body must not pause for longer, or the client gets a 408",
    )
    add(
        "--body-timeout-seconds",
        type=_positive,
        default=defaults.body_timeout,
        metavar="S",
        help="a whole request must arrive within it, or the client gets a 408",
    )
    add(
        "--max-buffered-bytes",
        type=_count,
        default=defaults.max_buffered_bytes,
        metavar="N",
        help="request bodies in memory at once, kept for retries; beyond it requests get a 503",
    )


def _end_flags(add: Callable[..., Any], defaults: Settings) -> None:
    add(
        "--drain-timeout-seconds",
        type=_not_negative,
        default=defaults.drain_timeout,
        metavar="S",
        help="how long running requests may go on after SIGTERM",
    )
    add(
        "--shutdown-delay-seconds",
        type=_not_negative,
        default=defaults.shutdown_delay,
        metavar="S",
        help="go on accepting for so long after SIGTERM and after the last request, not ready, until endpoints have "
        "forgotten this router; 0: nothing new is taken",
    )
    add(
        "--drain-idle-seconds",
        type=_not_negative,
        default=defaults.drain_idle,
        metavar="S",
        help="while it goes on accepting, the router waits so long for the next request on a connection that is kept",
    )


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r}; expected HOST:PORT, such as 0.0.0.0:8000")
    return host, int(port)


def _number(text: str, low: float, exclusive: bool, wanted: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > low if exclusive else value >= low) or math.isinf(value):
        raise argparse.ArgumentTypeError(f"{text!r}; expected {wanted}")
    return value


def _positive(text: str) -> float:
    return _number(text, 0.0, True, "a number above 0")


def _not_negative(text: str) -> float:
    return _number(text, 0.0, False, "a number of at least 0")


def _at_least_one(text: str) -> float:
    return _number(text, 1.0, False, "a number of at least 1")


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number of at least 0")
    return int(text)
