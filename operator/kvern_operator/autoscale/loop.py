"""One cycle for all services, every few seconds: ask their pods, decide, and have what is decided recorded.

It writes nothing itself. A pass of reconcile hands over what it sees of a service (`watch`) and asks, before it does
anything, what was decided (`record`): so there is one writer of status, and one of replicas. What a cycle knows beyond
status is lost with the process, which costs a stabilization window and nothing else.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Protocol

from kvern_operator.api.status import InferenceServiceStatus
from kvern_operator.api.types import InferenceService
from kvern_operator.autoscale import cycle
from kvern_operator.autoscale.budget import Claim, share
from kvern_operator.autoscale.layout import Look, Sizes, State
from kvern_operator.autoscale.readings import Round, Target
from kvern_operator.autoscale.record import Made, cause_of, plan_of, recorded, same_change
from kvern_operator.autoscale.signals import STALE, Signals, held_of
from kvern_operator.autoscale.subject import Subject
from kvern_operator.autoscale.terms import Held, Limits, Memory, Replica, View
from kvern_operator.queue import Clock, Key
from kvern_operator.stopwatch import Stopwatch

log = logging.getLogger("kvern.autoscale")

PERIOD = 5.0
USUAL_START = 120.0  # seconds, before one has been seen
SLOWEST_CHANGE = 3600.0  # seconds after which a change of layout that is not in place is taken back
CHANGE = "the change of layout"  # its name beside those of replicas
START_WEIGHT = 0.3  # of a new start in the average
OTHERS_FIRST = 10**9  # priority of services whose number somebody else decides: theirs is not shared out


class Budgets(Protocol):
    """The GPUs of namespaces."""

    async def read(self, namespaces: Collection[str]) -> Mapping[str, int | None]:
        """By namespace its budget, None where there is none; without those that cannot be told."""
        ...

    def wrong(self, namespace: str) -> str:
        """Why somebody has to do something before it can be told; "" where nobody has to."""
        ...


@dataclass
class _Known:
    """What the loop knows of one service beyond its subject."""

    uid: str
    memory: Memory
    ages: Stopwatch  # of replicas and changes: the API server's clock and this machine's are two, and either may jump
    signals: Signals = field(default_factory=Signals)
    held: dict[str, tuple[float, float, float]] = field(default_factory=dict)  # router's UID -> at, requests, tokens
    state: State | None = None  # with the clocks that status does not hold
    waiting: set[str] = field(default_factory=set)  # pods that were seen before they were ready
    start: float | None = None
    size: int | None = None  # tensor size that all ready replicas had last
    asked_up: tuple[float, int] | None = None  # since when, and for how many, more were wanted than were ready


@dataclass(frozen=True)
class Figures:
    """What is shown of a service on /metrics."""

    desired: int
    ready: int
    demand: float | None = None
    capacity: float | None = None


class Tally(Protocol):
    """Where things that happen are counted."""

    def decided(self, kind: str, cause: str) -> None: ...
    def scraped(self, answers: int, failures: int, seconds: float) -> None: ...
    def became_ready(self, seconds: float) -> None: ...


class Autoscaler:
    """`scrape` asks everybody once. `changed(key)` has a pass made for a service. `unseen(known)`: GPUs that services
    hold by their status which are not among the known ones, since no pass has reached them yet, or their spec cannot be
    used. Times of `clock` are monotonic, those of `wall` Unix seconds."""

    def __init__(
        self,
        scrape: Callable[[Iterable[Target]], Awaitable[Round]],
        budgets: Budgets,
        tally: Tally,
        changed: Callable[[Key], None],
        *,
        unseen: Callable[[Collection[Key]], Mapping[Key, int]] = lambda known: {},
        period: float = PERIOD,
        clock: Clock = time.monotonic,
        wall: Clock = time.time,
    ) -> None:
        self._scrape, self._budgets, self._tally, self._changed = scrape, budgets, tally, changed
        self._unseen = unseen
        self._period, self._clock, self._wall = period, clock, wall
        self._subjects: dict[Key, Subject] = {}
        self._known: dict[Key, _Known] = {}
        self._made: dict[Key, Made] = {}
        self._statuses: dict[Key, InferenceServiceStatus] = {}
        self._silent: dict[str, str] = {}  # UID of a pod -> why it gave no answer

    # ------------------------------------------------------------ what a pass of reconcile does

    def watch(self, key: Key, subject: Subject | None, status: InferenceServiceStatus | None = None) -> None:
        """What a pass has seen of a service; None: it is gone. `status` is what was written."""
        if subject is None:
            for shelf in (self._subjects, self._known, self._made, self._statuses):
                shelf.pop(key, None)
            return
        self._subjects[key] = subject
        if not subject.live:
            self._made.pop(key, None)
        if status is not None:
            self._statuses[key] = status

    def record(
        self, key: Key, service: InferenceService, status: InferenceServiceStatus, now: datetime
    ) -> InferenceServiceStatus:
        """The status with what was decided since; the same one where there is nothing to write."""
        made, spec = self._made.get(key), service.spec
        if made is None or made.uid != service.metadata.uid or spec.suspend or made.mode != spec.autoscaling.mode:
            return status
        return recorded(status, made, now)

    def figures(self) -> dict[Key, Figures]:
        """By service."""
        found = {}
        for key, subject in self._subjects.items():
            if not subject.live:
                continue
            made = self._made.get(key)
            inputs = made.both.replicas.inputs if made is not None else {}
            demand, each = _number(inputs.get("demandTokens")), _number(inputs.get("capacityTokens"))
            ready = sum(r.ready for r in subject.replicas)
            capacity = None if each is None else each * ready
            found[key] = Figures(subject.current, ready, demand, capacity)
        return found

    # ------------------------------------------------------------ the loop

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            began = self._clock()
            try:
                await self.cycle()
            except Exception:
                log.exception("a cycle failed")  # the next one may not
            await asyncio.sleep(max(self._period - (self._clock() - began), 0.1))

    async def cycle(self) -> None:
        """Ask everybody, decide for everybody."""
        subjects = dict(self._subjects)
        targets = [target for subject in subjects.values() for target in subject.targets]
        spaces = {subject.namespace for subject in subjects.values() if subject.live and subject.limits.gpus}
        began = self._clock()
        round_, budgets = await asyncio.gather(self._scrape(targets), self._budgets.read(spaces))
        self._tally.scraped(len(round_.engines) + len(round_.routers), len(round_.failures), self._clock() - began)
        self._tell_silent(targets, round_.failures)
        # What has gone or come meanwhile is for the next cycle: an answer of a pod that is gone counts for nobody.
        subjects = {key: self._subjects[key] for key in subjects if key in self._subjects}
        unseen = self._unseen(subjects.keys()) if any(budget is not None for budget in budgets.values()) else {}
        made = await asyncio.to_thread(self._decide_all, subjects, round_, budgets, unseen)
        now = datetime.fromtimestamp(self._wall()).astimezone()
        for key, one in made.items():
            if key not in self._subjects or self._subjects[key].uid != one.uid:
                continue
            self._made[key] = one
            status = self._statuses.get(key)
            if status is None or recorded(status, one, now) is not status:
                self._changed(key)

    def _tell_silent(self, targets: Iterable[Target], failures: Mapping[str, str]) -> None:
        names = {t.uid: t.name for t in targets}
        for uid, why in failures.items():
            if uid not in self._silent:
                log.info("%s gives no metrics: %s", names.get(uid, uid), why)
        self._silent = dict(failures)

    # ------------------------------------------------------------ decisions, in a thread

    def _decide_all(
        self,
        subjects: Mapping[Key, Subject],
        round_: Round,
        budgets: Mapping[str, int | None],
        unseen: Mapping[Key, int],
    ) -> dict[Key, Made]:
        """Pure but for what is remembered; only one runs at a time."""
        for key in [key for key in self._known if key not in subjects or not subjects[key].live]:
            del self._known[key]  # of one that is suspended as well: time in which nobody could ask is no idle time
        spaces: dict[str, list[Key]] = {}
        for key, subject in subjects.items():
            if subject.live:
                with _kept_to(key):
                    self._take(key, subject, round_)
            spaces.setdefault(subject.namespace, []).append(key)
        found: dict[Key, Made] = {}
        for namespace, keys in spaces.items():
            live = [key for key in keys if subjects[key].live]
            with_gpus = [key for key in live if subjects[key].limits.gpus]
            unknown = "" if not with_gpus or namespace in budgets else self._budgets.wrong(namespace)
            if with_gpus and namespace not in budgets and not unknown:
                live = [key for key in live if key not in with_gpus]  # not known whether there is a budget: nothing
            granted: Mapping[Key, int] = {}
            budget = budgets.get(namespace)
            if with_gpus and budget is not None:
                others = {key: gpus for key, gpus in unseen.items() if key[0] == namespace}
                granted = self._granted(budget, {key: subjects[key] for key in keys}, others)
            for key in live:
                why = unknown if key in with_gpus else ""
                limits = replace(subjects[key].limits, granted=granted.get(key), unknown=why)
                with _kept_to(key):
                    found[key] = self._decide(key, subjects[key], limits)
        return found

    def _granted(self, budget: int, subjects: Mapping[Key, Subject], others: Mapping[Key, int]) -> dict[Key, int]:
        """What each service may have of the namespace's GPUs now. `others`: what the rest holds, it is theirs."""
        claims = [Claim("/".join(key), OTHERS_FIRST, 1, gpus, gpus, gpus) for key, gpus in others.items()]
        targets = {}
        for key, s in subjects.items():
            if s.live and s.limits.mode == "Internal":
                wanted = max(s.current, s.limits.least())
                with _kept_to(key):
                    made = cycle.decide(*self._question(key, s, s.limits)).replicas
                    wanted = max(made.target, s.limits.least())
                targets[key] = wanted
                held = max(s.held, s.current)  # what is decided is on its way
                claims.append(Claim("/".join(key), s.priority, s.limits.gpus, s.limits.least(), wanted, held))
            else:
                claims.append(Claim("/".join(key), OTHERS_FIRST, s.limits.gpus, s.current, s.current, s.held))
        grants = share(budget, claims)
        found = {}
        for key, wanted in targets.items():
            grant, current = grants["/".join(key)], subjects[key].current
            # One that wants fewer lets go for its own reason and in its own time: the budget asks nothing of it.
            found[key] = current if wanted <= min(grant.later, current) else grant.now
        return found

    def _take(self, key: Key, subject: Subject, round_: Round) -> None:
        """Add what the service's pods have said to what is known of it."""
        known = self._known.get(key)
        if known is None or known.uid != subject.uid:
            known = self._known[key] = _Known(subject.uid, Memory.new(self._clock()), Stopwatch(self._clock))
        pods = [r.uid for r in subject.replicas]
        if subject.size is not None and known.size not in (None, subject.size):
            # Until the last replica had changed, it was the old size that gave figures.
            known.signals.forget_latency()
            known.memory = replace(known.memory, full=())
        known.size = subject.size or known.size
        known.signals.keep(pods)
        known.ages.keep([*pods, CHANGE])
        for uid in pods:
            if uid in round_.engines:
                known.signals.add(round_.engines[uid])
        routers = {target.uid for target, _ in subject.routers}
        known.held = {uid: said for uid, said in {**known.held, **round_.routers}.items() if uid in routers}
        for replica in subject.replicas:
            if replica.again:
                known.waiting.discard(replica.uid)  # how old it is by then says nothing of a start
            elif not replica.ready:
                known.waiting.add(replica.uid)
            elif replica.uid in known.waiting and replica.started is not None:
                known.waiting.discard(replica.uid)
                before = known.start if known.start is not None else subject.start_seconds
                mean = replica.started if before is None else before + START_WEIGHT * (replica.started - before)
                known.start = max(mean, 1.0)
        known.waiting &= set(pods)

    def _question(self, key: Key, subject: Subject, limits: Limits) -> tuple[Limits, View, Memory, Sizes, Look, State]:
        known, now, wall = self._known[key], self._clock(), self._wall()
        signals, today = known.signals, datetime.fromtimestamp(wall, UTC)
        view = View(
            now=now,
            current=subject.current,
            replicas=tuple(
                Replica(
                    uid=r.uid,
                    ready=r.ready,
                    since=known.ages.elapsed(r.uid, datetime.fromtimestamp(r.changed, UTC), today).total_seconds(),
                    unschedulable=r.unschedulable,
                    load=signals.load(r.uid, now) if r.ready else None,
                )
                for r in subject.replicas
            ),
            held=_held(subject, known.held, now),
            traffic=signals.traffic(now),
            line=signals.fit.line(),
            step=signals.step(now),
            start_seconds=known.start or subject.start_seconds or USUAL_START,
        )
        look = Look(
            now=wall,
            size=subject.size,
            gpus=subject.gpus,
            kv=subject.kv,
            pipeline=subject.pipeline,
            attainment=signals.attainment(limits.itl_slo, limits.ttft_slo, now),
            preempted=signals.preempted(now),
            failed=subject.failed or _overdue(subject, known.ages, today),
            expected=subject.expected.kv,
            unknown=subject.expected.unknown,
        )
        return limits, view, known.memory, subject.sizes, look, self._state(known, subject)

    @staticmethod
    def _state(known: _Known, subject: Subject) -> State:
        """What is on record; with the clocks as they run here, as long as it is the same change."""
        state, here = subject.state, known.state
        if here is None or not same_change(plan_of(here), plan_of(state)):
            return state
        return here

    def _decide(self, key: Key, subject: Subject, limits: Limits) -> Made:
        known = self._known[key]
        both = cycle.decide(*self._question(key, subject, limits))
        known.memory, known.state = both.memory, both.state
        if both.layout.changed:
            known.signals.forget_latency()
        made = Made(subject.uid, limits.mode, both, subject.plan, known.start)
        decision = both.replicas
        self._tally.decided(decision.kind, cause_of(decision))
        ready = sum(r.ready for r in subject.replicas)
        if known.asked_up is None and decision.target > ready:
            known.asked_up = (self._clock(), ready + 1)
        elif known.asked_up is not None and ready >= known.asked_up[1]:
            self._tally.became_ready(self._clock() - known.asked_up[0])
            known.asked_up = None
        elif known.asked_up is not None and decision.target < known.asked_up[1]:
            known.asked_up = None
        return made


def _overdue(subject: Subject, ages: Stopwatch, now: datetime) -> str:
    plan = subject.plan
    if plan is None or plan.phase != "Changing" or plan.since is None:
        return ""
    late = ages.elapsed(CHANGE, plan.since, now).total_seconds() > SLOWEST_CHANGE
    return f"it is not in place after {SLOWEST_CHANGE / 60:.0f} minutes" if late else ""


@contextmanager
def _kept_to(key: Key) -> Iterator[None]:
    """What fails for one service leaves it as it is, and the others get their decisions."""
    try:
        yield
    except Exception:
        log.exception("nothing is decided for %s", "/".join(key))


def _held(subject: Subject, said: Mapping[str, tuple[float, float, float]], now: float) -> Held | None:
    """What all routers hold. One that is not ready and does not answer gets nothing new and does not count. At zero,
    what one of them says is enough to wake the service."""
    if not subject.routed:
        return Held()
    answers: list[tuple[float, float] | None] = []
    for target, ready in subject.routers:
        at, requests, tokens = said.get(target.uid, (float("-inf"), 0.0, 0.0))
        if now - at <= STALE:
            answers.append((requests, tokens))
        elif ready:
            answers.append(None)
    if not answers:
        return None
    whole = held_of(answers)
    if whole is None and subject.current == 0:
        partly = held_of(answer for answer in answers if answer is not None)
        return partly if partly is not None and partly.requests > 0 else None
    return whole


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text.replace(",", ""))
    except ValueError:
        return None
