"""A model on its way into a claim: the Job, what it holds back, what status says, and each refusal with what to do."""

from dataclasses import replace

import pytest
from fake_cluster import SETTINGS, FakeCluster
from hypothesis import given
from hypothesis import strategies as st

from kvern_operator.admin import Report, _steps
from kvern_operator.advice import REASONS
from kvern_operator.api.load import ManifestError, load_text
from kvern_operator.cache import cache_state, human_bytes
from kvern_operator.desired import cache, engine, meta
from kvern_operator.observe import observe
from kvern_operator.observed import Fetch, Refusal
from kvern_operator.pods import read_fetch, read_pod
from kvern_operator.settings import Settings

HEAD = "apiVersion: kvern.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: smol, namespace: team-a, uid: u-1}\n"
GB = 10**9


def hub(more: str = "", model: str = "", claim: str = "{pvc: {size: 10Gi}}"):
    return load_text(f"{HEAD}spec: {{model: {{uri: 'hf://org/name', {model}}}, cache: {claim}, {more}}}\n")


def job_of(svc) -> dict:
    return cache.fetch_job(svc, SETTINGS)


def pod_of(obj: dict) -> dict:
    return obj["spec"]["template"]["spec"]


def container_of(obj: dict) -> dict:
    (container,) = pod_of(obj)["containers"]
    return container


def env_of(container: dict) -> dict[str, str]:
    return {e["name"]: e.get("value", "") for e in container["env"]}


# ---------------------------------------------------------------- the objects


def test_the_job() -> None:
    job = job_of(hub("resources: {gpusPerPod: 1, gpuType: H200, tolerations: [{key: a, operator: Exists}]}"))
    container, pod = container_of(job), pod_of(job)
    assert container["command"] == ["kvern", "fetch"]
    assert container["args"] == [
        *("hf://org/name", "--report-host", "0.0.0.0", "--report-port", "8001"),
        *("--admin-token-file", "/etc/kvern/admin/token", "--summary-file", "/dev/termination-log"),
    ]
    assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
    assert env_of(container)["KVERN_CACHE_DIR"] == "/var/cache/kvern"
    assert env_of(container)["KVERN_CACHE_LIMIT"] == str(10 * 2**30)
    assert {"name": "cache", "persistentVolumeClaim": {"claimName": "smol-cache"}} in pod["volumes"]
    assert "nvidia.com/gpu" not in str(container["resources"])  # no GPU waits for a download
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "H200"} and pod["tolerations"]
    assert pod["restartPolicy"] == "OnFailure" and pod["automountServiceAccountToken"] is False


def test_what_the_manifest_says_of_the_source() -> None:
    svc = hub(model="revision: v2, secretRef: {name: hub}, endpoint: 'http://mirror:80/hub'", claim="{claimName: c}")
    job = job_of(svc)
    container = container_of(job)
    assert container["args"][:3] == ["hf://org/name", "--revision", "v2"]
    assert container["envFrom"] == [{"secretRef": {"name": "hub"}}]
    assert env_of(container)["HF_ENDPOINT"] == "http://mirror:80/hub"
    assert "KVERN_CACHE_LIMIT" not in env_of(container)  # how large a claim of somebody else's is is not ours to know
    replica = engine.pod_template(svc, "smol-r0", {}, Settings())["spec"]["containers"][0]
    assert env_of(replica)["HF_ENDPOINT"] == "http://mirror:80/hub"
    assert {"secretRef": {"name": "hub"}} in replica["envFrom"]
    s3 = load_text(
        f"{HEAD}spec: {{model: {{uri: 's3://b/m', endpoint: 'http://minio:9000'}}, cache: {{claimName: c}}}}\n"
    )
    assert env_of(container_of(job_of(s3)))["AWS_ENDPOINT_URL_S3"] == "http://minio:9000"


def test_another_job_for_another_download_only() -> None:
    name = cache.job_name(hub())
    same = [
        hub("replicas: 3"),
        hub("engine: {maxModelLen: 128}"),
        hub(claim="{pvc: {size: 10Gi}, reclaimPolicy: Delete}"),
    ]
    assert {cache.job_name(svc) for svc in same} == {name}
    others = [
        hub(model="revision: v2"),
        hub(model="secretRef: {name: s}"),
        hub(model="endpoint: 'http://m'"),
        hub(claim="{claimName: c}"),
        hub("engine: {image: other}"),
        hub("resources: {nodeSelector: {a: b}}"),
        hub("overrides: {cachePodTemplate: {metadata: {labels: {a: b}}}}"),
    ]
    assert len({name, *(cache.job_name(svc) for svc in others)}) == 1 + len(others)


def test_overrides_reach_the_download() -> None:
    proxy = "{spec: {containers: [{name: fetch, env: [{name: HTTPS_PROXY, value: 'http://p:1'}]}]}}"
    job = job_of(hub(f"overrides: {{cachePodTemplate: {proxy}}}"))
    assert env_of(container_of(job))["HTTPS_PROXY"] == "http://p:1"
    assert env_of(container_of(job))["KVERN_CACHE_DIR"]


@pytest.mark.parametrize("uri", ["builtin://smollm2-135m", "pvc://models/x", "oci://r.example/m:1"])
def test_nothing_is_fetched_of_what_is_elsewhere(uri: str) -> None:
    svc = load_text(f"{HEAD}spec: {{model: {{uri: '{uri}'}}, cache: {{claimName: c}}}}\n")
    assert not [o for o in FakeCluster().plan(svc).apply if o["kind"] == "Job"]


def test_without_a_claim_each_pod_fetches_for_itself() -> None:
    svc = load_text(f"{HEAD}spec: {{model: {{uri: 'hf://org/name'}}}}\n")
    cluster = FakeCluster()
    cluster.step(svc)
    assert cluster.replicas == ["smol-r0"] and not [key for key in cluster.objects if key[0] == "Job"]


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("uri: 'pvc://a/b', endpoint: 'http://x'", "endpoint is the server of an hf:// or s3:// model"),
        ("uri: 'hf://a/b', endpoint: minio", "a URL such as https://minio.example:9000"),
    ],
)
def test_an_endpoint_that_is_none(model: str, text: str) -> None:
    with pytest.raises(ManifestError) as caught:
        load_text(f"{HEAD}spec: {{model: {{{model}}}}}\n")
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("uri", "name"),
    [
        ("hf://org/name", "org/name"),
        ("hf://org/name/m.Q4.gguf", "m.Q4"),
        ("s3://b/x/m-00001-of-00002.gguf", "m"),
        ("s3://b/x/llama", "llama"),
        ("oci://r.example/org/llama:v1", "llama"),
        ("oci://r.example/org/llama@sha256:abc", "llama"),
        ("pvc://c/m.gguf", "m.gguf"),
    ],
)
def test_names_that_clients_use(uri: str, name: str) -> None:
    assert load_text(f"{HEAD}spec: {{model: {{uri: '{uri}'}}}}\n").spec.model.served_name == name


# ---------------------------------------------------------------- its life


def test_replicas_start_when_the_model_is_there() -> None:
    svc, cluster = hub("replicas: 2"), FakeCluster()
    cluster.step(svc)
    assert cluster.replicas == [] and cluster.status.cache.phase == "Pending"
    assert said(cluster) == ("False", "DownloadPending", "hf://org/name is to be fetched into claim smol-cache")

    cluster.change(f"{cluster.job()}-x", running=True, fetch=Fetch(0, 0, "another download into the same cache: x"))
    cluster.step(svc)
    assert said(cluster)[2].endswith("claim smol-cache: another download into the same cache: x")

    cluster.change(f"{cluster.job()}-x", fetch=Fetch(4 * GB, 10 * GB))
    cluster.step(svc)
    assert cluster.replicas == []
    found = cluster.status.cache
    assert (found.phase, found.bytes, found.total) == ("Downloading", 4 * GB, 10 * GB)
    words = "40 % of 10.0 GB of hf://org/name are in claim smol-cache"
    assert said(cluster) == ("False", "Downloading", words)
    ready = cluster.status.condition("Ready")
    assert (ready.status, ready.reason, ready.message) == ("False", "Downloading", f"0 of 2 replicas answer; {words}")

    cluster.change(f"{cluster.job()}-x", running=False, fetch=Fetch(10 * GB, 10 * GB))
    cluster.job(succeeded=1)
    cluster.step(svc)
    assert cluster.replicas == ["smol-r0", "smol-r1"]
    assert said(cluster) == ("True", "Cached", "hf://org/name (10.0 GB) is in claim smol-cache")
    cluster.settle(svc)
    assert cluster.status.cache.phase == "Ready" and cluster.status.cache.bytes == 10 * GB


def said(cluster: FakeCluster) -> tuple[str, str, str]:
    found = cluster.status.condition("ModelCached")
    return found.status, found.reason, found.message


def settled(svc) -> FakeCluster:
    """A service whose model is in its claim."""
    cluster = FakeCluster()
    cluster.step(svc)
    cluster.change(f"{cluster.job()}-x", fetch=Fetch(GB, GB))
    cluster.job(succeeded=1)
    cluster.settle(svc)
    return cluster


def test_the_job_stays_as_it_was_made() -> None:
    svc = hub()
    cluster = settled(svc)
    cluster.settings = replace(cluster.settings, engine_image="newer")  # an upgrade of the operator
    assert cluster.plan(svc).empty
    del cluster.pods[f"{cluster.job()}-x"]  # a node is gone, and the pod that had ended with it
    plan = cluster.plan(svc)
    assert plan.empty and plan.status.cache.bytes == GB


@pytest.mark.parametrize("strategy", ["Surge", "DrainSwap", "Recreate"])
def test_the_old_model_serves_while_the_new_one_comes(strategy: str) -> None:
    old = hub(f"rollout: {{strategy: {strategy}}}")
    cluster = settled(old)
    new = hub(f"rollout: {{strategy: {strategy}}}", model="revision: v2")
    for _ in range(3):
        cluster.step(new)
        assert cluster.ready_engines() == 1 and cluster.replicas == ["smol-r0"]
    assert "an older one; hf://org/name is to be fetched into claim" in cluster.status.condition("Ready").message
    assert len([key for key in cluster.objects if key[0] == "Job"]) == 1  # the old one's record has gone
    cluster.job(succeeded=1)
    cluster.settle(new)
    assert cluster.ready_engines() == 1
    (obj,) = [o for (kind, _), o in cluster.objects.items() if kind == "StatefulSet"]
    assert obj["metadata"]["labels"][meta.REVISION_LABEL] == engine.revision(new.spec)


def test_scaling_waits_only_while_the_job_runs() -> None:
    cluster = settled(hub())
    del cluster.objects["Job", cluster.job()]  # somebody has deleted it
    cluster.step(hub("replicas: 2"))
    assert cluster.replicas == ["smol-r0"] and cluster.ready_engines() == 1
    cluster.job(succeeded=1)
    cluster.settle(hub("replicas: 2"))
    assert cluster.replicas == ["smol-r0", "smol-r1"]


def test_a_suspended_service_fetches_nothing() -> None:
    cluster = FakeCluster()
    cluster.step(hub("suspend: true"))
    assert not [key for key in cluster.objects if key[0] == "Job"]


@pytest.mark.parametrize("why", ["given up", "image"])
def test_a_job_that_can_only_fail_is_made_anew(why: str) -> None:
    svc, cluster = hub(), FakeCluster()
    cluster.step(svc)
    name = cluster.job()
    if why == "given up":
        cluster.job(conditions=[{"type": "Failed", "status": "True"}])
    else:
        cluster.change(f"{name}-x", reason="ImagePullBackOff")
        assert ("Job", name) not in cluster.plan(svc).delete
        cluster.settings = replace(cluster.settings, engine_image="the-right-one")
    assert ("Job", name) in cluster.plan(svc).delete
    cluster.step(svc)
    cluster.step(svc)
    assert cluster.job() == name
    if why == "image":
        (obj,) = [o for (kind, _), o in cluster.objects.items() if kind == "Job"]
        assert engine.image_of(obj["spec"]["template"]) == "the-right-one"


# ---------------------------------------------------------------- trouble


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("hf://org/name: not found: there is no revision 'v2'; there are main, v1", "ModelNotFound"),
        ("hf://org/name: access denied: the model is gated; ask for access at x", "ModelAccessDenied"),
        ("s3://b/x: access denied: these keys may not read bucket b: InvalidAccessKeyId", "ModelAccessDenied"),
        ("hf://org/name: no room: 140 GB are needed and 20.0 GB are free in /var/cache/kvern", "CacheFull"),
        ("hf://org/name: download failed: huggingface.co cannot be reached (timed out)", "DownloadFailed"),
    ],
)
def test_why_a_download_fails(line: str, reason: str) -> None:
    svc, cluster = hub(), FakeCluster()
    cluster.step(svc)
    obj = failing_pod(cluster.job(), f"kvern fetch: error: {line}")
    cluster.pods[f"{cluster.job()}-x"] = read_pod(obj)
    cluster.step(svc)
    status, found, message = said(cluster)
    assert (status, found) == ("False", reason)
    assert message == (
        f'fetch {cluster.job()}-x: exit code 1, 4 restarts; last line: "kvern fetch: error: {line}"; '
        f"{REASONS[reason].short}"
    )
    assert cluster.status.cache.phase == "Failed"
    ready = cluster.status.condition("Ready")
    assert (ready.status, ready.reason, ready.message) == ("False", reason, message)
    assert cluster.replicas == []


def failing_pod(job: str, last_line: str) -> dict:
    ended = {"exitCode": 1, "reason": "Error", "message": f"time=t level=info process=fetch msg=x\n{last_line}\n"}
    return {
        "metadata": {
            "name": f"{job}-x",
            "uid": "p-9",
            "labels": {
                meta.SERVICE_LABEL: "smol",
                meta.COMPONENT_LABEL: meta.FETCH,
                "batch.kubernetes.io/job-name": job,
            },
        },
        "status": {
            "phase": "Running",
            "containerStatuses": [
                {
                    "name": "fetch",
                    "restartCount": 4,
                    "state": {
                        "waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s restarting failed container"}
                    },
                    "lastState": {"terminated": ended},
                }
            ],
        },
    }


def test_a_cluster_without_image_volumes_says_so_before_a_pod_is_touched() -> None:
    svc = load_text(f"{HEAD}spec: {{model: {{uri: 'oci://r.example/m:1', secretRef: {{name: pull}}}}}}\n")
    cluster = FakeCluster()
    plan = cluster.plan(svc)
    (checked,) = plan.dry_run
    pod = pod_of(checked)
    assert {"name": "model", "image": {"reference": "r.example/m:1"}} in pod["volumes"]
    assert pod["containers"][0]["args"][0] == "/model-image" and pod["imagePullSecrets"] == [{"name": "pull"}]
    assert "secretRef" not in str(pod["containers"][0]["envFrom"])
    words = 'StatefulSet "smol-r0" is invalid: spec.template.spec.volumes[4]: must specify a volume type'
    refusal = Refusal("StatefulSet", engine.revision(svc.spec), words)
    seen = replace(cluster.observed(), refusals=(refusal,))
    from kvern_operator.reconcile import reconcile

    refused = reconcile(svc, seen, cluster.now, cluster.settings)
    assert not [o for o in refused.apply if o["kind"] == "StatefulSet"]
    ready = refused.status.condition("Ready")
    assert ready.reason == "ImageVolumesNotSupported"
    assert ready.message == (
        f"the API server knows no image volumes, which oci:// models are: {words}; "
        f"{REASONS['ImageVolumesNotSupported'].short}"
    )


@pytest.mark.parametrize("message", ['failed to mkdir "": mkdir : no such file or directory', "image volumes unknown"])
def test_a_runtime_without_image_volumes(message: str) -> None:
    from kvern_operator.crashes import crash_reason

    assert crash_reason("engine", "CreateContainerError", message, None, "") == "ImageVolumesNotSupported"
    assert crash_reason("engine", "CreateContainerError", "something else", None, "") == "CreateContainerError"


# ---------------------------------------------------------------- what pods say


def test_a_download_is_asked_and_what_it_says_is_seen() -> None:
    svc = hub()
    obj = failing_pod("smol-fetch-abc", "")
    obj["status"] |= {"podIP": "10.0.0.7", "containerStatuses": [{"name": "fetch", "state": {"running": {}}}]}
    reports = {"p-9": Report(fetch=Fetch(5, 10))}
    scene = observe(svc, [], [obj], reports, token="t")
    (target,) = scene.targets
    assert (target.address, target.token, target.fetching) == ("10.0.0.7:8001", "t", True)
    (pod,) = scene.observed.pods
    assert (pod.owner, pod.fetch, pod.served) == ("smol-fetch-abc", Fetch(5, 10), False)


def test_the_last_words_of_a_download() -> None:
    obj = failing_pod("smol-fetch-abc", "")
    words = '{"phase": "Ready", "bytes": 10, "total": 10, "text": "", "model": "hf://org/name"}'
    ended = {"terminated": {"exitCode": 0, "message": words}}
    obj["status"] = {"phase": "Succeeded", "containerStatuses": [{"name": "fetch", "state": ended}]}
    pod = read_pod(obj)
    assert (pod.fetch, pod.reason, pod.running) == (Fetch(10, 10), "", False)
    ended["terminated"]["message"] = "not JSON"
    assert read_pod(obj).fetch is None


SHAPE = {"layers": 32, "heads": 32, "kvHeads": 8, "headDim": 128, "maxModelLen": 8192}


def test_the_shape_of_a_model_that_is_there_is_kept() -> None:
    svc, cluster = hub(), FakeCluster()
    cluster.step(svc)
    words = {"bytes": GB, "total": GB, "shape": SHAPE}
    cluster.change(f"{cluster.job()}-x", fetch=read_fetch(words))
    cluster.step(svc)
    assert cluster.status.cache.shape is None  # not while it is on its way
    cluster.job(succeeded=1)
    cluster.step(svc)
    assert cluster.status.cache.shape.to_dict() == SHAPE
    cluster.change(f"{cluster.job()}-x", fetch=None)  # its pod is gone
    cluster.settle(svc)
    assert cluster.status.cache.shape.to_dict() == SHAPE


@pytest.mark.parametrize("wrong", [None, [], {}, {**SHAPE, "heads": 0}, {**SHAPE, "layers": True}, {"heads": 1}])
def test_half_a_shape_is_none(wrong: object) -> None:
    assert read_fetch({"bytes": 1, "total": 1, "shape": wrong}) == Fetch(1, 1)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda x: st.dictionaries(st.sampled_from(["bytes", "total", "text", "shape", "heads", "x"]), x),
    )
)
def test_whatever_a_pod_says_is_read(answer: object) -> None:
    found = read_fetch(answer)
    assert found is None or (found.done >= 0 and found.total >= 0)


@given(st.integers(0, 10**13), st.integers(0, 10**13))
def test_a_status_changes_a_hundred_times_at_most(done: int, total: int) -> None:
    svc, cluster = hub(), FakeCluster()
    done = min(done, total)
    cluster.step(svc)
    name = f"{cluster.job()}-x"
    cluster.change(name, running=True, fetch=Fetch(done, total))
    found = cache_state(svc, cluster.observed())
    if total == 0:
        assert found.phase == "Pending"
        return
    percent = done * 100 // total
    assert found.done == total * percent // 100 and 0 <= found.done <= total and f"{percent} % of" in found.message
    assert (_steps(Fetch(done, total)) == _steps(Fetch(found.done, total))) or percent != found.done * 100 // total


def test_sizes() -> None:
    assert [human_bytes(n) for n in (0, 1500, 23_400_000, 140 * GB)] == ["0 B", "1.5 kB", "23.4 MB", "140 GB"]
