"""What a spec asks for and this machine cannot give. Pure: refused, where the service would not be what it says; warned
about, where it serves all the same.
"""

from collections.abc import Collection

from kvern_operator.api.load import Problem
from kvern_operator.api.types import InferenceService


def refusals(service: InferenceService, claims: Collection[str]) -> list[Problem]:
    """Reasons not to start. `claims`: names given with --claim."""
    spec, found = service.spec, []
    scheme, _, rest = spec.model.uri.partition("://")
    if scheme == "pvc":
        claim = rest.partition("/")[0]
        if claim not in claims:
            text = f'"{spec.model.uri}" is in a cluster\'s claim; say kvern up --claim {claim}=FOLDER'
            found.append(Problem("spec.model.uri", text))
    elif scheme == "oci":
        text = f'"{spec.model.uri}": kvern up mounts no images; use hf://, s3://, builtin://, or pvc:// with --claim'
        found.append(Problem("spec.model.uri", text))
    if spec.router.mode != "Embedded":
        text = f"{spec.router.mode}: kvern up needs its router in front of the replicas; use Embedded (the default)"
        found.append(Problem("spec.router.mode", text))
    if spec.resources.nodes_per_replica > 1:
        text = f"{spec.resources.nodes_per_replica}: kvern up has one machine; use 1"
        found.append(Problem("spec.resources.nodesPerReplica", text))
    if spec.router.api_keys_secret_ref is not None:
        text = (
            f'Secret "{spec.router.api_keys_secret_ref.name}" is in a cluster, and without it everybody could ask; '
            "leave apiKeysSecretRef out for kvern up, which listens on 127.0.0.1 only"
        )
        found.append(Problem("spec.router.apiKeysSecretRef", text))
    return found


def warnings(service: InferenceService, claims: Collection[str], gpus: int) -> list[str]:
    """Fields that have no effect on this machine, as `path: what happens instead`."""
    spec, found = service.spec, []
    resources, cache = spec.resources, spec.cache
    if resources.gpus_per_pod and not gpus:
        found.append(f"spec.resources.gpusPerPod: {resources.gpus_per_pod}, but this machine has no GPU; using the CPU")
    if resources.gpu_type:
        found.append("spec.resources.gpuType: the GPUs of this machine are used, whatever they are")
    for name, value in (("memory", resources.memory), ("shmSize", resources.shm_size)):
        if value is not None:
            found.append(f"spec.resources.{name}: not enforced on processes")
    for name, given in (
        ("nodeSelector", resources.node_selector),
        ("tolerations", resources.tolerations),
        ("runtimeClassName", resources.runtime_class_name),
    ):
        if given:
            found.append(f"spec.resources.{name}: there are no nodes to choose from")
    if spec.engine.image:
        found.append("spec.engine.image: the installed kvern is run, not an image")
    if spec.model.secret_ref is not None:
        used = "the AWS_* variables of your environment are used"
        used = used if spec.model.uri.startswith("s3://") else "HF_TOKEN of your environment is used"
        found.append(f"spec.model.secretRef: no Secrets here; {used}")
    if cache is not None:
        if cache.claim_name is not None and cache.claim_name not in claims:
            found.append(f"spec.cache.claimName: no --claim {cache.claim_name}=FOLDER given; your own cache is used")
        elif cache.pvc is not None:
            found.append("spec.cache.pvc: no claims here; your own cache folder is used")
    if spec.router.resources.cpu is not None or spec.router.resources.memory is not None:
        found.append("spec.router.resources: not enforced on processes")
    if spec.overrides.pod_template or spec.overrides.router_pod_template or spec.overrides.cache_pod_template:
        found.append("spec.overrides: only command, args, env and probes of the container have an effect on processes")
    return found
