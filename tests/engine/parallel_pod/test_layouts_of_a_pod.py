"""Layouts from the outside: what /admin/layout reports, devices, idle stages, and the offline API over ranks."""

from pathlib import Path
from types import MappingProxyType

import pipeline
import psutil
import pytest

from kvern_engine import LLM, SamplingParams
from kvern_engine.capacity import feasible_layouts, model_shape
from kvern_engine.config import EngineConfig
from kvern_engine.core.plan import WorkerReady
from kvern_engine.devices import check_devices, devices_visible, shared_memory_note
from kvern_engine.loading.config import read_model_config
from kvern_engine.loading.resolve import resolve_model
from kvern_engine.parallel.layout import Layout
from kvern_engine.worker.sim import SimWorker
from kvern_engine.worker_client import merge_ready

TINY = str(Path(__file__).parents[1] / "models_data/tiny-kjv")


def sim_engine(config: EngineConfig) -> WorkerReady:
    return merge_ready([SimWorker(config, rank).load() for rank in Layout.of(config).ranks_of(0)])


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("extra", [{}, {"kv_cache_memory_bytes": 8 << 30}, {"num_gpu_blocks_override": 4000}])
def test_what_is_computed_for_other_sizes_is_what_they_hold(stages: int, extra: dict[str, int]) -> None:
    """16 devices, 32 heads, 8 KV heads: at 16 ranks each KV head is held twice."""
    measured, computed = {}, {}
    for size in (1, 2, 4, 8, 16):
        if 16 % (size * stages):
            continue
        engines = 16 // size // stages
        layout = {"data_parallel_size": engines, "tensor_parallel_size": size, "pipeline_parallel_size": stages}
        config = EngineConfig(model="sim", device="sim", **layout, **extra)  # type: ignore[arg-type]
        ready = sim_engine(config)
        measured[size] = engines * ready.num_blocks * ready.block_size
        computed[size] = feasible_layouts(model_shape(config), config, ready)
    for found in computed.values():
        assert found.keys() == measured.keys()
        for size, tokens in found.items():
            assert tokens == pytest.approx(measured[size], rel=0.01)


def test_a_size_without_room_for_the_longest_sequence_is_not_feasible() -> None:
    config = EngineConfig(model="m", device="cuda", tensor_parallel_size=4)
    model = read_model_config(resolve_model(TINY))  # 4 heads
    ready = WorkerReady(0, 1000, 16, 8192, 4_000, 36_000, "NVIDIA", "bfloat16")
    assert feasible_layouts(model, config, ready) == {4: 16_000}


def test_batch_invariance_knows_two_ranks_at_most() -> None:
    config = EngineConfig(model="sim", device="sim", data_parallel_size=8, batch_invariant=True)
    assert sorted(feasible_layouts(model_shape(config), config, sim_engine(config))) == [1, 2]


def test_on_a_cpu_no_more_is_counted_than_can_be_used() -> None:
    config = EngineConfig(model="m", device="cpu", tensor_parallel_size=2)
    model = read_model_config(resolve_model(TINY))
    ready = WorkerReady(0, 64, 16, 512, 64 * 16 * 100, 5000, "cpu", "float32", {}, 2, 256)
    assert feasible_layouts(model, config, ready, host_kv=1 << 30) == {1: 2 * 1024, 2: 1024}


@pytest.mark.parametrize(
    ("listed", "files", "devices"),
    [(None, 4, 4), ("0,1", 4, 2), ("", 4, 0), ("1,-1,2", 4, 1), ("GPU-1,GPU-2,GPU-3", 2, 2), (None, 0, 0), ("0", 0, 0)],
)
def test_devices_are_counted_as_cuda_counts_them(tmp_path: Path, listed: str | None, files: int, devices: int) -> None:
    for name in [f"nvidia{i}" for i in range(files)] + ["nvidiactl", "nvidia-uvm"]:
        (tmp_path / name).touch()
    environ = MappingProxyType({} if listed is None else {"CUDA_VISIBLE_DEVICES": listed})
    assert devices_visible(environ, tmp_path) == devices


def test_more_ranks_than_devices_are_refused() -> None:
    config = EngineConfig(model="m", tensor_parallel_size=2, data_parallel_size=2)
    with pytest.raises(ValueError, match="1 x 2 needs 4 devices in this pod, which has 2") as caught:
        check_devices(config, 2)
    assert str(caught.value).startswith("data x pipeline x tensor parallel size 2 x 1 x 2 ")
    check_devices(config, 4)
    check_devices(config, 0)  # a CPU
    check_devices(config.model_copy(update={"device": "cpu"}), 2)
    check_devices(config.model_copy(update={"nnodes": 2}), 2)


def test_little_shared_memory_is_said_where_nccl_needs_it() -> None:
    config = EngineConfig(model="m", tensor_parallel_size=2)
    note = shared_memory_note(config, 2, 10 << 20)
    assert note is not None and note.startswith("/dev/shm has 10 MiB free") and "--shm-size" in note
    assert shared_memory_note(config, 2, 1 << 30) is None
    assert shared_memory_note(config, 0, 10 << 20) is None


@pytest.mark.parametrize(("stages", "batch"), [(2, 4), (4, 8), (8, 16)])
def test_a_stage_hardly_waits(stages: int, batch: int) -> None:
    assert pipeline.measure(stages, batch)["idle_most"] < 0.10


def test_one_request_cannot_fill_a_pipeline() -> None:
    """The measure measures: with one sequence every stage but one waits."""
    assert pipeline.measure(4, 1)["idle_first"] > 0.7


def test_offline_over_two_ranks_gives_the_same_and_ends_its_processes() -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    prompts = ["In the beginning", "And the king"]
    fields = {"device": "cpu", "num_gpu_blocks_override": 64, "max_num_seqs": 4, "max_model_len": 64}
    with LLM(TINY, **fields) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    before = psutil.Process().num_fds()
    others = set(psutil.Process().children())  # servers that other tests of this session share
    with LLM(TINY, tensor_parallel_size=2, **fields) as llm:
        children = set(psutil.Process().children()) - others
        assert len(children) == 2
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)] == expected
    assert not [p for p in children if p.is_running()]
    assert psutil.Process().num_fds() <= before


def test_offline_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="data_parallel_size=2 is for `kvern serve`"):
        LLM(TINY, device="cpu", data_parallel_size=2)
    with pytest.raises(ValueError, match="tensor_parallel_size=3 does not divide the model's 4 attention heads"):
        LLM(TINY, device="cpu", tensor_parallel_size=3)
