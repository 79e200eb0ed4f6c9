"""Which replica gets a request: pure decisions over plain values, without a clock, a socket or shared state.

Prefix affinity is rendezvous hashing [1], weighted as in [2], bounded by load as in [3]: of the replicas that are not
above (1 + epsilon) times the mean load per weight, the one with the highest score for the request's key. Scores depend
on the key and on replicas' names and weights alone, so two routers agree without talking to each other, and a replica
that comes or goes moves no key but its own.

The key of a request is *the conversation*, not the whole prompt: the messages up to and including the first user
message (each cut to its first 1,024 characters), or the first 1,024 bytes of `prompt` or `input`. Later turns of a
conversation thereby find the replica that holds its KV cache, and requests that share a long prompt share a replica
until it is full.

What this module is not: health, holding or retries (fleet.py, exchange.py decide who may be a candidate).

[1] Thaler, Ravishankar: Using name-based mappings to increase hit rates (IEEE/ACM ToN 1998)
[2] Schindelhauer, Schomaker: Weighted distributed hash tables (SPAA 2005)
[3] Mirrokni, Thorup, Zadimoghaddam: Consistent hashing with bounded loads (arXiv 1608.01350)
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from enum import StrEnum
from hashlib import blake2b
from typing import Any, Protocol, TypeVar

SCAN_BYTES = 256 * 1024  # how far into a body the key is looked for: parsing stays below half a millisecond
TEXT_CHARS = 1024  # of each message, and bytes of a prompt, that count
MESSAGES = 64  # that are looked at for the first of a user: a body may hold a hundred thousand empty ones
_MASK = (1 << 64) - 1
_MESSAGES = re.compile(rb'"messages"\s*:\s*\[')
_PROMPT = re.compile(rb'"(?:prompt|input)"\s*:\s*')
_USER = re.compile(rb'"user"\s*:\s*"((?:[^"\\]|\\.){1,512})"')
_GAP = re.compile(r"[ \t\r\n,]*")
_DECODER = json.JSONDecoder()


class Policy(StrEnum):
    """How replicas are chosen; the values are those of `spec.router.policy`."""

    PREFIX_AWARE = "PrefixAware"
    LEAST_LOAD = "LeastLoad"
    SESSION = "Session"


class Candidate(Protocol):
    """What a decision needs to know of a replica; `seed` is `replica_seed(name)`, `inflight` counts requests."""

    @property
    def seed(self) -> int: ...
    @property
    def weight(self) -> float: ...
    @property
    def inflight(self) -> int: ...


C = TypeVar("C", bound=Candidate)


def hash64(data: bytes) -> int:
    """A 64-bit hash that is equal in every process and on every machine (unlike `hash`)."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")


def replica_seed(name: str) -> int:
    """The replica's part of every rendezvous score: of its name alone, so that a restarted pod keeps its keys."""
    return hash64(name.encode())


def score(key: int, seed: int, weight: float) -> float:
    """Weighted rendezvous score of a replica for a key; the highest wins, in proportion to the weights.

    The two hashes are mixed by the finalizer of SplitMix64; u is uniform in (0, 1) and -weight / ln(u) is the score
    of [2] in the module's list.
    """
    x = (key ^ seed) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    x ^= x >> 31
    return -weight / math.log(((x >> 11) + 0.5) / (1 << 53))


def load_bound(candidates: Sequence[Candidate], weight: float, epsilon: float) -> int:
    """Requests that a replica of this weight may have in flight, counting the one that is to be placed.

    ceil((1 + epsilon) * (total + 1) * weight / total weight): at least one candidate is always below its bound.
    """
    total = sum(c.inflight for c in candidates) + 1
    weights = sum(c.weight for c in candidates)
    return math.ceil((1.0 + epsilon) * total * weight / weights)


def choose(policy: Policy, candidates: Sequence[C], key: int | None, tie: int, epsilon: float = 0.25) -> C | None:
    """The replica for a request, or None where there is no candidate.

    policy: PrefixAware and Session need a key; without one they decide like LeastLoad.
    candidates: the replicas that may get a request, each with a weight above 0; their order does not matter.
    tie: any number (the router takes a random one): among equally loaded replicas the highest score for it wins, so
        that two routers do not both fall on the first.
    epsilon: how far above the mean load per weight a replica may go before prefix affinity passes it over.
    """
    if not candidates:
        return None
    if len(candidates) == 1:
        return candidates[0]
    if policy is Policy.LEAST_LOAD or key is None:
        return min(candidates, key=lambda c: ((c.inflight + 1) / c.weight, -score(tie, c.seed, c.weight)))
    if policy is Policy.PREFIX_AWARE:
        below = [c for c in candidates if c.inflight + 1 <= load_bound(candidates, c.weight, epsilon)]
        candidates = below or candidates
    return max(candidates, key=lambda c: score(key, c.seed, c.weight))


def prefix_key(body: bytes) -> int | None:
    """The hash of what requests with a common KV prefix have in common (see above), or None where there is none.

    Never raises: a body that is not JSON, or whose first user message ends beyond SCAN_BYTES, is hashed by what could
    be read of it; the engine is the one to refuse it.
    """
    window = body[:SCAN_BYTES]
    found = _MESSAGES.search(window)
    if found is not None:
        parts = list(_conversation(window[found.end() :].decode("utf-8", "replace")))
        return hash64("\x1e".join(parts).encode("utf-8", "replace")) if parts else hash64(_raw(window, found.end()))
    found = _PROMPT.search(window)
    return None if found is None else hash64(_raw(window, found.end()))


def session_key(header: bytes | None, body: bytes) -> int | None:
    """The hash of the session: of the header x-session-id, else of the body's field `user`, else None."""
    if header:
        return hash64(b"header:" + header)
    found = _USER.search(body[:SCAN_BYTES])
    return None if found is None else hash64(b"user:" + found.group(1))


def request_key(policy: Policy, session: bytes | None, body: bytes) -> int | None:
    """The key that `choose` takes: nothing for LeastLoad; a Session request without a session goes by its prefix."""
    if policy is Policy.LEAST_LOAD:
        return None
    key = session_key(session, body) if policy is Policy.SESSION else None
    return prefix_key(body) if key is None else key


def _raw(window: bytes, start: int) -> bytes:
    return window[start : start + TEXT_CHARS]


def _conversation(text: str) -> Iterable[str]:
    """Role and first text of each message up to the first user message, as far as they parse."""
    at = 0
    for _ in range(MESSAGES):
        gap = _GAP.match(text, at)
        try:
            message, at = _DECODER.raw_decode(text, gap.end() if gap else at)
        except (ValueError, RecursionError):
            return
        if not isinstance(message, dict):
            return
        yield f"{message.get('role')}\x1f{_text(message.get('content'))}"
        if message.get("role") == "user":
            return


def _text(content: Any) -> str:
    """The first TEXT_CHARS of a message's content: a string, or a list of parts."""
    if isinstance(content, str):
        return content[:TEXT_CHARS]
    if isinstance(content, list):
        return "\x1f".join(_part(part) for part in content[: TEXT_CHARS + 1])[:TEXT_CHARS]
    return str(content)[:TEXT_CHARS]


def _part(part: Any) -> str:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"][:TEXT_CHARS])
    return str(part)[:TEXT_CHARS]
