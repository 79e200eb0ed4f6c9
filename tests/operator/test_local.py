"""Local mode with a fake engine and the real router: start, crash, back-off, drain, live change, clean end."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from kvern_cli.ask import AskError, ask
from kvern_cli.local.cluster import Machine
from kvern_cli.local.pod import Timing
from kvern_cli.local.runner import Runner, UpError
from kvern_cli.local.state import AlreadyRunning, StateFolder, read_state
from kvern_cli.main import main
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


@pytest.fixture
async def make_up(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("FAKE_CONTROL", str(tmp_path / "control.json"))
    (tmp_path / "control.json").write_text("{}")
    made: list[Up] = []

    def make(addition: str = "", gpus: tuple[int, ...] = (), timing: Timing = QUICK) -> Up:
        made.append(Up(tmp_path, MANIFEST + addition, gpus, timing))
        return made[-1]

    yield make
    for up in made:
        if up.task is not None and not up.task.done():
            up.runner.stop()
            up.runner.stop()
            with contextlib.suppress(Exception):
                async with asyncio.timeout(60):
                    await up.task
        up.state.__exit__()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


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


async def test_limits_are_kept_and_change_without_a_restart(make_up):
    up = make_up("  router: {limits: {requestsPerMinute: 1}}\n").start()
    await up.ready()
    (router,) = up.pods("router")
    assert await up.say("one") == "fake-model: one 0 1"
    with pytest.raises(AskError, match=r"1 requests a minute \(router.limits.requestsPerMinute\)"):
        await up.say("two")
    up.edit("  router: {limits: {requestsPerMinute: 60000}}\n")
    answer = ""
    async with asyncio.timeout(60):
        while not answer:
            with contextlib.suppress(AskError):
                answer = await up.say("three")
    assert answer == "fake-model: three 0 1"
    assert [p["pid"] for p in up.pods("router")] == [router["pid"]]


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


async def test_scaling_by_editing_the_file_drains_before_it_stops(make_up):
    up = make_up("  replicas: 2\n").start()
    await up.ready()
    up.control(chunks=40, pause=0.05)
    streams = [asyncio.create_task(up.say(f"s{i}")) for i in range(4)]
    await up.until(lambda: sum(p["inFlight"] or 0 for p in up.pods()) == 4)
    up.edit("  replicas: 1\n")
    await up.until(lambda: len(up.pods()) == 1 and up.condition("Ready")["status"] == "True")
    assert [t.done() for t in streams].count(True) >= 1
    for i, text in enumerate(await asyncio.gather(*streams)):
        assert text == f"fake-model: s{i} " + " ".join(map(str, range(40)))
    assert any(n.startswith("draining replica fake-r") and n.endswith(": 1 replica is wanted") for n in up.view.said)
    decision = up.document["service"]["status"]["autoscaling"]["lastDecision"]
    assert (decision["from"], decision["to"], decision["reason"]) == (2, 1, "spec.replicas is 1")


async def test_a_changed_template_is_rolled_out_without_a_failed_request(make_up):
    up = make_up().start()
    await up.ready()
    before, failures, answers, done = up.pods()[0]["name"], [], 0, asyncio.Event()

    async def load() -> None:
        nonlocal answers
        while not done.is_set():
            try:
                assert (await up.say("x")).startswith("fake-model: x")
                answers += 1
            except (AskError, AssertionError) as error:
                failures.append(repr(error))

    loads = [asyncio.create_task(load()) for _ in range(3)]
    up.edit("  engine: {maxModelLen: 256}\n")
    await up.until(lambda: [p["name"] for p in up.pods()] not in ([before], [before, "fake-r1-0"]))
    await up.ready()
    done.set()
    await asyncio.gather(*loads)
    assert failures == [] and answers > 2
    assert [p["name"] for p in up.pods()] == ["fake-r1-0"]


async def test_an_invalid_edit_is_reported_once_and_the_old_spec_goes_on(make_up):
    up = make_up().start()
    await up.ready()
    up.edit("  replica: 3\n")
    await up.until(lambda: len(up.view.said) > 1)
    await asyncio.sleep(0.6)
    complaints = [line for line in up.view.said if line.startswith("the change is ignored")]
    why = f"{up.file}:8: spec.replica: unknown field; did you mean replicas?"
    assert complaints == [f"the change is ignored, what ran before goes on:\n{why}"]
    assert await up.say("still?") == "fake-model: still? 0 1"
    up.file.write_text(MANIFEST.replace("fake-model", "other"))
    await up.until(
        lambda: any("spec.model.name: 'other' (was 'fake-model'): the name clients use is" in n for n in up.view.said)
    )
    up.file.write_text(MANIFEST.replace("name: fake,", "name: fake2,"))
    await up.until(
        lambda: any("metadata.name: 'fake2' (was 'fake') would be another service" in n for n in up.view.said)
    )
    up.file.unlink()
    await up.until(lambda: any("No such file" in n for n in up.view.said))
    assert await up.say("still?") == "fake-model: still? 0 1"


async def test_suspend_and_back(make_up):
    up = make_up().start()
    await up.ready()
    up.edit("  suspend: true\n")
    await up.until(lambda: up.document["pods"] == [])
    assert up.condition("Ready")["reason"] == "Suspended"
    up.edit("")
    await up.ready()
    assert await up.say("back?") == "fake-model: back? 0 1"


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


TWO = "  resources: {gpusPerPod: 4}\n  parallelism: {tensor: {size: %d}}\n"


async def test_a_tensor_size_that_changes_in_the_file_changes_in_the_pod_that_runs(make_up):
    up = make_up()
    manifest = MANIFEST.replace("  resources: {gpusPerPod: 0}\n", "")
    up.file.write_text(manifest + TWO % 4)
    up.runner._service = up.runner._adopt(load_file(up.file), 1)
    up.control(switch=0.5)
    up.start()
    await up.ready()
    pid = up.pods()[0]["pid"]
    up.file.write_text(manifest + TWO % 2)
    await up.until(lambda: any("from tensor size 4 to 2 while it serves" in line for line in up.view.said))
    await up.until(lambda: up.condition("ParallelismStable")["message"] == "tensor size 4, wanted 2")
    await up.until(lambda: up.condition("ParallelismStable")["message"] == "tensor size 2 on every ready replica")
    assert up.pods()[0]["pid"] == pid and up.pods()[0]["restarts"] == 0
    layout = (up.state.path / "volumes" / "configmap-fake-r0-layout" / "KVERN_TENSOR_PARALLEL_SIZE").read_text()
    assert layout == "2", "what a restart would begin with"
    up.control(refuse="this pod has a pipeline")
    up.file.write_text(manifest + TWO % 1)
    await up.until(lambda: any(p["replica"] == "fake-r1" for p in up.pods()))
    await up.until(lambda: len(up.pods()) == 1 and up.condition("Ready")["status"] == "True")
    why = "it cannot change to tensor size 1 while it serves: this pod has a pipeline"
    assert f"draining replica fake-r0 (0 in flight): {why}" in up.view.said
