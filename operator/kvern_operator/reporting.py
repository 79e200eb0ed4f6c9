"""What one pass writes into status: counts, layout, capacity, decisions, times of start, and conditions. Pure.

Status is a record: what nothing tells any more (a capacity, a device) stays as it was last known.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise

from kvern_operator.api.base import parse_time
from kvern_operator.api.status import (
    AutoscalingStatus,
    CacheStatus,
    Capacity,
    Decision,
    FeasibleSize,
    InferenceServiceStatus,
    LayoutPlan,
    ParallelismStatus,
    Revision,
    Startup,
)
from kvern_operator.api.types import InferenceService
from kvern_operator.cache import cache_state
from kvern_operator.causes import Surroundings
from kvern_operator.conditions import View, compute, condition
from kvern_operator.desired import engine, meta, services
from kvern_operator.desired.cache import is_complete
from kvern_operator.desired.layout import Layout, target_layout
from kvern_operator.observed import Notice, Observed, Pod
from kvern_operator.relayout import present_layout
from kvern_operator.replicas import marked_at
from kvern_operator.rollout import Replica
from kvern_operator.settings import Settings

HISTORY = 10  # decisions kept in status


@dataclass(frozen=True)
class Pass:
    """What a pass of reconcile has found out and decided. `ignored`: see Settings.ignored."""

    service: InferenceService
    observed: Observed
    replicas: list[Replica]
    desired: int
    now: datetime
    settings: Settings
    ignored: tuple[str, ...]


def status_of(found: Pass) -> InferenceServiceStatus:
    """The whole status after one pass."""
    service, observed, previous = found.service, found.observed, found.observed.status
    spec, layout = service.spec, target_layout(service.spec, previous)
    sets = {o["metadata"]["name"]: o for o in observed.children if o["kind"] == "StatefulSet"}
    ready = [r for r in found.replicas if r.ready and not r.leaving]
    parsed = (present_layout(sets[r.name], observed.pods) for r in ready)
    layouts = frozenset(x for x in parsed if x is not None)
    parallelism, scaling = _parallelism(found, layout, layouts), _autoscaling(found)
    view = _view(found, layout, layouts, len(ready), scaling, parallelism.plan)
    revisions = {sets[r.name]["metadata"]["labels"].get(meta.REVISION_LABEL) for r in ready}
    before = previous.revision.current if previous else None
    return InferenceServiceStatus(
        observed_generation=service.metadata.generation,
        replicas=len(found.replicas),
        ready_replicas=len(ready),
        desired_replicas=found.desired,
        selector=",".join(f"{k}={v}" for k, v in meta.selector(service, meta.ENGINE).items()),
        url=view.url,
        model=spec.model.served_name,
        parallelism=parallelism,
        device=_device(observed.pods, previous),
        startup=_startup(observed.pods, previous),
        capacity=Capacity(
            gpus=sum(_number(meta.annotation(o, meta.GPUS)) for o in sets.values()),
            kv_tokens_per_replica=next((f.kv_tokens for f in parallelism.feasible if f.size == layout.tensor), None),
        ),
        autoscaling=scaling,
        revision=Revision(current=revisions.pop() if len(revisions) == 1 else before, updated=engine.revision(spec)),
        cache=_cache(view, spec.cache is not None, bool(ready)),
        conditions=compute(view, previous, service.metadata.generation, found.now),
    )


def invalid_spec(
    previous: InferenceServiceStatus | None, generation: int, problems: Sequence[str], now: datetime
) -> InferenceServiceStatus:
    """The status of a service whose spec cannot be used (`problems`: one line each, as a ManifestError has them).
    Nothing is changed for it: what ran before goes on and stays in status."""
    message, status = "; ".join(problems), previous or InferenceServiceStatus()
    said = f"{message} (what ran before goes on)" if status.replicas else message
    changed = [
        condition("Ready", ("False", "InvalidSpec", said), previous, generation, now),
        condition("Degraded", ("True", "InvalidSpec", message), previous, generation, now),
    ]
    everyone = {c.type: c for c in status.conditions} | {c.type: c for c in changed}
    return status.model_copy(update={"observed_generation": generation, "conditions": list(everyone.values())})


# ---------------------------------------------------------------- the view of conditions


def _view(
    found: Pass,
    layout: Layout,
    layouts: frozenset[Layout],
    ready: int,
    scaling: AutoscalingStatus,
    plan: LayoutPlan | None,
) -> View:
    present = [r for r in found.replicas if r.current and not r.leaving]
    memory = found.service.spec.resources.memory
    return View(
        spec=found.service.spec,
        desired=found.desired,
        total=len(found.replicas),
        current=len(present),
        current_ready=sum(r.ready for r in present),
        ready=ready,
        leaving=sum(r.leaving for r in found.replicas),
        pods=found.observed.pods,
        layout=layout,
        layouts=layouts,
        url=services.url(found.service, found.settings),
        ignored=(*found.ignored, *found.settings.ignored),
        cache=cache_state(found.service, found.observed),
        drains=_drains(found),
        full=found.observed.spare_replicas == 0,
        scaling=scaling,
        plan=plan,
        autoscales=found.settings.autoscales,
        ended=tuple(sorted({p.name for p in found.observed.pods if p.component == meta.ENGINE and p.terminating})),
        around=Surroundings(
            notices=_relevant(found.observed),
            refusals=found.observed.refusals,
            lacking=_lacking(found.observed),
            memory="" if memory is None else str(memory),
        ),
    )


def _drains(found: Pass) -> tuple[str, ...]:
    """Who drains, and until when at the latest: a time and no duration, which would be another one each second."""
    longest = timedelta(seconds=found.service.spec.rollout.drain_timeout_seconds)
    marks = {o["metadata"]["name"]: marked_at(o) for o in found.observed.children if o["kind"] == "StatefulSet"}
    return tuple(f"{name} until {mark + longest:%H:%M:%S}Z at the latest" for name, mark in marks.items() if mark)


def _relevant(observed: Observed) -> tuple[Notice, ...]:
    """Without those of objects that had the same name before: an event outlives its object."""
    uids = {(o["kind"], o["metadata"]["name"]): o["metadata"].get("uid", "") for o in observed.children}
    return tuple(n for n in observed.notices if n.uid in ("", uids.get((n.kind, n.name)) or n.uid))


def _lacking(observed: Observed) -> frozenset[str]:
    """Workloads with fewer pods than they are to have."""
    owners = [p.owner for p in observed.pods if not p.terminating]
    workloads = (
        (o["metadata"]["name"], o["spec"].get("replicas", 1))
        for o in observed.children
        if o["kind"] in meta.FROZEN and not (o["kind"] == "Job" and is_complete(o))
    )
    return frozenset(name for name, wanted in workloads if owners.count(name) < wanted)


# ---------------------------------------------------------------- parts


def _cache(view: View, wanted: bool, ready: bool) -> CacheStatus:
    """Of a model that is fetched into a claim what its download says; others are as their replicas are."""
    if view.cache is not None:
        return view.cache.status(failed=view.cause is not None and view.cause.component == meta.FETCH)
    return CacheStatus(phase="None" if not wanted else "Ready" if ready else "Pending")


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _device(pods: Iterable[Pod], previous: InferenceServiceStatus | None) -> str | None:
    """What the ready engines say; where none says anything, what was known last."""
    known = sorted({p.device for p in pods if p.component == meta.ENGINE and p.ready and p.device})
    if known:
        return ", ".join(known)[:256]
    return previous.device if previous else None


def _startup(pods: Iterable[Pod], previous: InferenceServiceStatus | None) -> Startup | None:
    """Of the newest engine pod, when it has become ready: readiness may come and go afterwards. A pod that crashed
    before it was ready says nothing of how long a start takes."""
    before = previous.startup if previous else None
    known = [
        (pod.ready_since, pod.name, pod)
        for pod in pods
        if pod.component == meta.ENGINE and pod.ready and not pod.restarts
        if pod.scheduled and pod.started and pod.ready_since
        if before is None or parse_time(pod.created) > before.created
    ]
    if not known:
        return before
    ready_since, name, pod = max(known, key=lambda entry: entry[:2])
    steps = [pod.created, pod.scheduled, pod.started, ready_since]
    parts = [max(0, int((b - a).total_seconds())) for a, b in pairwise(steps) if a and b]
    return Startup(
        pod=name,
        created=pod.created,
        scheduling_seconds=parts[0],
        creating_seconds=parts[1],
        loading_seconds=parts[2],
        total_seconds=sum(parts),
    )


def _autoscaling(found: Pass) -> AutoscalingStatus:
    """The record of decisions, with the present mode; one that follows from the spec is added here. Those made from
    metrics are there already (autoscale/record.py)."""
    spec, previous, desired = found.service.spec, found.observed.status, found.desired
    before = previous.autoscaling if previous else AutoscalingStatus()
    mode = spec.autoscaling.mode
    internal, wanted = found.settings.autoscales and mode == "Internal", before.desired
    if internal and not spec.suspend:
        wanted = desired
    record = before.model_copy(
        update={
            "mode": mode,
            "desired": wanted if internal else None,
            "recommended": before.recommended if mode == "Recommend" else None,
        }
    )
    seen = previous is not None and before.last_decision is not None
    # Where no decision is on record, it is one from the number of replicas that there are.
    last = previous.desired_replicas if previous is not None and seen else len(found.replicas)
    if seen and last == desired:
        return record
    why = "suspended" if spec.suspend else f"spec.replicas is {spec.replicas}"
    cause = "suspend" if spec.suspend else mode
    made = Decision(time=found.now, from_=last, to=desired, reason=why, cause=cause)
    return record.model_copy(update={"last_decision": made, "history": [*before.history, made][-HISTORY:]})


def _parallelism(found: Pass, layout: Layout, layouts: frozenset[Layout]) -> ParallelismStatus:
    previous, planned = found.observed.status, found.service.spec.parallelism.tensor.mode != "Fixed"
    before = previous.parallelism if previous else ParallelismStatus()
    changed = found.now if before.target not in (None, layout.tensor) else before.last_change_time
    sizes = {x.tensor for x in layouts}
    return before.model_copy(
        update={
            "current": sizes.pop() if len(sizes) == 1 else None,
            "target": layout.tensor,
            "feasible": _feasible(found.observed.pods) or before.feasible,
            "last_change_time": changed,
            "plan": before.plan if planned else None,
            "recommended": before.recommended if planned else None,
        }
    )


def _feasible(pods: Iterable[Pod]) -> list[FeasibleSize]:
    """What the replicas report; where they differ, the least."""
    least: dict[int, int] = {}
    for pod in pods:
        for size, tokens in pod.feasible:
            least[size] = min(tokens, least.get(size, tokens))
    return [FeasibleSize(size=size, kv_tokens=least[size]) for size in sorted(least)]
