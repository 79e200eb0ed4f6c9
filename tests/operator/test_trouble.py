"""What is wrong with a pod: objects as a kubelet, scheduler and controllers of Kubernetes 1.37 made them."""

import json
from pathlib import Path

import pytest
from recorded import crashed, pod, running, service, unschedulable, waiting

from kvern_cli.picture import cluster_picture
from kvern_cli.problems import problems
from kvern_cli.words import moment
from kvern_operator.trouble import restarts, trouble

RECORDED = json.loads((Path(__file__).parent / "recorded_pods.json").read_text())
PODS = {found["metadata"]["name"]: found for found in RECORDED["pods"]}


@pytest.mark.parametrize(
    ("name", "reason", "words"),
    [
        ("smol-r0-0", "ImagePullBackOff", 'failed to pull and unpack image "kvern.invalid/no-such-engine:v9": '),
        ("smol-r1-0", "ErrImageNeverPull", "is not present with pull policy of Never"),
        ("smol-r2-0", "Unschedulable", "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."),
        ("smol-r4-0", "CreateContainerConfigError", 'secret "not-there" not found'),
        ("smol-r7-0", "Unschedulable", 'persistentvolumeclaim "not-there" not found'),
        ("smol-r8-0", "InvalidImageName", 'couldn\'t parse image name "Bad Image"'),
    ],
)
def test_pods_that_do_not_start(name, reason, words):
    found = trouble(PODS[name])
    assert found.reason == reason and words in found.message and found.exit_code is None


def test_containers_that_end():
    found = trouble(PODS["smol-r3-0"])
    assert (found.reason, found.exit_code, found.container) == ("CrashLoopBackOff", 1, "engine")
    assert found.log_tail.endswith("open /no/such/Corefile: no such file or directory")
    assert restarts(PODS["smol-r3-0"]) == 3
    found = trouble(PODS["smol-r6-0"])
    assert (found.reason, found.exit_code) == ("StartError", 128)
    assert 'exec: "/no/such/program"' in found.log_tail


def test_what_the_pod_itself_does_not_tell():
    assert trouble(PODS["smol-r5-0"]) is None  # a Secret is missing: FailedMount, an event


def test_explain_finds_the_cause_of_each():
    known = {"metadata": {**service()["metadata"], "name": "smol"}}
    now = moment("2026-11-30T00:38:20Z")
    picture = cluster_picture(
        {**service(), **known}, RECORDED["pods"], RECORDED["statefulsets"], RECORDED["events"], place="x", now=now
    )
    found = {problem.reason: problem.story for problem in problems(picture) if problem.reason != "NotReconciled"}
    assert set(found) == {
        "ClaimNotBound",
        "CrashLoopBackOff",
        "CreateContainerConfigError",
        "ErrImageNeverPull",
        "FailedMount",
        "ImagePullBackOff",
        "InvalidImageName",
        "QuotaExceeded",
        "StartError",
        "Unschedulable",
    }
    assert 'secret "not-there" not found' in found["FailedMount"]
    assert "exceeded quota: none" in found["QuotaExceeded"] and "smol-r9" in found["QuotaExceeded"]
    assert 'that tells: "loading Caddyfile via flag: open /no/such/Corefile: no such' in found["CrashLoopBackOff"]


def container(status: dict, **changes) -> dict:
    status["containerStatuses"][0] |= changes
    return pod("smol-r0-0", status)


def test_one_trouble_has_one_word_whatever_the_kubelet_calls_it_just_now():
    cause = 'failed to pull "x:1": not found'
    for reason, message in (
        ("ErrImagePull", cause),
        ("ImagePullBackOff", f'Back-off pulling image "x:1": ErrImagePull: {cause}'),
    ):
        found = trouble(pod("smol-r0-0", waiting(reason, message)))
        assert (found.reason, found.message) == ("ImagePullBackOff", cause)
    ended = {"terminated": {"exitCode": 1, "reason": "Error", "message": "error: x"}}
    loop = [
        crashed(1, 2, "error: x"),  # it waits
        crashed(1, 2, "error: x", state=ended),  # it has just ended
        crashed(1, 2, "error: x", state={"running": {"startedAt": "2026-01-01T00:00:00Z"}}),  # it loads again
    ]
    assert {trouble(pod("smol-r0-0", status)).reason for status in loop} == {"CrashLoopBackOff"}
    assert {trouble(pod("smol-r0-0", status)).log_tail for status in loop} == {"error: x"}
    assert trouble(pod("smol-r0-0", crashed(1, 0, state=ended))).reason == "Error"
    killed = crashed(137, 3, reason="OOMKilled")
    assert trouble(pod("smol-r0-0", killed)).reason == "OOMKilled"


def test_what_is_no_trouble():
    assert trouble(pod("smol-r0-0", running(ready=False))) is None
    assert trouble(pod("smol-r0-0", running(restarts=3))) is None
    assert trouble(pod("smol-r0-0", waiting("ContainerCreating"))) is None
    assert trouble({}) is None and trouble({"status": {}}) is None
    # It has been ready since its last crash, and is not just now: that crash is not the reason.
    again = crashed(1, 5, state={"running": {"startedAt": "2026-01-01T00:00:00Z"}})
    assert trouble(container(again, started=True)) is None
    # It ended by itself without an error (a drain), and is started again.
    assert trouble(pod("smol-r0-0", crashed(0, 1, reason="Completed", state={"terminated": {"exitCode": 0}}))) is None


def test_pods_that_a_node_puts_out_and_init_containers():
    evicted = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
    assert trouble(pod("smol-r0-0", evicted)).message == "The node was low on resource: memory."
    init = {"initContainerStatuses": [{"name": "get", "state": {"waiting": {"reason": "ErrImageNeverPull"}}}]}
    assert trouble({"status": init}).container == "get"
    gated = unschedulable("")
    gated["conditions"][0]["reason"] = "SchedulingGated"
    assert trouble(pod("smol-r0-0", gated)).reason == "SchedulingGated"
