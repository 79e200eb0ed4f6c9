"""No drift for GitOps, no writes of an idle operator."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import kit
import pytest
from kit import Object, Service, eventually, kubectl

Make = Callable[..., Service]


def spec_and_owners(obj: Object) -> Object:
    """What a GitOps tool compares, and who owns fields of it."""
    return {
        "spec": obj["spec"],
        "labels": obj["metadata"].get("labels"),
        "annotations": obj["metadata"].get("annotations"),
        "generation": obj["metadata"]["generation"],
        "managers": sorted(m["manager"] for m in obj["metadata"]["managedFields"] if not m.get("subresource")),
    }


def with_owners(one: Service) -> Object:
    text = kubectl("-n", one.namespace, "get", "infs", one.name, "-o", "json", "--show-managed-fields")
    return spec_and_owners(json.loads(text))


@pytest.mark.parametrize("mode", ["Off", "External"])
def test_no_drift(operator: None, namespace: str, mode: str) -> None:
    """The same manifest applied again changes nothing, and `kubectl diff` shows nothing."""
    text = kit.manifest("still", autoscaling={"mode": mode})
    one = Service("still", namespace)
    one.apply(text)
    one.wait_ready()
    before = with_owners(one)
    assert "kubectl" in before["managers"] and len(before["managers"]) == 1, before["managers"]
    assert kubectl("-n", namespace, "diff", "--server-side", "-f", "-", stdin=text) == ""
    one.apply(text)
    assert with_owners(one) == before


def ending() -> list[str]:
    """Namespaces that are being deleted."""
    found = json.loads(kubectl("get", "namespaces", "-o", "json"))["items"]
    return [n["metadata"]["name"] for n in found if n["status"]["phase"] == "Terminating"]


RESYNC = 60  # seconds; each service is looked at again after once to twice that


@contextmanager
def resync(seconds: int | None) -> Iterator[None]:
    """An operator that looks at everything again so often; as it was installed afterwards. None: nothing is changed."""
    if seconds is None:
        yield
        return
    space = ("-n", kit.OPERATOR_NAMESPACE)
    path = "{.spec.template.spec.containers[0].env[?(@.name=='KVERN_RESYNC_SECONDS')].value}"
    before = kubectl(*space, "get", kit.OPERATOR, "-o", f"jsonpath={path}")

    def have(value: str) -> None:
        kubectl(*space, "set", "env", kit.OPERATOR, f"KVERN_RESYNC_SECONDS={value}")
        kubectl(*space, "rollout", "status", kit.OPERATOR, "--timeout=180s")

    have(str(seconds))
    try:
        yield
    finally:
        have(before)


@pytest.mark.alone
def test_idle_operator_writes_nothing(service: Make) -> None:
    """With services ready, broken and scaled to zero, the only write is the Lease's; in full runs through several
    resyncs as well, which by default come after the window."""
    broken = service("broken", engine={"image": kit.NO_SUCH_IMAGE})
    quiet = [service("ready"), service("zero", replicas=0), broken]
    quiet[0].wait_ready()
    quiet[1].wait_reason("ScaledToZero")
    quiet[2].wait_reason("ImagePullBackOff", "ErrImagePull")
    with resync(RESYNC if os.environ.get("KVERN_E2E_FULL") else None):
        nothing_is_written()


def nothing_is_written() -> None:
    # In a namespace that is being deleted, objects go one by one, and the operator mends what it does not know to end.
    eventually("the namespaces of earlier tests are gone", lambda: not ending(), 120)
    # The kubelet's back-off settles, and so does an operator that was started for this.
    time.sleep(60 if os.environ.get("KVERN_E2E_FULL") else 15)
    since = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    time.sleep(300 if os.environ.get("KVERN_E2E_FULL") else 45)
    account = f"system:serviceaccount:{kit.OPERATOR_NAMESPACE}:kvern-operator"
    events = [e for e in kit.audit_log(since) if e["user"]["username"] == account]
    assert events, "the Lease at least is renewed: else the audit log was not read"
    others = [
        f"{e['verb']} {e['requestURI']} {e['responseStatus']['code']}"
        for e in events
        if e.get("objectRef", {}).get("resource") != "leases"
    ]
    assert not others, others
