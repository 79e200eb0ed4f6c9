"""A Kubernetes API server as far as `kvern` reads one: lists, objects, logs, and the errors that it answers with."""

import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

SERVICES = "/apis/kvern.dev/v1alpha1/namespaces/team-a/inferenceservices"
PODS = "/api/v1/namespaces/team-a/pods"

Answer = tuple[int, Any]


def status(code: int, reason: str, message: str, **details: str) -> Answer:
    """An error as the API server words it."""
    body = {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message}
    return code, {**body, "details": details}


class FakeApi:
    """`objects`: path -> answer. A list is given in pages of `page` items; logs are text; callables are called with the
    query. `token`: the only one that is accepted, where there is one. `asked`: the paths, in order."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.page = 500
        self.token = ""
        self.asked: list[str] = []
        self.headers: list[dict[str, str]] = []

    def put_list(self, path: str, items: list[dict[str, Any]]) -> None:
        """A collection, and its members by name."""
        self.objects[path] = items
        for item in items:
            if "name" in item.get("metadata", {}):
                self.objects[f"{path}/{item['metadata']['name']}"] = (200, item)

    def answer(self, path: str, query: dict[str, list[str]], authorization: str) -> Answer:
        if self.token and authorization != f"Bearer {self.token}":
            return status(401, "Unauthorized", "Unauthorized")
        found = self.objects.get(path)
        if callable(found):
            found = found(query)
        if isinstance(found, list):
            return 200, self._page(found, query)
        if found is not None:
            return found
        collection, _, name = path.rpartition("/")
        if collection in self.objects:
            kind = collection.rpartition("/")[2]
            return status(404, "NotFound", f'{kind} "{name}" not found', name=name, kind=kind)
        if path.startswith("/api/v1/") or path.startswith("/apis/apps/"):
            return 200, {"items": []}
        return status(404, "NotFound", "the server could not find the requested resource")

    def _page(self, items: list[dict[str, Any]], query: dict[str, list[str]]) -> dict[str, Any]:
        start = int(query.get("continue", ["0"])[0])
        end = start + min(self.page, int(query.get("limit", ["500"])[0]))
        more = {"continue": str(end)} if end < len(items) else {}
        return {"items": items[start:end], "metadata": more}


@contextmanager
def serving(api: FakeApi, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """The address of a server that answers with `api`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            api.asked.append(url.path)
            api.headers.append(dict(self.headers))
            code, body = api.answer(url.path, parse_qs(url.query), self.headers.get("Authorization", ""))
            if isinstance(body, Callable):  # a stream of lines
                self.stream(body)
                return
            data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def stream(self, lines: Callable[[], Iterator[str]]) -> None:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for line in lines():
                data = f"{line}\n".encode()
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
