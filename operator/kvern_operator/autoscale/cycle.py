"""Replicas and layout decided together, once a cycle, so that they never work against each other. Pure.

While a change of layout is on its way or being watched, no replica is removed; a change that is decided in this cycle
brings its own number of replicas with it.
"""

from dataclasses import dataclass, replace

from kvern_operator.autoscale import replicas
from kvern_operator.autoscale.layout import LayoutDecision, Look, Sizes, State, plan
from kvern_operator.autoscale.terms import Decision, Limits, Memory, View


@dataclass(frozen=True)
class Both:
    """What one cycle decides, and what it leaves to the next one."""

    replicas: Decision
    layout: LayoutDecision
    memory: Memory
    state: State


def decide(limits: Limits, view: View, memory: Memory, sizes: Sizes, look: Look, state: State) -> Both:
    """One cycle."""
    laid, state = plan(sizes, limits, view, look, state, memory.full)
    view = replace(view, changing=state.phase != "Stable")
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
