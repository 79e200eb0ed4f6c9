"""reconcile(service, observed, now, settings) -> Plan: the whole decision of the operator, pure.

No client, no clock, no randomness: the same arguments give the same plan, and the plan for its own result is empty.
Whoever calls it applies the plan: `kvern up` to processes, the operator to a cluster.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from kvern_operator import cache
from kvern_operator.api.base import parse_time
from kvern_operator.api.status import InferenceServiceStatus
from kvern_operator.api.types import InferenceService, InferenceServiceSpec
from kvern_operator.desired import engine, meta, monitor, network, router, services
from kvern_operator.desired.layout import Layout, parse_layout, target_layout
from kvern_operator.observed import Object, Observed, Pod
from kvern_operator.relayout import relaid, to_switch, trying_for, why_not
from kvern_operator.replicas import ending, lost_image, pattern, replicas_of, taken_numbers
from kvern_operator.reporting import Pass, invalid_spec, status_of
from kvern_operator.rollout import Moves, Replica, plan_moves
from kvern_operator.settings import Settings

DEFAULTS = Settings()

__all__ = ["Plan", "desired_replicas", "invalid_spec", "not_acted_upon", "reconcile"]


@dataclass(frozen=True)
class Plan:
    """What to do, in this order: dry_run, apply, resume, drain, switch, delete, then write status.

    `apply` holds objects that are missing or differ, `delete` (kind, name) of children. `drain` and `resume` name pods
    to be told through their admin port, `switch` pods and the tensor size that they are to change to while they serve
    (asking twice does no harm). `notes` say what changes and why, for events and logs. `requeue_after` is in seconds;
    None: nothing to wait for but events. `dry_run` are objects that spec.overrides has a part in and that the API
    server has not seen: where it refuses one, nothing of the plan is carried out, and another is made with
    Observed.refusals.
    """

    apply: tuple[Object, ...]
    delete: tuple[tuple[str, str], ...]
    drain: tuple[str, ...]
    resume: tuple[str, ...]
    status: InferenceServiceStatus
    notes: tuple[str, ...] = ()
    requeue_after: float | None = None
    dry_run: tuple[Object, ...] = ()
    switch: tuple[tuple[str, int], ...] = ()

    @property
    def empty(self) -> bool:
        """True where there is nothing to do; status may still differ from the last one."""
        return not (self.apply or self.delete or self.drain or self.resume or self.switch)


def desired_replicas(
    spec: InferenceServiceSpec,
    status: InferenceServiceStatus | None = None,
    existing: int = 0,
    autoscales: bool = False,
) -> int:
    """How many replicas are wanted. In mode Internal that is what was decided last (autoscale/record.py writes it into
    status); before anything was, what was wanted last, or what there is, within the bounds."""
    if spec.suspend:
        return 0
    if spec.autoscaling.mode != "Internal":
        return spec.replicas
    last = spec.replicas
    if autoscales:
        if status is not None and status.autoscaling.desired is not None:
            return status.autoscaling.desired
        last = (status.desired_replicas if status is not None else existing) or spec.replicas
    return min(max(last, spec.autoscaling.min_replicas), spec.autoscaling.max_replicas or last)


def not_acted_upon(spec: InferenceServiceSpec, autoscales: bool = True) -> list[str]:
    """Fields that are valid and that nothing is done with, as `path: what happens instead`. `autoscales`: see
    Settings."""
    found = []
    tensor, scaling = spec.parallelism.tensor, spec.autoscaling
    if spec.model.adapters:
        found.append("spec.model.adapters: adapters are not served yet")
    if scaling.mode in ("Internal", "Recommend") and not autoscales:
        found.append(f"spec.autoscaling.mode: {scaling.mode} needs a cluster; replicas follow spec.replicas")
    if scaling.mode in ("Off", "External") and scaling.max_replicas is not None:
        found.append(
            f"spec.autoscaling.maxReplicas: in mode {scaling.mode} replicas follow spec.replicas; "
            "Internal is the mode that scales within minReplicas and maxReplicas"
        )
    if tensor.mode != "Fixed" and not autoscales:
        found.append(f"spec.parallelism.tensor.mode: {tensor.mode} needs a cluster; the size stays as it is")
    if spec.parallelism.expert:
        found.append("spec.parallelism.expert: expert parallelism is not offered yet")
    if spec.router.mode == "InferencePool":
        found.append("spec.router.mode: no InferencePool is made yet; the Service leads to the engines")
    return found


# ---------------------------------------------------------------- replicas


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
    service: InferenceService,
    observed: Observed,
    moves: Moves,
    names: list[str],
    present: frozenset[str],
    now: datetime,
    settings: Settings,
) -> list[Object]:
    """StatefulSets and layouts that shall exist. Those that run are kept as they are: a template is frozen with its
    revision, whatever a newer operator would build. `present`: those that have the present layout, or take it as they
    run."""
    wanted, target = [], target_layout(service.spec, observed.status)
    for live in observed.children:
        (kind, name), obj = meta.key(live), meta.as_applied(live)
        if kind != "StatefulSet" or name in moves.delete:
            continue
        if name in moves.drain:
            obj = meta.with_annotations(obj, **{meta.DRAINING_SINCE: now.isoformat()})
        elif name in moves.resume:
            obj = meta.with_annotations(obj, **{meta.DRAINING_SINCE: None})
        layout = parse_layout(meta.annotation(obj, meta.LAYOUT)) or target
        if name in present and relaid(live, target, observed.pods):
            layout = target
            obj = meta.with_annotations(obj, **{meta.LAYOUT: str(layout)})
        wanted += [obj, *_beside(service, name, layout, obj["spec"]["replicas"])]
    model = pattern(service, observed)
    for name in names:
        layout = target
        made = engine.stateful_set(service, name, layout, settings)
        if model is not None:
            made = engine.renamed(meta.as_applied(model), name)
            layout = parse_layout(meta.annotation(made, meta.LAYOUT)) or layout
        wanted += [made, *_beside(service, name, layout, made["spec"]["replicas"])]
    return wanted


def _beside(service: InferenceService, name: str, layout: Layout, pods: int) -> list[Object]:
    """What a replica needs beside its StatefulSet."""
    policy = [network.replica_policy(service, name)] if pods > 1 else []
    return [engine.layout_map(service, name, layout), *policy]


# ---------------------------------------------------------------- the rest of the objects


def _surroundings(
    service: InferenceService,
    observed: Observed,
    leaving: frozenset[str],
    coming: list[str],
    n: int,
    settings: Settings,
) -> list[Object]:
    spec = service.spec
    routers = settings.router_replicas or spec.router.replicas
    wanted = [services.public_service(service), services.headless_service(service)]
    wanted += [services.service_account(service), *services.cache_claims(service)]
    wanted += cache.objects(service, observed, settings)
    wanted.append(network.engine_policy(service, settings))
    if not observed.admin_secret:
        wanted.append(services.admin_secret(service, settings))
    if settings.pod_monitors:
        wanted.append(monitor.pod_monitor(service))
    if spec.router.mode == "Embedded":
        anyone_left = any(obj["kind"] == "StatefulSet" for obj in observed.children)
        count = 0 if spec.suspend and not anyone_left else routers
        all_replicas = [o["metadata"]["name"] for o in observed.children if o["kind"] == "StatefulSet"] + coming
        told = router.replica_file(service, observed.pods, leaving, all_replicas, settings)
        wanted.append(router.replica_map(service, told))
        wanted.append(network.router_policy(service))
        wanted += _router_deployment(service, observed, count, settings)
    else:
        routers = 0
    return wanted + services.disruption_budgets(service, n, routers)


def _router_deployment(service: InferenceService, observed: Observed, count: int, settings: Settings) -> list[Object]:
    """The router's Deployment, unless the API server refuses the only one there could be."""
    built = router.deployment(service, count, settings)
    live = next((o for o in observed.children if meta.key(o) == meta.key(built)), None)
    same = live is not None and live["metadata"]["labels"].get(meta.REVISION_LABEL) == router.revision(service)
    refused = _refused(observed, "Deployment", router.revision(service))
    if live is None:
        return [] if refused else [built]
    if refused:
        kept = meta.as_applied(live)
        return [{**kept, "spec": {**kept["spec"], "replicas": count}}]
    pods = [p for p in observed.pods if p.owner == built["metadata"]["name"]]
    if not same or lost_image(pods, live, engine.image_of(built["spec"]["template"])):
        return [built]
    # Frozen with its revision, as the engines are: an upgrade of the operator restarts no router.
    return [{**built, "spec": {**built["spec"], "template": meta.as_applied(live)["spec"]["template"]}}]


def _refused(observed: Observed, kind: str, revision: str) -> bool:
    """Whether the API server does not take what spec.overrides makes of this revision."""
    return any(r.kind == kind and r.revision == revision for r in observed.refusals)


def _to_dry_run(service: InferenceService, observed: Observed, free_name: str, settings: Settings) -> list[Object]:
    """Objects that spec.overrides has a part in, or an image volume, of revisions that the API server has not seen."""
    spec, found = service.spec, []
    seen = {(o["kind"], o["metadata"].get("labels", {}).get(meta.REVISION_LABEL)) for o in observed.children}
    seen |= {(r.kind, r.revision) for r in observed.refusals}
    unsure = bool(spec.overrides.pod_template) or spec.model.uri.startswith("oci://")
    if unsure and ("StatefulSet", engine.revision(spec)) not in seen:
        found.append(engine.stateful_set(service, free_name, target_layout(spec, observed.status), settings))
    if spec.overrides.router_pod_template and ("Deployment", router.revision(service)) not in seen:
        found.append(router.deployment(service, spec.router.replicas, settings))
    return [meta.stamped(obj) for obj in found]


# ---------------------------------------------------------------- the decision


def reconcile(service: InferenceService, observed: Observed, now: datetime, settings: Settings = DEFAULTS) -> Plan:
    """The plan for one service. `now` is aware; the plan's times are in UTC with whole seconds."""
    exact, now = now.astimezone(UTC), parse_time(now)
    replicas = replicas_of(service, observed, exact, settings)
    staying = sum(not r.leaving for r in replicas)
    desired = desired_replicas(service.spec, observed.status, staying, settings.autoscales)
    target = target_layout(service.spec, observed.status)
    moves = _moves(service, observed, replicas, desired, exact)
    names = _new_names(service, taken_numbers(service, replicas, observed.pods), max(moves.add, 1))
    free_name, names = names[0], names[: moves.add]
    marked = {r.name for r in replicas if r.leaving}
    leaving = frozenset((marked | set(moves.drain)) - set(moves.resume))

    wanted = _surroundings(service, observed, leaving, names, desired, settings)
    present = frozenset(r.name for r in replicas if r.current) - leaving
    wanted += _replica_objects(service, observed, moves, names, present, exact, settings)
    stamped = [meta.stamped(obj) for obj in meta.in_creation_order(wanted)]
    live = {meta.key(obj): obj for obj in observed.children}
    keys = {meta.key(obj) for obj in stamped}
    started = _started(stamped, names)
    ignored = tuple(not_acted_upon(service.spec, settings.autoscales))
    trying = trying_for(observed.status.parallelism.plan if observed.status is not None else None, now)
    switch = () if service.spec.rollout.paused else to_switch(target, present, observed.pods, trying)
    obsolete = [k for k, obj in live.items() if k not in keys and not _outlives(obj)]
    return Plan(
        apply=tuple(obj for obj in stamped if meta.differs(obj, live.get(meta.key(obj)))),
        # Workloads first: their pods mount the rest.
        delete=tuple(sorted(obsolete, key=lambda k: (-meta.KINDS.index(k[0]), k[1]))),
        drain=_to_tell(observed.pods, moves.tell, draining=True),
        resume=_to_tell(observed.pods, {r.name for r in replicas} - leaving, draining=False),
        switch=switch,
        status=status_of(Pass(service, observed, replicas, desired, now, settings, ignored)),
        notes=(
            *_relayout_notes(observed, switch),
            *_notes(service, observed, replicas, moves, started, desired),
        ),
        requeue_after=moves.wait.total_seconds() if moves.wait is not None else None,
        dry_run=tuple(_to_dry_run(service, observed, free_name, settings)),
    )


def _relayout_notes(observed: Observed, switch: Iterable[tuple[str, int]]) -> Iterable[str]:
    before = {p.name: p.tensor for p in observed.pods}
    for name, size in switch:
        yield f"changing pod {name} from tensor size {before[name]} to {size} while it serves"


def _moves(
    service: InferenceService, observed: Observed, replicas: list[Replica], desired: int, now: datetime
) -> Moves:
    """What to do with the replicas. While the API server refuses their present template, or their model is not in its
    claim yet, none of it is started and none of the old ones goes for it. While there is no record of what was (a
    backup without it), nothing comes or goes: this pass writes one, from what there is, and the next one decides."""
    rollout = service.spec.rollout
    if _refused(observed, "StatefulSet", engine.revision(service.spec)) or cache.holds_replicas(service, observed):
        staying = sum(not r.leaving for r in replicas)
        desired, rollout = min(desired, staying), rollout.model_copy(update={"paused": True})
    if observed.status is None and replicas:
        desired, rollout = max(desired, len(replicas)), rollout.model_copy(update={"paused": True})
        return replace(plan_moves(replicas, desired, rollout), add=0, resume=(), delete=())
    held = ending(service, observed, now)
    moves = plan_moves(replicas, desired, rollout, observed.spare_replicas, held.count, outdated=held.outdated)
    if held.patience is None:
        return moves
    return replace(moves, wait=min(held.patience, moves.wait or held.patience))


def _outlives(obj: Object) -> bool:
    """What reconcile never deletes; owner references do, where there are any."""
    return bool(obj["kind"] in ("PersistentVolumeClaim", "Secret"))


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


def _started(objects: Iterable[Object], names: list[str]) -> list[Object]:
    return [o for o in objects if o["kind"] == "StatefulSet" and o["metadata"]["name"] in names]


def _notes(
    service: InferenceService,
    observed: Observed,
    replicas: list[Replica],
    moves: Moves,
    started: list[Object],
    desired: int,
) -> Iterable[str]:
    size, by_owner = target_layout(service.spec, observed.status).tensor, {p.owner: p for p in observed.pods}
    by_name = {r.name: r for r in replicas}
    revision = engine.revision(service.spec)
    wanted = f"{desired} replica{' is' if desired == 1 else 's are'} wanted"
    for obj in started:
        yield f"starting replica {obj['metadata']['name']}, revision {obj['metadata']['labels'][meta.REVISION_LABEL]}"
    for name in moves.drain:
        replica = by_name[name]
        why = wanted if replica.current else f"revision {revision} replaces it"
        if reason := why_not(by_owner[name], size) if name in by_owner and not replica.current else "":
            why = f"it cannot change to tensor size {size} while it serves: {reason}"
        load = "unknown" if replica.in_flight is None else str(replica.in_flight)
        yield f"draining replica {name} ({load} in flight): {why}"
    for name in moves.resume:
        yield f"taking replica {name} back: {wanted}"
    for name in moves.delete:
        replica = by_name[name]
        if name in moves.late:
            load = "an unknown number" if replica.in_flight is None else str(replica.in_flight)
            longest = service.spec.rollout.drain_timeout_seconds
            yield f"cutting off replica {name} with {load} in flight: drainTimeoutSeconds ({longest}) is over"
        elif name in moves.replaced:
            yield f"replacing replica {name}: its pod has been evicted or deleted, or its node is lost"
        else:
            yield f"stopping replica {name}: nothing is in flight"
