"""What one request may ask for, and how many bytes of bodies may be in memory at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvern_engine.config import EngineConfig
from kvern_engine.server.errors import ApiError, unavailable
from kvern_engine.server.wire.head import WireLimits


def wire_limits(config: EngineConfig) -> WireLimits:
    """The limits of connections and heads."""
    return WireLimits(
        head_bytes=config.max_header_bytes,
        headers=config.max_headers,
        head_seconds=config.header_timeout_seconds,
        keep_alive_seconds=config.keep_alive_seconds,
        slow_client_seconds=config.slow_client_seconds,
        connections=config.max_connections,
    )


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The caps on a request's fields, of the same names as the flags. Defaults are the largest that can be set."""

    json_depth: int = 64
    n: int = 128
    stop: int = 16
    stop_chars: int = 1024
    logprobs: int = 20
    logit_bias: int = 1024
    messages: int = 65536
    content_parts: int = 65536
    tools: int = 128

    @classmethod
    def of(cls, config: EngineConfig) -> "RequestLimits":
        return cls(
            json_depth=config.max_json_depth,
            n=config.max_n,
            stop=config.max_stop,
            stop_chars=config.max_stop_chars,
            logprobs=config.max_logprobs,
            logit_bias=config.max_logit_bias,
            messages=config.max_messages,
            content_parts=config.max_content_parts,
            tools=config.max_tools,
        )


def too_many(field: str, limit: int, flag: str, got: int, what: str = "items") -> ApiError:
    return ApiError(f"{field} must have at most {limit} {what} ({flag}), got {got}.", param=field)


class BodyRoom:
    """The bytes of all bodies that are being read, within a limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    @contextmanager
    def place(self) -> Iterator["Place"]:
        """For one body; everything that it took is given back at the end."""
        place = Place(self)
        try:
            yield place
        finally:
            self.used -= place.size


class Place:
    """What one body takes of a BodyRoom."""

    def __init__(self, room: BodyRoom) -> None:
        self._room = room
        self.size = 0

    def take(self, size: int) -> None:
        """Raises ApiError 503 where the room is full."""
        room = self._room
        if room.used + size > room.limit:
            text = f"This server is reading {room.limit} bytes of bodies, the most it takes (max_buffered_bytes)."
            raise unavailable(f"{text} Please retry.", "server_overloaded", 1, close=True)
        room.used += size
        self.size += size
