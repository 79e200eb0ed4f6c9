"""What the ranks of other layouts would run is run at the start, by one rank alone. Here on a CPU, where it costs
nothing; that kernels and graphs come out of it is for `tests/gpu`."""

import torch

from kvern_engine.config import EngineConfig
from kvern_engine.parallel.layout import Layout
from kvern_engine.worker import limits
from kvern_engine.worker.warm_up import other_layouts, warm_other_layouts
from kvern_engine.worker.worker import Worker


def test_every_other_layout_is_played(made_path: str) -> None:
    config = EngineConfig(
        model=made_path, device="cpu", num_gpu_blocks_override=20, max_num_seqs=4, max_num_batched_tokens=64
    )
    worker = Worker(config)
    worker.load()
    worker.layout = Layout(4, 1)
    assert other_layouts(worker) == [Layout(2, 2), Layout(1, 4)]
    shapes = [tuple(weight.shape) for weight in warm_other_layouts(worker) if isinstance(weight, torch.Tensor)]
    assert len(shapes) == 8 and shapes[0] == (128, 64) and shapes[4] == (64, 64), "qkv of half and of a quarter"


def test_ranks_on_gpus_stay_connected_where_that_is_asked_for() -> None:
    config = EngineConfig(model="x", data_parallel_size=2)
    asked = {limits.GPU_SWITCH: "1"}
    assert limits.stays_connected(asked, config, "cuda")
    assert not limits.stays_connected(asked, config, "cpu")
    assert not limits.stays_connected({}, config, "cuda")
    assert not limits.stays_connected(asked, config.model_copy(update={"pipeline_parallel_size": 2}), "cuda")
