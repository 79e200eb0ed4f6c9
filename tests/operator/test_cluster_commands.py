"""`kvern status` and `explain` against an API server: what they ask, show and say when it says no."""

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from cluster_commands import ALL_SERVICES, EVENTS, READY, SETS, kubeconfig, run
from fake_api import PODS, SERVICES, status
from recorded import condition, crashed, event, pod, replica, router_pods, service

from kvern_cli.kube.gather import missing_hint
from kvern_cli.main import COMMANDS, main, make_parser

# ---------------------------------------------------------------- status


def test_services_of_the_contexts_namespace(cluster, capsys):
    code, out, err = run(capsys, "status")
    assert code == 0 and err == "context kind, namespace team-a\n"
    header, row = out.splitlines()
    assert header.split()[0] == "NAME" and row.split()[:2] == ["smol", "smollm2-135m"]
    assert cluster.headers[-1]["Authorization"] == "Bearer t" and cluster.headers[-1]["User-Agent"].startswith("kvern/")


def test_services_of_all_namespaces_and_wide(cluster, capsys):
    _, out, err = run(capsys, "status", "-A", "-o", "wide")
    assert err == "context kind, all namespaces\n"
    assert out.splitlines()[0].split()[0] == "NAMESPACE" and out.splitlines()[0].split()[-1] == "MESSAGE"
    cluster.put_list(SERVICES, [])
    _, out, _ = run(capsys, "status", "-n", "team-a")
    assert out == "context kind, namespace team-a: no inferenceservices; apply one, such as examples/smollm2.yaml\n"


def test_one_service_with_its_pods(cluster, capsys):
    _, out, _ = run(capsys, "status", "smol")
    assert "AllReplicasReady" in out and "smol-r0-0" in out and "tp1 " in out and "smol-router-5d8-1" in out


def test_the_object_itself(cluster, capsys):
    _, out, err = run(capsys, "status", "smol", "-o", "json")
    assert json.loads(out)["metadata"]["name"] == "smol" and err == ""
    _, out, _ = run(capsys, "status", "-o", "yaml")
    assert yaml.safe_load(out)["kind"] == "List" and len(yaml.safe_load(out)["items"]) == 1


def test_long_lists_come_in_pages(cluster, capsys):
    many = [service(*READY) for _ in range(5)]
    for i, one in enumerate(many):
        one["metadata"]["name"] = f"s{i}"
    cluster.put_list(SERVICES, many)
    cluster.page = 2
    _, out, _ = run(capsys, "status")
    assert [line.split()[0] for line in out.splitlines()[1:]] == [f"s{i}" for i in range(5)]
    assert cluster.asked.count(SERVICES) == 3


def test_a_page_that_has_expired_leads_to_the_whole_list(cluster, capsys):
    def answer(query):
        if "continue" in query:
            return status(410, "Expired", "The provided continue parameter is too old")
        more = {"continue": "x"} if "limit" in query else {}
        return 200, {"items": [service(*READY)], "metadata": more}

    cluster.objects[SERVICES] = answer
    _, out, _ = run(capsys, "status")
    assert len(out.splitlines()) == 2


def test_watching_prints_again_what_has_changed(cluster, capsys, monkeypatch):
    monkeypatch.setattr("kvern_cli.status.WATCH_SECONDS", 0.0)
    looks = 0

    def answer(query):
        nonlocal looks
        looks += 1
        if looks == 3:
            return status(503, "ServiceUnavailable", "not now")
        if looks > 4:
            raise KeyboardInterrupt
        return 200, {"items": [service(*READY, readyReplicas=looks)]}

    def sleep(_):
        if looks >= 4:
            raise KeyboardInterrupt

    monkeypatch.setattr("kvern_cli.status.time.sleep", sleep)
    cluster.objects[SERVICES] = answer
    code, out, _ = run(capsys, "status", "-w")
    assert code == 130 and [line.split()[3] for line in out.splitlines() if line.startswith("smol")] == ["1", "2", "4"]


def test_watching_on_a_terminal_changes_the_table_in_place(cluster):
    cluster.objects[f"{SERVICES}/smol"] = lambda _: (200, service(*READY, readyReplicas=len(cluster.asked)))
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "kvern_cli.main", "status", "smol", "-w"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "160", "LINES": "50"},
        preexec_fn=take_interrupts,
    )
    os.close(theirs)
    shown = ""
    deadline = time.monotonic() + 60
    while shown.count("AllReplicasReady") < 4 and time.monotonic() < deadline:
        shown += os.read(ours, 65536).decode("utf-8", "replace")
    with contextlib.suppress(OSError):  # the terminal has no other end any more
        while process.poll() is None and time.monotonic() < deadline + 60:
            process.send_signal(signal.SIGINT)
            while select.select([ours], [], [], 2)[0]:  # a full terminal would hold up the last words
                shown += os.read(ours, 65536).decode("utf-8", "replace")
    assert process.wait(60) == 130
    os.close(ours)
    assert "\x1b[2mcontext kind, namespace team-a\x1b[0m" in shown
    assert shown.count("AllReplicasReady") >= 4 and "\x1b[1A" in shown  # drawn again over itself
    assert "Traceback" not in shown


def take_interrupts() -> None:
    """Tests that run in the background of a script inherit that Ctrl-C is ignored, and so would what they start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def watching(*argv: str, code: str) -> subprocess.Popen:
    command = f"import sys\n{code}\nsys.exit(main(sys.argv[1:]))"
    argv = [sys.executable, "-c", command, "status", *argv, "-w"]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=take_interrupts)


def test_one_ctrl_c_ends_it_though_the_cluster_does_not_answer(cluster):
    """Requests that were under way used to be waited for: each may take as long as the cluster keeps it."""
    let_go = threading.Event()

    def never(_):
        let_go.wait(300)
        return 200, {"items": []}

    asked = threading.Event()

    def service_then_silence(_):
        if looks:
            cluster.objects[EVENTS] = never
            asked.set()
        looks.append(1)
        return 200, service(*READY, readyReplicas=len(looks))

    looks: list[int] = []
    cluster.objects[f"{SERVICES}/smol"] = service_then_silence
    patient = "from kvern_cli.kube.client import Kube\nfrom kvern_cli.main import main\n"
    process = watching("smol", code=patient + "Kube._send.__defaults__ = (300.0,)")
    try:
        assert asked.wait(60)
        time.sleep(0.3)  # it waits for the events now
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert "Traceback" not in process.stderr.read()
    finally:
        let_go.set()
        process.kill()
        process.wait()


def test_a_ctrl_c_that_python_drops_counts_as_well(cluster):
    """What a signal handler raises in a destructor is printed and forgotten."""
    code = """
import signal
import kvern_cli.status as status
from kvern_cli.main import main

class Unlucky:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

again = status._again

def unlucky(view):
    Unlucky()
    return again(view)

status._again = unlucky
"""
    process = watching("smol", code=code)
    try:
        assert process.wait(60) == 130
        assert "KeyboardInterrupt" in process.stderr.read(), "it was not dropped: this test shows nothing"
    finally:
        process.kill()
        process.wait()


# ---------------------------------------------------------------- explain


def test_explain_asks_for_all_that_it_needs(cluster, capsys):
    bad = condition("Ready", "False", "CrashLoopBackOff")
    cluster.put_list(SERVICES, [service(bad, condition("Available", "False", "CrashLoopBackOff"))])
    cluster.put_list(PODS, [pod("smol-r0-0", crashed(1, 3)), *router_pods()])
    cluster.objects[f"{PODS}/smol-r0-0/log"] = lambda query: (
        (200, "starting\nkvern serve: error: model '/models/x' was not found\n") if "previous" in query else (400, "no")
    )
    code, out, err = run(capsys, "explain", "smol")
    assert code == 0 and err == "context kind, namespace team-a\n"
    assert "smol does not answer: smol-r0-0 does not find its model." in out
    assert "(ModelNotFound), started again 3 times" in out and "model '/models/x' was not found" in out
    assert "kvern logs -n team-a smol --previous" in out


def test_explain_finds_what_only_events_tell(cluster, capsys):
    cluster.put_list(SERVICES, [service(condition("Ready", "False", "Loading"))])
    cluster.put_list(PODS, router_pods())
    cluster.put_list(SETS, [replica("smol-r0", existing=0)])
    del cluster.objects[SETS][0]["kind"]  # as in real lists
    cluster.put_list(
        EVENTS, [event("StatefulSet", "smol-r0", "FailedCreate", 'pods "x" is forbidden: exceeded quota: q')]
    )
    _, out, _ = run(capsys, "explain", "smol")
    assert "the namespace's quota allows no further pod" in out and "exceeded quota: q" in out


def test_explain_goes_without_what_it_may_not_read(cluster, capsys):
    cluster.objects[PODS] = status(403, "Forbidden", 'pods is forbidden: User "ada" cannot list resource "pods"')
    cluster.objects[SETS] = cluster.objects[PODS]
    cluster.objects[EVENTS] = status(500, "InternalError", "etcd is away")
    code, out, _ = run(capsys, "explain", "smol")
    assert code == 0
    assert "These credentials may not see pods, statefulsets of namespace team-a; the role view lets them." in out
    assert "No events: cannot list events in namespace team-a just now: etcd is away." in out
    assert "smol answers: 1 of 1 replica." in out


# ---------------------------------------------------------------- no


@pytest.mark.parametrize("command", ["status", "explain", "logs"])
def test_no_such_service_says_what_there_is(cluster, capsys, command):
    cluster.put_list(PODS, [])
    code, out, err = run(capsys, command, "smoll")
    text = "there is no inferenceservice smoll in namespace team-a (context kind); did you mean smol?"
    assert (code, out, err) == (1, "", f"kvern {command}: {text}\n")


def test_hints_for_a_name_that_is_not_there():
    there = [("a", "llama"), ("a", "smol"), ("b", "mix")]
    assert missing_hint("mix", "a", there) == "; there is one in namespace b: -n b"
    assert missing_hint("smoll", "a", there) == "; did you mean smol?"
    assert missing_hint("x", "a", there) == "; there are: llama, smol"
    assert missing_hint("x", "c", there) == "; there is none at all in it"


def test_the_resource_is_not_installed(cluster, capsys):
    for path in (SERVICES, ALL_SERVICES, f"{SERVICES}/smol"):
        cluster.objects.pop(path)
    for argv in (("status",), ("explain", "smol")):
        code, _, err = run(capsys, *argv)
        assert code == 1 and "does not know InferenceService of kvern.dev/v1alpha1" in err
        assert "helm install kvern-crds charts/kvern-crds" in err


def test_not_allowed(cluster, capsys):
    words = 'inferenceservices.kvern.dev is forbidden: User "ada" cannot list resource'
    cluster.objects[SERVICES] = status(403, "Forbidden", words)
    code, _, err = run(capsys, "status")
    assert code == 1
    assert err == f"kvern status: not allowed to list inferenceservices in namespace team-a: {words}\n"


def test_not_accepted(cluster, capsys):
    cluster.token = "another"
    assert run(capsys, "status") == (
        1,
        "",
        "kvern status: the cluster (context kind) does not accept user ada: log in again\n",
    )


def test_nobody_answers(cluster, capsys, tmp_path):
    file = kubeconfig(tmp_path / "dead", "http://127.0.0.1:1")
    code, _, err = run(capsys, "status", "--kubeconfig", str(file))
    assert code == 1 and err == (
        "kvern status: cannot reach the cluster at http://127.0.0.1:1 (context kind): Connection refused; "
        "try: kubectl --context kind cluster-info\n"
    )


def test_somebody_else_answers(cluster, capsys):
    cluster.objects[SERVICES] = (200, "<html>hello</html>")
    code, _, err = run(capsys, "status")
    assert code == 1 and "does not answer as a Kubernetes API server does" in err


# ---------------------------------------------------------------- which place


def state(tmp_path: Path, name: str, running: bool, monkeypatch) -> None:
    folder = tmp_path / "state" / "kvern" / f"default_{name}"
    (folder / "logs").mkdir(parents=True)
    log = folder / "logs" / f"{name}-r0-0.log"
    log.write_text("one\ntwo\n")
    svc = service(*READY, readyReplicas=1)
    svc["metadata"] |= {"name": name, "namespace": "default"}
    engine = {
        **{"name": f"{name}-r0-0", "replica": f"{name}-r0", "component": "engine", "ready": True, "doing": "ready"},
        **{"restarts": 0, "inFlight": 1, "address": "127.0.0.1:4", "pid": 1, "log": str(log)},
        "created": "2026-01-01T00:00:00Z",
    }
    document = {"pid": 1, "file": "/x.yaml", "created": "2026-01-01T00:00:00Z", "service": svc, "pods": [engine]}
    (folder / "state.json").write_text(json.dumps(document))
    if running:
        monkeypatch.setattr("kvern_cli.local.state._locked", lambda folder: folder.name == f"default_{name}")


def test_what_runs_on_this_machine_comes_first(cluster, capsys, tmp_path, monkeypatch):
    state(tmp_path, "home", True, monkeypatch)
    _, out, err = run(capsys, "status")
    assert err == "this machine\n" and out.splitlines()[1].startswith("home")
    for flags in (["--cluster"], ["--context", "kind"], ["-A"]):
        _, out, err = run(capsys, "status", *flags)
        assert err.startswith("context kind, ") and "smol" in out and "home" not in out
    # A name that does not run here is looked for in the cluster.
    assert run(capsys, "status", "smol")[2] == "context kind, namespace team-a\n"
    assert run(capsys, "explain", "home")[1].startswith("home answers: 1 of 1 replica.")
    code, out, _ = run(capsys, "logs", "home", "--tail", "1")
    assert (code, out) == (0, "two\n")


def test_what_has_stopped_here_is_shown_only_where_it_is_asked_for(cluster, capsys, tmp_path, monkeypatch):
    state(tmp_path, "gone", False, monkeypatch)
    assert "gone" not in run(capsys, "status")[1]
    _, out, err = run(capsys, "status", "gone", "--local")
    assert err == "this machine\n" and "NotRunning" in out and "Stopped" in out
    monkeypatch.setenv("KUBECONFIG", "/none")
    assert "does not run" in run(capsys, "explain", "gone")[1]
    assert run(capsys, "status", "--cluster")[2].startswith("kvern status: no kubeconfig found (looked for /none)")
    code, _, err = run(capsys, "explain", "nobody")
    assert code == 1 and err == (
        "kvern explain: no service nobody on this machine (nothing runs; start it with: kvern up FILE)\n"
    )


def test_looking_at_a_cluster_imports_nothing_heavy(cluster):
    """torch, pydantic, the official client: each takes longer to import than the whole command takes to run."""
    code = (
        "import sys; from kvern_cli.main import main; code = main(['explain', 'smol']) or main(['logs', 'smol']); "
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "kvern_cli" in loaded
    assert not loaded & {"torch", "numpy", "pydantic", "kubernetes", "kopf", "httpx", "rich", "aiohttp", "kvern_engine"}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["logs", "x", "--since", "5"], "'5' is not a length of time; write 90s, 15m, 2h or 1d"),
        (["logs", "x", "--tail", "many"], "'many' is not a number of lines; -1 stands for all"),
        (["status", "--local", "--cluster"], "not allowed with argument"),
        (["status", "-w", "-o", "json"], "-w shows a table; leave -o json out"),
        (["explain"], "the following arguments are required: NAME"),
        (["explian", "x"], "unknown command 'explian'; did you mean explain?"),
        (["serv", "x"], "unknown command 'serv'; did you mean serve?"),
        (["xyz"], "unknown command 'xyz'; there are: up, status, explain, logs, validate, down, serve, generate,"),
    ],
)
def test_wrong_words(argv, words, capsys):
    assert main(argv) == 2 and words in capsys.readouterr().err


def test_every_command_is_known():
    (group,) = (a for a in make_parser()._actions if a.dest == "command")
    assert set(group.choices) == set(COMMANDS)
