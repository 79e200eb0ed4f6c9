"""`kvern up` with a model of a hub on loopback: the real `kvern fetch` runs as the Job's process, then the engine."""

import os
import signal
import sys
from pathlib import Path

import local_up
import pytest

from kvern_cli.local.runner import UpError

sys.path.insert(0, str(Path(__file__).parents[1] / "engine" / "fetching"))

from fake_hub import FakeHub, noise

MANIFEST = """\
apiVersion: kvern.dev/v1alpha1
kind: InferenceService
metadata: {name: fake, namespace: tests}
spec:
  model: {uri: "hf://org/large", name: fake-model}
  cache: {pvc: {size: 1Gi}}
  resources: {gpusPerPod: 0}
"""
FILES = {"config.json": b"{}", "model.safetensors": noise(2_000_000)}
SIZE = sum(map(len, FILES.values()))


@pytest.fixture
def hub(monkeypatch, tmp_path):
    made = FakeHub()
    made.add("org/large", FILES)
    monkeypatch.setenv("KVERN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(local_up, "MANIFEST", MANIFEST)
    fake = (sys.executable, str(Path(__file__).with_name("fake_kvern.py")))
    monkeypatch.setitem(local_up.COMMANDS, "kvern", fake)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    with made.running():
        monkeypatch.setenv("HF_ENDPOINT", made.url)
        yield made


def cache_of(up) -> dict:
    return up.document["service"]["status"].get("cache", {})


async def test_a_model_is_fetched_then_served(hub, make_up):
    hub.faults.pause = 0.2
    up = make_up().start()
    await up.until(lambda: cache_of(up).get("phase") == "Downloading" and cache_of(up).get("bytes", 0) > 200_000)
    assert cache_of(up)["total"] == SIZE and not up.pods()  # no engine before its model
    assert " of hf://org/large are in claim fake-cache" in up.condition("ModelCached")["message"]
    assert up.condition("Ready")["reason"] == "Downloading"
    (fetch,) = up.pods("fetch")
    assert fetch["doing"].startswith("downloading hf://org/large: ")

    os.kill(fetch["pid"], signal.SIGKILL)  # in mid-file: it is started again, and goes on
    hub.faults.pause = 0.0
    await up.ready()
    assert up.condition("ModelCached")["status"] == "True" and cache_of(up)["phase"] == "Ready"
    assert any(asked.startswith("bytes=") for name, asked in hub.fetched() if name == "model.safetensors")
    assert up.pods("fetch")[0]["doing"] == "done"


async def test_a_refusal_is_told(hub, make_up):
    hub.repositories["org/large"].gated = True
    up = make_up().start("hello")
    with pytest.raises(UpError) as caught:
        await up.task
    text = str(caught.value)
    assert "it does not start: ModelAccessDenied: fetch fake-fetch-" in text
    assert "access denied: the model is gated; ask for access at http://127.0.0.1" in text
