"""Sockets and encodings between the processes of an engine.

msgspec over ZeroMQ on unix sockets in one private folder (`socket_dir.py`); never pickle. Who is bound where:

    server-{i}.in     PULL, bound by API server i; every core and the supervisor push
    core-{e}.in       PULL, bound by core e; every API server pushes
    worker-{r}.in     PULL, bound by worker r; its core pushes plans
    worker-{r}.out    PUSH, bound by worker r; its core pulls results
    supervisor.in     PULL, bound by the supervisor; every core pushes, and during a switch of the layout every worker;
                      the API server with the admin port says what is asked for there

In a switch the supervisor pushes to cores and workers as well (`parallel/messages.py`).

Workers of another pod are bound to TCP ports that the system chooses, on the one address that KVERN_WORKER_TCP names:
a file `{name}.endpoint` in the folder then says where, on both sides (`nodes.py` carries it over).

Queues are not bounded here: the server bounds the requests in flight, and a full queue would block a core.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from kvern_engine.core.plan import FromWorker
from kvern_engine.ipc import ToCore, ToServer, ToSupervisor
from kvern_engine.parallel.messages import SwitchToCore, SwitchToServer, SwitchToSupervisor

WORKER_TCP = "KVERN_WORKER_TCP"

encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode
decode_to_core: Callable[[bytes], ToCore | SwitchToCore] = msgspec.msgpack.Decoder(ToCore | SwitchToCore).decode
decode_to_server: Callable[[bytes], ToServer | SwitchToServer] = msgspec.msgpack.Decoder(
    ToServer | SwitchToServer
).decode
decode_to_supervisor: Callable[[bytes], ToSupervisor | SwitchToSupervisor] = msgspec.msgpack.Decoder(
    ToSupervisor | SwitchToSupervisor
).decode
decode_from_worker: Callable[[bytes], FromWorker] = msgspec.msgpack.Decoder(FromWorker).decode

SUPERVISOR_IN = "supervisor.in"


def core_in(engine: int) -> str:
    return f"core-{engine}.in"


def server_in(index: int) -> str:
    return f"server-{index}.in"


def worker_in(rank: int) -> str:
    return f"worker-{rank}.in"


def worker_out(rank: int) -> str:
    return f"worker-{rank}.out"


def _socket(context: "zmq.Context[zmq.Socket[bytes]]", kind: int, linger_ms: int) -> "zmq.Socket[bytes]":
    sock = context.socket(kind)
    sock.setsockopt(zmq.SNDHWM, 0)
    sock.setsockopt(zmq.RCVHWM, 0)
    sock.setsockopt(zmq.LINGER, linger_ms)
    sock.setsockopt(zmq.RECONNECT_IVL, 10)  # peers start at the same time: look again soon, then less often
    sock.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
    return sock


def bind(context: "zmq.Context[zmq.Socket[bytes]]", kind: int, folder: str, name: str) -> "zmq.Socket[bytes]":
    """A PULL or PUSH socket bound to `name` in the socket folder."""
    sock = _socket(context, kind, linger_ms=0)
    address = os.environ.get(WORKER_TCP)
    if address and name.startswith("worker-"):
        sock.bind(f"tcp://{address}:*")
        write_endpoint(folder, name, sock.getsockopt_string(zmq.LAST_ENDPOINT))
    else:
        sock.bind(f"ipc://{Path(folder) / name}")
    return sock


def connect(
    context: "zmq.Context[zmq.Socket[bytes]]",
    kind: int,
    folder: str,
    name: str,
    linger_ms: int = 0,
    heartbeat: tuple[int, int] | None = None,
) -> "zmq.Socket[bytes]":
    """A socket connected to `name`, which need not be bound yet. `linger_ms`: how long closing waits for the peer.
    `heartbeat`: (interval, timeout) in milliseconds after which a silent peer counts as disconnected.
    """
    sock = _socket(context, kind, linger_ms)
    if heartbeat is not None:
        sock.setsockopt(zmq.HEARTBEAT_IVL, heartbeat[0])
        sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, heartbeat[1])
    sock.connect(read_endpoint(folder, name) or f"ipc://{Path(folder) / name}")
    return sock


def write_endpoint(folder: str, name: str, endpoint: str) -> None:
    """Say where the socket `name` is bound, where that is not in the folder."""
    path = Path(folder) / f"{name}.endpoint"
    partial = path.with_suffix(".partial")
    partial.write_text(endpoint)
    partial.replace(path)


def read_endpoint(folder: str, name: str) -> str | None:
    """What `write_endpoint` said; None where it has said nothing."""
    path = Path(folder) / f"{name}.endpoint"
    return path.read_text() if path.exists() else None


def drain(sock: "zmq.Socket[bytes]", limit: int = 4096) -> list[bytes]:
    """The messages that have arrived, without waiting; at most `limit`."""
    messages: list[bytes] = []
    try:
        while len(messages) < limit:
            messages.append(sock.recv(zmq.NOBLOCK))
    except zmq.Again:
        pass
    return messages
