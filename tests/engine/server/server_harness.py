"""Runs a real API server on a loopback port in front of fake engine cores (`conftest.py` has the fixtures)."""

import asyncio
import contextlib
import json
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from server_fake_core import FakeCore

from kvern_engine.config import EngineConfig
from kvern_engine.loading.resolve import resolve_model
from kvern_engine.server.main import Terminator, build_state, http_servers, load_reader
from kvern_engine.server.state import ServerState
from kvern_engine.server.wire.server import HttpServer
from kvern_engine.tokenizer import Tokenizer

MODEL = Path(__file__).parents[1] / "models_data" / "tiny-kjv"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if style is defined %}({{ style }}){% endif %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
TOKEN = "admin-secret"


class LiveServer:
    """An API server in a thread of its own, its sockets under `folder`."""

    def __init__(self, folder: Path, *, index: int = 0, engines: int = 1, load: bool = True, **config: Any) -> None:
        self.config = EngineConfig(model=str(MODEL), served_model_name=["tiny", "alias"], **config)
        self.folder, self.index, self.engines, self.load = folder, index, engines, load
        self.sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        self.url, self.admin_url = (f"http://127.0.0.1:{s.getsockname()[1]}" for s in self.sockets)
        self.state: ServerState
        self.terminator: Terminator
        self.http: list[HttpServer]  # the public port's and the admin port's
        self.loop: asyncio.AbstractEventLoop
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self.thread = threading.Thread(target=self._main, daemon=True)
        self.thread.start()
        assert self._started.wait(60), "the server did not start"
        if self._failure:
            raise self._failure

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as e:
            self._failure = e
            self._started.set()
            raise

    async def _serve(self) -> None:
        files = resolve_model(self.config.model)
        self.loop = asyncio.get_running_loop()
        self.state = build_state(self.config, files, self.index, str(self.folder), self.engines)
        self.http = servers = http_servers(self.state, TOKEN)
        self.terminator = Terminator(self.state, servers)
        serving = [asyncio.ensure_future(s.serve([k])) for s, k in zip(servers, self.sockets, strict=True)]
        if self.load:
            await load_reader(self.state, files)
        self._started.set()
        await asyncio.gather(*serving)
        self.state.client.close()
        self.state.requests.close()

    def load_now(self) -> None:
        """What `load=False` left out."""
        files = resolve_model(self.config.model)
        asyncio.run_coroutine_threadsafe(load_reader(self.state, files), self.loop).result(20)

    def terminate(self) -> None:
        """As a SIGTERM would."""
        self.loop.call_soon_threadsafe(self.terminator.signalled)

    def wait_for(self, status: int, path: str = "/ready", seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while (seen := httpx.get(self.url + path).status_code) != status:
            assert time.monotonic() < deadline, f"{path} is {seen}, not {status}"
            time.sleep(0.01)

    def close(self) -> None:
        if self.thread.is_alive():
            with contextlib.suppress(RuntimeError):  # its loop has just ended
                self.terminate()
                self.terminate()
            self.thread.join(60)
        assert not self.thread.is_alive()


class Setup:
    """One or more API servers and cores over one socket folder."""

    def __init__(self) -> None:
        # Unix socket paths must be short, which pytest's folders are not everywhere.
        self.folder = Path(tempfile.mkdtemp(prefix="kvern-"))
        template = self.folder / "template.jinja"
        template.write_text(TEMPLATE)
        self.template = str(template)
        self.servers: list[LiveServer] = []
        self.cores: list[FakeCore] = []

    def server(self, **config: Any) -> LiveServer:
        config = {"chat_template": self.template, "drain_timeout_seconds": 20.0, **config}
        server = LiveServer(self.folder, **config)
        self.servers.append(server)
        return server

    def core(self, **options: Any) -> FakeCore:
        core = FakeCore(str(self.folder), **options)
        self.cores.append(core)
        return core

    def close(self) -> None:
        for server in self.servers:
            server.close()
        for core in self.cores:
            core.close()
        shutil.rmtree(self.folder)


def saying(tokenizer: Tokenizer, text: str) -> Callable[[Any, int], list[int]]:
    """A reply that says `text` and then ends."""
    tokens = [*tokenizer.encode(text, add_special_tokens=False), 0]
    return lambda request, choice: tokens


def events_of(response: httpx.Response) -> list[Any]:
    """The data of a stream's events, [DONE] left out; it must be the last."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = [b for b in response.text.split("\n\n") if b]
    assert all(b.startswith("data: ") and "\n" not in b for b in blocks)
    assert blocks[-1] == "data: [DONE]"
    return [json.loads(b.removeprefix("data: ")) for b in blocks[:-1]]


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.005)
