"""Events of the resource: what changed, said once. Choosing them is pure; posting them is the last thing of a pass.

They are chosen by comparing the status that was written last with the new one, so that a restart of the operator says
nothing twice. A message that only counts on (restarts, back-off) is no news: the reason has to change.
"""

import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from kvern_operator.api.status import Condition, InferenceServiceStatus
from kvern_operator.api.types import API_VERSION, KIND
from kvern_operator.kube import ApiError, KubeClient, collection
from kvern_operator.observed import Object

log = logging.getLogger("kvern.events")

LONGEST_NOTE = 1024  # bytes, the API server's limit
COMPONENT = "kvern.dev/operator"


@dataclass(frozen=True)
class Event:
    """One line of `kubectl describe`."""

    type: Literal["Normal", "Warning"]
    reason: str
    note: str


def news(before: InferenceServiceStatus | None, after: InferenceServiceStatus, notes: Iterable[str]) -> list[Event]:
    """What is worth an Event: each note of the plan, and each turn of Ready, Available and Degraded."""
    found = [Event(*_kind_of(note), note) for note in notes]
    if before is not None:
        found += _decisions(before, after)
    old = {c.type: c for c in before.conditions} if before is not None else {}
    for condition in after.conditions:
        event = _turn(old.get(condition.type), condition)
        if event is not None:
            found.append(event)
    return found


_SCALED = {"up": "ScaledUp", "down": "ScaledDown", "wake": "WokenUp", "zero": "ScaledToZero", "bounds": "WithinBounds"}


_PHASES = {"Stable": "LayoutStable", "Changing": "LayoutChanging", "Verifying": "LayoutVerifying"}


def _decisions(before: InferenceServiceStatus, after: InferenceServiceStatus) -> Iterable[Event]:
    """What was decided from metrics since: each change once."""
    made, last = after.autoscaling.last_decision, before.autoscaling.last_decision
    if made is not None and made != last and made.from_ != made.to and made.kind in _SCALED:
        words = f"{made.from_} -> {made.to} replicas: {made.reason}"
        words += f" (limited by {made.limited_by})" if made.limited_by else ""
        recommends = after.autoscaling.mode == "Recommend"
        if not recommends:
            yield Event("Normal", _SCALED[made.kind], words)
        elif after.autoscaling.recommended != before.autoscaling.recommended:
            yield Event("Normal", "Recommended", words)
    layout, plan, old = after.parallelism.last_decision, after.parallelism.plan, before.parallelism.plan
    if layout is None or plan is None or plan == old:
        return
    if old is None:
        if layout.from_ != layout.to:  # before any pod has run
            yield Event("Normal", "LayoutChange", f"tensor size {layout.from_} -> {layout.to}: {layout.reason}")
        return
    if layout.from_ != layout.to and plan.size != old.size:
        kind: Literal["Normal", "Warning"] = "Warning" if plan.returning else "Normal"
        reason = "LayoutTakenBack" if plan.returning else "LayoutChange"
        yield Event(kind, reason, f"tensor size {layout.from_} -> {layout.to}: {layout.reason}")
    elif plan.phase != old.phase:
        yield Event("Normal", _PHASES[plan.phase], layout.reason)


def _turn(before: Condition | None, now: Condition) -> Event | None:
    if before is not None and (before.status, before.reason) == (now.status, now.reason):
        return None
    if now.type == "ScalingLimited" and now.status == "True":
        return Event("Warning", "ScalingLimited", f"{now.reason}: {now.message}")
    if now.type == "ScalingActive" and now.reason == "MissingMetrics":
        return Event("Warning", "MissingMetrics", now.message)
    if now.type == "Ready" and now.status == "True":
        return Event("Normal", "Ready", now.message)
    if now.type == "Degraded" and now.status == "True":
        return Event("Warning", now.reason, now.message)
    if now.type == "Degraded" and before is not None and before.status == "True":
        return Event("Normal", "Recovered", f"{before.reason} is over")
    if now.type == "Available" and now.status == "False" and before is not None and before.status == "True":
        kind: Literal["Normal", "Warning"] = "Normal" if now.reason in ("Suspended", "ScaledToZero") else "Warning"
        return Event(kind, "Unavailable", f"{now.reason}: {now.message}")
    return None


# By a note's first word.
_NOTES: dict[str, tuple[Literal["Normal", "Warning"], str]] = {
    "starting": ("Normal", "StartingReplica"),
    "draining": ("Normal", "DrainingReplica"),
    "taking": ("Normal", "TakingBack"),
    "stopping": ("Normal", "StoppingReplica"),
    "replacing": ("Normal", "ReplacingReplica"),
    "cutting": ("Warning", "DrainTimedOut"),
}


def _kind_of(note: str) -> tuple[Literal["Normal", "Warning"], str]:
    return _NOTES.get(note.partition(" ")[0], ("Normal", "Reconciled"))


def shortened(text: str, limit: int = LONGEST_NOTE) -> str:
    """At most `limit` bytes of UTF-8, cut between characters."""
    data = text.encode()
    return text if len(data) <= limit else data[: limit - 3].decode("utf-8", "ignore") + "..."


def to_object(event: Event, service: Object, now: datetime, instance: str) -> Object:
    """An events.k8s.io/v1 Event. The name is that of the same event at the same time: posting twice makes one."""
    meta_, stamp = service["metadata"], now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    name, namespace = meta_["name"], meta_["namespace"]
    unique = hashlib.sha256(f"{meta_['uid']} {event} {stamp}".encode()).hexdigest()[:16]
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": f"{name}.{unique}", "namespace": namespace},
        "eventTime": stamp,
        "reportingController": COMPONENT,
        "reportingInstance": instance[:128],
        "action": "Reconcile",
        "reason": event.reason,
        "type": event.type,
        "note": shortened(event.note),
        "regarding": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": name,
            "namespace": namespace,
            "uid": meta_["uid"],
        },
    }


class Poster:
    """Posts events. A lost one is logged and not tried again: an Event is a hint, the status is the record."""

    def __init__(self, client: KubeClient, instance: str) -> None:
        self._client, self._instance = client, instance

    async def post(self, events: Sequence[Event], service: Object) -> None:
        """In the order given."""
        path = collection("events.k8s.io/v1", "events", service["metadata"]["namespace"])
        for event in events:
            body = to_object(event, service, datetime.now(UTC), self._instance)
            try:
                await self._client.create(body, path)
            except ApiError as error:
                # 403 also while the namespace is being deleted.
                log.debug("event %s of %s: %s", event.reason, service["metadata"]["name"], error)
