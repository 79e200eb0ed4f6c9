"""What one service looks like: its object, pods, workloads and events as plain values, of a cluster or of `kvern up`.

Pure. The words and tables of `status` and `explain` are made from a Picture, so that they can be tested on recorded
ones.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from kvern_cli.shared import Shared
from kvern_cli.words import age, moment, seconds_since
from kvern_operator.crashes import crash_reason
from kvern_operator.loglines import telling_line
from kvern_operator.trouble import Trouble, restarts, trouble

Object = Mapping[str, Any]

SERVICE_LABEL = "kvern.dev/service"
REPLICA_LABEL = "kvern.dev/replica"
REVISION_LABEL = "kvern.dev/revision"
COMPONENT_LABEL = "app.kubernetes.io/component"
DRAINING_SINCE = "kvern.dev/draining-since"
LAYOUT = "kvern.dev/layout"
ENGINE, ROUTER, FETCH = "engine", "router", "fetch"


@dataclass(frozen=True)
class Event:
    """One Event of Kubernetes. `kind` and `name` are of the object that it is about; `when` is its last time."""

    kind: str
    name: str
    reason: str
    message: str
    warning: bool
    when: str
    count: int = 1


@dataclass(frozen=True)
class PodPicture:
    """One pod. `doing` says its state in a word or two; `last_line` is the log line that explains its last end."""

    name: str
    component: str
    replica: str
    created: str
    ready: bool = False
    doing: str = ""
    restarts: int = 0
    node: str = ""
    layout: str = ""
    revision: str = ""
    trouble: Trouble | None = None
    last_line: str = ""
    scheduled: bool = True
    created_container: bool = True  # its containers have been made
    started: bool = False  # the startup probe has passed since its container last started
    running_since: str = ""
    startup_seconds: int = 0  # how long it may take to start; 0: not known
    draining: bool = False
    ending_since: str = ""  # told to end (deletionTimestamp less its grace)
    grace_seconds: int = 30
    # `kvern up` only.
    in_flight: int | None = None
    address: str = ""
    pid: int | None = None
    log: str = ""


@dataclass(frozen=True)
class Workload:
    """A StatefulSet (a replica) or a Deployment (the routers)."""

    kind: str
    name: str
    wanted: int
    existing: int
    draining_since: str = ""
    revision: str = ""


@dataclass(frozen=True)
class Picture:
    """One service and what belongs to it. `events` from old to new; `gaps` say what could not be read, and why.

    `operator` is what is known of the operator: "" where nothing is.
    """

    service: Object
    place: str  # "context kind-kvern" | "this machine"
    now: datetime
    kubectl: str = "kubectl"  # with the context and namespace that were chosen
    local: bool = False
    running: bool = True  # False: a `kvern up` that has ended
    pods: tuple[PodPicture, ...] = ()
    workloads: tuple[Workload, ...] = ()
    events: tuple[Event, ...] = ()
    operator: str = ""
    shared: Shared | None = None  # GPUs of the namespace; None: there is no budget, or nobody has asked
    gaps: tuple[str, ...] = ()
    extra: Mapping[str, str] = field(default_factory=dict)  # `kvern up`: file, pid, when it stopped

    @property
    def name(self) -> str:
        return str(self.service["metadata"]["name"])

    @property
    def namespace(self) -> str:
        return str(self.service["metadata"].get("namespace", "default"))

    @property
    def spec(self) -> Object:
        found: Object = self.service.get("spec") or {}
        return found

    @property
    def status(self) -> Object:
        found: Object = self.service.get("status") or {}
        return found

    def condition(self, type_: str) -> Object:
        """The condition of this type; {} where there is none."""
        return next((c for c in self.status.get("conditions") or () if c.get("type") == type_), {})

    def of(self, component: str) -> list[PodPicture]:
        """The pods of a component, by name."""
        return [pod for pod in self.pods if pod.component == component]


# ---------------------------------------------------------------- from a cluster


def cluster_picture(
    service: Object,
    pods: Iterable[Object],
    workloads: Iterable[Object],
    events: Iterable[Object],
    *,
    place: str,
    now: datetime,
    kubectl: str = "kubectl",
    lease: Object | None = None,
    shared: Shared | None = None,
    last_logs: Mapping[str, str] | None = None,
    gaps: Sequence[str] = (),
) -> Picture:
    """From the API server's objects. `last_logs`: the end of a crashed container's log, by pod."""
    listed = list(workloads)
    by_name = {obj["metadata"]["name"]: obj for obj in listed if obj.get("kind") == "StatefulSet"}
    pictures = [_pod(pod, by_name, (last_logs or {}).get(pod["metadata"]["name"], ""), now) for pod in pods]
    known = {service["metadata"]["name"], *(p.name for p in pictures), *(w["metadata"]["name"] for w in listed)}
    found = [event for event in map(_event, events) if event.name in known or _of_replicaset(event, listed)]
    return Picture(
        service=service,
        place=place,
        now=now,
        kubectl=kubectl,
        pods=tuple(sorted(pictures, key=lambda p: (p.component != ENGINE, natural(p.name)))),
        workloads=tuple(sorted(map(_workload, listed), key=lambda w: (w.kind != "StatefulSet", natural(w.name)))),
        events=tuple(sorted(found, key=lambda e: e.when)),
        operator=_operator(lease, now),
        shared=shared,
        gaps=tuple(gaps),
    )


def natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts x-r2-0 before x-r10-0."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _of_replicaset(event: Event, workloads: Iterable[Object]) -> bool:
    """Deployments make pods through ReplicaSets named after them."""
    deployments = {w["metadata"]["name"] for w in workloads if w.get("kind") == "Deployment"}
    return event.kind == "ReplicaSet" and event.name.rpartition("-")[0] in deployments


def _event(obj: Object) -> Event:
    about = obj.get("involvedObject") or obj.get("regarding") or {}
    series = obj.get("series") or {}
    times = (series.get("lastObservedTime"), obj.get("lastTimestamp"), obj.get("eventTime"))
    when = next((t for t in times if t), None) or obj.get("metadata", {}).get("creationTimestamp", "")
    return Event(
        kind=about.get("kind", ""),
        name=about.get("name", ""),
        reason=obj.get("reason", ""),
        message=" ".join(str(obj.get("message") or obj.get("note") or "").split()),
        warning=obj.get("type") == "Warning",
        when=when,
        count=int(series.get("count") or obj.get("count") or 1),
    )


def _workload(obj: Object) -> Workload:
    metadata = obj["metadata"]
    return Workload(
        kind=obj.get("kind", ""),
        name=metadata["name"],
        wanted=int((obj.get("spec") or {}).get("replicas", 1)),
        existing=int((obj.get("status") or {}).get("replicas", 0)),
        draining_since=(metadata.get("annotations") or {}).get(DRAINING_SINCE, ""),
        revision=(metadata.get("labels") or {}).get(REVISION_LABEL, ""),
    )


def _pod(pod: Object, sets: Mapping[str, Object], log: str, now: datetime) -> PodPicture:
    metadata, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    labels = metadata.get("labels") or {}
    component, replica = labels.get(COMPONENT_LABEL, ""), labels.get(REPLICA_LABEL, "")
    annotations = ((sets.get(replica) or {}).get("metadata") or {}).get("annotations") or {}
    container = _main(status.get("containerStatuses") or (), component)
    conditions = {c.get("type"): c.get("status") for c in status.get("conditions") or ()}
    found, last_line = _trouble(pod, component, log)
    grace = int(metadata.get("deletionGracePeriodSeconds", spec.get("terminationGracePeriodSeconds", 30)))
    picture = PodPicture(
        name=metadata["name"],
        component=component,
        replica=replica,
        created=metadata.get("creationTimestamp", ""),
        ready=conditions.get("Ready") == "True" and "deletionTimestamp" not in metadata,
        restarts=restarts(pod),
        node=spec.get("nodeName", ""),
        layout=annotations.get(LAYOUT, ""),
        revision=labels.get(REVISION_LABEL, ""),
        trouble=found,
        last_line=last_line,
        scheduled=bool(spec.get("nodeName")),
        created_container=bool(container) and "waiting" not in (container.get("state") or {}),
        started=bool(container.get("started")),
        running_since=((container.get("state") or {}).get("running") or {}).get("startedAt", ""),
        startup_seconds=_startup_seconds(_main(spec.get("containers") or (), component)),
        draining=bool(annotations.get(DRAINING_SINCE)),
        ending_since=_ending_since(metadata, grace),
        grace_seconds=grace,
    )
    return replace(picture, doing=_doing(picture, now))


def _trouble(pod: Object, component: str, log: str) -> tuple[Trouble | None, str]:
    """What is wrong with a pod, under the finest reason that its log gives, and the line that gives it."""
    found = trouble(pod)
    if found is None:
        return None, ""
    line = telling_line(log or found.log_tail)
    return replace(found, reason=crash_reason(component, found.reason, found.message, found.exit_code, line)), line


def _main(containers: Sequence[Object], component: str) -> Object:
    """Kvern's own container, whatever spec.overrides puts beside it."""
    named = [c for c in containers if c.get("name") == component]
    return (named or list(containers) or [{}])[0]


def _startup_seconds(container: Object) -> int:
    probe = container.get("startupProbe") or {}
    return int(probe.get("periodSeconds", 10)) * int(probe.get("failureThreshold", 3)) if probe else 0


def _ending_since(metadata: Object, grace: int) -> str:
    """deletionTimestamp is when the grace period ends."""
    if "deletionTimestamp" not in metadata:
        return ""
    ends = moment(metadata["deletionTimestamp"]).timestamp()
    return datetime.fromtimestamp(ends - grace, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _doing(pod: PodPicture, now: datetime) -> str:
    if pod.ending_since:
        return f"ending for {age(pod.ending_since, now)}"
    if pod.trouble is not None:
        return pod.trouble.reason
    if pod.ready:
        return "draining" if pod.draining else "ready"
    if not pod.scheduled:
        return "waiting for a node"
    if not pod.created_container:
        return "being created"
    if pod.component == FETCH:
        return f"fetching for {age(pod.running_since, now)}" if pod.running_since else "done"
    if not pod.started:
        what = "loading" if pod.component == ENGINE else "starting"
        return f"{what} for {age(pod.running_since, now)}" if pod.running_since else what
    return "draining" if pod.draining else "not ready"


def _operator(lease: Object | None, now: datetime) -> str:
    """What the operator's Lease says of it."""
    if lease is None:
        return ""
    spec = lease.get("spec") or {}
    holder, renewed = str(spec.get("holderIdentity") or ""), spec.get("renewTime")
    if not holder or not renewed:
        return "no operator holds the Lease kvern-operator"
    pod = holder.partition("_")[0]
    silent = seconds_since(renewed, now)
    if silent > 2 * int(spec.get("leaseDurationSeconds") or 15):
        return f"the operator ({pod}) gave its last sign of life {age(renewed, now)} ago"
    return f"the operator ({pod}) runs"


# ---------------------------------------------------------------- from `kvern up`


def local_picture(document: Mapping[str, Any], *, pid: int, running: bool, logs: str, now: datetime) -> Picture:
    """From the state that a `kvern up` wrote (see local/state.py)."""
    extra = {"file": str(document["file"]), "pid": str(pid), "created": str(document["created"]), "logs": logs}
    if not running:
        extra["stopped"] = str(document.get("stopped", "without a word; see its logs"))
    return Picture(
        service=document["service"],
        place="this machine",
        now=now,
        local=True,
        running=running,
        pods=tuple(map(_local_pod, document["pods"] if running else ())),
        extra=extra,
    )


def _local_pod(pod: Mapping[str, Any]) -> PodPicture:
    reason = str(pod.get("reason") or "")
    message, line, code = str(pod.get("message") or ""), str(pod.get("lastLine") or ""), pod.get("exitCode")
    finer = crash_reason(pod["component"], reason, message, code, line)
    found = Trouble(finer, message, code) if reason else None
    return PodPicture(
        name=pod["name"],
        component=pod["component"],
        replica=pod["replica"] if pod["component"] == ENGINE else "",
        created=pod["created"],
        ready=bool(pod["ready"]),
        doing=pod["doing"],
        restarts=int(pod["restarts"]),
        trouble=found,
        last_line=line,
        scheduled=reason != "Unschedulable",
        started=bool(pod["ready"]),
        draining=bool(pod.get("draining")),
        in_flight=pod["inFlight"],
        address=pod["address"] or "",
        pid=pod["pid"],
        log=pod["log"],
    )
