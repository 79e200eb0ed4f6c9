"""One pass over one service: observe, reconcile, carry out, write the status, say what changed.

Everything that can go wrong ends here: a spec that cannot be used and an apply that is refused become conditions, an
API server that is away is tried again, a mistake of ours is logged with its trace, shown in Degraded and backed off.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from kvern_operator.admin import Prober
from kvern_operator.api.load import ManifestError, parse_service
from kvern_operator.api.status import Condition, InferenceServiceStatus
from kvern_operator.api.types import InferenceService
from kvern_operator.apply import NAME_TAKEN, Executor, NamespaceEndingError
from kvern_operator.autoscale.loop import Autoscaler
from kvern_operator.autoscale.subject import subject_of
from kvern_operator.desired import engine, meta
from kvern_operator.desired.router import router_name
from kvern_operator.events import Poster, news
from kvern_operator.kube import ApiError, NotLeadingError
from kvern_operator.metrics import Metrics
from kvern_operator.mirror import Mirror
from kvern_operator.nodes import NodeReader
from kvern_operator.notices import NoticeReader, Subject
from kvern_operator.observe import Scene, is_own, observe, read_status
from kvern_operator.observed import Object, Refusal
from kvern_operator.queue import Key
from kvern_operator.reconcile import Plan, invalid_spec, reconcile
from kvern_operator.replicas import marked_at, replicas_of, wants_room
from kvern_operator.room import spare_replicas
from kvern_operator.settings import Settings
from kvern_operator.stopwatch import Stopwatch

log = logging.getLogger("kvern.controller")

LONGEST_PASS = 120.0  # seconds; a pass that takes longer is cut off and backed off
DRY_RUN_AGAIN = (
    600.0  # seconds after which a refusal of the same generation is checked again: quotas and policies change
)


# Seconds that pods have to answer before the first pass after a start: no status is to say for a moment that they are
# silent, and nobody is to be drained for a load that is not known yet.
FIRST_ANSWERS = 1.0
LONGEST_FIRST = 30.0  # seconds that a pod's turn may take where thousands are asked at once; then it counts as silent


GARBAGE_TIME = 10.0  # seconds that what an earlier service has left may take to go before it is said


class RefusedError(Exception):
    """The API server refused something; the status says what. Raised to be backed off."""


@dataclass
class _Memory:
    """What is known of a service beyond the cluster's state; all of it can be lost."""

    uid: str
    refusals: tuple[Refusal, ...] = ()  # of the last pass
    overrides_refused: tuple[Refusal, ...] = ()
    refused_at: tuple[int, float] = (-1, 0.0)  # generation, clock
    asked: bool = False  # its pods have been asked since this process leads
    asked_since: float | None = None  # clock; None: not begun
    dry_run: set[str] = field(default_factory=set)  # digests of objects that the API server would take
    taken_since: float | None = None  # clock
    untold: list[str] = field(default_factory=list)  # notes of what was done that no Event tells yet
    noted: frozenset[str] = frozenset()  # notes of the last plan
    pods: frozenset[str] = frozenset()  # UIDs in the last pass
    doubted: set[str] = field(default_factory=set)  # pods that have said that their Secret is missing
    drains: Stopwatch = field(default_factory=Stopwatch)

    def too_long(self, taken: list[Refusal]) -> tuple[Refusal, ...]:
        """What still waits for a name after the time that the garbage collector needs."""
        if not taken:
            self.taken_since = None
            return ()
        self.taken_since = self.taken_since or time.monotonic()
        return tuple(taken) if time.monotonic() - self.taken_since > GARBAGE_TIME else ()


def blamed(
    status: InferenceServiceStatus | None, reason: str, message: str, generation: int, now: datetime
) -> InferenceServiceStatus:
    """The last status with Degraded saying what keeps the operator from going on."""
    status = status or InferenceServiceStatus()
    before = status.condition("Degraded")
    since = before.last_transition_time if before is not None and before.status == "True" else now
    degraded = Condition(
        type="Degraded",
        status="True",
        observed_generation=generation,
        last_transition_time=since,
        reason=reason,
        message=message[:2048],
    )
    kept = [c for c in status.conditions if c.type != "Degraded"]
    return status.model_copy(update={"conditions": [*kept, degraded]})


class Controller:
    """`work` is what the queue calls. All state of importance is in the cluster."""

    def __init__(
        self,
        mirror: Mirror,
        executor: Executor,
        prober: Prober,
        notices: NoticeReader,
        nodes: NodeReader,
        poster: Poster,
        settings: Settings,
        metrics: Metrics,
        forget: Callable[[Key], None],
        autoscaler: Autoscaler | None = None,
    ) -> None:
        self._mirror, self._executor, self._prober = mirror, executor, prober
        self._notices, self._nodes = notices, nodes
        self._poster, self.settings, self._metrics, self._forget = poster, settings, metrics, forget
        self._autoscaler = autoscaler
        self._memory: dict[Key, _Memory] = {}

    async def work(self, key: Key) -> float | None:
        """One pass. Returns after how many seconds to look again; raises to be backed off."""
        began, result = time.monotonic(), "error"
        try:
            async with asyncio.timeout(LONGEST_PASS):
                again = await self._pass(key)
            result = "ok"
            return again
        except NamespaceEndingError:
            result = "namespace_ending"
            raise
        except ApiError as error:
            result = "conflict" if error.status == 409 else "api_error"
            log.log(logging.DEBUG if error.status == 409 else logging.WARNING, "%s/%s: %s", *key, error)
            raise
        except RefusedError:
            result = "refused"
            raise
        except NotLeadingError:
            result = "not_leading"
            raise
        except Exception as error:
            log.exception("%s/%s: the pass failed", *key)
            await self._blame(key, error)
            raise
        finally:
            self._metrics.reconciled(result, time.monotonic() - began)

    async def _pass(self, key: Key) -> float | None:
        document = self._mirror.service(key)
        if document is None or document["metadata"].get("deletionTimestamp"):
            # Owner references do the deleting: nothing is held up by an operator that is not there.
            self._forget_service(key, document)
            return None
        memory = self._memory.get(key)
        if memory is None or memory.uid != document["metadata"]["uid"]:
            memory = self._memory[key] = _Memory(document["metadata"]["uid"])
        now = datetime.now(UTC)
        previous = read_status(document)
        try:
            service = parse_service({k: v for k, v in document.items() if k != "status"})
        except ManifestError as error:
            problems = [str(problem) for problem in error.problems]
            generation = document["metadata"]["generation"]
            if self._autoscaler is not None:
                self._autoscaler.watch(key, None)
            await self._write(key, document, previous, invalid_spec(previous, generation, problems, now))
            return None
        return await self._reconcile(key, service, document, memory, now)

    async def _reconcile(
        self, key: Key, service: InferenceService, document: Object, memory: _Memory, now: datetime
    ) -> float | None:
        scene = self._observe(key, service, document, memory)
        if not memory.asked and not self._heard(key, scene, memory):
            return FIRST_ANSWERS
        decided = await self._record_decisions(key, service, document, now)
        if decided is not document:
            document, scene = decided, self._observe(key, service, decided, memory)
        scene = await self._with_room(scene, service, memory)
        plan = reconcile(service, scene.observed, now, self.settings)
        if await self._check(plan, service, memory):
            spare, scene = scene.observed.spare_replicas, self._observe(key, service, document, memory)
            scene = replace(scene, observed=replace(scene.observed, spare_replicas=spare))
            plan = reconcile(service, scene.observed, now, self.settings)
        outcome = await self._executor.carry_out(key, memory.uid, plan, scene)
        found, memory.refusals = memory.refusals, tuple(outcome.refusals) or memory.too_long(outcome.taken)
        if memory.refusals != found:
            # The status is to say what was refused, or that it is no longer.
            observed = replace(scene.observed, refusals=memory.overrides_refused + memory.refusals)
            plan = replace(plan, status=reconcile(service, observed, now, self.settings).status)
        # What has not happened is not told: its notes are for the pass that succeeds.
        for note in plan.notes if outcome.complete else ():
            if note not in memory.noted:  # a pod that does not hear of a switch is told again, and nobody else
                log.info("%s/%s: %s", *key, note)
                memory.untold.append(note)
        memory.noted = frozenset(plan.notes)
        await self._write(key, document, scene.observed.status, plan.status, memory.untold)
        memory.untold.clear()
        self._after(key, service, scene, plan, memory)
        if outcome.refusals:
            raise RefusedError("; ".join(r.message for r in outcome.refusals))
        if outcome.taken:
            return min(NAME_TAKEN, plan.requeue_after or NAME_TAKEN)
        return plan.requeue_after

    async def _record_decisions(self, key: Key, service: InferenceService, document: Object, now: datetime) -> Object:
        """What was decided from metrics goes into status before anything is done for it: whoever leads next reads it
        there. The document as it then is."""
        status = read_status(document)
        if self._autoscaler is None or status is None:
            return document
        decided = self._autoscaler.record(key, service, status, now)
        if decided is status:
            return document
        await self._write(key, document, status, decided)
        return self._mirror.service(key) or document

    def _heard(self, key: Key, scene: Scene, memory: _Memory) -> bool:
        """Ask the pods for the first time. Whether all that can be heard of them has been."""
        now = time.monotonic()
        began, memory.asked_since = memory.asked_since, memory.asked_since or now
        self._prober.watch(key, scene.targets, scene.leaving)
        unheard = any(p.served and p.in_flight is None for p in scene.observed.pods if p.admin_address)
        waiting = began is None or (self._prober.untried(key) and now - began < LONGEST_FIRST)
        memory.asked = not (unheard and waiting)
        return memory.asked

    def _observe(self, key: Key, service: InferenceService, document: Object, memory: _Memory) -> Scene:
        if (
            memory.refused_at[0] != service.metadata.generation
            or time.monotonic() - memory.refused_at[1] > DRY_RUN_AGAIN
        ):
            memory.overrides_refused = ()
        children, now = self._mirror.children(key), datetime.now(UTC)
        has_replicas = any(c.kind == "StatefulSet" and is_own(c, memory.uid) for c in children)
        marks = {c.name: marked_at(c.obj) for c in children if c.kind == "StatefulSet" and is_own(c, memory.uid)}
        drains = {name: memory.drains.elapsed(name, mark, now) for name, mark in marks.items() if mark is not None}
        memory.drains.keep(drains)
        return observe(
            service,
            children,
            self._mirror.pods(key),
            self._prober.reports(key),
            status=read_status(document),
            notices=self._notices.of(key),
            refusals=memory.overrides_refused + memory.refusals,
            admin_secret=self._executor.has_secret(memory.uid, has_replicas),
            token=meta.admin_token(self.settings.operator_key, service),
            leaving_for=drains,
        )

    async def _with_room(self, scene: Scene, service: InferenceService, memory: _Memory) -> Scene:
        """The scene with the room that the nodes have, where what comes next depends on it."""
        present = frozenset(p.uid for p in scene.observed.pods)
        gone, memory.pods = memory.pods - present, present
        if not wants_room(service, scene.observed):
            return scene
        room = await self._nodes.room(gone)
        if room is None:
            return scene
        each, pods = service.spec.resources.nodes_per_replica, scene.observed.pods
        unseen = sum(p.component == meta.ENGINE and not p.terminating and p.uid not in room.pods for p in pods)
        owners = {p.owner for p in pods}
        unseen += sum(each for kind, name in scene.live if kind == "StatefulSet" and name not in owners)
        spec = engine.pod_template(service, "", {}, self.settings)["spec"]
        spare = spare_replicas(room, spec, each, unseen)
        return replace(scene, observed=replace(scene.observed, spare_replicas=spare))

    async def _check(self, plan: Plan, service: InferenceService, memory: _Memory) -> bool:
        """Dry-run what a plan wants checked first. True where something is refused that was not known to be."""
        unknown = {meta.digest(obj, 16): obj for obj in plan.dry_run}
        unknown = {digest: obj for digest, obj in unknown.items() if digest not in memory.dry_run}
        if not unknown:
            return False
        refusals = await self._executor.dry_run(tuple(unknown.values()))
        if not refusals:
            memory.dry_run.update(unknown)
            return False
        memory.overrides_refused = tuple(refusals)
        memory.refused_at = (service.metadata.generation, time.monotonic())
        return True

    async def _write(
        self,
        key: Key,
        document: Object,
        previous: InferenceServiceStatus | None,
        status: InferenceServiceStatus,
        notes: Sequence[str] = (),
    ) -> None:
        """The status where it differs, then the Events: whoever loses the race for the status says nothing."""
        if status != previous:
            await self._executor.write_status(key, document, status)
        await self._poster.post(news(previous, status, notes), document)

    def _after(self, key: Key, service: InferenceService, scene: Scene, plan: Plan, memory: _Memory) -> None:
        """Whom to ask and what to listen for until the next pass."""
        self._prober.watch(key, scene.targets, scene.leaving)
        if self._autoscaler is not None:
            now = datetime.now(UTC)
            replicas = replicas_of(service, scene.observed, now, self.settings)
            subject = subject_of(service, scene.observed, replicas, plan.status, now)
            self._autoscaler.watch(key, subject, plan.status)
        ready = plan.status.condition("Ready")
        if ready is None or ready.status == "True" or plan.status.desired_replicas == 0:
            self._notices.drop(key)
            return
        pods = [p for p in scene.observed.pods if not p.terminating]
        names = {name for _, name in scene.live} | {p.name for p in pods}
        self._notices.want(key, Subject(frozenset(names), router_name(service)))
        secret = f'"{meta.admin_secret_name(service)}" not found'
        waiting = {n.uid for n in scene.observed.notices if n.reason == "FailedMount" and secret in n.message}
        if waiting - memory.doubted:  # an Event outlives what it tells of
            memory.doubted |= waiting
            self._executor.doubt_secret(service.metadata.uid)

    def _forget_service(self, key: Key, document: Object | None) -> None:
        self._prober.watch(key, ())
        self._notices.drop(key)
        if self._autoscaler is not None:
            self._autoscaler.watch(key, None)
        memory = self._memory.pop(key, None)
        if memory is not None:
            self._executor.forget(key, memory.uid)
        if document is None:
            self._mirror.forget(key)
            self._forget(key)

    async def _blame(self, key: Key, error: Exception) -> None:
        document = self._mirror.service(key)
        if document is None:
            return
        previous = read_status(document)
        words = str(error) or "no message"
        message = f"the operator failed on this service and tries again: {type(error).__name__}: {words}"
        status = blamed(
            previous, "InternalError", message, document["metadata"].get("generation", 0), datetime.now(UTC)
        )
        try:
            async with asyncio.timeout(10):
                await self._write(key, document, previous, status)
        except (ApiError, NotLeadingError, TimeoutError) as again:
            log.warning("%s/%s: the failure cannot be written into the status: %s", *key, again)
