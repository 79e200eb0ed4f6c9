"""The InferenceService resource: its spec as pydantic models. `crds/` is generated from these and from status.py.

Bounds, defaults, descriptions and rules stand here and nowhere else. What Kubernetes objects a spec leads to is the
business of `desired/`; reading files and wording errors that of load.py.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from kvern_operator.api.base import (
    MAX_INT32,
    Count,
    Fraction,
    IntOrPercent,
    KvernModel,
    ObjectName,
    Positive,
    Quantity,
    Rule,
    Seconds,
    ShortText,
    Text,
    field,
    is_zero,
    nested,
)
from kvern_operator.api.cache import Cache
from kvern_operator.api.flags import RESERVED_ARGS, argument_problem
from kvern_operator.api.model import Model, SecretRef
from kvern_operator.api.patterns import DNS_LABEL, MAX_NAME
from kvern_operator.api.status import InferenceServiceStatus

GROUP = "kvern.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "InferenceService"
PLURAL = "inferenceservices"


_ARGS_SCHEMA: dict[str, Any] = {
    "type": "object",
    "maxProperties": 64,
    "additionalProperties": {
        "x-kubernetes-int-or-string": True,
        "anyOf": [{"type": "integer"}, {"type": "string"}],
        "maxLength": 1024,
    },
    "x-kubernetes-validations": [
        # A rule a flag, so that the message names it: looking each up is cheap, building one message of all is not.
        *(
            {
                "rule": f"!('{name}' in self)",
                "message": f"{name}: "
                + (f"set spec.{owner} instead" if owner else "the operator decides it; leave it out"),
            }
            for name, owner in sorted(RESERVED_ARGS.items())
        ),
        {
            "rule": "self.all(k, k.matches('^[a-z][a-z0-9-]*$'))",
            "message": "names of flags are lower-case words with dashes and no leading dashes, such as block-size",
        },
    ],
}


def _check_args(args: dict[str, Any]) -> dict[str, Any]:
    found = ((name, argument_problem(name, value)) for name, value in args.items())
    problems = [{"field": name, "message": text, "values": {}} for name, text in found if text]
    if problems:
        raise PydanticCustomError("rule", "{text}", {"text": "engine.args", "problems": problems})
    return args


# Any and not str | int: one validator sees every entry, so that all that is wrong is said at once.
EngineArgs = Annotated[dict[str, Any], Field(max_length=64), AfterValidator(_check_args), WithJsonSchema(_ARGS_SCHEMA)]


class Engine(KvernModel):
    """How the engine runs."""

    image: Text | None = field(None, "Container image of the engine. Default: the one the operator was released with.")
    args: EngineArgs = field(
        {}, 'Further engine flags without dashes, such as block-size: 32 or enforce-eager: "true" (see kvern serve -h).'
    )
    max_model_len: Positive | None = field(None, "Longest prompt + output in tokens. Default: the model's.")
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] | None = field(
        None, "Most sequences in a step. Default: by device."
    )
    gpu_memory_utilization: Fraction | None = field(
        None, 'Share of the device\'s memory to use, such as "0.92", the default.'
    )
    quantization: Literal["fp8", "fp8_per_tensor", "fp8_per_channel"] | None = field(
        None, "Quantize weights while loading."
    )
    kv_cache_dtype: Literal["auto", "fp8"] | None = field(None, "Type of the KV cache. Default: auto, the model's.")


class Toleration(KvernModel):
    """As in a pod."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "value",
            "!has(self.value) || !has(self.operator) || self.operator != 'Exists'",
            "operator Exists takes no value; leave it out, or use Equal",
            lambda t: t.value is None or t.operator != "Exists",
            ("value",),
        ),
    )

    key: ShortText | None = field(None, "Taint key; none: all keys, with operator Exists.")
    operator: Literal["Exists", "Equal"] | None = field(None, "Default: Equal.")
    value: ShortText | None = field(None, "Taint value.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = field(None, "Default: all effects.")
    toleration_seconds: Count | None = field(None, "How long NoExecute is tolerated. Default: for ever.")


LabelMap = Annotated[
    dict[str, Annotated[str, Field(max_length=63)]],
    Field(max_length=32),
    WithJsonSchema(
        {"type": "object", "maxProperties": 32, "additionalProperties": {"type": "string", "maxLength": 63}}
    ),
]


class Resources(KvernModel):
    """What one pod of a replica gets."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "gpuType",
            "!has(self.gpuType) || self.gpusPerPod > 0",
            "gpuType needs gpusPerPod above 0",
            lambda r: r.gpu_type is None or r.gpus_per_pod > 0,
            ("gpuType", "gpusPerPod"),
        ),
    )

    gpu_type: ShortText | None = field(None, "GPU product as nodes are labelled (nvidia.com/gpu.product).")
    gpus_per_pod: Annotated[int, Field(ge=0, le=64)] = field(1, "GPUs of a pod; 0: the engine runs on the CPU.")
    nodes_per_replica: Annotated[int, Field(ge=1, le=64)] = field(1, "Pods (nodes) that one replica spans.")
    cpu: Quantity | None = field(None, 'CPUs of a pod, such as "4" or "500m".')
    memory: Quantity | None = field(None, 'Memory of a pod, such as "16Gi".')
    shm_size: Quantity | None = field(None, "Size of /dev/shm. Default: 1Gi a GPU, at least 64Mi.")
    node_selector: LabelMap = field({}, "Labels that a node must have.")
    tolerations: list[Toleration] = field(
        [], "Taints that pods tolerate.", max_length=32, extra={"x-kubernetes-list-type": "atomic"}
    )
    runtime_class_name: ObjectName | None = field(None, "RuntimeClass of the pods.")


TensorSize = Annotated[int, Field(ge=1, le=64)]


class TensorParallelism(KvernModel):
    """Devices each layer is split over."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "min",
            "!has(self.min) || !has(self.max) || self.min <= self.max",
            "min must be at most max",
            lambda t: t.min is None or t.max is None or t.min <= t.max,
            ("min", "max"),
        ),
        Rule(
            "size",
            "!has(self.size) || "
            "((!has(self.min) || self.size >= self.min) && (!has(self.max) || self.size <= self.max))",
            "size must be within min..max",
            lambda t: t.size is None or (t.min or 1) <= t.size <= (t.max or MAX_INT32),
            ("size", "min", "max"),
        ),
    )

    mode: Literal["Fixed", "Recommend", "Auto"] = field(
        "Fixed", "Fixed keeps size; Recommend writes what it would do to status; Auto changes the layout under load."
    )
    size: TensorSize | None = field(None, "Tensor-parallel size. Default: all GPUs of a replica in one engine.")
    min: TensorSize | None = field(None, "Smallest size that Auto and Recommend consider.")
    max: TensorSize | None = field(None, "Largest size that Auto and Recommend consider.")
    raise_after_seconds: Seconds = field(300, "How long a reason to raise the size must last.")
    lower_after_seconds: Seconds = field(900, "How long a reason to lower the size must last.")
    dwell_seconds: Seconds = field(1800, "Shortest time between two changes.")
    verify_seconds: Seconds = field(600, "How long a change is watched before it counts as a success.")


class PipelineParallelism(KvernModel):
    """Stages the layers are split into."""

    size: Annotated[int, Field(ge=1, le=64)] = field(1, "Pipeline-parallel size.")


class Parallelism(KvernModel):
    """The layout of a replica's GPUs: gpusPerPod x nodesPerReplica = data x tensor x pipeline."""

    tensor: TensorParallelism = nested(TensorParallelism, "Tensor parallelism.")
    pipeline: PipelineParallelism = nested(PipelineParallelism, "Pipeline parallelism.")
    expert: bool = field(False, "Split experts instead of layers where the model is a mixture of experts.")


class Slo(KvernModel):
    """Latency that the autoscaler keeps."""

    ttft_p95_ms: Positive | None = field(None, "Time to the first token, 95th percentile, milliseconds.")
    itl_p95_ms: Positive | None = field(None, "Time between tokens, 95th percentile, milliseconds.")


class Autoscaling(KvernModel):
    """How the number of replicas is decided."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "minReplicas",
            "!has(self.maxReplicas) || self.minReplicas <= self.maxReplicas",
            "minReplicas must be at most maxReplicas",
            lambda a: a.max_replicas is None or a.min_replicas <= a.max_replicas,
            ("minReplicas", "maxReplicas"),
        ),
        Rule(
            "maxReplicas",
            "!has(self.mode) || !(self.mode in ['Internal', 'Recommend']) || has(self.maxReplicas)",
            "maxReplicas is needed in modes Internal and Recommend",
            lambda a: a.mode not in ("Internal", "Recommend") or a.max_replicas is not None,
            ("mode",),
        ),
    )

    mode: Literal["Off", "Recommend", "Internal", "External"] = field(
        "Off",
        "Off: spec.replicas. Internal: the operator decides. Recommend: it says what it would decide. "
        "External: an HPA, KEDA or kubectl scale writes spec.replicas.",
    )
    min_replicas: Annotated[int, Field(ge=0, le=10_000)] = field(1, "Fewest replicas; 0 allows scaling to zero.")
    max_replicas: Annotated[int, Field(ge=1, le=10_000)] | None = field(None, "Most replicas.")
    gpu_budget: Positive | None = field(None, "Most GPUs of all replicas together.")
    kv_target: Fraction = field("0.80", "KV cache usage at which a replica counts as full.")
    queue_target: Positive = field(5, "Waiting requests a replica above which it counts as saturated.")
    slo: Slo = nested(Slo, "Latency targets.")
    idle_seconds: Seconds = field(900, "Without a request for this long, scale to zero where minReplicas is 0.")
    scale_down_stabilization_seconds: Seconds = field(300, "How long fewer replicas must suffice before one goes.")
    priority: Annotated[int, Field(ge=-1_000_000, le=1_000_000)] = field(
        0, "Among services that compete for a namespace's GPUs, the higher one wins."
    )


class Rollout(KvernModel):
    """How a changed spec replaces running replicas."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "maxUnavailable",
            "!has(self.maxSurge) || !has(self.maxUnavailable) || "
            "!((type(self.maxSurge) == string ? self.maxSurge == '0%' : self.maxSurge == 0) && "
            "(type(self.maxUnavailable) == string ? self.maxUnavailable == '0%' : self.maxUnavailable == 0))",
            "maxSurge and maxUnavailable must not both be 0",
            lambda r: not (is_zero(r.max_surge) and is_zero(r.max_unavailable)),
            ("maxSurge", "maxUnavailable"),
        ),
    )

    strategy: Literal["Auto", "Surge", "DrainSwap", "Recreate"] = field(
        "Auto",
        "Surge starts the new replica before the old one goes; DrainSwap the other way round, for where no GPU is "
        "spare; Recreate stops all first; Auto surges where there is room.",
    )
    paused: bool = field(False, "Leave replicas of the old revision alone.")
    max_surge: IntOrPercent = field(1, 'Replicas above the desired number during a rollout, such as 1 or "25%".')
    max_unavailable: IntOrPercent = field(0, 'Replicas that may be missing during a rollout, such as 1 or "25%".')
    drain_timeout_seconds: Annotated[int, Field(ge=0, le=3600)] = field(
        300, "How long a replica may take to finish its requests before it is stopped."
    )


class Limits(KvernModel):
    """Rate limits of a tenant (an API key)."""

    requests_per_minute: Positive | None = field(None, "Requests a minute.")
    tokens_per_minute: Positive | None = field(None, "Prompt and output tokens a minute.")


class RouterResources(KvernModel):
    """What a router pod gets."""

    cpu: Quantity | None = field(None, "CPUs that are asked for. Default: 250m.")
    memory: Quantity | None = field(None, "Memory, asked for and limited. Default: 512Mi.")


class Router(KvernModel):
    """The proxy in front of the replicas."""

    mode: Literal["Embedded", "InferencePool", "None"] = field(
        "Embedded", "Embedded: Kvern's router. InferencePool: a gateway's endpoint picker. None: the Service alone."
    )
    limits: Limits = nested(Limits, "Rate limits a tenant.")
    policy: Literal["PrefixAware", "LeastLoad", "Session"] = field(
        "PrefixAware", "How a replica is chosen: by shared prompt prefix, by load alone, or by session."
    )
    hold_timeout_seconds: Annotated[int, Field(ge=0, le=3600)] = field(
        300, "How long a request is held while no replica is ready; then 503 with Retry-After."
    )
    max_held: Annotated[int, Field(ge=0, le=100_000)] = field(1000, "Most requests held; more get 503 at once.")
    api_keys_secret_ref: SecretRef | None = field(
        None,
        "Secret whose entry `keys` holds the keys that clients may use, one a line: `key`, or `name: key` where name "
        "is the tenant that it belongs to, in limits and in the access log.",
    )
    replicas: Annotated[int, Field(ge=1, le=64)] = field(2, "Router pods; kvern up runs one.")
    resources: RouterResources = nested(RouterResources, "Resources of a router pod.")


Preserved = Annotated[dict[str, Any], WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True})]


class Overrides(KvernModel):
    """Merged last into what the operator makes. Lists of named items are merged by name."""

    pod_template: Preserved = field({}, "Merged into the pod template of the engines (metadata and spec).")
    router_pod_template: Preserved = field({}, "Merged into the pod template of the router.")
    cache_pod_template: Preserved = field({}, "Merged into the pod template of the download into the cache.")


def _layout_fits(spec: "InferenceServiceSpec") -> bool:
    size = spec.parallelism.tensor.size
    gpus = spec.resources.gpus_per_pod * spec.resources.nodes_per_replica
    return gpus == 0 or gpus % ((size or 1) * spec.parallelism.pipeline.size) == 0


class InferenceServiceSpec(KvernModel):
    """What to serve and how."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "parallelism.tensor.size",
            "self.resources.gpusPerPod == 0 || "
            "(self.resources.gpusPerPod * self.resources.nodesPerReplica) % "
            "((has(self.parallelism.tensor.size) ? self.parallelism.tensor.size : 1) * "
            "self.parallelism.pipeline.size) == 0",
            "tensor size x pipeline size must divide gpusPerPod x nodesPerReplica",
            _layout_fits,
            ("resources.gpusPerPod", "resources.nodesPerReplica", "parallelism.pipeline.size"),
        ),
        Rule(
            "resources.nodesPerReplica",
            "self.resources.gpusPerPod > 0 || (has(self.engine.args) && 'data-parallel-size' in self.engine.args) || "
            "((has(self.parallelism.tensor.size) ? self.parallelism.tensor.size : 1) * self.parallelism.pipeline.size) "
            "% self.resources.nodesPerReplica == 0",
            "without GPUs, tensor size x pipeline size must be a multiple of nodesPerReplica",
            lambda s: (
                s.resources.gpus_per_pod > 0
                or "data-parallel-size" in s.engine.args
                or (s.parallelism.tensor.size or 1) * s.parallelism.pipeline.size % s.resources.nodes_per_replica == 0
            ),
            ("resources.nodesPerReplica", "parallelism.pipeline.size"),
        ),
        Rule(
            "engine.args",
            "self.resources.gpusPerPod == 0 || !has(self.engine.args) || !('data-parallel-size' in self.engine.args)",
            "data-parallel-size follows from gpusPerPod / (tensor x pipeline); it may be given for CPU pods only",
            lambda s: s.resources.gpus_per_pod == 0 or "data-parallel-size" not in s.engine.args,
            ("resources.gpusPerPod",),
        ),
    )

    model: Model = field(..., "What is served.")
    engine: Engine = nested(Engine, "How the engine runs.")
    resources: Resources = nested(Resources, "What one pod of a replica gets.")
    replicas: Annotated[int, Field(ge=0, le=10_000)] = field(1, "Data-parallel replicas; what kubectl scale writes.")
    parallelism: Parallelism = nested(Parallelism, "Layout of a replica's GPUs.")
    autoscaling: Autoscaling = nested(Autoscaling, "How the number of replicas is decided.")
    rollout: Rollout = nested(Rollout, "How a changed spec replaces running replicas.")
    cache: Cache | None = field(None, "Where the model is kept between starts.")
    router: Router = nested(Router, "The proxy in front of the replicas.")
    overrides: Overrides = nested(Overrides, "Merged last into what the operator makes.")
    suspend: bool = field(False, "Stop all replicas and the router, keep everything else.")


class ObjectMeta(KvernModel):
    """The part of an object's metadata that Kvern reads; the rest is kept aside."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME, pattern=DNS_LABEL)] = field(
        ..., "Name of the service."
    )
    namespace: Annotated[str, Field(min_length=1, max_length=63)] = field("default", "Namespace.")
    uid: str = field("", "Set by the API server.")
    generation: int = field(1, "Counts changes of the spec; set by the API server.")
    labels: dict[str, str] = field({}, "Labels.")
    annotations: dict[str, str] = field({}, "Annotations.")


class InferenceService(KvernModel):
    """A language model served behind an OpenAI-compatible endpoint."""

    api_version: Literal["kvern.dev/v1alpha1"] = field(..., "kvern.dev/v1alpha1")
    kind: Literal["InferenceService"] = field(..., "InferenceService")
    metadata: ObjectMeta = field(..., "Standard object metadata.")
    spec: InferenceServiceSpec = field(..., "What to serve and how.")
    status: InferenceServiceStatus = nested(InferenceServiceStatus, "What the operator found and did.")


# The rule on metadata.name stands at the root of the schema: it is the one place where CEL sees metadata.
ROOT_VALIDATIONS = [
    {
        "rule": f"size(self.metadata.name) <= {MAX_NAME} && self.metadata.name.matches('{DNS_LABEL}')",
        "message": f"metadata.name must have at most {MAX_NAME} characters: a-z, 0-9 and dashes, a letter first",
    }
]


def immutable_changes(old: InferenceServiceSpec, new: InferenceServiceSpec) -> list[str]:
    """What an update may not change, as lines `path: value: what is right`. The schema has the same rules in CEL."""
    if old.model.name == new.model.name:
        return []
    message = Model.TRANSITION_RULES[0][2]
    return [f"spec.model.name: {new.model.name!r} (was {old.model.name!r}): {message}"]
