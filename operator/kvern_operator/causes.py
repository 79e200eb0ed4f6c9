"""What keeps a service from what its spec asks for: the cause that the API server, a pod or an event names. Pure.

One cause is brought up, the one to hear of first, with the words of whoever saw it and what to do about it.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvern_operator.advice import advice
from kvern_operator.crashes import crash_reason
from kvern_operator.desired.meta import ENGINE, FETCH
from kvern_operator.loglines import shortened
from kvern_operator.observed import Notice, Pod, Refusal

_KUBELET_BACKOFF = re.compile(r"^back-off \S+ restarting failed container")
# Events of a pod that does not run yet, and what they are called here.
_VOLUMES = {
    "FailedMount": "FailedMount",
    "FailedMapVolume": "FailedMount",
    "FailedAttachVolume": "FailedAttachVolume",
    "FailedCreatePodSandBox": "FailedCreatePodSandBox",
}
_NO_VOLUME_TYPE = re.compile(r"must specify a volume type|unknown field \"\S*volumes\[\d+\]\.image")
_FORBIDDEN = (
    ("QuotaExceeded", re.compile(r"exceeded quota|failed quota")),
    ("PodSecurityViolation", re.compile(r"violates PodSecurity")),
)


@dataclass(frozen=True)
class Cause:
    """`reason` is one CamelCase word, `message` a sentence for people, `component` whose trouble it is ("": the whole
    service's)."""

    reason: str
    message: str
    component: str = ""


@dataclass(frozen=True)
class Surroundings:
    """What pods alone do not tell. `lacking`: names of workloads (StatefulSets, the router's Deployment) with fewer
    pods than they are to have. `memory`: the limit of an engine pod, "" where there is none."""

    notices: tuple[Notice, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    lacking: frozenset[str] = frozenset()
    memory: str = ""


def find_cause(pods: Iterable[Pod], around: Surroundings) -> Cause | None:
    """The trouble to hear of first: what the API server refuses, then engines before routers, the most restarts
    first."""
    for refusal in around.refusals:
        return _of_refusal(refusal)
    alive = [p for p in pods if not p.terminating]
    troubled = [(p, c) for p in alive if (c := _of_pod(p, around)) is not None]
    troubled.sort(key=lambda pair: (pair[0].component != ENGINE, pair[0].ready, -pair[0].restarts, pair[0].name))
    missing = list(_of_workloads(around))
    found = [c for p, c in troubled if p.component == ENGINE] + missing
    found += [c for p, c in troubled if p.component != ENGINE]
    if not found:
        return None
    first, others = found[0], len(found) - 1
    return Cause(first.reason, first.message + (f" (and {others} more)" if others else ""), first.component)


def _with_advice(reason: str, text: str) -> str:
    todo = advice(reason)
    return f"{text.rstrip('. ')}; {todo}" if todo else text


def _of_refusal(refusal: Refusal) -> Cause:
    if _NO_VOLUME_TYPE.search(refusal.message):
        text = f"the API server knows no image volumes, which oci:// models are: {refusal.message}"
        return Cause("ImageVolumesNotSupported", _with_advice("ImageVolumesNotSupported", text))
    if refusal.revision:
        text = f"spec.overrides: the API server does not take the {refusal.kind} that it leads to: {refusal.message}"
        return Cause("OverridesRefused", _with_advice("OverridesRefused", text))
    named = f"{refusal.kind} {refusal.name}".strip()
    return Cause("ApplyFailed", _with_advice("ApplyFailed", f"{named}: the API server refuses it: {refusal.message}"))


# ---------------------------------------------------------------- pods


def _of_pod(pod: Pod, around: Surroundings) -> Cause | None:
    if not pod.reason:
        return _of_volumes(pod, around.notices)
    reason = crash_reason(pod.component, pod.reason, pod.message, pod.exit_code, pod.last_log)
    text = _words(pod, around)
    if reason == "ClaimNotBound":
        text += "".join(
            f"; {n.name}: {n.message}" for n in around.notices if n.kind == "PersistentVolumeClaim" and n.message
        )
    text = f"{pod.component} {pod.name}: {text}"
    # Of a crash that is told by its own last line there is no better advice.
    plain = reason in ("CrashLoopBackOff", "Error") and pod.last_log
    return Cause(reason, text if plain else _with_advice(reason, text), pod.component)


def _words(pod: Pod, around: Surroundings) -> str:
    parts = []
    if pod.message and not _KUBELET_BACKOFF.match(pod.message):
        parts.append(_shorter(pod.message).rstrip(". "))
    elif pod.reason == "OOMKilled":
        limit = f"its limit of {around.memory}" if around.memory and pod.component == ENGINE else "there was for it"
        parts.append(f"wanted more memory than {limit}")
    elif pod.exit_code is None:
        parts.append(pod.reason)
    if pod.exit_code is not None:
        parts.append(f"exit code {pod.exit_code}")
    if pod.restarts:
        parts.append(f"{pod.restarts} restart{'s' if pod.restarts > 1 else ''}")
    text = ", ".join(parts)
    return text + (f'; last line: "{shortened(pod.last_log)}"' if pod.last_log else "")


def _shorter(message: str) -> str:
    """Image pulls repeat themselves at length."""
    return message if len(message) <= 800 else message[:797] + "..."


def _of_volumes(pod: Pod, notices: Iterable[Notice]) -> Cause | None:
    """A pod that waits without a reason of its own: its events may have one."""
    if pod.running or pod.ready:
        return None
    for notice in notices:
        same = notice.kind == "Pod" and notice.name == pod.name and notice.uid in ("", pod.uid)
        if same and notice.reason in _VOLUMES:
            unknown = "no volume plugin matched" in notice.message
            reason = "ImageVolumesNotSupported" if unknown else _VOLUMES[notice.reason]
            text = f"{pod.component} {pod.name}: {_shorter(notice.message)}"
            return Cause(reason, _with_advice(reason, text), pod.component)
    return None


# ---------------------------------------------------------------- workloads


def _of_workloads(around: Surroundings) -> Iterator[Cause]:
    """Pods that the API server does not let a controller make: only the controller's events say so."""
    for notice in around.notices:
        owner = notice.name.rpartition("-")[0] if notice.kind == "ReplicaSet" else notice.name
        if notice.reason != "FailedCreate" or owner not in around.lacking or notice.kind == "Pod":
            continue
        reason = next((r for r, words in _FORBIDDEN if words.search(notice.message)), "FailedCreate")
        text = f"{notice.kind} {notice.name}: {_shorter(notice.message)}"
        yield Cause(reason, _with_advice(reason, text), {"StatefulSet": ENGINE, "Job": FETCH}.get(notice.kind, ""))
