"""The status of an InferenceService as pydantic models: what the operator found, decided and did."""

from typing import Annotated, Literal

from pydantic import Field, WithJsonSchema

from kvern_operator.api.base import Count, KvernModel, ShortText, Time, field, nested

ConditionType = Literal[
    "Ready",
    "Available",
    "Progressing",
    "ModelCached",
    "MetricsAvailable",
    "ScalingActive",
    "ScalingLimited",
    "ParallelismStable",
    "Degraded",
    "FieldsIgnored",
]


class Condition(KvernModel):
    """One observation, as in every Kubernetes status."""

    type: ConditionType = field(..., "What is observed.")
    status: Literal["True", "False", "Unknown"] = field(..., "Whether it holds.")
    observed_generation: Count = field(0, "Generation of the spec that this was computed from.")
    last_transition_time: Time = field(..., "When status last changed.")
    reason: Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z][A-Za-z0-9]*$")] = field(
        ..., "One CamelCase word for programs."
    )
    message: Annotated[str, Field(max_length=2048)] = field("", "A sentence for people.")


class FeasibleSize(KvernModel):
    """A tensor-parallel size that a replica could run at."""

    size: Count = field(..., "Tensor-parallel size.")
    kv_tokens: Annotated[int, Field(ge=0)] = field(..., "Tokens of KV cache at this size.")


class ParallelismStatus(KvernModel):
    """The layout that runs and the one that is wanted."""

    current: Count | None = field(None, "Tensor-parallel size of the ready replicas.")
    target: Count | None = field(None, "Size that is wanted.")
    recommended: Count | None = field(None, "Size that the planner would choose.")
    feasible: list[FeasibleSize] = field(
        [], "Sizes that the pods report.", max_length=64, extra={"x-kubernetes-list-type": "atomic"}
    )
    last_change_time: Time | None = field(None, "When target last changed.")


class Capacity(KvernModel):
    """What the service holds."""

    gpus: Count = field(0, "GPUs of all replicas.")
    kv_tokens_per_replica: Annotated[int, Field(ge=0)] | None = field(None, "Tokens of KV cache a replica.")


Inputs = Annotated[
    dict[str, Annotated[str, Field(max_length=128)]],
    Field(max_length=32),
    WithJsonSchema(
        {"type": "object", "maxProperties": 32, "additionalProperties": {"type": "string", "maxLength": 128}}
    ),
]


class Decision(KvernModel):
    """One change of the number of replicas."""

    time: Time = field(..., "When it was taken.")
    from_: Count = field(..., "Replicas before.", alias="from")
    to: Count = field(..., "Replicas after.")
    reason: Annotated[str, Field(max_length=1024)] = field(..., "Why, in words.")
    limited_by: ShortText | None = field(None, "What kept it from going further.")
    inputs: Inputs = field({}, "The numbers it was taken from.")


class AutoscalingStatus(KvernModel):
    """Decisions about replicas."""

    last_decision: Decision | None = field(None, "The last one.")
    history: list[Decision] = field(
        [], "The last ten, oldest first.", max_length=10, extra={"x-kubernetes-list-type": "atomic"}
    )


class Revision(KvernModel):
    """Hashes of the part of the spec that pods are made from."""

    current: ShortText | None = field(None, "Revision that all ready replicas run.")
    updated: ShortText | None = field(None, "Revision of the present spec.")


class CacheStatus(KvernModel):
    """The model's files."""

    phase: Literal["None", "Pending", "Downloading", "Ready", "Failed"] = field("None", "State of the cache.")
    bytes: Annotated[int, Field(ge=0)] | None = field(None, "Bytes that are there.")
    total: Annotated[int, Field(ge=0)] | None = field(None, "Bytes of the whole model.")


class Startup(KvernModel):
    """How long the replica that became ready last took, by what it waited for; whole seconds."""

    pod: ShortText = field(..., "Its first pod.")
    created: Time = field(..., "When the pod was created.")
    scheduling_seconds: Count = field(..., "Until it had a node.")
    creating_seconds: Count = field(..., "Then until its container ran: image, volumes, sandbox.")
    loading_seconds: Count = field(..., "Then until it was ready: processes, model, memory.")
    total_seconds: Count = field(..., "All of it.")


class InferenceServiceStatus(KvernModel):
    """What the operator found and did."""

    observed_generation: Count = field(0, "Generation of the spec that this status belongs to.")
    replicas: Count = field(0, "Replicas that exist.")
    ready_replicas: Count = field(0, "Replicas that answer.")
    desired_replicas: Count = field(0, "Replicas that are wanted.")
    selector: Annotated[str, Field(max_length=512)] = field("", "Label selector of the engine pods, for HPAs.")
    url: Annotated[str, Field(max_length=512)] = field("", "Base URL for OpenAI clients.")
    model: Annotated[str, Field(max_length=253)] = field("", "Name clients ask for.")
    parallelism: ParallelismStatus = nested(ParallelismStatus, "Layout.")
    device: Annotated[str, Field(max_length=256)] | None = field(
        None, "What the ready replicas compute on, as they say: cpu, or the name of the GPU."
    )
    startup: Startup | None = field(None, "Time to Ready of the replica that became ready last.")
    capacity: Capacity = nested(Capacity, "What the service holds.")
    autoscaling: AutoscalingStatus = nested(AutoscalingStatus, "Decisions about replicas.")
    revision: Revision = nested(Revision, "Revisions.")
    cache: CacheStatus = nested(CacheStatus, "The model's files.")
    conditions: list[Condition] = field(
        [],
        "Observations; see docs for each type and reason.",
        max_length=16,
        extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )

    def condition(self, type_: ConditionType) -> Condition | None:
        """The condition of this type, if there is one."""
        return next((c for c in self.conditions if c.type == type_), None)
