"""What the operator needs to be allowed, written down once for the tests: derived from its code where it can be."""

from collections.abc import Iterable
from typing import Any

from kvern_operator.desired import meta

Right = tuple[str, str, str]  # group, resource, verb
Object = dict[str, Any]

PLURALS = {"NetworkPolicy": "networkpolicies"}
CHILD_VERBS = {"list", "watch", "create", "patch", "delete"}
# What the operator must not do to some of its children.
NOT_READ = {"Secret"}  # created only
NOT_DELETED = {"PersistentVolumeClaim"}  # holds data

ALWAYS: set[Right] = {
    ("kvern.dev", "inferenceservices", "list"),
    ("kvern.dev", "inferenceservices", "watch"),
    ("kvern.dev", "inferenceservices/status", "patch"),
    ("kvern.dev", "inferenceservices/finalizers", "update"),
    ("", "pods", "list"),
    ("", "pods", "watch"),
    ("", "pods", "patch"),
    ("", "events", "list"),
    ("events.k8s.io", "events", "create"),
}
CLUSTER_WIDE: set[Right] = {
    ("apiextensions.k8s.io", "customresourcedefinitions", "list"),
    ("apiextensions.k8s.io", "customresourcedefinitions", "watch"),
    ("", "nodes", "list"),
}


def needed(cluster_wide: bool, *, pod_monitors: bool = True) -> set[Right]:
    """Everything but the Lease. The kinds of children come from the code that builds them."""
    rights = set(ALWAYS | CLUSTER_WIDE if cluster_wide else ALWAYS)
    for kind, version in meta.API_VERSIONS.items():
        if kind == "PodMonitor" and not pod_monitors:
            continue
        group = version.rpartition("/")[0]
        verbs = {"create"} if kind in NOT_READ else CHILD_VERBS - ({"delete"} if kind in NOT_DELETED else set())
        rights |= {(group, PLURALS.get(kind, f"{kind.lower()}s"), verb) for verb in verbs}
    return rights


def granted(roles: Iterable[Object]) -> set[Right]:
    """What roles grant, names of objects left aside."""
    return {
        (group, resource, verb)
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def restricted_problems(pod: Object) -> list[str]:
    """Where a pod's spec falls short of Pod Security's `restricted`, or may write its root file system."""
    found = []
    security = pod.get("securityContext", {})
    if security.get("runAsNonRoot") is not True:
        found.append("runAsNonRoot")
    if security.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        found.append("seccompProfile")
    if security.get("runAsUser") == 0:
        found.append("runAsUser")
    found += [name for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name)]
    for volume in pod.get("volumes", []):
        if not set(volume) - {"name"} <= {"configMap", "emptyDir", "secret", "projected", "persistentVolumeClaim"}:
            found.append(f"volume {volume['name']}")
    for box in [*pod["containers"], *pod.get("initContainers", [])]:
        own = box.get("securityContext", {})
        if own.get("allowPrivilegeEscalation") is not False:
            found.append(f"{box['name']}: allowPrivilegeEscalation")
        if own.get("capabilities") != {"drop": ["ALL"]}:
            found.append(f"{box['name']}: capabilities")
        if own.get("readOnlyRootFilesystem") is not True:
            found.append(f"{box['name']}: readOnlyRootFilesystem")
        if not {"cpu", "memory"} <= box.get("resources", {}).get("limits", {}).keys():
            found.append(f"{box['name']}: limits")
    return found
