"""The terms: each a reason for a number of replicas, with its arithmetic in words. Pure; docs/autoscaling.md explains
each under its name."""

from dataclasses import dataclass

from kvern_operator.autoscale.capacity import (
    best_batch,
    full_rate,
    prompts_share,
    replica_rate,
    replicas_for,
    replicas_to_serve,
)
from kvern_operator.autoscale.facts import Facts, counted, milliseconds, reachable, tokens
from kvern_operator.autoscale.terms import Limits, Memory, Term, View

RATE_SPARE = 0.4  # part of what is to spare for one replica less: the window's highest rate holds the noise already
QUEUE_SETTLE, TTFT_SETTLE = 30.0, 60.0  # seconds since the last replica came (TTFT is one of the last minute)
BACKLOG_SECONDS = 30.0  # in which a queue is to be worked off
WAITS = 0.5  # requests a replica: below it a TTFT is one of the past
LEAST = 1e-6  # prompts at a time, requests a second: below it they say nothing of what a replica can serve
SAMPLES = 2  # in a row, before a queue or a TTFT counts


@dataclass(frozen=True)
class Served:
    """Requests a second of one replica: that it can serve beside its answers, and of a queue that is worked off.
    `known`: how that is known."""

    each: float
    clears: float
    known: str


def sizing(limits: Limits, view: View, facts: Facts, factor: float = 1.0) -> list[Term]:
    """Terms that size the service for `factor` times its load. Replicas without metrics are neither load nor room."""
    terms: list[Term] = []
    if facts.cap is None:
        return terms
    amount = facts.demand * factor
    if amount > 0:
        words = f"demand of {tokens(amount)} tokens / {tokens(facts.cap)} a replica = {amount / facts.cap:.2f}"
        terms.append(Term("kv", facts.silent + replicas_for(amount, facts.cap), words))
    rate = facts.traffic.rate * (1 + (factor - 1) * RATE_SPARE)
    if limits.itl_slo is not None and facts.line is not None and rate > 0 and reachable(limits, facts.line):
        each = replica_rate(limits.itl_slo, facts.line, facts.kv_tokens, view.step, facts.traffic)
        batch = best_batch(limits.itl_slo, facts.line, facts.kv_tokens, view.step, facts.traffic)
        words = (
            f"{rate:.2f} requests/s / {each:.2f} a replica (80 % of {batch:.0f} running, which keep ITL at "
            f"{milliseconds(limits.itl_slo)}) = {rate / each:.2f}"
        )
        terms.append(Term("slo", facts.silent + replicas_for(rate, each), words))
    served = served_by(limits, view, facts)
    if served is not None and rate > 0:
        backlog = _backlog(view, facts, served.each) / BACKLOG_SECONDS
        coming = max(rate, facts.ahead)
        used = coming / served.each + backlog / served.clears
        needed = replicas_to_serve(used, facts.jump / served.each)
        words = (
            f"{coming + backlog:.2f} requests/s ({rate:.2f} come, {facts.ahead:.2f} expected, {backlog:.2f} for the "
            f"queue) / {served.each:.2f} a replica ({served.known}) = {used:.2f}, with headroom {needed:.2f}"
        )
        terms.append(Term("rate", facts.silent + replicas_for(needed, 1.0), words))
    return terms


def served_by(limits: Limits, view: View, facts: Facts) -> Served | None:
    """How much a replica can serve; None where nothing says it yet."""
    seen = full_rate(facts.full, facts.traffic)
    if seen is not None and seen >= LEAST:
        return Served(seen, seen, "what one served while requests waited")
    engines, traffic = len(facts.loads) * view.step.engines, facts.traffic
    if limits.ttft_slo is None or not engines or traffic.rate * traffic.prefill_seconds < LEAST:
        return None
    share = prompts_share(traffic, engines)
    known = f"prompts of {traffic.prefill_seconds:.2f} s take {share:.0%} of what it can"
    each = traffic.rate / len(facts.loads) / share
    # Prompts that share steps with answers look slower than a replica is that has a queue to work off.
    return Served(each, max(each, view.step.engines / traffic.prefill_seconds), known)


def _backlog(view: View, facts: Facts, each: float) -> float:
    """Requests that wait, and those that will before a replica that starts now, or loads already, is ready."""
    coming = [r.since for r in view.replicas if not r.ready and r.since <= view.start_seconds]
    until = view.start_seconds - max(coming, default=0.0)
    short = facts.ahead - each * len(facts.loads)
    return sum(load.waiting for load in facts.loads) + max(short, 0.0) * until


def terms_of(limits: Limits, view: View, facts: Facts, memory: Memory) -> list[Term]:
    """All reasons for a number of replicas."""
    terms = sizing(limits, view, facts)
    if facts.cap is None:
        return terms
    room = (facts.ready - facts.silent) * facts.cap
    more = facts.ready + max(replicas_for(facts.demand - room, facts.cap), 1)
    waiting = sum(load.waiting for load in facts.loads)
    # A replica that has just come has not had the time to show what it does about a queue.
    youngest = min((r.since for r in view.replicas if r.ready), default=0.0)
    if memory.queued >= SAMPLES and youngest >= QUEUE_SETTLE:
        who = counted(waiting, "request waits", "requests wait")
        words = f"{who}, over {limits.queue_target:g} a replica for {memory.queued} samples"
        terms.append(Term("queue", more, words))
    full = [x for x in facts.loads if x.preempting and x.used_tokens > limits.kv_target * x.kv_tokens]
    if full:
        usage = max(x.used_tokens / x.kv_tokens for x in full)
        terms.append(Term("preemptions", more, f"requests are preempted at a KV usage of {usage:.2f}"))
    waits = waiting >= WAITS * len(facts.loads) and youngest >= TTFT_SETTLE
    if memory.slow >= SAMPLES and limits.ttft_slo is not None and facts.traffic.ttft is not None and waits:
        late, most = milliseconds(facts.traffic.ttft), milliseconds(limits.ttft_slo)
        words = f"TTFT p95 {late} is over {most} for {memory.slow} samples"
        terms.append(Term("ttft", facts.ready + 1, words))
    itl, known = facts.traffic.itl, facts.line is not None
    crowd = any(x.running > 8 * view.step.engines for x in facts.loads)
    if limits.itl_slo is not None and itl is not None and itl > limits.itl_slo and crowd and not known:
        most = milliseconds(limits.itl_slo)
        words = f"ITL p95 {milliseconds(itl)} is over {most}, and how it follows load is not known yet"
        terms.append(Term("itl", facts.ready + 1, words))
    return terms
