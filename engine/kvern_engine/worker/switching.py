"""A worker's part in a switch of the layout, step by step as the supervisor says; what it answers.

It keeps both layouts from `Reform` on, serves the new one after `MoveKv`, and lets go of one of them at `Finish`. A
step that fails leaves the old one as it was. No torch is loaded here: a simulated device has none.
"""

import gc
import logging
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvern_engine.core.plan import WorkerReady
from kvern_engine.parallel.messages import Finish, MoveKv, Reform, Switched, SwitchToWorker

log = logging.getLogger(__name__)

_STEPS: dict[type, str] = {Reform: "reform", MoveKv: "kv", Finish: "finish"}


class Next(Protocol):
    """A worker of the layout to come (`reform.Reformed`, `sim_switch.SimReformed`)."""

    worker: Any
    ready: WorkerReady
    seconds: dict[str, float]

    def move_kv(self, moves: Sequence[tuple[int, int, list[tuple[int, int]]]]) -> dict[str, float]: ...

    def undo(self) -> None:
        """Give it up: the worker that it was made from can compute again."""
        ...

    def settle(self) -> None:
        """It has taken over: what the old layout had is let go."""
        ...


def reformed(worker: Any, ready: WorkerReady, message: Reform) -> Next:
    """Raises ValueError, RankMissingError or RuntimeError where that cannot be; the worker goes on as it was."""
    return _kind(worker)(worker, ready, message)


def _kind(worker: Any) -> Callable[[Any, WorkerReady, Reform], Next]:
    if worker.config.device == "sim":
        from kvern_engine.worker.sim_switch import SimReformed

        return SimReformed
    from kvern_engine.worker.reform import Reformed

    return Reformed


class Switching:
    """`worker` and `ready` are those that serve; `tell` takes what the supervisor is to hear."""

    def __init__(self, worker: Any, ready: WorkerReady, tell: Callable[[Switched], None]) -> None:
        self.worker, self.ready, self._tell = worker, ready, tell
        _kind(worker)  # what a switch needs is imported now, not in the pause
        self._before: tuple[Any, WorkerReady, Next] | None = None
        self._next: Next | None = None
        self._switch = 0  # the newest that anything was said about

    def handle(self, message: SwitchToWorker) -> None:
        """Do what the supervisor says and tell it. The last word about a switch may come behind the first one about the
        next, which is said on another socket, and counts for nothing then."""
        if message.switch < self._switch:
            return
        rank, step = self.worker.rank, _STEPS[type(message)]
        begin = time.perf_counter()
        try:
            seconds, ready = self._do(message)
            answer = Switched(message.switch, rank, step, seconds, ready, lost_kv=self._tell_of_loss(message))
        except Exception as error:
            log.exception("the switch failed at %s", step)
            known = isinstance(error, ValueError | MemoryError)
            text = str(error) if known else f"{type(error).__name__}: {error}"
            traceback.clear_frames(error.__traceback__)  # they hold what was built, whose room the old layout needs
            self._go_back()
            answer = Switched(message.switch, rank, step, error=text)
        if answer.error is not None:
            gc.collect()  # the traceback holds what was built
        log.debug("%s took %.3f s", step, time.perf_counter() - begin)
        self._tell(answer)

    def _do(self, message: SwitchToWorker) -> tuple[dict[str, float], WorkerReady | None]:
        if message.switch > self._switch:
            self._switch = message.switch
            if self._before is None:
                self._go_back()
            else:
                self._let_go()  # the last one has succeeded: a way back would have been waited for
        if isinstance(message, Reform):
            self._next = reformed(self.worker, self.ready, message)
            return self._next.seconds, self._next.ready
        if isinstance(message, MoveKv):
            if self._next is None:
                raise ValueError("there is no layout to move to")
            seconds = self._next.move_kv(message.moves)
            self._before = self.worker, self.ready, self._next
            self.worker, self.ready, self._next = self._next.worker, self._next.ready, None
            return seconds, None
        if message.keep:
            self._let_go()
        else:
            self._go_back()
        return {}, None

    def _tell_of_loss(self, message: SwitchToWorker) -> bool:
        """With the answer to Finish, once: whether the worker that serves lost K and V on the way back."""
        lost = isinstance(message, Finish) and bool(self.worker.lost_kv)
        if lost:
            self.worker.lost_kv = False
        return lost

    def _let_go(self) -> None:
        """Of the old layout: its weights, arena and groups."""
        if self._before is not None and getattr(self._before[0], "parallel", None) is not None:
            self._before[0].parallel.close()
        taken = self._before[2] if self._before is not None else None
        self._before = self._next = None  # nothing of a worker holds itself: its memory is free now
        if taken is not None:
            taken.settle()

    def _go_back(self) -> None:
        """To the old layout, if there is one; whatever there is of a new one is given up."""
        given_up = self._next
        if self._before is not None:
            self.worker, self.ready, given_up = self._before
        self._before = self._next = None
        if given_up is not None:
            given_up.undo()
