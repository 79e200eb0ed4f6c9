"""Which tensor-parallel size a service's replicas shall have: triggers, options, gate, the state machine of a change.
Pure. A replica owns `gpus` devices and divides them into gpus / (size x pipeline) engines; its devices stay its own.

A larger size holds the weights fewer times, so that more memory is left for KV, and makes one request faster; a smaller
one has more engines, and less talk between devices for each token. What a size would do is computed from the present
one's figures until it has run itself: a step is SPEEDUP ** log2(ratio) times faster (1.74 for twice the devices).

The state is a record for status: a new leader reads it and goes on. Its times are those of the wall clock.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvern_operator.autoscale.capacity import (
    capacity,
    demand,
    replica_rate,
    replicas_for,
    replicas_to_serve,
    running_itl,
    shape_of,
)
from kvern_operator.autoscale.facts import counted
from kvern_operator.autoscale.terms import Full, Limits, Line, Load, Traffic, View

SPEEDUP = 1.74  # of a step on twice the devices (DistServe, OSDI 2024)
GATE_SECONDS = 1800.0  # within which a change must save more than it costs
CHANGE_WINDOW, MOST_CHANGES = 7200.0, 2
BAN_SECONDS = 6 * 3600.0
DIP, DIP_SECONDS = 0.05, 60.0  # of SLO attainment, and how long it must last, before a change is taken back
LONGEST_SHARE = 0.9  # of one engine's KV cache that the longest requests may take
_TOO_MANY = "needs"  # how it begins that a size needs more replicas than there may be
_GAP = 15.0  # seconds between two looks, above which the time between them was not watched

Phase = Literal["Stable", "Changing", "Verifying"]


@dataclass(frozen=True)
class Sizes:
    """What the spec allows: spec.parallelism.tensor, seconds. `change_seconds`: how long a replica is away for it."""

    mode: Literal["Fixed", "Recommend", "Auto"] = "Fixed"
    minimum: int = 1
    maximum: int = 64
    raise_after: float = 300.0
    lower_after: float = 900.0
    dwell: float = 1800.0
    verify: float = 600.0
    change_seconds: float = 60.0

    def allows(self, size: int) -> bool:
        """Whether a size is within the bounds."""
        return self.minimum <= size <= self.maximum


@dataclass(frozen=True)
class Look:
    """What is seen of the layout. `size`: that of all ready replicas, None while they differ or none is ready. `kv`:
    (size, tokens a replica) of the sizes it can have. `attainment`: share of the latest requests that kept the SLO;
    None: not known. `preempted`: preemptions a finished request, over the last minute. `failed`: why the size that is
    wanted could not be taken; "" where it could, or is not tried yet. While `kv` is empty, since no pod has run:
    `expected`, the same by an estimate, 0 tokens where the model does not fit, and `unknown`, why there is none."""

    now: float
    size: int | None
    gpus: int
    kv: tuple[tuple[int, int], ...]
    pipeline: int = 1
    attainment: float | None = None
    preempted: float = 0.0
    failed: str = ""
    expected: tuple[tuple[int, int], ...] = ()
    unknown: str = ""


@dataclass(frozen=True)
class State:
    """The record. `size` is the one that is wanted; `before` the one to go back to. `changes` are times, `bans` (size,
    until), `proven` sizes that have passed a verification. `watched`: seconds of the verification with figures."""

    size: int
    phase: Phase = "Stable"
    before: int | None = None
    since: float = 0.0
    returning: bool = False
    attainment: float | None = None  # before the change
    watched: float = 0.0
    looked_at: float = 0.0
    dip_since: float | None = None
    raise_since: float | None = None
    lower_since: float | None = None
    changes: tuple[float, ...] = ()
    bans: tuple[tuple[int, float], ...] = ()
    proven: tuple[int, ...] = ()


@dataclass(frozen=True)
class Option:
    """One size and what the model expects of it. `replicas`: how many the load needs, whatever is allowed. `why_not`:
    why it cannot be chosen; "" where it can. `itl` None: nothing is known of latency."""

    size: int
    engines: int
    replicas: float
    itl: float | None
    slack: float
    why_not: str = ""


@dataclass(frozen=True)
class LayoutDecision:
    """`target` is the size wanted from now on, `recommended` the one that the planner would take. `changed`: it became
    another one in this cycle. `replicas`: how many `target` needs; None: unchanged. `reason` in words. `early`: no pod
    has run yet."""

    target: int
    recommended: int
    changed: bool
    reason: str
    replicas: int | None = None
    options: tuple[Option, ...] = ()
    early: bool = False


def plan(
    sizes: Sizes,
    limits: Limits,
    view: View,
    look: Look,
    state: State,
    full: Sequence[Full] = (),
    served: float | None = None,
) -> tuple[LayoutDecision, State]:
    """The decision of this cycle. `full` is Memory.full: what replicas of the present size hold when saturated;
    `served`: requests a second of one of them, as the term `rate` has it; None: not known."""
    state = _pruned(state, look.now)
    if sizes.mode == "Fixed":
        return _stay(state, "parallelism.tensor.mode is Fixed"), replace(state, raise_since=None, lower_since=None)
    if state.phase == "Changing":
        return _changing(sizes, look, state)
    if state.phase == "Verifying":
        return _verifying(sizes, limits, look, state)
    if not look.kv and look.size is None:
        return _before_any(sizes, look, state)
    if look.size is None or look.size != state.size or not _known(view) or limits.unknown:
        words = limits.unknown or "replicas, or their metrics, are missing: the layout stays"
        return _stay(state, words), replace(state, raise_since=None, lower_since=None)
    options = tuple(_options(sizes, limits, view, look, state, full, served))
    if not sizes.allows(state.size):
        return _into_bounds(sizes, limits, look, state, options)
    state, why, larger = _triggered(sizes, limits, view, look, state, options)
    if not why:
        return _stay(state, "nothing calls for another size", options), state
    return _choose(sizes, limits, view, look, state, options, why, larger)


def _stay(state: State, reason: str, options: tuple[Option, ...] = ()) -> LayoutDecision:
    return LayoutDecision(state.size, state.size, False, reason, options=options)


def _pruned(state: State, now: float) -> State:
    return replace(
        state,
        changes=tuple(t for t in state.changes if now - t < CHANGE_WINDOW),
        bans=tuple((size, until) for size, until in state.bans if until > now),
    )


def _known(view: View) -> bool:
    ready = [r for r in view.replicas if r.ready]
    return bool(ready) and all(r.load is not None for r in ready) and view.traffic is not None and view.held is not None


def _loads(view: View) -> list[Load]:
    return [r.load for r in view.replicas if r.ready and r.load is not None]


# ---------------------------------------------------------------- options


def speedup(ratio: float) -> float:
    """How many times faster a step is on `ratio` times the devices."""
    return float(SPEEDUP ** math.log2(ratio))


def _options(
    sizes: Sizes,
    limits: Limits,
    view: View,
    look: Look,
    state: State,
    full: Sequence[Full],
    served: float | None,
) -> Iterable[Option]:
    loads, traffic = _loads(view), shape_of(view.traffic)
    amount, most = demand(loads, view.held, traffic), limits.most()[0]
    for size, tokens in sorted(look.kv):
        engines = look.gpus // (size * look.pipeline)
        if engines < 1 or look.gpus % (size * look.pipeline) or tokens <= 0:
            continue
        speed = speedup(size / state.size)
        step = replace(view.step, engines=engines)
        quick = replace(traffic, prefill_seconds=traffic.prefill_seconds / speed)
        line = view.line and Line(view.line.base / speed, view.line.slope / speed)
        cap = capacity(limits, tokens, step, quick, full if size == state.size else ())
        needed = float(max(replicas_for(amount, cap), 1))
        why = _impossible(limits, quick, line, tokens / engines)
        if not why and limits.itl_slo is not None and line is not None and traffic.rate > 0:
            needed = max(needed, replicas_for(traffic.rate, replica_rate(limits.itl_slo, line, tokens, step, quick)))
        if not why and served and traffic.rate > 0:
            each = served * speed * state.size / size  # as many devices are more, slower engines, or fewer faster ones
            needed = max(needed, replicas_for(replicas_to_serve(traffic.rate / each), 1.0))
        itl = _itl(line, quick, min(max(needed, 1.0), most) * engines)
        slack = 1 - itl / limits.itl_slo if itl is not None and limits.itl_slo is not None else 0.0
        if why:
            needed = math.inf
        elif needed > most:
            why = f"{_TOO_MANY} {needed:.0f} replicas, {counted(most, 'is', 'are')} allowed"
        yield Option(size, engines, needed, itl, slack, why or _not_allowed(sizes, state, size))


def _not_allowed(sizes: Sizes, state: State, size: int) -> str:
    """Why a size that would do is not to be taken; "" where it may be."""
    if not sizes.allows(size):
        return f"outside of {sizes.minimum}..{sizes.maximum}"
    if any(banned == size for banned, _ in state.bans):
        return "was tried, made latency worse and is banned for six hours"
    return ""


def _impossible(limits: Limits, traffic: Traffic, line: Line | None, engine_tokens: float) -> str:
    """Why no number of replicas of this size would do; "" where some does."""
    if traffic.longest > LONGEST_SHARE * engine_tokens:
        return f"an engine's {engine_tokens:,.0f} tokens are too few for requests of {traffic.longest:,.0f}"
    if limits.itl_slo is not None and line is not None and line.at(1.0) > limits.itl_slo:
        return f"ITL of a single request is {line.at(1.0) * 1000:.0f} ms, the SLO {limits.itl_slo * 1000:.0f} ms"
    if limits.ttft_slo is not None and traffic.prefill_seconds > limits.ttft_slo:
        return f"a prompt takes {traffic.prefill_seconds:.1f} s, the SLO of TTFT is {limits.ttft_slo:.1f} s"
    return ""


def _itl(line: Line | None, traffic: Traffic, engines: float) -> float | None:
    """ITL where the service's requests are spread over so many engines."""
    return running_itl(line, traffic.prefill_seconds, traffic.output_tokens, traffic.rate / max(engines, 1.0))


# ---------------------------------------------------------------- before any pod has run


def _before_any(sizes: Sizes, look: Look, state: State) -> tuple[LayoutDecision, State]:
    """By the estimate: the size that the spec begins with, if the model fits; else the next larger one, else the next
    smaller one. Nothing runs yet, so that this is no change that counts, and has nothing to go back to."""
    state = replace(state, raise_since=None, lower_since=None)

    def made(reason: str, best: int, options: tuple[Option, ...] = (), *, changed: bool = False) -> LayoutDecision:
        target = best if changed else state.size
        return LayoutDecision(target, best, changed, reason, options=options, early=True)

    if not look.expected:
        return made(f"no pod has run yet, and {look.unknown or 'nothing is known of the model'}", state.size), state
    options = tuple(_early_option(sizes, look, state, size, tokens) for size, tokens in sorted(look.expected))
    fitting = [o.size for o in options if not o.why_not]
    if state.size in fitting:
        held = dict(look.expected)[state.size]
        words = (
            f"no pod has run yet; by its shape the model fits at size {state.size}, beside {held:,} tokens a replica"
        )
        return made(words, state.size, options), state
    why = next((o.why_not for o in options if o.size == state.size), "it does not divide devices and heads")
    if not fitting:
        return made(f"no pod has run yet; size {state.size}: {why}, and no other size fits", state.size, options), state
    best = min(fitting, key=lambda size: (size < state.size, abs(size - state.size)))
    words = f"no pod has run yet; size {state.size}: {why}; the model fits at size {best}"
    if sizes.mode == "Recommend":
        return made(f"{words} (mode Recommend)", best, options), state
    return made(words, best, options, changed=True), replace(state, size=best, since=look.now)


def _early_option(sizes: Sizes, look: Look, state: State, size: int, tokens: int) -> Option:
    unfit = "by its shape the model does not fit, or leaves no room for the longest request"
    why = _not_allowed(sizes, state, size) if tokens else unfit
    return Option(size, look.gpus // (size * look.pipeline), 1.0 if tokens else math.inf, None, 0.0, why)


# ---------------------------------------------------------------- triggers


def _triggered(
    sizes: Sizes, limits: Limits, view: View, look: Look, state: State, options: Sequence[Option]
) -> tuple[State, str, bool]:
    """(state with its clocks, why a change is due or "", whether to a larger size)."""
    up, down = _raise_reason(limits, view, look, state, options), _lower_reason(limits, view, state, options)
    now = look.now
    raise_since = (state.raise_since if state.raise_since is not None else now) if up else None
    lower_since = (state.lower_since if state.lower_since is not None else now) if down and not up else None
    state = replace(state, raise_since=raise_since, lower_since=lower_since)
    if raise_since is not None and now - raise_since >= sizes.raise_after:
        return state, up, True
    if lower_since is not None and now - lower_since >= sizes.lower_after:
        return state, down, False
    return state, "", False


def _raise_reason(limits: Limits, view: View, look: Look, state: State, options: Sequence[Option]) -> str:
    loads, traffic = _loads(view), shape_of(view.traffic)
    usage = sum(x.used_tokens for x in loads) / max(sum(x.kv_tokens for x in loads), 1.0)
    running = sum(x.running for x in loads) / max(len(loads) * view.step.engines, 1)
    if look.preempted > 0.01 and usage > 0.90 and view.current >= limits.most()[0]:
        return (
            f"{look.preempted:.1%} of requests are preempted at a KV usage of {usage:.2f}, and no replica can be added"
        )
    slo, itl = limits.itl_slo, traffic.itl
    if slo is not None and itl is not None and itl > slo and running <= 8 and usage < 0.5:
        return f"ITL {itl * 1000:.0f} ms is over {slo * 1000:.0f} ms at {running:.0f} running"
    here = next((o for o in options if o.size == state.size), None)
    if here is not None and "too few for requests" in here.why_not:
        return here.why_not
    return _beyond(here, (o for o in options if o.size > state.size))


def _beyond(here: Option | None, others: Iterable[Option]) -> str:
    """The load is more than the replicas that are allowed can carry at this size, and another one would do."""
    if here is None or not here.why_not.startswith(_TOO_MANY) or all(o.why_not for o in others):
        return ""
    return f"size {here.size} {here.why_not}"


def _lower_reason(limits: Limits, view: View, state: State, options: Sequence[Option]) -> str:
    loads = _loads(view)
    usage = sum(x.used_tokens for x in loads) / max(sum(x.kv_tokens for x in loads), 1.0)
    waiting = sum(x.waiting for x in loads) / max(len(loads), 1)
    smaller = [o for o in options if o.size < state.size and not o.why_not]
    here = next((o for o in options if o.size == state.size), None)
    if not smaller or here is None:
        return ""
    kept = [o for o in smaller if o.itl is not None and (limits.itl_slo is None or o.itl <= 0.8 * limits.itl_slo)]
    if waiting >= limits.queue_target and usage < 0.6 and kept:
        return f"{counted(waiting, 'request waits', 'requests wait')} a replica at a KV usage of {usage:.2f}"
    best = min(o.replicas for o in smaller)
    if 2 * best <= here.replicas:
        does = counted(best, "replica of a smaller size does", "replicas of a smaller size do")
        return f"{does} what needs {here.replicas:.0f} of size {state.size}"
    return _beyond(here, smaller)


# ---------------------------------------------------------------- a change


def _into_bounds(
    sizes: Sizes, limits: Limits, look: Look, state: State, options: tuple[Option, ...]
) -> tuple[LayoutDecision, State]:
    """The spec's bounds have been moved away from the present size: what somebody asks for waits for no trigger and
    passes no gate, unless it has been tried in vain. Where no size within carries the load, that which needs least."""
    state = replace(state, raise_since=None, lower_since=None)
    why = f"size {state.size} is outside of {sizes.minimum}..{sizes.maximum}"
    side = [o for o in options if o.replicas < math.inf and not _not_allowed(sizes, state, o.size)]
    best = min(side, key=lambda o: (o.replicas, -o.slack, o.size), default=None)
    if best is None:
        return _stay(state, f"{why}, but no size within is feasible", options), state
    tried = any(sizes.allows(size) for size, _ in state.bans)
    blocked = _not_now(sizes, look, state, best) if tried else ""
    return _taken(sizes, limits, look, state, best, why, blocked, options)


def _choose(
    sizes: Sizes,
    limits: Limits,
    view: View,
    look: Look,
    state: State,
    options: tuple[Option, ...],
    why: str,
    larger: bool,
) -> tuple[LayoutDecision, State]:
    """A mature trigger: the best option in its direction, if it passes the gate and may be taken now."""
    here = next((o for o in options if o.size == state.size), None)
    side = [o for o in options if not o.why_not and (o.size > state.size if larger else o.size < state.size)]
    best = min(side, key=lambda o: (o.replicas, -o.slack, o.size), default=None)
    if best is None:
        return _stay(state, f"{why}, but no {'larger' if larger else 'smaller'} size is feasible", options), state
    needed_here = here.replicas if here is not None else math.inf
    saved = (needed_here - best.replicas) * look.gpus * GATE_SECONDS
    cost = max(view.current, 1) * look.gpus * sizes.change_seconds
    if saved <= cost:
        words = f"{why}, but size {best.size} would save {saved:,.0f} GPU-seconds in 30 min and cost {cost:,.0f}"
        return _stay(state, words, options), state
    return _taken(sizes, limits, look, state, best, why, _not_now(sizes, look, state, best), options)


def _taken(
    sizes: Sizes,
    limits: Limits,
    look: Look,
    state: State,
    best: Option,
    why: str,
    blocked: str,
    options: tuple[Option, ...],
) -> tuple[LayoutDecision, State]:
    """The change to the best option; only said in mode Recommend, and where something forbids it now."""
    reason = f"{why}: size {best.size} needs {counted(best.replicas, 'replica', 'replicas')}"
    if sizes.mode == "Recommend" or blocked:
        reason += " (mode Recommend)" if sizes.mode == "Recommend" else f", but {blocked}"
        return LayoutDecision(state.size, best.size, False, reason, options=options), state
    after = replace(
        state,
        size=best.size,
        phase="Changing",
        before=state.size,
        since=look.now,
        returning=False,
        attainment=look.attainment,
        raise_since=None,
        lower_since=None,
        changes=(*state.changes, look.now),
    )
    needed = min(int(best.replicas), limits.most()[0])
    return LayoutDecision(best.size, best.size, True, reason, replicas=needed, options=options), after


def _not_now(sizes: Sizes, look: Look, state: State, best: Option) -> str:
    """What forbids a change at this time. One to a size that is not proven may have to be taken back: both must fit the
    limit, so that no two hours see more changes than that."""
    last = max(state.changes, default=-math.inf)
    if look.now - last < sizes.dwell:
        return f"the last change is {look.now - last:.0f} s ago (dwellSeconds is {sizes.dwell:.0f})"
    reserve = 1 if best.size in state.proven else 2
    if len(state.changes) + reserve > MOST_CHANGES:
        return f"{counted(len(state.changes), 'change has', 'changes have')} been made within two hours"
    return ""


def _changing(sizes: Sizes, look: Look, state: State) -> tuple[LayoutDecision, State]:
    """Until every ready replica has the size. One that is taken back, or to a proven size, or from one that is not
    allowed any more, is done with that. One that fails on a replica is taken back from all; one that fails while it is
    taken back goes on: there is no third way."""
    if look.failed and look.size != state.size and not state.returning and state.before is not None:
        words = f"size {state.size} could not be taken: {look.failed}; back to {state.before}, not again for six hours"
        back = _back(look, state, state.before)
        return LayoutDecision(back.size, back.size, True, words), back
    if look.size != state.size:
        return _stay(state, f"changing from size {state.before} to {state.size}"), state
    if state.returning or state.size in state.proven or state.before is None or not sizes.allows(state.before):
        done = replace(state, phase="Stable", before=None, returning=False, since=look.now)
        return _stay(done, f"size {state.size} is in place"), done
    begun = replace(state, phase="Verifying", since=look.now, watched=0.0, looked_at=look.now, dip_since=None)
    return _stay(begun, f"size {state.size} is in place and is being watched"), begun


def _verifying(sizes: Sizes, limits: Limits, look: Look, state: State) -> tuple[LayoutDecision, State]:
    """Watched for `verify` seconds with figures; a dip of SLO attainment that lasts takes the change back. Where no SLO
    is asked for, there are no figures to wait for."""
    between = look.now - state.looked_at
    judged = limits.itl_slo is not None or limits.ttft_slo is not None
    known = look.size == state.size and (look.attainment is not None or not judged)
    watched = state.watched + (between if known and 0 <= between <= _GAP else 0.0)
    base = state.attainment
    dips = known and base is not None and look.attainment is not None and look.attainment < base - DIP
    dip_since = (state.dip_since if state.dip_since is not None else look.now) if dips else None
    state = replace(state, watched=watched, looked_at=look.now, dip_since=dip_since)
    before = state.before if state.before is not None and sizes.allows(state.before) else None
    if dip_since is not None and look.now - dip_since >= DIP_SECONDS and before is not None:
        words = (
            f"SLO attainment fell from {base:.1%} to {look.attainment:.1%} at size {state.size}: back to "
            f"{before}, and not again within six hours"
        )
        back = _back(look, state, before)
        return LayoutDecision(back.size, back.size, True, words), back
    if watched >= sizes.verify:
        proven = tuple(sorted({*state.proven, state.size, *([state.before] if state.before else [])}))
        done = replace(state, phase="Stable", before=None, since=look.now, proven=proven)
        return _stay(done, f"size {state.size} has proven itself"), done
    return _stay(state, f"size {state.size} is being watched: {watched:.0f} of {sizes.verify:.0f} s"), state


def _back(look: Look, state: State, before: int) -> State:
    """On the way back, the size that failed banned."""
    return replace(
        state,
        size=before,
        phase="Changing",
        before=state.size,
        since=look.now,
        returning=True,
        dip_since=None,
        changes=(*state.changes, look.now),
        bans=(*state.bans, (state.size, look.now + BAN_SECONDS)),
    )
