"""What helm makes of the charts, with each helm that is found (KVERN_HELM, PATH, the cache of the tests' cluster)."""

import base64
import json
import re
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_tool import CHARTS, CONFIG, ROOT, Helm, container, documents, environment, generate, kinds, one
from rights import granted, needed, restricted_problems
from wrong_values import CONTRADICTIONS, WRONG_VALUES

from kvern_operator import __version__

POD_MONITORS = ("monitoring.coreos.com/v1/PodMonitor",)
EVERYTHING: dict[str, Any] = {
    "watchNamespaces": ["team-a", "team-b"],
    "replicas": 2,
    "images": {
        "operator": {"repository": "registry.example:5000/kvern/operator", "tag": "1.2.3"},
        "engine": {"repository": "registry.example:5000/kvern/engine", "digest": "sha256:" + "0a" * 32},
        "pullPolicy": "Always",
        "pullSecrets": ["registry-example", "other"],
    },
    "clusterDomain": "cluster.example",
    "resyncSeconds": 60,
    "logging": {"format": "text", "level": "debug"},
    "serviceAccount": {"annotations": {"example.com/a": "b"}},
    "podMonitor": {"interval": "15s", "labels": {"prometheus": "main"}},
    "networkPolicy": {
        "metricsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        "restrictEgress": True,
        "apiServerPorts": [443, 8443],
    },
    "resources": {"limits": {"cpu": 2}},
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"key": "dedicated", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {
                    "topologyKey": "kubernetes.io/hostname",
                    "labelSelector": {"matchLabels": {"app.kubernetes.io/component": "operator"}},
                }
            ]
        }
    },
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "priorityClassName": "system-cluster-critical",
    "podAnnotations": {"example.com/note": "true"},
    "podLabels": {"team": "platform"},
    "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy.example:3128"}],
    "commonLabels": {"cost-center": "42"},
}


@pytest.mark.parametrize("chart", ["kvern", "kvern-crds"])
def test_lint(helm: Helm, chart: str) -> None:
    done = helm.run("lint", "--strict", str(CHARTS / chart))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout


def test_lint_with_everything_on(helm: Helm) -> None:
    done = helm.run("lint", "--strict", str(CHARTS / "kvern"), "--values", "-", input=json.dumps(EVERYTHING))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("chart", ["kvern", "kvern-crds"])
def test_package_holds_what_the_folder_does(helm: Helm, chart: str, tmp_path: Path) -> None:
    done = helm.run("package", str(CHARTS / chart), "--destination", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (package,) = tmp_path.glob("*.tgz")
    with tarfile.open(package) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    folder = {str(path.relative_to(CHARTS / chart)) for path in (CHARTS / chart).rglob("*") if path.is_file()}
    assert folder - inside == ({"files/kustomization.yaml"} if chart == "kvern-crds" else set())
    unpacked = helm.run("template", chart, str(package), "--show-only", SHOWN[chart], "--namespace", "kvern-system")
    assert documents(unpacked.stdout) == documents(
        helm.run("template", chart, str(CHARTS / chart), "--show-only", SHOWN[chart], "-n", "kvern-system").stdout
    )


def test_charts_can_be_parts_of_another(helm: Helm, tmp_path: Path) -> None:
    """Closed schemas must let pass what Helm itself hands down to subcharts."""
    (tmp_path / "Chart.yaml").write_text("apiVersion: v2\nname: platform\nversion: 1.0.0\n")
    values = {"global": {"region": "north"}, "kvern": {"replicas": 2}}
    (tmp_path / "values.yaml").write_text(json.dumps(values))
    for chart in ("kvern", "kvern-crds"):
        shutil.copytree(CHARTS / chart, tmp_path / "charts" / chart)
    done = helm.run("template", "platform", str(tmp_path), "--namespace", "kvern-system")
    assert done.returncode == 0, done.stderr
    objects = documents(done.stdout)
    assert one(objects, "Deployment")["spec"]["replicas"] == 2
    assert {"CustomResourceDefinition", "PodDisruptionBudget"} <= kinds(objects)


SHOWN = {"kvern": "templates/tests/health.yaml", "kvern-crds": "templates/crd.yaml"}  # those that read a file


def test_kustomize_base_is_the_default_rendering(helm: Helm) -> None:
    for name, text in generate.kustomize_files(helm.path).items():
        assert documents((CONFIG / name).read_text()) == documents(text), f"config/{name}: run `make generate`"


# ---------------------------------------------------------------- kvern-crds


def test_resource_is_kept_and_unchanged(helm: Helm) -> None:
    made = one(helm.template(chart="kvern-crds"), "CustomResourceDefinition")
    assert made["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert made["metadata"].pop("labels")["app.kubernetes.io/part-of"] == "kvern"
    assert made == yaml.safe_load((ROOT / "crds" / generate.CRD).read_text())


def test_resource_goes_where_that_is_asked_for(helm: Helm) -> None:
    objects = helm.template({"keep": False, "userRoles": {"create": False}}, chart="kvern-crds")
    assert [o["kind"] for o in objects] == ["CustomResourceDefinition"]
    assert "annotations" not in objects[0]["metadata"]


def test_labels_of_yours_are_on_the_resource(helm: Helm) -> None:
    for obj in helm.template({"commonLabels": {"a": "b"}}, chart="kvern-crds"):
        assert obj["metadata"]["labels"]["a"] == "b"
        assert obj["metadata"]["labels"]["app.kubernetes.io/name"] == "kvern-crds"


# ---------------------------------------------------------------- rights


def test_rights_of_a_cluster_wide_install(render: Any) -> None:
    objects = render()
    assert granted(o for o in objects if o["kind"] == "ClusterRole") == needed(cluster_wide=True)
    assert {r[1] for r in granted(o for o in objects if o["kind"] == "Role")} == {"leases"}


def test_rights_of_a_namespaced_install(render: Any) -> None:
    objects = render({"watchNamespaces": ["team-a", "team-b"]})
    assert environment(objects)["KVERN_POD_MONITORS"] == "false"
    assert not [k for k in kinds(objects) if k.startswith("Cluster")]
    for namespace in ("team-a", "team-b"):
        roles = [o for o in objects if o["kind"] == "Role" and o["metadata"]["namespace"] == namespace]
        assert granted(roles) == needed(cluster_wide=False, pod_monitors=False)
        bindings = [o for o in objects if o["kind"] == "RoleBinding" and o["metadata"]["namespace"] == namespace]
        assert {b["roleRef"]["name"] for b in bindings} == {r["metadata"]["name"] for r in roles}
        assert all(b["subjects"][0]["namespace"] == "kvern-system" for b in bindings)
    assert environment(objects)["KVERN_WATCH_NAMESPACES"] == "team-a,team-b"


def test_rights_to_pod_monitors(render: Any) -> None:
    """Asked for where they may be of use; whoever installs it in a namespace has to have them himself."""
    known = render({"watchNamespaces": ["team-a"]}, api=POD_MONITORS)
    roles = [o for o in known if o["kind"] == "Role" and o["metadata"]["namespace"] == "team-a"]
    assert granted(roles) == needed(cluster_wide=False)
    assert environment(known)["KVERN_POD_MONITORS"] == "true"
    unwanted = render({"podMonitor": {"create": False}}, api=POD_MONITORS)
    roles = [o for o in unwanted if o["kind"] == "ClusterRole"]
    assert granted(roles) == needed(cluster_wide=True, pod_monitors=False)
    assert environment(unwanted)["KVERN_POD_MONITORS"] == "false"


@pytest.mark.parametrize("namespaces", [[], ["team-a"]], ids=["cluster-wide", "namespaced"])
def test_one_role_a_concern_and_no_star(render: Any, namespaces: list[str]) -> None:
    objects = render({"watchNamespaces": namespaces})
    roles = [o for o in objects if o["kind"] in ("Role", "ClusterRole")]
    assert "*" not in json.dumps([r["rules"] for r in roles])
    assert {o["metadata"]["name"].removeprefix("kvern-operator-") for o in roles} == {
        "resource",
        "children",
        "routers",
        "causes",
        "secrets",
        "events",
        "lease",
        *([] if namespaces else ["definitions", "monitors", "nodes"]),
    }
    assert {r for r in granted(roles) if r[1] == "secrets"} == {("", "secrets", "create")}


def test_roles_of_yours(render: Any) -> None:
    objects = render({"rbac": {"create": False}, "serviceAccount": {"create": False, "name": "mine"}})
    assert not [o for o in objects if o["apiVersion"].startswith("rbac.")]
    assert [o["metadata"]["name"] for o in objects if o["kind"] == "ServiceAccount"] == ["kvern-test"]
    assert one(objects, "Deployment")["spec"]["template"]["spec"]["serviceAccountName"] == "mine"


# ---------------------------------------------------------------- the operator


def test_names_and_labels(render: Any) -> None:
    for obj in render():
        labels = obj["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "kvern"
        assert labels["app.kubernetes.io/instance"] == "kvern"
        assert labels["app.kubernetes.io/version"] == __version__
        assert labels["app.kubernetes.io/managed-by"] == "Helm"
        assert labels["app.kubernetes.io/component"] in ("operator", "test")
        assert obj["metadata"]["name"].startswith("kvern-")


def test_names_of_another_release(helm: Helm) -> None:
    objects = helm.template(release="prod")
    assert one(objects, "Deployment")["metadata"]["name"] == "prod-kvern-operator"
    assert environment(objects)["KVERN_LEASE_NAME"] == "prod-kvern-operator"
    lease = one(objects, "Role")["rules"][1]["resourceNames"]
    assert lease == ["prod-kvern-operator"]
    labels = one(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert labels["app.kubernetes.io/name"] == "kvern"  # by which services' NetworkPolicies know it
    long = helm.template({"fullnameOverride": "x" * 63})
    assert all(len(o["metadata"]["name"]) <= 63 for o in long)


def test_pods_conform_to_restricted(render: Any) -> None:
    for values in ({}, EVERYTHING):
        objects = render(values)
        assert restricted_problems(one(objects, "Deployment")["spec"]["template"]["spec"]) == []
        assert restricted_problems(one(objects, "Pod")["spec"]) == []


def test_probes(render: Any) -> None:
    box = container(render())
    ports = {p["name"]: p["containerPort"] for p in box["ports"]}
    assert ports == {"health": 8080}
    paths = {name: box[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert all(p["port"] == "health" for p in paths.values())
    assert [paths[n]["path"] for n in ("startup", "liveness", "readiness")] == ["/healthz", "/healthz", "/readyz"]


def test_images(render: Any) -> None:
    assert container(render())["image"] == f"ghcr.io/kvern/operator:{__version__}"
    objects = render(EVERYTHING)
    assert container(objects)["image"] == "registry.example:5000/kvern/operator:1.2.3"
    assert container(objects)["imagePullPolicy"] == "Always"
    env = environment(objects)
    assert env["KVERN_OPERATOR_IMAGE"] == container(objects)["image"]
    assert env["KVERN_ENGINE_IMAGE"] == "registry.example:5000/kvern/engine@sha256:" + "0a" * 32
    assert env["KVERN_IMAGE_PULL_POLICY"] == "Always"
    assert env["KVERN_IMAGE_PULL_SECRETS"] == "registry-example,other"
    pods = [one(objects, "Deployment")["spec"]["template"]["spec"], one(objects, "Pod")["spec"]]
    assert all(p["imagePullSecrets"] == [{"name": "registry-example"}, {"name": "other"}] for p in pods)
    both = {"images": {"operator": {"tag": "1", "digest": "sha256:" + "0b" * 32}}}
    assert container(render(both))["image"] == "ghcr.io/kvern/operator:1@sha256:" + "0b" * 32


def test_what_is_set_arrives(render: Any) -> None:
    objects = render(EVERYTHING, api=POD_MONITORS)
    template = one(objects, "Deployment")["spec"]["template"]
    for name in ("nodeSelector", "tolerations", "affinity", "priorityClassName"):
        assert template["spec"][name] == EVERYTHING[name], name
    own = one(objects, "Deployment")["spec"]["selector"]
    assert template["spec"]["topologySpreadConstraints"] == [
        {**EVERYTHING["topologySpreadConstraints"][0], "labelSelector": own}
    ]
    assert template["metadata"]["annotations"]["example.com/note"] == "true"
    assert template["metadata"]["labels"]["team"] == "platform"
    assert "team" not in one(objects, "Deployment")["spec"]["selector"]["matchLabels"]
    env = environment(objects)
    assert env["HTTPS_PROXY"] == "http://proxy.example:3128"
    assert env["KVERN_CLUSTER_DOMAIN"] == "cluster.example"
    assert env["KVERN_RESYNC_SECONDS"] == "60"
    assert (env["KVERN_LOG_FORMAT"], env["KVERN_LOG_LEVEL"]) == ("text", "debug")
    assert container(objects)["resources"]["limits"] == {"cpu": 2, "memory": "512Mi"}
    assert one(objects, "ServiceAccount", "kvern-operator")["metadata"]["annotations"] == {"example.com/a": "b"}
    assert all(o["metadata"]["labels"]["cost-center"] == "42" for o in objects)


def test_large_resync_is_written_as_an_integer(render: Any) -> None:
    assert environment(render({"resyncSeconds": 86400}))["KVERN_RESYNC_SECONDS"] == "86400"


def test_budget_and_spread_with_two_replicas_only(render: Any) -> None:
    alone, pair = render(), render({"replicas": 2})
    assert "PodDisruptionBudget" not in kinds(alone)
    assert "affinity" not in one(alone, "Deployment")["spec"]["template"]["spec"]
    deployment = one(pair, "Deployment")
    budget = one(pair, "PodDisruptionBudget")["spec"]
    assert budget["maxUnavailable"] == 1
    assert budget["selector"] == deployment["spec"]["selector"]
    (term,) = deployment["spec"]["template"]["spec"]["affinity"]["podAntiAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    assert term["podAffinityTerm"]["labelSelector"] == deployment["spec"]["selector"]
    without = render({"replicas": 2, "podDisruptionBudget": {"create": False}})
    assert "PodDisruptionBudget" not in kinds(without)


def test_selectors_meet_the_pods(render: Any) -> None:
    objects = render({"replicas": 2}, api=POD_MONITORS)
    labels = one(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    selectors = [
        one(objects, "Deployment")["spec"]["selector"]["matchLabels"],
        one(objects, "Service")["spec"]["selector"],
        one(objects, "PodMonitor")["spec"]["selector"]["matchLabels"],
        one(objects, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
    ]
    assert all(s.items() <= labels.items() for s in selectors)
    tested = one(objects, "Pod")["metadata"]["labels"]
    assert not any(s.items() <= tested.items() for s in selectors), "the test's pod is taken for an operator"


def test_pod_monitor_where_the_cluster_knows_it(render: Any) -> None:
    assert "PodMonitor" not in kinds(render())
    assert "PodMonitor" not in kinds(render({"podMonitor": {"create": False}}, api=POD_MONITORS))
    monitor = one(render(EVERYTHING, api=POD_MONITORS), "PodMonitor")
    assert monitor["metadata"]["labels"]["prometheus"] == "main"
    assert monitor["spec"]["podMetricsEndpoints"] == [{"port": "health", "path": "/metrics", "interval": "15s"}]


def test_network_policy(render: Any) -> None:
    assert "NetworkPolicy" not in kinds(render({"networkPolicy": {"create": False}}))
    plain = one(render(), "NetworkPolicy")["spec"]
    assert plain["policyTypes"] == ["Ingress"]
    assert plain["ingress"] == [{"ports": [{"port": "health", "protocol": "TCP"}]}]
    objects = render(EVERYTHING)
    strict = one(objects, "NetworkPolicy")["spec"]
    assert strict["policyTypes"] == ["Ingress", "Egress"]
    peers = strict["ingress"][0]["from"]
    assert peers[0] == EVERYTHING["networkPolicy"]["metricsFrom"][0]
    tested = one(objects, "Pod")["metadata"]["labels"]
    assert peers[1]["podSelector"]["matchLabels"].items() <= tested.items()
    ports = [[p["port"] for p in rule["ports"]] for rule in strict["egress"]]
    assert ports == [[53, 53], [443, 8443], [8000, 8001]]
    (peer,) = strict["egress"][2]["to"]
    assert peer["namespaceSelector"]["matchExpressions"][0]["values"] == ["team-a", "team-b"]
    everywhere = one(render({"networkPolicy": {"restrictEgress": True}}), "NetworkPolicy")["spec"]["egress"][2]["to"]
    assert everywhere[0]["namespaceSelector"] == {}


# ---------------------------------------------------------------- the operator's key


def test_key_is_random_kept_and_mounted(render: Any) -> None:
    first, second = one(render(), "Secret"), one(render({"resyncSeconds": 451}), "Secret")
    keys = {base64.b64decode(s["data"]["key"]).decode() for s in (first, second)}
    assert len(keys) == 2
    assert all(re.fullmatch("[A-Za-z0-9]{64}", key) for key in keys)
    assert first["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert first["immutable"] is True
    assert mounted_key(render()) == first["metadata"]["name"] == "kvern-operator-key"


def mounted_key(objects: list[Any]) -> str:
    volumes = {v["name"]: v for v in one(objects, "Deployment")["spec"]["template"]["spec"]["volumes"]}
    folder = {m["name"]: m["mountPath"] for m in container(objects)["volumeMounts"]}["operator-key"]
    (item,) = volumes["operator-key"]["secret"]["items"]
    assert environment(objects)["KVERN_OPERATOR_KEY_FILE"] == f"{folder}/{item['path']}"
    return volumes["operator-key"]["secret"]["secretName"]


def test_key_of_yours(render: Any) -> None:
    objects = render({"operatorKey": {"existingSecret": "mine"}})
    assert "Secret" not in kinds(objects)
    assert mounted_key(objects) == "mine"


# ---------------------------------------------------------------- what helm says


@pytest.mark.parametrize(("wrong", "named"), WRONG_VALUES[::3], ids=[json.dumps(w)[:60] for w, _ in WRONG_VALUES[::3]])
def test_wrong_values_are_named(helm: Helm, wrong: dict[str, Any], named: list[str]) -> None:
    done = helm.try_template(wrong)
    assert done.returncode != 0
    assert all(word in done.stderr for word in named), done.stderr


@pytest.mark.parametrize(("wrong", "message"), CONTRADICTIONS, ids=[m[:40] for _, m in CONTRADICTIONS])
def test_contradictions_are_named(helm: Helm, wrong: dict[str, Any], message: str) -> None:
    done = helm.try_template(wrong)
    assert done.returncode != 0
    assert message in done.stderr


def test_notes_say_what_to_do_first(helm: Helm) -> None:
    text = helm.notes()
    assert "this cluster does not know InferenceService yet" in text
    for command in ("kubectl apply -n default", "kubectl wait -n default", "kubectl create --raw"):
        assert command in text
    assert "every namespace" in text
    assert max(map(len, text.splitlines())) <= 120


def test_notes_of_a_namespaced_install(helm: Helm) -> None:
    text = helm.notes({"watchNamespaces": ["team-a", "team-b"], "clusterDomain": "example.org"})
    assert "the namespaces team-a, team-b" in text
    assert "kubectl apply -n team-a" in text
    assert "http://smollm2.team-a.svc.example.org/v1" in text


def test_notes_manifest_is_valid(helm: Helm) -> None:
    """The manifest in the notes is one that the operator takes."""
    from kvern_operator.api.load import parse_service

    manifest = re.search(r"<<END\n(.*?)\nEND", helm.notes(), re.DOTALL)
    assert manifest is not None
    document = yaml.safe_load(manifest.group(1))
    assert parse_service(document).spec.resources.gpus_per_pod == 0


def test_notes_of_the_resource(helm: Helm) -> None:
    text = helm.notes(chart="kvern-crds")
    assert "kubectl explain infs.spec" in text
    assert "kubectl delete crd" in text
    assert "kubectl delete crd" not in helm.notes({"keep": False}, chart="kvern-crds")
