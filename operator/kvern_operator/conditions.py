"""Conditions: recomputed whole on every pass, each with a reason for programs and a sentence for people. Pure.

lastTransitionTime moves only where a status changes. Hidden causes (a crash loop, an exit code, an image that cannot be
pulled, a pod that fits nowhere) come up from causes.py.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Literal

from kvern_operator.advice import advice
from kvern_operator.api.status import (
    AutoscalingStatus,
    Condition,
    ConditionType,
    InferenceServiceStatus,
    LayoutPlan,
)
from kvern_operator.api.types import InferenceServiceSpec
from kvern_operator.cache import CacheState, speaks_of
from kvern_operator.causes import Cause, Surroundings, find_cause
from kvern_operator.desired.engine import revision
from kvern_operator.desired.layout import Layout
from kvern_operator.desired.meta import ENGINE, FETCH, ROUTER, leads
from kvern_operator.observed import Pod

Verdict = tuple[Literal["True", "False", "Unknown"], str, str]  # status, reason, message


@dataclass(frozen=True)
class View:
    """What conditions are computed from. Counts are of replicas, not of pods."""

    spec: InferenceServiceSpec
    desired: int
    total: int  # all that exist
    current: int  # of the present revision and layout, not leaving
    current_ready: int
    ready: int
    leaving: int
    pods: tuple[Pod, ...]
    layout: Layout
    layouts: frozenset[Layout]  # of the ready replicas
    url: str
    ignored: tuple[str, ...]
    around: Surroundings
    cache: CacheState | None = None  # None: no model is brought into a claim
    drains: tuple[str, ...] = ()  # who drains, and until when
    ended: tuple[str, ...] = ()  # engine pods that end
    full: bool = False  # the nodes have no room for another replica
    scaling: AutoscalingStatus = field(default_factory=AutoscalingStatus)
    plan: LayoutPlan | None = None  # of the tensor size
    autoscales: bool = False  # see Settings

    @cached_property
    def cause(self) -> Cause | None:
        """What keeps it from what the spec asks, if anything does."""
        return find_cause(self.pods, self.around)

    @property
    def blocked(self) -> Cause | None:
        """The cause, where it keeps replicas of the present spec from answering."""
        held = self.current_ready < self.desired or bool(self.around.refusals)
        return self.cause if held and not self.spec.suspend else None

    @property
    def on_cpu(self) -> list[Pod]:
        """Ready engine pods that have a GPU by Kubernetes' account and compute on the CPU."""
        engines = [p for p in self.pods if p.component == ENGINE and p.ready]
        return [p for p in engines if p.device.startswith("cpu")] if self.spec.resources.gpus_per_pod else []

    @property
    def router_ready(self) -> bool:
        """True also where there is no router."""
        if self.spec.router.mode != "Embedded":
            return True
        return any(p.ready for p in self.pods if p.component == ROUTER)

    @property
    def settled(self) -> bool:
        """The number and revision of replicas are as wanted and nothing is on its way."""
        return self.current_ready == self.desired and self.total == self.desired and self.router_ready


def compute(view: View, previous: InferenceServiceStatus | None, generation: int, now: datetime) -> list[Condition]:
    """All conditions, in a fixed order."""
    verdicts: dict[ConditionType, Verdict] = {
        "Ready": _ready(view),
        "Available": _available(view),
        "Progressing": _progressing(view),
        "ModelCached": _model_cached(view, previous),
        "MetricsAvailable": _metrics(view),
        "ScalingActive": _scaling_active(view),
        "ScalingLimited": _scaling_limited(view),
        "ParallelismStable": _parallelism(view),
        "Degraded": _degraded(view),
    }
    if view.ignored:
        verdicts["FieldsIgnored"] = ("True", "NotSupportedHere", "; ".join(view.ignored))
    return [condition(type_, verdict, previous, generation, now) for type_, verdict in verdicts.items()]


def condition(
    type_: ConditionType, verdict: Verdict, previous: InferenceServiceStatus | None, generation: int, now: datetime
) -> Condition:
    before = previous.condition(type_) if previous else None
    status, reason, message = verdict
    reason = (
        re.sub(r"[^A-Za-z0-9]|^[0-9]+", "", reason)[:128] or "Unknown"
    )  # words of others: a condition takes no other
    since = before.last_transition_time if before is not None and before.status == status else now
    if len(message) > 2048:
        message = message[:2045] + "..."
    return Condition(
        type=type_,
        status=status,
        observed_generation=generation,
        last_transition_time=since,
        reason=reason,
        message=message,
    )


def _names(pods: Iterable[Pod]) -> str:
    return _listed(sorted(p.name for p in pods))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


# ---------------------------------------------------------------- verdicts


def _ready(view: View) -> Verdict:
    if view.spec.suspend:
        return "False", "Suspended", "spec.suspend is true; set it to false to start"
    if view.blocked:
        return "False", view.blocked.reason, view.blocked.message
    if view.desired == 0:
        return _at_zero(view)
    if view.current_ready < view.desired:
        old = view.ready - view.current_ready
        if old > 0:
            text = f"{view.current_ready} of {view.desired} replicas run the present spec, {old} an older one"
            text += f"; {view.cache.message}" if view.cache is not None and not view.cache.ready else ""
            return "False", "RollingOut", text
        reason, doing = _loading(view)
        return "False", reason, f"{view.current_ready} of {view.desired} replicas answer; {doing}"
    if not view.router_ready:
        return _no_router(view)
    text = f"{view.desired} of {view.desired} replicas answer at {view.url}"
    return "True", "AllReplicasReady", text + (", computing on the CPU" if view.on_cpu else "")


def _at_zero(view: View) -> Verdict:
    if not view.router_ready and view.cause:
        return _no_router(view)
    held = "requests are held" if view.spec.router.mode == "Embedded" else "nothing answers"
    status: Literal["True", "False"] = "True" if view.router_ready and view.total == 0 else "False"
    return status, "ScaledToZero", f"no replica is wanted; {held}"


def _no_router(view: View) -> Verdict:
    found = view.cause or Cause("RouterNotReady", "the router does not answer yet")
    return "False", found.reason, found.message


def _loading(view: View) -> tuple[str, str]:
    """How far the replicas are that do not answer yet: (reason, words)."""
    if view.cache is not None and not view.cache.ready:
        return "Downloading", view.cache.message
    engines = [p for p in view.pods if p.component == ENGINE and not p.ready and not p.terminating]
    stages = (
        ("Scheduling", "scheduling", "waiting for a node"),
        ("Creating", "creating", "being created (image, volumes)"),
        ("Loading", "", "loading"),
    )
    for reason, stage, words in stages:
        chosen = [p for p in engines if p.stage == stage]
        if chosen:
            return reason, f"{_names(chosen)} {words}"
    return "Loading", "waiting for pods"


def _available(view: View) -> Verdict:
    if view.ready and view.router_ready:
        return (
            "True",
            "Answering",
            f"{view.ready} replica{'s' if view.ready > 1 else ''} answer{'' if view.ready > 1 else 's'}",
        )
    if view.spec.suspend:
        return "False", "Suspended", "spec.suspend is true"
    if view.desired == 0:
        return "False", "ScaledToZero", "no replica is wanted"
    if view.cause:
        return "False", view.cause.reason, view.cause.message
    return _no_router(view) if view.ready else ("False", "NoReplicaReady", _loading(view)[1])


def _progressing(view: View) -> Verdict:
    if view.blocked:
        return "False", view.blocked.reason, f"stalled: {view.blocked.message}"
    if view.settled:
        return "False", "Complete", "everything is as the spec says"
    parts = []
    if view.current < view.desired:
        after = f" once {_listed(view.ended)} has ended" if view.ended else ""
        parts.append(f"{view.desired - view.current} replicas to start{after}")
    loading = view.current - view.current_ready
    if loading > 0:
        parts.append(f"{loading} loading")
    outdated = view.total - view.leaving - view.current
    if outdated > 0:
        swaps = view.full and view.spec.rollout.strategy == "Auto" and view.total <= view.desired
        how = " (no room for another one: an old one goes first)" if swaps else ""
        parts.append(f"{outdated} of an older revision to replace{how}")
    if view.leaving:
        until = f" ({', '.join(view.drains[:4])}{', ...' if view.leaving > 4 else ''})" if view.drains else ""
        parts.append(f"{view.leaving} draining{until}")
    if not view.router_ready and not view.spec.suspend:
        parts.append("router starting")
    reason = "RollingOut" if outdated > 0 else "Draining" if view.leaving and not loading else "Starting"
    if outdated > 0 and view.spec.rollout.paused:
        return "False", "RolloutPaused", "spec.rollout.paused is true; " + ", ".join(parts)
    return "True", reason, ", ".join(parts) or "pods are ending"


def _model_cached(view: View, previous: InferenceServiceStatus | None) -> Verdict:
    if view.cache is not None:
        return _in_claim(view, view.cache)
    present = ("", revision(view.spec))  # what an older one has loaded may be another model
    if any(p.served and p.revision in present for p in view.pods if p.component == ENGINE):
        return "True", "Loaded", f"{view.spec.model.uri} has been loaded"
    before = previous.condition("ModelCached") if previous else None
    if before is not None and before.status == "True" and speaks_of(before.message, view.spec.model.uri):
        return "True", before.reason, before.message
    return "Unknown", "NotLoadedYet", f"no replica has loaded {view.spec.model.uri} yet"


def _in_claim(view: View, cache: CacheState) -> Verdict:
    if cache.ready:
        return "True", "Cached", cache.message
    if view.cause is not None and view.cause.component == FETCH:
        return "False", view.cause.reason, view.cause.message
    return "False", "Downloading" if cache.phase == "Downloading" else "DownloadPending", cache.message


def _metrics(view: View) -> Verdict:
    ready = [p for p in view.pods if p.component == ENGINE and p.ready and leads(p.name)]
    silent = [p for p in ready if p.in_flight is None]
    if not ready:
        return "Unknown", "NoReplicaReady", "no replica to read metrics from"
    if silent:
        return "False", "NoMetrics", f"{_names(silent)} gave no metrics"
    return "True", "MetricsRead", "every ready replica gives its metrics"


def _scaling_active(view: View) -> Verdict:
    mode, made = view.spec.autoscaling.mode, view.scaling.last_decision
    if mode == "External":
        return "True", "External", f"an HPA, KEDA or kubectl scale writes spec.replicas ({view.spec.replicas})"
    if mode == "Off":
        return "False", "Off", f"autoscaling.mode is Off; spec.replicas is {view.spec.replicas}"
    if not view.autoscales:
        return "False", "NotSupportedHere", f"autoscaling.mode {mode} needs a cluster; replicas stay at {view.desired}"
    if mode == "Recommend":
        number = view.scaling.recommended
        text = "nothing is known yet" if number is None else f"{number} replicas would be right"
        return "False", "Recommend", f"autoscaling.mode is Recommend; spec.replicas is {view.spec.replicas}; {text}"
    if made is not None and made.limited_by == "missingMetrics" and view.ready and view.router_ready:
        return "False", "MissingMetrics", f"replicas stay at {view.desired}: {made.reason}"
    if made is None or made.kind == "given":
        return "True", "Internal", f"replicas follow the metrics; {view.desired} so far"
    return "True", "Internal", f"{view.desired} replicas: {made.reason}"


# What keeps the number of replicas from what is wanted, as reasons of a condition. Others (stabilization, missing
# metrics, ...) keep replicas that are wanted less, which is no trouble.
_LIMITS = {
    "maxReplicas": "MaxReplicas",
    "gpuBudget": "GpuBudget",
    "namespaceBudget": "NamespaceBudget",
    "unschedulable": "Unschedulable",
    "slowStart": "SlowStart",
}


def _scaling_limited(view: View) -> Verdict:
    made = view.scaling.last_decision
    if made is not None and made.limited_by in _LIMITS and view.spec.autoscaling.mode in ("Internal", "Recommend"):
        wanted = made.wanted if made.wanted is not None else made.to
        text = f"{wanted} replicas are wanted, {made.limited_by} allows {made.to}: {made.reason}"
        return "True", _LIMITS[made.limited_by], text
    return "False", "WithinBounds", "nothing keeps the number of replicas from what is wanted"


def _parallelism(view: View) -> Verdict:
    plan = view.plan
    if plan is not None and plan.phase == "Changing":
        back = "back " if plan.returning else ""
        return "False", "Changing", f"tensor size goes {back}from {plan.before} to {plan.size}"
    if not view.layouts:
        return "Unknown", "NoReplicaReady", f"wanted is tensor size {view.layout.tensor}"
    if view.layouts == {view.layout} and plan is not None and plan.phase == "Verifying":
        return "False", "Verifying", f"tensor size {plan.size} is in place and is being watched"
    if view.layouts == {view.layout}:
        return "True", "AsWanted", f"tensor size {view.layout.tensor} on every ready replica"
    sizes = ", ".join(sorted({str(x.tensor) for x in view.layouts}))
    return "False", "Changing", f"tensor size {sizes}, wanted {view.layout.tensor}"


def _degraded(view: View) -> Verdict:
    if view.cause:
        return "True", view.cause.reason, view.cause.message
    if view.on_cpu:
        gpus = view.spec.resources.gpus_per_pod
        text = (
            f"spec.resources.gpusPerPod is {gpus}, but {_names(view.on_cpu)} found no CUDA device and computes on the "
            f"CPU; {advice('ComputesOnCPU')}"
        )
        return "True", "ComputesOnCPU", text
    return "False", "AsExpected", "no pod is in trouble"
