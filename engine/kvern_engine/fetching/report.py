"""GET /admin/fetch: how far a download is, for whoever has the admin token. What the operator asks the Job's pod.

The standard library's server in a thread: one question every few seconds, and gone with the process.
"""

import hmac
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kvern_engine.fetching.meter import Figures
from kvern_engine.loading.config import read_model_config
from kvern_engine.loading.resolve import ModelFiles

PATH = "/admin/fetch"


def document(figures: Figures) -> dict[str, Any]:
    """What is answered."""
    return {
        "phase": figures.phase,
        "bytes": figures.done,
        "total": figures.total,
        "text": figures.text,
        "model": figures.uri,
    }


def shape_of(files: ModelFiles) -> dict[str, int] | None:
    """What of a model decides how much KV cache devices hold beside it, before any of them has it; None where this
    engine cannot read its configuration, which whoever loads it will say."""
    try:
        model = read_model_config(files)
    except (OSError, ValueError):
        return None
    return {
        "layers": model.num_layers,
        "heads": model.num_heads,
        "kvHeads": model.num_kv_heads,
        "headDim": model.head_dim,
        "maxModelLen": model.max_position_embeddings,
    }


class ReportServer:
    """Answers until `close`. `token`: the bearer token that must come with each question."""

    def __init__(self, host: str, port: int, token: str, figures: Callable[[], Figures]) -> None:
        """Raises OSError where the port cannot be listened on."""
        expected = f"Bearer {token}".encode()

        class Handler(BaseHTTPRequestHandler):
            timeout = 10

            def do_GET(self) -> None:
                given = self.headers.get("Authorization", "").encode()
                if not hmac.compare_digest(given, expected):
                    self._answer(401, {"error": "the admin token is needed"})
                elif self.path != PATH:
                    self._answer(404, {"error": f"there is {PATH} here and nothing else"})
                else:
                    self._answer(200, document(figures()))

            def _answer(self, status: int, body: dict[str, Any]) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="report", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
