"""What a worker decides before it takes memory: device type, number format, longest sequence, batch limits.

Pure functions of the configuration and of facts about device and model; no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kvern_engine.config import EngineConfig
from kvern_engine.model_config import ModelConfig
from kvern_engine.parallel.layout import Layout

ALLOW_LONG = "KVERN_ALLOW_LONG_MAX_MODEL_LEN"
LEARNED_POSITIONS = frozenset({"GPT2LMHeadModel"})
# Families that were trained in bfloat16 and whose activations are beyond float16's range.
OVERFLOWS_IN_FLOAT16 = frozenset({"Gemma2ForCausalLM", "Gemma3ForCausalLM"})
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_FP8_CAPABILITY = (8, 9)  # from which FP8 is multiplied in hardware
_BF16_CAPABILITY = (8, 0)  # NVIDIA compute capability from which bfloat16 is computed in hardware


@dataclass(frozen=True)
class DtypeChoice:
    """`dtype` to compute in; `note` says why where it is not what was to be expected."""

    dtype: Literal["float32", "float16", "bfloat16"]
    note: str | None = None


def choose_dtype(
    requested: str, device: str, capability: tuple[int, int] | None = None, architecture: str = ""
) -> DtypeChoice:
    """The number format for `requested` (EngineConfig.dtype) on `device` ("cpu" or "cuda"), for a model of
    `architecture`.

    `capability` is the compute capability of a CUDA device. auto: float32 on a CPU; bfloat16 on a GPU, where it has
    none float16, or float32 for a model that overflows in that. Raises ValueError for an explicit bfloat16 on a GPU
    without it, and for float16 with such a model.
    """
    has_bf16 = device != "cuda" or capability is None or capability >= _BF16_CAPABILITY
    name = "" if capability is None else f"compute capability {capability[0]}.{capability[1]}"
    overflows = architecture in OVERFLOWS_IN_FLOAT16
    if requested == "auto":
        if device != "cuda":
            return DtypeChoice("float32")
        if has_bf16:
            return DtypeChoice("bfloat16")
        if overflows:
            return DtypeChoice(
                "float32", f"dtype float32: this GPU ({name}) has no bfloat16, and {architecture} overflows in float16"
            )
        return DtypeChoice("float16", f"dtype float16: this GPU ({name}) has no bfloat16")
    if requested == "bfloat16" and not has_bf16:
        instead = "float32" if overflows else "float16"
        raise ValueError(
            f"dtype bfloat16 needs a GPU of compute capability 8.0 or later, this one has {name}; use {instead} or auto"
        )
    if requested == "float16" and overflows:
        raise ValueError(
            f"dtype float16 does not fit {architecture}: its activations grow beyond 65,504, the largest number of "
            "float16, and answers become nonsense; use bfloat16, float32 or auto"
        )
    if requested not in DTYPE_BYTES:
        raise ValueError(f"dtype must be auto or one of {', '.join(DTYPE_BYTES)}, got {requested!r}")
    return DtypeChoice(requested)  # type: ignore[arg-type]


@dataclass(frozen=True)
class OwnLength:
    """How long sequences of a model may be, in tokens: `usual` where nothing is asked for, up to `most` on request.
    `why` says where `most` comes from. `hard`: beyond it the model has no positions at all."""

    usual: int
    most: int
    why: str = "the model's max_position_embeddings"
    hard: bool = False


def own_length(model: ModelConfig) -> OwnLength:
    """The length that a model was made for, and what its rope scaling stretches it to.

    YaRN states both lengths. Linear and dynamic scalings do not: in some files max_position_embeddings is the length
    before scaling and in others that after it, so that what lies between is there for those who ask for it. LongRoPE
    and Llama 3's scaling are part of max_position_embeddings.
    """
    positions = model.max_position_embeddings
    if model.architecture in LEARNED_POSITIONS:
        return OwnLength(positions, positions, "the positions that the model has learned", hard=True)
    scaling = model.rope_scaling or {}
    kind, factor = scaling.get("rope_type"), float(scaling.get("factor", 1.0))
    if kind == "yarn":
        stretched = int(scaling.get("original_max_position_embeddings", positions) * factor)
        return OwnLength(
            max(positions, stretched), max(positions, stretched), "the model's length with its YaRN scaling"
        )
    if kind in ("linear", "dynamic") and factor > 1 and model.local_rope_theta is None:
        why = f"the model's max_position_embeddings ({positions}) times the factor of its {kind} rope_scaling"
        return OwnLength(positions, int(positions * factor), why)
    return OwnLength(positions, positions)


@dataclass(frozen=True)
class LengthChoice:
    """The longest sequence in `tokens`; `fit`: less where the KV cache has no room for one of them. `note` says what
    may go wrong."""

    tokens: int
    fit: bool = False
    note: str | None = None


def choose_max_model_len(requested: int | Literal["auto"] | None, own: OwnLength, allow_long: bool) -> LengthChoice:
    """The longest sequence: `requested`, by default what is usual for the model, "auto" as much of that as fits. Raises
    ValueError for more than the model's most: beyond it rotary positions mean nothing. `allow_long`
    (KVERN_ALLOW_LONG_MAX_MODEL_LEN=1) allows that all the same, but not beyond learned positions."""
    if requested is None or requested == "auto":
        return LengthChoice(own.usual, fit=requested == "auto")
    if requested <= own.most:
        return LengthChoice(requested)
    beyond = f"max_model_len must be at most {own.most} ({own.why}), got {requested}"
    if own.hard:
        raise ValueError(beyond)
    if not allow_long:
        raise ValueError(
            f"{beyond}: further positions were never trained and answers there are likely nonsense; "
            f"{ALLOW_LONG}=1 allows them all the same"
        )
    return LengthChoice(
        requested, note=f"max_model_len {requested} is above {own.most}, {own.why}: answers there are likely nonsense"
    )


def allows_long(environ: Mapping[str, str]) -> bool:
    """Whether KVERN_ALLOW_LONG_MAX_MODEL_LEN is set. Raises ValueError for a value that is neither yes nor no."""
    value = environ.get(ALLOW_LONG, "").strip().lower()
    if value not in ("", "0", "1", "true", "false"):
        raise ValueError(f"{ALLOW_LONG} must be 0 or 1, got {environ[ALLOW_LONG]!r}")
    return value in ("1", "true")


_UNWATCHED_TOKENS = 16384


@dataclass(frozen=True)
class StepLimits:
    """What the tables and buffers of a worker are made for."""

    max_num_seqs: int
    max_num_batched_tokens: int


def step_limits(config: EngineConfig, device: str, device_name: str, max_model_len: int) -> StepLimits:
    """The configured limits of a step, or the device's defaults: 256 sequences and 8,192 tokens; 1,024 sequences on an
    H100 or H200, there also 16,384 tokens where no stream is watched (`long_prefill_token_threshold` holds nothing
    back: 64 prompts of 1,024 tokens take 1.452 s, with 8,192 1.471 s); 64 and 2,048 on a CPU.

    Without chunked prefill a step must hold the longest prompt. Raises ValueError where the two contradict each other.
    """
    on_cpu = device == "cpu"
    large = any(name in device_name.upper() for name in ("H100", "H200"))
    sequences = config.max_num_seqs
    if sequences is None:
        sequences = 64 if on_cpu else 1024 if large else 256
    tokens = config.max_num_batched_tokens
    if tokens is None:
        unwatched = device == "cuda" and large and (config.long_prefill_token_threshold or 0) >= _UNWATCHED_TOKENS
        tokens = max(2048 if on_cpu else _UNWATCHED_TOKENS if unwatched else 8192, sequences)
        if not config.enable_chunked_prefill:
            tokens = max(tokens, max_model_len)
    if not config.enable_chunked_prefill and tokens < max_model_len:
        raise ValueError(
            f"max_num_batched_tokens must be at least max_model_len ({max_model_len}) where enable_chunked_prefill is "
            f"false, got {tokens}"
        )
    return StepLimits(sequences, tokens)


def check_offload(gib: float, device: str, quantization: str | None) -> None:
    """Raises ValueError where `gib` GiB of weights (cpu_offload_gb) cannot be kept in host memory. `quantization`: that
    of the weights, asked for or of the checkpoint."""
    if gib == 0:
        return
    if device == "cpu":
        raise ValueError(
            f"cpu_offload_gb={gib:g} is for GPUs: on a CPU all weights are in the host's memory; leave it out"
        )
    if quantization is not None:
        raise ValueError(
            f"cpu_offload_gb={gib:g} with weights in FP8 ({quantization}) is not supported yet; use the unquantized "
            "model, or leave cpu_offload_gb out"
        )


def check_invariant(config: EngineConfig, model: ModelConfig) -> None:
    """Raises ValueError for a model that cannot be computed as `batch_invariant` promises."""
    if config.batch_invariant and model.experts is not None:
        raise ValueError(
            f"batch_invariant cannot hold for {model.architecture}: how many tokens an expert computes at once, and so "
            "how their sums are rounded, follows from the others in a step; leave batch_invariant off"
        )


def invariant_threads(threads: int) -> int:
    """At most `threads`, a power of two: work is then cut at multiples of what a vector instruction takes, wherever in
    a tile a token stands."""
    return 1 << (threads.bit_length() - 1)


def check_fp8(
    quantization: str | None,
    device: str,
    capability: tuple[int, int] | None,
    kv_cache_dtype: str = "auto",
    ready_made: bool = False,
) -> None:
    """Raises ValueError where a GPU has no FP8 arithmetic for what was asked for, or for the checkpoint (`ready_made`:
    it comes in FP8)."""
    asked = [("quantization", quantization)] if quantization is not None else []
    asked += [("kv_cache_dtype", kv_cache_dtype)] if kv_cache_dtype != "auto" else []
    if not (asked or ready_made) or device != "cuda" or capability is None or capability >= _FP8_CAPABILITY:
        return
    needs = f"needs a GPU of compute capability 8.9 or later, this one has {capability[0]}.{capability[1]}"
    if ready_made:
        raise ValueError(f"the checkpoint is in FP8, which {needs}; use the unquantized model")
    name, value = asked[0]
    raise ValueError(f"{name}={value} {needs}; leave {name} out")


def fp8_choice(config: EngineConfig, model: ModelConfig) -> tuple[str | None, bool]:
    """(the way the weights are in FP8, whether the KV cache is) by what was asked for and what the checkpoint is.
    Raises ValueError where the two contradict each other."""
    kv_cache = config.kv_cache_dtype != "auto" or (model.fp8 is not None and model.fp8.kv_scales)
    if model.fp8 is None:
        return config.quantization, kv_cache
    own = "fp8_per_channel" if model.fp8.per_channel else "fp8_per_tensor"
    if config.quantization not in (None, "fp8", own):
        raise ValueError(
            f"quantization={config.quantization} does not fit a checkpoint that is quantized already ({own}); leave "
            "quantization out"
        )
    return own, kv_cache


def check_quantizable(model: ModelConfig, quantization: str | None, quantizable: bool) -> None:
    """Raises ValueError where the weights are to be in FP8 in a family that has no such layers."""
    if quantization is None or quantizable:
        return
    if model.fp8 is not None:
        raise ValueError(f"checkpoints of {model.architecture} in FP8 are not supported yet; use the unquantized model")
    raise ValueError(
        f"quantization={quantization} is not supported for {model.architecture} yet; leave quantization out"
    )


def shared_window(model: ModelConfig, max_model_len: int) -> int | None:
    """The window that all layers have, where sequences grow beyond it: blocks behind it can be given back."""
    window = model.window_of_all
    return None if window is None or window >= max_model_len else window


def cpu_threads(explicit: str | None, openmp: str | None, cores: int, ranks: int) -> int:
    """Threads of one worker on a CPU: KVERN_CPU_THREADS (`explicit`), else OMP_NUM_THREADS (`openmp`), else the `cores`
    this process may use, divided between the `ranks` on this machine. Raises ValueError for a bad number."""
    for name, value in (("KVERN_CPU_THREADS", explicit), ("OMP_NUM_THREADS", openmp)):
        if value:
            if not value.isdecimal() or int(value) < 1:
                raise ValueError(f"{name} must be a whole number above 0, got {value!r}")
            return int(value)
    return max(1, cores // ranks)


@dataclass(frozen=True)
class Place:
    """A rank among the `world` ranks of its pod: device number `rank` is its own."""

    rank: int
    world: int


def place_in_pod(rank: str | None, world: str | None, layout: Layout, global_rank: int) -> Place:
    """From KVERN_LOCAL_RANK and KVERN_LOCAL_WORLD (`rank`, `world`), which whoever starts a part of a layout sets; else
    the pod holds all of the layout. Raises ValueError for a bad number."""
    for name, value in (("KVERN_LOCAL_RANK", rank), ("KVERN_LOCAL_WORLD", world)):
        if value and not value.isdecimal():
            raise ValueError(f"{name} must be a whole number, got {value!r}")
    place = Place(int(rank or global_rank), int(world or layout.world))
    if place.rank >= place.world:
        raise ValueError(f"KVERN_LOCAL_RANK must be below KVERN_LOCAL_WORLD ({place.world}), got {place.rank}")
    return place


GPU_SWITCH = "KVERN_GPU_LAYOUT_SWITCH"


def stays_connected(environ: Mapping[str, str], config: EngineConfig, device: str) -> bool:
    """Whether the ranks of a pod on GPUs stay connected for changes of the layout: what makes those possible costs half
    a GiB a rank and seconds at the start, and is asked for by KVERN_GPU_LAYOUT_SWITCH=1."""
    asked = environ.get(GPU_SWITCH) == "1" and device == "cuda"
    return asked and config.nnodes == 1 and config.pipeline_parallel_size == 1
