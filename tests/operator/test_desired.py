"""What a spec leads to: pod templates, probes, layouts, Services, budgets, claims, overrides."""

import dataclasses
import json
from datetime import UTC, datetime

import pytest
from fake_cluster import FakeCluster, service

from kvern_operator.api.types import InferenceService
from kvern_operator.desired import engine, meta, router, services
from kvern_operator.desired.layout import Layout, parse_layout, wanted_layout
from kvern_operator.desired.merge import merged
from kvern_operator.desired.probes import model_bytes, startup_seconds
from kvern_operator.observed import Pod
from kvern_operator.settings import Settings

SETTINGS = Settings(engine_image="engine:1", operator_image="operator:1", operator_key=b"k")


def stateful_set(svc: InferenceService) -> dict:
    return engine.stateful_set(svc, "smol-r0", wanted_layout(svc.spec), SETTINGS)


def container(svc: InferenceService) -> dict:
    return stateful_set(svc)["spec"]["template"]["spec"]["containers"][0]


def pod(svc: InferenceService) -> dict:
    return stateful_set(svc)["spec"]["template"]["spec"]


def test_the_engine_container_of_the_smallest_spec():
    made = container(service("resources: {gpusPerPod: 0}"))
    assert made["command"] == ["kvern", "serve"]
    assert made["args"] == [
        "builtin://smollm2-135m",
        *("--served-model-name", "smollm2-135m"),
        *("--host", "0.0.0.0"),
        *("--port", "8000"),
        *("--admin-host", "0.0.0.0"),
        *("--admin-port", "8001"),
        *("--admin-token-file", "/etc/kvern/admin/token"),
        *("--drain-timeout-seconds", "300"),
        *("--device", "cpu"),
    ]
    assert made["image"] == "engine:1"
    assert made["ports"] == [{"name": "http", "containerPort": 8000}, {"name": "admin", "containerPort": 8001}]
    assert made["envFrom"] == [{"configMapRef": {"name": "smol-r0-layout"}}]
    assert made["resources"] == {}
    assert made["terminationMessagePolicy"] == "FallbackToLogsOnError"
    assert "imagePullPolicy" not in made


def test_typed_fields_and_args_become_flags():
    spec = (
        'engine: {image: "my/engine:2", maxModelLen: 512, maxNumSeqs: 8, gpuMemoryUtilization: "0.5", '
        'quantization: fp8, kvCacheDtype: fp8, args: {block-size: 32, enforce-eager: "true", '
        'enable-prefix-caching: "false", device: sim}}'
    )
    made = container(service(spec))
    assert made["image"] == "my/engine:2"
    assert made["args"][made["args"].index("--max-model-len") :] == [
        *("--max-model-len", "512"),
        *("--max-num-seqs", "8"),
        *("--gpu-memory-utilization", "0.5"),
        *("--quantization", "fp8"),
        *("--kv-cache-dtype", "fp8"),
        *("--block-size", "32"),
        *("--device", "sim"),
        "--no-enable-prefix-caching",
        "--enforce-eager",
    ]


@pytest.mark.parametrize(("mode", "ready"), [("Auto", True), ("Recommend", False), ("Fixed", False)])
def test_pods_are_started_for_changes_of_the_layout_where_the_planner_makes_them(mode, ready):
    made = service(f"resources: {{gpusPerPod: 2}}, parallelism: {{tensor: {{mode: {mode}}}}}")
    assert ({"name": "KVERN_GPU_LAYOUT_SWITCH", "value": "1"} in container(made)["env"]) == ready


def test_resources_of_a_gpu_pod():
    spec = "resources: {gpusPerPod: 4, cpu: 8, memory: 64Gi, gpuType: NVIDIA-H200, nodeSelector: {zone: a}, "
    made = service(spec + "tolerations: [{key: gpu, operator: Exists}], runtimeClassName: nvidia}")
    assert container(made)["resources"] == {
        "requests": {"cpu": "8", "memory": "64Gi"},
        "limits": {"memory": "64Gi", "nvidia.com/gpu": "4"},
    }
    assert {"name": "OMP_NUM_THREADS", "value": "2"} in container(made)["env"]  # four ranks share eight cores
    assert pod(made)["nodeSelector"] == {"zone": "a", "nvidia.com/gpu.product": "NVIDIA-H200"}
    assert pod(made)["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert pod(made)["runtimeClassName"] == "nvidia"
    (shm,) = [v for v in pod(made)["volumes"] if v["name"] == "shm"]
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "4Gi"}


@pytest.mark.parametrize("drain", [0, 60, 3600])
def test_grace_exceeds_the_drain_and_the_routers_exceeds_the_engines(drain):
    made = service(f"rollout: {{drainTimeoutSeconds: {drain}}}")
    of_engine = pod(made)["terminationGracePeriodSeconds"]
    of_router = router.pod_template(made, {}, SETTINGS)["spec"]["terminationGracePeriodSeconds"]
    assert drain < of_engine < of_router


def test_without_a_router_an_engine_goes_on_accepting_until_the_service_has_forgotten_it():
    """A router sends again what an engine refuses; clients that come through the Service get what it says."""
    routed, bare = container(service()), container(service("router: {mode: None}"))
    assert "--shutdown-grace-seconds" not in routed["args"]
    at = bare["args"].index("--shutdown-grace-seconds")
    assert bare["args"][at + 1] == str(SETTINGS.endpoints_delay)
    made = service("router: {mode: None}, rollout: {drainTimeoutSeconds: 60}")
    assert pod(made)["terminationGracePeriodSeconds"] > 60 + SETTINGS.endpoints_delay


def test_a_pod_that_serves_nobody_keeps_no_node_from_being_drained():
    for budget in services.disruption_budgets(service(), 2, 2):
        assert budget["spec"]["maxUnavailable"] == 1
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert services.disruption_budgets(service(), 1, 1) == []


def test_a_replica_of_several_nodes_is_one_stateful_set():
    made = stateful_set(service("resources: {gpusPerPod: 8, nodesPerReplica: 2}"))
    assert made["spec"]["replicas"] == 2 and made["spec"]["serviceName"] == "smol-engines"
    assert made["spec"]["updateStrategy"] == {"type": "OnDelete"} and made["spec"]["podManagementPolicy"] == "Parallel"
    assert meta.annotation(made, meta.GPUS) == "16" and meta.annotation(made, meta.LAYOUT) == "tp16pp1dp1"


def test_the_pods_of_a_replica_find_each_other():
    template = stateful_set(service("resources: {gpusPerPod: 8, nodesPerReplica: 2}"))["spec"]["template"]["spec"]
    env = {
        e["name"]: e.get("value") or e["valueFrom"]["fieldRef"]["fieldPath"] for e in template["containers"][0]["env"]
    }
    assert (
        env.items()
        >= {
            "KVERN_NNODES": "2",
            "KVERN_MASTER_ADDR": "smol-r0-0.smol-engines.team-a.svc.cluster.local",
            "KVERN_NODE_RANK": "metadata.labels['apps.kubernetes.io/pod-index']",
            "KVERN_NODE_ADDR": "status.podIP",
        }.items()
    )
    assert not [e for e in container(service(""))["env"] if "NODE" in e["name"]]
    alone = services.public_service(service("router: {mode: None}, resources: {nodesPerReplica: 2}"))
    assert alone["spec"]["selector"]["apps.kubernetes.io/pod-index"] == "0"


def test_a_model_in_a_claim_is_mounted_read_only():
    text = service("").model_copy()
    spec = text.spec.model_copy(update={"model": text.spec.model.model_copy(update={"uri": "pvc://models/llama/8b"})})
    made = text.model_copy(update={"spec": spec})
    assert container(made)["args"][0] == "/models/models/llama/8b"
    assert {"name": "model", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}} in pod(made)["volumes"]
    assert {"name": "model", "mountPath": "/models/models", "readOnly": True} in container(made)["volumeMounts"]


def test_a_cache_claim_takes_the_place_of_the_empty_folder_and_outlives_the_service():
    made = service("cache: {pvc: {size: 10Gi, storageClassName: fast}}")
    assert {"name": "cache", "persistentVolumeClaim": {"claimName": "smol-cache"}} in pod(made)["volumes"]
    (claim,) = services.cache_claims(made)
    assert claim["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "10Gi"}},
        "storageClassName": "fast",
    }
    assert "ownerReferences" not in claim["metadata"]
    (claim,) = services.cache_claims(service("cache: {pvc: {size: 10Gi}, reclaimPolicy: Delete}"))
    assert claim["metadata"]["ownerReferences"]
    cluster = FakeCluster()
    cluster.settle(made)
    assert not [key for key in cluster.plan(service("")).delete if key[0] == "PersistentVolumeClaim"]


def test_the_revision_follows_what_pods_are_made_from_and_nothing_else():
    same = engine.revision(service("").spec)
    for spec in (
        "replicas: 5",
        "suspend: true",
        "router: {replicas: 1}",
        "rollout: {drainTimeoutSeconds: 9}",
        "parallelism: {tensor: {size: 1}}",
        "autoscaling: {mode: External}",
        "resources: {gpusPerPod: 1}",
        "overrides: {routerPodTemplate: {a: 1}}",
    ):
        assert engine.revision(service(spec).spec) == same, spec
    others = [
        "engine: {maxModelLen: 5}",
        "engine: {args: {seed: 1}}",
        "resources: {gpusPerPod: 2}",
        "overrides: {podTemplate: {a: 1}}",
        "cache: {claimName: c}",
    ]
    assert len({same, *(engine.revision(service(spec).spec) for spec in others)}) == len(others) + 1


def test_the_revision_of_a_committed_spec_never_changes():
    # A change here would restart every pod of every user on the next upgrade of the operator.
    assert engine.revision(service("").spec) == "ca2ccd5d45"


@pytest.mark.parametrize(
    ("spec", "layout"),
    [
        ("resources: {gpusPerPod: 0}", Layout(1, 1, 1)),
        ("resources: {gpusPerPod: 0}, engine: {args: {data-parallel-size: 2}}", Layout(1, 1, 2)),
        ("resources: {gpusPerPod: 1}", Layout(1, 1, 1)),
        ("resources: {gpusPerPod: 8}", Layout(8, 1, 1)),
        ("resources: {gpusPerPod: 8}, parallelism: {tensor: {size: 2}}", Layout(2, 1, 4)),
        ("resources: {gpusPerPod: 8}, parallelism: {tensor: {max: 4}}", Layout(4, 1, 2)),
        ("resources: {gpusPerPod: 8}, parallelism: {pipeline: {size: 2}}", Layout(4, 2, 1)),
        ("resources: {gpusPerPod: 4, nodesPerReplica: 2}, parallelism: {tensor: {size: 4}}", Layout(4, 1, 2)),
        ("resources: {gpusPerPod: 6}, parallelism: {tensor: {max: 4}}", Layout(3, 1, 2)),
    ],
)
def test_layouts(spec, layout):
    assert wanted_layout(service(spec).spec) == layout == parse_layout(str(layout))


def test_what_is_not_a_layout():
    assert parse_layout("") is None and parse_layout("tp1") is None


@pytest.mark.parametrize(
    ("uri", "size"),
    [
        ("builtin://smollm2-135m", 98_362_432),
        ("hf://meta-llama/Llama-3.1-70B-Instruct", 140 * 10**9),
        ("hf://Qwen/Qwen2.5-0.5B", 10**9),
        ("hf://mistralai/Mixtral-8x7B-v0.1", 112 * 10**9),
        ("hf://org/SmolLM2-360M", 720 * 10**6),
        ("hf://org/name", 140 * 10**9),
        ("pvc://models/v2b-something", 140 * 10**9),
    ],
)
def test_the_size_of_a_model_is_read_from_its_name(uri, size):
    assert model_bytes(uri) == size


def test_a_startup_probe_gives_a_large_model_the_time_to_load():
    assert startup_seconds("builtin://smollm2-135m") == 301
    assert startup_seconds("pvc://models/Llama-70B") == 300 + 2800
    assert startup_seconds("hf://x/Llama-70B") == 300 + 7000
    assert startup_seconds("hf://x/name") == 300 + 7000 and startup_seconds("pvc://x/405B") == 300 + 16_200
    assert startup_seconds("hf://x/405B") == 6 * 3600
    probe = container(service(""))["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 301 and probe["httpGet"]["path"] == "/ready"
    assert container(service(""))["livenessProbe"]["httpGet"]["path"] == "/health"


def test_overrides_are_merged_last():
    spec = (
        "overrides: {podTemplate: {metadata: {annotations: {a: b}}, spec: {priorityClassName: high, containers: "
        "[{name: engine, env: [{name: HOME, value: /x}, {name: NEW, value: y}]}, {name: sidecar, image: z}]}}}"
    )
    made = stateful_set(service(spec))["spec"]["template"]
    assert made["metadata"]["annotations"] == {"a": "b"} and made["metadata"]["labels"]
    assert made["spec"]["priorityClassName"] == "high"
    first, second = made["spec"]["containers"]
    assert {e["name"]: e["value"] for e in first["env"] if "value" in e} == {
        "KVERN_CACHE_DIR": "/var/cache/kvern",
        "HF_HOME": "/var/cache/kvern/huggingface",
        "HOME": "/x",
        "NEW": "y",
    }
    assert first["command"] == ["kvern", "serve"] and second == {"name": "sidecar", "image": "z"}


def test_merging():
    assert merged({"a": {"b": 1, "c": 2}}, {"a": {"b": None, "d": 3}}) == {"a": {"c": 2, "d": 3}}
    assert merged({"a": [1, 2]}, {"a": [3]}) == {"a": [3]}
    base = {"a": {"b": 1}}
    merged(base, {"a": {"b": 2}})
    assert base == {"a": {"b": 1}}


def test_the_router_gets_its_flags_from_the_spec():
    spec = "router: {policy: LeastLoad, holdTimeoutSeconds: 7, maxHeld: 9, apiKeysSecretRef: {name: keys}}"
    made = router.pod_template(service(spec), {}, SETTINGS)["spec"]
    assert made["containers"][0]["command"] == ["kvern-router"]
    assert made["containers"][0]["args"] == [
        *("--listen", "0.0.0.0:8000"),
        *("--replicas-file", "/etc/kvern/router/replicas.json"),
        *("--model", "smollm2-135m"),
        *("--policy", "LeastLoad"),
        *("--hold-timeout-seconds", "7"),
        *("--max-held", "9"),
        *("--drain-timeout-seconds", "330"),
        *("--shutdown-delay-seconds", "5"),
        *("--api-keys-file", "/etc/kvern/keys/keys"),
    ]
    assert {"name": "keys", "secret": {"secretName": "keys"}} in made["volumes"]


def test_the_routers_flags_are_ones_that_it_has():
    from kvern_router.settings import parse_args

    template = router.pod_template(service("router: {apiKeysSecretRef: {name: keys}}"), {}, SETTINGS)
    assert parse_args(template["spec"]["containers"][0]["args"]).hold_timeout == 300


def test_a_router_keeps_bodies_in_half_of_the_memory_that_it_has():
    from kvern_router.settings import parse_args

    def kept(spec):
        return parse_args(router.pod_template(service(spec), {}, SETTINGS)["spec"]["containers"][0]["args"])

    assert kept("router: {resources: {memory: 128Mi}}").max_buffered_bytes == 64 * 2**20
    assert kept("router: {resources: {memory: 2Gi}}").max_buffered_bytes == 2**30
    assert kept("router: {resources: {cpu: 1}}").max_buffered_bytes == 2**28, "of 512Mi"


def test_limits_are_the_routers_business_without_a_restart():
    def made(spec):
        return router.revision(service(spec))

    assert made("router: {limits: {requestsPerMinute: 5}}") == made("router: {limits: {tokensPerMinute: 9}}")
    assert made("router: {limits: {requestsPerMinute: 5}}") != made(""), "a router of before keeps none"
    assert made("router: {limits: {}}") == made("")
    assert made("router: {replicas: 3}") == made("router: {replicas: 4}")


def test_routers_are_told_of_limits_and_of_each_other():
    limited = service("router: {limits: {requestsPerMinute: 5}}")
    now = datetime(2026, 1, 1, tzinfo=UTC)
    pods = [
        Pod("smol-router-b", "1", "smol-router", meta.ROUTER, now, running=True, address="10.0.0.2:8000"),
        Pod("smol-router-a", "2", "smol-router", meta.ROUTER, now, running=True, address="10.0.0.1:8000"),
        Pod("smol-router-c", "3", "smol-router", meta.ROUTER, now, running=False, address="10.0.0.3:8000"),
    ]
    told = json.loads(router.replica_file(limited, pods, frozenset()))
    assert told["limits"] == {"requestsPerMinute": 5}
    assert told["routers"] == ["10.0.0.1:8000", "10.0.0.2:8000"]
    assert "routers" not in json.loads(router.replica_file(service(""), pods, frozenset())), "nor written for nothing"


def test_routers_get_the_dns_names_of_all_replicas_that_shall_serve():
    now = datetime(2026, 1, 1, tzinfo=UTC)
    going = Pod("smol-r2-0", "1", "smol-r2", meta.ENGINE, now, running=True, terminating=True)
    names, leaving = ["smol-r0", "smol-r1", "smol-r2"], frozenset({"smol-r1"})
    inside = dataclasses.replace(SETTINGS, namespace="kvern", cluster_domain="example.net")
    told = json.loads(router.replica_file(service(""), [going], leaving, names, inside))
    assert told["hosts"] == [
        {"name": "smol-r0-0", "host": "smol-r0-0.smol-engines.team-a.svc.example.net", "port": 8000}
    ]
    assert "hosts" not in json.loads(router.replica_file(service(""), [], frozenset(), names, SETTINGS))


def test_routers_understand_what_they_are_told():
    from kvern_router.replicas import parse_replicas

    limited = service("router: {limits: {requestsPerMinute: 5, tokensPerMinute: 7}}")
    now = datetime(2026, 1, 1, tzinfo=UTC)
    pods = [
        Pod("smol-router-a", "2", "smol-router", meta.ROUTER, now, running=True, address="[fd00::1]:8000"),
        Pod("smol-r0-0", "1", "smol-r0", meta.ENGINE, now, running=True, ready=True, address="[fd00::2]:8000"),
    ]
    inside = dataclasses.replace(SETTINGS, namespace="kvern")
    told = parse_replicas(router.replica_file(limited, pods, frozenset(), ["smol-r0"], inside))
    assert (told.limits.requests, told.limits.tokens, told.routers) == (5, 7, (("fd00::1", 8000),))
    assert (told.replicas[0].host, told.hosts[0].name) == ("fd00::2", "smol-r0-0")


def test_services_and_budgets():
    made = service("")
    assert services.public_service(made)["spec"]["selector"] == meta.selector(made, meta.ROUTER)
    assert services.public_service(service("router: {mode: None}"))["spec"]["selector"] == meta.selector(
        made, meta.ENGINE
    )
    headless = services.headless_service(made)["spec"]
    assert headless["clusterIP"] == "None" and headless["publishNotReadyAddresses"] is True
    assert [b["metadata"]["name"] for b in services.disruption_budgets(made, 3, 2)] == ["smol-engines", "smol-router"]
    assert services.disruption_budgets(made, 1, 1) == []


def test_without_a_router_there_is_none():
    kinds = {o["kind"] for o in FakeCluster().plan(service("router: {mode: None}")).apply}
    assert "Deployment" not in kinds
    cluster = FakeCluster()
    cluster.settle(service(""))
    gone = cluster.plan(service("router: {mode: None}", generation=2)).delete
    assert {("Deployment", "smol-router"), ("ConfigMap", "smol-router")} <= set(gone)


def test_the_admin_token_is_the_same_after_a_restart_and_another_for_another_service():
    one = services.admin_secret(service(""), SETTINGS)
    assert one == services.admin_secret(service(""), SETTINGS)
    other = service("").model_copy(update={"metadata": service("").metadata.model_copy(update={"uid": "u-2"})})
    assert services.admin_secret(other, SETTINGS)["stringData"] != one["stringData"]
    assert len(one["stringData"]["token"]) == 64
