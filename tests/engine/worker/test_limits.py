"""Decisions before memory is taken: formats, lengths, limits, sizes, and the text of every refusal."""

from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvern_engine.config import EngineConfig
from kvern_engine.model_config import ModelConfig
from kvern_engine.parallel.layout import Layout
from kvern_engine.worker import limits, memory

GIB = 1 << 30
LLAMA_8B = ModelConfig("LlamaForCausalLM", 128256, 4096, 14336, 32, 32, 8, 128, 8192)


def config(**fields: object) -> EngineConfig:
    return EngineConfig(model="m", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("requested", "device", "capability", "dtype", "noted"),
    [
        ("auto", "cpu", None, "float32", False),
        ("auto", "cuda", (9, 0), "bfloat16", False),
        ("auto", "cuda", (8, 0), "bfloat16", False),
        ("auto", "cuda", (7, 5), "float16", True),
        ("float16", "cuda", (9, 0), "float16", False),
        ("float32", "cuda", (7, 0), "float32", False),
        ("bfloat16", "cpu", None, "bfloat16", False),
    ],
)
def test_dtype(requested: str, device: str, capability: tuple[int, int] | None, dtype: str, noted: bool) -> None:
    choice = limits.choose_dtype(requested, device, capability)
    assert choice.dtype == dtype
    assert (choice.note is not None) == noted
    if choice.note:
        assert choice.note == "dtype float16: this GPU (compute capability 7.5) has no bfloat16"


def test_dtype_refusals() -> None:
    with pytest.raises(ValueError, match=r"bfloat16 needs .* 8\.0 or later, this one has compute capability 7\.5; use"):
        limits.choose_dtype("bfloat16", "cuda", (7, 5))
    with pytest.raises(ValueError, match=r"dtype must be auto or one of float32, .*got 'int8'"):
        limits.choose_dtype("int8", "cpu")


@pytest.mark.parametrize("family", sorted(limits.OVERFLOWS_IN_FLOAT16))
def test_families_that_overflow_in_float16(family: str) -> None:
    with pytest.raises(ValueError) as caught:
        limits.choose_dtype("float16", "cpu", None, family)
    assert str(caught.value) == (
        f"dtype float16 does not fit {family}: its activations grow beyond 65,504, the largest number of float16, and "
        "answers become nonsense; use bfloat16, float32 or auto"
    )
    choice = limits.choose_dtype("auto", "cuda", (7, 5), family)
    assert choice.dtype == "float32"
    assert choice.note == (
        f"dtype float32: this GPU (compute capability 7.5) has no bfloat16, and {family} overflows in float16"
    )
    with pytest.raises(ValueError, match=r"this one has compute capability 7\.5; use float32 or auto"):
        limits.choose_dtype("bfloat16", "cuda", (7, 5), family)
    assert limits.choose_dtype("auto", "cuda", (8, 0), family).dtype == "bfloat16"


def model(**fields: object) -> ModelConfig:
    return replace(LLAMA_8B, **fields)  # type: ignore[arg-type]


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("fields", "usual", "most"),
    [
        ({}, 8192, 8192),
        ({"rope_scaling": YARN}, 32768, 32768),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 2048}}, 8192, 8192),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 8192, 32768),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.5, "original": 8192}}, 8192, 20480),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "local_rope_theta": 1e4}, 8192, 8192),  # Gemma 3
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 8192, 8192),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 32.0}}, 8192, 8192),
    ],
)
def test_a_models_own_length(fields: dict[str, object], usual: int, most: int) -> None:
    own = limits.own_length(model(**fields))
    assert (own.usual, own.most, own.hard) == (usual, most, False)


def test_max_model_len() -> None:
    own = limits.own_length(LLAMA_8B)

    def chosen(requested: int | Literal["auto"] | None, allow: bool = False) -> tuple[int, bool]:
        choice = limits.choose_max_model_len(requested, own, allow)
        assert choice.note is None
        return choice.tokens, choice.fit

    assert chosen(None) == chosen(None, True) == chosen(8192) == (8192, False)
    assert chosen("auto") == (8192, True) and chosen(100, True) == (100, False)
    with pytest.raises(ValueError) as caught:
        chosen(8193)
    assert str(caught.value) == (
        "max_model_len must be at most 8192 (the model's max_position_embeddings), got 8193: further positions were "
        "never trained and answers there are likely nonsense; KVERN_ALLOW_LONG_MAX_MODEL_LEN=1 allows them all the same"
    )
    choice = limits.choose_max_model_len(9000, own, True)
    assert choice == limits.LengthChoice(
        9000,
        note="max_model_len 9000 is above 8192, the model's max_position_embeddings: answers there are likely nonsense",
    )


def test_max_model_len_with_scalings_and_without_positions() -> None:
    linear = limits.own_length(model(rope_scaling={"rope_type": "linear", "factor": 4.0}))
    assert limits.choose_max_model_len(None, linear, False).tokens == 8192
    assert limits.choose_max_model_len(32768, linear, False) == limits.LengthChoice(32768)
    with pytest.raises(
        ValueError, match=r"at most 32768 \(the model's max_position_embeddings \(8192\) times the factor"
    ):
        limits.choose_max_model_len(32769, linear, False)
    yarn = limits.own_length(model(rope_scaling=YARN))
    with pytest.raises(ValueError, match=r"at most 32768 \(the model's length with its YaRN scaling\), got 99999"):
        limits.choose_max_model_len(99999, yarn, False)
    learned = limits.own_length(model(architecture="GPT2LMHeadModel"))
    for allow in (False, True):
        with pytest.raises(ValueError) as caught:
            limits.choose_max_model_len(8193, learned, allow)
        assert str(caught.value) == (
            "max_model_len must be at most 8192 (the positions that the model has learned), got 8193"
        )


def test_who_allows_long_lengths() -> None:
    assert not limits.allows_long({}) and not limits.allows_long({limits.ALLOW_LONG: "0"})
    assert limits.allows_long({limits.ALLOW_LONG: "1"}) and limits.allows_long({limits.ALLOW_LONG: "True"})
    with pytest.raises(ValueError, match="KVERN_ALLOW_LONG_MAX_MODEL_LEN must be 0 or 1, got 'maybe'"):
        limits.allows_long({limits.ALLOW_LONG: "maybe"})


def test_offload_refusals() -> None:
    limits.check_offload(0, "cpu", "fp8_per_tensor")
    limits.check_offload(2.5, "cuda", None)
    with pytest.raises(ValueError, match=r"cpu_offload_gb=2.5 is for GPUs: on a CPU all weights are in the host's mem"):
        limits.check_offload(2.5, "cpu", None)
    with pytest.raises(
        ValueError, match=r"cpu_offload_gb=4 with weights in FP8 \(fp8_per_tensor\) is not supported yet"
    ):
        limits.check_offload(4.0, "cuda", "fp8_per_tensor")


def test_step_limits_by_device() -> None:
    def of(device: str, name: str, length: int = 4096, **fields: object) -> tuple[int, int]:
        found = limits.step_limits(config(**fields), device, name, length)
        return found.max_num_seqs, found.max_num_batched_tokens

    assert of("cpu", "cpu") == (64, 2048)
    assert of("cuda", "cuda:0 NVIDIA A10") == (256, 8192)
    assert of("cuda", "cuda:0 NVIDIA H200") == (1024, 8192)
    assert of("sim", "NVIDIA H100 PCIe") == (1024, 8192)
    assert of("cuda", "cuda:0 NVIDIA H200", long_prefill_token_threshold=1 << 30) == (1024, 16384)
    assert of("cuda", "cuda:0 NVIDIA H200", long_prefill_token_threshold=2048) == (1024, 8192)
    assert of("cuda", "cuda:0 NVIDIA A10", long_prefill_token_threshold=1 << 30) == (256, 8192)
    assert of("cpu", "cpu", max_num_seqs=4096) == (4096, 4096)
    assert of("cuda", "x", max_num_seqs=8, max_num_batched_tokens=64) == (8, 64)
    assert of("cpu", "cpu", enable_chunked_prefill=False) == (64, 4096)
    with pytest.raises(ValueError, match=r"max_num_batched_tokens must be at least max_model_len \(4096\).*got 64"):
        of("cpu", "cpu", enable_chunked_prefill=False, max_num_batched_tokens=64)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"batch_invariant": True, "tensor_parallel_size": 4},
            "batch_invariant with tensor_parallel_size=4 cannot hold",
        ),
        (
            {"calculate_kv_scales": True, "pipeline_parallel_size": 2},
            "calculate_kv_scales with pipeline stages is not supported yet; use tensor_parallel_size",
        ),
    ],
)
def test_what_comes_later_is_refused(fields: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        config(**fields)


def test_place_in_pod() -> None:
    layout = Layout(tensor=2, pipeline=2)
    assert limits.place_in_pod(None, None, layout, 3) == limits.Place(3, 4)
    assert limits.place_in_pod("1", "2", layout, 3) == limits.Place(1, 2)
    with pytest.raises(ValueError, match="KVERN_LOCAL_RANK must be a whole number, got '-1'"):
        limits.place_in_pod("-1", "2", layout, 3)
    with pytest.raises(ValueError, match=r"KVERN_LOCAL_RANK must be below KVERN_LOCAL_WORLD \(2\), got 3"):
        limits.place_in_pod(None, "2", layout, 3)


def test_cpu_threads() -> None:
    assert limits.cpu_threads(None, None, 8, 1) == 8
    assert limits.cpu_threads(None, None, 8, 3) == 2
    assert limits.cpu_threads(None, None, 2, 4) == 1
    assert limits.cpu_threads("3", "5", 8, 1) == 3
    assert limits.cpu_threads(None, "5", 8, 1) == 5
    with pytest.raises(ValueError, match="KVERN_CPU_THREADS must be a whole number above 0, got 'two'"):
        limits.cpu_threads("two", None, 8, 1)


def test_block_bytes() -> None:
    shape = LLAMA_8B.num_layers, LLAMA_8B.num_kv_heads, LLAMA_8B.head_dim
    assert memory.block_bytes(*shape, 16, 2) == 16 * 131072
    assert memory.block_bytes(LLAMA_8B.num_layers // 2, 1, LLAMA_8B.head_dim, 16, 2) == 131072


@given(st.integers(0, 1000), st.lists(st.integers(0, 300), min_size=1, max_size=8))
def test_an_arena_made_as_another_one_leaves(room: int, leaving: list[int]) -> None:
    """It finds room at every layer, and one of a byte more a layer does not."""

    def fits(each: int) -> bool:
        free = room
        for size in leaving:
            if each > free:
                return False
            free += size - each
        return True

    most = memory.most_in_turn(room, leaving)
    assert most % len(leaving) == 0
    assert fits(most // len(leaving)) and not fits(most // len(leaving) + 1)


def test_what_was_staged_is_kept_while_that_costs_little() -> None:
    assert memory.most_beside(100, 90, [10] * 4) == 100, "there is room for both"
    assert memory.most_beside(92, 100, [10] * 4) == 92, "a little smaller, for the way back"
    assert memory.most_beside(60, 100, [10] * 4) == memory.most_in_turn(60, [10] * 4) == 88
    assert memory.most_beside(60, 64, [10] * 4) == 60
    assert memory.most_beside(60, 100, [0] * 4) == 60, "nothing was staged on the device: nothing can be let go"


def test_available() -> None:
    assert memory.available_on_gpu(100 * GIB, 20 * GIB, 0.9) == 70 * GIB
    assert memory.available_on_gpu(100 * GIB, 20 * GIB, 0.9, graphs=2 * GIB) == 68 * GIB
    assert memory.available_on_gpu(10 * GIB, 20 * GIB, 0.9) == 0
    assert memory.available_on_cpu(8 * GIB, 1, 100 * GIB) == 2 * GIB
    assert memory.available_on_cpu(8 * GIB, 2, 100 * GIB) == GIB
    assert memory.available_on_cpu(64 * GIB, 1, 100 * GIB) == 4 * GIB
    assert memory.available_on_cpu(64 * GIB, 1, GIB) == GIB


def test_too_small_names_the_longest_feasible_length() -> None:
    with pytest.raises(ValueError) as caught:
        memory.size_kv_cache(GIB // 2, 16 * 131072, block_size=16, max_model_len=8192)
    assert str(caught.value) == (
        "To serve at least one request with the model's max seq len (8192), 1.00 GiB KV cache is needed, which is "
        "larger than the available KV cache memory (0.50 GiB). Increase gpu_memory_utilization or "
        "kv_cache_memory_bytes, or decrease max_model_len: the estimated maximum model length is 4096"
    )
    assert "(0.50 MiB)" in memory.too_small_message(1 << 19, 1 << 17, block_size=16, max_model_len=512)


@given(
    available=st.integers(0, 1 << 40),
    per_token=st.integers(1, 1 << 22),
    block_size=st.sampled_from([1, 8, 16, 64, 256]),
    max_model_len=st.integers(1, 200_000),
)
def test_sizes(available: int, per_token: int, block_size: int, max_model_len: int) -> None:
    """What is taken fits, nothing that fits is left, one sequence fits; else the length that is named does fit, and
    not one token more."""
    per_block = per_token * block_size

    def size(length: int) -> memory.KvCacheSize:
        return memory.size_kv_cache(available, per_block, block_size=block_size, max_model_len=length)

    try:
        found = size(max_model_len)
    except ValueError as error:
        longest = int(str(error).rsplit(" ", 1)[1])
        assert longest < max_model_len
        if longest:
            assert size(longest).num_blocks * block_size >= longest
        with pytest.raises(ValueError, match="To serve at least one request"):
            size(longest + 1)
    else:
        assert found.num_bytes == found.num_blocks * per_block <= available
        assert available - found.num_bytes < per_block
        assert found.num_blocks * block_size >= max_model_len


def test_override_is_taken_as_it_is() -> None:
    size = memory.size_kv_cache(0, 100, block_size=16, max_model_len=8192, num_blocks_override=10)
    assert size == memory.KvCacheSize(10, 1000)


def test_container_limits() -> None:
    assert memory.cgroup_room([]) is None
    assert memory.cgroup_room([("max\n", "5\n", "")]) is None
    assert memory.cgroup_room([("max\n", "5\n", ""), ("1000\n", "400\n", "anon 300\ninactive_file 60\n")]) == 660
    assert memory.cgroup_room([("1000\n", "1200\n", "")]) == 0
    assert memory.available_host_memory() > 0
