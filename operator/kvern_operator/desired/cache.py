"""What brings a model into the service's claim before any replica starts: a Job, and who may ask it. Pure.

The Job runs `kvern fetch` from the engine's image. It holds no GPU; the download itself sees to it that a claim's users
do not download twice (docs/adr/0014-model-cache.md). Once it has succeeded it stays, as the record that it has.
"""

from kvern_operator.api.types import InferenceService, InferenceServiceSpec
from kvern_operator.desired import meta
from kvern_operator.desired.engine import (
    ADMIN_FOLDER,
    ADMIN_PORT,
    CACHE_FOLDER,
    HARDENED,
    cache_claim,
    common_pod,
    image,
    node_choice,
    source_environment,
)
from kvern_operator.desired.merge import merged
from kvern_operator.observed import Object
from kvern_operator.settings import Settings

SUMMARY = "/dev/termination-log"  # what the container leaves there is in the pod's status when it has ended
# Never given up: a wrong token or a full claim is put right by a person, and the next try sees it.
TRIES = 1_000_000
MEMORY_REQUEST, MEMORY_LIMIT, CPU_REQUEST = "512Mi", "2Gi", "500m"
GPU_NODE = "nvidia.com/gpu.present"


def is_fetched(spec: InferenceServiceSpec) -> bool:
    """Whether the model is brought into a claim."""
    return spec.cache is not None and spec.model.uri.startswith(("hf://", "s3://"))


def job_name(service: InferenceService) -> str:
    """One Job for what decides where it fetches what, and how its pod is made: a Job's template cannot be changed."""
    part = service.spec.model_dump(
        mode="json",
        by_alias=True,
        exclude_defaults=True,
        include={
            "model": {"uri", "revision", "secret_ref", "endpoint"},
            "cache": True,
            "engine": {"image"},
            "resources": {"gpu_type", "node_selector", "tolerations", "runtime_class_name"},
            "overrides": {"cache_pod_template"},
        },
    )
    part.get("cache", {}).pop("reclaimPolicy", None)
    told = {name: value for name, value in part.items() if value}
    return f"{service.metadata.name}-fetch-{meta.digest(told, 6)}"


def fetch_job(service: InferenceService, settings: Settings) -> Object:
    """The Job of the present spec."""
    return meta.child(
        service,
        "Job",
        job_name(service),
        meta.FETCH,
        spec={"backoffLimit": TRIES, "template": pod_template(service, settings)},
    )


def pod_template(service: InferenceService, settings: Settings) -> Object:
    """The Job's pod template, overrides merged in."""
    spec, claim = service.spec, cache_claim(service)
    args = [spec.model.uri]
    if spec.model.revision is not None:
        args += ["--revision", spec.model.revision]
    args += ["--report-host", "0.0.0.0", "--report-port", str(ADMIN_PORT)]
    args += ["--admin-token-file", f"{ADMIN_FOLDER}/token", "--summary-file", SUMMARY]
    container: Object = {
        "name": meta.FETCH,
        **image(spec.engine.image or settings.engine_image, settings),
        "command": ["kvern", "fetch"],
        "args": args,
        "ports": [{"name": "admin", "containerPort": ADMIN_PORT}],
        "env": [*source_environment(spec), {"name": "HOME", "value": "/tmp"}],
        "resources": {
            "requests": {"cpu": CPU_REQUEST, "memory": MEMORY_REQUEST},
            "limits": {"memory": MEMORY_LIMIT},
        },
        "volumeMounts": [
            {"name": "admin", "mountPath": ADMIN_FOLDER, "readOnly": True},
            {"name": "cache", "mountPath": CACHE_FOLDER},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
        "securityContext": HARDENED,
    }
    if spec.model.secret_ref is not None:
        container["envFrom"] = [{"secretRef": {"name": spec.model.secret_ref.name}}]
    pod: Object = {
        **common_pod(service, settings),
        # In place, by the kubelet: what has come stays, and so does the claim's attachment.
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": 5,
        "containers": [container],
        "volumes": [
            {"name": "admin", "secret": {"secretName": meta.admin_secret_name(service), "defaultMode": 0o440}},
            {"name": "cache", "persistentVolumeClaim": {"claimName": claim}},
            {"name": "tmp", "emptyDir": {}},
        ],
        # Where engines may run: a disk of one node or zone is bound to where its first pod goes.
        **node_choice(spec),
    }
    if spec.resources.gpus_per_pod:
        term = {"matchExpressions": [{"key": GPU_NODE, "operator": "In", "values": ["true"]}]}
        near = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "preference": term}]}
        pod["affinity"] = {"nodeAffinity": near}
    template = {"metadata": {"labels": meta.labels(service, meta.FETCH)}, "spec": pod}
    result: Object = merged(template, spec.overrides.cache_pod_template)
    return result


def is_complete(job: Object) -> bool:
    """Whether a Job has succeeded."""
    status = job.get("status") or {}
    return _has(status, "Complete", "SuccessCriteriaMet") or bool(status.get("succeeded"))


def has_failed(job: Object) -> bool:
    """Whether a Job has been given up by its controller."""
    return _has(job.get("status") or {}, "Failed", "FailureTarget")


def _has(status: Object, *types: str) -> bool:
    found = status.get("conditions") or ()
    return any(c.get("type") in types and c.get("status") == "True" for c in found)
