"""From a manifest to an answer with the real engine and the real router, as a person starts them: `kvern up`."""

import asyncio
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from kvern_cli.ask import ask
from kvern_cli.local.state import read_state

MODELS = Path(__file__).parents[1] / "engine" / "models_data"
MANIFEST = """\
apiVersion: kvern.dev/v1alpha1
kind: InferenceService
metadata: {name: tiny}
spec:
  model: {uri: "pvc://models/tiny-kjv", name: tiny}
  resources: {gpusPerPod: 0, cpu: 1}
  engine: {args: {device: DEVICE, num-gpu-blocks-override: 2048, sim-speed: "20", chat-template: TEMPLATE}}
  replicas: REPLICAS
"""


@pytest.fixture
async def kvern_up(tmp_path, monkeypatch):
    """Starts `kvern up` on a manifest; whatever still runs at the end is killed."""
    pytest.importorskip("kvern_engine")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    started = []

    async def start(device: str, replicas: int, *flags: str) -> asyncio.subprocess.Process:
        file = tmp_path / "tiny.yaml"
        template = tmp_path / "template.jinja"
        template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
        known = {"DEVICE": device, "REPLICAS": str(replicas), "TEMPLATE": str(template)}
        file.write_text(re.sub("|".join(known), lambda found: known[found[0]], MANIFEST))
        program = [
            sys.executable,
            "-m",
            "kvern_cli.main",
            "up",
            str(file),
            "--port",
            "0",
            "--claim",
            f"models={MODELS}",
        ]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*program, *flags, stdout=pipe, stderr=pipe)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.parametrize("device", ["cpu", "sim"])
async def test_a_question_is_answered(kvern_up, device):
    process = await kvern_up(device, 1, "--ask", "And God said")
    async with asyncio.timeout(100):
        out, err = (text.decode() for text in await process.communicate())
    assert process.returncode == 0, err
    question, answer, *_ = [part for part in out.split("\n\n") if part.strip()]
    assert question.strip() == "> And God said" and answer.strip()
    assert "URL:  http://127.0.0.1:" in out and "curl -s http://127.0.0.1:" in out
    assert "tiny-r0-0: ready" in err and "tiny-router-0: stopped" in err


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def test_a_killed_replica_comes_back_and_no_request_fails_meanwhile(kvern_up, tmp_path):
    process = await kvern_up("sim", 2)
    folder = tmp_path / "state" / "kvern" / "default_tiny"

    def state() -> dict:
        found = read_state(folder)
        return found.document if found else {"pods": [], "service": {"status": {"readyReplicas": 0, "url": ""}}}

    async def until(true, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline and process.returncode is None, json.dumps(state(), indent=1)
            await asyncio.sleep(0.05)

    await until(lambda: state()["service"]["status"]["readyReplicas"] == 2)
    url = state()["service"]["status"]["url"]
    victim = state()["pods"][0]
    family = [victim["pid"], *children_of(victim["pid"])]
    assert len(family) > 1
    os.kill(victim["pid"], signal.SIGKILL)
    for _ in range(8):
        assert await ask(url, "tiny", "And God said", lambda _: None) > 0
    await until(lambda: not [pid for pid in family if Path(f"/proc/{pid}").exists()])
    await until(lambda: state()["pods"][0]["restarts"] == 1 and state()["service"]["status"]["readyReplicas"] == 2)
    process.send_signal(signal.SIGINT)
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    assert f"URL:     {url}" in out.decode()
