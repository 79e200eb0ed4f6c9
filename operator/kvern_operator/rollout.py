"""Which replicas to add, drain, take back and delete. Pure: replicas as plain values in, moves out.

The bounds are a Deployment's (maxSurge, maxUnavailable) with one difference: a replica is drained before it is deleted,
and the one with the least in flight goes first.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

from kvern_operator.api.base import resolve_count
from kvern_operator.api.types import Rollout

# First the routers stop sending, then the replica is told to drain, then what it holds is believed: a request that a
# router sent just before it learned of the drain needs a moment to show up as in flight.
ROUTERS_FIRST = timedelta(seconds=1)
DRAIN_SETTLE = timedelta(seconds=2)
# A router says itself whom it sends to (Replica.routed). As a rule it has the new list within a second or two, by way
# of its kubelet; a kubelet that has lost the API server may take half a minute to come back, and without its pod being
# touched it looks once a minute. Told before that, a replica would refuse what routers know no other place for.
ROUTERS_PATIENCE = timedelta(seconds=90)


@dataclass(frozen=True)
class Replica:
    """One StatefulSet. `current`: of the present revision and layout. `in_flight` None: not known."""

    name: str
    index: int
    current: bool
    ready: bool = False
    served: bool = False  # may hold requests
    running: bool = False  # some container of it runs
    unschedulable: bool = False  # no node, or no quota, for a pod of it
    holds: bool = True  # has pods that have a node: their devices are taken
    leaving_for: timedelta | None = None  # since it was marked to go; None: it stays
    in_flight: int | None = None
    going: bool = False  # some pod of it ends without our doing: evicted, deleted, or its node is lost
    routed: bool = False  # some router says that it may still send to it

    @property
    def leaving(self) -> bool:
        """Marked to go."""
        return self.leaving_for is not None

    def left_by_routers(self) -> bool:
        """Of one that leaves: no router sends to it any more, or they have had their time."""
        since = self.leaving_for or timedelta(0)
        return since >= (ROUTERS_PATIENCE if self.routed else ROUTERS_FIRST)


@dataclass(frozen=True)
class Moves:
    """What to do with the replicas now. `wait`: when to look again, if nothing happens before.

    `drain` are marked as leaving, `tell` are replicas marked before whose pods are to be told now. Of those in
    `delete`, `late` hold requests still, and `replaced` are deleted because their pods end anyway.
    """

    add: int = 0
    drain: tuple[str, ...] = ()
    tell: tuple[str, ...] = ()
    resume: tuple[str, ...] = ()
    delete: tuple[str, ...] = ()
    late: frozenset[str] = frozenset()
    replaced: frozenset[str] = frozenset()
    wait: timedelta | None = None


@dataclass(frozen=True)
class Bounds:
    """How far a rollout may leave the desired number."""

    surge: int
    unavailable: int
    recreate: bool = False


def bounds_of(rollout: Rollout, desired: int, holding: int, spare: int | None) -> Bounds:
    """The bounds that a strategy stands for. `spare`: how many more replicas would fit; None: unknown. `holding`: how
    many hold their devices now. What they hold beyond `desired` is a surge's place, and can be used again; what they
    lack of it takes of the spare places first, and only the rest is room for a surge."""
    surge = resolve_count(rollout.max_surge, desired, round_up=True)
    unavailable = resolve_count(rollout.max_unavailable, desired, round_up=False)
    if surge == 0 and unavailable == 0:
        unavailable = 1  # percentages of a small number: some bound must be open
    if rollout.strategy == "Recreate":
        return Bounds(0, desired, recreate=True)
    swap = Bounds(0, max(unavailable, 1))
    if rollout.strategy == "DrainSwap" or surge == 0:
        return swap
    if rollout.strategy == "Surge" or spare is None:
        return Bounds(surge, unavailable)
    room = spare + holding - desired
    return Bounds(min(surge, room), unavailable) if room > 0 else swap


def plan_moves(
    replicas: Iterable[Replica],
    desired: int,
    rollout: Rollout,
    spare: int | None = None,
    ending: int = 0,
    outdated: bool = False,
) -> Moves:
    """The moves towards `desired` replicas that are all current, one safe step at a time. `ending`: replicas whose
    StatefulSet is gone while pods of it still hold their devices; `outdated`: some of them are of an old revision."""
    everyone = sorted(replicas, key=lambda r: r.index)
    done, late, waits = _finished(everyone, rollout)
    # A pod that ends takes as long as its last stream. Its replacement need not wait for that, nor is there a reason
    # to have the same pod again. An old revision stays: only its StatefulSet knows the template that served.
    replaced = {r.name for r in everyone if r.going and r.current and not r.leaving}
    delete = done | replaced
    ending += sum(r.holds for r in everyone if r.name in delete)
    staying = [r for r in everyone if r.name not in delete]
    leaving, live = [r for r in staying if r.leaving], [r for r in staying if not r.leaving]
    if rollout.paused:
        new, old = live, []  # nothing is replaced, whatever its revision
    else:
        new, old = [r for r in live if r.current], [r for r in live if not r.current]

    keep = _kept(staying, desired, rollout)
    resume = _taken_back([r for r in leaving if r.current or rollout.paused], keep - len(new))
    new = new + resume
    surplus = _to_go(new)[: max(len(new) - keep, 0)]
    new = [r for r in new if r not in surplus]
    holding = sum(not r.unschedulable for r in staying) + ending
    bounds = bounds_of(rollout, desired, holding, spare)
    replaceable = old if bounds.recreate else _replaceable(new, old, desired, bounds)

    drain = [r for r in (*surplus, *replaceable) if r not in resume]
    others = [r for r in staying if r not in new]
    # What goes in this very pass has a part in it, and what went before and still ends: its devices are not free yet.
    rolling = not rollout.paused and (outdated or any(not r.current for r in everyone if r not in new))
    known = spare if rollout.strategy == "Auto" else None
    return Moves(
        add=_addable(desired, len(new), len(others) + ending, rolling, bounds, known),
        drain=tuple(r.name for r in drain),
        tell=tuple(r.name for r in leaving if r not in resume and r.left_by_routers()),
        resume=tuple(r.name for r in resume if r not in surplus),
        delete=tuple(sorted(delete)),
        late=frozenset(late),
        replaced=frozenset(replaced),
        wait=min(waits, default=None) if not drain else min([*waits, ROUTERS_FIRST]),
    )


def _finished(replicas: list[Replica], rollout: Rollout) -> tuple[set[str], set[str], list[timedelta]]:
    """Leaving replicas that hold nothing any more or are out of time, those of them that are late, and how long the
    others may still take."""
    done, late, waits = set(), set(), []
    for replica in replicas:
        if replica.leaving_for is None:
            continue
        left = timedelta(seconds=rollout.drain_timeout_seconds) - replica.leaving_for
        empty = replica.in_flight == 0 and replica.leaving_for >= DRAIN_SETTLE and replica.left_by_routers()
        # One whose pods end already drains by itself; while its StatefulSet is there, another pod would follow.
        if not replica.served or not replica.running or empty or replica.going:
            done.add(replica.name)
        elif left <= timedelta(0):
            done.add(replica.name)
            late.add(replica.name)
        else:
            moments = (ROUTERS_FIRST, DRAIN_SETTLE, *((ROUTERS_PATIENCE,) if replica.routed else ()))
            steps = [moment - replica.leaving_for for moment in moments]
            waits.append(min((step for step in (*steps, left) if step > timedelta(0)), default=left))
    return done, late, waits


def _kept(staying: list[Replica], desired: int, rollout: Rollout) -> int:
    """How many may stay. A rollout that is paused half way leaves its surge: which revision shall win is not said."""
    half_way = rollout.paused and len({r.current for r in staying}) > 1
    return desired + (resolve_count(rollout.max_surge, desired, round_up=True) if half_way and desired else 0)


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


def _addable(desired: int, have: int, others: int, rolling: bool, bounds: Bounds, spare: int | None) -> int:
    """How many replicas to start beside the `have` that stay. `others` still hold their devices. While a revision
    replaces another they count against the surge; where there is no surge, or `spare` says how many fit, nothing starts
    in a place that is taken."""
    missing = max(desired - have, 0)
    if bounds.recreate and (rolling or others):
        return 0
    if not rolling and bounds.surge > 0:
        # Those that nothing of the service stands in the way of start all the same: nodes may be added for them.
        return missing if spare is None else min(missing, max(desired - have - others, spare))
    return max(min(missing, desired + bounds.surge - have - others), 0)
