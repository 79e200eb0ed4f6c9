"""How many tokens a service's requests are, how many a replica takes, and how many requests a second keep the SLO. Pure
arithmetic; what follows from it is decided in replicas.py.

The terms are those of docs/autoscaling.md, under the same names.
"""

import math
from collections.abc import Iterable, Sequence

from kvern_operator.autoscale.terms import Full, Held, Limits, Line, Load, Step, Traffic

FULL_SHARE = 0.93  # of what replicas can serve that is planned for at most
HEADROOM = 0.3  # replicas beside it: load comes in clumps, which more replicas even out
JUMP_SHARE = 0.1  # of the replicas that may stand by for the next jump of the load, where that is above one
SLO_SHARE = 0.8  # of the largest batch that keeps the ITL: what a replica is planned for
_UNKNOWN = Traffic(input_tokens=512.0, output_tokens=256.0)  # before any request has ended
_ALIKE = 1.25  # what was seen while saturated holds for requests of about the same length
RATE_SECONDS = 60.0  # that a rate is counted over
_ENDLESS = 1e6  # replicas: more than any bound
_SEEN = 3  # samples of saturation before they count


def shape_of(traffic: Traffic | None) -> Traffic:
    """The traffic; what is assumed before any is known."""
    return traffic or _UNKNOWN


def demand(loads: Iterable[Load], held: Held | None, traffic: Traffic) -> float:
    """D, tokens: in use, waiting, preempted (demand that the pool could not hold), and held at routers."""
    total = 0.0
    for load in loads:
        fresh = max(load.waiting - load.preempted, 0.0)
        total += load.used_tokens + fresh * traffic.input_tokens + load.preempted * traffic.mean_tokens
    if held is not None and held.requests:
        inputs = held.input_tokens or held.requests * traffic.input_tokens
        total += inputs * (1 - traffic.prefix_hits) + held.requests * traffic.output_tokens
    return total


def step_tokens(step: Step, traffic: Traffic) -> float:
    """Tokens that a replica holds when its steps, not its memory, are full: each output token takes one place of a
    step's budget, each input token as well."""
    length = traffic.input_tokens + traffic.output_tokens
    share = traffic.output_tokens / length if length else 1.0
    rows = min(step.max_num_batched_tokens * share, step.max_num_seqs)
    return step.engines * max(rows, 1.0) * max(traffic.mean_tokens, 1.0)


def capacity(limits: Limits, kv_tokens: float, step: Step, traffic: Traffic, full: Sequence[Full]) -> float:
    """cap, tokens a replica: kvTarget of its KV cache, or what it held while saturated, or what its steps can hold, if
    that is less. Where it is known how much a saturated replica computes, `full_rate` bounds it and memory is memory:
    a queue of prompts is many tokens and few seconds."""
    if full_rate(full, traffic) is not None:
        return max(limits.kv_target * kv_tokens, 1.0)
    seen = [f.tokens for f in _alike(full, traffic)]
    k2 = sum(seen) / len(seen) if len(seen) >= _SEEN else step_tokens(step, traffic)
    return max(min(limits.kv_target * kv_tokens, k2), 1.0)


def full_rate(full: Sequence[Full], traffic: Traffic) -> float | None:
    """Requests a second that a replica served while requests waited for it. Prompts fill the device long before they
    fill its memory, and an engine that keeps its ITL lets the queue tell. None: too little has been seen."""
    seen = [f.speed for f in _alike(full, traffic) if f.speed > 0]
    if len(seen) < _SEEN:
        return None
    return sum(seen) / len(seen) / traffic.computed_tokens


def replicas_to_serve(used: float, jump: float = 0.0) -> float:
    """Replicas, not rounded, so that a load that keeps `used` of them busy leaves no queue of more than moments. Where
    the load has jumped by `jump` replicas of late, as much stands by for the next time, up to one, or a tenth."""
    headroom = min(max(jump, HEADROOM), max(1.0, JUMP_SHARE * used))
    return min(max(used + headroom, used / FULL_SHARE), _ENDLESS)


def unforeseen(foreseen: Sequence[tuple[float, float]], now: float, lead: float, rate: float) -> float:
    """Requests a second beyond chance that were not expected `lead` seconds ago; 0 where nothing was."""
    expected = next((amount for at, amount in reversed(foreseen) if at <= now - lead), None)
    if expected is None:
        return 0.0
    return max(rate - 2 * math.sqrt(max(rate, 0.0) / RATE_SECONDS) - expected, 0.0)


def prompts_share(traffic: Traffic, engines: int) -> float:
    """Share of what `engines` can compute of prompts that they do, below 1, from how many prompts are on their way at
    a time.

    That number is rate x seconds of a prompt (Little's law). Prompts that overlap take longer together, so that it
    grows faster than the share r: n = r + r^2 / (2 engines (1 - r)), as in a queue of like prompts before engines that
    are chosen by load (M/D/c in heavy traffic); solved for r here.
    """
    number = traffic.rate * traffic.prefill_seconds / max(engines, 1)
    less = 1 - 0.5 / max(engines, 1)
    return 2 * number / (1 + number + math.sqrt((1 + number) ** 2 - 4 * less * number))


def ahead(rates: Sequence[tuple[float, float]], lead: float, recent: float = 0.0) -> float:
    """Requests a second to expect in `lead` seconds, when a replica that is started now is ready.

    `rates` are counts over a minute, so late by half of one: a jump shows in `recent`, the rate of the last seconds as
    far as it is no chance. A rise is carried on only if it was there in both halves of the time seen: a jump is over.
    """
    if not rates:
        return 0.0
    (then, before), (now, rate) = rates[0], rates[-1]
    base = max(rate, recent)
    if now - then < RATE_SECONDS:
        return base
    middle = min(rates, key=lambda entry: abs(entry[0] - (then + now) / 2))[1]
    chance = math.sqrt(2 * max(rate, 0.0) / RATE_SECONDS)
    rise = max(min(rate - before - chance, 2 * (middle - before), 2 * (rate - middle)), 0.0)
    return min(base + rise / (now - then) * (lead + RATE_SECONDS / 2), 2 * base)


def _alike(full: Sequence[Full], traffic: Traffic) -> list[Full]:
    mean = max(traffic.mean_tokens, 1.0)
    return [f for f in full if 1 / _ALIKE <= f.mean_tokens / mean <= _ALIKE]


def best_batch(slo: float, line: Line, kv_tokens: float, step: Step, traffic: Traffic) -> float:
    """b*, requests running on a replica at which the ITL is at its SLO, or memory or rows are full."""
    memory = kv_tokens / max(traffic.mean_tokens, 1.0)
    return min(line.running_at(slo) * step.engines, memory, float(step.max_num_seqs * step.engines))


def replica_rate(slo: float, line: Line, kv_tokens: float, step: Step, traffic: Traffic) -> float:
    """Requests a second of a replica that is planned for 80 % of b*."""
    batch = best_batch(slo, line, kv_tokens, step, traffic)
    itl = line.at(batch / step.engines)
    seconds = traffic.prefill_seconds + traffic.output_tokens * itl
    return SLO_SHARE * batch / max(seconds, 1e-6)


def running_itl(line: Line | None, prefill: float, outputs: float, rate: float) -> float | None:
    """ITL of an engine that gets `rate` requests a second (Little's law, solved for how many run)."""
    if line is None:
        return None
    left = 1 - rate * outputs * line.slope
    return math.inf if left <= 0 else line.at(rate * (prefill + outputs * line.base) / left)


def replicas_for(amount: float, each: float) -> int:
    """ceil(amount / each), without a replica for a rounding error."""
    return max(math.ceil(min(amount / each, _ENDLESS) - 1e-9), 0)
