"""What was decided, as status holds it, and back: the planner's record, the last decision, the history. Pure.

Status is written before anything is done for a decision, with the resourceVersion of what it was decided from: of two
leaders one loses, and who leads next finds what was decided. A decision from a number that is no longer the wanted one
is none. Numbers alone that differ are written once a minute at most.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from kvern_operator.api.status import (
    AutoscalingStatus,
    BannedSize,
    Decision,
    InferenceServiceStatus,
    LayoutDecision,
    LayoutOption,
    LayoutPlan,
    ParallelismStatus,
    Term,
)
from kvern_operator.autoscale import layout, terms
from kvern_operator.autoscale.cycle import Both

HISTORY = 10
REFRESH = timedelta(seconds=60)  # between two records that differ in numbers alone
SETTLE = timedelta(seconds=15)  # between two that differ in the term that keeps a number as it is
# What is worth knowing at once, whoever else was the reason before.
BOUNDS = frozenset({"maxReplicas", "gpuBudget", "namespaceBudget"})
URGENT = BOUNDS | {"missingMetrics", "unschedulable", "slowStart"}


@dataclass(frozen=True)
class Made:
    """One cycle's decisions about a service. `plan`: the record that the layout was decided from. `start_seconds`:
    average start of a pod."""

    uid: str  # of the service
    mode: terms.Mode
    both: Both
    plan: LayoutPlan | None = None
    start_seconds: float | None = None


def cause_of(made: terms.Decision) -> str:
    """The term or limit that decided, in one word."""
    if made.limited_by:
        return made.limited_by
    words = {"wake": "held", "zero": "idleSeconds", "down": "down", "given": "given"}
    if made.kind in words:
        return words[made.kind]
    strongest = max(made.terms, key=lambda term: term.wanted, default=None)
    return strongest.name if strongest is not None else "noLoad"


# ---------------------------------------------------------------- the planner's record


def _time(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(int(seconds), UTC)


def _seconds(value: datetime | None) -> float | None:
    return None if value is None else value.timestamp()


def state_of(plan: LayoutPlan | None, size: int) -> layout.State:
    """The planner's state; one that begins with `size` where there is no record."""
    if plan is None:
        return layout.State(size)
    return layout.State(
        size=plan.size,
        phase=plan.phase,
        before=plan.before,
        since=_seconds(plan.since) or 0.0,
        returning=plan.returning,
        attainment=None if plan.attainment is None else float(plan.attainment),
        watched=float(plan.watched_seconds),
        dip_since=_seconds(plan.dip_since),
        raise_since=_seconds(plan.raise_since),
        lower_since=_seconds(plan.lower_since),
        changes=tuple(t.timestamp() for t in plan.changes),
        bans=tuple((ban.size, ban.until.timestamp()) for ban in plan.bans),
        proven=tuple(plan.proven),
    )


def plan_of(state: layout.State) -> LayoutPlan:
    """The record of a state."""
    bans = [BannedSize(size=size, until=datetime.fromtimestamp(int(until), UTC)) for size, until in state.bans]
    return LayoutPlan(
        size=state.size,
        phase=state.phase,
        before=state.before,
        since=_time(state.since) if state.since else None,
        returning=state.returning,
        attainment=None if state.attainment is None else f"{state.attainment:.4f}",
        watched_seconds=int(state.watched),
        dip_since=_time(state.dip_since),
        raise_since=_time(state.raise_since),
        lower_since=_time(state.lower_since),
        changes=[datetime.fromtimestamp(int(t), UTC) for t in state.changes][-16:],
        bans=bans[-64:],
        proven=list(state.proven),
    )


def same_change(one: LayoutPlan, other: LayoutPlan) -> bool:
    """Whether two records are of one state but for the clocks that run in it."""
    clocks = {"watched_seconds": 0, "dip_since": None, "raise_since": None, "lower_since": None}
    return one.model_copy(update=clocks) == other.model_copy(update=clocks)


# ---------------------------------------------------------------- into status


def recorded(status: InferenceServiceStatus, made: Made, now: datetime) -> InferenceServiceStatus:
    """The status with what was decided; the same one where nothing of it is worth a write, or it was decided from what
    is no longer so. `now` is aware."""
    autoscaling = _autoscaling(status, made, now)
    parallelism = _parallelism(status.parallelism, made, now)
    if autoscaling == status.autoscaling and parallelism == status.parallelism:
        return status
    update: dict[str, object] = {"autoscaling": autoscaling, "parallelism": parallelism}
    if made.mode == "Internal" and autoscaling.desired is not None:
        update["desired_replicas"] = autoscaling.desired
    return status.model_copy(update=update)


def _autoscaling(status: InferenceServiceStatus, made: Made, now: datetime) -> AutoscalingStatus:
    before, decision = status.autoscaling, made.both.replicas
    if made.mode == "Off" or (made.mode == "Internal" and before.desired != decision.current):
        return before
    moved = decision.target != decision.current if made.mode == "Internal" else False
    said = made.mode == "Recommend" and before.recommended != decision.target
    record = _decision(decision, now)
    if decision.kind == "given":
        record = record.model_copy(update={"cause": made.mode})
    if not (moved or said or _worth(before.last_decision, record, now)):
        return before
    changes = [record] if moved or (said and record.from_ != record.to) else []
    start = before.start_seconds if made.start_seconds is None else round(made.start_seconds)
    return before.model_copy(
        update={
            "mode": made.mode,
            "desired": decision.target if made.mode == "Internal" else None,
            "recommended": decision.target if made.mode == "Recommend" else None,
            "start_seconds": start,
            "last_decision": record,
            "history": [*before.history, *changes][-HISTORY:],
        }
    )


def _worth(before: Decision | None, new: Decision, now: datetime) -> bool:
    """Whether a decision that leaves the number as it is is worth a write."""
    if before is None or (new.inputs and not before.inputs):
        return True
    age = now - before.time
    urgent = {new.limited_by, *({before.limited_by} - BOUNDS)} & URGENT
    if (before.limited_by != new.limited_by and urgent) or age < timedelta(0):
        return True
    if (before.kind, before.cause, before.limited_by) != (new.kind, new.cause, new.limited_by):
        # A load about a bound crosses it every few seconds: that it is below again has time.
        return age >= (REFRESH if before.limited_by in BOUNDS else SETTLE)
    same = (before.reason, before.inputs, before.terms) == (new.reason, new.inputs, new.terms)
    return not same and age >= REFRESH


def _decision(made: terms.Decision, now: datetime) -> Decision:
    found = [Term(name=t.name[:32], wanted=max(t.wanted, 0), words=t.words[:512]) for t in made.terms]
    return Decision(
        time=now,
        from_=made.current,
        to=made.target,
        kind=made.kind,
        cause=cause_of(made)[:32],
        wanted=max(made.wanted, 0),
        reason=made.reason[:1024],
        limited_by=made.limited_by,
        terms=found[:16],
        inputs={name[:63]: value[:128] for name, value in list(made.inputs.items())[:32]},
    )


def _parallelism(before: ParallelismStatus, made: Made, now: datetime) -> ParallelismStatus:
    decision, plan = made.both.layout, plan_of(made.both.state)
    if before.plan != made.plan:
        return before  # somebody has decided since
    size = before.plan.size if before.plan is not None else before.target
    if before.plan is None and not decision.options and not decision.changed and not decision.early:
        return before  # mode Fixed, or nothing is known yet
    record = LayoutDecision(
        time=now,
        from_=size if size is not None and decision.changed else decision.target,
        to=decision.target,
        recommended=decision.recommended,
        reason=decision.reason[:1024],
        options=[_option(option) for option in decision.options][:64],
    )
    if decision.early and not decision.changed:
        # It is said and shown; what the spec begins with stays the spec's business until something runs.
        said = before.last_decision is not None and not _differs(before.last_decision, record)
        update = {"recommended": decision.recommended, "last_decision": record}
        return before if said and before.recommended == decision.recommended else before.model_copy(update=update)
    due = before.plan is None or not same_change(before.plan, plan) or decision.recommended != before.recommended
    if before.plan is not None and not due:
        began = (before.plan.raise_since is None) != (plan.raise_since is None)
        began = began or (before.plan.lower_since is None) != (plan.lower_since is None)
        began = began or (before.plan.dip_since is None) != (plan.dip_since is None)
        age = now - before.last_decision.time if before.last_decision is not None else REFRESH
        aged = before.plan != plan or before.last_decision is None or _differs(before.last_decision, record)
        due = (began and age >= SETTLE) or (aged and age >= REFRESH)
    if not due:
        return before
    changes = [record] if decision.changed else []
    return before.model_copy(
        update={
            "plan": plan,
            "recommended": decision.recommended,
            "last_decision": record,
            "history": [*before.history, *changes][-HISTORY:],
        }
    )


def _differs(before: LayoutDecision, new: LayoutDecision) -> bool:
    return (before.reason, before.options) != (new.reason, new.options)


def _option(option: layout.Option) -> LayoutOption:
    finite = option.replicas != float("inf")
    itl = option.itl if option.itl is not None and option.itl != float("inf") else None
    return LayoutOption(
        size=option.size,
        engines=option.engines,
        replicas=int(option.replicas) if finite else None,
        itl_ms=None if itl is None else f"{itl * 1000:.1f}",
        why_not=option.why_not[:256],
    )
