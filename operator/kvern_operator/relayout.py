"""Replicas that change their layout while they serve: who can, which pod is told which size, what pods say. Pure.

A pod owns its devices for good; which of them are an engine together can change without a restart (`POST
/admin/layout`). A replica whose pod offers the wanted size counts as one that has it: the pod is told, and once it says
that it has it, StatefulSet and ConfigMap name the new layout, which a container that crashes boots from then on. One
pod after the other: the pause of a switch is never that of all replicas. What a pod cannot do, or has tried in vain, is
a rollout as for any other change; in mode Auto, what it has tried in vain is left to the planner, which takes it back.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from kvern_operator.api.base import parse_time
from kvern_operator.api.status import LayoutPlan
from kvern_operator.desired import meta
from kvern_operator.desired.layout import Layout, parse_layout
from kvern_operator.observed import Object, Pod

RESTING = ("Stable", "Loading")  # phases in which no switch runs
_ASKED_SECONDS = 30.0  # within which a pod has been asked for its layout again


@dataclass(frozen=True)
class SaidLayout:
    """What GET and POST /admin/layout answer, as far as reconcile and those who carry it out want to know. `failed`:
    (size, why) of the last switch, where it was taken back, and `failed_ago` how many seconds ago that was."""

    tensor: int | None = None
    target: int | None = None
    generation: int = 0
    phase: str = "Loading"
    feasible: tuple[tuple[int, int], ...] = ()
    failed: tuple[int, str] | None = None
    failed_ago: float = 0.0

    @property
    def switching(self) -> bool:
        return self.phase not in RESTING

    def generation_for(self, tensor: int) -> int:
        """The generation to ask for a size with: newer than what the pod knows, unless it is at that already."""
        return self.generation if self.target == tensor else self.generation + 1


UNKNOWN = SaidLayout()


def read_layout(answer: Any) -> SaidLayout | None:
    """None where that is no answer."""
    try:
        last = (answer.get("last") or [None])[0]
        failed = last is not None and last["outcome"] == "RolledBack"
        phase, known = str(answer.get("phase", "Stable")), answer.get("phase") != "Loading"
        return SaidLayout(
            tensor=int(answer["current"]) if known else None,
            target=int(answer.get("target", answer["current"])),
            generation=int(answer.get("generation", 0)),
            phase=phase,
            feasible=tuple((int(s["size"]), int(s["kvTokens"])) for s in answer.get("feasible") or ()),
            failed=(int(last["to"]), str(last["reason"])) if failed else None,
            failed_ago=float(last.get("secondsAgo", 0.0)) if failed else 0.0,
        )
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        return None


def has_layout(workload: Object, wanted: Layout, pods: Sequence[Pod], planned: bool = False) -> bool:
    """Whether a replica counts as one of the wanted layout: it has it, or its pod can take it as it runs. `planned`:
    the size is the planner's."""
    made = parse_layout(meta.annotation(workload, meta.LAYOUT))
    if made is None or made.ranks != wanted.ranks or made.pipeline != wanted.pipeline:
        return False
    if made == wanted and all(p.tensor in (None, wanted.tensor) for p in pods):
        return True
    return wanted.pipeline == 1 and len(pods) == 1 and _can_have(pods[0], wanted.tensor, planned)


def failure(pod: Pod, size: int, within: float = math.inf) -> str:
    """Why the pod's last switch was taken back, where it was one to `size` within so many seconds; "" else."""
    if pod.switch_failed is None or pod.switch_failed[0] != size or pod.switch_failed_ago > within:
        return ""
    return pod.switch_failed[1] or "it was taken back"


def _can_have(pod: Pod, size: int, planned: bool, within: float = math.inf) -> bool:
    """Whether a pod has a size or can be told to change to it."""
    if pod.tensor is None or pod.terminating:
        return False
    if pod.tensor == size:
        return True
    failed = not planned and failure(pod, size, within)
    return any(offered == size for offered, _ in pod.feasible) and not failed and not _refused(pod, size)


def _refused(pod: Pod, size: int) -> str:
    return next((why or "it was refused" for refused, why in pod.refused if refused == size), "")


def why_not(pod: Pod, size: int) -> str:
    """Why a pod cannot have a size, by its own word or because it has tried; "" where neither is known."""
    return failure(pod, size) or _refused(pod, size)


def to_switch(
    wanted: Layout, owners: Collection[str], pods: Iterable[Pod], trying: float = math.inf
) -> tuple[tuple[str, int], ...]:
    """(pod, size) of what is to be told now; `owners`: replicas that count as ones of the wanted layout and stay.
    `trying`: for how many seconds the size has been wanted; what failed before is tried once more."""
    pods = sorted((p for p in pods if p.owner in owners), key=lambda p: p.name)
    if any(p.switching for p in pods):
        return ()
    for pod in pods:
        has_another = pod.tensor not in (None, wanted.tensor)
        if pod.ready and has_another and _can_have(pod, wanted.tensor, planned=False, within=trying):
            return ((pod.name, wanted.tensor),)
    return ()


def trying_for(plan: LayoutPlan | None, now: datetime) -> float:
    """For how many seconds the planner has wanted its size, and a little more, since pods are asked every few seconds;
    without end where it is not the planner's."""
    if plan is None or plan.phase != "Changing" or plan.since is None:
        return math.inf
    return (now - parse_time(plan.since)).total_seconds() + _ASKED_SECONDS


def relaid(workload: Object, wanted: Layout, pods: Iterable[Pod]) -> bool:
    """Whether a replica that was made with another layout has the wanted one by now."""
    made = parse_layout(meta.annotation(workload, meta.LAYOUT))
    return made != wanted and present_layout(workload, pods) == wanted


def present_layout(workload: Object, pods: Iterable[Pod]) -> Layout | None:
    """The layout that a replica has: that of its pod where it says so, else the one it was made with."""
    made = parse_layout(meta.annotation(workload, meta.LAYOUT))
    said = next((p.tensor for p in pods if p.owner == workload["metadata"]["name"] and p.tensor is not None), None)
    if made is None or said is None:
        return made
    return replace(made, tensor=said, data=made.ranks // max(1, said * made.pipeline))
