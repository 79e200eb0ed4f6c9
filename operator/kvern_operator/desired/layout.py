"""The layout of a replica: how its devices are divided into engines. Pure."""

from dataclasses import dataclass

from kvern_operator.api.status import InferenceServiceStatus
from kvern_operator.api.types import InferenceServiceSpec


@dataclass(frozen=True)
class Layout:
    """data x tensor x pipeline devices."""

    tensor: int
    pipeline: int
    data: int

    def __str__(self) -> str:
        return f"tp{self.tensor}pp{self.pipeline}dp{self.data}"

    @property
    def ranks(self) -> int:
        """Devices, or the processes that stand for them."""
        return self.tensor * self.pipeline * self.data

    def environment(self) -> dict[str, str]:
        """The engine's variables. They come from a ConfigMap and are read at boot, so that the layout is not part of
        the pod template: changing it restarts nothing, and a crashed container boots the present layout."""
        return {
            "KVERN_TENSOR_PARALLEL_SIZE": str(self.tensor),
            "KVERN_PIPELINE_PARALLEL_SIZE": str(self.pipeline),
            "KVERN_DATA_PARALLEL_SIZE": str(self.data),
        }


def parse_layout(text: str) -> Layout | None:
    """The inverse of str(); None where `text` is none."""
    try:
        tensor, rest = text.removeprefix("tp").split("pp")
        pipeline, data = rest.split("dp")
        return Layout(int(tensor), int(pipeline), int(data))
    except ValueError:
        return None


def wanted_layout(spec: InferenceServiceSpec) -> Layout:
    """The layout that the spec asks for; without a tensor size, one engine over all devices, within min..max."""
    tensor, pipeline = spec.parallelism.tensor, spec.parallelism.pipeline.size
    gpus = spec.resources.gpus_per_pod * spec.resources.nodes_per_replica
    if gpus == 0:
        # Processes stand for devices on a CPU pod; data-parallel-size in engine.args adds engines.
        data = int(spec.engine.args.get("data-parallel-size", 1))
        return Layout(tensor.size or tensor.min or 1, pipeline, data)
    size = tensor.size
    if size is None:
        low, high = tensor.min or 1, min(tensor.max or gpus, max(gpus // pipeline, 1))
        fitting = [t for t in range(low, high + 1) if gpus % (t * pipeline) == 0]
        size = fitting[-1] if fitting else 1
    return Layout(size, pipeline, max(gpus // (size * pipeline), 1))


def target_layout(spec: InferenceServiceSpec, status: InferenceServiceStatus | None) -> Layout:
    """The layout that replicas are to have now: in mode Auto the planner's size, as its record in status says, over
    the devices that the spec gives; else the spec's."""
    asked = wanted_layout(spec)
    plan = status.parallelism.plan if status is not None else None
    if spec.parallelism.tensor.mode != "Auto" or plan is None:
        return asked
    if plan.size < 1 or asked.ranks % (plan.size * asked.pipeline):
        return asked  # of another number of devices
    return Layout(plan.size, asked.pipeline, asked.ranks // (plan.size * asked.pipeline))
