"""What happens to a service under load, each as a function that returns when the desired state is reached.

`PLANNED` are what people and clusters do on purpose, `FAILURES` what breaks by itself, `CONTROL` what happens to the
operator and to the API server. Where something is killed that streams run on, `struck` of the event says when.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import kit
import nodes
from kit import Object, Service, eventually, helm, kubectl
from streams import STREAM_SECONDS, Event

SPACE = ("-n", kit.OPERATOR_NAMESPACE)
OTHER_TAG = "kvern/engine:e2e-b"  # the same image by another name: what is tried is the change
OTHER_OPERATOR_TAG = "e2e-b"
OTHER_MODEL = "builtin://smollm2-135m"
_numbers = count(129)  # of spec.engine.maxNumSeqs: every one a new revision


@dataclass
class Target:
    """The service that things happen to."""

    service: Service

    @property
    def namespace(self) -> str:
        return self.service.namespace

    def patch(self, **spec: object) -> None:
        """A change of the spec, as `kubectl patch` makes it."""
        text = json.dumps({"spec": spec})
        kubectl("-n", self.namespace, "patch", "infs", self.service.name, "--type=merge", "-p", text)

    def revise(self) -> None:
        """A changed flag: every replica is to be replaced."""
        self.patch(engine={"maxNumSeqs": next(_numbers)})

    def pods(self, component: str = "engine") -> list[Object]:
        """Those that are not on their way out."""
        return [pod for pod in self.service.pods(component) if "deletionTimestamp" not in pod["metadata"]]

    def is_settled(self) -> bool:
        """Everything is as the spec says and nothing is on its way, by the service's account and by the pods'."""
        found = self.service.object()
        spec, status, generation = found["spec"], found["status"], found["metadata"]["generation"]
        current = [c for c in status["conditions"] if c["observedGeneration"] == generation]
        said = {(c["type"], c["status"], c["reason"]) for c in current}
        if not {("Ready", "True", "AllReplicasReady"), ("Progressing", "False", "Complete")} <= said:
            return False
        pods = kit.items("pods", self.namespace, f"kvern.dev/service={self.service.name}")
        engines = [pod for pod in pods if pod["metadata"]["labels"]["app.kubernetes.io/component"] == "engine"]
        revisions = {pod["metadata"]["labels"].get("kvern.dev/revision") for pod in engines}
        return (
            all(kit.condition_of(pod, "Ready") == "True" for pod in pods)
            and not any("deletionTimestamp" in pod["metadata"] for pod in pods)
            and len(engines) == spec["replicas"]
            and len(pods) - len(engines) == spec["router"]["replicas"]
            and revisions == {status["revision"]["updated"]}
        )

    def spread(self) -> None:
        """A replica and a router on each node, as before a node was drained: a pod that ends comes back elsewhere."""
        for component in ("engine", "router"):
            here = self.pods(component)
            if len({pod["spec"]["nodeName"] for pod in here}) == 1:
                kubectl("-n", self.namespace, "delete", "pod", here[0]["metadata"]["name"], "--wait=false")
        self.settle()

    def settle(self, seconds: float = 2 * STREAM_SECONDS + 60) -> None:
        """Until it is settled."""
        try:
            eventually(f"{self.service.name} is settled", self.is_settled, seconds, every=1)
        except AssertionError as error:
            seen = [f"{c['type']}={c['status']} {c['reason']}" for c in self.service.object()["status"]["conditions"]]
            raise AssertionError(f"{error}; {', '.join(seen)}") from None


Do = Callable[[Target, Event], None]


# ---------------------------------------------------------------- planned


def scale_up(target: Target, event: Event) -> None:
    kubectl("-n", target.namespace, "scale", f"infs/{target.service.name}", "--replicas=3")
    target.settle()


def scale_down(target: Target, event: Event) -> None:
    kubectl("-n", target.namespace, "scale", f"infs/{target.service.name}", "--replicas=2")
    target.settle()


def flags_changed(target: Target, event: Event) -> None:
    target.revise()
    target.settle()


def image_changed(target: Target, event: Event) -> None:
    target.patch(engine={"image": OTHER_TAG})
    target.settle()


def model_changed(target: Target, event: Event) -> None:
    """The other model, or the first one again."""
    now = target.service.object()["spec"]["model"]["uri"]
    target.patch(model={"uri": OTHER_MODEL if now != OTHER_MODEL else "builtin://tiny-kjv"})
    target.settle()


def bad_revision(target: Target, event: Event) -> None:
    """An image that cannot be: the old replicas go on, the service says why, and the old spec brings it back."""
    before = {pod["metadata"]["uid"] for pod in target.pods()}
    image = target.service.object()["spec"]["engine"].get("image")
    target.patch(engine={"image": kit.NO_SUCH_IMAGE})
    said = target.service.wait_reason("ErrImagePull", "ImagePullBackOff", condition="Progressing", seconds=60)
    assert kit.NO_SUCH_IMAGE in said["message"], said
    assert target.service.condition("Available")["status"] == "True"
    ready = {pod["metadata"]["uid"] for pod in target.pods() if kit.condition_of(pod, "Ready") == "True"}
    assert ready == before, "the old replicas serve on"
    target.patch(engine={"image": image})
    target.settle()
    assert {pod["metadata"]["uid"] for pod in target.pods()} == before, "nothing that served was replaced"


def pod_deleted(target: Target, event: Event) -> None:
    kubectl("-n", target.namespace, "delete", "pod", target.pods()[0]["metadata"]["name"], "--wait=false")
    target.settle()


def router_evicted(target: Target, event: Event) -> None:
    name = target.pods("router")[0]["metadata"]["name"]
    evict(name, target.namespace)
    eventually("the router is gone", lambda: kit.get("pod", name, target.namespace) is None, 2 * STREAM_SECONDS + 60)
    target.settle()


def evict(pod: str, namespace: str) -> None:
    """As `kubectl drain` does it: a PodDisruptionBudget may refuse."""
    wanted = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace}}
    path = f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction"
    kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(wanted))


def node_drained(target: Target, event: Event) -> None:
    """The worker; afterwards it may be used again."""
    node = nodes.worker()
    options = ("--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=600s")
    try:
        kubectl("drain", node, *options, timeout=620)
        target.settle()
    finally:
        kubectl("uncordon", node)


# ---------------------------------------------------------------- failures


def struck(event: Event, pod: Object, container: str, child: str = "") -> None:
    """kill -9."""
    nodes.signal(pod, container, child=child)
    event.struck = time.time()


def _killed(target: Target, event: Event, component: str, container: str, child: str = "") -> None:
    pod = target.pods(component)[0]
    name, before = pod["metadata"]["name"], _restarts(pod)
    struck(event, pod, container, child)

    def again() -> bool:
        now = kit.get("pod", name, target.namespace)
        return now is None or _restarts(now) > before

    eventually("the container has been started again", again, 120)
    target.settle()


def _restarts(pod: Object) -> int:
    return sum(status["restartCount"] for status in pod["status"].get("containerStatuses", []))


def engine_killed(target: Target, event: Event) -> None:
    _killed(target, event, "engine", "engine")


def worker_killed(target: Target, event: Event) -> None:
    _killed(target, event, "engine", "engine", "worker-0")


def router_killed(target: Target, event: Event) -> None:
    """Until the Service's endpoints are one less, half of all new connections meet a closed port."""
    event.blind = 5.0
    _killed(target, event, "router", "router")


def node_lost(target: Target, event: Event) -> None:
    """The worker without power for 75 seconds. Kubernetes sends clients to its router until it has noticed."""
    event.blind = 75.0
    node = nodes.worker()
    kit.run(nodes.NODE, "--kill", node)
    event.struck = time.time()
    try:
        eventually("Kubernetes has noticed", lambda: not _node_ready(node), 120, every=1)
        time.sleep(max(0.0, event.struck + 75 - time.time()))
    finally:
        kit.run(nodes.NODE, "--start", node)
    eventually("the node is back", lambda: _node_ready(node), 180, every=1)
    target.settle(600)


def _node_ready(node: str) -> bool:
    return kit.condition_of(json.loads(kubectl("get", "node", node, "-o", "json")), "Ready") == "True"


# ---------------------------------------------------------------- operator and API server


def operators() -> list[Object]:
    """The operator's pods that are not on their way out."""
    found = kit.items("pods", kit.OPERATOR_NAMESPACE, "app.kubernetes.io/component=operator")
    return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]


def leader() -> Object:
    """The pod that leads."""
    lease = kit.get("lease", "kvern-operator", kit.OPERATOR_NAMESPACE) or {"spec": {}}
    holder = lease["spec"].get("holderIdentity", "")
    found = [pod for pod in operators() if pod["metadata"]["name"] == holder]
    if not found:
        raise kit.CommandError(f"the Lease names {holder!r}, which is no running operator")
    return found[0]


def fresh_operator() -> None:
    """One that has not been killed yet: the kubelet makes a container wait longer after each death."""
    if any(_restarts(pod) for pod in operators()):
        kubectl(*SPACE, "rollout", "restart", kit.OPERATOR)
        kubectl(*SPACE, "rollout", "status", kit.OPERATOR, "--timeout=90s")
    eventually("an operator leads", leader, 60)


def two_run() -> None:
    """A second operator, which waits."""
    kubectl(*SPACE, "scale", kit.OPERATOR, "--replicas=2")
    eventually("two operators", lambda: [kit.condition_of(p, "Ready") for p in operators()] == ["True", "True"], 60)


def one_runs() -> None:
    """One operator again."""
    kubectl(*SPACE, "scale", kit.OPERATOR, "--replicas=1")
    kubectl(*SPACE, "rollout", "status", kit.OPERATOR, "--timeout=90s")


def kill_operator() -> None:
    """kill -9 of whoever leads; returns when it is running again."""
    pod = eventually("an operator leads", leader, 60)
    nodes.signal(pod, "operator")
    name, before = pod["metadata"]["name"], _restarts(pod)
    eventually("it runs again", lambda: _restarts(kit.get("pod", name, kit.OPERATOR_NAMESPACE) or pod) > before, 120)


def _sets(target: Target) -> list[Object]:
    return kit.items("statefulsets", target.namespace, f"kvern.dev/service={target.service.name}")


def _drains(workload: Object) -> bool:
    return "kvern.dev/draining-since" in (workload["metadata"].get("annotations") or {})


# When to kill, during a rollout: a check of the replicas' StatefulSets before and now.
PHASES: dict[str, Callable[[list[Object], list[Object]], bool]] = {
    "as the spec changes": lambda before, now: True,
    "as a replica starts": lambda before, now: len(now) > len(before),
    "as one drains": lambda before, now: any(_drains(one) for one in now),
    "as one is deleted": lambda before, now: not {uid(one) for one in before} <= {uid(one) for one in now},
}


def uid(obj: Object) -> str:
    """metadata.uid."""
    return str(obj["metadata"]["uid"])


def operator_killed(phase: str) -> Do:
    """Of an operator killed in a phase of a rollout."""

    def do(target: Target, event: Event) -> None:
        before = _sets(target)
        target.revise()
        eventually(phase, lambda: PHASES[phase](before, _sets(target)), 2 * STREAM_SECONDS + 60, every=0.2)
        kill_operator()
        target.settle()

    return do


def two_operators(target: Target, event: Event) -> None:
    """A second one takes over from a first that has stopped (SIGSTOP) in the middle of a rollout and comes back to life
    believing that it leads."""
    two_run()
    try:
        first = eventually("one leads", leader, 60)
        target.revise()
        nodes.signal(first, "operator", 19)
        try:
            eventually("the other leads", lambda: uid(leader()) != uid(first), 60)
        finally:
            nodes.signal(first, "operator", 18)
        target.settle()
    finally:
        one_runs()


def api_server_away(target: Target, event: Event) -> None:
    """For a minute, beginning in the middle of a rollout."""
    target.revise()
    nodes.api_server_away(60)
    target.settle()


def etcd_restored(target: Target, event: Event) -> None:
    """A third replica was added after the backup: it is not known any more, nor that anything was."""
    kubectl("-n", target.namespace, "scale", f"infs/{target.service.name}", "--replicas=3")
    target.settle()
    nodes.restore_etcd()
    event.struck, event.blind = time.time(), 30.0  # the kubelet ends pods that the API server does not know, soon
    assert target.service.object()["spec"]["replicas"] == 2, "the backup was from before"
    target.settle(600)
    assert len(target.service.pods()) == 2


def operator_upgraded(target: Target, event: Event) -> None:
    """Another version of the operator, and back: no pod of the service changes."""
    before = {uid(pod) for pod in target.pods() + target.pods("router")}
    helm("upgrade", "kvern", "charts/kvern", *SPACE, "--reuse-values", "--wait", "--timeout=3m", *_other_operator())
    eventually("the new operator leads", leader, 60)
    helm("rollback", "kvern", *SPACE, "--wait", "--timeout=3m")
    eventually("the old operator leads", leader, 60)
    assert {uid(pod) for pod in target.pods() + target.pods("router")} == before, "no pod was replaced"
    kubectl("-n", target.namespace, "annotate", "infs", target.service.name, "touched=yes", "--overwrite")
    target.settle()


def _other_operator() -> tuple[str, ...]:
    return ("--set", f"images.operator.tag={OTHER_OPERATOR_TAG}", "--set", "logging.level=debug")


def namespace_deleted(target: Target, event: Event) -> None:
    """With every stream open; nothing new is asked (hold() has been called)."""
    kubectl("delete", "namespace", target.namespace, "--wait=false")
    eventually(
        "the namespace is gone",
        lambda: not kubectl("get", "namespace", target.namespace, "--ignore-not-found", "-o", "name").strip(),
        5 * STREAM_SECONDS,
        every=1,
    )


PLANNED: dict[str, Do] = {
    "scale up": scale_up,
    "scale down": scale_down,
    "flags changed": flags_changed,
    "image changed": image_changed,
    "model changed": model_changed,
    "bad revision": bad_revision,
}
MORE_PLANNED: dict[str, Do] = {
    "pod deleted": pod_deleted,
    "router evicted": router_evicted,
    "node drained": node_drained,
}
CONTROL: dict[str, Do] = {
    **{f"operator kill -9 {phase}": operator_killed(phase) for phase in PHASES},
    "two operators": two_operators,
    "operator upgraded and rolled back": operator_upgraded,
    "API server away 60 s": api_server_away,
}
FAILURES: dict[str, Do] = {
    "engine kill -9": engine_killed,
    "worker kill -9": worker_killed,
    "router kill -9": router_killed,
    "node lost 75 s": node_lost,
}
