"""Where a child process of the supervisor begins: `python -m kvern_engine.child NAME < spec`.

The supervisor writes a ChildSpec to standard input (never to the command line: the configuration holds API keys).
A child dies with its supervisor, even when that is killed with -9, and leaves Ctrl-C to it.
"""

import ctypes
import os
import signal
import sys

import msgspec

_PR_SET_PDEATHSIG = 1


class ChildSpec(msgspec.Struct):
    """What a child needs. `kind` is worker, core or server; `index` the rank, the engine or the API server's number."""

    kind: str
    index: int
    engine: int
    socket_dir: str
    supervisor_pid: int
    config: str  # EngineConfig as JSON
    human_logs: bool = False
    peers: list[tuple[int, int | None, str]] = []  # for a core: its workers (rank, pid, place); empty: in its process
    num_engines: int = 1
    num_servers: int = 1
    listen_fd: int = -1
    admin_fd: int | None = None
    switch: int | None = None  # for a core of a layout to come: the number of the switch


def die_with(supervisor_pid: int) -> None:
    """SIGKILL this process when its parent ends; exit at once if that has already happened."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor_pid:
        sys.exit(1)


def run(spec: ChildSpec) -> int:
    """Run what the spec names until it ends; return its exit status."""
    config = spec.config.encode()
    if spec.kind == "worker":
        from kvern_engine.worker.process import worker_main

        worker_main(config, spec.index, spec.engine, spec.socket_dir)
        return 0
    if spec.kind == "core":
        from kvern_engine.core_process import core_main
        from kvern_engine.worker_client import Peer

        peers = [Peer(*p) for p in spec.peers]
        return core_main(config, spec.engine, spec.socket_dir, peers, spec.num_servers, spec.switch)
    from kvern_engine.server.main import server_main

    server_main(config, spec.index, spec.socket_dir, spec.listen_fd, spec.admin_fd, spec.num_engines)
    return 0


def main() -> int:
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=ChildSpec)
    die_with(spec.supervisor_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    from kvern_engine import logs

    settings = msgspec.json.decode(spec.config)
    level = str(settings.get("log_level", "info"))
    # A person at the terminal sees the supervisor's progress; children speak up only when something is wrong.
    level = "warning" if spec.human_logs and level == "info" else level
    form = str(settings.get("log_format", "text"))
    # The API server's event loop logs every request.
    logs.setup(level, f"{spec.kind}-{spec.index}", spec.human_logs, form, background=spec.kind == "server")
    return run(spec)


if __name__ == "__main__":
    sys.exit(main())
