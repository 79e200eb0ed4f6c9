"""`kvern up`: a tensor size that is changed in the file is changed in the pod that runs, under streams. Real processes:
`kvern up`, the router, the engine with four ranks on a CPU (the manifest says four GPUs, this machine has none)."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pods import wait_for
from switch import make_eight_heads

SECONDS = 150.0
MANIFEST = """\
apiVersion: kvern.dev/v1alpha1
kind: InferenceService
metadata: {name: moves}
spec:
  model: {uri: "pvc://models/eight-heads", name: eight}
  engine: {args: {num-gpu-blocks-override: 400}}
  resources: {gpusPerPod: 4}
  parallelism: {tensor: {size: %d}}
  rollout: {drainTimeoutSeconds: 10}
"""


class Up:
    """A `kvern up` of its own, with what it prints."""

    def __init__(self, folder: Path) -> None:
        make_eight_heads(folder / "models" / "eight-heads")
        self.file, self._state = folder / "service.yaml", folder / "state"
        self.write(1)
        command = [str(Path(sys.executable).parent / "kvern"), "up", str(self.file), "--port", "0"]
        command += ["--claim", f"models={folder / 'models'}"]
        environ = {**os.environ, "XDG_STATE_HOME": str(self._state), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ, cwd=folder
        )
        self.lines: list[str] = []
        threading.Thread(target=lambda: self.lines.extend(self.process.stdout or ()), daemon=True).start()
        found = wait_for(lambda: re.search(r"URL: +(http\S+)/v1", self.text), SECONDS, f"it answers: {self.lines}")
        self.url = found.group(1)
        self.family = psutil.Process(self.process.pid).children(recursive=True)

    @property
    def text(self) -> str:
        return "".join(list(self.lines))

    def write(self, size: int) -> None:
        """As an editor does: a new file in the old one's place."""
        fresh = self.file.with_suffix(".new")
        fresh.write_text(MANIFEST % size)
        fresh.replace(self.file)

    def engine(self) -> dict[str, Any]:
        """The pod as the state file has it."""
        state = json.loads((self._state / "kvern" / "default_moves" / "state.json").read_text())
        (pod,) = [pod for pod in state["pods"] if pod["component"] == "engine"]
        return {**pod, "layout": state["service"]["status"]["parallelism"]}

    def stream(self, index: int, tokens: int) -> str:
        """The text of a stream through the router; raises where there is an error in it."""
        body = {"model": "eight", "prompt": [50 + index] * (20 + 3 * index), "max_tokens": tokens, "stream": True}
        body |= {"ignore_eos": True, "temperature": 0}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        text = ""
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    text += "".join(choice["text"] for choice in event["choices"])
        return text

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(60)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    made = Up(tmp_path)
    yield made
    if made.process.poll() is None:
        made.stop()


def test_a_changed_file_changes_the_layout_under_streams(up: Up) -> None:
    undisturbed = [up.stream(i, 120) for i in range(4)]
    pid = up.engine()["pid"]
    texts: dict[int, list[str]] = {i: [] for i in range(4)}
    over = threading.Event()

    def run(index: int) -> None:
        while not over.is_set():
            texts[index].append(up.stream(index, 120))

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(4)]
    for thread in threads:
        thread.start()
    for before, size in ((1, 4), (4, 2)):
        up.write(size)
        said = f"changing pod moves-r0-0 from tensor size {before} to {size} while it serves"
        wait_for(lambda said=said: said in up.text, SECONDS, f"{said}: {up.text}")
        wait_for(lambda size=size: up.engine()["layout"].get("current") == size, SECONDS, f"size {size}: {up.text}")
    over.set()
    for thread in threads:
        thread.join(SECONDS)
    for index, found in texts.items():
        assert found and set(found) == {undisturbed[index]}, "a stream has failed, or another text"
    assert (up.engine()["pid"], up.engine()["restarts"]) == (pid, 0)
    assert up.text.count("starting replica") == 1
    assert up.stop() == 0
    assert not [p for p in up.family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
