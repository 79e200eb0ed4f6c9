"""A namespace's GPUs, shared by the services that compete for them. Pure.

The order is by priority: first each service's minimum, then what it wants, one replica after another among equals, so
that equals end up alike. Nothing is granted before it is free: what another service still holds, also a replica that
drains, is not there to be given away, whoever it will belong to. So the sum never leaves the budget.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import groupby


@dataclass(frozen=True)
class Claim:
    """What one service asks for, in replicas of `gpus` GPUs. `held`: replicas that have their GPUs now, those that
    drain as well."""

    name: str
    priority: int
    gpus: int
    least: int
    wanted: int
    held: int


@dataclass(frozen=True)
class Grant:
    """`now`: replicas that the service may have this cycle; `later`: its share once others have let go."""

    now: int
    later: int
    words: str


def share(budget: int, claims: Iterable[Claim]) -> Mapping[str, Grant]:
    """A grant for each service that uses GPUs; those on CPUs need none and get what they want. Names are unique."""
    asking = sorted(claims, key=lambda c: (-c.priority, c.name))
    shares = _shares(budget, [c for c in asking if c.gpus > 0])
    free = budget - sum(c.gpus * c.held for c in asking if c.gpus > 0)
    grants = {}
    for claim in asking:
        if claim.gpus <= 0:
            grants[claim.name] = Grant(claim.wanted, claim.wanted, "it uses no GPU")
            continue
        later = shares[claim.name]
        more = min(max(later - claim.held, 0), max(free, 0) // claim.gpus)
        free -= more * claim.gpus
        now = min(later, claim.held + more)
        grants[claim.name] = Grant(now, later, _words(budget, claim, now, later))
    return grants


def _shares(budget: int, asking: list[Claim]) -> dict[str, int]:
    """Replicas by name when everything could be divided anew."""
    left, shares = budget, {c.name: 0 for c in asking}
    goals = [{c.name: min(c.least, c.wanted) for c in asking}, {c.name: c.wanted for c in asking}]
    equals = [list(group) for _, group in groupby(asking, key=lambda c: c.priority)]
    for goal in goals:
        for group in equals:
            poorest = [(shares[c.name] * c.gpus, c.name, c.gpus) for c in group if shares[c.name] < goal[c.name]]
            heapify(poorest)
            while poorest:
                has, name, gpus = heappop(poorest)
                if gpus > left:
                    continue  # what is left only shrinks
                shares[name] += 1
                left -= gpus
                if shares[name] < goal[name]:
                    heappush(poorest, (has + gpus, name, gpus))
    return shares


def _words(budget: int, claim: Claim, now: int, later: int) -> str:
    if later < claim.wanted:
        return f"{later} of the {claim.wanted} replicas wanted fit into the namespace's {budget} GPUs at its priority"
    if now < claim.wanted:
        return f"{now} of {claim.wanted} replicas until other services have let go of their GPUs"
    return "all that is wanted fits"
