"""The router in front of a service's replicas: Deployment, the file of replicas in a ConfigMap. Pure."""

import json
from collections.abc import Iterable

from kvern_operator.api.base import parse_quantity
from kvern_operator.api.types import InferenceService
from kvern_operator.desired import meta
from kvern_operator.desired.engine import (
    GRACE_BEYOND_DRAIN,
    HARDENED,
    HTTP_PORT,
    common_pod,
    headless_name,
    image,
    spread,
)
from kvern_operator.desired.merge import merged
from kvern_operator.observed import Object, Pod
from kvern_operator.settings import Settings

ROUTER_FOLDER = "/etc/kvern/router"
KEYS_FOLDER = "/etc/kvern/keys"
DEFAULT_CPU, DEFAULT_MEMORY = "250m", "512Mi"  # asked for; only memory is limited


def router_name(service: InferenceService) -> str:
    """Name of the Deployment and of its ConfigMap."""
    return f"{service.metadata.name}-router"


def revision(service: InferenceService) -> str:
    """The hash of what router pods are made from (see engine.revision)."""
    part = service.spec.model_dump(
        mode="json",
        by_alias=True,
        exclude_defaults=True,
        include={"router": True, "model": {"uri", "name"}, "overrides": {"router_pod_template"}},
    )
    own = part.get("router", {})
    own.pop("replicas", None)
    if own.get("limits"):
        own["limits"] = True  # the numbers are in the ConfigMap; but a router from before there were any keeps none
    if not part.get("overrides"):
        part.pop("overrides", None)
    return meta.digest(part)


def replica_file(
    service: InferenceService,
    pods: Iterable[Pod],
    leaving: frozenset[str],
    replicas: Iterable[str] = (),
    settings: Settings | None = None,
) -> str:
    """The JSON that the router re-reads on change: replicas that answer, and those that drain; the DNS names of all
    that shall serve; limits, and the routers that share them.

    `leaving` holds the names of the StatefulSets that drain, `replicas` those of all. Loading and terminating pods are
    not among the replicas. Without `settings`, or outside a cluster, there are no DNS names.
    """
    pods = list(pods)
    entries = [
        {
            "name": pod.name,
            "uid": pod.uid,
            "url": f"http://{pod.address}",
            "weight": _weight(pod, pods),
            "state": "draining" if pod.owner in leaving or pod.draining else "ready",
        }
        for pod in sorted(pods, key=lambda p: p.name)
        if pod.component == meta.ENGINE
        and meta.leads(pod.name)
        and pod.address
        and not pod.terminating
        and (pod.ready or (pod.served and pod.running))
    ]
    document: Object = {"model": service.spec.model.served_name, "replicas": entries}
    if settings is not None and settings.namespace:
        document["hosts"] = _hosts(service, pods, set(replicas) - leaving, settings)
    limits = service.spec.router.limits.to_dict()
    if limits:
        routers = [p.address for p in pods if p.component == meta.ROUTER and p.running and p.address]
        document |= {"limits": limits, "routers": sorted(routers)}
    return json.dumps(document, indent=1)


def _weight(pod: Pod, pods: Iterable[Pod]) -> float:
    """The pod's share of requests: while replicas have different layouts, by the tokens that they hold."""
    held = {p.uid: _held_tokens(p) for p in pods if p.component == meta.ENGINE and p.ready and meta.leads(p.name)}
    sizes = {p.tensor for p in pods if p.uid in held}
    most = max((tokens for tokens in held.values() if tokens), default=0)
    mine = held.get(pod.uid)
    if len(sizes) < 2 or not mine:
        return 1
    return 1 if mine == most else max(round(mine / most, 2), 0.01)


def _held_tokens(pod: Pod) -> int | None:
    return next((tokens for size, tokens in pod.feasible if size == pod.tensor), None)


def _hosts(service: InferenceService, pods: list[Pod], replicas: set[str], settings: Settings) -> list[Object]:
    """Where routers find replicas by themselves: as soon as they answer, and also while there is no operator. While its
    pod is going, a name leads to what is going."""
    domain = f"{headless_name(service)}.{service.metadata.namespace}.svc.{settings.cluster_domain}"
    going = {p.name for p in pods if p.component == meta.ENGINE and p.terminating}
    leaders = [meta.leader_name(name) for name in sorted(replicas)]
    return [{"name": name, "host": f"{name}.{domain}", "port": HTTP_PORT} for name in leaders if name not in going]


def replica_map(service: InferenceService, text: str) -> Object:
    """The ConfigMap with the file of replicas."""
    return meta.child(service, "ConfigMap", router_name(service), meta.ROUTER, data={"replicas.json": text})


def deployment(service: InferenceService, replicas: int, settings: Settings) -> Object:
    """The router's Deployment."""
    name, own = router_name(service), {meta.REVISION_LABEL: revision(service)}
    return meta.child(
        service,
        "Deployment",
        name,
        meta.ROUTER,
        more_labels=own,
        spec={
            "replicas": replicas,
            "selector": {"matchLabels": meta.selector(service, meta.ROUTER)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": pod_template(service, own, settings),
        },
    )


def pod_template(service: InferenceService, own: dict[str, str], settings: Settings) -> Object:
    """The router's pod template, overrides merged in."""
    router, drain = service.spec.router, _drain_seconds(service)
    args = [
        "--listen",
        f"0.0.0.0:{HTTP_PORT}",
        "--replicas-file",
        f"{ROUTER_FOLDER}/replicas.json",
        "--model",
        service.spec.model.served_name,
        "--policy",
        router.policy,
        "--hold-timeout-seconds",
        str(router.hold_timeout_seconds),
        "--max-held",
        str(router.max_held),
        "--drain-timeout-seconds",
        str(drain),
        "--shutdown-delay-seconds",
        str(settings.endpoints_delay),
    ]
    if room := int(parse_quantity(router.resources.memory or 0)) // 2:
        args += ["--max-buffered-bytes", str(room)]  # half of the memory, as by default: a router is not to be killed
    volumes: list[Object] = [{"name": "replicas", "configMap": {"name": router_name(service)}}]
    mounts: list[Object] = [{"name": "replicas", "mountPath": ROUTER_FOLDER, "readOnly": True}]
    if router.api_keys_secret_ref is not None:
        args += ["--api-keys-file", f"{KEYS_FOLDER}/keys"]
        volumes.append({"name": "keys", "secret": {"secretName": router.api_keys_secret_ref.name}})
        mounts.append({"name": "keys", "mountPath": KEYS_FOLDER, "readOnly": True})
    cpu, memory = router.resources.cpu or DEFAULT_CPU, router.resources.memory or DEFAULT_MEMORY
    container: Object = {
        "name": "router",
        **image(settings.operator_image, settings),
        "command": ["kvern-router"],
        "args": args,
        "ports": [{"name": "http", "containerPort": HTTP_PORT}],
        "startupProbe": _probe("/health", 1, 120),
        "readinessProbe": _probe("/ready", 2, 2),
        "livenessProbe": _probe("/health", 10, 3),
        "resources": {"requests": {"cpu": str(cpu), "memory": str(memory)}, "limits": {"memory": str(memory)}},
        "volumeMounts": mounts,
        "securityContext": HARDENED,
    }
    pod: Object = {
        **common_pod(service, settings),
        # Longer than the engines': whoever deletes both at once must not cut a stream here that still runs there.
        "terminationGracePeriodSeconds": drain + settings.endpoints_delay + GRACE_BEYOND_DRAIN,
        "topologySpreadConstraints": [spread(meta.selector(service, meta.ROUTER))],
        "containers": [container],
        "volumes": volumes,
    }
    template = {"metadata": {"labels": {**meta.labels(service, meta.ROUTER), **own}}, "spec": pod}
    result: Object = merged(template, service.spec.overrides.router_pod_template)
    return result


def _drain_seconds(service: InferenceService) -> int:
    return service.spec.rollout.drain_timeout_seconds + GRACE_BEYOND_DRAIN


def _probe(path: str, period: int, failures: int) -> Object:
    return {"httpGet": {"path": path, "port": "http"}, "periodSeconds": period, "failureThreshold": failures}
