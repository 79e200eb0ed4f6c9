"""`kvern explain` and the tables of `kvern status` over states as the API server gives them."""

from datetime import timedelta

import pytest
from recorded import (
    NOW,
    ago,
    condition,
    crashed,
    event,
    lease,
    pod,
    replica,
    router_pods,
    routers,
    running,
    service,
    unschedulable,
    waiting,
)

from kvern_cli.explain import Explanation, blocks, explain
from kvern_cli.picture import Picture, cluster_picture, local_picture
from kvern_cli.problems import problems
from kvern_cli.render import plain
from kvern_cli.tables import service_blocks, services_table, short_layout

READY = [
    condition("Ready", "True", "AllReplicasReady"),
    condition("Available", "True", "Answering"),
    condition("Progressing", "False", "Complete"),
    condition("Degraded", "False", "AsExpected"),
]


def blocked(reason: str, message: str = "words of the operator", available: bool = False) -> list[dict]:
    found = (
        condition("Available", "True", "Answering") if available else condition("Available", "False", reason, message)
    )
    return [
        condition("Ready", "False", reason, message),
        found,
        condition("Progressing", "False", reason, f"stalled: {message}"),
        condition("Degraded", "True", reason, message),
    ]


def loading(available: bool = False) -> list[dict]:
    return [
        condition("Ready", "False", "Loading", "0 of 1 replicas answer"),
        condition("Available", "True", "Answering") if available else condition("Available", "False", "NoReplicaReady"),
        condition("Progressing", "True", "Starting"),
        condition("Degraded", "False", "AsExpected"),
    ]


def picture(svc: dict, pods: list = (), workloads: list | None = None, events: list = (), **more) -> Picture:
    workloads = [replica("smol-r0"), routers()] if workloads is None else workloads
    more = {"place": "context kind, namespace team-a", "now": NOW, "kubectl": "kubectl -n team-a", **more}
    return cluster_picture(svc, pods, workloads, events, **more)


def rows(found: Explanation) -> dict[str, str]:
    return {label: "\n".join(lines) for label, lines in found.rows}


def test_a_service_that_answers():
    svc = service(
        *READY, readyReplicas=1, revision={"current": "rev1", "updated": "rev1"}, capacity={"kvTokensPerReplica": 12345}
    )
    found = explain(picture(svc, [pod("smol-r0-0", running()), *router_pods()], lease=lease(3)))
    assert found.headline == "smol answers: 1 of 1 replica."
    text = rows(found)
    assert text["It wants"] == (
        "1 replica of builtin://smollm2-135m; clients ask for smollm2-135m.\n"
        "A replica is 1 pod with no GPU: it computes on the CPU.\n"
        "2 router pods in front of it."
    )
    assert text["There is"] == (
        "It answers at http://smol.team-a.svc.cluster.local/v1.\n"
        "1 engine pod ready: smol-r0-0 on node-1.\n"
        "2 of 2 routers ready.\n"
        "KV cache for 12,345 tokens a replica.\n"
        "The operator (kvern-operator-7c9-abc) runs."
    )
    assert text["Decided"] == "0 -> 1 replicas, 4m0s ago: spec.replicas is 1."
    assert text["To do"].splitlines()[0] == ("from this machine: kubectl -n team-a port-forward service/smol 8000:80")
    assert '"model": "smollm2-135m"' in text["To do"] and "Wrong" not in text


def test_a_service_that_loads_says_for_how_long_and_how_long_it_may():
    found = explain(picture(service(*loading()), [pod("smol-r0-0", running(ready=False, seconds=40)), *router_pods()]))
    assert found.headline == "smol does not answer yet: it is on its way."
    assert "1 engine pod loading: smol-r0-0 on node-1, for 40s (it has 2m4s for that)." in rows(found)["There is"]
    assert (
        rows(found)["To do"] == "watch it: kvern status -n team-a smol -w\nwhat it does: kvern logs -n team-a smol -f"
    )
    assert "Wrong" not in rows(found)


def test_a_pod_that_fits_nowhere_in_the_schedulers_words():
    words = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu. preemption: 0/2 nodes are available."
    svc = service(
        *blocked("Unschedulable"), spec={"resources": {"gpusPerPod": 4, "gpuType": "NVIDIA-H200", "memory": "64Gi"}}
    )
    found = explain(picture(svc, [pod("smol-r0-0", unschedulable(words), node=""), *router_pods()]))
    assert found.headline == "smol does not answer: no node can take smol-r0-0."
    text = rows(found)
    assert text["It wants"].splitlines()[1] == (
        "A replica is 1 pod with 4 NVIDIA-H200 GPUs, 64Gi of memory; tensor size 1."
    )
    assert "1 engine pod in trouble: smol-r0-0." in text["There is"]
    assert text["Wrong"] == f"no node can take smol-r0-0 (Unschedulable); the scheduler says: {words}"
    assert text["To do"].splitlines()[0] == (
        "what the nodes have left: kubectl -n team-a describe nodes | grep -A 9 'Allocated resources'"
    )


def test_a_crash_loop_tells_the_line_of_the_log_that_matters():
    log = 'level=INFO msg=starting\nTraceback (most recent call last):\n  File "x", line 1\nValueError: no such thing\n'
    pods = [pod("smol-r0-0", crashed(1, 4, log)), *router_pods()]
    found = explain(picture(service(*blocked("CrashLoopBackOff")), pods))
    assert found.headline == "smol does not answer: smol-r0-0 crashes at its start."
    assert rows(found)["Wrong"] == (
        "smol-r0-0 ended with exit code 1 (CrashLoopBackOff), started again 4 times; "
        'the last line that tells: "ValueError: no such thing"'
    )
    assert "kvern logs -n team-a smol --previous shows the whole of what it said" in rows(found)["To do"]


def test_the_log_is_used_where_the_status_does_not_hold_its_end():
    pods = [pod("smol-r0-0", crashed(1, 4)), *router_pods()]
    found = explain(
        picture(service(*blocked("CrashLoopBackOff")), pods, last_logs={"smol-r0-0": "error: it is broken"})
    )
    assert '"error: it is broken"' in rows(found)["Wrong"]
    found = explain(picture(service(*blocked("CrashLoopBackOff")), pods))
    assert rows(found)["Wrong"].endswith("its log says nothing.")


def test_a_crash_is_still_told_while_the_container_loads_again():
    state = {"running": {"startedAt": ago(5)}}
    pods = [pod("smol-r0-0", crashed(1, 1, "error: broken", state=state)), *router_pods()]
    assert (
        "ended with exit code 1 (Error), started again 1 time"
        in rows(explain(picture(service(*loading()), pods)))["Wrong"]
    )


def test_want_of_memory_is_named_before_the_crash_loop():
    pods = [pod("smol-r0-0", crashed(137, 2, reason="OOMKilled")), *router_pods()]
    found = explain(picture(service(*blocked("OOMKilled")), pods))
    assert found.headline == "smol does not answer: smol-r0-0 is ended for want of memory."
    assert "exit code 137, which is SIGKILL (OOMKilled)" in rows(found)["Wrong"]
    assert rows(found)["To do"].startswith("give it more: spec.resources.memory must hold")


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("ImagePullBackOff", 'Back-off pulling image "nowhere/engine:1": not found'),
        ("ErrImageNeverPull", 'Container image "kvern/engine:e2e" is not present with pull policy of Never'),
        ("InvalidImageName", "couldn't parse image name"),
    ],
)
def test_an_image_that_is_not_to_be_had(reason, message):
    found = explain(picture(service(*blocked(reason)), [pod("smol-r0-0", waiting(reason, message)), *router_pods()]))
    assert found.headline == "smol does not answer: the image of smol-r0-0 is not to be had."
    assert rows(found)["Wrong"] == f"smol-r0-0 is in {reason}: {message}."
    assert "image" in rows(found)["To do"]


def test_a_quota_that_lets_no_pod_be_made():
    message = (
        'create Pod smol-r0-0 in StatefulSet smol-r0 failed error: pods "smol-r0-0" is forbidden: exceeded quota: '
        "small, requested: requests.memory=64Gi, used: requests.memory=0, limited: requests.memory=8Gi"
    )
    events = [event("StatefulSet", "smol-r0", "FailedCreate", message)]
    found = explain(picture(service(*loading()), router_pods(), [replica("smol-r0", existing=0), routers()], events))
    assert found.headline == "smol does not answer: the namespace's quota allows no further pod."
    assert rows(found)["Wrong"].startswith(
        'no pod can be made for smol-r0 (QuotaExceeded): pods "smol-r0-0" is forbidden: exceeded quota: small'
    )
    assert "No engine pod." in rows(found)["There is"]
    assert "kubectl -n team-a describe resourcequota" in rows(found)["To do"]


def test_routers_that_pod_security_forbids():
    message = 'Error creating: pods "smol-router-5d8-" is forbidden: violates PodSecurity "restricted:latest": x'
    events = [event("ReplicaSet", "smol-router-5d8", "FailedCreate", message)]
    found = problems(picture(service(*loading()), [], [routers(existing=0)], events))
    assert [p.reason for p in found] == ["PodSecurityViolation"]


def test_an_old_refusal_does_not_count_once_the_pods_are_there():
    events = [event("StatefulSet", "smol-r0", "FailedCreate", "exceeded quota")]
    assert (
        problems(picture(service(*READY, readyReplicas=1), [pod("smol-r0-0", running()), *router_pods()], None, events))
        == []
    )


def test_a_volume_that_cannot_be_mounted():
    message = 'MountVolume.SetUp failed for volume "keys" : secret "smol-keys" not found'
    events = [event("Pod", "smol-r0-0", "FailedMount", message)]
    pods = [pod("smol-r0-0", waiting("ContainerCreating")), *router_pods()]
    found = explain(picture(service(*loading()), pods, None, events))
    assert "1 engine pod being created: smol-r0-0 on node-1, for 4m0s." in rows(found)["There is"]
    assert rows(found)["Wrong"] == f"smol-r0-0 cannot be created (FailedMount): {message}."


@pytest.mark.parametrize(
    ("probe", "reason", "words"),
    [
        (
            "startup",
            "NotReadyInTime",
            "smol-r0-0 was not ready within 2m4s and was started again 2 times (NotReadyInTime)",
        ),
        (
            "liveness",
            "Unresponsive",
            "smol-r0-0 did not answer its liveness probe and was started again 2 times (Unresponsive)",
        ),
    ],
)
def test_a_restart_by_a_probe_is_in_events_only(probe, reason, words):
    message = f"Container engine failed {probe} probe, will be restarted"
    events = [event("Pod", "smol-r0-0", "Killing", message, type_="Normal")]
    pods = [pod("smol-r0-0", running(ready=False, restarts=2)), *router_pods()]
    (found,) = problems(picture(service(*loading()), pods, None, events))
    assert (found.reason, found.story) == (reason, words)


def test_some_replicas_answer_and_one_does_not():
    svc = service(*blocked("CrashLoopBackOff", available=True), spec={"replicas": 3}, readyReplicas=2)
    pods = [
        pod("smol-r0-0", running()),
        pod("smol-r1-0", running(), node="node-2"),
        pod("smol-r2-0", crashed(1, 3, "error: x")),
    ]
    found = explain(picture(svc, [*pods, *router_pods()], [replica(f"smol-r{i}") for i in range(3)]))
    assert found.headline == "smol answers, with 2 of 3 replicas: smol-r2-0 crashes at its start."
    assert "2 engine pods ready: smol-r0-0, smol-r1-0 on node-1, node-2." in rows(found)["There is"]


def test_the_same_trouble_of_many_pods_is_told_once():
    pods = [pod(f"smol-r{i}-0", crashed(1, i + 1, "error: x")) for i in range(7)]
    (found,) = problems(picture(service(*blocked("CrashLoopBackOff")), pods))
    assert found.story.startswith(
        "smol-r6-0 (so are smol-r0-0, smol-r1-0, smol-r2-0, smol-r3-0 and 2 more) ended with exit code 1"
    )


def test_suspended():
    svc = service(
        condition("Ready", "False", "Suspended"),
        condition("Available", "False", "Suspended"),
        spec={"suspend": True},
        desiredReplicas=0,
    )
    found = explain(picture(svc, [], []))
    assert found.headline == "smol is suspended: nothing runs." and "Wrong" not in rows(found)
    assert rows(found)["To do"] == (
        """start it again: kubectl -n team-a patch infs smol --type=merge -p '{"spec":{"suspend":false}}'"""
    )


def test_zero_replicas():
    svc = service(
        condition("Ready", "True", "ScaledToZero"),
        condition("Available", "False", "ScaledToZero"),
        spec={"replicas": 0},
    )
    found = explain(picture(svc, router_pods(), [routers()]))
    assert found.headline == "smol has no replica, and none is wanted." and "Wrong" not in rows(found)
    assert rows(found)["To do"] == (
        "in other modes than Internal, start a replica: kubectl -n team-a scale infs/smol --replicas=1"
    )


def test_a_rollout_with_a_replica_that_drains():
    svc = service(
        condition("Ready", "False", "RollingOut"),
        condition("Available", "True", "Answering"),
        condition("Progressing", "True", "RollingOut"),
        spec={"replicas": 1},
        readyReplicas=1,
        revision={"current": "rev1", "updated": "rev2"},
    )
    workloads = [replica("smol-r0", draining=20), replica("smol-r1", revision="rev2"), routers()]
    found = explain(picture(svc, [pod("smol-r0-0", running()), pod("smol-r1-0", running()), *router_pods()], workloads))
    text = rows(found)["There is"]
    assert "1 engine pod ready: smol-r1-0" in text and "1 engine pod draining: smol-r0-0" in text
    assert "smol-r0 has been draining for 20s: it finishes its requests, for at most 300 s." in text
    assert "A rollout from revision rev1 to rev2 is under way; 1 replica of the new one." in text
    assert "Wrong" not in rows(found)


def test_a_pod_that_does_not_end():
    stuck = pod("smol-r0-0", running())
    stuck["metadata"] |= {"deletionTimestamp": ago(400), "deletionGracePeriodSeconds": 330}
    (found,) = problems(picture(service(*READY, readyReplicas=1), [stuck]))
    assert found.reason == "StuckTerminating" and not found.serious
    assert found.story == "smol-r0-0 was told to end 12m ago, had 330 s for it, is there (StuckTerminating)"


def test_being_deleted():
    svc = service(*READY)
    svc["metadata"]["deletionTimestamp"] = ago(5)
    assert explain(picture(svc)).headline == "smol is being deleted."


@pytest.mark.parametrize(
    ("sign", "more"),
    [
        (None, "."),
        (lease(3), "; the operator (kvern-operator-7c9-abc) runs."),
        (lease(600), "; the operator (kvern-operator-7c9-abc) gave its last sign of life 10m ago."),
        (lease(3, holder=""), "; no operator holds the Lease kvern-operator."),
    ],
)
def test_nobody_has_taken_it_up(sign, more):
    found = explain(picture(service(), [], [], lease=sign))
    assert found.headline == "smol is not served yet: the operator has not taken it up."
    words = "the operator has not taken up this service, which is 5m0s old (NotReconciled)"
    assert rows(found)["Wrong"] == words + more
    assert rows(found)["To do"].startswith("kubectl -n kvern-system get pods")
    assert problems(picture(service(created=3), [], [])) == []  # it is new: give it a moment


def test_a_change_that_nobody_has_taken_up():
    svc = service(*READY, readyReplicas=1)
    svc["metadata"]["generation"] = 3
    (found,) = problems(picture(svc, [pod("smol-r0-0", running()), *router_pods()]))
    assert found.story == "the operator has not taken up generation 3, but generation 1 (NotReconciled)"


def test_what_only_the_operator_knows_comes_from_conditions():
    refused = "spec.overrides: the API server does not take the StatefulSet that it leads to: invalid"
    svc = service(
        condition("Ready", "True", "AllReplicasReady"),
        condition("Available", "True", "Answering"),
        condition("Progressing", "False", "OverridesRefused", f"stalled: {refused}"),
        condition("Degraded", "True", "OverridesRefused", refused),
        condition(
            "FieldsIgnored", "True", "NotSupportedHere", "spec.router.limits: not kept yet; spec.parallelism.expert: no"
        ),
        readyReplicas=1,
    )
    found = explain(picture(svc, [pod("smol-r0-0", running()), *router_pods()]))
    assert rows(found)["Wrong"] == f"OverridesRefused: {refused}."
    assert rows(found)["No effect"] == "spec.router.limits: not kept yet.\nspec.parallelism.expert: no."
    assert found.headline == "smol answers: 1 of 1 replica."


def test_a_decision_with_numbers_and_a_limit():
    decision = {
        "time": ago(42),
        "from": 1,
        "to": 3,
        "reason": "demand of 9,000 tokens",
        "inputs": {"queue": "12", "kvUsage": "0.93"},
        "limitedBy": "maxReplicas",
    }
    svc = service(*READY, readyReplicas=1, autoscaling={"lastDecision": decision})
    assert rows(explain(picture(svc, [pod("smol-r0-0", running())])))["Decided"] == (
        "1 -> 3 replicas, 42s ago: demand of 9,000 tokens.\n"
        "Its numbers: queue 12, kvUsage 0.93.\n"
        "Kept from going further by maxReplicas."
    )


def test_without_the_right_to_see_pods_the_conditions_must_do():
    svc = service(*blocked("Unschedulable", "engine smol-r0-0: 0/2 nodes are available"))
    gaps = ["Pods could not be read: not allowed to list pods in namespace team-a."]
    found = explain(picture(svc, [], [], gaps=gaps))
    assert rows(found)["Wrong"] == "Unschedulable: engine smol-r0-0: 0/2 nodes are available."
    assert rows(found)["Not seen"] == gaps[0]
    assert "There is" not in rows(found)
    assert found.headline == "smol does not answer: no node can take the pod."


def local(doing: str, running: bool = True, **more) -> Picture:
    svc = service(*READY, readyReplicas=1)
    engine = {
        "name": "smol-r0-0",
        "replica": "smol-r0",
        "component": "engine",
        "ready": doing == "ready",
        "doing": doing,
        "restarts": 0,
        "inFlight": 2,
        "address": "127.0.0.1:4001",
        "pid": 7,
        "log": "/logs/smol-r0-0.log",
        "created": ago(100),
        **more,
    }
    document = {"file": "/x/smol.yaml", "created": ago(300), "service": svc, "pods": [engine]}
    return local_picture(document, pid=5, running=running, logs="/logs", now=NOW)


def test_the_same_words_for_this_machine_without_kubectl():
    text = plain(blocks(explain(local("ready"))))
    assert text[0] == "smol answers: 1 of 1 replica." and not any("kubectl" in line for line in text)
    assert any("ask it: curl http://smol.team-a" in line for line in text)
    crash = {
        "reason": "CrashLoopBackOff",
        "message": "restart in 4 s",
        "exitCode": 3,
        "lastLine": "error: no",
        "restarts": 2,
    }
    text = "\n".join(plain(blocks(explain(local("CrashLoopBackOff: exit code 3", **crash)))))
    assert "smol-r0-0 ended with exit code 3 (CrashLoopBackOff), started again 2 times; " in text
    assert 'the last line that tells: "error: no"' in text
    assert "edit /x/smol.yaml; it is carried out at once" in text and "kubectl" not in text
    text = "\n".join(plain(blocks(explain(local("ready", running=False)))))
    assert "smol does not run: its kvern up has ended." in text and "kvern up /x/smol.yaml" in text


# ---------------------------------------------------------------- status


def test_the_table_of_services_has_kubectls_columns():
    svc = service(*READY, readyReplicas=1, parallelism={"current": 1})
    header, row = plain([services_table([svc], NOW, namespaces=True)])
    assert header.split() == ["NAMESPACE", "NAME", "MODEL", "TP", "READY", "DESIRED", "GPUS", "REASON", "URL", "AGE"]
    assert row.split() == [
        *["team-a", "smol", "smollm2-135m", "1", "1", "1", "0", "AllReplicasReady"],
        "http://smol.team-a.svc.cluster.local/v1",
        "5m0s",
    ]
    new = plain([services_table([service(created=2)], NOW, namespaces=False)])[1]
    assert new.split() == ["smol", "<none>", "<none>", "0", "0", "0", "NotReconciled", "<none>", "2s"]


def test_one_service_with_facts_conditions_pods_and_the_worst():
    svc = service(
        *blocked("CrashLoopBackOff", "engine smol-r0-0: exit code 1"), parallelism={"target": 2}, capacity={"gpus": 2}
    )
    text = "\n".join(plain(service_blocks(picture(svc, [pod("smol-r0-0", crashed(1, 4)), *router_pods(1)]))))
    assert "Replicas        0 ready, 1 exist, 1 wanted" in text
    assert "Layout          tensor size 2; 2 GPUs in all" in text
    assert "Last decision   0 -> 1 replicas, 4m0s ago: spec.replicas is 1." in text
    assert "Ready         False    CrashLoopBackOff   60s     engine smol-r0-0: exit code 1" in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "NAME READY RESTARTS STATE LAYOUT REVISION NODE AGE" in lines
    assert "smol-r0-0 0/1 4 CrashLoopBackOff tp1 rev1 node-1 4m0s" in lines
    assert "smol-router-5d8-1 0/1 0 starting for 3m20s - rev1 node-2 4m0s" in lines
    assert lines[-1] == "smol-r0-0 crashes at its start; more: kvern explain -n team-a smol"


def test_where_the_time_of_the_last_start_went():
    startup = {
        "pod": "smol-r0-0",
        "schedulingSeconds": 1,
        "creatingSeconds": 3,
        "loadingSeconds": 9,
        "totalSeconds": 13,
    }
    svc = service(*READY, readyReplicas=1, startup=startup, device="cpu", revision={"current": "a", "updated": "b"})
    text = "\n".join(plain(service_blocks(picture(svc, [pod("smol-r0-0", running())]))))
    assert "Last start      13 s until smol-r0-0 was ready: scheduling 1 s, creating 3 s, loading 9 s" in text
    assert "tensor size 1; computing on cpu" in text and "Revision        a, rolling out b" in text


def test_layouts_are_short():
    found = [short_layout(text) for text in ("tp1pp1dp1", "tp2pp1dp4", "tp8pp12dp10", "")]
    assert found == ["tp1", "tp2dp4", "tp8pp12dp10", ""]


def test_pods_in_the_order_of_their_numbers():
    pods = [pod(f"smol-r{i}-0", running()) for i in (10, 2, 0)]
    found = picture(service(*READY), [*router_pods(), *pods])
    assert [p.name for p in found.pods[:3]] == ["smol-r0-0", "smol-r2-0", "smol-r10-0"]
    assert found.pods[3].component == "router"


def test_every_state_renders_on_a_terminal(capsys):
    from io import StringIO

    from rich.console import Console

    from kvern_cli.render import fancy

    shown = picture(service(*blocked("CrashLoopBackOff")), [pod("smol-r0-0", crashed(1, 4, "error: [bold]x[/bold]"))])
    out = StringIO()
    Console(file=out, width=100).print(fancy([*service_blocks(shown), *blocks(explain(shown))]))
    text = out.getvalue()
    assert "Conditions" in text and "[bold]x[/bold]" in text and all(len(line) <= 100 for line in text.splitlines())


def test_the_age_of_things_to_come_is_zero():
    svc = service(*READY, created=-timedelta(minutes=1).total_seconds())
    assert plain([services_table([svc], NOW, namespaces=False)])[1].split()[-1] == "0s"
