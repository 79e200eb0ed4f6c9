"""The supervisor's part in a switch of the layout: it leads workers, cores and API servers through the phases that
`parallel/switching.py` decides on, and holds what must survive a core: what the old ones have handed over.

Only messages go through here; weights and KV go from worker to worker.
"""

import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import zmq

from kvern_engine.config import EngineConfig
from kvern_engine.core.handed import Handover, Share
from kvern_engine.core.placement import Placement, Room, kept_blocks, place, with_recent_prefixes, without_kv
from kvern_engine.core.plan import WorkerReady
from kvern_engine.ipc import CoreReady
from kvern_engine.logs import fields
from kvern_engine.parallel.layout import Layout
from kvern_engine.parallel.messages import (
    GIVEN_UP,
    ChangeLayout,
    Drained,
    Fence,
    Finish,
    Go,
    Handed,
    Hold,
    LayoutAnswer,
    LayoutChanged,
    LayoutState,
    MoveKv,
    Reform,
    Standing,
    Switched,
    SwitchRecord,
    SwitchToSupervisor,
    TakeOver,
    TookOver,
)
from kvern_engine.parallel.switching import Party, Phase, Switch, judge, servers
from kvern_engine.transport import connect, core_in, encode, worker_in
from kvern_engine.worker.limits import GPU_SWITCH
from kvern_engine.worker_client import SILENCE_SECONDS, is_stopped, merge_ready

log = logging.getLogger(__name__)

KEPT_RECORDS = 16
LOOK_SECONDS = 0.5  # how often it is looked who has been stopped: meanwhile no core watches its workers
RANK_SECONDS = 20.0  # how long ranks wait for each other: less than a phase, so that they say who is missing
KEPT_SHARE = 0.06  # of an arena's blocks: up to here idle prefixes are kept where there is no room for two arenas
_PHASES_OF_STEPS = {"reform": Phase.RESHARDING, "kv": Phase.MOVING, "finish": Phase.ROLLING_BACK}


class Pod(Protocol):
    """What a switch needs of the supervisor."""

    def start_core(self, engine: int, switch: int) -> None:
        """A core for a layout to come."""

    def end_core(self, engine: int) -> None:
        """It belongs to no layout any more; that it ends is no failure."""

    def peers(self, ranks: Sequence[int]) -> list[tuple[int, int | None, str]]:
        """(rank, pid, place) of these workers."""

    def tell_servers(self, message: Any, server: int | None = None) -> None:
        """To all API servers, or to one."""

    def adopt(self, layout: Layout, engines: Sequence[CoreReady]) -> None:
        """The pod has this layout now."""

    def give_up(self, engine: int, reason: str) -> None:
        """An engine that does not answer any more."""

    def processes(self) -> list[tuple[str, int, int]]:
        """(kind, index, pid) of the workers and cores that live."""


class LayoutSwitch:
    """Switches one after the other; `layout` is the present one. Call `tick` when `timeout` is over."""

    def __init__(
        self,
        pod: Pod,
        config: EngineConfig,
        context: "zmq.Context[zmq.Socket[bytes]]",
        folder: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pod, self._config, self._context, self._folder, self._clock = pod, config, context, folder, clock
        self.layout = Layout.of(config)
        self.engines: dict[int, CoreReady] = {}
        self._generation = 0
        self._number = 0
        self._records: list[SwitchRecord] = []
        self._totals: dict[str, int] = {}
        self._run: Switch | None = None
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._handovers: dict[int, Handover] = {}
        self._before: dict[int, WorkerReady] = {}  # engine of the old layout -> what its workers had reported
        self._ready: dict[int, WorkerReady] = {}
        self._taken_over: dict[int, CoreReady] = {}
        self._placement: Placement | None = None
        self._details: dict[str, float] = {}
        self._stopped: dict[tuple[str, int], float] = {}  # (kind, index) -> since when
        self._lost: set[int] = set()  # engines of the old layout that went back without their K and V
        self._ended_servers: set[int] = set()

    # ------------------------------------------------------------ what comes

    @property
    def running(self) -> bool:
        return self._run is not None

    def timeout(self, otherwise: float) -> float:
        """Seconds until `tick` has something to do."""
        if self._run is None:
            return otherwise
        return max(0.0, min(otherwise, LOOK_SECONDS, self._run.deadline - self._clock()))

    def obstacle(self) -> str | None:
        """Why this pod cannot change its layout at all, for people; None where it can."""
        config = self._config
        if config.nnodes > 1:
            return "the ranks are in several pods, whose layout is fixed"
        if config.distributed_executor_backend == "uni":
            return "the worker runs in its core's process (distributed_executor_backend uni)"
        if config.pipeline_parallel_size > 1:
            return f"the model is a pipeline of {config.pipeline_parallel_size} stages, whose layout is fixed"
        if config.record_step_plans:
            return "step plans are recorded (record_step_plans), which are replayed on one layout"
        if len(self.engines) < self.layout.data:
            return "not all of its engines are ready"
        if not self._device.startswith(("cpu", "sim")) and os.environ.get(GPU_SWITCH) != "1":
            return f"on {self._device} that is for pods that were started with {GPU_SWITCH}=1"
        return None

    @property
    def _device(self) -> str:
        return str(next(iter(self.engines.values())).info.get("device", ""))

    def ask(self, message: ChangeLayout) -> None:
        """Somebody wants a size: answer, and begin where it is to be."""
        feasible = next(iter(self.engines.values())).feasible if self.engines else {}
        verdict = judge(
            message.tensor,
            message.generation,
            current=self.layout,
            known_generation=self._generation,
            running=self._run,
            feasible=feasible,
            obstacle=self.obstacle(),
        )
        if verdict.status < 300:
            self._generation = message.generation
        if verdict.begin:
            self._begin(message)
        self.report()
        answer = LayoutAnswer(message.ask, verdict.status, verdict.code, verdict.error)
        self._pod.tell_servers(answer, message.server)

    def _begin(self, message: ChangeLayout) -> None:
        self._number += 1
        target = Layout(self.layout.world // message.tensor, message.tensor)
        now = self._clock()
        run = self._run = Switch(
            self._number, self.layout, target, message.generation, now, servers=self._config.api_server_count
        )
        run.dead |= servers(self._ended_servers)
        self._handovers, self._ready, self._taken_over, self._placement, self._details = {}, {}, {}, None, {}
        self._stopped, self._lost = {}, set()
        for rank in range(target.world):
            self._sockets[f"worker {rank}"] = self._connect(worker_in(rank))
        for engine in range(max(self.layout.data, target.data)):
            self._sockets[f"core {engine}"] = self._connect(core_in(engine))
        log.info("layout: switching", extra=fields(source=str(self.layout), target=str(target)))
        for engine in range(self.layout.data, target.data):
            self._pod.start_core(engine, run.number)
        self._act(run.start(now))

    def _connect(self, name: str) -> "zmq.Socket[bytes]":
        return connect(self._context, zmq.PUSH, self._folder, name, linger_ms=1000)

    def read(self, message: SwitchToSupervisor) -> None:
        """What workers, cores and API servers say about a switch. What belongs to one that is over is ignored."""
        if isinstance(message, ChangeLayout):
            self.ask(message)
            return
        run, now = self._run, self._clock()
        if run is None or message.switch != run.number:
            return
        if isinstance(message, Drained):
            self._act(run.arrived(Party("server", message.server), now))
        elif isinstance(message, Standing):
            self._act(run.arrived(Party("core", message.engine), now))
        elif isinstance(message, Handed):
            self._handovers[message.handover.engine] = message.handover
            self._before[message.handover.engine] = message.ready
            self._act(run.arrived(Party("core", message.handover.engine), now))
        elif isinstance(message, TookOver):
            self._took_over(run, message, now)
        else:
            self._worker_answered(run, message, now)

    def _worker_answered(self, run: Switch, message: Switched, now: float) -> None:
        if message.error is not None:
            reason = f"worker {message.rank}: {message.error}"
            self._act(run.failed(reason, now))
            if message.step == "finish":  # there is no other way back
                self._pod.give_up(self._engine_of(Party("worker", message.rank)), reason)
                self.lost("worker", message.rank, reason)
        elif _PHASES_OF_STEPS[message.step] is run.phase:
            if message.ready is not None:
                self._ready[message.rank] = message.ready
            if message.lost_kv:
                self._lost.add(self._engine_of(Party("worker", message.rank)))
            for name, seconds in message.seconds.items():
                self._details[name] = max(self._details.get(name, 0.0), seconds)
            self._act(run.arrived(Party("worker", message.rank), now))

    def _took_over(self, run: Switch, message: TookOver, now: float) -> None:
        layouts = {Phase.ADOPTING: run.target, Phase.RESTORING: run.source}
        if run.phase in layouts and message.tensor == layouts[run.phase].tensor:
            self._taken_over[message.ready.engine] = message.ready
            self._act(run.arrived(Party("core", message.ready.engine), now))

    def lost(self, kind: str, index: int, reason: str) -> None:
        """A worker or core has ended."""
        engine = self._engine_of(Party(kind, index))
        self.engines.pop(engine, None)
        if self._run is not None:
            self._act(self._run.lost(Party(kind, index), reason, self._clock()))

    def server_ended(self, server: int) -> None:
        """An API server has ended as it was told to, while others still have requests: nothing more comes from it."""
        self._ended_servers.add(server)
        if self._run is not None:
            if self._run.phase is Phase.FREEZING:
                self._fence(self._run, range(self._run.source.data), [server])
            self._act(self._run.ended(Party("server", server), self._clock()))

    def tick(self) -> None:
        """Look at the clock, and at who has been stopped."""
        if self._run is not None:
            self._look(self._clock())
        if self._run is not None:
            phase, late = self._run.expired(self._clock())
            for party in sorted(late, key=str):
                self._pod.give_up(self._engine_of(party), f"{party} did not answer after a switch of the layout failed")
            self._act(phase)

    def _look(self, now: float) -> None:
        """A process that is stopped would hold up everybody until its phase is over: it is given up as soon as a core
        would give it up."""
        for kind, index, pid in self._pod.processes():
            if not is_stopped(pid):
                self._stopped.pop((kind, index), None)
            elif now - self._stopped.setdefault((kind, index), now) >= SILENCE_SECONDS:
                party = Party(kind, index)
                reason = f"{party} is stopped (SIGSTOP), no sign of life for {SILENCE_SECONDS:g} s"
                self._pod.give_up(self._engine_of(party), reason)
                self.lost(kind, index, reason)

    def _engine_of(self, party: Party) -> int:
        return self.layout.coordinates(party.index)[0] if party.kind == "worker" else party.index

    # ------------------------------------------------------------ what is done

    def _act(self, phase: Phase | None) -> None:
        """Do what a phase that has just begun asks for."""
        run = self._run
        if run is None or phase is None:
            return
        self.report()
        if phase is Phase.FREEZING:
            self._pod.tell_servers(Hold(run.number, run.source.data))
            self._fence(run, range(run.source.data), self._ended_servers)
        elif phase is Phase.RESHARDING:
            meeting, target = f"file://{self._meeting(run)}", run.target
            kept = self._kept(run) if self._device.startswith("cuda") else None
            self._tell_workers(Reform(run.number, target.data, target.tensor, meeting, RANK_SECONDS, kept))
        elif phase is Phase.MOVING:
            self._place(run)
        elif phase is Phase.ADOPTING:
            assert self._placement is not None
            self._hand_out(run, run.target, list(self._placement.shares))
        elif phase is Phase.ROLLING_BACK:
            log.warning("layout: going back", extra=fields(layout=str(run.source), reason=run.reason))
            self._meeting(run).with_suffix(GIVEN_UP).touch()
            self._tell_workers(Finish(run.number, False))
            # Cores that have not stopped yet do so now: they go on with the same, whatever is still on its way to them.
            late = sorted(party.index for party in run.waiting if party.kind == "core")
            self._fence(run, late, range(self._config.api_server_count))
        elif phase is Phase.RESTORING:
            self._taken_over = {}
            living = [self._back(h) for e, h in sorted(self._handovers.items()) if Party("core", e) in run.waiting]
            self._hand_out(run, run.source, living)
        elif run.is_over:
            self._finish(run)

    def _fence(self, run: Switch, engines: Iterable[int], absent: Iterable[int]) -> None:
        """To cores, in the place of API servers for which they are not to wait."""
        for engine, server in itertools.product(engines, absent):
            self._tell("core", engine, Fence(run.number, server))

    def _meeting(self, run: Switch) -> Path:
        return Path(self._folder).absolute() / f"switch-{run.number}"

    def _kept(self, run: Switch) -> list[list[int]]:
        """Where there is no room for two arenas: the blocks that are to outlive the old one, by engine. What is not
        among them is forgotten, whether the switch succeeds or not."""
        kept = []
        for engine in range(run.source.data):
            ready, handover = self._before[engine], self._handovers[engine]
            used = len(kept_blocks(with_recent_prefixes(handover, 0), ready.block_size))
            room = max(0, int(KEPT_SHARE * ready.num_blocks) - used)
            self._handovers[engine] = with_recent_prefixes(handover, room)
            kept.append(kept_blocks(self._handovers[engine], ready.block_size))
        return kept

    def _back(self, handover: Handover) -> Share:
        """What an old engine takes back: block by block, where its workers still have them."""
        if handover.engine not in self._lost:
            return handover.unmoved()
        log.warning("layout: engine %d computes its KV again, for which there was no room", handover.engine)
        return without_kv(handover)

    def _place(self, run: Switch) -> None:
        """Share out what was handed over, if all of it can go on."""
        rooms = []
        for engine in range(run.target.data):
            ready = self._merged(run.target, engine)
            rows = min(ready.max_num_seqs, ready.max_num_batched_tokens)
            rooms.append(Room(ready.num_blocks, ready.block_size, rows))
            longest = min(ready.max_model_len, ready.num_blocks * ready.block_size)
            needed = max(handover.max_model_len for handover in self._handovers.values())
            if longest < needed:
                text = f"an engine of {run.target.tensor} would hold {longest} tokens, and requests may have {needed}"
                self._act(run.failed(text, self._clock()))
                return
        handovers = [self._handovers[engine] for engine in range(run.source.data)]
        self._placement = place(handovers, run.source, run.target, rooms)
        self._tell_workers(MoveKv(run.number, [(*pair, blocks) for pair, blocks in self._placement.moves.items()]))

    def _merged(self, layout: Layout, engine: int) -> WorkerReady:
        return merge_ready([self._ready[rank] for rank in layout.ranks_of(engine)])

    def _hand_out(self, run: Switch, layout: Layout, shares: Sequence[Any]) -> None:
        for share in shares:
            ranks = layout.ranks_of(share.engine)
            going_back = layout is run.source
            ready = self._before[share.engine] if going_back else self._merged(layout, share.engine)
            order = TakeOver(run.number, layout.data, layout.tensor, self._pod.peers(ranks), ready, share)
            self._tell("core", share.engine, order)

    def _tell_workers(self, message: Reform | MoveKv | Finish) -> None:
        for name, sock in self._sockets.items():
            if name.startswith("worker"):
                sock.send(encode(message), zmq.NOBLOCK)

    def _tell(self, kind: str, index: int, message: Any) -> None:
        self._sockets[f"{kind} {index}"].send(encode(message), zmq.NOBLOCK)

    def _finish(self, run: Switch) -> None:
        """It is over: cores begin, API servers go on."""
        switched = run.phase is Phase.SWITCHED
        frozen = Phase.FREEZING in run.seconds
        layout = run.target if switched else run.source
        if switched:
            self.layout, self.engines = layout, dict(sorted(self._taken_over.items()))
            self._pod.adopt(layout, list(self.engines.values()))
        for engine in range(layout.data, max(run.source.data, run.target.data)):
            self._pod.end_core(engine)
        if frozen:
            for engine in self._taken_over:
                self._tell("core", engine, Go(run.number))
            engine_of = self._placement.engine_of if switched and self._placement is not None else {}
            engines = list(self.engines.values())
            self._pod.tell_servers(LayoutChanged(run.number, layout.data, layout.tensor, engines, engine_of))
        if switched:
            self._tell_workers(Finish(run.number, True))
        self._record(run, switched)
        for sock in self._sockets.values():
            sock.close()
        self._sockets = {}
        for file in (self._meeting(run), self._meeting(run).with_suffix(GIVEN_UP)):
            file.unlink(missing_ok=True)
        self._run = None
        self.report()

    def _record(self, run: Switch, switched: bool) -> None:
        placed = self._placement if switched else None
        record = SwitchRecord(
            source=run.source.tensor,
            target=run.target.tensor,
            generation=run.generation,
            outcome=str(run.phase),
            reason=run.reason,
            seconds={str(phase): round(s, 4) for phase, s in run.seconds.items()}
            | {name: round(s, 4) for name, s in self._details.items()},
            pause=round(run.pause, 4),
            kept=placed.kept if placed else 0,
            recomputed=placed.recomputed if placed else 0,
            ended=time.time(),
        )
        self._records = [record, *self._records][:KEPT_RECORDS]
        self._totals[record.outcome] = self._totals.get(record.outcome, 0) + 1
        say = log.info if switched else log.error
        extra = fields(source=record.source, target=record.target, pause_seconds=record.pause, kept=record.kept)
        say("layout: %s", record.outcome if switched else f"{record.outcome}: {record.reason}", extra=extra)

    def report(self) -> None:
        """Tell the API servers where things stand."""
        run = self._run
        self._pod.tell_servers(
            LayoutState(
                data=self.layout.data,
                tensor=self.layout.tensor,
                target=self.layout.tensor if run is None or run.is_going_back else run.target.tensor,
                generation=self._generation,
                phase="Stable" if run is None else str(run.phase),
                progress=1.0 if run is None else run.progress,
                last=list(self._records),
                totals=dict(self._totals),
            )
        )
