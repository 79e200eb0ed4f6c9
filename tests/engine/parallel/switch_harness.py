"""Four ranks in processes of their own, cores in the test's process, and a switch of the layout between them: what
supervisor, sockets and streams do around this is tested elsewhere."""

import contextlib
import gc
import multiprocessing
import threading
import traceback
from collections.abc import Collection, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from kvern_engine.assemble import build_core
from kvern_engine.config import EngineConfig
from kvern_engine.core.handed import Handover
from kvern_engine.core.loop import EngineCore
from kvern_engine.core.placement import Placement, Room, kept_blocks, place, without_kv
from kvern_engine.core.plan import StepPlan, StepResult, WorkerReady
from kvern_engine.ipc import AddRequest, TokenOutput
from kvern_engine.parallel.layout import Layout
from kvern_engine.parallel.messages import Finish, MoveKv, Reform, Switched
from kvern_engine.worker.reform import Reformed
from kvern_engine.worker.runner import Runner
from kvern_engine.worker.switching import Switching
from kvern_engine.worker.worker import Worker
from kvern_engine.worker_client import InprocWorkerClient

ANSWER_SECONDS = 120.0


def _rank_main(pipe: Connection) -> None:
    torch.set_num_threads(1)
    serving: Switching | None = None
    while (job := pipe.recv()) is not None:
        kind, *given = job
        try:
            if kind == "load":
                serving = _load(pipe, *given)
                pipe.send(serving.ready)
            elif kind == "plan":
                assert serving is not None
                pending = serving.worker.execute(given[0])
                result = pending.result()
                if serving.worker.answers:
                    pipe.send(result)
            elif kind == "reset":
                assert serving is not None
                serving.worker.reset()
            elif kind == "held":
                alive = _alive()
                gc.collect()
                files = len(list(Path("/proc/self/fd").iterdir()))
                pipe.send((files, threading.active_count(), _threads(), *alive))
            else:
                assert serving is not None
                serving.handle(given[0])  # tells the pipe
        except Exception as error:
            pipe.send({"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()})


def left_alone(config: EngineConfig, requests: Iterable[AddRequest]) -> dict[str, list[int]]:
    """What one rank in this process that nobody disturbs answers: the token ids of each `request/choice`."""
    client = InprocWorkerClient(Worker(config))
    core = EngineCore.from_config(0, config, client.wait_ready(), client, ())
    for request in requests:
        core.add_request(request)
    found: dict[str, list[int]] = {}
    while not core.idle:
        for outputs in core.step().values():
            for output in outputs:
                found.setdefault(f"{output.request_id}/{output.index}", []).extend(output.token_ids)
    return found


def _load(
    pipe: Connection, config: EngineConfig, rank: int, rendezvous: str, connected: bool, room: int | None
) -> Switching:
    if room is not None:
        Reformed._room = lambda self: room  # type: ignore[method-assign]
    worker = Worker(config, rank, rendezvous=rendezvous, stays_connected=connected)
    return Switching(worker, worker.load(), pipe.send)


def _alive() -> tuple[int, int]:
    """Workers and runners that there are, before anything looks for cycles: on a GPU each has gigabytes."""
    found = gc.get_objects()
    return sum(isinstance(o, Worker) for o in found), sum(isinstance(o, Runner) for o in found)


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


class _Client:
    """WorkerClient of the ranks of one engine."""

    overlaps = True
    alive = True

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes
        for pipe in pipes:
            pipe.send(("reset",))

    def submit(self, plan: StepPlan) -> None:
        for pipe in self._pipes:
            pipe.send(("plan", plan))

    def collect(self, timeout: float | None = None) -> StepResult | None:
        found = answer(self._pipes[0])
        assert isinstance(found, StepResult)
        return found

    def close(self) -> None:
        pass


def answer(pipe: Connection) -> Any:
    if not pipe.poll(ANSWER_SECONDS):
        raise TimeoutError("a rank does not answer")
    found = pipe.recv()
    if isinstance(found, dict):
        raise AssertionError(found["trace"])
    return found


class SwitchingPod:
    """Ranks of a pod whose layout changes. `tight`: as on GPUs, they stay connected, and there is no room for two
    arenas; with `room`, these bytes are all that each finds free."""

    def __init__(
        self,
        config: EngineConfig,
        folder: Path,
        count: int = 4,
        tight: bool = False,
        method: str = "forkserver",
        room: int | None = None,
    ) -> None:
        self._tight = tight
        context = multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload(["kvern_engine.worker.worker", "kvern_engine.worker.reform", "safetensors"])
        self._folder, self.switches = folder, 0
        self.pipes: list[Connection] = []
        self.processes = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank_main, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self.outputs: dict[str, list[TokenOutput]] = {}
        self.config = config
        self.layout = Layout.of(config)
        for rank, pipe in enumerate(self.pipes):
            engine = self.layout.coordinates(rank)[0]
            pipe.send(("load", config, rank, f"file://{folder}/first-{engine}", tight, room))
        self.ready: list[WorkerReady] = [answer(pipe) for pipe in self.pipes]
        self.cores = [self._core(engine) for engine in range(self.layout.data)]

    def _core(self, engine: int) -> EngineCore:
        ranks = self.layout.ranks_of(engine)
        sizes = {"data_parallel_size": self.layout.data, "tensor_parallel_size": self.layout.tensor}
        client = _Client([self.pipes[rank] for rank in ranks])
        config = self.config.model_copy(update=sizes)
        return build_core(config, engine, client, self.ready[ranks[0]], ())  # type: ignore[arg-type]

    def add(self, engine: int, request: AddRequest) -> None:
        self.cores[engine].add_request(request)

    def take(self, outputs: dict[int, list[TokenOutput]]) -> None:
        for items in outputs.values():
            for output in items:
                assert output.error is None, output.error
                self.outputs.setdefault(f"{output.request_id}/{output.index}", []).append(output)

    def steps(self, count: int) -> None:
        for _ in range(count):
            for core in self.cores:
                if not core.idle:
                    self.take(core.step())

    def run(self) -> None:
        while not all(core.idle for core in self.cores):
            self.steps(1)

    def tokens(self) -> dict[str, list[int]]:
        return {name: [t for output in found for t in output.token_ids] for name, found in self.outputs.items()}

    def ask(self, message: Any, ranks: list[int] | None = None) -> list[Switched]:
        ranks = list(range(len(self.pipes))) if ranks is None else ranks
        for rank in ranks:
            self.pipes[rank].send(("switch", message))
        return [answer(self.pipes[rank]) for rank in ranks]

    def switch(self, tensor: int, keep: bool = True) -> Placement:
        """To engines of this size; `keep` False: all the way, and back before anything was computed."""
        self.switches += 1
        after = Layout(len(self.pipes) // tensor, tensor, 1)
        handovers = []
        for core in self.cores:
            self.take(core.settle())
            handovers.append(core.hand_over())
        number = self.switches
        meeting = f"file://{self._folder}/switch-{number}"
        kept = [kept_blocks(h, self.config.block_size) for h in handovers] if self._tight else None
        found = self.ask(Reform(number, after.data, after.tensor, meeting, 60.0, kept))
        assert not [each.error for each in found if each.error]
        ready = [each.ready for each in found if each.ready is not None]
        rooms = [
            Room(ready[r].num_blocks, ready[r].block_size, ready[r].max_num_seqs)
            for r in (after.ranks_of(engine)[0] for engine in range(after.data))
        ]
        placed = place(handovers, self.layout, after, rooms)
        moved = self.ask(MoveKv(number, [(*pair, blocks) for pair, blocks in placed.moves.items()]))
        assert not [each.error for each in moved if each.error]
        finished = self.ask(Finish(number, keep))
        if not keep:  # as the supervisor does: the old engines take their own back
            self.go_back(handovers, {self.layout.coordinates(each.rank)[0] for each in finished if each.lost_kv})
            return placed
        self.layout, self.ready = after, ready
        self.cores = [self._core(engine) for engine in range(after.data)]
        for core, share in zip(self.cores, placed.shares, strict=True):
            core.scheduler.take_over(share)
        return placed

    def go_back(self, handovers: list[Handover], lost: Collection[int] = ()) -> None:
        """The old engines take their own back, block by block but for those whose workers have `lost` theirs."""
        self.lost = set(lost)
        self.cores = [self._core(engine) for engine in range(self.layout.data)]
        for core, handover in zip(self.cores, handovers, strict=True):
            core.scheduler.take_over(without_kv(handover) if handover.engine in lost else handover.unmoved())

    def held(self) -> list[tuple[int, ...]]:
        """Of each rank: open files, threads of Python, threads, workers, runners."""
        for pipe in self.pipes:
            pipe.send(("held",))
        return [answer(pipe) for pipe in self.pipes]

    def close(self) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join(5)
