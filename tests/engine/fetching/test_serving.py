"""An engine whose model comes from a hub: fetched first, the tokens of the same folder, and a start without the hub."""

import os
import subprocess
import sys
from pathlib import Path

from fake_hub import FakeHub

from kvern_engine import LLM, SamplingParams
from kvern_engine.fetching.store import Store
from kvern_engine.fetching.uses import in_use, now_of

os.environ.setdefault("OMP_NUM_THREADS", "1")
TINY = Path(__file__).parents[1] / "models_data/tiny-kjv"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
ENGINE = {"device": "cpu", "max_model_len": 128, "kv_cache_memory_bytes": 1 << 22}


def answer(model: str, told: list[str] | None = None) -> list[int]:
    def progress(phase: str, fraction: float) -> None:
        assert 0.0 <= fraction <= 1.0
        if told is not None:
            told.append(phase)

    with LLM(model, load_progress=progress, **ENGINE) as llm:
        return llm.generate("In the beginning", GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_the_same_tokens_and_no_hub_afterwards(hub: FakeHub, cache: Path) -> None:
    hub.add("org/kjv", {path.name: path.read_bytes() for path in TINY.iterdir()})
    told: list[str] = []
    expected = answer(str(TINY))
    assert answer("hf://org/kjv", told) == expected
    assert "downloading hf://org/kjv" in told
    hub.repositories.clear()
    asked = len(hub.log)
    with LLM("hf://org/kjv", **ENGINE) as llm:
        store = Store(cache)
        (snapshot,) = store.snapshots()
        assert in_use(store, snapshot.path, now_of(store))
        assert llm.generate("In the beginning", GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected
    assert not in_use(store, snapshot.path, now_of(store)) and len(hub.log) == asked


def test_kvern_serve_says_what_is_wrong_with_the_model(hub: FakeHub) -> None:
    command = [sys.executable, "-m", "kvern_engine.cli", "serve", "hf://org/nome", "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert run.returncode == 1 and "Traceback" not in run.stderr
    assert "kvern serve: error: hf://org/nome: not found: " in run.stderr and "HF_TOKEN" in run.stderr
