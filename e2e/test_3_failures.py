"""What goes wrong for users, and what kubectl get, kubectl describe and kvern explain then say. Each must name the
cause without a look into any pod."""

from collections.abc import Callable

import kit
from kit import Object, Service, eventually, kubectl

Make = Callable[..., Service]


def said(one: Service) -> tuple[str, str, str]:
    """What a user sees: kubectl get -o wide, kubectl describe, kvern explain."""
    return (
        kubectl("-n", one.namespace, "get", "infs", one.name, "-o", "wide"),
        kubectl("-n", one.namespace, "describe", "infs", one.name),
        kit.kvern("explain", one.name, "-n", one.namespace),
    )


def check(one: Service, ready: Object, reason: str, *words: str) -> None:
    """Ready and Degraded are as expected; each of the three outputs names the reason and says the words."""
    assert ready["status"] == "False"
    for text, source in zip(said(one), ("get", "describe", "explain"), strict=True):
        assert reason in text, (source, text)
        for word in words:
            assert word in text, (source, word, text)
    assert one.condition("Degraded")["status"] == "True", one.condition("Degraded")


def events_of(one: Service) -> str:
    about = f"--field-selector=involvedObject.name={one.name}"
    return kubectl("-n", one.namespace, "get", "events", about, "-o", "wide")


def test_wrong_model_path(service: Make) -> None:
    """A claim without the folder that the manifest names."""
    claim = """{"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "models"},
      "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}}}"""
    one = service("lost", uri="pvc://models/no-such-model")
    kubectl("-n", one.namespace, "apply", "-f", "-", stdin=claim)
    ready = one.wait_reason("ModelNotFound")
    check(one, ready, "ModelNotFound", "no such folder", "no-such-model")
    assert "ModelNotFound" in events_of(one)


def test_image_that_does_not_exist(service: Make) -> None:
    one = service("unpullable", engine={"image": kit.NO_SUCH_IMAGE})
    ready = one.wait_reason("ErrImagePull", "ImagePullBackOff")
    check(one, ready, "Image", kit.NO_SUCH_IMAGE)


def test_more_gpus_than_any_node_has(service: Make) -> None:
    one = service("greedy", resources={"gpusPerPod": 64}, parallelism={"tensor": {"size": 1}})
    ready = one.wait_reason("Unschedulable")
    check(one, ready, "Unschedulable", "Insufficient nvidia.com/gpu")


def test_model_that_does_not_fit(service: Make) -> None:
    """A pod with less memory than the model's weights: the kernel ends it, and that is what is said."""
    one = service("large", uri="builtin://smollm2-135m", resources={"memory": "200Mi"})
    ready = one.wait_reason("OOMKilled", "ModelDoesNotFit", "OutOfMemory")
    check(one, ready, ready["reason"], "memory")


def test_crash_at_start(service: Make) -> None:
    """A command line that the engine refuses: the reason, the exit code and the line that matters."""
    container = {"name": "engine", "args": ["builtin://nothing"]}
    one = service("crashing", overrides={"podTemplate": {"spec": {"containers": [container]}}})
    ready = one.wait_reason("ModelNotFound", "CrashLoopBackOff", "Error", "BadArguments")
    check(one, ready, ready["reason"], "no built-in model 'nothing'")


def test_quota(service: Make, namespace: str) -> None:
    """A quota that leaves no room for the pods: its own words come up."""
    kubectl(
        "-n",
        namespace,
        "create",
        "quota",
        "none",
        "--hard=pods=1",
    )
    one = service("crowded", replicas=2)
    ready = one.wait_reason("QuotaExceeded")
    check(one, ready, "QuotaExceeded", "exceeded quota")


def test_a_corrected_manifest_heals(service: Make) -> None:
    """From a wrong image to the right one: the service comes up without anything to delete by hand."""
    one = service("mended", engine={"image": kit.NO_SUCH_IMAGE})
    one.wait_reason("ErrImagePull", "ImagePullBackOff")
    one.apply(kit.manifest("mended"))
    one.wait_ready()
    eventually("no longer degraded", lambda: one.condition("Degraded").get("status") == "False", 30)
