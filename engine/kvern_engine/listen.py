"""Listening sockets, bound before any process starts, so that a taken port is an immediate and clear error."""

import contextlib
import errno
import socket
import stat
from pathlib import Path
from typing import Any

_BACKLOG = 4096


class ListenError(OSError):
    """A socket cannot be bound; the text says which flag to change."""


def _holder(port: int) -> str:
    """' (by NAME, pid N)' of who listens on `port`, or '' where the system does not tell."""
    import psutil

    def listens(connections: list[Any]) -> list[Any]:
        return [c for c in connections if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port]

    with contextlib.suppress(psutil.Error, OSError):
        pids = [c.pid for c in listens(psutil.net_connections(kind="tcp")) if c.pid]
        process = psutil.Process(pids[0]) if pids else None
        # A child may have inherited the socket: the one to stop is its parent.
        while process and (parent := process.parent()) and listens(parent.net_connections(kind="tcp")):
            process = parent
        return f" (by {process.name()}, pid {process.pid})" if process else ""
    return ""


def _explain(error: OSError, host: str, port: int, flag: str) -> str:
    host_flag = flag.replace("port", "host")
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} on {host} is already in use{_holder(port)}: stop what listens there, "
            f"or choose another with {flag} ({flag} 0 takes a free one)"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host_flag} {host}: this machine has no such address; 0.0.0.0 listens on all of them"
    if error.errno == errno.EACCES:
        return f"{flag} {port}: not allowed to listen there; ports below 1024 need privileges"
    return f"cannot listen on {host} port {port}: {error.strerror or error}"


def listen_tcp(host: str, port: int, flag: str = "--port") -> socket.socket:
    """A listening TCP socket; port 0 takes a free one. Raises ListenError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )[0]
    except socket.gaierror as error:
        raise ListenError(f"{flag.replace('port', 'host')} {host!r}: no such address ({error.strerror})") from None
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and host == "::":
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise ListenError(_explain(error, host, port, flag)) from None
    return sock


def listen_unix(path: str) -> socket.socket:
    """A listening unix socket at `path`; the socket file of a dead server is replaced. Raises ListenError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if Path(path).exists():
            if not stat.S_ISSOCK(Path(path).stat().st_mode):
                raise ListenError(f"--uds {path}: there is a file that is no socket")
            probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                Path(path).unlink()
            else:
                raise ListenError(f"--uds {path}: another server listens there")
            finally:
                probe.close()
        sock.bind(path)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        if isinstance(error, ListenError):
            raise
        raise ListenError(f"--uds {path}: {error.strerror or error}") from None
    return sock


def url_of(sock: socket.socket) -> str:
    """Base URL of a listening socket as a client on this machine would write it."""
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
