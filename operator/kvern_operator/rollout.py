"""Which replicas to add, drain, take back and delete. Pure: replicas as plain values in, moves out.

The bounds are a Deployment's (maxSurge, maxUnavailable) with one difference: a replica is drained before it is deleted,
and the one with the least in flight goes first.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from kvern_operator.api.base import resolve_count
from kvern_operator.api.types import Rollout

# First the routers stop sending, then the replica is told to drain, then what it holds is believed: a request that a
# router sent just before it learned of the drain needs a moment to show up as in flight.
ROUTERS_FIRST = timedelta(seconds=1)
DRAIN_SETTLE = timedelta(seconds=2)


@dataclass(frozen=True)
class Replica:
    """One StatefulSet. `current`: of the present revision and layout. `in_flight` None: not known."""

    name: str
    index: int
    current: bool
    ready: bool = False
    served: bool = False  # may hold requests
    running: bool = False  # some container of it runs
    unschedulable: bool = False
    draining_since: datetime | None = None
    in_flight: int | None = None

    @property
    def leaving(self) -> bool:
        """Marked to go."""
        return self.draining_since is not None


@dataclass(frozen=True)
class Moves:
    """What to do with the replicas now. `wait`: when to look again, if nothing happens before.

    `drain` are marked as leaving, `tell` are replicas marked before whose pods are to be told now.
    """

    add: int = 0
    drain: tuple[str, ...] = ()
    tell: tuple[str, ...] = ()
    resume: tuple[str, ...] = ()
    delete: tuple[str, ...] = ()
    wait: timedelta | None = None


@dataclass(frozen=True)
class Bounds:
    """How far a rollout may leave the desired number."""

    surge: int
    unavailable: int
    recreate: bool = False


def bounds_of(rollout: Rollout, desired: int, new: list[Replica], spare: int | None) -> Bounds:
    """The bounds that a strategy stands for. `spare`: how many more replicas would fit; None: unknown."""
    surge = resolve_count(rollout.max_surge, desired, round_up=True)
    unavailable = resolve_count(rollout.max_unavailable, desired, round_up=False)
    if surge == 0 and unavailable == 0:
        unavailable = 1  # percentages of a small number: some bound must be open
    if rollout.strategy == "Recreate":
        return Bounds(0, desired, recreate=True)
    swap = Bounds(0, max(unavailable, 1))
    if rollout.strategy == "DrainSwap" or surge == 0:
        return swap
    if rollout.strategy == "Surge":
        return Bounds(surge, unavailable)
    starting = any(not r.ready and not r.unschedulable for r in new)
    has_room = spare is None or spare > 0 or starting
    return Bounds(surge, unavailable) if has_room else swap


def plan_moves(
    replicas: Iterable[Replica], desired: int, rollout: Rollout, now: datetime, spare: int | None = None
) -> Moves:
    """The moves towards `desired` replicas that are all current, one safe step at a time."""
    everyone = sorted(replicas, key=lambda r: r.index)
    delete, waits = _finished(everyone, rollout, now)
    leaving = [r for r in everyone if r.leaving and r.name not in delete]
    live = [r for r in everyone if not r.leaving]
    if rollout.paused:
        new, old = live, []  # nothing is replaced, whatever its revision
    else:
        new, old = [r for r in live if r.current], [r for r in live if not r.current]

    resume = _taken_back([r for r in leaving if r.current or rollout.paused], desired - len(new))
    new = new + resume
    surplus = _to_go(new)[: max(len(new) - desired, 0)]
    new = [r for r in new if r not in surplus]
    bounds = bounds_of(rollout, desired, new, spare)
    replaced = old if bounds.recreate else _replaceable(new, old, desired, bounds)

    drain = [r for r in (*surplus, *replaced) if r not in resume]
    still_there = [r for r in everyone if r not in new]
    held_by_old = [r for r in still_there if not r.current] if not rollout.paused else []
    return Moves(
        add=_addable(desired, len(new), still_there, held_by_old, bounds),
        drain=tuple(r.name for r in drain),
        tell=tuple(r.name for r in leaving if r not in resume and _since(r, now) >= ROUTERS_FIRST),
        resume=tuple(r.name for r in resume if r not in surplus),
        delete=tuple(sorted(delete)),
        wait=min(waits, default=None) if not drain else min([*waits, ROUTERS_FIRST]),
    )


def _since(replica: Replica, now: datetime) -> timedelta:
    return now - replica.draining_since if replica.draining_since is not None else timedelta(0)


def _finished(replicas: list[Replica], rollout: Rollout, now: datetime) -> tuple[set[str], list[timedelta]]:
    """Leaving replicas that hold nothing any more or are out of time, and how long the others may still take."""
    done, waits = set(), []
    for replica in replicas:
        if replica.draining_since is None:
            continue
        left = replica.draining_since + timedelta(seconds=rollout.drain_timeout_seconds) - now
        empty = replica.in_flight == 0 and _since(replica, now) >= DRAIN_SETTLE
        if not replica.served or not replica.running or empty or left <= timedelta(0):
            done.add(replica.name)
        else:
            steps = [replica.draining_since + step - now for step in (ROUTERS_FIRST, DRAIN_SETTLE)]
            waits.append(min((step for step in (*steps, left) if step > timedelta(0)), default=left))
    return done, waits


def _to_go(replicas: list[Replica]) -> list[Replica]:
    """In the order of removal: what does not answer, the least in flight (unknown counts as most), the youngest."""

    def order(r: Replica) -> tuple[bool, bool, int, int]:
        return (r.ready, r.in_flight is None, r.in_flight or 0, -r.index)

    return sorted(replicas, key=order)


def _taken_back(leaving: list[Replica], missing: int) -> list[Replica]:
    """Drains are reversible: rather than start a replica, take back those that would take longest to drain."""
    serving = [r for r in leaving if r.served and r.running]
    return list(reversed(_to_go(serving)))[: max(missing, 0)]


def _replaceable(new: list[Replica], old: list[Replica], desired: int, bounds: Bounds) -> list[Replica]:
    """Replicas of an old revision that may go now; never so many that fewer than desired - unavailable answer."""
    least = max(desired - bounds.unavailable, 0)
    new_unready = sum(not r.ready for r in new)
    budget = max(len(new) + len(old) - least - new_unready, 0)
    broken = [r for r in _to_go(old) if not r.ready][:budget]
    ready_surplus = sum(r.ready for r in (*new, *old)) - least
    healthy = [r for r in _to_go(old) if r.ready][: max(min(budget - len(broken), ready_surplus), 0)]
    return broken + healthy


def _addable(desired: int, have: int, others: list[Replica], old: list[Replica], bounds: Bounds) -> int:
    """How many replicas to start. During a rollout whatever still holds its devices counts against the surge."""
    missing = max(desired - have, 0)
    if bounds.recreate and old:
        return 0
    if not old:
        return missing
    return max(min(missing, desired + bounds.surge - have - len(others)), 0)
