"""decide(limits, view, memory) -> decision and memory: how many replicas shall run. Pure; the same arguments give the
same answer.

Every cycle each term says how many replicas it wants (demand for KV cache, queue, preemptions, the SLO's floor, TTFT);
the largest is taken, then bounds. Fewer replicas need more than that the terms want fewer: they must have wanted fewer,
with 15 % more load than there is, for the whole stabilization window, and latency must keep the SLO with 20 % to spare.
What is not known holds: missing or stale metrics never remove a replica.
"""

from dataclasses import replace

from kvern_operator.autoscale.capacity import RATE_SECONDS, unforeseen
from kvern_operator.autoscale.facts import PATIENCE, Facts, counted, facts_of, milliseconds, reachable, tokens
from kvern_operator.autoscale.inputs import inputs_of
from kvern_operator.autoscale.terms import Decision, Full, Kind, Limits, Memory, Replica, Term, View
from kvern_operator.autoscale.wants import SAMPLES, sizing, terms_of

SPARE = 0.85  # load over capacity that is still too much for one replica less
SLO_SPARE = 0.8  # of the SLO that latency may take with one replica less
PANIC_FACTOR = 2.0  # demand of the last seconds over that of the last minute
PANIC_SHORT, PANIC_LONG, PANIC_SECONDS = 6.0, 60.0, 60.0
SETTLE = 30.0  # seconds between two removals: the first one's effect is to be seen
AT_ONCE = 10  # of so many replicas one goes at a time
JUMPS_KEPT = 3600.0  # seconds for which a jump of the load is remembered
RATES_KEPT = 120.0  # seconds over which a rise is measured
FULL_KEPT = 10  # samples of saturation
GAP = 15.0  # seconds without anybody's load, after which what was seen before does not count


def decide(limits: Limits, view: View, memory: Memory) -> tuple[Decision, Memory]:
    """The decision of this cycle."""
    facts = facts_of(limits, view, memory)
    memory = _remember(limits, view, facts, memory)
    if limits.mode in ("Off", "External"):
        writer = "an HPA, KEDA or kubectl scale" if limits.mode == "External" else "autoscaling.mode Off"
        words = f"spec.replicas is {limits.replicas} ({writer})"
        return _decision(limits, view, facts, limits.replicas, limits.replicas, "given", words), memory
    decision = _bounded(limits, view, facts, memory)
    capacity_went = decision.kind in ("down", "zero")
    if limits.mode == "Internal" and decision.target > view.current:
        memory = replace(memory, last_up=view.now)
    elif limits.mode == "Internal" and capacity_went:
        memory = replace(memory, last_down=view.now)
    return decision, memory


# ---------------------------------------------------------------- what is known


def starts_work(replicas: tuple[Replica, ...], patience: float) -> bool:
    """Whether a replica has become ready after one was made that is overdue: then pods can start here, and the late one
    is alone in its trouble."""
    late = [r.since for r in replicas if not r.ready and r.since > patience]
    return any(r.ready and r.since < min(late, default=0.0) for r in replicas)


def _remember(limits: Limits, view: View, facts: Facts, memory: Memory) -> Memory:
    """What this cycle adds, before anything is decided from it: capacity seen is for the next one."""
    now, loads = view.now, facts.loads
    active = facts.busy or facts.silent > 0 or view.held is None or view.held.requests > 0
    # A request that came and went between two looks is in no load; the rate would remember it for a minute.
    active_at = now if active else max(memory.active_at, now - facts.traffic.quiet)
    history = [(t, d) for t, d in memory.demand if now - PANIC_LONG < t <= now]
    if loads or not facts.ready:
        history.append((now, facts.demand))
    waiting = sum(load.waiting for load in loads)
    queued = memory.queued + 1 if loads and waiting > limits.queue_target * len(loads) else 0
    late = limits.ttft_slo is not None and facts.traffic.ttft is not None and facts.traffic.ttft > limits.ttft_slo
    full = memory.full
    if queued >= SAMPLES:
        crowded = [load for load in loads if load.waiting >= limits.queue_target]
        mean = max(facts.traffic.mean_tokens, 1.0)
        full = (*full, *(Full(load.used_tokens, mean, load.speed) for load in crowded))[-FULL_KEPT:]
    memory = replace(
        memory,
        active_at=active_at,
        demand=tuple(history),
        queued=queued,
        slow=memory.slow + 1 if late else 0,
        full=full,
        rates=(*((t, r) for t, r in memory.rates if now - RATES_KEPT <= t < now), (now, facts.traffic.rate)),
        foreseen=_foreseen(view, facts, memory),
        jumps=_jumps(view, facts, memory),
        panic_until=now + PANIC_SECONDS if _panics(history, now) else memory.panic_until,
    )
    if facts.cap is not None and not facts.silent:
        seen = memory.seen_since if now - memory.seen_at <= GAP else now
        memory = replace(memory, seen_since=seen, seen_at=now, calm=_calm(limits, view, facts, memory))
    if facts.stuck or (facts.overdue and not starts_work(view.replicas, PATIENCE * view.start_seconds)):
        memory = replace(memory, overdue_until=now + limits.stabilization)
    return memory


def _foreseen(view: View, facts: Facts, memory: Memory) -> tuple[tuple[float, float], ...]:
    """What is expected now, beside what was expected since a start ago; nothing before a rate has been seen for long
    enough to expect anything."""
    kept = tuple((t, r) for t, r in memory.foreseen if view.now - view.start_seconds - GAP <= t < view.now)
    known = bool(memory.rates) and view.now - memory.rates[0][0] >= RATE_SECONDS
    return (*kept, (view.now, facts.ahead)) if known else kept


def _jumps(view: View, facts: Facts, memory: Memory) -> tuple[tuple[float, float], ...]:
    """The largest jump of the last hour stands first: entries that a later, larger one outlives are dropped."""
    kept = [(t, jump) for t, jump in memory.jumps if view.now - JUMPS_KEPT <= t <= view.now]
    jump = unforeseen(memory.foreseen, view.now, view.start_seconds, facts.traffic.rate)
    if jump <= 0:
        return tuple(kept)
    while kept and kept[-1][1] <= jump:
        kept.pop()
    return (*kept, (view.now, jump))


def _panics(history: list[tuple[float, float]], now: float) -> bool:
    """Demand over the last seconds is twice that over the last minute."""
    short = [d for t, d in history if now - t < PANIC_SHORT]
    if not short or history[0][0] > now - PANIC_LONG / 2:
        return False
    long = sum(d for _, d in history) / len(history)
    return long > 0 and sum(short) / len(short) >= PANIC_FACTOR * long


def _calm(limits: Limits, view: View, facts: Facts, memory: Memory) -> tuple[tuple[float, int], ...]:
    """The window of what a removal would have to leave: entries that a later, larger one outlives are dropped."""
    now = view.now
    kept = [(t, n) for t, n in memory.calm if now - limits.stabilization <= t <= now]
    terms = sizing(limits, view, facts, 1 / SPARE) + terms_of(limits, view, facts, memory)
    needed = max((term.wanted for term in terms), default=0)
    while kept and kept[-1][1] <= needed:
        kept.pop()
    return (*kept, (now, needed))


# ---------------------------------------------------------------- the decision


def _bounded(limits: Limits, view: View, facts: Facts, memory: Memory) -> Decision:
    """The decision in modes Internal and Recommend."""
    if limits.unknown:
        words = f"nothing is decided: {limits.unknown}"
        return _decision(limits, view, facts, view.current, view.current, "hold", words, "namespaceBudget")
    most, bound = limits.most()
    least, current = limits.least(), view.current
    if not least <= current <= most:
        target = min(max(current, least), most)
        which = bound if current > most else "minReplicas"
        words = f"{counted(current, 'replica is', 'replicas are')} outside of {least}..{most}"
        return _decision(limits, view, facts, target, current, "bounds", words, which)
    if current == 0:
        return _from_zero(limits, view, facts, most, bound)
    if _idle(limits, view, facts, memory):
        words = f"no request for {view.now - memory.active_at:.0f} s (idleSeconds is {limits.idle:.0f})"
        return _decision(limits, view, facts, 0, 0, "zero", words)
    terms = terms_of(limits, view, facts, memory)
    strongest = max(terms, key=lambda term: term.wanted, default=None)
    wanted = max(strongest.wanted if strongest else 0, least, 1)
    stuck = _fallen_back(view, facts, memory, wanted)
    if stuck is not None and stuck < current:
        target = min(max(stuck, least, 1), current)
        words = _overdue_words(view, facts)
        if target < current:
            return _decision(limits, view, facts, target, wanted, "bounds", words, "unschedulable", terms)
    if strongest is not None and wanted > current:
        target, limit = (most, bound) if wanted > most else (wanted, None)
        if stuck is not None and target > max(stuck, current):
            target, limit = max(stuck, current), "unschedulable" if facts.stuck or not facts.overdue else "slowStart"
        kind: Kind = "up" if target > current else "hold"
        words = f"{strongest.name}: {strongest.words}"
        return _decision(limits, view, facts, target, wanted, kind, words, limit, terms)
    return _down_or_hold(limits, view, facts, memory, terms, wanted)


def _from_zero(limits: Limits, view: View, facts: Facts, most: int, bound: str) -> Decision:
    """No replica is wanted so far: only held requests wake the service."""
    if view.held is None:
        words = "a router gave no metrics, so it is not known whether requests are held"
        return _decision(limits, view, facts, 0, 0, "hold", words, "missingMetrics")
    if view.held.requests <= 0:
        return _decision(limits, view, facts, 0, 0, "hold", "no request is held")
    # How much a replica takes is not known before one runs: one is started, and the next cycles see.
    words = f"{counted(view.held.requests, 'request is', 'requests are')} held at the router"
    term = Term("held", 1, words)
    return _decision(limits, view, facts, min(1, most), 1, "wake", words, None if most else bound, [term])


def _idle(limits: Limits, view: View, facts: Facts, memory: Memory) -> bool:
    known = view.held is not None and facts.silent == 0
    silence = view.now - memory.active_at
    return limits.minimum == 0 and known and silence > 0 and silence >= limits.idle


def _fallen_back(view: View, facts: Facts, memory: Memory, wanted: int) -> int | None:
    """The most replicas to want while pods do not become ready; None where nothing is known against more. Pods that
    found no node are given up; those that load are left alone."""
    if view.now > memory.overdue_until:
        return None
    return facts.ready + facts.young + facts.loading


def _overdue_words(view: View, facts: Facts) -> str:
    late = PATIENCE * view.start_seconds
    who = f"{counted(facts.stuck, 'pod', 'pods')} found no node within {late:.0f} s"
    return f"{who} (twice the usual start): no supply is to be expected of that"


def _down_or_hold(limits: Limits, view: View, facts: Facts, memory: Memory, terms: list[Term], wanted: int) -> Decision:
    """One replica less, or the reason why not."""
    current = view.current
    why, limit = _why_not_less(limits, view, facts, memory, terms)
    if why:
        return _decision(limits, view, facts, current, wanted, "hold", why, limit, terms)
    needed = memory.calm[0][1]
    few, tens = counted(needed, "replica", "replicas"), "" if current < 2 * AT_ONCE else " of each ten"
    words = (
        f"{few} would have been enough for {limits.stabilization:.0f} s, with 15 % to spare; one goes at a time{tens}"
    )
    left = current - _fewer(limits, current, needed)
    return _decision(limits, view, facts, left, wanted, "down", words, None, terms)


def _why_not_less(
    limits: Limits, view: View, facts: Facts, memory: Memory, terms: list[Term]
) -> tuple[str, str | None]:
    """(Why no replica may go, what limits); two times nothing where one may."""
    current, now, window = view.current, view.now, limits.stabilization
    least = max(limits.least(), 1)
    if facts.silent or view.held is None or (facts.ready and not facts.loads):
        who = f"{facts.silent} of {facts.ready} replicas" if facts.silent else "a router"
        return f"{who} gave no metrics: nothing is removed", "missingMetrics"
    # One that loads for too long is no supply that is to come: it keeps nobody, and goes first.
    coming = current - facts.ready - facts.overdue
    if coming > 0:
        return f"{counted(coming, 'replica is', 'replicas are')} not ready yet", None
    if view.changing:
        return "the layout is being changed: nothing is removed", "layoutChange"
    if current <= least:
        return _steady_words(terms, current), None
    if now < memory.panic_until:
        return "demand doubled within a minute: nothing is removed for 60 s", "panic"
    if not memory.calm or facts.cap is None:
        return "nothing is known of the load yet", None
    needed = memory.calm[0][1]
    if needed > current - 1:
        return _steady_words(terms, current), None
    if memory.queued:
        return "a queue has begun to form", None
    since = min(now - memory.seen_since, now - memory.last_up)
    if since < window:
        return f"{needed} would do, but only {since:.0f} s of {window:.0f} s have been seen", "stabilization"
    if now - memory.last_down < SETTLE:
        return f"{needed} would do; the last removal is {now - memory.last_down:.0f} s ago", "settling"
    return _too_tight(limits, view, facts, min(current - _fewer(limits, current, needed), facts.ready)), None


def _fewer(limits: Limits, current: int, needed: int) -> int:
    """How many go at once."""
    return min(max(current // AT_ONCE, 1), current - max(needed, limits.least(), 1))


def _too_tight(limits: Limits, view: View, facts: Facts, left: int) -> str:
    """What would break where so many ready replicas are left; "" for nothing."""
    if facts.demand >= left * facts.kv_tokens:
        holds = counted(left, "replica holds", "replicas hold")
        return f"{holds} {tokens(left * facts.kv_tokens)} tokens, demand is {tokens(facts.demand)}"
    # Clients that ask again only when they have been answered come as slowly as they are served: their rate says
    # nothing of a crowd.
    crowd = sum(load.running + load.waiting for load in facts.loads)
    if crowd > (rows := left * view.step.engines * view.step.max_num_seqs):
        runs = counted(left, "replica runs", "replicas run")
        return f"{runs} at most {rows} requests at a time, {counted(crowd, 'runs or waits', 'run or wait')} now"
    grown, who = facts.ready / left, f"with {counted(left, 'replica', 'replicas')}"
    running = sum(load.running for load in facts.loads) / max(len(facts.loads), 1) / view.step.engines
    itl = facts.line.at(running * grown) if facts.line else facts.traffic.itl and facts.traffic.itl * grown
    if limits.itl_slo is not None and itl is not None and running > 0 and itl > SLO_SPARE * limits.itl_slo:
        unreachable = facts.line is not None and not reachable(limits, facts.line)
        if not unreachable:
            return f"{who} ITL would be {milliseconds(itl)}, over 80 % of {milliseconds(limits.itl_slo)}"
    ttft = facts.traffic.ttft
    if limits.ttft_slo is not None and ttft is not None and ttft * grown > SLO_SPARE * limits.ttft_slo:
        late, most = milliseconds(ttft * grown), milliseconds(limits.ttft_slo)
        return f"{who} TTFT would be {late}, over 80 % of {most}"
    return ""


# ---------------------------------------------------------------- words


def _steady_words(terms: list[Term], current: int) -> str:
    if not terms:
        return f"{counted(current, 'replica is', 'replicas are')} enough: no load"
    strongest = max(terms, key=lambda term: term.wanted)
    return f"{counted(current, 'replica is', 'replicas are')} right: {strongest.name}: {strongest.words}"


def _decision(
    limits: Limits,
    view: View,
    facts: Facts,
    target: int,
    wanted: int,
    kind: Kind,
    reason: str,
    limited_by: str | None = None,
    terms: list[Term] | None = None,
) -> Decision:
    return Decision(
        time=view.now,
        current=view.current,
        target=target,
        wanted=wanted,
        kind=kind,
        reason=reason,
        limited_by=limited_by,
        terms=tuple(terms or ()),
        inputs=inputs_of(limits, view, facts),
    )
