"""Replicas and layout decided together, once a cycle, so that they never work against each other. Pure.

While a change of layout is on its way or being watched, no replica is removed, unless nothing comes by which it could
be judged; a change that is decided in this cycle brings its own number of replicas with it.
"""

from dataclasses import dataclass, replace

from kvern_operator.autoscale import replicas
from kvern_operator.autoscale.facts import facts_of
from kvern_operator.autoscale.layout import LayoutDecision, Look, Sizes, State, plan
from kvern_operator.autoscale.terms import Decision, Limits, Memory, View
from kvern_operator.autoscale.wants import served_by

LONGEST_WATCH = 2.0  # times verifySeconds, for which replicas are kept while a change is watched


@dataclass(frozen=True)
class Both:
    """What one cycle decides, and what it leaves to the next one."""

    replicas: Decision
    layout: LayoutDecision
    memory: Memory
    state: State


def _served(limits: Limits, view: View, memory: Memory, sizes: Sizes) -> float | None:
    """Requests a second of a replica as it is, where the planner is to know it."""
    if sizes.mode == "Fixed" or view.traffic is None:
        return None
    found = served_by(limits, view, facts_of(limits, view, memory))
    return None if found is None else found.each


def _changing(sizes: Sizes, look: Look, state: State) -> bool:
    """Whether replicas are kept for the sake of a change. Figures that do not come in the night cost no devices."""
    watching = state.phase == "Verifying" and look.now - state.since <= LONGEST_WATCH * sizes.verify
    return state.phase == "Changing" or watching


def decide(limits: Limits, view: View, memory: Memory, sizes: Sizes, look: Look, state: State) -> Both:
    """One cycle."""
    laid, state = plan(sizes, limits, view, look, state, memory.full, _served(limits, view, memory, sizes))
    view = replace(view, changing=_changing(sizes, look, state))
    if laid.changed:
        memory = replace(memory, full=())  # what the old size held when full
    made, memory = replicas.decide(limits, view, memory)
    if laid.changed and laid.replicas is not None and made.kind in ("hold", "up"):
        # The terms have counted with replicas of the old size.
        target = max(view.current, min(made.target, laid.replicas))
        if target != made.target:
            words = f"{made.reason}; {laid.replicas} are enough at tensor size {laid.target}"
            made = replace(made, target=target, reason=words, limited_by="layoutChange")
    return Both(made, laid, memory, state)
