"""The program that `helm test` runs, against small servers that play the operator and the API server."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from helm_tool import CHARTS, load

check: Any = load("charts_check", CHARTS / "kvern" / "files" / "check.py")

ALL = ["inferenceservices", "inferenceservices/status", "inferenceservices/scale"]


@pytest.fixture
def server() -> Iterator[Any]:
    """Answers each path with (status, body) from `answers`; keeps the headers of the last request in `seen`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host.seen = dict(self.headers)
            status, body = host.answers.get(self.path, (404, b"not found"))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    host: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    host.answers, host.seen = {}, {}
    host.url = f"http://127.0.0.1:{host.server_address[1]}"
    thread = threading.Thread(target=host.serve_forever)
    thread.start()
    yield host
    host.shutdown()
    thread.join()
    host.server_close()


def discovery(names: list[str]) -> bytes:
    return json.dumps({"resources": [{"name": name} for name in names]}).encode()


def test_all_is_well(server: Any) -> None:
    server.answers = {"/healthz": (200, b""), "/readyz": (200, b""), "/apis/kvern.dev/v1alpha1": (200, discovery(ALL))}
    assert check.operator_problem(server.url) == ""
    assert check.resource_problem(server.url, "secret") == ""
    assert server.seen["Authorization"] == "Bearer secret"


def test_operator_says_why_it_is_not_ready(server: Any) -> None:
    server.answers = {"/healthz": (200, b""), "/readyz": (503, b"no watch event for 90 s\n")}
    assert check.operator_problem(server.url) == f"{server.url}/readyz answers 503: no watch event for 90 s"


def test_operator_is_not_there(server: Any) -> None:
    server.answers = {}
    assert "/healthz answers 404" in check.operator_problem(server.url)
    assert "does not answer" in check.operator_problem("http://127.0.0.1:1")


def test_resource_is_not_there(server: Any) -> None:
    assert check.resource_problem(server.url, "") == (
        "the cluster does not know InferenceService: install the chart kvern-crds"
    )
    server.answers = {"/apis/kvern.dev/v1alpha1": (200, discovery(ALL[:2]))}
    assert check.resource_problem(server.url, "") == (
        "the API server does not serve inferenceservices/scale: upgrade the chart kvern-crds"
    )
    server.answers = {"/apis/kvern.dev/v1alpha1": (401, b"")}
    assert check.resource_problem(server.url, "").endswith("answers 401")
