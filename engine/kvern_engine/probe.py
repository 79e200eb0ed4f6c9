"""One small HTTP GET to our own listening socket, to learn when the API server answers. Not an HTTP client."""

import socket


def http_status(listener: socket.socket, path: str, timeout: float) -> int | None:
    """Status code of `GET path`, or None where there is no answer within `timeout` seconds."""
    try:
        with socket.socket(listener.family, socket.SOCK_STREAM) as sock:
            sock.settimeout(timeout)
            address = listener.getsockname()
            if listener.family != socket.AF_UNIX:
                host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address[0], address[0])
                address = (host, *address[1:])
            sock.connect(address)
            sock.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            head = sock.recv(64).split()
            return int(head[1]) if len(head) > 1 and head[0].startswith(b"HTTP/") else None
    except (OSError, ValueError):
        return None
