"""What is wrong with a pod, read from its object alone: the cause that its phase hides. Pure, standard library only.

The operator's conditions and `kvern explain` both take it from here, so that they say the same. Times, events and logs
are no business of this file.

A pod in trouble passes through several words for the same thing (ErrImagePull and ImagePullBackOff, RunContainerError
and StartError, Error and CrashLoopBackOff): one of them is taken, so that a reason changes only when the trouble does.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# States that every pod passes through; anything else that a container waits for is trouble.
PASSING = frozenset({"", "ContainerCreating", "PodInitializing"})
NOT_PULLED = frozenset({"ErrImagePull", "ImagePullBackOff"})
BACK_OFF = re.compile(r"^Back-off pulling image .*?: ErrImagePull: ")


@dataclass(frozen=True)
class Trouble:
    """`reason` is the kubelet's or scheduler's word, `message` its sentence, both as they are.

    `container` is the one in trouble ("" where it is the pod as a whole), `exit_code` belongs to its last end,
    `log_tail` is its termination message: the end of the log with terminationMessagePolicy FallbackToLogsOnError.
    """

    reason: str
    message: str = ""
    exit_code: int | None = None
    log_tail: str = ""
    container: str = ""


def trouble(pod: Mapping[str, Any]) -> Trouble | None:
    """The trouble of a pod object, None where nothing is wrong (loading and starting are not)."""
    status = pod.get("status") or {}
    if status.get("phase") == "Failed" and status.get("reason"):  # Evicted, NodeShutdown, UnexpectedAdmissionError
        return Trouble(status["reason"], status.get("message", ""))
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return Trouble(condition.get("reason") or "Unschedulable", condition.get("message", ""))
    for container in _containers(status):
        found = _of_container(container)
        if found is not None:
            return found
    return None


def restarts(pod: Mapping[str, Any]) -> int:
    """How often the containers of a pod have been started again, all together."""
    return sum(int(c.get("restartCount", 0)) for c in _containers(pod.get("status") or {}))


def last_end(container: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """How a container (a containerStatus) ended last; None where it never has."""
    for state in (container.get("state"), container.get("lastState")):
        ended: Mapping[str, Any] | None = (state or {}).get("terminated")
        if ended:
            return ended
    return None


def _containers(status: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from status.get("initContainerStatuses") or ()
    yield from status.get("containerStatuses") or ()


def _of_container(container: Mapping[str, Any]) -> Trouble | None:
    state, ended, name = container.get("state") or {}, last_end(container), str(container.get("name", ""))
    waiting = state.get("waiting")
    if waiting is not None:
        return _waiting(name, waiting.get("reason") or "", waiting.get("message") or "", ended)
    if ended is None or ended.get("exitCode") == 0:
        return None
    # It runs, but has not come up since it crashed: the crash is still what there is to say.
    if "running" in state and (container.get("started") or container.get("ready")):
        return None
    ends = int(container.get("restartCount", 0)) + ("terminated" in state)
    return _ended(name, ended, "CrashLoopBackOff" if ends > 1 else "Error")


def _waiting(container: str, reason: str, message: str, ended: Mapping[str, Any] | None) -> Trouble | None:
    if reason in PASSING:
        return None
    if ended is not None and reason == "CrashLoopBackOff":
        return _ended(container, ended, reason, message)
    if ended is not None and reason == "RunContainerError" and ended.get("reason") not in (None, "Error", "Completed"):
        return _ended(container, ended, reason)
    if reason in NOT_PULLED:
        return Trouble("ImagePullBackOff", BACK_OFF.sub("", message), container=container)
    return Trouble(reason, message, container=container)


def _ended(container: str, ended: Mapping[str, Any], reason: str, message: str = "") -> Trouble:
    """A crash under the name that says most: OOMKilled rather than the loop that it leads to."""
    own = ended.get("reason") or ""
    if own not in ("", "Error", "Completed"):
        reason = own
    return Trouble(reason, message, ended.get("exitCode"), (ended.get("message") or "").strip(), container)
