"""`kvern up` in the tests' own process, with a fake engine and the real router."""

import asyncio
import contextlib
import json
import sys
import time
from pathlib import Path

from kvern_cli.ask import ask
from kvern_cli.local.cluster import Machine
from kvern_cli.local.pod import Timing
from kvern_cli.local.runner import Runner
from kvern_cli.local.state import StateFolder, read_state
from kvern_cli.up import choose_port
from kvern_operator.api.load import load_file

FAKE = Path(__file__).with_name("fake_engine.py")
COMMANDS = {
    "kvern": (sys.executable, str(FAKE)),
    "kvern-router": (sys.executable, "-m", "kvern_router.main"),
}
QUICK = Timing(probe_while_starting=0.05, probe=0.1, backoff=0.2, longest_backoff=1.0)
MANIFEST = """\
apiVersion: kvern.dev/v1alpha1
kind: InferenceService
metadata: {name: fake, namespace: tests}
spec:
  model: {uri: "builtin://smollm2-135m", name: fake-model}
  resources: {gpusPerPod: 0}
  rollout: {drainTimeoutSeconds: 20}
"""


class Lines:
    """A view that keeps what was said."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.rows: list = []

    def update(self, rows) -> None:
        self.rows = list(rows)

    def say(self, text: str) -> None:
        self.said.append(text)

    def paused(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class Up:
    """A running `kvern up` in this process."""

    def __init__(self, tmp_path: Path, manifest: str, gpus: tuple[int, ...], timing: Timing) -> None:
        self.file, self.control_file = tmp_path / "service.yaml", tmp_path / "control.json"
        self.file.write_text(manifest)
        self.view = Lines()
        service = load_file(self.file)
        self.state = StateFolder(service.metadata.namespace, service.metadata.name)
        self.state.__enter__()
        self.port = choose_port(0)[0]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        machine = Machine(gpus=gpus, commands=COMMANDS, timing=timing)
        self.runner = Runner(self.file, service, self.state, self.port, machine, self.view)
        self.task: asyncio.Task[int] | None = None

    def start(self, question: str | None = None, timeout: float | None = 90) -> "Up":
        self.task = asyncio.create_task(self.runner.run(question, timeout))
        return self

    def control(self, **wishes: object) -> None:
        temporary = self.control_file.with_suffix(".new")
        temporary.write_text(json.dumps(wishes))
        temporary.replace(self.control_file)

    def edit(self, addition: str) -> None:
        temporary = self.file.with_suffix(".new")
        temporary.write_text(MANIFEST + addition)
        temporary.replace(self.file)

    @property
    def document(self) -> dict:
        found = read_state(self.state.path)
        return found.document if found else {"service": {"status": {}}, "pods": []}

    def condition(self, type_: str) -> dict:
        found = self.document["service"]["status"].get("conditions", [])
        return next((c for c in found if c["type"] == type_), {"status": "", "reason": "", "message": ""})

    def pods(self, component: str = "engine") -> list[dict]:
        return [p for p in self.document["pods"] if p["component"] == component]

    def log(self) -> str:
        return Path(self.pods()[0]["log"]).read_text()

    async def until(self, true, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            assert self.task is not None
            if self.task.done():
                self.task.result()
            state = json.dumps(self.document, indent=1)
            assert time.monotonic() < deadline, f"waited in vain; {self.view.said}\n{state}"
            await asyncio.sleep(0.02)

    async def ready(self) -> None:
        generation = self.document["service"]["metadata"]["generation"] if "metadata" in self.document["service"] else 1
        await self.until(lambda: self.condition("Ready")["status"] == "True")
        assert self.document["service"]["status"]["observedGeneration"] >= generation

    async def say(self, text: str) -> str:
        pieces: list[str] = []
        await ask(self.url, "fake-model", text, pieces.append)
        return "".join(pieces)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
