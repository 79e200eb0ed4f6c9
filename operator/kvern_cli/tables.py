"""The tables of `kvern status`: one line a service, one service with its pods and conditions. Pure: pictures in, blocks
out."""

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

from kvern_cli.explain import decision_words
from kvern_cli.picture import Object, Picture, PodPicture
from kvern_cli.problems import problems
from kvern_cli.render import Block, Cell, Line, Pairs, Style, Table
from kvern_cli.words import age
from kvern_operator.advice import REASONS

COLUMNS = ("NAME", "MODEL", "TP", "READY", "DESIRED", "GPUS", "REASON", "URL", "AGE")
MARKS: Mapping[str, Style] = {"fine": "good", "passing": "busy", "trouble": "bad"}


def services_table(services: Sequence[Object], now: datetime, *, namespaces: bool, wide: bool = False) -> Table:
    """The columns that kubectl prints as well."""
    header = (*(("NAMESPACE",) if namespaces else ()), *COLUMNS, *(("MESSAGE",) if wide else ()))
    rows = []
    for service in services:
        row = service_row(service, now)
        if namespaces:
            row = [Cell(service["metadata"].get("namespace", "")), *row]
        if wide:
            row = [*row, Cell(_condition(service, "Ready").get("message", ""))]
        rows.append(tuple(row))
    return Table(header, tuple(rows))


def service_row(service: Object, now: datetime, *, running: bool = True, created: str = "") -> list[Cell]:
    """One service. `running` False: its `kvern up` has ended."""
    metadata, status = service["metadata"], service.get("status") or {}
    created = created or metadata.get("creationTimestamp", "")
    reason = _condition(service, "Ready").get("reason") or "NotReconciled"
    if metadata.get("deletionTimestamp"):
        reason = "Deleting"
    ready, desired = int(status.get("readyReplicas", 0)), int(status.get("desiredReplicas", 0))
    layout = (status.get("parallelism") or {}).get("current")
    return [
        Cell(metadata["name"], "strong"),
        Cell(status.get("model") or "<none>"),
        Cell("<none>" if layout is None else str(layout)),
        Cell(str(ready if running else 0), _ready_style(ready, desired) if running else "dim"),
        Cell(str(desired)),
        Cell(str((status.get("capacity") or {}).get("gpus", 0))),
        Cell(reason, reason_style(reason)) if running else Cell("NotRunning", "dim"),
        Cell((status.get("url") or "<none>") if running else "<none>"),
        Cell(age(created, now) if created else "<unknown>"),
    ]


def _ready_style(ready: int, desired: int) -> Style:
    if ready >= desired:
        return "good" if desired else "dim"
    return "busy" if ready else "bad"


def reason_style(reason: str) -> Style:
    """Green, yellow or red by what the reason means."""
    known = REASONS.get(reason)
    return MARKS[known.kind] if known else "bad"


def _condition(service: Object, type_: str) -> Object:
    found = (service.get("status") or {}).get("conditions") or ()
    return next((c for c in found if c.get("type") == type_), {})


# ---------------------------------------------------------------- one service


def service_blocks(picture: Picture) -> list[Block]:
    """The line of the service, facts, conditions, pods, and what is wrong in a sentence."""
    row = service_row(picture.service, picture.now, running=picture.running, created=picture.extra.get("created", ""))
    blocks: list[Block] = [Table(COLUMNS, (tuple(row),)), Pairs(tuple(_facts(picture)))]
    if not picture.running:
        return blocks
    conditions = tuple(_condition_row(c, picture) for c in picture.status.get("conditions") or ())
    if conditions:
        header = ("TYPE", "STATUS", "REASON", "SINCE", "MESSAGE")
        blocks.append(Table(header, conditions, "Conditions"))
    if picture.pods:
        blocks.append(_pods_table(picture))
    found = problems(picture)
    if found:
        flag = "" if picture.local or picture.namespace == "default" else f" -n {picture.namespace}"
        blocks.append(Line(Cell(f"{found[0].short}; more: kvern explain{flag} {picture.name}", "bad")))
    return blocks


def _facts(picture: Picture) -> Iterator[tuple[str, tuple[Cell, ...]]]:
    spec, status, extra = picture.spec, picture.status, picture.extra
    metadata = picture.service["metadata"]
    yield "Name", (Cell(picture.name),)
    yield "Namespace", (Cell(picture.namespace),)
    if picture.local:
        yield "File", (Cell(extra["file"]),)
    yield "Model", (Cell(str((spec.get("model") or {}).get("uri", "?"))),)
    yield "Generation", (Cell(f"{metadata.get('generation', 1)} (observed {status.get('observedGeneration', 0)})"),)
    yield "Revision", (Cell(_revision(status)),)
    if not picture.running:
        yield "Stopped", (Cell(f"{extra['stopped']} ({extra['logs']})"),)
        return
    if picture.local:
        yield "Process", (Cell(f"kvern up, pid {extra['pid']}"),)
    yield "Replicas", (Cell(_replicas(status)),)
    layout = _layout(picture)
    if layout:
        yield "Layout", (Cell(layout),)
    startup = status.get("startup")
    if startup:
        yield "Last start", (Cell(_startup(startup)),)
    decision = (status.get("autoscaling") or {}).get("lastDecision")
    if decision:
        yield "Last decision", tuple(Cell(line) for line in decision_words(decision, picture))
    for gap in picture.gaps:
        yield "Not seen", (Cell(gap, "dim"),)


def _revision(status: Object) -> str:
    revision = status.get("revision") or {}
    current, updated = revision.get("current"), revision.get("updated")
    if current is None:
        return f"{updated}, not ready yet" if updated else "<none>"
    return f"{current}, rolling out {updated}" if updated and updated != current else str(current)


def _replicas(status: Object) -> str:
    ready, exist, wanted = (int(status.get(k, 0)) for k in ("readyReplicas", "replicas", "desiredReplicas"))
    return f"{ready} ready, {exist} exist, {wanted} wanted"


def _layout(picture: Picture) -> str:
    parallelism, capacity = picture.status.get("parallelism") or {}, picture.status.get("capacity") or {}
    current, target = parallelism.get("current"), parallelism.get("target")
    parts = []
    if target:
        parts.append(
            f"tensor size {current or target}" + (f", wanted {target}" if current not in (None, target) else "")
        )
    if picture.status.get("device"):
        parts.append(f"computing on {picture.status['device']}")
    if capacity.get("gpus"):
        parts.append(f"{capacity['gpus']} GPU{'s' if capacity['gpus'] > 1 else ''} in all")
    if capacity.get("kvTokensPerReplica"):
        parts.append(f"KV cache for {capacity['kvTokensPerReplica']:,} tokens a replica")
    return "; ".join(parts)


def _startup(startup: Object) -> str:
    parts = ("scheduling", "creating", "loading")
    spent = ", ".join(f"{part} {startup.get(f'{part}Seconds', 0)} s" for part in parts)
    return f"{startup.get('totalSeconds', 0)} s until {startup.get('pod', '?')} was ready: {spent}"


def _condition_row(condition: Object, picture: Picture) -> tuple[Cell, ...]:
    reason = str(condition.get("reason", ""))
    since = condition.get("lastTransitionTime")
    return (
        Cell(str(condition.get("type", ""))),
        Cell(str(condition.get("status", ""))),
        Cell(reason, reason_style(reason)),
        Cell(age(since, picture.now) if since else "<unknown>"),
        Cell(str(condition.get("message", ""))),
    )


def _pods_table(picture: Picture) -> Table:
    """The pods: on this machine with process and log, in a cluster with node and revision."""
    if picture.local:
        header = ("NAME", "READY", "RESTARTS", "IN FLIGHT", "ADDRESS", "PID", "STATE", "LOG")
        return Table(header, tuple(_local_pod_row(pod) for pod in picture.pods), "Pods")
    header = ("NAME", "READY", "RESTARTS", "STATE", "LAYOUT", "REVISION", "NODE", "AGE")
    return Table(header, tuple(_pod_row(pod, picture.now) for pod in picture.pods), "Pods")


def _pod_row(pod: PodPicture, now: datetime) -> tuple[Cell, ...]:
    rest = (short_layout(pod.layout) or "-", pod.revision or "-", pod.node or "-", age(pod.created, now))
    return (*_pod_start(pod), _pod_state(pod), *map(Cell, rest))


def short_layout(layout: str) -> str:
    """tp2pp1dp1 -> tp2: without what is 1 anyway."""
    return re.sub(r"(pp|dp)1(?!\d)", "", layout)


def _local_pod_row(pod: PodPicture) -> tuple[Cell, ...]:
    load = "-" if pod.in_flight is None else str(pod.in_flight)
    rest = (load, pod.address or "-", str(pod.pid or "-"))
    return (*_pod_start(pod), *map(Cell, rest), _pod_state(pod), Cell(pod.log))


def _pod_start(pod: PodPicture) -> tuple[Cell, ...]:
    return Cell(pod.name), Cell("1/1" if pod.ready else "0/1"), Cell(str(pod.restarts))


def _pod_state(pod: PodPicture) -> Cell:
    if pod.ready:
        return Cell(pod.doing, "busy" if pod.draining else "good")
    return Cell(pod.doing, "bad" if pod.trouble else "busy")
