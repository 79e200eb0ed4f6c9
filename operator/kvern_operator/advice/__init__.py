"""What each reason means and what to do about it, in one place: conditions carry the short form, `kvern explain` says
the steps, docs/troubleshooting.md prints all of it. Pure, standard library only.

Reasons are those of conditions.py and reconcile.py and the kubelet's, scheduler's and controllers' own words. Steps
hold commands in backticks; {name}, {pod} and {node} stand in them, and {k} for kubectl with context and namespace.
"""

from collections.abc import Mapping

from kvern_operator.advice.conditions import CONDITIONS, EVENTS, SERVICE
from kvern_operator.advice.form import APPLY, Advice
from kvern_operator.advice.pods import CRASHES, PODS, WORKLOADS
from kvern_operator.advice.scaling import SCALING

__all__ = [
    "APPLY",
    "CONDITIONS",
    "CRASHES",
    "EVENTS",
    "PODS",
    "REASONS",
    "SCALING",
    "SERVICE",
    "WORKLOADS",
    "Advice",
    "advice",
]

REASONS: Mapping[str, Advice] = {**EVENTS, **CONDITIONS, **CRASHES, **PODS, **WORKLOADS, **SERVICE, **SCALING}


def advice(reason: str) -> str:
    """What to do about a reason, in one sentence without a full stop; "" where there is nothing to do or to say."""
    known = REASONS.get(reason)
    return known.short if known is not None else ""
