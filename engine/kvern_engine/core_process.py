"""The process of one engine core: takes requests in, turns the core's loop, sends outputs out.

CPU only: no torch is loaded here, unless the worker runs in this process (`--distributed-executor-backend uni`). The
scheduling is in `core/`; this file is its sockets and its clock. While nothing is to be done it sleeps in poll, where
a new request wakes it at once; it reports its state twice a second, which is also its heartbeat, when it begins to work
and when its last request has ended.
"""

import logging
import time
from collections.abc import Sequence
from typing import NoReturn

import zmq

from kvern_engine.assemble import build_core
from kvern_engine.capacity import feasible_layouts, model_shape
from kvern_engine.config import EngineConfig
from kvern_engine.core.loop import EngineCore, OutputsByClient, WorkerDiedError
from kvern_engine.core.plan import WorkerProgress, WorkerReady
from kvern_engine.ipc import Abort, AddRequest, CoreReady, EngineDead, EngineStats, Outputs
from kvern_engine.loading.config import read_model_config
from kvern_engine.loading.resolve import resolve_model
from kvern_engine.parallel.layout import Layout
from kvern_engine.parallel.messages import Fence, Handed, Left, Standing, TakeOver, TookOver
from kvern_engine.transport import SUPERVISOR_IN, bind, connect, core_in, decode_to_core, drain, encode, server_in
from kvern_engine.worker import memory
from kvern_engine.worker_client import GroupWorkerClient, InprocWorkerClient, NoWorker, Peer, group_client

log = logging.getLogger(__name__)

STATS_SECONDS = 0.5
EXIT_SAID_WHY = 3


def core_main(
    config_json: bytes,
    engine: int,
    socket_dir: str,
    peers: Sequence[Peer] = (),
    num_servers: int = 1,
    switch: int | None = None,
) -> int:
    """Run core `engine` until it is killed or cannot go on; returns its exit status.

    `peers`: its workers in rank order; none: the worker runs in this process. `switch`: it is one of a layout to come,
    in the switch of this number, and is told of its workers then.
    """
    process = CoreProcess(EngineConfig.model_validate_json(config_json), engine, socket_dir, peers, num_servers)
    try:
        if switch is None:
            process.start()
        else:
            process.stand_by(switch)
        process.serve()
    except WorkerDiedError as error:
        return process.give_up(str(error))
    except (ValueError, MemoryError) as error:  # said by loading or by the worker, for people
        log.debug("cannot go on", exc_info=True)
        return process.give_up(str(error))
    except Exception as error:
        log.exception("the engine core failed")
        return process.give_up(f"{type(error).__name__}: {error}")


def _take(core: EngineCore, message: AddRequest | Abort) -> None:
    if isinstance(message, AddRequest):
        core.add_request(message)
    else:
        core.abort(message.request_ids, message.choices)


class CoreProcess:
    """The sockets of one core around its EngineCore."""

    def __init__(self, config: EngineConfig, engine: int, folder: str, peers: Sequence[Peer], num_servers: int) -> None:
        self._config, self._engine, self._folder = config, engine, folder
        self._peers = peers
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox = bind(self._context, zmq.PULL, folder, core_in(engine))
        self._servers = [
            connect(self._context, zmq.PUSH, folder, server_in(i), linger_ms=500) for i in range(num_servers)
        ]
        self._supervisor = connect(self._context, zmq.PUSH, folder, SUPERVISOR_IN, linger_ms=1000)
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        self._report_at = 0.0
        self._said_busy = False
        self._core: EngineCore | None = None
        self._worker: GroupWorkerClient | InprocWorkerClient | None = None
        self._ready: WorkerReady | None = None  # what its workers have reported
        self._switch = 0  # the last one that this core took part in
        self._fences: dict[int, set[int]] = {}  # of later ones -> API servers that send nothing more

    def start(self) -> None:
        """Wait for the worker and tell everybody that this engine takes requests."""
        began = time.monotonic()
        self._read_model()
        worker = self._worker = self._make_worker()
        ready = self._ready = worker.wait_ready(self._progress)
        self._core = build_core(self._config, self._engine, worker, ready, self._eos)
        worker.watch(self._poller)
        message = encode(self._ready_message(ready, began))
        for sock in (*self._servers, self._supervisor):
            sock.send(message)

    def _read_model(self) -> None:
        self._eos = read_model_config(resolve_model(self._config.model, self._config.revision)).eos_token_ids
        self._shape = model_shape(self._config)

    def _ready_message(self, ready: WorkerReady, began: float) -> CoreReady:
        feasible = feasible_layouts(self._shape, self._config, ready, self._host_kv(ready))
        info = self._info(ready, began)
        return CoreReady(self._engine, ready.num_blocks, ready.block_size, ready.max_model_len, info, feasible)

    def _make_worker(self) -> GroupWorkerClient | InprocWorkerClient:
        if self._peers:
            client = group_client(self._context, self._folder, self._config, self._engine, self._peers)
            if self._config.pipeline_parallel_size > 1:
                client.wake_on(self._inbox)
            return client
        from kvern_engine.worker import create_worker

        rank = Layout.of(self._config).answering_rank(self._engine)
        return InprocWorkerClient(create_worker(self._config, rank), rank)

    def _host_kv(self, ready: WorkerReady) -> int | None:
        """Bytes that a rank may take for its KV cache where it computes on this machine's CPU."""
        if not ready.device.startswith("cpu"):
            return None
        ranks = Layout.of(self._config).world // self._config.nnodes
        return memory.available_on_cpu(memory.available_host_memory(), ranks, memory.CPU_MOST)

    def _progress(self, phase: str, fraction: float) -> None:
        self._supervisor.send(encode(WorkerProgress(self._engine, phase, fraction)))

    def _info(self, ready: WorkerReady, began: float) -> dict[str, str | int | float]:
        load = {f"{phase}_seconds": round(seconds, 3) for phase, seconds in ready.load_seconds.items()}
        return {
            "device": ready.device,
            "dtype": ready.dtype,
            "weight_bytes": ready.weight_bytes,
            "kv_bytes": ready.kv_bytes,
            "max_num_seqs": ready.max_num_seqs,
            "max_num_batched_tokens": ready.max_num_batched_tokens,
            "start_seconds": round(time.monotonic() - began, 3),
            **load,
        }

    def serve(self) -> NoReturn:
        """Receive, step, send; forever. Raises WorkerDiedError."""
        while True:
            core = self._core
            assert core is not None, "start comes first"
            switch = self._receive(core)
            if switch is not None:
                self._leave(core, switch)
                continue
            if core.idle:
                self._sleep(core)
                continue
            outputs = core.step()
            busy = core.scheduler.has_work
            if busy != self._said_busy or (outputs and not busy):
                # With the last outputs, not after them: whoever has read an answer finds the gauges at rest.
                self._report_at, self._said_busy = time.monotonic() + STATS_SECONDS, busy
                self._send(outputs, core.stats())
                continue
            self._send(outputs)
            self._report(core)

    def _send(self, outputs: OutputsByClient, stats: EngineStats | None = None) -> None:
        """Outputs to whom they belong, `stats` to every API server."""
        for client in outputs if stats is None else range(len(self._servers)):
            message = Outputs(self._engine, outputs.get(client, []), stats)
            self._servers[client].send(encode(message), zmq.NOBLOCK)

    def _receive(self, core: EngineCore) -> int | None:
        """Take in what has come; the number of a switch for which no API server sends anything more."""
        for data in drain(self._inbox):
            try:
                message = decode_to_core(data)
                if isinstance(message, AddRequest | Abort):
                    _take(core, message)
                elif isinstance(message, Fence):
                    self._fence(message)
            except ValueError:  # msgspec's errors are ValueErrors too: one bad message must not end everybody's engine
                log.exception("a message of %d bytes was refused", len(data))
        everybody = len(self._servers)
        return next((switch for switch, fenced in self._fences.items() if len(fenced) == everybody), None)

    # ------------------------------------------------------------ a switch of the layout

    def _fence(self, message: Fence) -> None:
        """Where the supervisor speaks for an API server, that one's own word may come when the switch is over."""
        if message.switch > self._switch:
            self._fences.setdefault(message.switch, set()).add(message.server)

    def stand_by(self, switch: int) -> None:
        """A core for a layout to come: says that it is there and waits to be told what to go on with."""
        self._switch = switch
        self._read_model()
        self._supervisor.send(encode(Standing(switch, self._engine)))
        self._await_layout()

    def _leave(self, core: EngineCore, switch: int) -> None:
        """Hand over what this core holds, once nothing is in flight, and wait for what it is to go on with: in the new
        layout, or with the same again. Raises WorkerDiedError."""
        self._switch, self._fences = switch, {}
        self._send(core.settle(), core.stats())  # with the sizes of its last steps, which nobody else knows
        for sock in self._servers:
            sock.send(encode(Left(switch, self._engine)))
        handover = core.hand_over()
        core.close()  # the next to speak to the workers must be the only one
        self._core = None  # should this process end now, the supervisor says so: engines may have other numbers by then
        assert self._ready is not None
        self._supervisor.send(encode(Handed(switch, handover, self._ready)))
        self._await_layout()

    def _await_layout(self) -> None:
        """Until `TakeOver` and `Go`. What API servers send before `Go` is for the new layout, or a fence of the next
        switch already: their sockets are others than the supervisor's."""
        early: list[AddRequest | Abort] = []
        taken: tuple[EngineCore, TakeOver] | None = None
        while True:
            message = decode_to_core(self._inbox.recv())
            if isinstance(message, AddRequest | Abort):
                early.append(message)
            elif isinstance(message, Fence):
                self._fence(message)
            elif message.switch != self._switch:
                continue  # of one that is over
            elif isinstance(message, TakeOver):
                taken = self._take_over(message), message
            elif taken is not None:
                break
        core, order = taken
        peers = [Peer(*peer) for peer in order.peers]
        worker = group_client(self._context, self._folder, self._config, self._engine, peers, met=True)
        self._worker = core.worker = worker
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        worker.watch(self._poller)
        worker.wait_ready()
        self._core = core
        self._report_at, self._said_busy = 0.0, False  # who asks for figures has none of this core yet
        for message in early:
            _take(core, message)

    def _take_over(self, order: TakeOver) -> EngineCore:
        """A core with what it is given; it is told of its workers later. Raises ValueError."""
        began, self._ready = time.monotonic(), order.ready
        sizes = {"data_parallel_size": order.data, "tensor_parallel_size": order.tensor}
        self._config = self._config.model_copy(update=sizes)
        core = build_core(self._config, self._engine, NoWorker(), order.ready, self._eos)
        core.scheduler.take_over(order.share)
        ready = self._ready_message(order.ready, began)
        self._supervisor.send(encode(TookOver(order.switch, order.tensor, ready)))
        return core

    def _sleep(self, core: EngineCore) -> None:
        """Until a message comes, the worker dies or the next report is due."""
        left = self._report(core) - time.monotonic()
        events = self._poller.poll(max(1, int(left * 1000)))
        if not events or any(source is not self._inbox for source, _ in events):
            self._check_worker()  # raises, with what the worker has to say

    def _report(self, core: EngineCore) -> float:
        """Send the engine's state to every API server if it is due; returns when the next one is."""
        now = time.monotonic()
        if now >= self._report_at:
            self._report_at = now + STATS_SECONDS
            self._check_worker()
            core.beat()
            self._send({}, core.stats())
        return self._report_at

    def _check_worker(self) -> None:
        assert self._worker is not None
        self._worker.check()

    def give_up(self, reason: str) -> int:
        """Tell API servers and supervisor why no more comes from here; returns the exit status.

        What was computed goes out first; the API servers end what is left of this engine's requests.
        """
        dead = encode(EngineDead(self._engine, reason, last=False))
        self._supervisor.send(dead)
        if self._core is not None:
            undelivered = self._core.fail_all(reason)
            self._send({c: [o for o in outputs if o.finish_reason != "error"] for c, outputs in undelivered.items()})
            for sock in self._servers:
                sock.send(dead)
        for sock in (self._inbox, *self._servers, self._supervisor):
            sock.close()
        return EXIT_SAID_WHY
