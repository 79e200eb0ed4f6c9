"""`kvern explain NAME --what-if tensor=2,replicas=3`: what the model expects of another size or number, beside what
runs now. Pure: a Picture in, blocks out; the arithmetic is the operator's own (autoscale/expect.py).
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from kvern_cli.picture import Picture
from kvern_cli.render import Block, Cell, Line, Pairs, Style, Table
from kvern_cli.shared import CONFIG_MAP, Shared
from kvern_cli.words import age, count
from kvern_operator.autoscale.expect import Expected, Known, expect, read
from kvern_operator.autoscale.terms import Limits

KEYS = ("tensor", "replicas")
MOST_REPLICAS = 10_000
EXAMPLE = "--what-if tensor=2,replicas=3"


class WhatIfError(Exception):
    """What was asked cannot be answered; the text says why, and what can be."""


def parse(text: str) -> dict[str, int]:
    """tensor and replicas, one or both, from "tensor=2,replicas=3". Raises WhatIfError."""
    found: dict[str, int] = {}
    for part in text.split(","):
        key, sign, value = part.strip().partition("=")
        if not sign or key not in KEYS:
            raise WhatIfError(
                f"{part.strip() or 'nothing'!r} is neither tensor=SIZE nor replicas=NUMBER; write {EXAMPLE}"
            )
        if key in found:
            raise WhatIfError(f"{key} is given twice; write it once")
        if not value.isdecimal() or int(value) > MOST_REPLICAS or (key == "tensor" and int(value) < 1):
            least = 1 if key == "tensor" else 0
            raise WhatIfError(f"{key}={value}: a whole number from {least} to {MOST_REPLICAS} is wanted")
        found[key] = int(value)
    return found


def limits_of(spec: Mapping[str, Any]) -> Limits:
    """spec.autoscaling and resources, as the decisions read them."""
    scaling, resources = spec.get("autoscaling") or {}, spec.get("resources") or {}
    slo = scaling.get("slo") or {}
    gpus = int(resources.get("gpusPerPod", 1)) * int(resources.get("nodesPerReplica", 1))
    least = int(scaling.get("minReplicas", 1))
    budget = scaling.get("gpuBudget")
    return Limits(
        minimum=least,
        maximum=int(scaling.get("maxReplicas") or MOST_REPLICAS),
        gpus=gpus,
        gpu_budget=None if budget is None else int(budget),
        kv_target=float(scaling.get("kvTarget", "0.80")),
        itl_slo=_seconds(slo.get("itlP95Ms")),
        ttft_slo=_seconds(slo.get("ttftP95Ms")),
    )


def _seconds(value: Any) -> float | None:
    return None if value is None else float(value) / 1000


def what_if(picture: Picture, asked: Mapping[str, int]) -> list[Block]:
    """The answer. Raises WhatIfError where the service's status does not hold what it takes."""
    known, current = _known(picture)
    limits = limits_of(picture.spec)
    size, replicas = asked.get("tensor", known.size), asked.get("replicas", current)
    if size not in known.kv:
        sizes = ", ".join(str(s) for s in sorted(known.kv))
        raise WhatIfError(f"tensor={size}: the pods of {picture.name} can have the sizes {sizes} and no other")
    now, then = expect(known, limits, known.size, current), expect(known, limits, size, replicas)
    troubles = [*_troubles(picture, known, limits, then), *_shared_troubles(picture.shared, now, then)]
    headline, style = _headline(picture, limits, then, troubles)
    rows = tuple(_rows(known, limits, now, then, picture.shared))
    made = picture.status["autoscaling"]["lastDecision"]["time"]
    notes = tuple(_notes(known, then, age(made, picture.now), picture.shared))
    said: list[Block] = [Pairs((("Because", tuple(Cell(text, "bad") for text in troubles)),))] if troubles else []
    return [
        Line(Cell(headline, style)),
        *said,
        Table(("", "NOW", "WHAT IF", "BOUND"), rows),
        Pairs((("Known", tuple(Cell(text, "dim") for text in notes)),)),
    ]


def _name(made: Expected) -> str:
    return f"tensor={made.size}, replicas={made.replicas}"


def _known(picture: Picture) -> tuple[Known, int]:
    status, spec = picture.status, picture.spec
    scaling, layout = status.get("autoscaling") or {}, status.get("parallelism") or {}
    last = scaling.get("lastDecision") or {}
    resources = spec.get("resources") or {}
    devices = int(resources.get("gpusPerPod", 1)) * int(resources.get("nodesPerReplica", 1))
    pipeline = int(((spec.get("parallelism") or {}).get("pipeline") or {}).get("size", 1))
    size = int(layout.get("current") or layout.get("target") or max(devices // pipeline, 1))
    feasible = {int(f["size"]): float(f["kvTokens"]) for f in layout.get("feasible") or ()}
    try:
        found = read(last.get("inputs") or {}, size=size, gpus=max(devices, size), pipeline=pipeline, kv=feasible)
    except ValueError:
        mode = (spec.get("autoscaling") or {}).get("mode", "Off")
        hint = "set it to Recommend: nothing is changed then, and what would be is said" if mode == "Off" else ""
        hint = hint or "a ready replica and a minute of metrics are needed first"
        text = f"nothing is known of the load of {picture.name} yet (autoscaling.mode is {mode}); {hint}"
        raise WhatIfError(text) from None
    if not found.kv:
        raise WhatIfError(
            f"no replica of {picture.name} has said yet how large its KV cache is; one must be ready first"
        )
    return found, int(status.get("readyReplicas", 0)) or int(status.get("desiredReplicas", 0))


def _headline(picture: Picture, limits: Limits, then: Expected, troubles: list[str]) -> tuple[str, Style]:
    what = f"{picture.name} with {_name(then)}"
    if troubles:
        return f"{what}: no, for {count(len(troubles), 'reason')}.", "bad"
    aims = [name for name, aim in (("ITL", limits.itl_slo), ("TTFT", limits.ttft_slo)) if aim is not None]
    kept = (
        f"keeps the SLO of {' and '.join(aims)}" if aims else "carries the load (spec.autoscaling.slo asks for nothing)"
    )
    spare = then.replicas - then.needed
    more = f", with {count(spare, 'replica')} to spare" if spare else ", with none to spare"
    return f"{what}: it {kept}{more}.", "good"


def _troubles(picture: Picture, known: Known, limits: Limits, then: Expected) -> Iterator[str]:
    """Why not, worst first."""
    most, bound = limits.most()
    if then.replicas < limits.least():
        yield f"It is not allowed: autoscaling.minReplicas is {limits.minimum}."
    if then.replicas > most:
        what = f"autoscaling.gpuBudget is {limits.gpu_budget}" if bound == "gpuBudget" else f"{bound} is {most}"
        yield f"It is not allowed: {what}, and it would take {count(then.gpus, 'GPU')}."
    tensor = (picture.spec.get("parallelism") or {}).get("tensor") or {}
    for key, wrong in (
        ("min", then.size < int(tensor.get("min") or 1)),
        ("max", then.size > int(tensor.get("max") or then.size)),
    ):
        if wrong:
            yield f"It is not allowed: parallelism.tensor.{key} is {tensor[key]}."
    for option in ((picture.status.get("parallelism") or {}).get("lastDecision") or {}).get("options") or ():
        if option["size"] == then.size and option.get("whyNot"):
            yield f"The planner would not choose size {then.size}: {option['whyNot']}."
    if then.replicas == 0:
        yield "Nobody would answer: routers hold what comes in until a replica is woken."
        return
    if then.needed > then.replicas:
        yield f"It is too little: the load needs {count(then.needed, 'replica')} of that size ({then.binding})."
    if limits.itl_slo is not None and then.itl is not None and then.itl > limits.itl_slo:
        yield f"ITL would be {_ms(then.itl)}, the SLO is {_ms(limits.itl_slo)}."
    if limits.ttft_slo is not None and then.ttft is not None and then.ttft > limits.ttft_slo:
        yield f"TTFT would be {_ms(then.ttft)}, the SLO is {_ms(limits.ttft_slo)}."


def _shared_troubles(shared: Shared | None, now: Expected, then: Expected) -> Iterator[str]:
    """What the namespace's budget says to it."""
    if shared is None or shared.gpus is None or then.gpus <= now.gpus:
        return
    more, free = then.gpus - now.gpus, shared.free(now.gpus)
    if then.gpus > shared.gpus:
        whole = f"the namespace has {count(shared.gpus, 'GPU')} in all (ConfigMap {CONFIG_MAP})"
        yield f"It is not allowed: {whole}, and it would take {then.gpus}."
    elif more > free:
        who = shared.lenders()
        lent = sum(o.gpus - o.least for o in who)
        begin = f"It would take {count(more, 'GPU')} more, and {free} of the namespace's {shared.gpus} are free"
        names = ", ".join(o.name for o in who)
        if more <= free + lent:
            yield f"{begin}: services of lower priority ({names}) would have to let go first."
            return
        others = ", ".join(f"{o.name} {o.gpus}" for o in shared.others)
        yield f"{begin} (ConfigMap {CONFIG_MAP}); the others have {others}, and must not give that many."


def _gpu_bound(limits: Limits, shared: Shared | None, now: Expected) -> str:
    found = [f"{limits.gpu_budget} (gpuBudget)"] if limits.gpu_budget is not None else []
    if shared is not None and shared.gpus is not None:
        found.append(f"{now.gpus + shared.free(now.gpus)} of the namespace's {shared.gpus}")
    return ", ".join(found)


def _rows(
    known: Known, limits: Limits, now: Expected, then: Expected, shared: Shared | None
) -> Iterator[tuple[Cell, ...]]:
    def row(label: str, before: str, after: str, allowed: str = "", bad: bool = False) -> tuple[Cell, ...]:
        same = before == after
        return (
            Cell(label, "strong"),
            Cell(before),
            Cell(after, "bad" if bad else "dim" if same else "strong"),
            Cell(allowed),
        )

    most = limits.most()[0]
    yield row("tensor size", str(now.size), str(then.size))
    range_ = f"{limits.least()} to {most}" if most < MOST_REPLICAS else f"{limits.least()} or more"
    yield row("replicas", str(now.replicas), str(then.replicas), range_, not limits.least() <= then.replicas <= most)
    yield row("engines", str(now.engines * now.replicas), str(then.engines * then.replicas))
    if limits.gpus:
        over = limits.gpu_budget is not None and then.gpus > limits.gpu_budget
        over = over or any(_shared_troubles(shared, now, then))
        yield row("GPUs", str(now.gpus), str(then.gpus), _gpu_bound(limits, shared, now), over)
    yield row("KV cache, tokens", f"{now.kv_tokens:,.0f}", f"{then.kv_tokens:,.0f}")
    target = f"{limits.kv_target:.0%} (kvTarget)"
    yield row("of it in demand", _share(now.usage), _share(then.usage), target, then.usage > limits.kv_target)
    if now.serves is not None or then.serves is not None:
        yield row("serves, requests/s", _figure(now.serves), _figure(then.serves), f"{known.rate:.2f} come")
        yield row("of it in use", _share(now.busy), _share(then.busy), "", (then.busy or 0.0) >= 1)
    for label, before, after, aim in (
        ("ITL, mean", now.itl, then.itl, limits.itl_slo),
        ("TTFT, mean", now.ttft, then.ttft, limits.ttft_slo),
    ):
        if after is not None or aim is not None:
            slo = f"{_ms(aim)} (SLO)" if aim is not None else ""
            yield row(label, _ms(before), _ms(after), slo, after is not None and aim is not None and after > aim)
    needs = f"{then.needed} ({then.binding})"
    yield row("the load needs", f"{now.needed} ({now.binding})", needs, "", then.needed > then.replicas)


def _notes(known: Known, then: Expected, old: str, shared: Shared | None) -> Iterator[str]:
    requests = f"{known.rate:.2f} requests/s of {known.inputs:.0f} + {known.outputs:.0f} tokens"
    yield f"From the numbers of the last decision, {old} ago: {requests}."
    if then.size != known.size:
        faster = "a step on twice the devices is taken to be 1.74 times as fast"
        yield f"Size {then.size} is computed from size {known.size}: {faster}."
    if shared is not None and shared.gpus is None:
        yield f"Not weighed: {shared.unknown}."
    missing = [
        name
        for name, value in (("how ITL follows load", known.line), ("what a replica can serve", known.served or None))
        if value is None
    ]
    if missing:
        yield f"Not known yet: {' and '.join(missing)}; it takes some load to see that."


def _share(value: float | None) -> str:
    return "-" if value is None else "too much" if math.isinf(value) else f"{value:.0%}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return (
        "grows without end"
        if math.isinf(value)
        else f"{value * 1000:.0f} ms"
        if value >= 0.01
        else f"{value * 1000:.1f} ms"
    )
