"""The work queue: which service is looked at when. `KeyQueue` decides and `Workers` runs; neither knows Kubernetes.

A key is in it once, however many events name it, and is worked on by one worker at a time. A failure waits
exponentially longer each time; a success waits for the resync. Both are jittered, so that a restart with a thousand
services does not make a wave of all of them that comes back for ever.
"""

import asyncio
import heapq
import itertools
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvern_operator.waiting import wait_or_timeout

log = logging.getLogger("kvern.queue")

Clock = Callable[[], float]  # seconds, monotonic
Key = tuple[str, str]  # namespace and name

SETTLE = 0.02  # seconds that an event waits for others of its kind: one apply makes several
EVENT_FLOOR = 2.0  # a failing key is not tried again sooner than this, whatever happens to its objects


@dataclass(frozen=True)
class Delays:
    """Seconds. A resync comes between `resync` and twice that after a success."""

    resync: float = 300.0
    backoff: float = 0.5
    longest_backoff: float = 300.0

    def after_failure(self, failures: int, share: float) -> float:
        """The wait after so many failures in a row; `share` of 0..1 jitters it within its upper half."""
        full = min(self.backoff * 2.0 ** min(failures - 1, 32), self.longest_backoff)
        return full * (0.5 + 0.5 * share)


@dataclass
class _Entry:
    due: float | None = None  # None: nothing is planned (only while it is worked on)
    failures: int = 0
    not_before: float = float("-inf")
    working: bool = False
    unlisted: bool = True  # `due` is not in the heap
    removed: bool = False


class KeyQueue:
    """Keys and when they are due. No key is ever forgotten but by `remove`."""

    def __init__(
        self, clock: Clock = time.monotonic, share: Clock = random.random, delays: Delays | None = None
    ) -> None:
        self._clock, self._share, self._delays = clock, share, delays or Delays()
        self._entries: dict[Key, _Entry] = {}
        self._heap: list[tuple[float, int, Key]] = []  # lazily cleaned: an item counts where its time is the entry's
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def depth(self) -> int:
        """How many keys are due now and wait for a worker."""
        now = self._clock()
        return sum(e.due is not None and e.due <= now and not e.working for e in self._entries.values())

    def failures(self, key: Key) -> int:
        """How many times in a row the key has failed."""
        entry = self._entries.get(key)
        return entry.failures if entry else 0

    def add(self, key: Key, delay: float = 0.0) -> None:
        """Look at the key within `delay` seconds; what was planned for sooner stays."""
        entry = self._entries.setdefault(key, _Entry())
        self._plan(key, entry, max(self._clock() + delay, entry.not_before))

    def _plan(self, key: Key, entry: _Entry, *dues: float) -> None:
        """Due at the earliest of `dues` and of what was planned. While it is worked on, nothing is in the heap."""
        due = min(dues if entry.due is None else (*dues, entry.due))
        if not entry.working and (due != entry.due or entry.unlisted):
            heapq.heappush(self._heap, (due, next(self._numbers), key))
        entry.due, entry.unlisted = due, entry.working

    def remove(self, key: Key) -> None:
        """Forget the key and its failures; where it is being worked on, once that ends."""
        entry = self._entries.get(key)
        if entry is not None and entry.working:
            entry.due, entry.removed = None, True
        else:
            self._entries.pop(key, None)

    def take(self) -> Key | None:
        """The key that has been due longest and that nobody works on; None where there is none."""
        now = self._clock()
        item = self._next()
        if item is None or item[0] > now:
            return None
        heapq.heappop(self._heap)
        entry = self._entries[item[2]]
        entry.due, entry.working = None, True
        return item[2]

    def _next(self) -> tuple[float, int, Key] | None:
        """The earliest item that counts, left where it is; those that do not are dropped on the way."""
        while self._heap:
            due, _, key = item = self._heap[0]
            entry = self._entries.get(key)
            if entry is not None and entry.due == due and not entry.working:
                return item
            heapq.heappop(self._heap)
        return None

    def wait(self) -> float | None:
        """Seconds until `take` may have a key; None: until something is added or finished."""
        item = self._next()
        return None if item is None else max(item[0] - self._clock(), 0.0)

    def succeed(self, key: Key, requeue_after: float | None = None) -> None:
        """The work on a key is done. It comes back after `requeue_after` seconds, and at the resync at the latest."""
        entry = self._finished(key)
        if entry is None:
            return
        entry.failures, entry.not_before = 0, float("-inf")
        resync = self._delays.resync * (1.0 + self._share())
        self._plan(key, entry, self._clock() + min(resync, requeue_after if requeue_after is not None else resync))

    def fail(self, key: Key) -> float:
        """The work on a key has failed. Returns after how many seconds it is tried again at the latest."""
        entry = self._finished(key)
        if entry is None:
            return 0.0
        entry.failures += 1
        delay, now = self._delays.after_failure(entry.failures, self._share()), self._clock()
        entry.not_before = now + min(delay, EVENT_FLOOR)
        if entry.due is not None:  # an event came meanwhile
            entry.due = max(entry.due, entry.not_before)
        self._plan(key, entry, now + delay)
        return delay

    def _finished(self, key: Key) -> _Entry | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry.working = False
        if entry.removed and entry.due is None:
            del self._entries[key]
            return None
        entry.removed = False
        return entry


# Works on one key. Returns after how many seconds to look again (None: at the resync); raises to be backed off.
Work = Callable[[Key], Awaitable[float | None]]


class Workers:
    """Runs the work of a queue, some keys at a time, one worker a key."""

    def __init__(self, queue: KeyQueue, work: Work, concurrency: int = 16) -> None:
        self.queue, self._work, self._concurrency = queue, work, concurrency
        self._changed = asyncio.Event()
        self._running: dict[asyncio.Task[None], Key] = {}

    def add(self, key: Key, delay: float = SETTLE) -> None:
        """KeyQueue.add, and wake up."""
        self.queue.add(key, delay)
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled; then what runs is cancelled as well."""
        try:
            while True:
                self._changed.clear()
                while len(self._running) < self._concurrency and (key := self.queue.take()) is not None:
                    task = asyncio.create_task(self._one(key), name=f"reconcile {key}")
                    self._running[task] = key
                    task.add_done_callback(self._ended)
                full = len(self._running) >= self._concurrency
                await wait_or_timeout(self._changed, None if full else self.queue.wait())
        finally:
            tasks = list(self._running)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._running.pop(task, None)
        self._changed.set()

    async def _one(self, key: Key) -> None:
        try:
            requeue_after = await self._work(key)
        except asyncio.CancelledError:
            self.queue.fail(key)
            raise
        except Exception as error:
            delay = self.queue.fail(key)
            log.debug("%s failed, next try in %.1f s: %s", key, delay, error)
        else:
            self.queue.succeed(key, requeue_after)
