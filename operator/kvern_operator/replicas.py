"""The replicas of a service as they stand, from StatefulSets and pods. Pure; what to do with them is rollout.py's."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from kvern_operator.api.base import parse_time
from kvern_operator.api.types import InferenceService
from kvern_operator.desired import engine, meta
from kvern_operator.desired.layout import target_layout
from kvern_operator.observed import Notice, Object, Observed, Pod
from kvern_operator.relayout import has_layout
from kvern_operator.rollout import Replica
from kvern_operator.settings import Settings

# What the kubelet says of an image that it cannot get.
NO_IMAGE = frozenset({"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError"})
# A pod that is still there so long after the end of its grace is on a node that nobody hears of: the kubelet kills
# before. Its devices are as lost as the node, and nothing waits for them.
LOST_AFTER = timedelta(seconds=60)


def replicas_of(service: InferenceService, observed: Observed, now: datetime, settings: Settings) -> list[Replica]:
    """The replicas that exist. `now` is aware."""
    image, found = engine.wanted_image(service, settings), []
    sent_to = _sent_to(observed)
    for obj in observed.children:
        index = meta.replica_index(service.metadata.name, obj["metadata"]["name"])
        if obj["kind"] != "StatefulSet" or index is None:
            continue
        name = obj["metadata"]["name"]
        pods, size = [p for p in observed.pods if p.owner == name], meta.as_applied(obj)["spec"]["replicas"]
        alive = [p for p in pods if not p.terminating]
        known = [p.in_flight for p in pods if p.served and meta.leads(p.name)]
        found.append(
            Replica(
                name=name,
                index=index,
                current=_is_present(service, observed, obj, pods) and not lost_image(pods, obj, image),
                ready=len(alive) >= size and all(p.ready for p in alive),
                served=any(p.served for p in pods),
                running=any(p.running for p in pods),
                unschedulable=no_room(name, pods, observed.notices),
                holds=any(_has_node(p) for p in pods),
                leaving_for=_leaving_for(obj, observed, now),
                in_flight=None if None in known else sum(n for n in known if n is not None),
                going=len(alive) < len(pods),
                routed=meta.leader_name(name) in sent_to,
            )
        )
    return found


def _sent_to(observed: Observed) -> frozenset[str]:
    """Pods that some router may send a new request to, by the routers' own word."""
    routers = (p for p in observed.pods if p.component == meta.ROUTER and p.running and not p.terminating)
    return frozenset[str]().union(*(p.sends_to for p in routers if p.sends_to is not None))


def _leaving_for(workload: Object, observed: Observed, now: datetime) -> timedelta | None:
    """How long a replica has been marked to go; None where it is not. A mark of the future was made by another clock:
    it counts from now on."""
    since = marked_at(workload)
    if since is None:
        return None
    measured = observed.leaving_for.get(workload["metadata"]["name"])
    return max(now - since, timedelta(0)) if measured is None else measured


def marked_at(workload: Object) -> datetime | None:
    """When a StatefulSet was marked to go. A mark that cannot be read is one of long ago."""
    text = meta.annotation(workload, meta.DRAINING_SINCE)
    if not text:
        return None
    try:
        found = datetime.fromisoformat(text)
        return found if found.tzinfo is not None else parse_time(f"{text}Z")
    except ValueError:
        return parse_time("1970-01-01T00:00:00Z")


def lost_image(pods: Iterable[Pod], workload: Object, image: str) -> bool:
    """Whether none of its pods can get its image, and another one would be used today. Templates are frozen, but not
    on an image that never ran: that the operator's settings have been corrected is what everybody waits for."""
    waiting = [p for p in pods if not p.terminating]
    lost = bool(waiting) and all(p.reason in NO_IMAGE for p in waiting)
    return lost and engine.image_of(meta.as_applied(workload)["spec"]["template"]) != image


def no_room(name: str, pods: Iterable[Pod], notices: Iterable[Notice] = ()) -> bool:
    """Whether a pod of a replica finds no node, or its StatefulSet may make none for a quota."""
    pods = list(pods)
    if any(p.reason == "Unschedulable" for p in pods):
        return True
    words = [n.message for n in notices if n.kind == "StatefulSet" and n.name == name and n.reason == "FailedCreate"]
    return not pods and any("exceeded quota" in message for message in words)


def _has_node(pod: Pod) -> bool:
    return pod.reason != "Unschedulable" and pod.stage != "scheduling"


@dataclass(frozen=True)
class Ending:
    """Replicas that have no StatefulSet any more and pods that have a node: a GPU is free when the pod's object is
    gone, not when it begins to end. `outdated`: some are of another revision than the present one. `patience`: how long
    to wait for what may have to be given up."""

    count: int
    outdated: bool
    patience: timedelta | None


def ending(service: InferenceService, observed: Observed, now: datetime) -> Ending:
    """What still ends. `now` is aware."""
    sets = {o["metadata"]["name"] for o in observed.children if o["kind"] == "StatefulSet"}
    waits: dict[str, timedelta | None] = {}
    revisions: set[str] = set()
    for pod in observed.pods:
        ours = pod.component == meta.ENGINE and meta.replica_index(service.metadata.name, pod.owner) is not None
        left = pod.ends + LOST_AFTER - now if pod.ends is not None else None
        if not ours or pod.owner in sets or not _has_node(pod) or (left is not None and left <= timedelta(0)):
            continue
        waits[pod.owner] = left
        revisions.add(pod.revision)
    outdated = bool(revisions - {"", engine.revision(service.spec)})
    return Ending(len(waits), outdated, min((w for w in waits.values() if w is not None), default=None))


def taken_numbers(service: InferenceService, replicas: Iterable[Replica], pods: Iterable[Pod]) -> set[int]:
    """Numbers in use, also by pods that outlive their StatefulSet for a while."""
    owners = (meta.replica_index(service.metadata.name, p.owner) for p in pods)
    return {r.index for r in replicas} | {index for index in owners if index is not None}


def wants_room(service: InferenceService, observed: Observed) -> bool:
    """Whether the next decision depends on how many replicas would still fit: one revision replaces another, or what
    ends still has its place."""
    rollout, sets = service.spec.rollout, [o for o in observed.children if o["kind"] == "StatefulSet"]
    if rollout.strategy != "Auto" or observed.spare_replicas is not None:
        return False
    names = {o["metadata"]["name"] for o in sets}
    engines = [p for p in observed.pods if p.component == meta.ENGINE]
    if any(p.terminating or p.owner not in names for p in engines):
        return True
    present = _present(service, observed)
    return not rollout.paused and any(_made_as(o) != present for o in sets)


def _present(service: InferenceService, observed: Observed) -> tuple[str, str]:
    """The revision and the layout that replicas are to have."""
    return engine.revision(service.spec), str(target_layout(service.spec, observed.status))


def _is_present(service: InferenceService, observed: Observed, workload: Object, pods: list[Pod]) -> bool:
    """Whether a replica is of the present revision and has the present layout, or can take it as it runs."""
    spec, made, target = service.spec, _made_as(workload), target_layout(service.spec, observed.status)
    if made[0] != engine.revision(spec):
        return False
    if made[1] == str(target) and not pods:
        return True
    return has_layout(workload, target, pods, planned=spec.parallelism.tensor.mode == "Auto")


def _made_as(workload: Object) -> tuple[str, str]:
    return workload["metadata"]["labels"].get(meta.REVISION_LABEL, ""), meta.annotation(workload, meta.LAYOUT)


def pattern(service: InferenceService, observed: Observed) -> Object | None:
    """The StatefulSet that further replicas are made after while a rollout is paused that has not begun: what runs is
    what is known to work. None: they are made from the spec."""
    if not service.spec.rollout.paused:
        return None
    sets = [o for o in observed.children if o["kind"] == "StatefulSet" and marked_at(o) is None]
    if any(_made_as(o) == _present(service, observed) for o in sets):
        return None
    return max(sets, key=lambda o: str(o["metadata"]["name"]), default=None)
