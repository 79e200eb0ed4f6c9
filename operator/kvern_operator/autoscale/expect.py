"""What the model expects of another number of replicas or another tensor size, from the numbers of the last decision.
Pure; `kvern explain --what-if` prints it. The formulas are those that the decisions use.

Of a size that has not run, a step is taken to be SPEEDUP ** log2(ratio) times faster, as the planner does.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvern_operator.autoscale.capacity import capacity, replica_rate, replicas_for, replicas_to_serve, running_itl
from kvern_operator.autoscale.facts import reachable
from kvern_operator.autoscale.layout import speedup
from kvern_operator.autoscale.terms import Limits, Line, Step, Traffic

SECOND = 1000.0  # milliseconds


@dataclass(frozen=True)
class Known:
    """The numbers of a decision (`inputs`), read back. `kv`: tokens of KV cache a replica, by tensor size; `planned`:
    what one of the present size is planned for; `step`: the limits of an engine's step. None, and 0 for `served` and
    `planned`: not known."""

    size: int
    gpus: int
    pipeline: int
    kv: Mapping[int, float]
    demand: float
    rate: float
    inputs: float
    outputs: float
    prefill: float
    line: Line | None
    served: float
    ttft: float | None
    planned: float
    step: Step


@dataclass(frozen=True)
class Expected:
    """Of `replicas` of tensor size `size`. `usage`: KV usage; `busy`: share of the requests a second that they can
    serve; `needed`: how many replicas the load needs at that size. None: not known. `itl`, `ttft` in seconds, inf
    where the load is too much."""

    size: int
    replicas: int
    engines: int
    gpus: int
    kv_tokens: float
    usage: float
    serves: float | None
    busy: float | None
    itl: float | None
    ttft: float | None
    needed: int
    binding: str  # what needs that many: kv, rate or slo


def read(inputs: Mapping[str, str], *, size: int, gpus: int, pipeline: int, kv: Mapping[int, float]) -> Known:
    """The numbers from status. Raises ValueError where those of the load are missing."""

    def number(name: str) -> float | None:
        text = inputs.get(name)
        return None if text is None else float(text.replace(",", ""))

    demand, rate = number("demandTokens"), number("requestsPerSecond")
    if demand is None or rate is None:
        raise ValueError("the last decision holds no numbers of the load")
    own, usual = number("kvTokensPerReplica"), Step()
    base, slope, ttft = number("itlBaseMs"), number("itlSlopeMs"), number("ttftP95Ms")
    return Known(
        size=size,
        gpus=gpus,
        pipeline=pipeline,
        kv={**kv, **({size: own} if own else {})},
        demand=demand,
        rate=rate,
        inputs=number("inputTokens") or 0.0,
        outputs=number("outputTokens") or 0.0,
        prefill=(number("prefillMs") or 0.0) / SECOND,
        line=None if base is None or slope is None else Line(base / SECOND, slope / SECOND),
        served=number("servedPerSecond") or 0.0,
        ttft=None if ttft is None else ttft / SECOND,
        planned=number("capacityTokens") or 0.0,
        step=Step(
            int(number("maxNumSeqs") or usual.max_num_seqs),
            int(number("maxNumBatchedTokens") or usual.max_num_batched_tokens),
        ),
    )


def expect(known: Known, limits: Limits, size: int, replicas: int) -> Expected:
    """The expectation. Raises KeyError where the KV cache of that size is not known."""
    tokens, speed = known.kv[size], speedup(size / known.size)
    engines = max(known.gpus // (size * known.pipeline), 1)
    ratio = engines / max(known.gpus // (known.size * known.pipeline), 1)
    serves = known.served * speed * ratio or None
    busy = known.rate / (serves * replicas) if serves and replicas else None
    line = known.line and Line(known.line.base / speed, known.line.slope / speed)
    prefill, step = known.prefill / speed, replace(known.step, engines=engines)
    traffic = Traffic(known.inputs, known.outputs, known.rate, prefill_seconds=prefill)
    seen = known.planned if size == known.size else 0.0
    needs = {"kv": replicas_for(known.demand, seen or capacity(limits, tokens, step, traffic, ()))}
    if serves:
        needs["rate"] = replicas_for(replicas_to_serve(known.rate / serves), 1.0)
    if line is not None and limits.itl_slo is not None and reachable(limits, line):
        each = replica_rate(limits.itl_slo, line, tokens, step, traffic)
        if each > 0:
            needs["slo"] = replicas_for(known.rate, each)
    binding = max(needs, key=lambda name: needs[name])
    return Expected(
        size=size,
        replicas=replicas,
        engines=engines,
        gpus=known.gpus * replicas,
        kv_tokens=tokens * replicas,
        usage=known.demand / (tokens * replicas) if replicas and tokens else math.inf,
        serves=serves and serves * replicas,
        busy=busy,
        itl=running_itl(line, prefill, known.outputs, known.rate / (engines * replicas)) if replicas else None,
        ttft=_ttft(prefill, busy, engines * replicas) if replicas else None,
        needed=max(needs[binding], 1),
        binding=binding,
    )


def _ttft(prefill: float, busy: float | None, engines: int) -> float | None:
    """Mean TTFT: the prompt and the wait for the ones before it, shared by all engines."""
    if busy is None or prefill <= 0:
        return None
    return math.inf if busy >= 1 else prefill * (1 + busy / (engines * (1 - busy)))
