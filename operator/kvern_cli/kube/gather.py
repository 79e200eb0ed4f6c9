"""Reads what belongs to a service from a cluster: thin, all at once, going without what may not be read."""

import difflib
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from kvern_cli.kube.client import Kube
from kvern_cli.kube.errors import KubeError
from kvern_cli.picture import COMPONENT_LABEL, SERVICE_LABEL, Picture, cluster_picture
from kvern_cli.shared import CONFIG_MAP, Shared, shared_of
from kvern_operator.trouble import trouble

SERVICES = "apis/kvern.dev/v1alpha1"
OPERATOR_NAMESPACE, OPERATOR_LEASE = "kvern-system", "kvern-operator"
LOG_LINES = 60  # the end of a crashed container's log
MOST_LOGS = 4  # crashed pods whose logs are read: they mostly say the same

Objects = list[dict[str, Any]]
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Target:
    """Where to look: one client and namespace, and the same as kubectl's flags."""

    kube: Kube
    namespace: str
    kubectl: str  # kubectl with its flags

    @property
    def place(self) -> str:
        return f"{self.kube.access.place}, namespace {self.namespace}"


def target(kube: Kube, context: str | None, kubeconfig: str | None) -> Target:
    """The target of a client, in the namespace that its access names."""
    namespace = kube.access.namespace
    flags = [f"--kubeconfig {kubeconfig}"] if kubeconfig else []
    flags += [f"--context {context}"] if context else []
    flags += [f"-n {namespace}"] if namespace != "default" or context or kubeconfig else []
    return Target(kube, namespace, " ".join(["kubectl", *flags]))


def list_services(kube: Kube, namespace: str | None) -> Objects:
    """The services of a namespace, of all where it is None. Raises KubeError."""
    path = f"{SERVICES}/namespaces/{namespace}/inferenceservices" if namespace else f"{SERVICES}/inferenceservices"
    where = f"in namespace {namespace}" if namespace else "in all namespaces"
    return _known_kind(kube, lambda: kube.list(path, f"list inferenceservices {where}"))


def get_service(kube: Kube, namespace: str, name: str) -> dict[str, Any]:
    """One service. Raises KubeError: with kind "missing" it says what there is instead."""
    path = f"{SERVICES}/namespaces/{namespace}/inferenceservices/{name}"
    try:
        return _known_kind(kube, lambda: kube.get(path, f"read inferenceservice {name} in namespace {namespace}"))
    except KubeError as error:
        if error.kind != "missing":
            raise
        raise KubeError("missing", _missing(kube, namespace, name)) from None


def _known_kind(kube: Kube, ask: Callable[[], Answer]) -> Answer:
    try:
        return ask()
    except KubeError as error:
        if error.kind != "no-kind":
            raise
        text = (
            f"the cluster ({kube.access.place}) does not know InferenceService of kvern.dev/v1alpha1: its definition "
            "is not installed. Install it and the operator:\n"
            "  helm install kvern-crds charts/kvern-crds\n"
            "  helm install kvern charts/kvern -n kvern-system --create-namespace"
        )
        raise KubeError("no-kind", text) from None


def _missing(kube: Kube, namespace: str, name: str) -> str:
    """What there is instead: a near name, the same name in another namespace."""
    text = f"there is no inferenceservice {name} in namespace {namespace} ({kube.access.place})"
    try:
        found = list_services(kube, None)
    except KubeError:
        try:
            found = list_services(kube, namespace)
        except KubeError:
            return text
    return text + missing_hint(name, namespace, [(s["metadata"]["namespace"], s["metadata"]["name"]) for s in found])


def missing_hint(name: str, namespace: str, there: list[tuple[str, str]]) -> str:
    """The rest of the sentence that says a service is not there. `there`: (namespace, name) of those that are."""
    elsewhere = sorted(ns for ns, known in there if known == name)
    if elsewhere:
        return f"; there is one in namespace {elsewhere[0]}: -n {elsewhere[0]}"
    here = sorted(known for ns, known in there if ns == namespace)
    near = difflib.get_close_matches(name, here, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; there are: {', '.join(here[:8])}" if here else "; there is none at all in it"


# ---------------------------------------------------------------- one service


def gather(where: Target, name: str, *, budget: bool = False) -> Picture:
    """Everything about one service; with `budget` also the GPUs that it shares with others. Raises KubeError where the
    service itself cannot be read."""
    kube, namespace = where.kube, where.namespace
    labelled = {"labelSelector": f"{SERVICE_LABEL}={name}"}
    about = f"involvedObject.kind=InferenceService,involvedObject.name={name}"
    gaps: dict[str, KubeError] = {}

    def optional(path: str, what: str, **params: Any) -> Objects:
        try:
            return kube.list(path, f"list {what} in namespace {namespace}", **params)
        except KubeError as error:
            gaps[what] = error
            return []

    core, apps = f"api/v1/namespaces/{namespace}", f"apis/apps/v1/namespaces/{namespace}"
    service = _begin(lambda: get_service(kube, namespace, name))
    pods = _begin(lambda: optional(f"{core}/pods", "pods", **labelled))
    sets = _begin(lambda: optional(f"{apps}/statefulsets", "statefulsets", **labelled))
    routers = _begin(lambda: optional(f"{apps}/deployments", "deployments", **labelled))
    warnings = _begin(lambda: optional(f"{core}/events", "events", fieldSelector="type=Warning"))
    killings = _begin(lambda: optional(f"{core}/events", "events", fieldSelector="reason=Killing"))
    own = _begin(lambda: optional(f"{core}/events", "events", fieldSelector=about))
    lease = _begin(lambda: _lease(kube))
    shared = _begin(lambda: _shared(kube, namespace, name) if budget else None)
    found = service.result()
    logs = _last_logs(kube, namespace, pods.result())
    return cluster_picture(
        found,
        pods.result(),
        # Lists leave the kind of their items out.
        [*_of_kind("StatefulSet", sets.result()), *_of_kind("Deployment", routers.result())],
        _once([*warnings.result(), *killings.result(), *own.result()]),
        place=where.place,
        now=datetime.now(UTC),
        kubectl=where.kubectl,
        lease=lease.result(),
        shared=shared.result(),
        last_logs=logs,
        gaps=tuple(_gap_words(gaps, namespace)),
    )


def _begin(ask: Callable[[], Answer]) -> "Future[Answer]":
    """A question in a thread of its own. Nothing waits for it but who asks for its result: Ctrl-C ends the command
    though a server does not answer, which a ThreadPoolExecutor's threads would prevent."""
    future: Future[Answer] = Future()

    def run() -> None:
        try:
            future.set_result(ask())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _gap_words(gaps: Mapping[str, KubeError], namespace: str) -> Iterator[str]:
    """What could not be read. What these credentials may not see is named in one sentence."""
    hidden = sorted(what for what, error in gaps.items() if error.kind == "forbidden")
    if hidden:
        yield f"These credentials may not see {', '.join(hidden)} of namespace {namespace}; the role view lets them."
    for what, error in sorted(gaps.items()):
        if error.kind != "forbidden":
            yield f"No {what}: {error}."


def _of_kind(kind: str, objects: Objects) -> Objects:
    return [{**obj, "kind": kind} for obj in objects]


def _once(events: Objects) -> Objects:
    return list({event["metadata"].get("uid") or id(event): event for event in events}.values())


def _lease(kube: Kube) -> dict[str, Any] | None:
    """The operator's Lease where the chart puts it; None where it is not there or not for these eyes."""
    path = f"apis/coordination.k8s.io/v1/namespaces/{OPERATOR_NAMESPACE}/leases/{OPERATOR_LEASE}"
    try:
        return kube.get(path, "read the operator's Lease")
    except KubeError:
        return None


def _shared(kube: Kube, namespace: str, name: str) -> Shared | None:
    """The namespace's budget; None where it has none."""
    path = f"api/v1/namespaces/{namespace}/configmaps/{CONFIG_MAP}"
    try:
        config_map = kube.get(path, f"read ConfigMap {CONFIG_MAP} in namespace {namespace}")
        return shared_of(config_map, list_services(kube, namespace), name)
    except KubeError as error:
        if error.kind == "missing":
            return None
        return Shared(None, f"whether the namespace has a budget of GPUs cannot be told: {error}")


def _last_logs(kube: Kube, namespace: str, pods: Objects) -> dict[str, str]:
    """The end of the logs of crashed containers whose status does not hold it."""
    logs: dict[str, str] = {}
    for pod in pods:
        found = trouble(pod)
        if found is None or found.exit_code is None or found.log_tail or len(logs) == MOST_LOGS:
            continue
        name = pod["metadata"]["name"]
        path = f"api/v1/namespaces/{namespace}/pods/{name}/log"
        params: dict[str, Any] = {
            "container": found.container or pod["metadata"]["labels"].get(COMPONENT_LABEL),
            "tailLines": LOG_LINES,
        }
        for previous in ("true", None):
            try:
                logs[name] = "\n".join(kube.lines(path, f"read the log of pod {name}", previous=previous, **params))
                break
            except KubeError:
                continue
    return logs
