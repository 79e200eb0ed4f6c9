"""What a pod that does not lead answers at its port: the kubelet's probes, and to whoever asks more, where to ask.

The pods of one StatefulSet have the same probes, so those that run ranks only must pass them too. Standard library
alone, in a thread of its own; it takes no requests.
"""

import json
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FollowerPort:
    """Answers on `listener` until closed. /health: 200; /ready: 200 once `is_ready()`; /metrics: none of its own."""

    def __init__(self, listener: socket.socket, leader: str, is_ready: Callable[[], bool]) -> None:
        self._server = ThreadingHTTPServer(("", 0), _handler(leader, is_ready), bind_and_activate=False)
        self._server.socket.close()
        self._server.socket = listener
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="follower-port", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering; the listener is the caller's."""
        self._server.shutdown()
        self._thread.join()


def _handler(leader: str, is_ready: Callable[[], bool]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/health":
                self._answer(200, {"status": "ok"})
            elif path == "/ready":
                ready = is_ready()
                self._answer(200 if ready else 503, {"ready": ready})
            elif path == "/metrics":
                self._answer(200, None)
            else:
                self._refuse()

        def _refuse(self) -> None:
            text = f"This pod computes a share of the model for {leader}, which takes the requests."
            self._answer(421, {"error": {"message": text, "type": "invalid_request_error", "code": "misdirected"}})

        do_POST = do_PUT = do_DELETE = _refuse  # the names that http.server looks for

        def _answer(self, status: int, body: object) -> None:
            data = b"" if body is None else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; version=0.0.4" if body is None else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Probes are not logged."""

    return Handler
