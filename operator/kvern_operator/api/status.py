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


class BannedSize(KvernModel):
    """A size that was tried and taken back."""

    size: Count = field(..., "Tensor-parallel size.")
    until: Time = field(..., "When it may be tried again.")


class LayoutPlan(KvernModel):
    """How far a change of the size is. A record: whoever leads next reads it and goes on."""

    size: Count = field(..., "Size that is wanted.")
    phase: Literal["Stable", "Changing", "Verifying"] = field(
        "Stable", "Changing: on its way to every replica. Verifying: in place and being watched."
    )
    before: Count | None = field(None, "Size to go back to.")
    since: Time | None = field(None, "When the phase began.")
    returning: bool = field(False, "The change is one that is taken back.")
    attainment: Annotated[str, Field(max_length=8)] | None = field(
        None, "Share of requests that kept the SLO before the change."
    )
    watched_seconds: Count = field(0, "Seconds of Verifying with figures.")
    dip_since: Time | None = field(None, "Since when fewer requests keep the SLO than before.")
    raise_since: Time | None = field(None, "Since when there is a reason for a larger size.")
    lower_since: Time | None = field(None, "Since when there is a reason for a smaller size.")
    changes: list[Time] = field(
        [], "Changes within the last two hours.", max_length=16, extra={"x-kubernetes-list-type": "atomic"}
    )
    bans: list[BannedSize] = field(
        [], "Sizes that were tried and taken back.", max_length=64, extra={"x-kubernetes-list-type": "atomic"}
    )
    proven: list[Count] = field(
        [], "Sizes that have been watched to the end.", max_length=64, extra={"x-kubernetes-list-type": "atomic"}
    )


class LayoutOption(KvernModel):
    """A size and what the model expects of it."""

    size: Count = field(..., "Tensor-parallel size.")
    engines: Count = field(..., "Engines of a replica.")
    replicas: Count | None = field(None, "Replicas that the load would need; none: no number would do.")
    itl_ms: Annotated[str, Field(max_length=32)] | None = field(None, "ITL that is expected, milliseconds.")
    why_not: Annotated[str, Field(max_length=256)] = field("", "Why it cannot be chosen.")


class LayoutDecision(KvernModel):
    """What was decided about the size, and why."""

    time: Time = field(..., "When it was taken.")
    from_: Count = field(..., "Size before.", alias="from")
    to: Count = field(..., "Size after.")
    recommended: Count = field(..., "Size that the planner would choose.")
    reason: Annotated[str, Field(max_length=1024)] = field(..., "Why, in words.")
    options: list[LayoutOption] = field(
        [], "All sizes that were weighed.", max_length=64, extra={"x-kubernetes-list-type": "atomic"}
    )


class ParallelismStatus(KvernModel):
    """The layout that runs and the one that is wanted."""

    current: Count | None = field(None, "Tensor-parallel size of the ready replicas.")
    target: Count | None = field(None, "Size that is wanted.")
    recommended: Count | None = field(None, "Size that the planner would choose.")
    feasible: list[FeasibleSize] = field(
        [], "Sizes that the pods report.", max_length=64, extra={"x-kubernetes-list-type": "atomic"}
    )
    last_change_time: Time | None = field(None, "When target last changed.")
    plan: LayoutPlan | None = field(None, "The planner's record, in modes Recommend and Auto.")
    last_decision: LayoutDecision | None = field(None, "What was decided last, also that the size stays.")
    history: list[LayoutDecision] = field(
        [], "The last ten changes, oldest first.", max_length=10, extra={"x-kubernetes-list-type": "atomic"}
    )


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


class Term(KvernModel):
    """One reason for a number of replicas."""

    name: Annotated[str, Field(max_length=32)] = field(..., "Name of the term; see docs/autoscaling.md.")
    wanted: Count = field(..., "Replicas that it asks for.")
    words: Annotated[str, Field(max_length=512)] = field(..., "Its arithmetic.")


class Decision(KvernModel):
    """One decision about the number of replicas."""

    time: Time = field(..., "When it was taken.")
    from_: Count = field(..., "Replicas before.", alias="from")
    to: Count = field(..., "Replicas after.")
    kind: Literal["hold", "up", "down", "wake", "zero", "bounds", "given"] = field(
        "given", "given: spec.replicas says it; bounds: minReplicas, maxReplicas, a budget or missing nodes do."
    )
    cause: Annotated[str, Field(max_length=32)] = field("", "The term or limit that decided, in one word.")
    wanted: Count | None = field(None, "Replicas that the strongest term asks for.")
    reason: Annotated[str, Field(max_length=1024)] = field(..., "Why, in words.")
    limited_by: ShortText | None = field(None, "What kept it from going further.")
    terms: list[Term] = field(
        [], "All reasons that were weighed.", max_length=16, extra={"x-kubernetes-list-type": "atomic"}
    )
    inputs: Inputs = field({}, "The numbers it was taken from.")


class AutoscalingStatus(KvernModel):
    """Decisions about replicas."""

    mode: Literal["Off", "Recommend", "Internal", "External"] = field("Off", "Who decides; see spec.autoscaling.mode.")
    desired: Count | None = field(None, "Replicas that the autoscaler wants; it decides in mode Internal alone.")
    recommended: Count | None = field(None, "Replicas that it would want, in mode Recommend.")
    start_seconds: Count | None = field(None, "Average time from a pod's creation to ready.")
    last_decision: Decision | None = field(None, "The last one, also one that leaves the number as it is.")
    history: list[Decision] = field(
        [],
        "The last ten that changed the number, oldest first.",
        max_length=10,
        extra={"x-kubernetes-list-type": "atomic"},
    )


class Revision(KvernModel):
    """Hashes of the part of the spec that pods are made from."""

    current: ShortText | None = field(None, "Revision that all ready replicas run.")
    updated: ShortText | None = field(None, "Revision of the present spec.")


class ModelShape(KvernModel):
    """What of a model decides how much KV cache devices hold beside it."""

    layers: Count = field(..., "Layers.")
    heads: Count = field(..., "Attention heads.")
    kv_heads: Count = field(..., "Heads of K and V.")
    head_dim: Count = field(..., "Numbers of a head.")
    max_model_len: Count = field(..., "Longest prompt + output in tokens.")


class CacheStatus(KvernModel):
    """The model's files."""

    phase: Literal["None", "Pending", "Downloading", "Ready", "Failed"] = field("None", "State of the cache.")
    bytes: Annotated[int, Field(ge=0)] | None = field(None, "Bytes that are there.")
    total: Annotated[int, Field(ge=0)] | None = field(None, "Bytes of the whole model.")
    shape: ModelShape | None = field(None, "What its configuration says, once the model is there.")


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
