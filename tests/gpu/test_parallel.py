"""Two GPUs: the plans and answers of one device at TP 2, PP 2 and DP 2, over NCCL.

    python -m pytest tests/gpu/test_parallel.py

Correctness only. The plans are those of `tests/engine/parallel`: shared prefixes, forks, preemption, all features.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "engine" / "parallel"))

from made_model import make_model
from parallel_harness import Ranks, Scenario, run_scenario
from test_layouts import check_logits, check_results

from kvern_engine import LLM, SamplingParams
from kvern_engine.config import EngineConfig
from kvern_engine.parallel.layout import Layout

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

LAYOUTS = [Layout(1, 2, 1), Layout(1, 1, 2), Layout(2, 1, 1)]
TEXTS = ["In the beginning God", "And he said unto them,", "The LORD is my", "Go ye into all the world and"]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.9, seed=5, n=3, max_tokens=30, ignore_eos=True),
    SamplingParams(temperature=1.1, seed=6, top_k=30, top_p=0.9, max_tokens=30, ignore_eos=True),
]


def config(model: str, layout: Layout = Layout(), **fields: Any) -> EngineConfig:  # noqa: B008 - frozen
    small = {"max_num_seqs": 8, "max_num_batched_tokens": 40, "max_model_len": 128, "dtype": "float32"}
    sizes = {
        "data_parallel_size": layout.data,
        "tensor_parallel_size": layout.tensor,
        "pipeline_parallel_size": layout.pipeline,
    }
    blocks = {"block_size": 16, "num_gpu_blocks_override": 13}
    return EngineConfig(model=model, device="cuda", **{**small, **blocks, **sizes, **fields})


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    made = Ranks(2, tmp_path_factory.mktemp("ranks"), method="spawn")
    yield made
    made.close()


@pytest.fixture(scope="module", params=["tiny", "made"])
def scenario(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    tiny = Path(__file__).parents[1] / "engine" / "models_data" / "tiny-kjv"
    model = str(tiny) if request.param == "tiny" else make_model(tmp_path_factory.mktemp("made"))
    prompt = [(7 * i * i + 3 * i) % 500 + 2 for i in range(70)]
    found = run_scenario(config(model, enforce_eager=True), prompt, fork_tokens=72)
    assert found.preemptions > 0 and found.cached_tokens >= 32
    torch.cuda.empty_cache()
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_plans_give_the_same_on_two_devices(scenario: Scenario, ranks: Ranks, layout: Layout) -> None:
    answers = ranks.run(config(scenario.config.model, layout, enforce_eager=True), scenario.plans)
    assert not [answer["trace"] for answer in answers if "error" in answer]
    for rank, answer in enumerate(answers):
        assert answer["ready"].device.startswith(f"cuda:{rank} ")
        if answer["knows"]:
            check_logits(answer["logits"], scenario.logits)
            check_results(answer["results"], scenario.results)


def tokens_of(model: str, **fields: Any) -> list[list[list[int]]]:
    with LLM(model, dtype="float32", num_gpu_blocks_override=256, max_num_seqs=16, **fields) as llm:
        # A stage of several has none; a rank of several has NCCL's all-reduces in them.
        assert ("graphs" in llm.worker_ready.load_seconds) == ("pipeline_parallel_size" not in fields)
        outs = llm.generate(TEXTS, PARAMS, use_tqdm=False)
    torch.cuda.empty_cache()
    return [[choice.token_ids for choice in out.outputs] for out in outs]


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["tp", "pp"])
def test_offline_answers_of_two_devices(tiny_path: str, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVERN_DEBUG_RANKS", "1")
    assert tokens_of(tiny_path, device="cuda", **sizes) == tokens_of(tiny_path, device="cuda")


def test_fp8_over_two_devices(tiny_path: str) -> None:
    """Stages: the tokens and logprobs of one device to the last bit, where batching changes nothing. Ranks of a layer:
    the same scales, so the same first tokens."""
    found = []
    for fields in ({}, {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}):
        sizes = {"num_gpu_blocks_override": 256, "max_num_seqs": 16, "batch_invariant": True, **fields}
        with LLM(tiny_path, device="cuda", dtype="bfloat16", quantization="fp8", kv_cache_dtype="fp8", **sizes) as llm:
            outs = llm.generate(TEXTS, PARAMS, use_tqdm=False)
        found.append([[(choice.token_ids, choice.logprobs) for choice in out.outputs] for out in outs])
        torch.cuda.empty_cache()
    assert found[1] == found[0]
    assert [out[0][0][0] for out in found[2][:2]] == [out[0][0][0] for out in found[0][:2]]


@pytest.mark.parametrize("flag", ["--data-parallel-size", "--tensor-parallel-size", "--pipeline-parallel-size"])
def test_a_server_on_two_devices(tiny_path: str, tmp_path: Path, flag: str) -> None:
    """Eight requests at once over HTTP: the tokens of one engine on a CPU."""
    pytest.importorskip("starlette")
    httpx = pytest.importorskip("httpx")
    prompts = [f"{TEXTS[i % 4]} {i}" for i in range(8)]
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with LLM(tiny_path, device="cpu", num_gpu_blocks_override=256, max_num_seqs=16) as llm:
        expected = [out.outputs[0].text for out in llm.generate(prompts, greedy, use_tqdm=False)]
    command = [sys.executable, "-m", "kvern_engine.cli", "serve", tiny_path, "--served-model-name", "tiny"]
    command += ["--device", "cuda", "--dtype", "float32", "--port", "0", "--num-gpu-blocks-override", "256", flag, "2"]
    log: list[str] = []
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ)
    assert server.stderr is not None
    threading.Thread(target=lambda: log.extend(server.stderr or ()), daemon=True).start()
    try:
        url = _ready_url(server, log)
        body = {"model": "tiny", "prompt": prompts, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        assert [choice["text"] for choice in reply["choices"]] == expected
    finally:
        server.terminate()
        if server.wait(30) != 0:
            print("".join(log))


def _ready_url(server: "subprocess.Popen[str]", log: list[str]) -> str:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and server.poll() is None:
        ready = [line for line in list(log) if "msg=ready url=" in line]
        if ready:
            return ready[0].split("url=")[1].split()[0]
        time.sleep(0.05)
    pytest.fail(f"the server did not become ready:\n{''.join(log)}")
