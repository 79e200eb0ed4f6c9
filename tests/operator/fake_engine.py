"""Stands for `kvern serve` in the tests of local mode: the engine's outside, without a model.

    fake_engine.py serve MODEL --port N --admin-port N --admin-token-file FILE --served-model-name NAME ...

FAKE_CONTROL names a JSON file that is read at every request and at start: `load` (seconds), `exit` (code to end with at
start, after printing `say`), `healthy`, `chunks` and `pause` of an answer, `switch` (seconds that a change of layout
takes), `fail` (why it is given up), `refuse` (why it is not begun). Like the engine it drains on SIGTERM.
"""

import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def control() -> dict:
    path = os.environ.get("FAKE_CONTROL")
    return json.loads(Path(path).read_text()) if path else {}


class State:
    ready_at = 0.0
    draining = terminating = False
    in_flight = 0
    tensor, switched_at, told = int(os.environ.get("KVERN_TENSOR_PARALLEL_SIZE", 1)), 0.0, []
    lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    model = token = ""
    admin = False

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: object, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.admin:
            self.admin_answer()
        elif self.path == "/ready":
            self.answer(200 if time.monotonic() >= State.ready_at and not closed() else 503, {})
        elif self.path == "/health":
            self.answer(200 if control().get("healthy", True) else 503, {})
        else:
            self.answer(404, {})

    def do_DELETE(self) -> None:
        if self.admin and self.allowed():
            State.draining = False
        self.admin_answer()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        if self.admin and self.path == "/admin/layout":
            self.change_layout(body)
        elif self.admin:
            if self.allowed():
                State.draining = True
            self.admin_answer()
        elif closed():
            self.answer(503, {"error": {"message": "draining"}}, {"Retry-After": "1"})
        else:
            self.stream(body)

    def allowed(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.token}"

    def admin_answer(self) -> None:
        if not self.allowed():
            self.answer(401, {})
        elif self.path == "/admin/layout":
            self.answer(200, layout())
        else:
            self.answer(200, {"draining": State.draining, "in_flight": State.in_flight})

    def change_layout(self, body: dict) -> None:
        why = control().get("refuse", "")
        if not self.allowed() or why:
            self.answer(400 if why else 401, {"error": {"message": why, "code": "layout_not_feasible"}})
            return
        State.told.append((body["tensor"], body["generation"]))
        State.tensor, State.switched_at = body["tensor"], time.monotonic() + control().get("switch", 0)
        self.answer(202, layout())

    def stream(self, body: dict) -> None:
        with State.lock:
            State.in_flight += 1
        try:
            asked = body["messages"][-1]["content"]
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for word in [f"{body['model']}: ", asked, *[f" {i}" for i in range(control().get("chunks", 2))]]:
                event = {"choices": [{"index": 0, "delta": {"content": word}}]}
                self.chunk(f"data: {json.dumps(event)}\n\n")
                time.sleep(control().get("pause", 0))
            self.chunk("data: [DONE]\n\n")
            self.wfile.write(b"0\r\n\r\n")
        finally:
            with State.lock:
                State.in_flight -= 1

    def chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()


def layout() -> dict:
    """Sizes up to the devices of the pod; the last switch is over after `switch` seconds, or was given up (`fail`)."""
    devices = int(os.environ.get("KVERN_TENSOR_PARALLEL_SIZE", 1)) * int(os.environ.get("KVERN_DATA_PARALLEL_SIZE", 1))
    over, before = time.monotonic() >= State.switched_at, int(os.environ.get("KVERN_TENSOR_PARALLEL_SIZE", 1))
    records, why = [], control().get("fail", "")
    if State.told and over:
        size, generation = State.told[-1]
        outcome = {"outcome": "RolledBack", "reason": why} if why else {"outcome": "Switched", "reason": ""}
        records = [{"to": size, "generation": generation, **outcome}]
    return {
        "current": before if why or not over else State.tensor,
        "phase": "Stable" if over else "Resharding",
        "feasible": [{"size": n, "kvTokens": 4096} for n in (1, 2, 4) if n <= devices],
        "last": records,
        "told": State.told,
    }


def closed() -> bool:
    return State.draining or State.terminating


def serve(port: int, **values: object) -> ThreadingHTTPServer:
    server = ThreadingHTTPServer(("127.0.0.1", port), type("H", (Handler,), values))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def main(argv: list[str]) -> int:
    flags = {argv[i]: argv[i + 1] for i in range(2, len(argv) - 1) if argv[i].startswith("--")}
    wishes = control()
    print(f"loading {argv[1]}", flush=True)
    if "exit" in wishes:
        print(wishes.get("say", "ValueError: no"), flush=True)
        return int(wishes["exit"])
    token = Path(flags["--admin-token-file"]).read_text()
    State.ready_at = time.monotonic() + wishes.get("load", 0)
    # Blocked before there are threads, so that none of theirs can take it: a handler runs in the main thread alone, and
    # nothing would wake that up.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    serve(int(flags["--port"]))
    serve(int(flags["--admin-port"]), admin=True, token=token)
    print("ENV " + json.dumps({k: v for k, v in os.environ.items() if k.startswith(("KVERN_", "OMP_"))}), flush=True)
    signal.sigwait({signal.SIGTERM})
    State.terminating = True
    while State.in_flight:
        time.sleep(0.02)
    return 0


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
