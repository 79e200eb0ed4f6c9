"""`kvern explain NAME` in plain sentences: what a service wants, what is there, what is wrong and why, what was decided
last, what to do. Pure: a Picture in, text out.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvern_cli.picture import ENGINE, ROUTER, Picture, PodPicture
from kvern_cli.problems import Problem, problems
from kvern_cli.render import Block, Cell, Line, Pairs, Style
from kvern_cli.words import age, count, duration, names, sentence
from kvern_operator.advice import APPLY, REASONS

MOST_ADVISED = 3  # kinds of trouble that get their steps; the rest would drown them


@dataclass(frozen=True)
class Explanation:
    """`headline` says how it stands, `rows` are (label, sentences)."""

    headline: str
    style: Style
    rows: tuple[tuple[str, tuple[str, ...]], ...]


def explain(picture: Picture) -> Explanation:
    """The explanation of a picture."""
    found = problems(picture)
    headline, style = _headline(picture, found)
    rows = (
        ("It wants", tuple(_wants(picture))),
        ("There is", tuple(_there(picture))),
        ("Wrong", tuple(_wrong(found))),
        ("No effect", tuple(_ignored(picture))),
        ("Decided", tuple(_decided(picture))),
        ("Not seen", picture.gaps),
        ("To do", tuple(_to_do(picture, found))),
    )
    return Explanation(headline, style, tuple((label, lines) for label, lines in rows if lines))


def blocks(found: Explanation) -> list[Block]:
    """As something that can be shown."""
    styles: Mapping[str, Style] = {"Wrong": "bad", "No effect": "busy", "Not seen": "dim"}
    rows = tuple(
        (label, tuple(Cell(line, styles.get(label, "")) for line in lines)) for label, lines in found.rows if lines
    )
    return [Line(Cell(found.headline, found.style)), Pairs(rows)]


# ---------------------------------------------------------------- how it stands


def _headline(picture: Picture, found: list[Problem]) -> tuple[str, Style]:
    name, status = picture.name, picture.status
    ready, desired = int(status.get("readyReplicas", 0)), int(status.get("desiredReplicas", 0))
    if not picture.running:
        return f"{name} does not run: its kvern up has ended.", "dim"
    if picture.service["metadata"].get("deletionTimestamp"):
        return f"{name} is being deleted.", "busy"
    if not status.get("conditions"):
        return f"{name} is not served yet: the operator has not taken it up.", "bad" if found else "busy"
    reason = picture.condition("Ready").get("reason", "")
    if reason == "Suspended":
        return f"{name} is suspended: nothing runs.", "dim"
    if reason == "ScaledToZero":
        return f"{name} has no replica, and none is wanted.", "dim"
    trouble = next((p for p in found if p.serious), None)
    because = f": {trouble.short}" if trouble else ""
    if picture.condition("Available").get("status") == "True":
        if ready >= desired:
            return f"{name} answers: {ready} of {count(desired, 'replica')}{because}.", "busy" if because else "good"
        return (
            f"{name} answers, with {ready} of {count(desired, 'replica')}{because or ': the rest is on its way'}.",
            "busy",
        )
    if trouble:
        return f"{name} does not answer{because}.", "bad"
    return f"{name} does not answer yet: it is on its way.", "busy"


# ---------------------------------------------------------------- what it wants


def _wants(picture: Picture) -> Iterator[str]:
    spec = picture.spec
    model = spec.get("model") or {}
    served = picture.status.get("model") or model.get("name")
    scaling = spec.get("autoscaling") or {}
    mode, replicas = scaling.get("mode", "Off"), int(spec.get("replicas", 1))
    if mode == "Internal" and not picture.local:
        replicas = int(picture.status.get("desiredReplicas", replicas))
    asked = f"; clients ask for {served}" if served else ""
    yield f"{count(replicas, 'replica')} of {model.get('uri', '?')}{asked}."
    yield _replica_words(picture)
    if mode == "External":
        yield "An HPA, KEDA or kubectl scale writes the number of replicas (autoscaling.mode External)."
    elif mode != "Off":
        bounds = f"{scaling.get('minReplicas', 1)} to {scaling.get('maxReplicas', '?')}"
        yield f"autoscaling.mode is {mode}, with {bounds} replicas."
    router = spec.get("router") or {}
    if router.get("mode", "Embedded") == "Embedded" and not picture.local:
        yield f"{count(int(router.get('replicas', 2)), 'router pod')} in front of it."
    if spec.get("suspend"):
        yield "spec.suspend is true, so nothing of it is to run."


def _replica_words(picture: Picture) -> str:
    resources, parallelism = picture.spec.get("resources") or {}, picture.spec.get("parallelism") or {}
    pods, gpus = int(resources.get("nodesPerReplica", 1)), int(resources.get("gpusPerPod", 1))
    kind = f" {resources['gpuType']}" if resources.get("gpuType") else ""
    parts = [f"{count(gpus, f'{kind.strip()} GPU'.strip())}" if gpus else "no GPU: it computes on the CPU"]
    for key, word in (("cpu", "CPU"), ("memory", "of memory")):
        if resources.get(key) is not None:
            parts.append(f"{resources[key]} {word}")
    tensor, stages = parallelism.get("tensor") or {}, (parallelism.get("pipeline") or {}).get("size", 1)
    planned = (picture.status.get("parallelism") or {}).get("target")
    target = planned or tensor.get("size") if tensor.get("mode") == "Auto" else tensor.get("size") or planned
    layout = f"; tensor size {target}" if target and gpus * pods > 1 else ""
    layout += f", {stages} pipeline stages" if stages > 1 else ""
    return f"A replica is {count(pods, 'pod')}{' each' if pods > 1 else ''} with {', '.join(parts)}{layout}."


# ---------------------------------------------------------------- what is there


def _there(picture: Picture) -> Iterator[str]:
    if not picture.running:
        yield f"It stopped: {picture.extra.get('stopped', '')}. Its logs are in {picture.extra.get('logs', '')}."
        return
    status = picture.status
    engines, routers = picture.of(ENGINE), picture.of(ROUTER)
    if picture.condition("Available").get("status") == "True" and status.get("url"):
        yield f"It answers at {status['url']}."
    yield from _by_state(picture, engines, "engine")
    if not engines and not picture.gaps:
        yield "No engine pod."
    cached = picture.condition("ModelCached")
    if cached.get("reason") in ("Cached", "Downloading", "DownloadPending"):
        yield sentence(cached.get("message", ""))
    if routers:
        ready = sum(pod.ready for pod in routers)
        yield f"{ready} of {count(len(routers), 'router')} ready."
    yield from _draining(picture)
    yield from _revisions(picture)
    tokens = (status.get("capacity") or {}).get("kvTokensPerReplica")
    if tokens:
        yield f"KV cache for {tokens:,} tokens a replica."
    if picture.operator:
        yield sentence(picture.operator[0].upper() + picture.operator[1:])


def _by_state(picture: Picture, pods: Iterable[PodPicture], what: str) -> Iterator[str]:
    """One sentence a state, its pods by name."""
    groups: dict[str, list[PodPicture]] = {}
    for pod in pods:
        groups.setdefault(_state(pod), []).append(pod)
    for state in ("ready", "draining", "not ready", "loading", "being created", "waiting for a node", "ending", ""):
        found = groups.pop(state, None)
        if not found:
            continue
        where = sorted({pod.node for pod in found if pod.node})
        on = f" on {names(where)}" if where else ""
        text = f"{count(len(found), f'{what} pod')} {state or 'in trouble'}: {names(p.name for p in found)}{on}"
        yield sentence(text + _how_long(picture, state, found))


def _state(pod: PodPicture) -> str:
    if pod.ending_since:
        return "ending"
    if pod.trouble is not None and not pod.ready:
        return ""
    if not pod.scheduled:
        return "waiting for a node"
    if pod.ready or pod.draining:
        return "draining" if pod.draining else "ready"
    if not pod.created_container:
        return "being created"
    return "not ready" if pod.started else "loading"


def _how_long(picture: Picture, state: str, pods: list[PodPicture]) -> str:
    if state == "loading":
        since = [pod for pod in pods if pod.running_since]
        if not since:
            return ""
        oldest = min(since, key=lambda p: p.running_since)
        limit = f" (it has {duration(oldest.startup_seconds)} for that)" if oldest.startup_seconds else ""
        return f", for {age(oldest.running_since, picture.now)}{limit}"
    if state in ("being created", "waiting for a node"):
        return f", for {age(min(pod.created for pod in pods), picture.now)}"
    if state == "ending":
        return f", for {age(min(pod.ending_since for pod in pods), picture.now)}"
    return ""


def _draining(picture: Picture) -> Iterator[str]:
    limit = (picture.spec.get("rollout") or {}).get("drainTimeoutSeconds", 300)
    for replica in picture.workloads:
        if replica.draining_since:
            since = age(replica.draining_since, picture.now)
            yield f"{replica.name} has been draining for {since}: it finishes its requests, for at most {limit} s."


def _revisions(picture: Picture) -> Iterator[str]:
    revision = picture.status.get("revision") or {}
    current, updated = revision.get("current"), revision.get("updated")
    if current and updated and current != updated:
        new = sum(w.revision == updated for w in picture.workloads if w.kind == "StatefulSet")
        some = f"; {count(new, 'replica')} of the new one" if picture.workloads else ""
        yield f"A rollout from revision {current} to {updated} is under way{some}."


# ---------------------------------------------------------------- what is wrong


def _wrong(found: Iterable[Problem]) -> Iterator[str]:
    for problem in found:
        yield sentence(problem.story)


def _ignored(picture: Picture) -> Iterator[str]:
    ignored = picture.condition("FieldsIgnored")
    if ignored.get("status") == "True":
        yield from (sentence(part) for part in str(ignored.get("message", "")).split("; "))


# ---------------------------------------------------------------- what was decided


def _decided(picture: Picture) -> Iterator[str]:
    decision = (picture.status.get("autoscaling") or {}).get("lastDecision")
    if decision:
        yield from decision_words(decision, picture)


def decision_words(decision: Mapping[str, Any], picture: Picture) -> Iterator[str]:
    """The last decision about replicas, with the numbers that it was taken from."""
    before, after = int(decision.get("from", 0)), int(decision.get("to", 0))
    step = f"{before} -> {after} replicas" if before != after else f"{count(after, 'replica')} as before"
    yield sentence(f"{step}, {age(decision['time'], picture.now)} ago: {decision.get('reason', '')}")
    inputs = decision.get("inputs") or {}
    if inputs:
        yield "Its numbers: " + ", ".join(f"{key} {value}" for key, value in inputs.items()) + "."
    if decision.get("limitedBy"):
        yield sentence(f"Kept from going further by {decision['limitedBy']}")


# ---------------------------------------------------------------- what to do


def _to_do(picture: Picture, found: list[Problem]) -> Iterator[str]:
    reasons: dict[str, Problem] = {}
    for problem in found:
        reasons.setdefault(problem.reason, problem)
    if not found and picture.running:
        yield from _usual_steps(picture)
    for reason, problem in list(reasons.items())[:MOST_ADVISED]:
        known = REASONS.get(reason)
        steps = known.steps if known else ("`{k} describe pod {pod}` shows what Kubernetes says of it",)
        yield from filter(None, (_filled(step, picture, problem) for step in steps))
    if not picture.running:
        yield f"start it again: kvern up {picture.extra.get('file', 'FILE')}"


def _usual_steps(picture: Picture) -> Iterator[str]:
    """Where nothing is wrong: what people want next."""
    ready = picture.condition("Ready")
    known = REASONS.get(ready.get("reason", ""))
    yield from filter(None, (_filled(step, picture, None) for step in (known.steps if known else ())))
    if ready.get("status") != "True" or ready.get("reason") == "ScaledToZero":
        return
    url, model = str(picture.status.get("url", "")), picture.status.get("model", "")
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    curl = "curl {url}/chat/completions -H 'Content-Type: application/json' -d '" + body + "'"
    if picture.local:
        yield "ask it: " + curl.replace("{url}", url)
    else:
        yield f"from this machine: {picture.kubectl} port-forward service/{picture.name} 8000:80"
        yield "then ask it: " + curl.replace("{url}", "http://127.0.0.1:8000/v1")


def _filled(step: str, picture: Picture, problem: Problem | None) -> str:
    """A step with names in it; "" where it makes no sense here."""
    if picture.local:
        if "{k}" in step or "kubectl" in step or "{node}" in step:
            return ""
        step = step.replace(APPLY, f"edit {picture.extra.get('file', 'the file')}; it is carried out at once")
    if "{pod}" in step and not (problem and problem.pod):
        return ""
    if "{node}" in step and not (problem and problem.node):
        return ""
    pod, node = (problem.pod, problem.node) if problem else ("", "")
    text = step.format(name=picture.name, pod=pod, node=node, k=picture.kubectl)
    flags = "" if picture.local or picture.namespace == "default" else f" -n {picture.namespace}"
    return re.sub(r"`kvern (status|logs|explain) ", rf"`kvern \1{flags} ", text).replace("`", "")
