"""May a request come in: the pod's state (loading, ready, draining, dead) and the number of requests in flight.

Draining has two sources: the admin port (reversible, shared by all API servers of the pod through a file in the socket
folder, which a restarted server finds again) and SIGTERM (this process, final). It touches no request that runs. New
ones are refused where a router sends them elsewhere; without one the end of SIGTERM's drain refuses them.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvern_engine.metrics import EngineView, Metrics
from kvern_engine.server.errors import ApiError, unavailable

# An engine whose loop has not turned for this long counts as hung. Far above the longest step on a slow CPU.
STALL_SECONDS = 60.0


def pod_state(engines: list[str], *, draining: bool, was_ready: bool, loaded: bool) -> str:
    """loading | ready | draining | dead, from the states of the engines (loading | ready | stalled | dead).

    A pod is ready at first when all of its engines are, and later on as long as one is.
    """
    if all(state in ("dead", "stalled") for state in engines):
        return "dead"
    if draining:
        return "draining"
    if not loaded or "ready" not in engines or ("loading" in engines and not was_ready):
        return "loading"
    return "ready"


class DrainFlag:
    """The admin port's drain switch: a file that every API server of the pod sees."""

    def __init__(self, socket_dir: Path) -> None:
        self._path = socket_dir / "draining"

    def is_set(self) -> bool:
        return self._path.exists()

    def set(self) -> None:
        """Asking again does not begin anew."""
        with contextlib.suppress(FileExistsError):
            self._path.touch(exist_ok=False)

    def age(self) -> float:
        """Seconds since it was set; 0 where it is not."""
        try:
            return max(time.time() - self._path.stat().st_mtime, 0.0)
        except FileNotFoundError:
            return 0.0

    def clear(self) -> None:
        self._path.unlink(missing_ok=True)


class Lifecycle:
    """The state of the pod as this API server sees it, and the door through which every generating request comes."""

    def __init__(
        self,
        drain_flag: DrainFlag,
        metrics: Metrics,
        *,
        max_in_flight: int,
        engines: Callable[[], list[EngineView]],
        drain_timeout: float,
        behind_router: bool = True,
    ) -> None:
        self.drain_flag = drain_flag
        self._behind_router = behind_router
        self.loaded = False  # the tokenizer is there
        self.terminating = False  # SIGTERM: /ready is 503
        self.refusing = False  # SIGTERM and what follows it are over: new requests are refused
        self.last_arrival = 0.0  # of a generating request, time.monotonic()
        self._metrics = metrics
        self._max_in_flight = max_in_flight
        self._engines = engines
        self._was_ready = False
        self._retry_after = max(1, min(30, int(drain_timeout)))

    def state(self) -> str:
        """The pod's state. Ready for the first time when all of its API servers are: the kernel chooses among them.

        To be called when this one may have become ready, too.
        """
        engines = [e.state for e in self._engines()]
        state = pod_state(engines, draining=self.draining, was_ready=self._was_ready, loaded=self.loaded)
        if state == "ready" and not self._was_ready:
            self._metrics.say_ready()
            if not self._metrics.all_ready():
                return "loading"
            self._was_ready = True
        return state

    @property
    def draining(self) -> bool:
        return self.terminating or self.drain_flag.is_set()

    def _refusal(self) -> tuple[str, ApiError] | None:
        state = self.state()
        # A router sends what is refused to another replica. Clients that come through a Service do so until their node
        # has forgotten this pod, and on connections that it has not told yet to be closed: they are answered.
        if state == "draining" and (self.refusing or (self._behind_router and self.drain_flag.is_set())):
            text = "This server is draining and takes no new requests. Please retry: another replica will answer."
            return "draining", unavailable(text, "draining", self._retry_after, close=True)
        if state == "dead":
            return "dead", unavailable("No engine of this server is alive.", "engine_dead", 5, close=True)
        if state == "loading":
            return "loading", unavailable("The model is still loading. Please retry.", "loading", 5)
        if self._metrics.in_flight() >= self._max_in_flight:
            text = (
                f"This server has {self._max_in_flight} requests in flight, the most it takes "
                "(max_waiting_requests). Please retry later."
            )
            return "queue_full", ApiError(text, status=429, code="rate_limit_exceeded", headers={"Retry-After": "1"})
        return None

    def check(self) -> None:
        """Raises ApiError 429 or 503 with Retry-After, counted in admission_rejections, where nothing is taken now."""
        self.last_arrival = time.monotonic()
        refusal = self._refusal()
        if refusal is not None:
            self._metrics.rejected(refusal[0])
            raise refusal[1]

    @contextlib.contextmanager
    def admit(self) -> "Iterator[Slot]":
        """Hold a place in flight. Raises what `check` does."""
        self.check()
        slot = Slot(self._metrics)
        try:
            yield slot
        finally:
            slot.release()


class Slot:
    """One HTTP request's share of the requests in flight; `release` gives it back once."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._held = 0
        self.resize(1)

    def resize(self, prompts: int) -> None:
        """The request turned out to hold this many prompts."""
        self._metrics.change_in_flight(prompts - self._held)
        self._held = prompts

    def release(self) -> None:
        self.resize(0)
