"""Pure parts of local mode: command lines, log lines, limits of the machine, GPUs; and the words of the CLI."""

import sys
from pathlib import Path

import pytest
from fake_cluster import service

from kvern_cli import main as cli
from kvern_cli.ask import curl_line
from kvern_cli.local import logs
from kvern_cli.local.files import write_atomically
from kvern_cli.local.gpus import GpuPool, visible_gpus
from kvern_cli.local.launch import environment_for, launch
from kvern_cli.local.limits import refusals, warnings
from kvern_cli.up import choose_port, parse_claims
from kvern_cli.view import PlainView, RichView, Row, make_view
from kvern_cli.words import age, table
from kvern_operator.api.base import parse_time
from kvern_operator.desired import engine, router
from kvern_operator.settings import Settings

COMMANDS = {"kvern": ("python", "kvern"), "kvern-router": ("router",)}


def test_an_engine_as_a_process():
    svc = service("resources: {gpusPerPod: 2, cpu: 2}, engine: {maxModelLen: 512}")
    template = engine.pod_template(svc, "smol-r0", {}, Settings())
    maps = {"smol-r0-layout": {"KVERN_TENSOR_PARALLEL_SIZE": "2"}}
    made = launch(template, {"http": 4001, "admin": 4002}, {"admin": Path("/s/admin")}, maps, COMMANDS, gpus=(1, 3))
    assert made.argv == (
        *("python", "kvern", "serve", "builtin://smollm2-135m"),
        *("--served-model-name", "smollm2-135m", "--host", "127.0.0.1", "--port", "4001"),
        *("--admin-host", "127.0.0.1", "--admin-port", "4002", "--admin-token-file", "/s/admin/token"),
        *("--drain-timeout-seconds", "300", "--max-model-len", "512"),
    )
    assert made.environment == {
        "KVERN_TENSOR_PARALLEL_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": "1,3",
    }
    inherited = {"KVERN_SEED": "5", "KVERN_CACHE_DIR": "/mine", "HOME": "/home/me", "PATH": "/bin"}
    whole = environment_for(made, inherited)
    assert whole == {"KVERN_CACHE_DIR": "/mine", "HOME": "/home/me", "PATH": "/bin", **made.environment}


def test_a_router_as_a_process():
    template = router.pod_template(service(""), {}, Settings(endpoints_delay=0))
    made = launch(template, {"http": 4000}, {"replicas": Path("/s/r")}, {}, COMMANDS)
    assert made.argv[:5] == ("router", "--listen", "127.0.0.1:4000", "--replicas-file", "/s/r/replicas.json")


def test_a_claim_with_a_folder_is_where_the_model_or_cache_is():
    svc = service("cache: {claimName: c}")
    template = engine.pod_template(svc, "smol-r0", {}, Settings())
    made = launch(template, {"http": 1, "admin": 2}, {"cache": Path("/data")}, {}, COMMANDS)
    assert made.environment["KVERN_CACHE_DIR"] == "/data"


def test_a_program_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    template = engine.pod_template(service(""), "smol-r0", {}, Settings())
    with pytest.raises(FileNotFoundError) as error:
        launch(template, {"http": 1, "admin": 2}, {}, {}, {})
    assert str(error.value) == "kvern: not found beside /nowhere/python nor on PATH; pip install 'kvern[engine]'"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("one\ntwo\n", "two"),
        ("Traceback (most recent call last):\n  File x\nValueError: bad\n", "ValueError: bad"),
        ("kvern serve: cannot read x\nbye\n", "kvern serve: cannot read x"),
        ('time=t level=error process=core msg="it died" why=oom\n', "it died (why oom)"),
        ('time=t level=error process=w msg=failed exception="Traceback\\nKeyError: 3"\n', "failed"),
        ("\x1b[31merror: red\x1b[0m\n", "error: red"),
        ("  loading 10 %\r  loading 50 %\r  loading 90 %", "loading 90 %"),
    ],
)
def test_the_line_that_explains_an_end(text, line):
    assert logs.telling_line(text).startswith(line)
    assert len(logs.telling_line("x" * 1000)) == logs.LONGEST


def test_the_line_that_says_what_a_loading_engine_does():
    log = 'time=t process=supervisor msg=starting model=x\ntime=t msg="phase done" phase=weights seconds=1.2\n'
    assert logs.progress_line(log) == "weights done"
    assert logs.progress_line(log + "time=t msg=request path=/admin/drain status=200\n") == "weights done"
    assert logs.progress_line("time=t msg=starting model=x\n") == ""
    assert logs.progress_line("  weights  42 %") == "weights  42 %"


def test_what_kvern_up_refuses():
    def refused(spec: str, uri: str = "builtin://smollm2-135m", claims=()) -> list[str]:
        svc = service(spec)
        model = svc.spec.model.model_copy(update={"uri": uri})
        changed = svc.model_copy(update={"spec": svc.spec.model_copy(update={"model": model})})
        return [str(p) for p in refusals(changed, claims)]

    assert refused("") == []
    assert refused("", "hf://a/b") == []
    assert refused("", "pvc://m/x", ["m"]) == []
    assert refused("", "pvc://m/x") == [
        'spec.model.uri: "pvc://m/x" is in a cluster\'s claim; say kvern up --claim m=FOLDER'
    ]
    assert refused("", "s3://b/x") == []
    assert refused("", "oci://b/x") == [
        'spec.model.uri: "oci://b/x": kvern up mounts no images; use hf://, s3://, builtin://, or pvc:// with --claim'
    ]
    assert refused("router: {mode: None}, resources: {nodesPerReplica: 2}") == [
        "spec.router.mode: None: kvern up needs its router in front of the replicas; use Embedded (the default)",
        "spec.resources.nodesPerReplica: 2: kvern up has one machine; use 1",
    ]
    (line,) = refused("router: {apiKeysSecretRef: {name: keys}}")
    assert line.startswith(
        'spec.router.apiKeysSecretRef: Secret "keys" is in a cluster, and without it everybody could'
    )


def test_what_kvern_up_warns_about():
    spec = (
        "resources: {gpusPerPod: 1, gpuType: H200, memory: 1Gi, shmSize: 1Gi, nodeSelector: {a: b}, "
        "runtimeClassName: n}, "
        "engine: {image: x}, cache: {pvc: {size: 1Gi}}, router: {resources: {cpu: 1}}, overrides: {podTemplate: {a: 1}}"
    )
    assert warnings(service(spec), (), 0) == [
        "spec.resources.gpusPerPod: 1, but this machine has no GPU; using the CPU",
        "spec.resources.gpuType: the GPUs of this machine are used, whatever they are",
        "spec.resources.memory: not enforced on processes",
        "spec.resources.shmSize: not enforced on processes",
        "spec.resources.nodeSelector: there are no nodes to choose from",
        "spec.resources.runtimeClassName: there are no nodes to choose from",
        "spec.engine.image: the installed kvern is run, not an image",
        "spec.cache.pvc: no claims here; your own cache folder is used",
        "spec.router.resources: not enforced on processes",
        "spec.overrides: only command, args, env and probes of the container have an effect on processes",
    ]
    assert warnings(service("resources: {gpusPerPod: 1}, cache: {claimName: c}"), ("c",), 1) == []


def test_gpus(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == (0, 1)
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path) == (1,)
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == ()
    assert visible_gpus({}, tmp_path / "none") == ()
    pool = GpuPool((0, 1, 2))
    taken = pool.take(2)
    assert taken == (0, 1) and pool.take(2) is None and pool.free == 1
    pool.give_back(taken)
    pool.give_back(taken)
    assert pool.free == 3


def test_a_file_is_replaced_as_a_whole_and_only_its_owner_reads_it(tmp_path):
    write_atomically(tmp_path / "a" / "token", "x")
    write_atomically(tmp_path / "a" / "token", "y")
    assert (tmp_path / "a" / "token").read_text() == "y"
    assert (tmp_path / "a" / "token").stat().st_mode & 0o777 == 0o600
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["token"]


def test_claims_and_ports(tmp_path):
    assert parse_claims([f"m={tmp_path}"]) == {"m": tmp_path}
    with pytest.raises(ValueError, match=r"^--claim m: write NAME=FOLDER$"):
        parse_claims(["m"])
    with pytest.raises(ValueError, match=r"^--claim m=/no/such: there is no folder /no/such$"):
        parse_claims(["m=/no/such"])
    assert choose_port(0)[0] > 0


def test_a_port_that_is_taken():
    import socket

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            OSError, match=rf"^--port {port}: Address already in use; name another, or 0 for a free one$"
        ):
            choose_port(port)


def test_plain_progress_is_a_line_a_change(capsys):
    view = PlainView(sys.stdout)
    for text in ("weights 10 %", "weights 20 %", "profile", "profile"):
        view.update([Row("r0", text, 1.0, "busy")])
    view.update([Row("r0", "ready", 2.0, "ready")])
    view.update([])
    said = [line.partition("] ")[2] for line in capsys.readouterr().out.splitlines()]
    assert said == ["r0: weights 10 %", "r0: profile", "r0: ready", "r0: stopped"]


def test_the_table_of_a_terminal_gives_way_to_what_others_print(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with make_view() as view:
        assert isinstance(view, RichView)
        view.update([Row("r0-0", "weights 40 %", 1.26, "busy"), Row("router-0", "ready", 0.5, "ready")])
        view.say("a line that stays [not markup]")
        with view.paused():
            print("an answer", end="", flush=True)
        view.update([Row("r0-0", "CrashLoopBackOff: restart in 2 s", 3.0, "trouble")])
    out, err = capsys.readouterr()
    assert out == "an answer"
    assert "a line that stays [not markup]" in err
    assert "CrashLoopBackOff: restart in 2 s" in err


def test_ages_and_tables():
    now = parse_time("2026-01-03T00:00:00Z")
    times = (
        "2026-01-02T23:59:18Z",
        "2026-01-02T23:54:50Z",
        "2026-01-02T23:20:00Z",
        "2026-01-02T20:56:00Z",
        "2026-01-01T00:00:00Z",
    )
    assert [age(t, now) for t in times] == ["42s", "5m10s", "40m", "3h4m", "2d"]
    assert table([("A", "LONG"), ("xyz", "1")]) == ["A     LONG", "xyz   1"]


def test_a_curl_line_survives_the_shell():
    import shlex

    parts = shlex.split(curl_line("http://127.0.0.1:1/v1", "m", 'What\'s "up"?'))
    assert parts[:3] == ["curl", "-s", "http://127.0.0.1:1/v1/chat/completions"]
    assert parts[-1] == '{"model": "m", "messages": [{"role": "user", "content": "What\'s \\"up\\"?"}]}'


def test_validate(tmp_path, capsys):
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    text = "apiVersion: kvern.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: a}\nspec:\n  model: {uri: 'builtin://tiny-kjv'}\n"
    good.write_text(text + "  parallelism: {tensor: {mode: Auto}, expert: true}\n")
    bad.write_text(text + "  replica: 1\n")
    assert cli.main(["validate", str(good), str(bad)]) == 1
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        f"{good}: valid: a serves tiny-kjv, replicas 1",
        f"{good}: note: spec.parallelism.expert: expert parallelism is not offered yet",
    ]
    assert err == f"{bad}:6: spec.replica: unknown field; did you mean replicas?\n"
    assert cli.main(["up", str(bad)]) == 2
    assert capsys.readouterr().err == f"kvern up: {bad}:6: spec.replica: unknown field; did you mean replicas?\n"


def test_wrong_words(capsys):
    assert cli.main([]) == 2
    assert cli.main(["--help"]) == 0
    assert "serve      an OpenAI-compatible server" in capsys.readouterr().out
    assert cli.main(["up", "x", "--port", "99999"]) == 2
    assert "'99999' is not a port: 1 to 65535, or 0 for a free one" in capsys.readouterr().err
    assert cli.main(["up", "x", "--timeout", "-1"]) == 2
    assert "'-1' is not a number of seconds above 0" in capsys.readouterr().err


def test_without_the_engine_its_commands_say_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "kvern_engine.cli", None)
    assert cli.main(["serve", "x"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("kvern serve: the engine is not installed here (no module kvern_engine")
    assert err.endswith("pip install 'kvern[engine]'\n")


def test_help_imports_nothing_heavy():
    import subprocess

    code = (
        "import sys\nfrom kvern_cli.main import main\nmain(['--help'])\n"
        "heavy = {'pydantic', 'yaml', 'rich', 'httpx', 'torch', 'asyncio'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


def test_status_and_down_where_nothing_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert cli.main(["status"]) == 0
    assert capsys.readouterr().out == "nothing runs on this machine; start a service with: kvern up FILE\n"
    assert cli.main(["status", "x"]) == 1
    expected = "kvern status: no service x on this machine (nothing runs; start it with: kvern up FILE)\n"
    assert capsys.readouterr().err == expected
    assert cli.main(["down"]) == 1
    assert capsys.readouterr().err == "kvern down: nothing runs\n"
