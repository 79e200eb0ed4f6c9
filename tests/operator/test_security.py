"""Pod Security `restricted`: each field that the profile demands, on every container of every pod that is made; and who
may reach the pods."""

from collections.abc import Iterator
from typing import Any

import pytest
from fake_cluster import FakeCluster, service

from kvern_operator.api.load import load_text
from kvern_operator.desired import cache, engine, meta, network, router
from kvern_operator.desired.layout import wanted_layout
from kvern_operator.settings import Settings

SETTINGS = Settings(operator_key=b"k", namespace="kvern-system")
SPECS = (
    "",
    "resources: {gpusPerPod: 2, cpu: 2, memory: 4Gi}",
    "cache: {claimName: c}",
    "router: {apiKeysSecretRef: {name: keys}}",
)


def templates(spec: str) -> Iterator[dict[str, Any]]:
    svc = service(spec)
    yield engine.stateful_set(svc, "smol-r0", wanted_layout(svc.spec), SETTINGS)["spec"]["template"]
    yield router.deployment(svc, 2, SETTINGS)["spec"]["template"]


def download() -> dict[str, Any]:
    """The template of the Job that brings a model into a claim."""
    head = "apiVersion: kvern.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: smol, namespace: team-a, uid: u-1}"
    model = "{uri: 'hf://org/name', secretRef: {name: hub}}"
    template: dict[str, Any] = cache.pod_template(
        load_text(f"{head}\nspec: {{model: {model}, cache: {{claimName: c}}}}\n"), SETTINGS
    )
    return template


def pods() -> Iterator[dict[str, Any]]:
    yield from (template["spec"] for spec in SPECS for template in templates(spec))
    yield download()["spec"]


def containers() -> Iterator[dict[str, Any]]:
    return (c for pod in pods() for c in (*pod["containers"], *pod.get("initContainers", ())))


def test_no_host_namespaces_and_no_host_ports():
    for pod in pods():
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    for one in containers():
        assert all("hostPort" not in port for port in one.get("ports", ()))


def test_only_volume_types_that_the_profile_allows():
    allowed = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
    for pod in pods():
        for volume in pod["volumes"]:
            assert set(volume) - {"name"} <= allowed, volume


def test_no_privileges():
    for one in containers():
        assert one["securityContext"]["allowPrivilegeEscalation"] is False
        assert not one["securityContext"].get("privileged")
        assert "procMount" not in one["securityContext"]


def test_capabilities_are_dropped_and_none_added():
    for one in containers():
        assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_not_root():
    for pod in pods():
        assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] == 65532
    for one in containers():
        assert one["securityContext"].get("runAsNonRoot", True) and one["securityContext"].get("runAsUser", 1)


def test_seccomp_is_the_runtimes_default():
    for pod in pods():
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert all("seccompProfile" not in one["securityContext"] for one in containers())


def test_nothing_of_selinux_apparmor_or_sysctls():
    for pod in pods():
        assert not {"seLinuxOptions", "sysctls", "appArmorProfile", "windowsOptions"} & pod["securityContext"].keys()


def test_beyond_the_profile_the_root_is_read_only_and_no_token_is_mounted():
    for pod in pods():
        assert pod["automountServiceAccountToken"] is False and pod["serviceAccountName"] == "smol-pods"
    for one in containers():
        assert one["securityContext"]["readOnlyRootFilesystem"] is True


def test_the_account_has_no_token_either():
    plan = FakeCluster(settings=SETTINGS).plan(service(""))
    (account,) = [o for o in plan.apply if o["kind"] == "ServiceAccount"]
    assert account["automountServiceAccountToken"] is False and account["metadata"]["name"] == "smol-pods"


def test_pull_policy_and_secrets_come_from_the_operators_settings():
    settings = Settings(image_pull_policy="IfNotPresent", image_pull_secrets=("one", "two"))
    svc = service("")
    for template in (
        engine.pod_template(svc, "smol-r0", {}, settings),
        router.pod_template(svc, {}, settings),
    ):
        assert template["spec"]["imagePullSecrets"] == [{"name": "one"}, {"name": "two"}]
        assert [c["imagePullPolicy"] for c in template["spec"]["containers"]] == ["IfNotPresent"]


def test_pods_prefer_different_nodes():
    for component, template in zip(("engine", "router"), templates(""), strict=True):
        (rule,) = template["spec"]["topologySpreadConstraints"]
        assert rule["whenUnsatisfiable"] == "ScheduleAnyway" and rule["topologyKey"] == "kubernetes.io/hostname"
        wanted = rule["labelSelector"]["matchLabels"]
        assert wanted.items() <= template["metadata"]["labels"].items()
        assert wanted[meta.COMPONENT_LABEL] == component


# ---------------------------------------------------------------- who may reach the pods


def allows(policy: dict[str, Any], port: int, pod: dict[str, str], namespace: dict[str, str], own: str) -> bool:
    """Whether a policy lets a pod (its labels, those of its namespace) reach a port; NetworkPolicy's own rules.
    `own`: the name of the policy's namespace."""

    def matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
        return selector.get("matchLabels", {}).items() <= labels.items()

    def is_peer(peer: dict[str, Any]) -> bool:
        here = matches(peer["namespaceSelector"], namespace) if "namespaceSelector" in peer else own == namespace[NAME]
        return here and matches(peer.get("podSelector", {}), pod)

    for rule in policy["spec"]["ingress"]:
        ports = rule.get("ports")
        fits = ports is None or port in [p["port"] for p in ports]
        if fits and ("from" not in rule or any(is_peer(peer) for peer in rule["from"])):
            return True
    return False


NAME = network.NAMESPACE_NAME
TEAM, OTHER, SYSTEM = ({NAME: name} for name in ("team-a", "other", "kvern-system"))
ROUTER = {meta.SERVICE_LABEL: "smol", meta.COMPONENT_LABEL: "router"}
OPERATOR = {"app.kubernetes.io/name": "kvern", "app.kubernetes.io/component": "operator"}
PROMETHEUS = {"app.kubernetes.io/name": "prometheus"}
APP = {"app": "chat"}


@pytest.mark.parametrize(
    ("pod", "namespace", "http", "admin"),
    [
        (ROUTER, TEAM, True, False),
        (ROUTER, OTHER, False, False),  # a router of the same name elsewhere
        ({**ROUTER, meta.SERVICE_LABEL: "another"}, TEAM, False, False),
        (OPERATOR, SYSTEM, True, True),
        (OPERATOR, OTHER, False, False),  # anybody may label a pod in a namespace of his own
        (PROMETHEUS, OTHER, True, False),
        ({"kvern.dev/metrics-reader": "true"}, OTHER, True, False),
        (APP, TEAM, False, False),
        (APP, OTHER, False, False),
    ],
)
def test_engines_take_requests_from_the_router_and_orders_from_the_operator(pod, namespace, http, admin):
    policy = network.engine_policy(service(""), SETTINGS)
    assert policy["spec"]["podSelector"]["matchLabels"] == meta.selector(service(""), meta.ENGINE)
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    assert allows(policy, 8000, pod, namespace, "team-a") is http
    assert allows(policy, 8001, pod, namespace, "team-a") is admin
    assert not allows(policy, 29501, pod, namespace, "team-a")


def test_an_operator_of_the_services_own_namespace_is_let_in_too():
    policy = network.engine_policy(service(""), Settings(namespace="team-a"))
    assert allows(policy, 8001, OPERATOR, TEAM, "team-a") and not allows(policy, 8001, OPERATOR, SYSTEM, "team-a")


def test_without_a_router_clients_reach_the_engines_but_not_the_admin_port():
    policy = network.engine_policy(service("router: {mode: None}"), SETTINGS)
    assert allows(policy, 8000, APP, OTHER, "team-a") and not allows(policy, 8001, APP, OTHER, "team-a")


def test_anybody_reaches_the_router_on_its_port_alone():
    policy = network.router_policy(service(""))
    assert policy["spec"]["podSelector"]["matchLabels"] == meta.selector(service(""), meta.ROUTER)
    assert allows(policy, 8000, APP, OTHER, "team-a") and not allows(policy, 8001, APP, OTHER, "team-a")


def test_pods_of_one_replica_reach_each_other_on_every_port():
    plan = FakeCluster(settings=SETTINGS).plan(service("replicas: 2, resources: {gpusPerPod: 8, nodesPerReplica: 2}"))
    found = {o["metadata"]["name"]: o for o in plan.apply if o["kind"] == "NetworkPolicy"}
    assert sorted(found) == ["smol-engines", "smol-r0", "smol-r1", "smol-router"]
    mine, other = ({meta.REPLICA_LABEL: name} for name in ("smol-r0", "smol-r1"))
    assert allows(found["smol-r0"], 43210, mine, TEAM, "team-a")
    assert not allows(found["smol-r0"], 43210, other, TEAM, "team-a")
    assert not allows(found["smol-r0"], 43210, mine, OTHER, "team-a")


def test_policies_name_ports_that_the_pods_have():
    for template in templates(""):
        ports = {p["containerPort"] for c in template["spec"]["containers"] for p in c["ports"]}
        assert ports in ({engine.HTTP_PORT}, {engine.HTTP_PORT, engine.ADMIN_PORT})


# ---------------------------------------------------------------- monitoring


def test_a_pod_monitor_is_made_where_the_cluster_knows_the_kind():
    svc = service("")
    assert not [o for o in FakeCluster().plan(svc).apply if o["kind"] == "PodMonitor"]
    cluster = FakeCluster(settings=Settings(operator_key=b"k", pod_monitors=True))
    (monitor,) = [o for o in cluster.plan(svc).apply if o["kind"] == "PodMonitor"]
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    for template in templates(""):
        assert monitor["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["port"] in [p["name"] for p in template["spec"]["containers"][0]["ports"]]
    cluster.settle(svc)
    assert cluster.plan(svc).empty
