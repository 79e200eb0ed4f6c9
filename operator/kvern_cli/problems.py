"""What is wrong with a service, each thing once, causes before their effects. Pure: a Picture in, problems out.

A pod's trouble comes from its object, what its object does not say (a quota, a volume, a probe) from events, and what
only the operator knows from conditions.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvern_cli.picture import ENGINE, Event, Picture, PodPicture, Workload
from kvern_cli.words import age, count, duration, names, seconds_since
from kvern_operator.advice import CONDITIONS, REASONS

TAKE_UP_SECONDS = 15  # an operator that runs has taken a service up by then
SIGNALS = {130: "SIGINT", 134: "SIGABRT", 137: "SIGKILL", 139: "SIGSEGV", 143: "SIGTERM"}
STUCK_REASONS = ("FailedAttachVolume", "FailedMount", "FailedCreatePodSandBox")
# Conditions that say more than pods do, worst first.
TELLING = ("Ready", "Available", "Progressing", "Degraded", "MetricsAvailable")


@dataclass(frozen=True)
class Problem:
    """`short` goes into a headline, `story` is whole. `serious`: it keeps the service from what is wanted."""

    reason: str
    short: str
    story: str
    pod: str = ""
    node: str = ""
    serious: bool = True


def problems(picture: Picture) -> list[Problem]:
    """Everything that is wrong, what to hear of first at the front."""
    if not picture.running:
        return []
    found = [
        *_not_taken_up(picture),
        *_refused_pods(picture),
        *_troubled_pods(picture),
        *_stuck_pods(picture),
        *_slow_starts(picture),
    ]
    found += _from_conditions(picture, {problem.reason for problem in found})
    return found


# ---------------------------------------------------------------- the operator


def _not_taken_up(picture: Picture) -> Iterator[Problem]:
    metadata, status = picture.service["metadata"], picture.status
    generation, seen = int(metadata.get("generation", 1)), int(status.get("observedGeneration", 0))
    created = metadata.get("creationTimestamp")
    if picture.local or seen >= generation or metadata.get("deletionTimestamp"):
        return
    if not created or seconds_since(created, picture.now) < TAKE_UP_SECONDS:
        return
    age_ = age(created, picture.now)
    changed = f"generation {generation}, but generation {seen}" if seen else f"this service, which is {age_} old"
    said = f"; {picture.operator}" if picture.operator else ""
    story = f"the operator has not taken up {changed} (NotReconciled){said}"
    yield Problem("NotReconciled", "the operator has not taken it up", story)


# ---------------------------------------------------------------- pods that could not be made


def _refused_pods(picture: Picture) -> Iterator[Problem]:
    """StatefulSets and Deployments that lack pods because the API server refuses them."""
    by_reason: dict[str, list[tuple[Workload, Event]]] = {}
    for workload in picture.workloads:
        if workload.existing >= workload.wanted:
            continue
        event = _last(
            e
            for e in picture.events
            if e.reason == "FailedCreate" and (e.name == workload.name or _replica_set(e, workload))
        )
        if event is not None:
            by_reason.setdefault(_refusal(event.message), []).append((workload, event))
    for reason, found in by_reason.items():
        workload, event = found[-1]
        who = names(w.name for w, _ in found)
        story = (
            f"no pod can be made for {who} ({reason}): {event.message.partition('failed error: ')[2] or event.message}"
        )
        shorts = {
            "QuotaExceeded": "the namespace's quota allows no further pod",
            "PodSecurityViolation": "the namespace's Pod Security level forbids its pods",
        }
        yield Problem(reason, shorts.get(reason, f"no pod can be made for {who}"), story)


def _replica_set(event: Event, workload: Workload) -> bool:
    return event.kind == "ReplicaSet" and event.name.rpartition("-")[0] == workload.name


def _refusal(message: str) -> str:
    if "exceeded quota" in message or "failed quota" in message:
        return "QuotaExceeded"
    return "PodSecurityViolation" if "violates PodSecurity" in message else "FailedCreate"


def _last(events: Iterable[Event]) -> Event | None:
    found = list(events)
    return found[-1] if found else None


# ---------------------------------------------------------------- pods in trouble


def _troubled_pods(picture: Picture) -> Iterator[Problem]:
    """One problem a reason, told by the pod that restarted most; engines first."""
    groups: dict[tuple[bool, str], list[PodPicture]] = {}
    for pod in picture.pods:
        if pod.trouble is not None and not pod.ending_since:
            groups.setdefault((pod.component != ENGINE, pod.trouble.reason), []).append(pod)
    for (_, reason), pods in sorted(groups.items(), key=lambda item: item[0][0]):
        worst = max(pods, key=lambda p: (p.restarts, p.name))
        others = f" (so {'is' if len(pods) == 2 else 'are'} {names(p.name for p in pods if p is not worst)})" * (
            len(pods) > 1
        )
        yield Problem(reason, _short(worst), _story(worst, others), worst.name, worst.node)


def _short(pod: PodPicture) -> str:
    assert pod.trouble is not None
    reason = pod.trouble.reason
    shorts = {
        "Unschedulable": f"no node can take {pod.name}",
        "ClaimNotBound": f"{pod.name} waits for a volume",
        "ModelNotFound": f"{pod.name} does not find its model",
        "ModelDoesNotFit": f"the model does not fit into {pod.name}",
        "BadArguments": f"{pod.name} does not take its arguments",
    }
    if reason in shorts:
        return shorts[reason]
    if reason == "OOMKilled":
        return f"{pod.name} is ended for want of memory"
    if "Image" in reason:
        return f"the image of {pod.name} is not to be had"
    if pod.trouble.exit_code is not None:
        return f"{pod.name} crashes at its start" if not pod.started else f"{pod.name} crashes"
    return f"{pod.name}: {reason}"


def _story(pod: PodPicture, others: str) -> str:
    """What happens to a pod, in the words of whoever saw it."""
    assert pod.trouble is not None
    trouble = pod.trouble
    if trouble.reason in ("Unschedulable", "ClaimNotBound"):
        said = trouble.message or "nothing"
        return f"no node can take {pod.name}{others} ({trouble.reason}); the scheduler says: {said}"
    if trouble.exit_code is None:
        return f"{pod.name}{others} is in {trouble.reason}: {trouble.message or 'no message'}"
    again = f", started again {count(pod.restarts, 'time')}" if pod.restarts else ""
    line = f'; the last line that tells: "{pod.last_line}"' if pod.last_line else "; its log says nothing"
    return f"{pod.name}{others} ended with {_code(trouble.exit_code)} ({trouble.reason}){again}{line}"


def _code(code: int) -> str:
    signal = SIGNALS.get(code)
    return f"exit code {code}" + (f", which is {signal}" if signal else "")


# ---------------------------------------------------------------- pods that hang


def _stuck_pods(picture: Picture) -> Iterator[Problem]:
    for pod in picture.pods:
        if pod.ending_since:
            late = seconds_since(pod.ending_since, picture.now) - pod.grace_seconds
            if late > 30:
                since, grace = age(pod.ending_since, picture.now), pod.grace_seconds
                story = f"{pod.name} was told to end {since} ago, had {grace} s for it, is there (StuckTerminating)"
                yield Problem("StuckTerminating", f"{pod.name} does not end", story, pod.name, pod.node, serious=False)
        elif pod.trouble is None and pod.scheduled and not pod.created_container:
            events = [e for e in picture.events if e.name == pod.name and e.reason in STUCK_REASONS and e.warning]
            if events:
                event = events[-1]
                story = f"{pod.name} cannot be created ({event.reason}): {event.message}"
                yield Problem(event.reason, f"{pod.name} cannot be created", story, pod.name, pod.node)


def _slow_starts(picture: Picture) -> Iterator[Problem]:
    """Containers that the kubelet restarted because a probe said so: their objects do not tell."""
    for pod in picture.pods:
        if pod.ready or pod.trouble is not None or pod.ending_since or not pod.restarts:
            continue
        killed = _last(
            e for e in picture.events if e.reason == "Killing" and e.name == pod.name and "probe" in e.message
        )
        if killed is None:
            continue
        again = f"was started again {count(pod.restarts, 'time')}"
        if "startup probe" in killed.message:
            limit = f" within {duration(pod.startup_seconds)}" if pod.startup_seconds else " in time"
            story = f"{pod.name} was not ready{limit} and {again} (NotReadyInTime)"
            yield Problem("NotReadyInTime", f"{pod.name} takes too long to load", story, pod.name, pod.node)
        else:
            story = f"{pod.name} did not answer its liveness probe and {again} (Unresponsive)"
            yield Problem("Unresponsive", f"{pod.name} hung", story, pod.name, pod.node)


# ---------------------------------------------------------------- what the operator says


def _meaning(reason: str) -> str:
    """The first sentence of what a reason means, to go on with in a headline."""
    known = REASONS.get(reason)
    if known is None:
        return reason
    first = known.meaning.partition(". ")[0].rstrip(".")
    return first[:1].lower() + first[1:]


def _from_conditions(picture: Picture, known: set[str]) -> Iterator[Problem]:
    """Trouble that no pod shows; and pods' trouble where pods could not be read."""
    if picture.service["metadata"].get("deletionTimestamp"):
        return
    told: set[str] = set()
    for type_ in TELLING:
        condition = picture.condition(type_)
        reason, message = str(condition.get("reason", "")), str(condition.get("message", ""))
        advice = REASONS.get(reason)
        passing = advice is not None and advice.kind != "trouble"
        healthy = condition.get("status") == ("False" if type_ == "Degraded" else "True")
        if not condition or healthy or passing or reason in known or reason in told:
            continue
        if reason not in CONDITIONS and picture.pods:  # a pod's own reason, and the pods have been looked at
            continue
        told.add(reason)
        serious = type_ in ("Ready", "Available")
        yield Problem(reason, _meaning(reason), f"{reason}: {message.removeprefix('stalled: ')}", serious=serious)
