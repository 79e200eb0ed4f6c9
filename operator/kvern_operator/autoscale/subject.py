"""What the autoscaler needs to know of a service beside its metrics: bounds, pods, what was decided last. Pure.

Taken from what a pass of reconcile has seen; between two passes it stays as it was.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from kvern_operator.api.status import InferenceServiceStatus, LayoutPlan
from kvern_operator.api.types import InferenceService
from kvern_operator.autoscale import terms
from kvern_operator.autoscale.layout import Sizes, State
from kvern_operator.autoscale.readings import Target
from kvern_operator.autoscale.record import state_of
from kvern_operator.autoscale.shape import Expected, expected
from kvern_operator.desired import meta
from kvern_operator.desired.layout import Layout, parse_layout, target_layout
from kvern_operator.observed import Object, Observed, Pod
from kvern_operator.relayout import failure, trying_for
from kvern_operator.rollout import Replica

_REPORTED = Expected()  # nothing: the pods have said it
CRASHES = 2  # of a pod with the size that is being taken, after which it has failed


@dataclass(frozen=True)
class SeenReplica:
    """A replica that is to stay. `changed`: when it became ready, or, while it is not, was made or ceased to be ready;
    Unix seconds. `again`: it has been ready before."""

    uid: str  # of the pod that answers for it; its own name where there is none
    ready: bool
    changed: float
    unschedulable: bool
    target: Target | None = None
    started: float | None = None  # seconds from its pod's creation to ready, where that can be told
    again: bool = False


@dataclass(frozen=True)
class Subject:
    """One service. `held`: replicas that have their devices, also those that go. `live`: whether anything is decided
    from metrics for it."""

    uid: str
    namespace: str
    live: bool
    limits: terms.Limits
    sizes: Sizes
    priority: int
    current: int
    replicas: tuple[SeenReplica, ...] = ()
    routers: tuple[tuple[Target, bool], ...] = ()  # and whether it is ready
    routed: bool = True  # there are to be routers
    held: int = 0
    size: int | None = None
    gpus: int = 1  # devices of a replica, or what stands for them
    pipeline: int = 1
    kv: tuple[tuple[int, int], ...] = ()
    expected: Expected = _REPORTED  # of layouts, while `kv` is empty
    wanted: int = 1  # tensor size that replicas are to have now
    plan: LayoutPlan | None = None
    failed: str = ""
    start_seconds: float | None = None

    @property
    def state(self) -> State:
        """The planner's, as it is on record. Where the spec has given another size since (a recommendation that was
        followed, other devices), it goes on from there."""
        found = state_of(self.plan, self.size or self.wanted)
        if self.plan is None or found.size == self.wanted:
            return found
        return State(self.wanted, changes=found.changes, bans=found.bans, proven=found.proven)

    @property
    def targets(self) -> list[Target]:
        """Whom to ask."""
        engines = [r.target for r in self.replicas if r.target is not None]
        return [*engines, *(target for target, _ in self.routers)] if self.live else []


def subject_of(
    service: InferenceService,
    observed: Observed,
    replicas: Iterable[Replica],
    status: InferenceServiceStatus,
    now: datetime,
) -> Subject:
    """The service as a pass has seen it. `status`: as it is written; `now` is aware."""
    spec, replicas = service.spec, list(replicas)
    wanted, scaling = target_layout(spec, status), spec.autoscaling
    sets = {o["metadata"]["name"]: o for o in observed.children if o["kind"] == "StatefulSet"}
    routed = spec.router.mode == "Embedded"
    internal = scaling.mode == "Internal" and status.autoscaling.desired is not None
    live = scaling.mode != "Off" or spec.parallelism.tensor.mode != "Fixed"
    pods: dict[str, list[Pod]] = {}
    for pod in observed.pods:
        if pod.component == meta.ENGINE:
            pods.setdefault(pod.owner, []).append(pod)
    return Subject(
        uid=service.metadata.uid,
        namespace=service.metadata.namespace,
        live=live and not spec.suspend,
        limits=limits_of(service),
        sizes=sizes_of(service, status),
        priority=scaling.priority,
        current=(status.autoscaling.desired or 0) if internal else status.desired_replicas,
        replicas=tuple(_seen(r, pods.get(r.name, []), sets.get(r.name), now) for r in replicas if not r.leaving),
        routers=tuple(
            (Target(p.uid, p.name, p.address, routing=True), p.ready)
            for p in observed.pods
            if routed and p.component == meta.ROUTER and p.running and not p.terminating and p.address
        ),
        routed=routed,
        held=len({p.owner for p in observed.pods if p.component == meta.ENGINE} | set(sets)),
        size=status.parallelism.current,
        gpus=wanted.ranks,
        pipeline=wanted.pipeline,
        kv=tuple((f.size, f.kv_tokens) for f in status.parallelism.feasible),
        expected=expected(spec, status.cache) if not status.parallelism.feasible else _REPORTED,
        wanted=wanted.tensor,
        plan=status.parallelism.plan,
        failed=_failed(observed, sets, status.parallelism.plan, wanted, now),
        start_seconds=_start(status),
    )


def limits_of(service: InferenceService) -> terms.Limits:
    """The bounds and targets of the spec. Nothing would wake a service that has no router of ours."""
    spec, scaling = service.spec, service.spec.autoscaling
    least = scaling.min_replicas if spec.router.mode == "Embedded" else max(scaling.min_replicas, 1)
    slo = scaling.slo
    return terms.Limits(
        mode=scaling.mode,
        replicas=spec.replicas,
        minimum=least,
        maximum=scaling.max_replicas or spec.replicas,
        gpus=spec.resources.gpus_per_pod * spec.resources.nodes_per_replica,
        gpu_budget=scaling.gpu_budget,
        kv_target=float(scaling.kv_target),
        queue_target=float(scaling.queue_target),
        itl_slo=None if slo.itl_p95_ms is None else slo.itl_p95_ms / 1000,
        ttft_slo=None if slo.ttft_p95_ms is None else slo.ttft_p95_ms / 1000,
        idle=float(scaling.idle_seconds),
        stabilization=float(scaling.scale_down_stabilization_seconds),
    )


def sizes_of(service: InferenceService, status: InferenceServiceStatus) -> Sizes:
    """What the spec allows of layouts. Until a switch in the pod has been seen, one costs what a start does."""
    tensor = service.spec.parallelism.tensor
    return Sizes(
        mode=tensor.mode,
        minimum=tensor.min or 1,
        maximum=tensor.max or 64,
        raise_after=float(tensor.raise_after_seconds),
        lower_after=float(tensor.lower_after_seconds),
        dwell=float(tensor.dwell_seconds),
        verify=float(tensor.verify_seconds),
        change_seconds=_start(status) or 60.0,
    )


def _start(status: InferenceServiceStatus) -> float | None:
    if status.autoscaling.start_seconds:
        return float(status.autoscaling.start_seconds)
    return None if status.startup is None else float(status.startup.total_seconds)


def _seen(replica: Replica, pods: list[Pod], workload: Object | None, now: datetime) -> SeenReplica:
    pod = next((p for p in pods if p.name == meta.leader_name(replica.name)), None)
    if pod is None:
        made = ((workload or {}).get("metadata") or {}).get("creationTimestamp")
        since = datetime.fromisoformat(str(made).replace("Z", "+00:00")) if made else now
        return SeenReplica(replica.name, False, since.timestamp(), replica.unschedulable)
    ready_since = pod.ready_since or pod.created
    started = (ready_since - pod.created).total_seconds() if replica.ready and not pod.restarts else None
    asked = replica.ready and pod.address
    # A pod that has lost its place is late when its return takes long, not because it is old.
    waits = max((p.unready_since or p.created for p in pods if not p.ready), default=now)
    return SeenReplica(
        uid=pod.uid,
        ready=replica.ready,
        changed=(ready_since if replica.ready else waits).timestamp(),
        unschedulable=replica.unschedulable,
        target=Target(pod.uid, pod.name, pod.address) if asked else None,
        started=started,
        again=not replica.ready and any(p.unready_since for p in pods),
    )


def _failed(observed: Observed, sets: dict[str, Object], plan: LayoutPlan | None, wanted: Layout, now: datetime) -> str:
    """Why the size that is being taken cannot be had; "" where nothing says so."""
    if plan is None or plan.phase != "Changing":
        return ""
    for pod in sorted(observed.pods, key=lambda p: p.name):
        if pod.component != meta.ENGINE or pod.terminating:
            continue
        if reason := failure(pod, plan.size, trying_for(plan, now)):
            return f"{pod.name}: {reason}"
        made = parse_layout(meta.annotation(sets[pod.owner], meta.LAYOUT)) if pod.owner in sets else None
        if made == wanted and not pod.ready and pod.restarts >= CRASHES:
            return f"{pod.name}: {pod.reason or 'it ends'} {pod.last_log or pod.message}".strip()
    return ""
