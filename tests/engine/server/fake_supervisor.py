"""A supervisor that answers what the admin port asks, as the real one does; it has one engine, on a GPU."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq

from kvern_engine.config import EngineConfig
from kvern_engine.ipc import CoreReady
from kvern_engine.layout_switch import LayoutSwitch
from kvern_engine.parallel.layout import Layout
from kvern_engine.parallel.messages import ChangeLayout
from kvern_engine.transport import SUPERVISOR_IN, bind, connect, decode_to_supervisor, encode, server_in


class FakeSupervisor:
    """Runs in a thread while it is entered."""

    def __init__(self, folder: Path) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox = bind(self._context, zmq.PULL, str(folder), SUPERVISOR_IN)
        self._server = connect(self._context, zmq.PUSH, str(folder), server_in(0), linger_ms=500)
        self._switch = LayoutSwitch(self, EngineConfig(model="m"), self._context, str(folder))
        self._switch.engines[0] = CoreReady(0, 8, 16, 64, {"device": "cuda:0 NVIDIA H200"}, {1: 128})
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "FakeSupervisor":
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join(5)
        self._inbox.close()
        self._server.close()
        self._context.term()

    def _run(self) -> None:
        while not self._over.is_set():
            if self._inbox.poll(50):
                message = decode_to_supervisor(self._inbox.recv())
                if isinstance(message, ChangeLayout):
                    self._switch.read(message)

    # ------------------------------------------------------------ what a switch needs of it

    def tell_servers(self, message: Any, server: int | None = None) -> None:
        self._server.send(encode(message))

    def start_core(self, engine: int, switch: int) -> None:
        raise AssertionError("nothing is to be switched here")

    def end_core(self, engine: int) -> None:
        raise AssertionError("nothing is to be switched here")

    def peers(self, ranks: Sequence[int]) -> list[tuple[int, int | None, str]]:
        raise AssertionError("nothing is to be switched here")

    def adopt(self, layout: Layout, engines: Sequence[CoreReady]) -> None:
        raise AssertionError("nothing is to be switched here")

    def processes(self) -> list[tuple[str, int, int]]:
        return []

    def give_up(self, engine: int, reason: str) -> None:
        raise AssertionError("nothing is to be switched here")
