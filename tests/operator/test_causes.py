"""Hidden causes: what a Pod object, an event or a refusal becomes in status, word for word."""

from typing import Any

import pytest
from fake_cluster import FakeCluster, service
from hypothesis import given, settings
from hypothesis import strategies as st

from kvern_operator.advice import REASONS
from kvern_operator.api.status import InferenceServiceStatus
from kvern_operator.observed import Notice, Observed, Refusal
from kvern_operator.pods import read_pod
from kvern_operator.reconcile import invalid_spec, reconcile

CREATED = "2026-01-01T12:00:00Z"


def pod(name: str = "smol-r0-0", component: str = "engine", **status: Any) -> dict[str, Any]:
    """A v1 Pod as the API server gives it."""
    labels = {"kvern.dev/service": "smol", "app.kubernetes.io/component": component}
    if component == "engine":
        labels["kvern.dev/replica"] = name.rpartition("-")[0]
    metadata = {"name": name, "namespace": "team-a", "uid": f"u-{name}", "creationTimestamp": CREATED, "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": {"phase": "Pending", **status}}


def scheduled(at: str = "2026-01-01T12:00:02Z") -> dict[str, Any]:
    return {"type": "PodScheduled", "status": "True", "lastTransitionTime": at}


def container(name: str = "engine", *, state: dict, last: dict | None = None, **more: Any) -> dict[str, Any]:
    return {"name": name, "state": state, "lastState": last or {}, "restartCount": 0, "ready": False, **more}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"waiting": {"reason": reason, "message": message}}


def ended(code: int, message: str = "", reason: str = "Error") -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "reason": reason, "message": message}}


def trouble(obj: dict[str, Any], spec: str = "", notices: tuple[Notice, ...] = ()) -> tuple[str, str]:
    """(reason, message) of Ready with this one engine pod."""
    cluster, svc = FakeCluster(), service(spec)
    cluster.step(svc)
    observed = Observed(tuple(cluster.objects.values()), (read_pod(obj),), None, notices=notices)
    status = reconcile(svc, observed, cluster.now, cluster.settings).status
    found = status.condition("Ready")
    assert found.status == "False"
    degraded = status.condition("Degraded")
    assert (degraded.status, degraded.reason) == ("True", found.reason)
    assert status.condition("Progressing").message == f"stalled: {found.message}"
    return found.reason, found.message


LOG = "time=t level=info process=supervisor msg=starting\nkvern serve: error: {}\n"


def crashed(line: str, code: int = 1) -> dict[str, Any]:
    state = waiting("CrashLoopBackOff", "back-off 20s restarting failed container=engine pod=smol-r0-0_team-a(u)")
    one = container(state=state, last=ended(code, LOG.format(line)), restartCount=3)
    return pod(phase="Running", conditions=[scheduled()], containerStatuses=[one])


def test_a_crash_loop_is_told_with_its_exit_code_and_the_line_that_matters():
    assert trouble(crashed("something else went wrong")) == (
        "CrashLoopBackOff",
        'engine smol-r0-0: exit code 1, 3 restarts; last line: "kvern serve: error: something else went wrong"',
    )


def test_a_crash_without_a_word_says_where_to_look():
    one = container(state=waiting("CrashLoopBackOff"), last=ended(139), restartCount=1)
    assert trouble(pod(phase="Running", conditions=[scheduled()], containerStatuses=[one])) == (
        "CrashLoopBackOff",
        "engine smol-r0-0: exit code 139, 1 restart; the last line of its log names the cause",
    )


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("model '/models/claim/llama': no such folder or file (/models/claim/llama)", "ModelNotFound"),
        ("no built-in model 'nothing'; there are: smollm2-135m", "ModelNotFound"),
        ("model 'hf://a/b' is not on this machine: it is not in /x", "ModelNotFound"),
        ("To serve at least one request with the model's max seq len (4096), 1.00 GiB KV cache", "ModelDoesNotFit"),
        ("cuda:0 NVIDIA H200 has too little memory for the weights: CUDA out of memory", "ModelDoesNotFit"),
        ("cuda:0 NVIDIA H200 has too little memory for one step (see max_num_batched_tokens)", "OutOfMemory"),
        ("worker 0 was killed by SIGKILL (kill -9, or out of memory)", "OutOfMemory"),
    ],
)
def test_what_an_engine_says_gives_the_crash_a_name(line, reason):
    found, message = trouble(crashed(line))
    assert found == reason and line in message
    assert message.endswith(REASONS[reason].short)


def test_wrong_arguments_are_told_by_their_exit_code():
    assert trouble(crashed("--block-size must be a power of two, got 3", code=2))[0] == "BadArguments"


def test_an_engine_that_loads_again_after_a_crash_is_still_in_trouble():
    one = container(state={"running": {"startedAt": CREATED}}, last=ended(1, LOG.format("boom")), restartCount=2)
    reason, message = trouble(pod(phase="Running", conditions=[scheduled()], containerStatuses=[one]))
    assert reason == "CrashLoopBackOff" and "exit code 1, 2 restarts" in message


def test_an_engine_that_ran_out_of_memory_names_its_limit():
    one = container(state=waiting("CrashLoopBackOff"), last=ended(137, reason="OOMKilled"), restartCount=1)
    obj = pod(phase="Running", conditions=[scheduled()], containerStatuses=[one])
    assert trouble(obj, "resources: {memory: 2Gi}") == (
        "OOMKilled",
        "engine smol-r0-0: wanted more memory than its limit of 2Gi, exit code 137, 1 restart; "
        "raise spec.resources.memory",
    )


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("ImagePullBackOff", 'Back-off pulling image "x/y:1"'),
        ("ErrImageNeverPull", 'Container image "x/y:1" is not present with pull policy of Never'),
        ("InvalidImageName", "Failed to apply default image tag"),
        ("CreateContainerConfigError", 'secret "hf-token" not found'),
        ("RunContainerError", "failed to create containerd task"),
    ],
)
def test_the_kubelets_words_come_up(reason, message):
    obj = pod(conditions=[scheduled()], containerStatuses=[container(state=waiting(reason, message))])
    assert trouble(obj) == (reason, f"engine smol-r0-0: {message}; {REASONS[reason].short}")


def unschedulable(message: str) -> dict[str, Any]:
    return pod(conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}])


def test_the_schedulers_words_come_up():
    words = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu. preemption: 0/2 nodes are available"
    reason, message = trouble(unschedulable(words))
    assert reason == "Unschedulable"
    assert message == f"engine smol-r0-0: {words}; ask for less in spec.resources, or add nodes"


def test_a_claim_without_a_volume_is_told_apart_from_a_full_cluster():
    notice = Notice("PersistentVolumeClaim", "smol-cache", "ProvisioningFailed", 'storageclass "fast" not found')
    obj = unschedulable("0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims.")
    reason, message = trouble(obj, "cache: {pvc: {size: 1Gi}}", (notice,))
    assert reason == "ClaimNotBound" and 'smol-cache: storageclass "fast" not found' in message


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            'create Pod smol-r0-0 in StatefulSet smol-r0 failed error: pods "smol-r0-0" is forbidden: exceeded quota: '
            "team, requested: requests.cpu=2, used: requests.cpu=7, limited: requests.cpu=8",
            "QuotaExceeded",
        ),
        ('pods "x" is forbidden: violates PodSecurity "restricted:latest": privileged', "PodSecurityViolation"),
        ('pods "x" is forbidden: no PriorityClass with name high was found', "FailedCreate"),
    ],
)
def test_pods_that_the_api_server_does_not_let_a_controller_make(words, reason):
    cluster, svc = FakeCluster(), service("")
    cluster.step(svc)
    observed = Observed(
        tuple(cluster.objects.values()), notices=(Notice("StatefulSet", "smol-r0", "FailedCreate", words),)
    )
    found = reconcile(svc, observed, cluster.now, cluster.settings).status.condition("Ready")
    assert found.reason == reason
    assert found.message == f"StatefulSet smol-r0: {words}; {REASONS[reason].short}"


def test_events_of_the_past_do_not_count():
    cluster, svc = FakeCluster(), service("")
    cluster.settle(svc)
    notices = (
        Notice("StatefulSet", "smol-r0", "FailedCreate", "exceeded quota: it was"),
        Notice("Pod", "smol-r0-0", "FailedMount", "it was not there yet", uid="p-1"),
        Notice("ReplicaSet", "smol-router-abc", "FailedCreate", "exceeded quota: it was"),
    )
    observed = Observed(tuple(cluster.objects.values()), tuple(cluster.pods.values()), cluster.status, notices=notices)
    status = reconcile(svc, observed, cluster.now, cluster.settings).status
    assert status == cluster.status and status.condition("Degraded").status == "False"


def test_the_event_of_an_older_pod_of_the_same_name_does_not_count():
    obj = pod(conditions=[scheduled()], containerStatuses=[container(state=waiting("ContainerCreating"))])
    cluster, svc = FakeCluster(), service("")
    cluster.step(svc)
    children = tuple(cluster.objects.values())

    def reason(uid: str) -> str:
        notice = Notice("Pod", "smol-r0-0", "FailedMount", 'secret "x" not found', uid=uid)
        observed = Observed(children, (read_pod(obj),), notices=(notice,))
        return reconcile(svc, observed, cluster.now, cluster.settings).status.condition("Ready").reason

    assert reason("u-smol-r0-0") == reason("") == "FailedMount"
    assert reason("u-older") == "Creating"


@pytest.mark.parametrize(
    ("status", "reason", "words"),
    [
        ({}, "Scheduling", "waiting for a node"),
        ({"conditions": [scheduled()]}, "Creating", "being created (image, volumes)"),
        (
            {"conditions": [scheduled()], "containerStatuses": [container(state=waiting("ContainerCreating"))]},
            "Creating",
            "being created (image, volumes)",
        ),
        (
            {
                "phase": "Running",
                "conditions": [scheduled()],
                "containerStatuses": [container(state={"running": {"startedAt": CREATED}})],
            },
            "Loading",
            "loading",
        ),
    ],
)
def test_what_a_pod_passes_through_is_no_trouble(status, reason, words):
    cluster, svc = FakeCluster(), service("")
    cluster.step(svc)
    observed = Observed(tuple(cluster.objects.values()), (read_pod(pod(**status)),))
    plan = reconcile(svc, observed, cluster.now, cluster.settings)
    found = plan.status.condition("Ready")
    assert (found.status, found.reason) == ("False", reason)
    assert found.message == f"0 of 1 replicas answer; smol-r0-0 {words}"
    assert plan.status.condition("Degraded").status == "False"


def test_engines_come_before_routers_and_others_are_counted():
    bad = [container("router", state=waiting("ErrImagePull", "a"), restartCount=9)]
    router = pod("smol-router-x-y", "router", conditions=[scheduled()], containerStatuses=bad)
    cluster, svc = FakeCluster(), service("")
    cluster.step(svc)
    pods = (read_pod(router), read_pod(unschedulable("0/2 nodes are available")))
    status = reconcile(svc, Observed(tuple(cluster.objects.values()), pods), cluster.now, cluster.settings).status
    found = status.condition("Ready")
    assert found.reason == "Unschedulable" and found.message.endswith("(and 1 more)")


# ---------------------------------------------------------------- a pod that serves


def serving(device: str = "") -> Any:
    conditions = [scheduled(), {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T12:00:09Z"}]
    one = container(state={"running": {"startedAt": "2026-01-01T12:00:05Z"}}, ready=True, started=True)
    from dataclasses import replace

    read = read_pod(pod(phase="Running", podIP="10.0.0.7", conditions=conditions, containerStatuses=[one]))
    return replace(read, device=device, in_flight=0)


def test_a_pod_that_serves_is_read_whole():
    read = serving()
    assert (read.ready, read.served, read.running, read.reason, read.stage) == (True, True, True, "", "")
    assert (read.address, read.admin_address) == ("10.0.0.7:8000", "10.0.0.7:8001")
    assert (read.owner, read.component, read.uid) == ("smol-r0", "engine", "u-smol-r0-0")


def test_addresses_of_ipv6_are_bracketed():
    assert read_pod(pod(podIP="fd00::7")).address == "[fd00::7]:8000"


def test_a_routers_owner_is_its_deployment():
    assert read_pod(pod("smol-router-5d8-x", "router")).owner == "smol-router"


def test_a_container_that_overrides_add_is_not_taken_for_the_engine():
    side = container("sidecar", state={"running": {"startedAt": CREATED}}, started=True)
    engine = container(state=waiting("PodInitializing"))
    read = read_pod(pod(phase="Pending", conditions=[scheduled()], containerStatuses=[side, engine]))
    assert not read.running and not read.served and read.stage == "creating"


def with_pod(spec: str, one: Any) -> InferenceServiceStatus:
    cluster, svc = FakeCluster(), service(spec)
    cluster.settle(svc)
    pods = (one, *(p for p in cluster.pods.values() if p.component == "router"))
    observed = Observed(tuple(cluster.objects.values()), pods, cluster.status)
    return reconcile(svc, observed, cluster.now, cluster.settings).status


def test_time_to_ready_is_told_by_its_parts():
    startup = with_pod("", serving()).startup
    assert (startup.pod, startup.total_seconds) == ("smol-r0-0", 9)
    assert (startup.scheduling_seconds, startup.creating_seconds, startup.loading_seconds) == (2, 3, 4)


def test_time_to_ready_stays_when_readiness_comes_and_goes():
    from dataclasses import replace

    cluster, svc = FakeCluster(), service("")
    cluster.settle(svc)
    first = with_pod("", serving())
    later = replace(serving(), ready_since=cluster.now)
    observed = Observed(tuple(cluster.objects.values()), (later,), first)
    assert reconcile(svc, observed, cluster.now, cluster.settings).status.startup == first.startup


def test_a_pod_whose_gpu_is_fake_computes_on_the_cpu_and_status_says_so():
    status = with_pod("resources: {gpusPerPod: 2}", serving("cpu"))
    assert status.device == "cpu"
    ready, degraded = status.condition("Ready"), status.condition("Degraded")
    assert ready.status == "True" and ready.message.endswith("/v1, computing on the CPU")
    assert (degraded.status, degraded.reason) == ("True", "ComputesOnCPU")
    assert degraded.message == (
        "spec.resources.gpusPerPod is 2, but smol-r0-0 found no CUDA device and computes on the CPU; "
        "see that the node has its GPU driver and container toolkit, or set spec.resources.runtimeClassName"
    )


def test_a_cpu_pod_computes_on_the_cpu_on_purpose():
    status = with_pod("resources: {gpusPerPod: 0}", serving("cpu"))
    assert status.device == "cpu" and status.condition("Degraded").status == "False"
    assert with_pod("", serving("cuda NVIDIA H200")).device == "cuda NVIDIA H200"


# ---------------------------------------------------------------- refusals


def test_overrides_that_the_api_server_refuses_start_nothing_and_stop_nothing():
    bad = "rollout: {strategy: DrainSwap}, overrides: {podTemplate: {spec: {nodeName: 5}}}"
    cluster = FakeCluster()
    cluster.settle(service("rollout: {strategy: DrainSwap}"))
    changed = service(bad, generation=2)
    (dry,) = cluster.plan(changed).dry_run
    assert dry["kind"] == "StatefulSet" and dry["spec"]["template"]["spec"]["nodeName"] == 5
    assert dry["metadata"]["name"] == "smol-r1", "a name that is free"
    refusal = Refusal("StatefulSet", dry["metadata"]["labels"]["kvern.dev/revision"], "nodeName must be a string")
    observed = Observed(
        tuple(cluster.objects.values()), tuple(cluster.pods.values()), cluster.status, refusals=(refusal,)
    )
    plan = reconcile(changed, observed, cluster.now, cluster.settings)
    assert plan.empty and plan.dry_run == ()
    ready, available = plan.status.condition("Ready"), plan.status.condition("Available")
    assert (ready.status, ready.reason, available.status) == ("False", "OverridesRefused", "True")
    assert ready.message == (
        "spec.overrides: the API server does not take the StatefulSet that it leads to: nodeName must be a string; "
        "correct spec.overrides"
    )
    cluster.settle(service("rollout: {strategy: DrainSwap}", generation=3))
    assert cluster.status.condition("Ready").status == "True" and cluster.replicas == ["smol-r0"]


def test_overrides_of_the_router_that_are_refused_leave_the_old_router():
    cluster = FakeCluster()
    cluster.settle(service(""))
    changed = service("overrides: {routerPodTemplate: {spec: {nodeName: 5}}}", generation=2)
    (dry,) = cluster.plan(changed).dry_run
    refusal = Refusal("Deployment", dry["metadata"]["labels"]["kvern.dev/revision"], "nodeName must be a string")
    observed = Observed(
        tuple(cluster.objects.values()), tuple(cluster.pods.values()), cluster.status, refusals=(refusal,)
    )
    plan = reconcile(changed, observed, cluster.now, cluster.settings)
    assert plan.empty and plan.status.condition("Ready").reason == "OverridesRefused"


def test_overrides_are_tried_once_and_then_used():
    svc = service("overrides: {podTemplate: {spec: {priorityClassName: high}}}")
    cluster = FakeCluster()
    plan = cluster.step(svc)
    assert [o["kind"] for o in plan.dry_run] == ["StatefulSet"]
    assert cluster.plan(svc).dry_run == ()
    assert FakeCluster().plan(service("")).dry_run == ()


def test_an_object_that_the_api_server_refuses_is_named():
    cluster, svc = FakeCluster(), service("")
    cluster.settle(svc)
    refusal = Refusal("NetworkPolicy", "", "forbidden: policy x", name="smol-engines")
    observed = Observed(
        tuple(cluster.objects.values()), tuple(cluster.pods.values()), cluster.status, refusals=(refusal,)
    )
    found = reconcile(svc, observed, cluster.now, cluster.settings).status.condition("Degraded")
    assert (found.status, found.reason) == ("True", "ApplyFailed")
    assert found.message.startswith("NetworkPolicy smol-engines: the API server refuses it: forbidden: policy x; ")


def test_a_spec_that_this_operator_cannot_use_changes_nothing_and_is_told():
    cluster = FakeCluster()
    cluster.settle(service(""))
    status = invalid_spec(cluster.status, 7, ["spec.engine.args.x: unknown engine flag", "spec.y: z"], cluster.now)
    assert status.observed_generation == 7 and status.ready_replicas == 1
    assert [c.type for c in status.conditions] == [c.type for c in cluster.status.conditions]
    ready, degraded = status.condition("Ready"), status.condition("Degraded")
    assert (ready.status, ready.reason) == ("False", "InvalidSpec") and degraded.status == "True"
    assert ready.message == "spec.engine.args.x: unknown engine flag; spec.y: z (what ran before goes on)"
    assert status.condition("Available").status == "True"
    new = invalid_spec(None, 1, ["spec: bad"], cluster.now)
    assert [c.type for c in new.conditions] == ["Ready", "Degraded"] and new.conditions[0].message == "spec: bad"


# ---------------------------------------------------------------- properties

words = st.sampled_from(["", "Error", "OOMKilled", "Odd reason!", "404NotFound", "ImagePullBackOff", "Unschedulable"])
texts = st.sampled_from(["", "x" * 5000, "a\nb", "ошибка", "0/2 nodes: persistentvolumeclaim"])
ends = st.fixed_dictionaries({"exitCode": st.integers(0, 255)}, optional={"reason": words, "message": texts})
states = st.one_of(
    st.none(),
    st.just({}),
    st.fixed_dictionaries({"waiting": st.fixed_dictionaries({}, optional={"reason": words, "message": texts})}),
    st.fixed_dictionaries({"running": st.sampled_from([{}, {"startedAt": CREATED}, {"startedAt": "soon"}])}),
    st.fixed_dictionaries({"terminated": ends}),
)
statuses = st.fixed_dictionaries(
    {},
    optional={
        "phase": st.sampled_from(["Pending", "Running", "Failed", "Succeeded", "Unknown"]),
        "reason": words,
        "message": texts,
        "podIP": st.sampled_from(["", "10.0.0.1", "fd00::1"]),
        "conditions": st.lists(
            st.fixed_dictionaries(
                {
                    "type": st.sampled_from(["PodScheduled", "Ready", "Initialized"]),
                    "status": st.sampled_from(["True", "False", "Unknown"]),
                },
                optional={
                    "reason": words,
                    "message": texts,
                    "lastTransitionTime": st.sampled_from([CREATED, None, "x"]),
                },
            ),
            max_size=3,
        )
        | st.none(),
        "containerStatuses": st.lists(
            st.fixed_dictionaries(
                {"name": st.sampled_from(["engine", "router", "other"])},
                optional={
                    "state": states,
                    "lastState": states,
                    "ready": st.booleans(),
                    "started": st.booleans() | st.none(),
                    "restartCount": st.integers(0, 99),
                },
            ),
            max_size=2,
        )
        | st.none(),
    },
)
notices = st.builds(
    Notice,
    st.sampled_from(["StatefulSet", "ReplicaSet", "Pod", "PersistentVolumeClaim", "Deployment"]),
    st.sampled_from(["smol-r0", "smol-r0-0", "smol-router-abc", "smol-router", "other"]),
    st.sampled_from(["FailedCreate", "FailedMount", "FailedAttachVolume", "BackOff", ""]),
    texts,
    st.sampled_from(["", "u-smol-r0-0", "u-old"]),
)


@settings(max_examples=200, deadline=None)
@given(
    engine=statuses,
    router=statuses,
    gone=st.booleans(),
    told=st.lists(notices, max_size=3),
    spec=st.sampled_from(["", "replicas: 0", "suspend: true", "router: {mode: None}", "replicas: 3"]),
)
def test_no_state_of_pods_is_too_odd(engine, router, gone, told, spec):
    cluster, svc = FakeCluster(), service(spec)
    cluster.step(svc)
    objects = [pod(**engine), pod("smol-router-abc-x", "router", **router)]
    if gone:
        objects[0]["metadata"]["deletionTimestamp"] = CREATED
    observed = Observed(
        tuple(cluster.objects.values()), tuple(map(read_pod, objects)), cluster.status, notices=tuple(told)
    )
    plan = reconcile(svc, observed, cluster.now, cluster.settings)
    assert plan == reconcile(svc, observed, cluster.now, cluster.settings)
    again = InferenceServiceStatus.model_validate(plan.status.to_dict())
    assert again.to_dict() == plan.status.to_dict()
    for found in plan.status.conditions:
        assert len(found.message) <= 2048
