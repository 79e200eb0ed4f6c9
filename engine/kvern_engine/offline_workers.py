"""The worker processes of an offline engine (`llm.py`) that has several ranks: started, and ended, with it."""

import contextlib
import os
import weakref

import zmq

from kvern_engine import children
from kvern_engine.children import Child
from kvern_engine.config import EngineConfig
from kvern_engine.devices import check_devices, devices_visible
from kvern_engine.parallel.layout import Layout
from kvern_engine.socket_dir import SocketDir
from kvern_engine.start_worker import start_worker
from kvern_engine.worker_client import Peer, group_client


class OfflineWorkers:
    """One process a rank of engine 0, and their `client`. They end with `close`, with the last reference to this, or
    with the thread that made it, whatever comes first. Raises ValueError for more ranks than devices.
    """

    def __init__(self, config: EngineConfig) -> None:
        check_devices(config, devices_visible(os.environ))
        ranks = Layout.of(config).ranks_of(0)
        with contextlib.ExitStack() as stack:
            folder = str(stack.enter_context(SocketDir()).path)
            started: list[Child] = []
            stack.callback(children.end_all, started, 0.0)
            started.extend(start_worker(config, rank, 0, folder, rank, len(ranks)) for rank in ranks)
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            stack.callback(context.term)
            self.client = group_client(context, folder, config, 0, [Peer(child.index, child.pid) for child in started])
            stack.callback(self.client.close)
            self._end = weakref.finalize(self, stack.pop_all().close)

    def close(self) -> None:
        """End the processes and remove their sockets; idempotent."""
        self._end()
