"""`kvern logs` against an API server: lines of all pods in order, and what is said of those without any."""

import queue
import threading
import time

from cluster_commands import run
from fake_api import PODS, status
from recorded import pod, router_pods, running, waiting

from kvern_cli.logs import is_replica, merged, split_time, wanted_pods
from kvern_cli.main import main


def stamped(*lines: tuple[int, str]) -> str:
    return "".join(f"2026-01-01T00:00:{second:02d}.000000000Z {text}\n" for second, text in lines)


def test_logs_are_merged_by_time_with_the_pod_before_each_line(cluster, capsys):
    cluster.objects[f"{PODS}/smol-r0-0/log"] = (200, stamped((1, "loading"), (4, "serving")))
    cluster.objects[f"{PODS}/smol-router-5d8-0/log"] = (200, stamped((2, "listening")))
    cluster.objects[f"{PODS}/smol-router-5d8-1/log"] = (200, stamped((3, "listening too")))
    code, out, err = run(capsys, "logs", "smol")
    assert code == 0 and err == "context kind, namespace team-a\n"
    assert out.splitlines() == [
        "smol-r0-0         | loading",
        "smol-router-5d8-0 | listening",
        "smol-router-5d8-1 | listening too",
        "smol-r0-0         | serving",
    ]
    assert run(capsys, "logs", "smol", "--replica", "0")[1] == "loading\nserving\n"
    assert run(capsys, "logs", "smol", "--replica", "0", "--timestamps", "--prefix")[1].splitlines()[0] == (
        "smol-r0-0 | 2026-01-01T00:00:01.000000000Z loading"
    )
    assert len(run(capsys, "logs", "smol", "--component", "router")[1].splitlines()) == 2


def test_logs_pass_on_what_is_asked_for(cluster, capsys):
    seen: list[dict] = []
    cluster.objects[f"{PODS}/smol-r0-0/log"] = lambda query: (seen.append(query), (200, ""))[1]
    run(capsys, "logs", "smol", "--replica", "smol-r0", "--tail", "7", "--since", "2m", "-p")
    expected = {
        "container": "engine",
        "tailLines": "7",
        "sinceSeconds": "120",
        "previous": "true",
        "timestamps": "true",
    }
    assert {key: values[0] for key, values in seen[0].items()} == expected
    run(capsys, "logs", "smol", "--replica", "smol-r0", "--tail", "-1")
    assert "tailLines" not in seen[1] and "previous" not in seen[1]


def test_pods_without_a_log_are_named(cluster, capsys):
    cluster.put_list(PODS, [pod("smol-r0-0", waiting("ImagePullBackOff")), *router_pods()])
    cluster.objects[f"{PODS}/smol-router-5d8-0/log"] = (200, stamped((2, "listening")))
    cluster.objects[f"{PODS}/smol-router-5d8-1/log"] = status(500, "InternalError", "kubelet is away")
    code, out, err = run(capsys, "logs", "smol")
    assert code == 1 and out == "smol-router-5d8-0 | listening\n"
    assert "kvern logs: smol-r0-0 has no log yet: ImagePullBackOff\n" in err
    assert (
        "kvern logs: smol-router-5d8-1: cannot read the log of pod smol-router-5d8-1 just now: kubelet is away\n" in err
    )
    words = 'previous terminated container "engine" in pod "smol-r0-0" not found'
    cluster.objects[f"{PODS}/smol-r0-0/log"] = status(400, "BadRequest", words)
    code, _, err = run(capsys, "logs", "smol", "-p", "--component", "engine")
    assert code == 1 and "smol-r0-0 has not been started again, so there is no earlier log" in err


def test_a_service_without_pods_says_where_to_look(cluster, capsys):
    cluster.put_list(PODS, [])
    code, _, err = run(capsys, "logs", "smol", "--replica", "4")
    assert code == 1 and err == (
        "kvern logs: smol has no such pods (engines and routers, replica 4); why: kvern explain smol\n"
    )


def test_following_takes_up_new_lines_new_pods_and_restarts(cluster, capsys, monkeypatch):
    monkeypatch.setattr("kvern_cli.logs.LOOK_SECONDS", 0.05)
    cluster.put_list(PODS, [pod("smol-r0-0", running())])
    printed: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr("kvern_cli.logs.print", lambda text, **_: printed.put(text), raising=False)
    runs = [[(1, "first"), (2, "crash")], [(2, "crash"), (5, "again")]]
    queries: list[dict] = []

    def log(query):
        queries.append(query)
        lines = runs.pop(0) if runs else []
        if not lines:
            time.sleep(0.2)
        return 200, lambda: iter(stamped(*lines).splitlines())

    cluster.objects[f"{PODS}/smol-r0-0/log"] = log
    argv = ["logs", "smol", "-f", "--tail", "3"]
    threading.Thread(target=main, args=(argv,), daemon=True).start()
    assert [printed.get(timeout=60) for _ in range(3)] == [
        "smol-r0-0 | first",
        "smol-r0-0 | crash",
        "smol-r0-0 | again",  # of the line that came twice, one
    ]
    assert queries[0]["tailLines"] == ["3"] and queries[1]["sinceTime"][0].startswith("2026-01-01T00:00:02")
    cluster.objects[f"{PODS}/smol-r1-0/log"] = (200, stamped((9, "new")))
    cluster.put_list(PODS, [pod("smol-r0-0", running()), pod("smol-r1-0", running())])
    assert printed.get(timeout=60) == "smol-r1-0 | new"


def test_choosing_pods():
    pods = [pod(f"smol-r{i}-0", running()) for i in (10, 2)] + router_pods()
    assert [s.pod for s in wanted_pods(pods, None, None, "smol")] == [
        "smol-r2-0",
        "smol-r10-0",
        "smol-router-5d8-0",
        "smol-router-5d8-1",
    ]
    assert [s.pod for s in wanted_pods(pods, "engine", "10", "smol")] == ["smol-r10-0"]
    assert is_replica("smol-r2-0", "smol", "smol-r2", "smol-r2-0") and not is_replica("2", "smol", "smol-r12", "x")


def test_lines_without_a_time_stay_behind_the_one_before_them():
    a = ["2026-01-01T00:00:01.0Z one", "Traceback", "2026-01-01T00:00:05.0Z two"]
    b = ["2026-01-01T00:00:03.0Z other"]
    assert [text for _, _, text in merged([("a", a), ("b", b)])] == ["one", "Traceback", "other", "two"]
    assert split_time("no time here") == ("", "no time here")
