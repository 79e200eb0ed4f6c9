"""decide(limits, view, memory) -> decision and memory: how many replicas shall run. Pure; the same arguments give the
same answer.

Every cycle each term says how many replicas it wants (demand for KV cache, queue, preemptions, the SLO's floor, TTFT);
the largest is taken, then bounds. Fewer replicas need more than that the terms want fewer: they must have wanted fewer,
with 15 % more load than there is, for the whole stabilization window, and latency must keep the SLO with 20 % to spare.
What is not known holds: missing or stale metrics never remove a replica.
"""

from dataclasses import dataclass, replace

from kvern_operator.autoscale.capacity import (
    FULL_SHARE,
    ahead,
    best_batch,
    capacity,
    demand,
    full_rate,
    replica_rate,
    replicas_for,
    shape_of,
)
from kvern_operator.autoscale.terms import (
    Decision,
    Full,
    Kind,
    Limits,
    Line,
    Load,
    Memory,
    Replica,
    Term,
    Traffic,
    View,
)

RATE_SPARE = 0.4  # part of that for requests a second: the window's highest count holds the noise already
SPARE = 0.85  # load over capacity that is still too much for one replica less
SLO_SPARE = 0.8  # of the SLO that latency may take with one replica less
PANIC_FACTOR = 2.0  # demand of the last seconds over that of the last minute
PANIC_SHORT, PANIC_LONG, PANIC_SECONDS = 6.0, 60.0, 60.0
SETTLE = 30.0  # seconds between two removals: the first one's effect is to be seen
QUEUE_SETTLE, TTFT_SETTLE = 30.0, 60.0  # seconds since the last replica came (TTFT is one of the last minute)
RATES_KEPT = 120.0  # seconds over which a rise is measured
BACKLOG_SECONDS = 30.0  # in which a queue is to be worked off
PREFILL_SPARE = 0.7  # of that, with one replica less
PREFILLS = 0.8  # prompts that an engine computes at a time on average, above which the next ones wait
WAITS = 0.5  # requests a replica: below it a TTFT is one of the past
SAMPLES = 2  # in a row, before a queue or a TTFT counts
FULL_KEPT = 10  # samples of saturation
GAP = 15.0  # seconds without anybody's load, after which what was seen before does not count
PATIENCE = 2.0  # times the average start, after which a pod that is not ready is no supply any more
_UNREACHABLE = 0.9  # of the SLO that the ITL of a few requests may take: above it no number of replicas helps
_FEW = 1.0  # requests, for that question


@dataclass(frozen=True)
class _Facts:
    """The view, counted once. `silent`: ready, but without metrics."""

    loads: tuple[Load, ...]
    ready: int
    silent: int
    young: int
    loading: int  # overdue, and running: never killed while it loads
    stuck: int  # overdue, and without a node
    traffic: Traffic
    line: Line | None
    demand: float
    cap: float | None  # None: nothing is known yet
    full: tuple[Full, ...]  # as it was before this cycle
    ahead: float  # requests a second expected when a replica that starts now is ready
    kv_tokens: float

    @property
    def overdue(self) -> int:
        return self.loading + self.stuck

    @property
    def busy(self) -> bool:
        return any(load.running or load.waiting for load in self.loads)


def decide(limits: Limits, view: View, memory: Memory) -> tuple[Decision, Memory]:
    """The decision of this cycle."""
    facts = _facts(limits, view, memory)
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


def _facts(limits: Limits, view: View, memory: Memory) -> _Facts:
    ready = [r for r in view.replicas if r.ready]
    loads = tuple(r.load for r in ready if r.load is not None)
    pending = [r for r in view.replicas if not r.ready]
    overdue = [r for r in pending if r.since > PATIENCE * view.start_seconds]
    traffic = shape_of(view.traffic)
    kv_tokens = sum(load.kv_tokens for load in loads) / len(loads) if loads else 0.0
    return _Facts(
        loads=loads,
        ready=len(ready),
        silent=len(ready) - len(loads),
        young=len(pending) - len(overdue),
        loading=sum(not r.unschedulable for r in overdue),
        stuck=sum(r.unschedulable for r in overdue),
        traffic=traffic,
        line=view.line,
        demand=demand(loads, view.held, traffic),
        cap=capacity(limits, kv_tokens, view.step, traffic, memory.full) if loads else None,
        full=memory.full,
        ahead=ahead((*memory.rates, (view.now, traffic.rate)), view.start_seconds, traffic.recent),
        kv_tokens=kv_tokens,
    )


def starts_work(replicas: tuple[Replica, ...], patience: float) -> bool:
    """Whether a replica has become ready after one was made that is overdue: then pods can start here, and the late one
    is alone in its trouble."""
    late = [r.since for r in replicas if not r.ready and r.since > patience]
    return any(r.ready and r.since < min(late, default=0.0) for r in replicas)


def _remember(limits: Limits, view: View, facts: _Facts, memory: Memory) -> Memory:
    """What this cycle adds, before anything is decided from it: capacity seen is for the next one."""
    now, loads = view.now, facts.loads
    active = facts.busy or facts.silent > 0 or view.held is None or view.held.requests > 0
    active = active or (facts.traffic.rate > 0 and bool(loads))
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
        active_at=now if active else memory.active_at,
        demand=tuple(history),
        queued=queued,
        slow=memory.slow + 1 if late else 0,
        full=full,
        rates=(*((t, r) for t, r in memory.rates if now - RATES_KEPT <= t < now), (now, facts.traffic.rate)),
        panic_until=now + PANIC_SECONDS if _panics(history, now) else memory.panic_until,
    )
    if facts.cap is not None and not facts.silent:
        seen = memory.seen_since if now - memory.seen_at <= GAP else now
        memory = replace(memory, seen_since=seen, seen_at=now, calm=_calm(limits, view, facts, memory))
    if facts.overdue and not starts_work(view.replicas, PATIENCE * view.start_seconds):
        memory = replace(memory, overdue_until=now + limits.stabilization)
    return memory


def _panics(history: list[tuple[float, float]], now: float) -> bool:
    """Demand over the last seconds is twice that over the last minute."""
    short = [d for t, d in history if now - t < PANIC_SHORT]
    if not short or history[0][0] > now - PANIC_LONG / 2:
        return False
    long = sum(d for _, d in history) / len(history)
    return long > 0 and sum(short) / len(short) >= PANIC_FACTOR * long


def _calm(limits: Limits, view: View, facts: _Facts, memory: Memory) -> tuple[tuple[float, int], ...]:
    """The window of what a removal would have to leave: entries that a later, larger one outlives are dropped."""
    now = view.now
    kept = [(t, n) for t, n in memory.calm if now - limits.stabilization <= t <= now]
    terms = _sizing(limits, view, facts, 1 / SPARE) + _terms(limits, view, facts, memory)
    needed = max((term.wanted for term in terms), default=0)
    while kept and kept[-1][1] <= needed:
        kept.pop()
    return (*kept, (now, needed))


# ---------------------------------------------------------------- the terms


def _sizing(limits: Limits, view: View, facts: _Facts, factor: float = 1.0) -> list[Term]:
    """Terms that size the service for `factor` times its load. Replicas without metrics are neither load nor room."""
    terms: list[Term] = []
    if facts.cap is None:
        return terms
    amount = facts.demand * factor
    if amount > 0:
        words = f"demand of {_tokens(amount)} tokens / {_tokens(facts.cap)} a replica = {amount / facts.cap:.2f}"
        terms.append(Term("kv", facts.silent + replicas_for(amount, facts.cap), words))
    rate = facts.traffic.rate * (1 + (factor - 1) * RATE_SPARE)
    if limits.itl_slo is not None and facts.line is not None and rate > 0 and _reachable(limits, facts.line):
        each = replica_rate(limits.itl_slo, facts.line, facts.kv_tokens, view.step, facts.traffic)
        batch = best_batch(limits.itl_slo, facts.line, facts.kv_tokens, view.step, facts.traffic)
        words = (
            f"{rate:.2f} requests/s / {each:.2f} a replica (80 % of {batch:.0f} running, which keep ITL at "
            f"{_ms(limits.itl_slo)}) = {rate / each:.2f}"
        )
        terms.append(Term("slo", facts.silent + replicas_for(rate, each), words))
    served = full_rate(facts.full, facts.traffic)
    if served is not None and rate > 0:
        backlog = _backlog(view, facts, served) / BACKLOG_SECONDS
        total = max(rate, facts.ahead) + backlog
        words = (
            f"{total:.2f} requests/s ({rate:.2f} come, {facts.ahead:.2f} expected, {backlog:.2f} for the queue) / "
            f"{served:.2f} a replica (85 % of what one served while requests waited) = {total / served:.2f}"
        )
        terms.append(Term("rate", facts.silent + replicas_for(total, served), words))
    return terms


def _backlog(view: View, facts: _Facts, served: float) -> float:
    """Requests that wait, and those that will before a replica that starts now, or loads already, is ready."""
    coming = [r.since for r in view.replicas if not r.ready and r.since <= view.start_seconds]
    until = view.start_seconds - max(coming, default=0.0)
    short = facts.ahead - served / FULL_SHARE * len(facts.loads)
    return sum(load.waiting for load in facts.loads) + max(short, 0.0) * until


def _reachable(limits: Limits, line: Line) -> bool:
    return limits.itl_slo is None or line.at(_FEW) <= _UNREACHABLE * limits.itl_slo


def _terms(limits: Limits, view: View, facts: _Facts, memory: Memory) -> list[Term]:
    """All reasons for a number of replicas."""
    terms = _sizing(limits, view, facts)
    if facts.cap is None:
        return terms
    room = (facts.ready - facts.silent) * facts.cap
    more = facts.ready + max(replicas_for(facts.demand - room, facts.cap), 1)
    waiting = sum(load.waiting for load in facts.loads)
    # A replica that has just come has not had the time to show what it does about a queue.
    youngest = min((r.since for r in view.replicas if r.ready), default=0.0)
    if memory.queued >= SAMPLES and youngest >= QUEUE_SETTLE:
        words = f"{waiting:.0f} requests wait, over {limits.queue_target:g} a replica for {memory.queued} samples"
        terms.append(Term("queue", more, words))
    full = [x for x in facts.loads if x.preempting and x.used_tokens > limits.kv_target * x.kv_tokens]
    if full:
        usage = max(x.used_tokens / x.kv_tokens for x in full)
        terms.append(Term("preemptions", more, f"requests are preempted at a KV usage of {usage:.2f}"))
    waits = waiting >= WAITS * len(facts.loads) and youngest >= TTFT_SETTLE
    if memory.slow >= SAMPLES and limits.ttft_slo is not None and facts.traffic.ttft is not None and waits:
        words = f"TTFT p95 {_ms(facts.traffic.ttft)} is over {_ms(limits.ttft_slo)} for {memory.slow} samples"
        terms.append(Term("ttft", facts.ready + 1, words))
    prompts = _prompts(limits, view, facts)
    if prompts > PREFILLS and youngest >= TTFT_SETTLE:
        words = f"{prompts:.2f} prompts at a time an engine, over {PREFILLS}: the next ones wait"
        terms.append(Term("prefill", facts.ready + 1, words))
    itl, known = facts.traffic.itl, facts.line is not None
    crowd = any(x.running > 8 * view.step.engines for x in facts.loads)
    if limits.itl_slo is not None and itl is not None and itl > limits.itl_slo and crowd and not known:
        words = f"ITL p95 {_ms(itl)} is over {_ms(limits.itl_slo)}, and how it follows load is not known yet"
        terms.append(Term("itl", facts.ready + 1, words))
    return terms


def _prompts(limits: Limits, view: View, facts: _Facts) -> float:
    """Prompts that an engine computes at a time; 0 where that does not matter, or something better is known."""
    if limits.ttft_slo is None or full_rate(facts.full, facts.traffic) is not None:
        return 0.0
    return facts.traffic.rate * facts.traffic.prefill_seconds / max(len(facts.loads) * view.step.engines, 1)


# ---------------------------------------------------------------- the decision


def _bounded(limits: Limits, view: View, facts: _Facts, memory: Memory) -> Decision:
    """The decision in modes Internal and Recommend."""
    most, bound = limits.most()
    least, current = limits.least(), view.current
    if not least <= current <= most:
        target = min(max(current, least), most)
        which = bound if current > most else "minReplicas"
        words = f"{current} replicas are outside of {least}..{most}"
        return _decision(limits, view, facts, target, current, "bounds", words, which)
    if current == 0:
        return _from_zero(limits, view, facts, most, bound)
    if _idle(limits, view, facts, memory):
        words = f"no request for {view.now - memory.active_at:.0f} s (idleSeconds is {limits.idle:.0f})"
        return _decision(limits, view, facts, 0, 0, "zero", words)
    terms = _terms(limits, view, facts, memory)
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


def _from_zero(limits: Limits, view: View, facts: _Facts, most: int, bound: str) -> Decision:
    """No replica is wanted so far: only held requests wake the service."""
    if view.held is None:
        words = "a router gave no metrics, so it is not known whether requests are held"
        return _decision(limits, view, facts, 0, 0, "hold", words, "missingMetrics")
    if view.held.requests <= 0:
        return _decision(limits, view, facts, 0, 0, "hold", "no request is held")
    # How much a replica takes is not known before one runs: one is started, and the next cycles see.
    words = f"{view.held.requests:.0f} requests are held at the router"
    term = Term("held", 1, words)
    return _decision(limits, view, facts, min(1, most), 1, "wake", words, None if most else bound, [term])


def _idle(limits: Limits, view: View, facts: _Facts, memory: Memory) -> bool:
    known = view.held is not None and facts.silent == 0
    return limits.minimum == 0 and known and view.now - memory.active_at >= limits.idle


def _fallen_back(view: View, facts: _Facts, memory: Memory, wanted: int) -> int | None:
    """The most replicas to want while pods do not become ready; None where nothing is known against more. Pods that
    found no node are given up; those that load are left alone."""
    if view.now >= memory.overdue_until:
        return None
    return facts.ready + facts.young + facts.loading


def _overdue_words(view: View, facts: _Facts) -> str:
    late = PATIENCE * view.start_seconds
    return f"{facts.stuck} pods found no node within {late:.0f} s (twice the usual start): they are no supply"


def _down_or_hold(
    limits: Limits, view: View, facts: _Facts, memory: Memory, terms: list[Term], wanted: int
) -> Decision:
    """One replica less, or the reason why not."""
    current = view.current
    why, limit = _why_not_less(limits, view, facts, memory, terms)
    if why:
        return _decision(limits, view, facts, current, wanted, "hold", why, limit, terms)
    needed = memory.calm[0][1]
    words = (
        f"{needed} replicas would have been enough for {limits.stabilization:.0f} s, with 15 % to spare; one goes at a "
        f"time"
    )
    return _decision(limits, view, facts, current - 1, wanted, "down", words, None, terms)


def _why_not_less(
    limits: Limits, view: View, facts: _Facts, memory: Memory, terms: list[Term]
) -> tuple[str, str | None]:
    """(Why no replica may go, what limits); two times nothing where one may."""
    current, now, window = view.current, view.now, limits.stabilization
    least = max(limits.least(), 1)
    if facts.silent or view.held is None or (facts.ready and not facts.loads):
        who = f"{facts.silent} of {facts.ready} replicas" if facts.silent else "a router"
        return f"{who} gave no metrics: nothing is removed", "missingMetrics"
    if facts.ready < current:
        return f"{current - facts.ready} replicas are not ready yet", None
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
    return _too_tight(limits, view, facts, current), None


def _too_tight(limits: Limits, view: View, facts: _Facts, n: int) -> str:
    """What one replica less would break; "" for nothing."""
    if facts.demand >= (n - 1) * facts.kv_tokens:
        return f"{n - 1} replicas hold {_tokens((n - 1) * facts.kv_tokens)} tokens, demand is {_tokens(facts.demand)}"
    grown = n / (n - 1)
    running = sum(load.running for load in facts.loads) / max(len(facts.loads), 1) / view.step.engines
    itl = facts.line.at(running * grown) if facts.line else facts.traffic.itl and facts.traffic.itl * grown
    if limits.itl_slo is not None and itl is not None and running > 0 and itl > SLO_SPARE * limits.itl_slo:
        unreachable = facts.line is not None and not _reachable(limits, facts.line)
        if not unreachable:
            return f"with {n - 1} replicas ITL would be {_ms(itl)}, over 80 % of {_ms(limits.itl_slo)}"
    prompts = _prompts(limits, view, facts) * grown
    if prompts > PREFILL_SPARE * PREFILLS:
        return f"with {n - 1} replicas an engine would have {prompts:.2f} prompts at a time"
    ttft = facts.traffic.ttft
    if limits.ttft_slo is not None and ttft is not None and ttft * grown > SLO_SPARE * limits.ttft_slo:
        return f"with {n - 1} replicas TTFT would be {_ms(ttft * grown)}, over 80 % of {_ms(limits.ttft_slo)}"
    return ""


# ---------------------------------------------------------------- words


def _steady_words(terms: list[Term], current: int) -> str:
    if not terms:
        return f"{current} replicas are enough: no load"
    strongest = max(terms, key=lambda term: term.wanted)
    return f"{current} replicas are right: {strongest.name}: {strongest.words}"


def _decision(
    limits: Limits,
    view: View,
    facts: _Facts,
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
        inputs=_inputs(limits, view, facts),
    )


def _inputs(limits: Limits, view: View, facts: _Facts) -> dict[str, str]:
    """The numbers, as status shows them: the names are those of docs/autoscaling.md."""
    loads, traffic = facts.loads, facts.traffic
    found = {
        "ready": str(facts.ready),
        "pending": str(facts.young),
        "overdue": str(facts.overdue),
        "withoutMetrics": str(facts.silent),
        "demandTokens": _tokens(facts.demand),
        "running": f"{sum(x.running for x in loads):.0f}",
        "waiting": f"{sum(x.waiting for x in loads):.0f}",
        "preempted": f"{sum(x.preempted for x in loads):.0f}",
        "held": "unknown" if view.held is None else f"{view.held.requests:.0f}",
        "inputTokens": f"{traffic.input_tokens:.0f}",
        "outputTokens": f"{traffic.output_tokens:.0f}",
        "requestsPerSecond": f"{traffic.rate:.2f}",
    }
    if loads:
        found["kvUsage"] = f"{sum(x.used_tokens for x in loads) / max(sum(x.kv_tokens for x in loads), 1.0):.2f}"
        found["kvTokensPerReplica"] = _tokens(facts.kv_tokens)
        found["capacityTokens"] = _tokens(facts.cap or 0.0)
    if traffic.itl is not None:
        found["itlP95Ms"] = f"{traffic.itl * 1000:.1f}"
    if traffic.ttft is not None:
        found["ttftP95Ms"] = f"{traffic.ttft * 1000:.0f}"
    if facts.line is not None:
        found["itlModel"] = f"{facts.line.base * 1000:.2f} ms + {facts.line.slope * 1000:.3f} ms x running"
        if not _reachable(limits, facts.line):
            found["slo"] = "not reachable with any number of replicas"
    return found


def _tokens(value: float) -> str:
    return f"{value:,.0f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"
