"""A pod around a `LayoutSwitch` whose processes say and do everything in an order that the test chooses.

Messages wait in channels, one from each socket to each process, and keep their order only there. Cores and API servers
are models of `core_process.py` and `engine_client.py`; the workers' part is the real one over devices that are none. A
request's tokens are 0, 1, 2, ...: what is lost, doubled or out of order shows at its API server.
"""

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from kvern_engine.config import EngineConfig
from kvern_engine.core.handed import Handover, HeldChoice, HeldRequest
from kvern_engine.core.plan import WorkerReady
from kvern_engine.ipc import Abort, AddRequest, CoreReady, EngineDead, Outputs, TokenOutput
from kvern_engine.layout_switch import LayoutSwitch
from kvern_engine.parallel.layout import Layout
from kvern_engine.parallel.messages import (
    Drained,
    Fence,
    Handed,
    Hold,
    LayoutChanged,
    LayoutState,
    Left,
    Reform,
    Standing,
    SwitchToWorker,
    TakeOver,
    TookOver,
)
from kvern_engine.request import SamplingParams
from kvern_engine.transport import decode_to_core
from kvern_engine.worker.switching import Switching

WORLD = 4
Name = tuple[str, int]  # a process: worker, core or server, and its number
_decode_to_worker = msgspec.msgpack.Decoder(SwitchToWorker).decode


def worker_ready(rank: int) -> WorkerReady:
    return WorkerReady(rank, 40, 4, 100, 1000, 1000, "cpu", "float32", max_num_seqs=8)


class NextWorker:
    """As `worker.switching.Next`: no device, only the layout."""

    def __init__(self, before: Any, ready: WorkerReady, message: Reform) -> None:
        if before.fails:
            raise ValueError("this machine has too little memory")
        self.worker, self.ready, self.seconds = device(before.rank, message.tensor), ready, {"build": 0.1}
        self._before = before

    def move_kv(self, moves: Sequence[Any]) -> dict[str, float]:
        if self._before.fails:
            raise RuntimeError("a rank of the pod is gone")
        return {"kv": 0.1}

    def undo(self) -> None:
        if self._before.fails == "on the way back, too":
            raise MemoryError("no room for the old arena")

    def settle(self) -> None:
        pass


def device(rank: int, tensor: int) -> Any:
    return SimpleNamespace(rank=rank, tensor=tensor, config=SimpleNamespace(device="sim"), lost_kv=False, fails="")


class Core:
    """A process of an engine core; `serves` are the ranks that it speaks to."""

    def __init__(self, world: "World", engine: int, serves: Sequence[int], switch: int = 0) -> None:
        self._world, self.engine, self.serves, self._switch = world, engine, list(serves), switch
        self.held: dict[str, tuple[AddRequest, list[int]]] = {}  # id -> the request and its tokens
        self._fences: dict[int, set[int]] = {}
        self._early: list[AddRequest | Abort] = []
        self._taken: TakeOver | None = None

    def take(self, message: Any) -> None:
        if isinstance(message, Fence):
            if message.switch > self._switch:
                self._fences.setdefault(message.switch, set()).add(message.server)
        elif isinstance(message, AddRequest | Abort):
            self._early.append(message)
        elif message.switch != self._switch:
            return
        elif isinstance(message, TakeOver):
            self._taken = message
            self.say("supervisor", TookOver(message.switch, message.tensor, core_ready(self.engine)))
        elif self._taken is not None:
            self._go(self._taken)
        self._go_on()

    def _go(self, order: TakeOver) -> None:
        self.serves = [rank for rank, _, _ in order.peers]
        self._taken = None
        self._world.check_alone(self, order.tensor)
        for request in order.share.requests:
            self.held[request.message.request_id] = request.message, list(request.choices[0].tokens)

    def _go_on(self) -> None:
        if not self.serves:
            return
        for message in self._early:
            if isinstance(message, AddRequest):
                self.held[message.request_id] = message, []
            else:
                for request_id in message.request_ids:
                    self.held.pop(request_id, None)
        self._early = []
        everybody = len(self._world.servers)
        for switch in [n for n, fenced in self._fences.items() if len(fenced) == everybody]:
            self._leave(switch)

    def _leave(self, switch: int) -> None:
        self._switch, self._fences, self.serves = switch, {}, []
        for server in range(len(self._world.servers)):
            self.say(("server", server), Left(switch, self.engine))
        held = [HeldRequest(m, [HeldChoice(0, "waiting", tokens)]) for m, tokens in self.held.values()]
        self.held = {}
        self.say("supervisor", Handed(switch, Handover(self.engine, held, [], 100), worker_ready(0)))

    def step(self) -> None:
        """A token for everybody."""
        if self.serves:
            for message, tokens in self.held.values():
                tokens.append(len(tokens))
                output = TokenOutput(message.request_id, 0, tokens[-1:])
                self.say(("server", message.client), Outputs(self.engine, [output]))

    def say(self, to: Any, message: Any) -> None:
        self._world.post(("core", self.engine), to, message)


def core_ready(engine: int) -> CoreReady:
    return CoreReady(engine, 40, 4, 100, {"device": "cpu"}, {1: 640, 2: 640, 4: 640})


class Server:
    """An API server: where it believes its requests to be, and how many tokens it has of each."""

    def __init__(self, world: "World", number: int, engines: int) -> None:
        self._world, self.number = world, number
        self.dead = [False] * engines
        self.engine_of: dict[str, int] = {}
        self.tokens: dict[str, int] = {}
        self.failed: set[str] = set()
        self.held: list[tuple[int, AddRequest | Abort]] | None = None
        self._leaving: tuple[int, set[int]] | None = None
        self._made = 0

    def submit(self, choice: int) -> None:
        alive = [engine for engine, dead in enumerate(self.dead) if not dead]
        if alive:
            self._made += 1
            name = f"{self.number}-{self._made}"
            engine = self.engine_of[name] = alive[choice % len(alive)]
            self.tokens[name] = 0
            self._send(engine, AddRequest(name, self.number, [1, 2], SamplingParams(max_tokens=20), 0.0))

    def abort(self, choice: int) -> None:
        if self.engine_of:
            name = sorted(self.engine_of)[choice % len(self.engine_of)]
            engine = self.engine_of.pop(name)
            self._send(engine, Abort([name]))

    def _send(self, engine: int, message: AddRequest | Abort) -> None:
        if self.held is not None:
            self.held.append((engine, message))
        elif not self.dead[engine]:
            self._world.post(("server", self.number), ("core", engine), message)

    def take(self, message: Any) -> None:
        if isinstance(message, Outputs):
            for output in message.outputs:
                if output.request_id in self.engine_of:
                    assert output.token_ids == [self.tokens[output.request_id]], "a token lost, doubled or too early"
                    self.tokens[output.request_id] += 1
        elif isinstance(message, Hold):
            for engine in range(message.data):
                if not self.dead[engine]:
                    self._world.post(("server", self.number), ("core", engine), Fence(message.switch, self.number))
            self.held = self.held or []
            self._leaving = message.switch, {engine for engine, dead in enumerate(self.dead) if not dead}
            self._left(None)
        elif isinstance(message, Left):
            if self._leaving is not None and self._leaving[0] == message.switch:
                self._left(message.engine)
        elif isinstance(message, EngineDead):
            self._engine_died(message.engine)
        elif isinstance(message, LayoutChanged):
            self._changed(message)

    def _left(self, engine: int | None) -> None:
        if self._leaving is not None:
            switch, missing = self._leaving
            missing -= {engine}  # type: ignore[arg-type]
            if not missing:
                self._leaving = None
                self._world.post(("server", self.number), "supervisor", Drained(switch, self.number))

    def _engine_died(self, engine: int) -> None:
        unsent = {m.request_id for _, m in self.held or () if isinstance(m, AddRequest)}
        self.dead[engine] = True
        self._left(engine)
        for name in [name for name, at in self.engine_of.items() if at == engine and name not in unsent]:
            self.failed.add(name)
            del self.engine_of[name]

    def _changed(self, message: LayoutChanged) -> None:
        living = {ready.engine for ready in message.engines}
        before, self.dead = self.dead, [engine not in living for engine in range(message.data)]
        assert all(before[engine] for engine, dead in enumerate(self.dead) if dead), "news of a death is missing"
        held, self.held, self._leaving = self.held or [], None, None
        unsent = {m.request_id for _, m in held if isinstance(m, AddRequest)}
        for name in self.engine_of:
            if name not in unsent:
                self.engine_of[name] = message.engine_of.get(name, self.engine_of[name])
                assert not self.dead[self.engine_of[name]]
        for _, kept in held:
            if isinstance(kept, Abort):
                for engine in range(message.data):
                    self._send(engine, kept)
            elif kept.request_id in self.engine_of and living:
                engine = self.engine_of[kept.request_id] = min(living)
                self._send(engine, kept)


class World:
    """The pod, as `layout_switch.Pod` and `supervisor.py` have it."""

    def __init__(self, folder: Path, layout: Layout, servers: int) -> None:
        self.now, self._sockets = 0.0, 0
        self.channels: dict[tuple[Any, Any], deque[Any]] = {}
        self.exits: list[tuple[Name, Any, str]] = []  # what has ended, which the supervisor has not seen yet
        config = EngineConfig(
            model="m", data_parallel_size=layout.data, tensor_parallel_size=layout.tensor, api_server_count=servers
        )
        self.switch = LayoutSwitch(self, config, None, str(folder), clock=lambda: self.now)  # type: ignore[arg-type]
        self.switch._connect = self._connect  # type: ignore[method-assign, assignment]
        self.layout, self.dead = layout, {}  # type: ignore[var-annotated]
        self.servers = [Server(self, number, layout.data) for number in range(servers)]
        self.processes_of: dict[Name, Any] = {("server", server.number): server for server in self.servers}
        for rank in range(WORLD):
            tell = self._teller(rank)
            self.processes_of["worker", rank] = Switching(device(rank, layout.tensor), worker_ready(rank), tell)
        for engine in range(layout.data):
            self.processes_of["core", engine] = Core(self, engine, layout.ranks_of(engine))
            self.switch.engines[engine] = core_ready(engine)
        self.state: LayoutState | None = None

    # ------------------------------------------------------------ messages

    def _teller(self, rank: int) -> Any:
        return lambda message: self.post(("worker", rank), "supervisor", message)

    def post(self, sender: Any, to: Any, message: Any) -> None:
        self.channels.setdefault((sender, to), deque()).append(message)

    def _connect(self, name: str) -> Any:
        kind, _, rest = name.partition("-")
        to, self._sockets = (kind, int(rest.partition(".")[0])), self._sockets + 1
        sender, decode = ("supervisor", self._sockets), _decode_to_worker if kind == "worker" else decode_to_core
        return SimpleNamespace(send=lambda data, flags: self.post(sender, to, decode(data)), close=lambda: None)

    def deliver(self, channel: tuple[Any, Any]) -> None:
        """The next message of a channel."""
        message = self.channels[channel].popleft()
        if not self.channels[channel]:
            del self.channels[channel]
        to = channel[1]
        process = self.processes_of.get(to)
        if to == "supervisor":
            self.switch.read(message)
        elif isinstance(process, Switching):
            try:
                process.handle(message)
            except MemoryError as error:
                self.end(to, str(error))
        elif process is not None:
            process.take(message)

    # ------------------------------------------------------------ life and death

    def end(self, name: Name, why: str) -> None:
        """A process ends; what it has sent still arrives."""
        process = self.processes_of.pop(name, None)
        if process is not None:
            self.exits.append((name, process, why))

    def notice(self, index: int) -> None:
        """As `Supervisor._exited`."""
        (kind, number), process, why = self.exits.pop(index)
        if kind == "server":
            self.switch.server_ended(number)
        elif not (isinstance(process, Core) and why == "retired"):
            engine = number if kind == "core" else self.layout.coordinates(number)[0]
            self._engine_died(engine, why)
            self.switch.lost(kind, number, self.dead.get(engine, why))

    def _engine_died(self, engine: int, reason: str) -> None:
        if engine in self.dead:
            return
        if engine >= self.layout.data:
            self.switch.lost("core", engine, reason)
            return
        self.dead[engine] = reason
        self.switch.engines.pop(engine, None)
        self.tell_servers(EngineDead(engine, reason, len(self.dead) == self.layout.data))
        for name in (("core", engine), *(("worker", rank) for rank in self.layout.ranks_of(engine))):
            self.end(name, reason)

    # ------------------------------------------------------------ what the switch asks of the pod

    def start_core(self, engine: int, switch: int) -> None:
        core = self.processes_of["core", engine] = Core(self, engine, [], switch)
        core.say("supervisor", Standing(switch, engine))

    def end_core(self, engine: int) -> None:
        self.end(("core", engine), "retired")
        self.exits = [e for e in self.exits if e[0] != ("core", engine) or e[2] == "retired"]

    def peers(self, ranks: Sequence[int]) -> list[tuple[int, int | None, str]]:
        return [(rank, 1000 + rank, "") for rank in ranks]

    def tell_servers(self, message: Any, server: int | None = None) -> None:
        if isinstance(message, LayoutState):
            self.state = message
        for number in range(len(self.servers)) if server is None else [server]:
            self.post("supervisor", ("server", number), message)

    def adopt(self, layout: Layout, engines: Sequence[CoreReady]) -> None:
        assert [engine.engine for engine in engines] == list(range(layout.data)) and not self.dead
        self.layout = layout

    def give_up(self, engine: int, reason: str) -> None:
        self._engine_died(engine, reason)

    def processes(self) -> list[tuple[str, int, int]]:
        return []

    # ------------------------------------------------------------ what holds

    def check_alone(self, core: Core, tensor: int) -> None:
        """Nobody else speaks to its workers, and they serve its layout."""
        for rank in core.serves:
            worker = self.processes_of.get(("worker", rank))
            assert worker is None or worker.worker.tensor == tensor, "a core over workers of another layout"
        for other in self.processes_of.values():
            if isinstance(other, Core) and other is not core:
                assert not set(other.serves) & set(core.serves), "two cores over one worker"

    def check_at_rest(self) -> None:
        """Nothing is on its way: everybody agrees on who is where."""
        assert not self.switch.running and (self.state is None or self.state.phase == "Stable")
        assert self.switch.layout == self.layout
        assert set(self.switch.engines) == set(range(self.layout.data)) - set(self.dead)
        for engine in self.switch.engines:
            core = self.processes_of["core", engine]
            assert core.serves == self.layout.ranks_of(engine)
            for rank in core.serves:
                assert self.processes_of["worker", rank].worker.tensor == self.layout.tensor
        cores = [name for name in self.processes_of if name[0] == "core"]
        assert sorted(engine for _, engine in cores) == sorted(self.switch.engines)
        for server in self.servers:
            if ("server", server.number) not in self.processes_of:
                continue
            assert server.held is None
            mine = {
                name: (engine, tokens)
                for engine in self.switch.engines
                for name, (message, tokens) in self.processes_of["core", engine].held.items()
                if message.client == server.number
            }
            assert {name: engine for name, (engine, _) in mine.items()} == server.engine_of
            assert all(server.tokens[name] == len(tokens) for name, (_, tokens) in mine.items())
