"""The charts' sources and the kustomize base, checked without helm."""

import json
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
import yaml
from helm_tool import CHARTS, CONFIG, ROOT, container, generate, kubectl, one
from rights import granted, needed, restricted_problems
from wrong_values import WRONG_VALUES

from kvern_operator import __version__

CHART_NAMES = ["kvern", "kvern-crds"]


def schema_of(chart: str) -> dict[str, Any]:
    return json.loads((CHARTS / chart / "values.schema.json").read_text())


def values_of(chart: str) -> dict[str, Any]:
    return yaml.safe_load((CHARTS / chart / "values.yaml").read_text())


def base(*names: str) -> list[dict[str, Any]]:
    """The objects in files of config/."""
    found = []
    for name in names or ("namespace.yaml", "roles.yaml", "operator.yaml"):
        found += [d for d in yaml.safe_load_all((CONFIG / name).read_text()) if d]
    return found


def merged(defaults: Any, more: Any) -> Any:
    """As helm merges values: maps by key, all else replaced."""
    if isinstance(defaults, dict) and isinstance(more, dict):
        return {**defaults, **{k: merged(defaults.get(k), v) for k, v in more.items()}}
    return more


# ---------------------------------------------------------------- generated files


def test_resource_is_the_generated_one() -> None:
    ours = (CHARTS / "kvern-crds" / "files" / generate.CRD).read_text()
    assert ours == (ROOT / "crds" / generate.CRD).read_text(), "run `make generate`"


@pytest.mark.parametrize("chart", CHART_NAMES)
def test_readme_lists_the_values(chart: str) -> None:
    readme = (CHARTS / chart / "README.md").read_text()
    assert readme == generate.with_table(readme, generate.values_table(CHARTS / chart)), "run `make generate`"


@pytest.mark.parametrize("chart", CHART_NAMES)
def test_versions_are_the_package_s(chart: str) -> None:
    about = yaml.safe_load((CHARTS / chart / "Chart.yaml").read_text())
    assert (about["version"], about["appVersion"]) == (__version__, __version__)


# ---------------------------------------------------------------- values and their schema


def objects_in(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """(path, schema) of every schema that describes an object."""
    if isinstance(schema, dict):
        if schema.get("type") == "object":
            yield path, schema
        for key, value in schema.items():
            yield from objects_in(value, f"{path}/{key}")
    elif isinstance(schema, list):
        for i, value in enumerate(schema):
            yield from objects_in(value, f"{path}/{i}")


@pytest.mark.parametrize("chart", CHART_NAMES)
def test_schema_is_closed_and_described(chart: str) -> None:
    for path, schema in objects_in(schema_of(chart)):
        if path == "/properties/global":
            continue  # the parent chart's, whatever it holds
        typed = isinstance(schema.get("additionalProperties"), dict)
        assert schema.get("additionalProperties") is False or (typed and "properties" not in schema), path
        for name, part in schema.get("properties", {}).items():
            assert part.get("description", "").endswith("."), f"{path}: {name} has no description"


@pytest.mark.parametrize("chart", CHART_NAMES)
def test_every_value_is_in_values_yaml(chart: str) -> None:
    root = schema_of(chart)

    def compare(schema: dict[str, Any], values: Any, path: str) -> None:
        schema = generate.resolved(schema, root)
        if isinstance(values, dict) and values and "properties" in schema:
            names = set(schema["properties"]) - {"global", "ephemeral-storage"}
            assert names == set(values), path
            for name in names:
                compare(schema["properties"][name], values[name], f"{path}.{name}")

    compare(root, values_of(chart), chart)


@pytest.mark.parametrize("chart", CHART_NAMES)
def test_defaults_are_valid(chart: str) -> None:
    jsonschema_rs.validator_for(schema_of(chart)).validate(values_of(chart))


@pytest.mark.parametrize(("wrong", "named"), WRONG_VALUES, ids=[json.dumps(w)[:60] for w, _ in WRONG_VALUES])
def test_wrong_values_are_refused(wrong: dict[str, Any], named: list[str]) -> None:
    validator = jsonschema_rs.validator_for(schema_of("kvern"))
    problems = [
        f"{'.'.join(map(str, e.instance_path))}: {e}" for e in validator.iter_errors(merged(values_of("kvern"), wrong))
    ]
    assert problems
    text = "\n".join(problems)
    assert all(word in text for word in named), text


def test_values_that_people_use_are_valid() -> None:
    values = {
        "watchNamespaces": ["a", "team-b"],
        "replicas": 2,
        "global": {"anything": {"goes": 1}},
        "images": {
            "operator": {"repository": "localhost:5000/kvern/operator", "digest": "sha256:" + "0a" * 32},
            "engine": {"repository": "kvern/engine", "tag": "e2e"},
            "pullSecrets": ["registry.example"],
        },
        "resources": {"limits": {"cpu": 2, "memory": "1Gi"}, "requests": {"cpu": 0.5, "memory": "0.5Gi"}},
        "tolerations": [{"operator": "Exists"}, {"key": "a", "value": "b", "effect": "NoSchedule"}],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": [{"key": "a", "operator": "In", "values": ["b"]}]}]
                }
            }
        },
        "extraEnv": [{"name": "HTTPS_PROXY", "valueFrom": {"secretKeyRef": {"name": "proxy", "key": "url"}}}],
        "networkPolicy": {"metricsFrom": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]},
    }
    jsonschema_rs.validator_for(schema_of("kvern")).validate(merged(values_of("kvern"), values))


# ---------------------------------------------------------------- the kustomize base


def operator_roles() -> list[dict[str, Any]]:
    return [
        o
        for o in base("roles.yaml")
        if o["kind"] == "ClusterRole" and o["metadata"]["name"].startswith("kvern-operator-")
    ]


def test_operator_may_do_what_it_needs_and_nothing_more() -> None:
    assert granted(operator_roles()) == needed(cluster_wide=True)


def test_no_star_in_any_role() -> None:
    for role in base("roles.yaml"):
        assert "*" not in json.dumps(role.get("rules", [])), role["metadata"]["name"]


def test_secrets_can_only_be_created() -> None:
    roles = [o for o in base("roles.yaml") if o["kind"] in ("ClusterRole", "Role")]
    assert {r for r in granted(roles) if "secrets" in r[1]} == {("", "secrets", "create")}
    assert not [
        r for r in granted(roles) if r[1] in ("roles", "clusterroles", "rolebindings", "pods/exec", "nodes/proxy")
    ]
    assert {r for r in granted(roles) if r[1] == "nodes"} == {("", "nodes", "list")}


def test_lease_is_bound_to_its_name() -> None:
    rules = one(base("roles.yaml"), "Role")["rules"]
    assert [(r["verbs"], r.get("resourceNames")) for r in rules] == [
        (["create"], None),
        (["get", "update"], ["kvern-operator"]),
    ]


def test_every_role_is_bound_to_the_operator() -> None:
    objects = base("roles.yaml")
    for kind in ("Role", "ClusterRole"):
        roles = {o["metadata"]["name"] for o in objects if o["kind"] == kind and "operator" in o["metadata"]["name"]}
        bindings = [o for o in objects if o["kind"] == f"{kind}Binding"]
        assert roles == {b["roleRef"]["name"] for b in bindings}
        for binding in bindings:
            account = {"kind": "ServiceAccount", "name": "kvern-operator", "namespace": "kvern-system"}
            assert binding["subjects"] == [account]


def test_people_s_roles_reach_the_cluster_s_own() -> None:
    roles = {o["metadata"]["name"]: o for o in base("roles.yaml") if o["kind"] == "ClusterRole"}
    for name in ("view", "edit", "admin"):
        assert roles[f"kvern-{name}"]["metadata"]["labels"][f"rbac.authorization.k8s.io/aggregate-to-{name}"] == "true"
    writes = {v for r in roles["kvern-view"]["rules"] for v in r["verbs"]}
    assert writes == {"get", "list", "watch"}
    # Nobody can grant what he does not have: admin, which includes edit and view, covers what the operator needs.
    covered = granted([roles[f"kvern-{name}"] for name in ("view", "edit", "admin")])
    assert {r for r in needed(cluster_wide=False) if r[0] == "kvern.dev"} <= covered


def test_pods_conform_to_restricted() -> None:
    assert (
        one(base("namespace.yaml"), "Namespace")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
        == "restricted"
    )
    assert restricted_problems(one(base("operator.yaml"), "Deployment")["spec"]["template"]["spec"]) == []


def test_services_network_policies_know_the_operator() -> None:
    labels = one(base("operator.yaml"), "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert labels["app.kubernetes.io/name"] == "kvern"
    assert labels["app.kubernetes.io/component"] == "operator"


def test_helm_leaves_no_trace() -> None:
    assert "helm" not in "".join((CONFIG / name).read_text() for name in ("roles.yaml", "operator.yaml")).lower()


def test_operator_reads_what_the_chart_sets() -> None:
    """Every variable in the operator's configuration has a value in the chart, and the other way round."""
    read = set(re.findall(r"\bKVERN_[A-Z_]+\b", (ROOT / "operator/kvern_operator/config.py").read_text()))
    written = {e["name"] for e in container(base("operator.yaml"))["env"]}
    assert written <= read
    assert read - written <= {"KVERN_HEALTH_PORT"}  # for development; the chart's probes know the port


@pytest.mark.skipif(kubectl() is None, reason="no kubectl found")
def test_kustomize_builds_the_base() -> None:
    done = subprocess.run([str(kubectl()), "kustomize", str(CONFIG)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    objects = [d for d in yaml.safe_load_all(done.stdout) if d]
    assert one(objects, "CustomResourceDefinition")["metadata"]["name"] == "inferenceservices.kvern.dev"
    namespaced = [o for o in objects if "namespace" in o["metadata"]]
    assert {o["metadata"]["namespace"] for o in namespaced} == {"kvern-system"}
    assert len(objects) == len(base()) + 1
