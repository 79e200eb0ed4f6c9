"""Local mode with a fake engine and the real router: start, crash, back-off, drain, clean end."""

import asyncio
import json
import os
import signal
import sys
import time

import pytest
from local_up import FAKE, MANIFEST, alive

from kvern_cli.ask import AskError
from kvern_cli.local.runner import UpError
from kvern_cli.local.state import AlreadyRunning, StateFolder, read_state
from kvern_cli.main import main


async def test_a_question_is_answered_and_nothing_is_left_over(make_up, capsys):
    up = make_up()
    up.start("Why?")
    await up.until(lambda: len(up.document["pods"]) == 2 and all(p["pid"] for p in up.document["pods"]))
    pids = [p["pid"] for p in up.document["pods"]]
    async with asyncio.timeout(60):
        assert await up.task == 0
    out = capsys.readouterr().out
    assert "fake-model: Why? 0 1" in out
    assert f"URL:  {up.url}" in out
    assert (
        f'curl -s {up.url}/chat/completions -H \'Content-Type: application/json\' -d \'{{"model": "fake-model"' in out
    )
    assert not [pid for pid in pids if alive(pid)]
    assert "stopped" in up.document and up.document["pods"] == []


async def test_the_layout_reaches_the_engine_by_its_configmap_and_its_own_variables_are_shielded(make_up, monkeypatch):
    monkeypatch.setenv("KVERN_MAX_MODEL_LEN", "7")
    up = make_up("  engine: {maxModelLen: 512}\n").start()
    await up.ready()
    seen = json.loads(up.log().partition("ENV ")[2].partition("\n")[0])
    layout = {f"KVERN_{kind}_PARALLEL_SIZE": "1" for kind in ("TENSOR", "PIPELINE", "DATA")}
    assert {
        k: v for k, v in seen.items() if k not in ("KVERN_CACHE_DIR", "OMP_NUM_THREADS", "OMP_WAIT_POLICY")
    } == layout


async def test_two_replicas_one_killed_comes_back_while_the_other_answers(make_up):
    up = make_up("  replicas: 2\n").start()
    await up.ready()
    victim = up.pods()[0]
    os.killpg(victim["pid"], signal.SIGKILL)
    for i in range(10):
        assert await up.say(f"q{i}") == f"fake-model: q{i} 0 1"
    await up.until(lambda: up.pods()[0]["restarts"] == 1 and up.pods()[0]["ready"])
    await up.ready()
    assert up.pods()[0]["pid"] != victim["pid"]
    assert up.pods()[1]["restarts"] == 0


async def test_a_crash_loop_backs_off_and_its_cause_comes_up(make_up):
    up = make_up()
    up.control(exit=3, say="Traceback (most recent call last):\n  File x\nValueError: no such model\nbye")
    up.start(timeout=None)
    await up.until(lambda: up.condition("Ready")["reason"] == "CrashLoopBackOff")
    await up.until(lambda: up.pods()[0]["restarts"] >= 2)
    await up.until(lambda: up.condition("Ready")["message"].startswith("engine fake-r0-0: restart in "))
    for type_ in ("Ready", "Available", "Degraded"):
        message = up.condition(type_)["message"]
        assert "exit code 3, " in message and message.endswith('last line: "ValueError: no such model"')
    assert up.condition("Available")["status"] == "False"
    up.control()
    await up.ready()
    assert up.condition("Degraded") | {"lastTransitionTime": ""} == {
        "type": "Degraded",
        "status": "False",
        "observedGeneration": 1,
        "lastTransitionTime": "",
        "reason": "AsExpected",
        "message": "no pod is in trouble",
    }


async def test_a_question_to_what_cannot_start_is_given_up_with_the_end_of_the_log(make_up):
    up = make_up()
    up.control(exit=2, say="ModelNotFoundError: no model there")
    up.start("Why?")
    with pytest.raises(UpError) as error:
        async with asyncio.timeout(60):
            await up.task
    text = str(error.value)
    assert text.startswith("it does not start: CrashLoopBackOff: engine fake-r0-0: restart in ")
    assert "fake-r0-0.log:" in text and text.endswith("    ModelNotFoundError: no model there")


async def test_what_does_not_get_ready_in_time_says_so(make_up):
    up = make_up()
    up.control(load=60)
    up.start("Why?", timeout=4)
    with pytest.raises(UpError, match=r"^not ready within 4 s: Loading: 0 of 1 replicas answer; fake-r0-0 loading$"):
        async with asyncio.timeout(60):
            await up.task


async def test_a_failing_liveness_probe_restarts_the_pod(make_up, monkeypatch):
    monkeypatch.setattr("kvern_operator.desired.engine.engine_probes", _impatient)
    up = make_up().start()
    await up.ready()
    up.control(healthy=False)
    await up.until(lambda: up.pods()[0]["restarts"] == 1)
    up.control()
    await up.ready()
    assert "error: 2 liveness probes failed; it is restarted" in up.log()


def _impatient(_: str) -> dict:
    def get(path: str, failures: int) -> dict:
        return {"httpGet": {"path": path, "port": "http"}, "periodSeconds": 0.2, "failureThreshold": failures}

    return {"startupProbe": get("/ready", 50), "readinessProbe": get("/ready", 3), "livenessProbe": get("/health", 2)}


async def test_stopping_lets_a_running_stream_finish(make_up):
    up = make_up().start()
    await up.ready()
    up.control(chunks=30, pause=0.05)
    stream = asyncio.create_task(up.say("long"))
    await up.until(lambda: up.pods()[0]["inFlight"] == 1)
    up.runner.stop()
    assert await stream == "fake-model: long " + " ".join(map(str, range(30)))
    async with asyncio.timeout(60):
        assert await up.task == 0


async def test_stopping_twice_does_not_wait(make_up):
    up = make_up().start()
    await up.ready()
    up.control(chunks=500, pause=0.05)
    stream = asyncio.create_task(up.say("long"))
    await up.until(lambda: up.pods()[0]["inFlight"] == 1)
    up.runner.stop()
    await asyncio.sleep(0.2)
    began = time.monotonic()
    up.runner.stop()
    async with asyncio.timeout(60):
        assert await up.task == 130
    assert time.monotonic() - began < 15  # the stream would take 25
    with pytest.raises(AskError):
        await stream


async def test_gpus_are_handed_out_and_what_does_not_fit_is_unschedulable(make_up):
    gpus = "  resources: {gpusPerPod: 2}\n  parallelism: {tensor: {size: 1}}\n  replicas: 2\n"
    up = make_up(gpus=(0, 1, 2))
    up.file.write_text(MANIFEST.replace("  resources: {gpusPerPod: 0}\n", gpus))
    up.start(timeout=None)
    await up.until(lambda: up.condition("Ready")["reason"] == "Unschedulable")
    assert up.condition("Ready")["message"] == (
        "engine fake-r1-0: 0/1 nodes are available: 2 nvidia.com/gpu wanted, 1 free of 3; "
        "ask for less in spec.resources, or add nodes"
    )
    await up.until(lambda: up.condition("Available")["status"] == "True")
    await up.until(lambda: "kvTokensPerReplica" in up.document["service"]["status"]["capacity"])
    assert up.document["service"]["status"]["capacity"] == {"gpus": 4, "kvTokensPerReplica": 4096}


async def test_a_second_up_of_the_same_service_is_refused(make_up):
    up = make_up().start()
    await up.ready()
    with pytest.raises(
        AlreadyRunning, match=rf"^tests/fake is already up \(pid {os.getpid()}\); edit its file, or stop"
    ):
        StateFolder("tests", "fake").__enter__()


async def test_status_shows_columns_conditions_and_pods(make_up, capsys):
    up = make_up("  parallelism: {tensor: {mode: Recommend}}\n")
    up.start()
    await up.ready()
    capsys.readouterr()
    assert main(["status"]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == ["NAME", "MODEL", "TP", "READY", "DESIRED", "GPUS", "REASON", "URL", "AGE"]
    assert row.split()[:8] == ["fake", "fake-model", "1", "1", "1", "0", "AllReplicasReady", up.url]
    assert main(["status", "fake"]) == 0
    out = capsys.readouterr().out
    assert "Ready               True" in out and "1 of 1 replicas answer at" in out
    assert "Last decision   0 -> 1 replicas, " in out and "s ago: spec.replicas is 1." in out
    assert "fake-r0-0" in out and "fake-router-0" in out
    assert "FieldsIgnored       True     NotSupportedHere" in out and "Recommend needs a cluster" in out
    assert main(["status", "fake", "-o", "yaml"]) == 0
    assert "observedGeneration: 1" in capsys.readouterr().out
    assert main(["status", "nobody"]) == 1
    assert capsys.readouterr().err == "kvern status: no service nobody on this machine (running: fake)\n"


DRIVER = """
import argparse, sys
from kvern_cli.local.cluster import Machine
from kvern_cli.local.pod import Timing
from kvern_cli.up import up
commands = {"kvern": (sys.executable, sys.argv[1]), "kvern-router": (sys.executable, "-m", "kvern_router.main")}
args = argparse.Namespace(file=sys.argv[2], ask=None, port=0, timeout=None, claim=[])
raise SystemExit(up(args, Machine(commands=commands, timing=Timing(probe_while_starting=0.05))))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
async def test_children_end_with_their_parent_however_it_ends(tmp_path, monkeypatch, number):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("FAKE_CONTROL", raising=False)
    file = tmp_path / "service.yaml"
    file.write_text(MANIFEST)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        DRIVER,
        str(FAKE),
        str(file),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    text = ""
    async with asyncio.timeout(60):
        while "Stop:" not in text:
            line = await process.stdout.readline()
            assert line, (await process.stderr.read()).decode()
            text += line.decode()
    assert "fake answers after" in text and "kvern status fake" in text and "openai.OpenAI(base_url=" in text
    (folder,) = (tmp_path / "state" / "kvern").iterdir()
    state = read_state(folder)
    assert state is not None and state.running
    pids = [p["pid"] for p in state.document["pods"]]
    assert len(pids) == 2 and all(map(alive, pids))
    process.send_signal(number)
    async with asyncio.timeout(60):
        code = await process.wait()
    assert code == (0 if number != signal.SIGKILL else -9)
    for _ in range(600):
        if any(map(alive, pids)):
            await asyncio.sleep(0.05)
    assert not [pid for pid in pids if alive(pid)]
    state = read_state(folder)
    assert state is not None and not state.running


async def test_the_router_holds_requests_until_the_engine_has_loaded(make_up):
    up = make_up()
    up.control(load=1.0)
    up.start()
    await up.until(lambda: any(p["ready"] for p in up.pods("router")))
    assert await up.say("early") == "fake-model: early 0 1"


async def test_proxy_variables_do_not_reach_loopback_traffic(make_up, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    up = make_up().start()
    await up.ready()
    assert await up.say("x") == "fake-model: x 0 1"
