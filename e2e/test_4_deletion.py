"""Deleting a service in any state leaves nothing, and a namespace goes even while the operator is down."""

from collections.abc import Callable
from typing import Any

import kit
import pytest
from kit import Service, eventually, kubectl

Make = Callable[..., Service]
KINDS = (
    "statefulsets,deployments,replicasets,pods,services,configmaps,secrets,serviceaccounts,poddisruptionbudgets,"
    "networkpolicies,persistentvolumeclaims,controllerrevisions,endpointslices"
)


def left(namespace: str) -> list[str]:
    """Everything in the namespace that Kubernetes does not put into every one."""
    names = kubectl("-n", namespace, "get", KINDS, "-o", "name").split()
    return [n for n in names if n not in ("configmap/kube-root-ca.crt", "serviceaccount/default")]


STATES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "pending": ({"resources": {"gpusPerPod": 64}, "parallelism": {"tensor": {"size": 1}}}, ("Unschedulable",)),
    "loading": ({"uri": "builtin://smollm2-135m"}, ("Loading", "Creating", "Scheduling")),
    "failed": ({"engine": {"image": kit.NO_SUCH_IMAGE}}, ("ErrImagePull", "ImagePullBackOff")),
    "suspended": ({"suspend": True}, ("Suspended",)),
    "zero": ({"replicas": 0}, ("ScaledToZero",)),
    "ready": ({}, ("AllReplicasReady",)),
}


@pytest.mark.parametrize("state", STATES)
def test_deletion_leaves_nothing(service: Make, state: str) -> None:
    spec, reasons = STATES[state]
    one = service(f"gone-{state}", **spec)
    one.wait_reason(*reasons)
    assert left(one.namespace)
    kubectl("-n", one.namespace, "delete", "infs", one.name, "--timeout=30s")
    eventually("nothing left", lambda: not left(one.namespace), 90)


@pytest.mark.alone
def test_namespace_goes_with_the_operator_down(service: Make) -> None:
    one = service("orphan")
    one.wait_ready()
    operator = ("-n", kit.OPERATOR_NAMESPACE, "scale", kit.OPERATOR)
    replicas = kubectl("-n", kit.OPERATOR_NAMESPACE, "get", kit.OPERATOR, "-o", "jsonpath={.spec.replicas}")
    kubectl(*operator, "--replicas=0")
    try:
        selector = "app.kubernetes.io/component=operator"
        eventually("no operator pod", lambda: not kit.items("pods", kit.OPERATOR_NAMESPACE, selector), 60)
        kubectl("delete", "namespace", one.namespace, "--timeout=120s", timeout=150)
    finally:
        kubectl(*operator, f"--replicas={replicas}")
        kubectl("-n", kit.OPERATOR_NAMESPACE, "rollout", "status", kit.OPERATOR, "--timeout=90s")
