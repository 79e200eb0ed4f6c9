"""Reads nodes and the requests of pods, when a decision needs them: while one revision replaces another.

Nobody watches nodes: they report every few seconds, and what is wanted of them is asked once in a rollout's step.
"""

import asyncio
import logging
import time
from collections.abc import Set

from kvern_operator.kube import ApiError, KubeClient, collection
from kvern_operator.queue import Clock
from kvern_operator.room import Claim, Room, read_claim, read_node

log = logging.getLogger("kvern.nodes")

FRESH = 2.0  # seconds that a look is good for
FORBIDDEN = 600.0  # seconds after which a right that was missing is asked for again
UNFINISHED = {"fieldSelector": "status.phase!=Succeeded,status.phase!=Failed"}


class NodeReader:
    """`room` is asked by all services; one look serves those that ask at the same time."""

    def __init__(self, client: KubeClient, clock: Clock = time.monotonic) -> None:
        self._client, self._clock = client, clock
        self._lock = asyncio.Lock()
        self._room: Room | None = None
        self._good_until = float("-inf")

    async def room(self, gone: Set[str] = frozenset()) -> Room | None:
        """What the nodes have; None where that may not be read or nobody answers. `gone`: UIDs of pods that have ended;
        a look that still has one of them is too old, and the room that it left would be missed."""
        async with self._lock:
            outdated = self._room is not None and not self._room.pods.isdisjoint(gone)
            if outdated or self._clock() >= self._good_until:
                began, self._room = self._clock(), None
                wait = FRESH
                try:
                    self._room = await self._look()
                except ApiError as error:
                    wait = FORBIDDEN if error.status in (401, 403, 404) else FRESH
                    log.info("nodes cannot be read, so a rollout surges and sees whether there is room: %s", error)
                self._good_until = began + wait
            return self._room

    async def _look(self) -> Room:
        nodes = [n for n in map(read_node, await self._client.list(collection("v1", "nodes"))) if n is not None]
        claims: list[Claim] = []
        async for page in self._client.pages(collection("v1", "pods"), UNFINISHED):
            claims += [c for c in map(read_claim, page) if c is not None]
        return Room(tuple(nodes), tuple(claims))
