"""reconcile(service, observed, now, settings) -> Plan: the whole decision of the operator, pure.

No client, no clock, no randomness: the same arguments give the same plan, and the plan for its own result is empty.
Whoever calls it applies the plan: `kvern up` to processes, the operator to a cluster.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from kvern_operator.api.base import parse_time
from kvern_operator.api.status import (
    AutoscalingStatus,
    CacheStatus,
    Capacity,
    Decision,
    FeasibleSize,
    InferenceServiceStatus,
    ParallelismStatus,
    Revision,
)
from kvern_operator.api.types import InferenceService, InferenceServiceSpec
from kvern_operator.conditions import View, compute
from kvern_operator.desired import engine, meta, router, services
from kvern_operator.desired.layout import Layout, parse_layout, wanted_layout
from kvern_operator.observed import Object, Observed, Pod
from kvern_operator.rollout import Moves, Replica, plan_moves
from kvern_operator.settings import Settings

HISTORY = 10  # decisions kept in status
DEFAULTS = Settings()


@dataclass(frozen=True)
class Plan:
    """What to do, in this order: apply, resume, drain, delete, then write status.

    `apply` holds objects that are missing or differ, `delete` (kind, name) of children. `drain` and `resume` name pods
    to be told through their admin port (asking twice does no harm). `notes` say what changes and why, for events and
    logs. `requeue_after` is in seconds; None: nothing to wait for but events.
    """

    apply: tuple[Object, ...]
    delete: tuple[tuple[str, str], ...]
    drain: tuple[str, ...]
    resume: tuple[str, ...]
    status: InferenceServiceStatus
    notes: tuple[str, ...] = ()
    requeue_after: float | None = None

    @property
    def empty(self) -> bool:
        """True where there is nothing to do; status may still differ from the last one."""
        return not (self.apply or self.delete or self.drain or self.resume)


def desired_replicas(spec: InferenceServiceSpec) -> int:
    """How many replicas are wanted. Only `Internal` will have another source than spec.replicas."""
    if spec.suspend:
        return 0
    if spec.autoscaling.mode == "Internal":
        highest = spec.autoscaling.max_replicas or spec.replicas
        return min(max(spec.replicas, spec.autoscaling.min_replicas), highest)
    return spec.replicas


def not_acted_upon(spec: InferenceServiceSpec) -> list[str]:
    """Fields that are valid and that this version does nothing with, as `path: what happens instead`."""
    found = []
    tensor, scaling = spec.parallelism.tensor, spec.autoscaling
    if spec.model.adapters:
        found.append("spec.model.adapters: adapters are not served yet")
    if scaling.mode in ("Internal", "Recommend"):
        found.append(f"spec.autoscaling.mode: {scaling.mode} is not acted upon yet; replicas follow spec.replicas")
    if tensor.mode != "Fixed":
        found.append(f"spec.parallelism.tensor.mode: {tensor.mode} is not acted upon yet; the size stays as it is")
    if spec.parallelism.expert:
        found.append("spec.parallelism.expert: expert parallelism is not offered yet")
    if spec.router.limits.requests_per_minute or spec.router.limits.tokens_per_minute:
        found.append("spec.router.limits: rate limits are not kept yet")
    if spec.router.mode == "InferencePool":
        found.append("spec.router.mode: no InferencePool is made yet; the Service leads to the engines")
    return found


# ---------------------------------------------------------------- replicas


def replicas_of(service: InferenceService, observed: Observed) -> list[Replica]:
    """The replicas that exist, from their StatefulSets and pods."""
    revision, layout = engine.revision(service.spec), str(wanted_layout(service.spec))
    found = []
    for obj in observed.children:
        index = meta.replica_index(service.metadata.name, obj["metadata"]["name"])
        if obj["kind"] != "StatefulSet" or index is None:
            continue
        name = obj["metadata"]["name"]
        pods = [p for p in observed.pods if p.owner == name]
        alive = [p for p in pods if not p.terminating]
        since = meta.annotation(obj, meta.DRAINING_SINCE)
        known = [p.in_flight for p in pods if p.served]
        found.append(
            Replica(
                name=name,
                index=index,
                current=obj["metadata"]["labels"].get(meta.REVISION_LABEL) == revision
                and meta.annotation(obj, meta.LAYOUT) == layout,
                ready=len(alive) >= obj["spec"]["replicas"] and all(p.ready for p in alive),
                served=any(p.served for p in pods),
                running=any(p.running for p in pods),
                unschedulable=any(p.reason == "Unschedulable" for p in pods),
                draining_since=datetime.fromisoformat(since) if since else None,
                in_flight=None if None in known else sum(n for n in known if n is not None),
            )
        )
    return found


def _taken(service: InferenceService, replicas: list[Replica], pods: Iterable[Pod]) -> set[int]:
    """Numbers in use, also by pods that outlive their StatefulSet for a while."""
    owners = (meta.replica_index(service.metadata.name, p.owner) for p in pods)
    return {r.index for r in replicas} | {index for index in owners if index is not None}


def _new_names(service: InferenceService, taken: Iterable[int], count: int) -> list[str]:
    """The lowest free numbers; the name of a replica that still goes down is not free."""
    used, index = set(taken), 0
    names: list[str] = []
    while len(names) < count:
        if index not in used:
            names.append(meta.replica_name(service.metadata.name, index))
        index += 1
    return names


def _replica_objects(
    service: InferenceService, observed: Observed, moves: Moves, names: list[str], now: datetime, settings: Settings
) -> list[Object]:
    """StatefulSets and layouts that shall exist. Those that run are kept as they are: a template is frozen with its
    revision, whatever a newer operator would build."""
    live = {meta.key(obj): obj for obj in observed.children}
    wanted = []
    for (kind, name), obj in live.items():
        if kind != "StatefulSet" or name in moves.delete:
            continue
        if name in moves.drain:
            obj = meta.with_annotations(obj, **{meta.DRAINING_SINCE: now.isoformat()})
        elif name in moves.resume:
            obj = meta.with_annotations(obj, **{meta.DRAINING_SINCE: None})
        wanted.append(_bare(obj))
        layout = live.get(("ConfigMap", f"{name}-layout"))
        parsed = parse_layout(meta.annotation(obj, meta.LAYOUT)) or wanted_layout(service.spec)
        wanted.append(_bare(layout) if layout else engine.layout_map(service, name, parsed))
    for name in names:
        layout_ = wanted_layout(service.spec)
        wanted += [
            engine.stateful_set(service, name, layout_, settings),
            engine.layout_map(service, name, layout_),
        ]
    return wanted


def _bare(obj: Object) -> Object:
    return meta.with_annotations(obj, **{meta.APPLIED_HASH: None})


# ---------------------------------------------------------------- the rest of the objects


def _surroundings(
    service: InferenceService, observed: Observed, leaving: frozenset[str], n: int, settings: Settings
) -> list[Object]:
    spec = service.spec
    routers = settings.router_replicas or spec.router.replicas
    wanted = [services.public_service(service), services.headless_service(service)]
    wanted += [services.admin_secret(service, settings), *services.cache_claims(service)]
    if spec.router.mode == "Embedded":
        anyone_left = any(obj["kind"] == "StatefulSet" for obj in observed.children)
        count = 0 if spec.suspend and not anyone_left else routers
        wanted.append(router.replica_map(service, router.replica_file(service, observed.pods, leaving)))
        wanted.append(_router_deployment(service, observed, count, settings))
    else:
        routers = 0
    return wanted + services.disruption_budgets(service, n, routers)


def _router_deployment(service: InferenceService, observed: Observed, count: int, settings: Settings) -> Object:
    built = router.deployment(service, count, settings)
    live = next((o for o in observed.children if meta.key(o) == meta.key(built)), None)
    same = live is not None and live["metadata"]["labels"].get(meta.REVISION_LABEL) == router.revision(service)
    if live is None or not same:
        return built
    # Frozen with its revision, as the engines are: an upgrade of the operator restarts no router.
    return {**built, "spec": {**built["spec"], "template": live["spec"]["template"]}}


# ---------------------------------------------------------------- status


def _decision(
    service: InferenceService, desired: int, previous: InferenceServiceStatus | None, now: datetime
) -> AutoscalingStatus:
    before = previous.autoscaling if previous else AutoscalingStatus()
    seen = previous is not None and before.last_decision is not None
    last = previous.desired_replicas if previous is not None and seen else 0
    if seen and last == desired:
        return before
    why = "suspended" if service.spec.suspend else f"spec.replicas is {service.spec.replicas}"
    made = Decision(time=now, from_=last, to=desired, reason=why)
    return AutoscalingStatus(last_decision=made, history=[*before.history, made][-HISTORY:])


def _parallelism_status(
    layout: Layout,
    layouts: frozenset[Layout],
    pods: Iterable[Pod],
    previous: InferenceServiceStatus | None,
    now: datetime,
) -> ParallelismStatus:
    before = previous.parallelism if previous else ParallelismStatus()
    changed = now if before.target not in (None, layout.tensor) else before.last_change_time
    sizes = {x.tensor for x in layouts}
    return ParallelismStatus(
        current=sizes.pop() if len(sizes) == 1 else None,
        target=layout.tensor,
        recommended=before.recommended,
        feasible=_feasible(pods) or before.feasible,
        last_change_time=changed,
    )


def _feasible(pods: Iterable[Pod]) -> list[FeasibleSize]:
    """What the replicas report; where they differ, the least."""
    least: dict[int, int] = {}
    for pod in pods:
        for size, tokens in pod.feasible:
            least[size] = min(tokens, least.get(size, tokens))
    return [FeasibleSize(size=size, kv_tokens=least[size]) for size in sorted(least)]


def _status(
    service: InferenceService,
    observed: Observed,
    replicas: list[Replica],
    desired: int,
    now: datetime,
    settings: Settings,
) -> InferenceServiceStatus:
    spec, previous, layout = service.spec, observed.status, wanted_layout(service.spec)
    sets = {o["metadata"]["name"]: o for o in observed.children if o["kind"] == "StatefulSet"}
    ready = [r for r in replicas if r.ready and not r.leaving]
    parsed = (parse_layout(meta.annotation(sets[r.name], meta.LAYOUT)) for r in ready)
    layouts = frozenset(x for x in parsed if x is not None)
    present = [r for r in replicas if r.current and not r.leaving]
    view = View(
        spec=spec,
        desired=desired,
        total=len(replicas),
        current=len(present),
        current_ready=sum(r.ready for r in present),
        ready=len(ready),
        leaving=sum(r.leaving for r in replicas),
        pods=observed.pods,
        layout=layout,
        layouts=layouts,
        url=services.url(service, settings),
        ignored=(*not_acted_upon(spec), *settings.ignored),
    )
    revisions = {sets[r.name]["metadata"]["labels"][meta.REVISION_LABEL] for r in ready}
    before = previous.revision.current if previous else None
    parallelism = _parallelism_status(layout, layouts, observed.pods, previous, now)
    phase: Any = "None" if spec.cache is None else "Ready" if ready else "Pending"
    return InferenceServiceStatus(
        observed_generation=service.metadata.generation,
        replicas=len(replicas),
        ready_replicas=len(ready),
        desired_replicas=desired,
        selector=",".join(f"{k}={v}" for k, v in meta.selector(service, meta.ENGINE).items()),
        url=view.url,
        model=spec.model.served_name,
        parallelism=parallelism,
        capacity=Capacity(
            gpus=sum(int(meta.annotation(o, meta.GPUS) or 0) for o in sets.values()),
            kv_tokens_per_replica=next((f.kv_tokens for f in parallelism.feasible if f.size == layout.tensor), None),
        ),
        autoscaling=_decision(service, desired, previous, now),
        revision=Revision(current=revisions.pop() if len(revisions) == 1 else before, updated=engine.revision(spec)),
        cache=CacheStatus(phase=phase),
        conditions=compute(view, previous, service.metadata.generation, now),
    )


# ---------------------------------------------------------------- the decision


def reconcile(service: InferenceService, observed: Observed, now: datetime, settings: Settings = DEFAULTS) -> Plan:
    """The plan for one service. `now` is aware; the plan's times are in UTC with whole seconds."""
    exact, now = now.astimezone(UTC), parse_time(now)
    desired = desired_replicas(service.spec)
    replicas = replicas_of(service, observed)
    moves = plan_moves(replicas, desired, service.spec.rollout, exact, observed.spare_replicas)
    names = _new_names(service, _taken(service, replicas, observed.pods), moves.add)
    marked = {r.name for r in replicas if r.leaving}
    leaving = frozenset((marked | set(moves.drain)) - set(moves.resume))

    wanted = _surroundings(service, observed, leaving, desired, settings)
    wanted += _replica_objects(service, observed, moves, names, exact, settings)
    stamped = [meta.stamped(obj) for obj in meta.in_creation_order(wanted)]
    live = {meta.key(obj): obj for obj in observed.children}
    keys = {meta.key(obj) for obj in stamped}
    obsolete = [k for k, obj in live.items() if k not in keys and not _outlives(obj)]
    return Plan(
        apply=tuple(obj for obj in stamped if meta.differs(obj, live.get(meta.key(obj)))),
        # Workloads first: their pods mount the rest.
        delete=tuple(sorted(obsolete, key=lambda k: (-meta.KINDS.index(k[0]), k[1]))),
        drain=_to_tell(observed.pods, moves.tell, draining=True),
        resume=_to_tell(observed.pods, {r.name for r in replicas} - leaving, draining=False),
        status=_status(service, observed, replicas, desired, now, settings),
        notes=tuple(_notes(service, replicas, moves, names, desired)),
        requeue_after=moves.wait.total_seconds() if moves.wait is not None else None,
    )


def _outlives(obj: Object) -> bool:
    """A claim is never deleted by reconcile: its owner reference, if it has one, does that."""
    return bool(obj["kind"] == "PersistentVolumeClaim")


def _to_tell(pods: Iterable[Pod], owners: Iterable[str], *, draining: bool) -> tuple[str, ...]:
    """Pods of these replicas whose own state differs from what it should be."""
    chosen = set(owners)
    return tuple(
        sorted(
            p.name
            for p in pods
            if p.owner in chosen
            and p.admin_address
            and p.served
            and p.running
            and not p.terminating
            and p.draining != draining
        )
    )


def _notes(
    service: InferenceService, replicas: list[Replica], moves: Moves, names: list[str], desired: int
) -> Iterable[str]:
    by_name = {r.name: r for r in replicas}
    revision = engine.revision(service.spec)
    wanted = f"{desired} replica{' is' if desired == 1 else 's are'} wanted"
    for name in names:
        yield f"starting replica {name}, revision {revision}"
    for name in moves.drain:
        replica = by_name[name]
        why = wanted if replica.current else f"revision {revision} replaces it"
        load = "unknown" if replica.in_flight is None else str(replica.in_flight)
        yield f"draining replica {name} ({load} in flight): {why}"
    for name in moves.resume:
        yield f"taking replica {name} back: {wanted}"
    for name in moves.delete:
        replica = by_name[name]
        late = replica.served and replica.running and replica.in_flight != 0
        yield f"stopping replica {name}" + (": its time to drain is over" if late else ": nothing is in flight")
