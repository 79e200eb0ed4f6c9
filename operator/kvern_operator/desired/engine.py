"""One replica: its StatefulSet, the ConfigMap with its layout, and the revision that its pods are made from. Pure."""

import math
from typing import Any

from kvern_operator.api.base import parse_quantity
from kvern_operator.api.flags import to_command_line
from kvern_operator.api.types import InferenceService, InferenceServiceSpec
from kvern_operator.desired import meta
from kvern_operator.desired.layout import Layout, wanted_layout
from kvern_operator.desired.merge import merged
from kvern_operator.desired.probes import engine_probes
from kvern_operator.observed import Object
from kvern_operator.settings import Settings

HTTP_PORT, ADMIN_PORT = 8000, 8001
ADMIN_FOLDER = "/etc/kvern/admin"
CACHE_FOLDER = "/var/cache/kvern"
HUB_FOLDER = f"{CACHE_FOLDER}/huggingface"
CLAIMS_FOLDER = "/models"
IMAGE_FOLDER = "/model-image"  # an oci:// model, mounted by the kubelet
GRACE_BEYOND_DRAIN = 30  # seconds between the end of a drain and the kubelet's SIGKILL

HARDENED: Object = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
POD_SECURITY: Object = {
    "runAsNonRoot": True,
    "runAsUser": 65532,
    "runAsGroup": 65532,
    "fsGroup": 65532,
    "seccompProfile": {"type": "RuntimeDefault"},
}


def revision(spec: InferenceServiceSpec) -> str:
    """The hash of what engine pods are made from. Defaults are left out: a field that a later version of the operator
    adds changes no hash, so that its upgrade restarts no pod."""
    part = spec.model_dump(
        mode="json",
        by_alias=True,
        exclude_defaults=True,
        include={"model": True, "engine": True, "resources": True, "cache": True, "overrides": {"pod_template"}},
    )
    if not part.get("overrides"):
        part.pop("overrides", None)
    part.get("cache", {}).pop("reclaimPolicy", None)
    return meta.digest(part)


def headless_name(service: InferenceService) -> str:
    """The Service that gives engine pods their DNS names."""
    return f"{service.metadata.name}-engines"


def cache_claim(service: InferenceService) -> str | None:
    """The name of the claim that keeps the model, if there is one."""
    cache = service.spec.cache
    if cache is None:
        return None
    return cache.claim_name or f"{service.metadata.name}-cache"


def layout_map(service: InferenceService, name: str, layout: Layout) -> Object:
    """The ConfigMap from which a replica's pods read their layout at boot."""
    return meta.child(service, "ConfigMap", f"{name}-layout", meta.ENGINE, data=layout.environment())


def stateful_set(service: InferenceService, name: str, layout: Layout, settings: Settings) -> Object:
    """The StatefulSet of one replica, of the present revision."""
    spec, own = service.spec, {meta.REPLICA_LABEL: name, meta.REVISION_LABEL: revision(service.spec)}
    gpus = spec.resources.gpus_per_pod * spec.resources.nodes_per_replica
    return meta.child(
        service,
        "StatefulSet",
        name,
        meta.ENGINE,
        more_labels=own,
        annotations={meta.LAYOUT: str(layout), meta.GPUS: str(gpus)},
        spec={
            "replicas": spec.resources.nodes_per_replica,
            "serviceName": headless_name(service),
            "podManagementPolicy": "Parallel",
            # Reconcile replaces whole replicas; no controller restarts a pod behind its back.
            "updateStrategy": {"type": "OnDelete"},
            "selector": {"matchLabels": {meta.REPLICA_LABEL: name}},
            "template": pod_template(service, name, own, settings),
        },
    )


def renamed(workload: Object, name: str) -> Object:
    """Another replica made after one that is there (as it was applied), whatever the spec says by now."""
    old = str(workload["metadata"]["name"])
    result: Object = _renamed(meta.with_annotations(workload, **{meta.DRAINING_SINCE: None}), old, name)
    return result


def _renamed(value: Any, old: str, new: str) -> Any:
    if isinstance(value, dict):
        return {key: _renamed(inner, old, new) for key, inner in value.items()}
    if isinstance(value, list):
        return [_renamed(inner, old, new) for inner in value]
    # The name itself, and what begins with it: the layout's ConfigMap, the pods' DNS names.
    ours = isinstance(value, str) and (value == old or value.startswith(f"{old}-"))
    return new + value[len(old) :] if ours else value


def pod_template(service: InferenceService, name: str, own: dict[str, str], settings: Settings) -> Object:
    """The pod template of a replica, overrides merged in."""
    spec = service.spec
    volumes, mounts = _volumes(service)
    container: Object = {
        "name": "engine",
        **image(spec.engine.image or settings.engine_image, settings),
        "command": ["kvern", "serve"],
        "args": arguments(service, settings),
        "ports": [{"name": "http", "containerPort": HTTP_PORT}, {"name": "admin", "containerPort": ADMIN_PORT}],
        "envFrom": [{"configMapRef": {"name": f"{name}-layout"}}],
        "env": [*_environment(service), *_place_among_nodes(service, name, settings)],
        **engine_probes(spec.model.uri),
        "resources": _resources(spec),
        "volumeMounts": mounts,
        "securityContext": HARDENED,
    }
    pod: Object = {
        **common_pod(service, settings),
        "terminationGracePeriodSeconds": spec.rollout.drain_timeout_seconds + GRACE_BEYOND_DRAIN,
        "topologySpreadConstraints": [spread(meta.selector(service, meta.ENGINE))],
        "containers": [container],
        "volumes": volumes,
        **node_choice(spec),
    }
    if spec.model.secret_ref is not None:
        _use_secret(spec.model.uri, spec.model.secret_ref.name, container, pod)
    template = {"metadata": {"labels": {**meta.labels(service, meta.ENGINE), **own}}, "spec": pod}
    result: Object = merged(template, spec.overrides.pod_template)
    return result


def _use_secret(uri: str, secret: str, container: Object, pod: Object) -> None:
    """Credentials of the model's source: for the kubelet where it pulls an image, else for the engine."""
    if uri.startswith("oci://"):
        pod["imagePullSecrets"] = [*pod.get("imagePullSecrets", ()), {"name": secret}]
    else:
        container["envFrom"].append({"secretRef": {"name": secret}})


def node_choice(spec: InferenceServiceSpec) -> Object:
    """The part of a pod that says which nodes will do."""
    resources = spec.resources
    chosen: Object = {}
    selector = dict(resources.node_selector)
    if resources.gpu_type:
        selector["nvidia.com/gpu.product"] = resources.gpu_type
    if selector:
        chosen["nodeSelector"] = selector
    if resources.tolerations:
        chosen["tolerations"] = [t.to_dict() for t in resources.tolerations]
    if resources.runtime_class_name:
        chosen["runtimeClassName"] = resources.runtime_class_name
    return chosen


def wanted_image(service: InferenceService, settings: Settings) -> str:
    """The image that a replica would be started with now."""
    return image_of(pod_template(service, "", {}, settings))


def image_of(template: Object) -> str:
    """The image of a template's first container, which is the one that serves."""
    return str(template["spec"]["containers"][0].get("image", ""))


def common_pod(service: InferenceService, settings: Settings) -> Object:
    """What pods of engines and routers have in common: nothing of the API server, no privileges."""
    pod: Object = {
        "serviceAccountName": meta.account_name(service),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # a Service called kvern would set KVERN_PORT
        "securityContext": POD_SECURITY,
    }
    if settings.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in settings.image_pull_secrets]
    return pod


def image(reference: str, settings: Settings) -> Object:
    """A container's image. The kubelet keeps the end of the log of a container that fails: its last words are read
    from the pod's status, and nobody needs the right to read logs."""
    pull = {"imagePullPolicy": settings.image_pull_policy} if settings.image_pull_policy else {}
    return {"image": reference, **pull, "terminationMessagePolicy": "FallbackToLogsOnError"}


def spread(selector: dict[str, str]) -> Object:
    """Pods go to different nodes where that is possible: one node's end is not the service's. Each revision by itself:
    else the new pods of a rollout spread beside old ones that are about to go, and may end up together."""
    return {
        "matchLabelKeys": [meta.REVISION_LABEL],
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": selector},
    }


def arguments(service: InferenceService, settings: Settings) -> list[str]:
    """What follows `kvern serve`: the model, then flags. The layout is not among them (see layout_map)."""
    spec, engine = service.spec, service.spec.engine
    typed: list[tuple[str, Any]] = [
        ("served-model-name", spec.model.served_name),
        ("revision", spec.model.revision),
        ("host", "0.0.0.0"),
        ("port", HTTP_PORT),
        ("admin-host", "0.0.0.0"),
        ("admin-port", ADMIN_PORT),
        ("admin-token-file", f"{ADMIN_FOLDER}/token"),
        ("drain-timeout-seconds", spec.rollout.drain_timeout_seconds),
        # A router sends again what is refused; a Service that still knows the pod does not.
        ("shutdown-grace-seconds", None if spec.router.mode == "Embedded" else settings.endpoints_delay),
        ("max-model-len", engine.max_model_len),
        ("max-num-seqs", engine.max_num_seqs),
        ("gpu-memory-utilization", engine.gpu_memory_utilization),
        ("quantization", engine.quantization),
        ("kv-cache-dtype", engine.kv_cache_dtype),
    ]
    if spec.resources.gpus_per_pod == 0 and "device" not in engine.args:
        typed.append(("device", "cpu"))
    out = [model_argument(spec.model.uri)]
    for name, value in typed:
        if value is not None:
            out += [f"--{name}", str(value)]
    for name, value in sorted(engine.args.items()):
        if name == "data-parallel-size":
            continue  # part of the layout, which changes
        out += to_command_line(name, value)
    return out


def model_argument(uri: str) -> str:
    """What the engine is told to load: a claim's path or an image as it is mounted, other addresses as they are."""
    if uri.startswith("pvc://"):
        return f"{CLAIMS_FOLDER}/{uri.removeprefix('pvc://')}"
    return IMAGE_FOLDER if uri.startswith("oci://") else uri


def _environment(service: InferenceService) -> list[Object]:
    spec = service.spec
    env: list[Object] = [
        *source_environment(spec),
        {"name": "HOME", "value": "/tmp"},
        {"name": "KVERN_POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
    ]
    if spec.resources.cpu is not None:
        # Without it torch counts the node's cores, not the pod's share of them. Each rank has a share of that.
        cores = math.ceil(parse_quantity(spec.resources.cpu))
        ranks = wanted_layout(spec).ranks // spec.resources.nodes_per_replica
        env.append({"name": "OMP_NUM_THREADS", "value": str(max(1, cores // max(1, ranks)))})
    if spec.parallelism.tensor.mode == "Auto":
        # Ready for the planner's changes; that takes 5 % of a GPU and seconds at the start, which Fixed need not pay.
        env.append({"name": "KVERN_GPU_LAYOUT_SWITCH", "value": "1"})
    return env


def source_environment(spec: InferenceServiceSpec) -> list[Object]:
    """Where models are kept, and which server they come from."""
    env = [{"name": "KVERN_CACHE_DIR", "value": CACHE_FOLDER}, {"name": "HF_HOME", "value": HUB_FOLDER}]
    if spec.cache is not None and spec.cache.pvc is not None:
        # Many kinds of storage let a claim grow over its size, into what belongs to others.
        env.append({"name": "KVERN_CACHE_LIMIT", "value": str(int(parse_quantity(spec.cache.pvc.size)))})
    if spec.model.endpoint is not None:
        server = "HF_ENDPOINT" if spec.model.uri.startswith("hf://") else "AWS_ENDPOINT_URL_S3"
        env.append({"name": server, "value": spec.model.endpoint})
    return env


def _place_among_nodes(service: InferenceService, name: str, settings: Settings) -> list[Object]:
    """How the pods of a replica that spans several find each other: the first one leads, by its name in the headless
    Service; each has its own number from its label, and its address."""
    nodes, metadata = service.spec.resources.nodes_per_replica, service.metadata
    if nodes == 1:
        return []
    leader = f"{name}-0.{headless_name(service)}.{metadata.namespace}.svc.{settings.cluster_domain}"
    number = {"fieldRef": {"fieldPath": f"metadata.labels['{meta.POD_INDEX_LABEL}']"}}
    return [
        {"name": "KVERN_NNODES", "value": str(nodes)},
        {"name": "KVERN_MASTER_ADDR", "value": leader},
        {"name": "KVERN_NODE_RANK", "valueFrom": number},
        {"name": "KVERN_NODE_ADDR", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ]


def _resources(spec: InferenceServiceSpec) -> Object:
    wanted = {"cpu": spec.resources.cpu, "memory": spec.resources.memory}
    requests = {name: str(value) for name, value in wanted.items() if value is not None}
    # Memory is limited at its request; CPU is not limited: throttling would show as latency.
    limits = {name: value for name, value in requests.items() if name == "memory"}
    if spec.resources.gpus_per_pod:
        limits[meta.GPU] = str(spec.resources.gpus_per_pod)
    return {name: values for name, values in (("requests", requests), ("limits", limits)) if values}


def shm_size(spec: InferenceServiceSpec) -> str:
    """Size of /dev/shm: collectives of several processes need more than a container's 64Mi."""
    if spec.resources.shm_size is not None:
        return str(spec.resources.shm_size)
    return f"{spec.resources.gpus_per_pod}Gi" if spec.resources.gpus_per_pod else "64Mi"


def _volumes(service: InferenceService) -> tuple[list[Object], list[Object]]:
    spec, claim = service.spec, cache_claim(service)
    cache: Object = {"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {}}
    volumes: list[Object] = [
        {"name": "admin", "secret": {"secretName": meta.admin_secret_name(service), "defaultMode": 0o440}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": shm_size(spec)}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "cache", **cache},
    ]
    mounts: list[Object] = [
        {"name": "admin", "mountPath": ADMIN_FOLDER, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "cache", "mountPath": CACHE_FOLDER},
    ]
    if spec.model.uri.startswith("pvc://"):
        source = spec.model.uri.removeprefix("pvc://").partition("/")[0]
        volumes.append({"name": "model", "persistentVolumeClaim": {"claimName": source, "readOnly": True}})
        mounts.append({"name": "model", "mountPath": f"{CLAIMS_FOLDER}/{source}", "readOnly": True})
    elif spec.model.uri.startswith("oci://"):
        volumes.append({"name": "model", "image": {"reference": spec.model.uri.removeprefix("oci://")}})
        mounts.append({"name": "model", "mountPath": IMAGE_FOLDER, "readOnly": True})
    return volumes, mounts
