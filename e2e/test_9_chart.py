"""The chart's life on a real cluster: helm test, upgrade, uninstall, reinstall, an install for one namespace only.

Last in order, since most of it takes the operator away and brings it back.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator

import kit
import pytest
from conftest import image_values
from kit import CommandError, Service, eventually, helm, kubectl

alone = pytest.mark.alone
SPACE = ("-n", kit.OPERATOR_NAMESPACE)
ACCOUNT = f"system:serviceaccount:{kit.OPERATOR_NAMESPACE}:kvern-operator"


def install(*more: str, program: str = "helm", namespace: str = kit.OPERATOR_NAMESPACE) -> None:
    """Install or upgrade the operator and wait for it."""
    command = ("upgrade", "--install", "kvern", str(kit.ROOT / "charts/kvern"), "-n", namespace, *image_values())
    helm(*command, "--wait", "--timeout=3m", *more, program=program)


def key() -> str:
    """The operator's key, encoded."""
    secret = json.loads(kubectl(*SPACE, "get", "secret", "kvern-operator-key", "-o", "json"))
    return str(secret["data"]["key"])


def leader() -> str:
    lease = kit.get("lease", "kvern-operator", kit.OPERATOR_NAMESPACE)
    return str((lease or {"spec": {}})["spec"].get("holderIdentity", ""))


def uids(service: Service) -> set[str]:
    """Pods of a service: they change where one was replaced."""
    pods = service.pods("engine") + service.pods("router")
    return {pod["metadata"]["uid"] for pod in pods}


@pytest.fixture
def restored(operator: None) -> Iterator[None]:
    """The operator as the other tests want it, whatever this one did to it."""
    yield
    helm("upgrade", "--install", "kvern-crds", str(kit.ROOT / "charts/kvern-crds"), *SPACE)
    install("--reset-values")


@pytest.mark.parametrize("program", ["helm", "helm3"])
def test_helm_test(operator: None, program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"no {program} on PATH")
    said = helm("test", "kvern", *SPACE, "--logs", "--timeout=2m", program=program)
    assert "The operator is healthy, and the API server serves InferenceService." in said


def test_operator_can_do_little(operator: None) -> None:
    """What the API server itself says of the operator's rights."""

    def allowed(verb: str, resource: str, *more: str) -> bool:
        return kubectl("auth", "can-i", verb, resource, f"--as={ACCOUNT}", *more, check=False).strip() == "yes"

    assert allowed("create", "secrets", "-A")
    for verb in ("get", "list", "watch", "update", "patch", "delete"):
        assert not allowed(verb, "secrets", "-A"), verb
        assert not allowed(verb, "secrets", *SPACE), verb
    for verb, resource in [
        ("update", "infs"),
        ("delete", "infs"),
        ("create", "pods"),
        ("create", "pods/exec"),
        ("delete", "persistentvolumeclaims"),
        ("create", "clusterrolebindings"),
        ("patch", "nodes"),
    ]:
        assert not allowed(verb, resource, "-A"), f"{verb} {resource}"


@alone
def test_no_right_was_missing(operator: None) -> None:
    """Whatever the tests before this one had the operator do."""
    said = kubectl(*SPACE, "logs", kit.OPERATOR, "--tail=-1")
    assert "leading as" in said
    assert "forbidden" not in said.lower(), [line for line in said.splitlines() if "forbidden" in line.lower()][:5]


@alone
def test_upgrade_restarts_no_service(restored: None, service: Callable[..., Service]) -> None:
    mine = service("upgraded")
    mine.wait_ready()
    before, made = uids(mine), key()
    install("--set", "replicas=2", "--set", "logging.level=debug")
    kubectl(*SPACE, "rollout", "status", kit.OPERATOR, "--timeout=90s")
    pods = kit.items("pods", kit.OPERATOR_NAMESPACE, "app.kubernetes.io/component=operator")
    alive = [p["metadata"]["name"] for p in pods if "deletionTimestamp" not in p["metadata"]]
    assert len(alive) == 2
    eventually("one of the new operators leads", lambda: any(name in leader() for name in alive), 60)
    assert kit.get("pdb", "kvern-operator", kit.OPERATOR_NAMESPACE) is not None
    assert key() == made
    kubectl("-n", mine.namespace, "scale", "infs/upgraded", "--replicas=2")
    eventually("a second replica", lambda: mine.object()["status"]["readyReplicas"] == 2, 120)
    assert before <= uids(mine)


@alone
def test_uninstall_leaves_services_alone(restored: None, service: Callable[..., Service]) -> None:
    mine = service("orphan")
    mine.wait_ready()
    before, made = uids(mine), key()
    helm("uninstall", "kvern", *SPACE, "--wait")
    helm("uninstall", "kvern-crds", *SPACE, "--wait")
    assert uids(mine) == before
    mine_left = ("-l", "app.kubernetes.io/instance=kvern", "-o", "name")

    def left() -> set[str]:
        found = kubectl(*SPACE, "get", "all,sa,pdb,netpol,roles,rolebindings", *mine_left).split()
        return set(found) - {"pod/kvern-test"}  # of helm test: hooks are not the release's

    eventually("nothing of the release is left", lambda: not left(), 60)
    assert "kvern-operator" not in kubectl("get", "clusterroles,clusterrolebindings", "-o", "name")
    assert key() == made

    helm("install", "kvern-crds", str(kit.ROOT / "charts/kvern-crds"), *SPACE)
    install()
    assert key() == made
    kubectl("-n", mine.namespace, "scale", "infs/orphan", "--replicas=2")
    eventually("a second replica", lambda: mine.object()["status"]["readyReplicas"] == 2, 120)
    assert before <= uids(mine)


@alone
def test_admin_of_a_namespace_installs_it_there(
    restored: None, make_namespace: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but the cluster's role admin in one namespace, and the resource, is needed; other namespaces are left."""
    helm("uninstall", "kvern", *SPACE, "--wait")
    home, other = make_namespace("team"), make_namespace("other")
    kubectl("-n", home, "create", "rolebinding", "ada", "--clusterrole=admin", "--user=ada")
    monkeypatch.setitem(os.environ, "HELM_KUBEASUSER", "ada")
    with pytest.raises(CommandError, match="forbidden"):
        install(namespace=home)
    helm("uninstall", "kvern", "-n", home, "--ignore-not-found", check=False)
    install("--set", f"watchNamespaces={{{home}}}", namespace=home)
    monkeypatch.delitem(os.environ, "HELM_KUBEASUSER")

    mine, theirs = Service("mine", home), Service("theirs", other)
    for one in (mine, theirs):
        one.apply(kit.manifest(one.name))
    mine.wait_ready()
    assert "status" not in theirs.object()
    helm("test", "kvern", "-n", home, "--timeout=2m")
    helm("uninstall", "kvern", "-n", home, "--wait")
