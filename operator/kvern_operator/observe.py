"""Observed: what exists for one service, put together from the mirror, the pods' own words and notices. Pure.

It decides one thing only: which objects are this service's own. A name can still belong to the last service of that
name, or be on its way out; such an object is not taken for ours, and nothing is applied to it before it is gone.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from pydantic import ValidationError

from kvern_operator.admin import Report, Target
from kvern_operator.api.status import InferenceServiceStatus
from kvern_operator.api.types import InferenceService
from kvern_operator.desired import meta
from kvern_operator.desired.router import router_name
from kvern_operator.mirror import REFRESHED, Live
from kvern_operator.observed import Notice, Object, Observed, Pod, Refusal
from kvern_operator.pods import read_pod
from kvern_operator.replicas import no_room


@dataclass(frozen=True)
class Refresh:
    """A kubelet looks at mounted ConfigMaps once a minute, and at once when the pod itself changes: so an annotation on
    a router's pod, `digest`, takes the list of replicas to it within a second or two."""

    name: str
    uid: str
    digest: str


@dataclass(frozen=True)
class Scene:
    """`observed` is for reconcile. `live`: own children by (kind, name). `taken`: names that others hold for now.
    `targets`: pods to ask, `leaving`: the UIDs of those whose replica drains, and of the routers that are to learn it.
    `refresh`: routers' pods whose kubelet has not been told yet that the list of replicas has changed."""

    observed: Observed
    live: Mapping[tuple[str, str], Live]
    taken: frozenset[tuple[str, str]]
    targets: tuple[Target, ...] = ()
    refresh: tuple[Refresh, ...] = ()
    leaving: frozenset[str] = frozenset()


def read_status(document: Object) -> InferenceServiceStatus | None:
    """The status that was written last; None where there is none. What this version does not know in it, written by
    a later one that has been rolled back, is left out."""
    status = document.get("status")
    while status:
        try:
            return InferenceServiceStatus.model_validate(status)
        except ValidationError as error:
            less = _without(status, tuple(error.errors()[0]["loc"]))
            status = less if less != status else None
    return None


def _without(value: Any, path: tuple[int | str, ...]) -> Any:
    """A copy without what is at the path; the element of a list that holds it goes as a whole."""
    if not path or not isinstance(value, dict | list):
        return None
    head, rest = path[0], path[1:]
    if isinstance(value, list):
        return [item for i, item in enumerate(value) if i != head]
    inner = _without(value[head], rest) if rest and head in value else None
    kept = {name: item for name, item in value.items() if name != head}
    return kept if inner is None else {**kept, head: inner}


def observe(
    service: InferenceService,
    children: Iterable[Live],
    pods: Iterable[Object],
    reports: Mapping[str, Report],
    *,
    status: InferenceServiceStatus | None = None,
    notices: tuple[Notice, ...] = (),
    refusals: tuple[Refusal, ...] = (),
    admin_secret: bool = False,
    token: str = "",
    leaving_for: Mapping[str, timedelta] | None = None,
) -> Scene:
    """Everything of one service. `token` goes to the pods that are asked; `leaving_for`: see Observed."""
    live, taken = {}, set()
    for child in children:
        if is_own(child, service.metadata.uid):
            live[child.kind, child.name] = child
        else:
            taken.add((child.kind, child.name))
    objects = {key: child.obj for key, child in live.items()}  # unpacked once
    pods = list(pods)
    seen = [_pod(obj, live, reports) for obj in pods]
    stuck = any(no_room(n, [p for p in seen if p.owner == n], notices) for (k, n) in live if k == "StatefulSet")
    leaving = {n for (k, n), o in objects.items() if k == "StatefulSet" and meta.annotation(o, meta.DRAINING_SINCE)}
    return Scene(
        observed=Observed(
            children=tuple(objects.values()),
            pods=tuple(seen),
            status=status,
            # How many more would fit is not known without reading nodes (see nodes.py); that none does is seen.
            spare_replicas=0 if stuck else None,
            admin_secret=admin_secret,
            notices=notices,
            refusals=refusals,
            leaving_for=leaving_for or {},
        ),
        live=live,
        taken=frozenset(taken),
        targets=(*_to_ask(seen, token), *(_routers(seen) if leaving else ())),
        leaving=frozenset(p.uid for p in seen if leaving and (p.owner in leaving or p.component == meta.ROUTER)),
        refresh=tuple(_to_refresh(objects.get(("ConfigMap", router_name(service))), pods, seen)),
    )


def _to_ask(pods: Iterable[Pod], token: str) -> Iterator[Target]:
    """Engines and downloads."""
    for p in pods:
        if p.admin_address and p.running and not p.terminating:
            yield Target(p.uid, p.name, p.restarts, p.admin_address, token, fetching=p.component == meta.FETCH)


def _routers(pods: Iterable[Pod]) -> Iterator[Target]:
    """Routers; their port answers everybody, and they are not to see the token."""
    for p in pods:
        if p.component == meta.ROUTER and p.address and p.running and not p.terminating:
            yield Target(p.uid, p.name, p.restarts, p.address, "", routing=True)


def _to_refresh(listed: Object | None, pods: Iterable[Object], seen: Iterable[Pod]) -> Iterator[Refresh]:
    """Routers that run, and may have mounted another list than this one."""
    if listed is None:
        return
    digest = meta.digest(listed.get("data") or {})
    for obj, pod in zip(pods, seen, strict=True):
        runs = pod.component == meta.ROUTER and pod.running and not pod.terminating
        if runs and meta.annotation(obj, REFRESHED) != digest:
            yield Refresh(pod.name, pod.uid, digest)


def is_own(child: Live, uid: str) -> bool:
    """Whether a child belongs to the service with this UID and is there to stay. A claim that is to outlive its service
    has no owner: whoever has its name takes it over."""
    if child.deleting:
        return False
    return uid in child.owners or (child.kind == "PersistentVolumeClaim" and not child.owners)


def _pod(obj: Object, live: Mapping[tuple[str, str], Live], reports: Mapping[str, Report]) -> Pod:
    pod = read_pod(obj)
    owner = live.get(("StatefulSet", pod.owner))
    controllers = {r.get("uid") for r in obj["metadata"].get("ownerReferences") or () if r.get("controller")}
    if pod.component == meta.ENGINE and controllers and (owner is None or owner.uid not in controllers):
        pod = replace(pod, terminating=True)  # of a StatefulSet that is gone: the garbage collector will come by
    report = reports.get(pod.uid)
    if report is None or not pod.running:
        return pod
    return replace(
        pod,
        in_flight=report.in_flight,
        draining=report.draining,
        feasible=report.feasible,
        device=report.device,
        fetch=report.fetch or pod.fetch,
        sends_to=report.sends_to,
        tensor=report.layout.tensor,
        switching=report.layout.switching,
        refused=report.refused,
        switch_failed=report.layout.failed,
        switch_failed_ago=report.layout.failed_ago,
    )
