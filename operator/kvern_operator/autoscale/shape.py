"""What tensor-parallel sizes a service could have, before any of its pods has run and said so: from the model's shape,
which its download reports (status.cache), and the memory of the card that spec.resources.gpuType names. Pure.

An estimate: what a pod says of itself takes its place as soon as one runs.
"""

import re
from dataclasses import dataclass

from kvern_operator.api.status import CacheStatus, ModelShape
from kvern_operator.api.types import InferenceServiceSpec

UTILIZATION = 0.92  # the engine's default of gpuMemoryUtilization
OVERHEAD = 2e9  # bytes of a device beside weights and KV cache: context, workspace, activations, graphs
QUANTIZED = 0.6  # of a 16-bit checkpoint that is quantized while loading: embeddings and norms stay as they are

# Bytes of cards whose product name does not say them; the first word that fits counts.
_CARDS = {
    "H200": 141e9,
    "GH200": 96e9,
    "GB200": 186e9,
    "B200": 180e9,
    "B300": 270e9,
    "H100-NVL": 94e9,
    "H100": 80e9,
    "H20": 96e9,
    "L40S": 48e9,
    "L40": 48e9,
    "L4": 24e9,
    "A40": 48e9,
    "A30": 24e9,
    "A10G": 24e9,
    "A10": 24e9,
    "A6000": 48e9,
    "T4": 16e9,
}


@dataclass(frozen=True)
class Expected:
    """`kv`: (size, tokens of KV cache a replica) by the estimate, 0 for a size that divides the devices but holds no
    request of `longest` tokens. `unknown`: why nothing is expected; "" where something is."""

    kv: tuple[tuple[int, int], ...] = ()
    longest: int = 0
    unknown: str = ""


def card_bytes(product: str) -> float | None:
    """Memory of a device by its product name as nodes are labelled (nvidia.com/gpu.product), bytes; None where the
    name does not tell."""
    part = re.search(r"MIG-\d+[cg]?\.?\S*?(\d+)gb", product)
    if part:
        return float(part[1]) * 1e9
    words = re.split(r"[-_ ]", product)
    for name, size in _CARDS.items():
        if name in words or ("-" in name and name in product):
            said = re.search(r"-(\d+)GB", product) if not name.startswith("G") else None
            return float(said[1]) * 1e9 if said else size
    said = re.search(r"[-_ ](\d+)GB", product)
    return float(said[1]) * 1e9 if said else None


def feasible_sizes(gpus: int, pipeline: int, heads: int, kv_heads: int, low: int, high: int) -> list[int]:
    """Sizes that divide a replica's devices and the model's heads, before any pod has said which it can have."""
    return [
        t
        for t in range(low, min(high, gpus // pipeline) + 1)
        if gpus % (t * pipeline) == 0 and heads % t == 0 and (kv_heads % t == 0 or t % kv_heads == 0)
    ]


def kv_tokens(size: int, memory: float, weights: float, kappa: float, kv_heads: int, pipeline: int = 1) -> int:
    """C(t): tokens of KV cache of one engine over `size` x `pipeline` devices with `memory` usable bytes each.
    `weights` bytes in all, `kappa` bytes a token; above one KV head a device, heads are held more than once."""
    room = size * pipeline * memory - 1.02 * weights
    return max(int(room / (kappa * max(size / kv_heads, 1.0))), 0)


def expected(spec: InferenceServiceSpec, cache: CacheStatus) -> Expected:
    """What the devices of a replica could be divided into."""
    resources, gpus = spec.resources, spec.resources.gpus_per_pod * spec.resources.nodes_per_replica
    if not gpus:
        return Expected(unknown="on CPUs a pod says what it has room for")
    if resources.gpu_type is None:
        return Expected(unknown="resources.gpuType does not name the card, so that its memory is not known")
    memory = card_bytes(resources.gpu_type)
    if memory is None:
        return Expected(unknown=f"how much memory a {resources.gpu_type} has is not known")
    if cache.shape is None or not cache.total:
        return Expected(unknown="the model's shape is not known before its download into spec.cache has ended")
    return _estimate(spec, cache.shape, float(cache.total), memory)


def _estimate(spec: InferenceServiceSpec, shape: ModelShape, files: float, memory: float) -> Expected:
    engine, pipeline = spec.engine, spec.parallelism.pipeline.size
    gpus = spec.resources.gpus_per_pod * spec.resources.nodes_per_replica
    usable = memory * float(engine.gpu_memory_utilization or UTILIZATION) - OVERHEAD
    weights = files * (QUANTIZED if engine.quantization else 1.0)
    each = 1 if engine.kv_cache_dtype == "fp8" else 2
    kappa = float(2 * shape.layers * shape.kv_heads * shape.head_dim * each)
    longest = engine.max_model_len or shape.max_model_len
    found = []
    for size in feasible_sizes(gpus, pipeline, shape.heads, shape.kv_heads, 1, gpus):
        tokens = kv_tokens(size, usable, weights, kappa, shape.kv_heads, pipeline)
        engines = gpus // (size * pipeline)
        found.append((size, tokens * engines if tokens >= longest else 0))
    return Expected(tuple(found), longest)
