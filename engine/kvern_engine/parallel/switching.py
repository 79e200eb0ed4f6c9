"""Where a switch of the layout stands: its phases, whom each waits for, and the way back.

Pure: no sockets, no processes, no clock. `layout_switch.py` tells what has come and does what a phase says.

    Preparing -> Freezing -> Resharding -> MovingKV -> Adopting -> Switched
        \\___________\\___________\\____________\\___________\\-> RollingBack -> Restoring -> RolledBack

Until the new cores have taken over, nothing of the old layout is given up, so that every failure leads back to it.
Whoever has died meanwhile is not waited for; its engine is then as dead as it would be without a switch.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvern_engine.parallel.layout import Layout


class Phase(StrEnum):
    PREPARING = "Preparing"  # cores for engines that are to be are started; everybody serves
    FREEZING = "Freezing"  # no new requests for the cores, what is in flight ends, cores hand over
    RESHARDING = "Resharding"  # workers build the new layout and exchange weights
    MOVING = "MovingKV"  # workers exchange KV
    ADOPTING = "Adopting"  # cores take over what they are given
    SWITCHED = "Switched"
    ROLLING_BACK = "RollingBack"  # workers let the new layout go
    RESTORING = "Restoring"  # the old cores take back what they had
    ROLLED_BACK = "RolledBack"


FORWARD = (Phase.PREPARING, Phase.FREEZING, Phase.RESHARDING, Phase.MOVING, Phase.ADOPTING, Phase.SWITCHED)
SECONDS = {
    Phase.PREPARING: 60.0,
    Phase.FREEZING: 60.0,  # a step may take long
    Phase.RESHARDING: 90.0,
    Phase.MOVING: 60.0,
    Phase.ADOPTING: 30.0,
    Phase.ROLLING_BACK: 30.0,
    Phase.RESTORING: 30.0,
}


@dataclass(frozen=True)
class Party:
    """Whom a phase waits for: a core (its engine), a worker (its rank) or an API server (its number)."""

    kind: str
    index: int

    def __str__(self) -> str:
        return f"{ {'core': 'engine core', 'server': 'API server'}.get(self.kind, self.kind) } {self.index}"


def cores(indices: Iterable[int]) -> set[Party]:
    return {Party("core", index) for index in indices}


def workers(ranks: Iterable[int]) -> set[Party]:
    return {Party("worker", rank) for rank in ranks}


def servers(numbers: Iterable[int]) -> set[Party]:
    return {Party("server", number) for number in numbers}


@dataclass
class Switch:
    """A switch from `source` to `target`. `arrived`, `failed`, `lost` and `expired` return the phase that begins with
    it, or None. Times are of one clock, in seconds."""

    number: int
    source: Layout
    target: Layout
    generation: int
    now: float
    phase: Phase = Phase.PREPARING
    waiting: set[Party] = field(default_factory=set)
    reason: str = ""  # why it goes back
    seconds: dict[str, float] = field(default_factory=dict)
    dead: set[Party] = field(default_factory=set)
    handed: set[int] = field(default_factory=set)  # engines of the source that have handed over
    servers: int = 1  # API servers
    _began: float = 0.0

    def __post_init__(self) -> None:
        self._began = self.now
        self.waiting = cores(range(self.source.data, self.target.data))

    def start(self, now: float) -> Phase | None:
        """After making it: the phase that begins, where nobody has to be waited for."""
        return self._advance(now) if not self.waiting else None

    @property
    def is_over(self) -> bool:
        return self.phase in (Phase.SWITCHED, Phase.ROLLED_BACK)

    @property
    def is_going_back(self) -> bool:
        return self.phase in (Phase.ROLLING_BACK, Phase.RESTORING)

    @property
    def progress(self) -> float:
        """0..1: the share of the phases that are over."""
        if self.phase in FORWARD:
            return FORWARD.index(self.phase) / (len(FORWARD) - 1)
        return 1.0 if self.is_over else 0.5

    @property
    def deadline(self) -> float:
        """When the present phase has taken too long."""
        return self._began + SECONDS.get(self.phase, 0.0)

    @property
    def pause(self) -> float:
        """How long nothing was computed: from freezing until it was over."""
        return sum(s for phase, s in self.seconds.items() if phase != Phase.PREPARING)

    def arrived(self, party: Party, now: float) -> Phase | None:
        """`party` has done what the phase asks of it."""
        if party not in self.waiting:
            return None
        self.waiting.discard(party)
        if self.phase in (Phase.FREEZING, Phase.ROLLING_BACK) and party.kind == "core":
            self.handed.add(party.index)
        return self._advance(now) if not self.waiting else None

    def ended(self, party: Party, now: float) -> Phase | None:
        """`party`, an API server, has ended as it was told to: nothing is to be waited for, and nothing is wrong."""
        self.dead.add(party)
        return self.arrived(party, now)

    def failed(self, reason: str, now: float) -> Phase | None:
        """Something has gone wrong; only the first reason is kept."""
        if self.is_over or self.is_going_back:
            return None
        self.reason = reason
        if self.phase is Phase.PREPARING:
            return self._enter(Phase.ROLLED_BACK, now)
        frozen_late = cores(range(self.source.data)) - cores(self.handed) if self.phase is Phase.FREEZING else set()
        return self._enter(Phase.ROLLING_BACK, now, workers(range(self.source.world)) | frozen_late)

    def lost(self, party: Party, reason: str, now: float) -> Phase | None:
        """`party` has died."""
        if self.is_over:
            return None
        self.dead.add(party)
        engine = self.source.coordinates(party.index)[0] if party.kind == "worker" else party.index
        if engine < self.source.data:  # it ends as a whole
            self.dead |= cores([engine]) | workers(self.source.ranks_of(engine))
        if not self.is_going_back:
            return self.failed(reason, now)
        self.waiting -= self.dead
        return self._advance(now) if not self.waiting else None

    def expired(self, now: float) -> tuple[Phase | None, set[Party]]:
        """(the phase that begins, who is to be given up) where the present one has taken too long: it goes back, and
        who does not answer on the way back is given up."""
        if self.is_over or now < self.deadline:
            return None, set()
        late = set(self.waiting)
        if not self.is_going_back:
            named = ", ".join(sorted(map(str, late)))
            return self.failed(
                f"{self.phase} took more than {SECONDS[self.phase]:g} s, waiting for {named}", now
            ), set()
        self.dead |= late
        self.waiting = set()
        return self._advance(now), late

    def _advance(self, now: float) -> Phase | None:
        source, target = self.source, self.target
        following = {
            Phase.PREPARING: (Phase.FREEZING, cores(range(source.data)) | servers(range(self.servers))),
            Phase.FREEZING: (Phase.RESHARDING, workers(range(source.world))),
            Phase.RESHARDING: (Phase.MOVING, workers(range(source.world))),
            Phase.MOVING: (Phase.ADOPTING, cores(range(target.data))),
            Phase.ADOPTING: (Phase.SWITCHED, set()),
            Phase.ROLLING_BACK: (Phase.RESTORING, cores(range(source.data))),
            Phase.RESTORING: (Phase.ROLLED_BACK, set()),
        }
        phase, parties = following[self.phase]
        return self._enter(phase, now, parties)

    def _enter(self, phase: Phase, now: float, parties: Iterable[Party] = ()) -> Phase | None:
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + now - self._began
        self.phase, self._began = phase, now
        self.waiting = set(parties) - self.dead
        if not self.waiting and not self.is_over:
            return self._advance(now)  # nobody is left to wait for
        return phase


@dataclass(frozen=True)
class Verdict:
    """What somebody who asks for a size is told: 200 it is so, 202 it is being done (`begin`: now), 400 or 409 why it
    is not, with a code for programs."""

    status: int
    begin: bool = False
    code: str = ""
    error: str = ""


def judge(
    tensor: int,
    generation: int,
    *,
    current: Layout,
    known_generation: int,
    running: Switch | None,
    feasible: Mapping[int, int],
    obstacle: str | None,
) -> Verdict:
    """Whether a switch to `tensor` is to begin. `known_generation`: the newest that was asked for; `feasible`: sizes
    and their KV tokens; `obstacle`: why this pod cannot switch at all."""
    if generation < known_generation:
        text = f"generation {generation} is older than {known_generation}, which was asked for before."
        return Verdict(409, code="stale_generation", error=text)
    if running is not None:
        if running.target.tensor == tensor and not running.is_going_back:
            return Verdict(202)
        text = (
            f"a switch from {running.source.tensor} to {running.target.tensor} is running ({running.phase}); ask again "
            "when it is over."
        )
        return Verdict(409, code="switch_in_progress", error=text)
    if tensor == current.tensor:
        return Verdict(200)
    if obstacle is not None:
        text = f"tensor must be {current.tensor}, the present size, got {tensor}: {obstacle}."
        return Verdict(400, code="layout_not_feasible", error=text)
    if tensor not in feasible:
        sizes = ", ".join(map(str, sorted(feasible)))
        text = f"tensor must be one of {sizes} on the {current.world} devices of this pod, got {tensor}."
        return Verdict(400, code="layout_not_feasible", error=text)
    return Verdict(202, begin=True)
