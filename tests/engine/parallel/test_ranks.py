"""Ranks as they meet and load: who is missing, what each one holds, who has the least room; SmolLM2 on three ranks."""

import os
import socket
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from made_model import make_model
from parallel_harness import Ranks

from kvern_engine.config import EngineConfig
from kvern_engine.core.plan import AddedRow, RowSampling, StepPlan
from kvern_engine.loading.config import read_model_config
from kvern_engine.loading.resolve import ModelNotFoundError, resolve_model
from kvern_engine.models.registry import CausalLM, model_class
from kvern_engine.parallel.groups import ParallelContext, RankMissingError, TensorGroup, init_parallel
from kvern_engine.parallel.layout import Layout
from kvern_engine.tokenizer import load_tokenizer
from kvern_engine.worker.load import random_weights
from kvern_engine.worker.worker import Worker

SMOL = "builtin://smollm2-135m"
LAYOUTS = [Layout(), Layout(1, 2, 1), Layout(1, 4, 1), Layout(1, 8, 1), Layout(1, 1, 2), Layout(1, 2, 4)]


def shards(path: str, layout: Layout, device: str = "meta") -> list[CausalLM]:
    """What each rank of an engine builds; nobody talks to anybody."""
    config = read_model_config(resolve_model(path))
    found = []
    for rank in range(layout.engine_size):
        group = TensorGroup(layout.tensor, layout.coordinates(rank)[2])
        context = ParallelContext(layout, rank, group)
        build = model_class(config.architecture)
        found.append(
            build(config, max_positions=64, dtype=torch.float32, device=torch.device(device), parallel=context)
        )
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_ranks_hold_every_weight_once(made_path: str, layout: Layout) -> None:
    (whole,) = shards(made_path, Layout())
    models = shards(made_path, layout)
    for name, (tensor, *_) in whole.destinations().items():
        held = np.zeros(tuple(tensor.shape), dtype=np.int64)
        for model in models:
            if name in model.destinations():
                view, part, _ = model.destinations()[name]
                assert tuple(view.shape) == part.part_shape
                held[part.slices] += 1
        replicas = layout.tensor if "norm" in name else 1
        if "k_proj" in name or "v_proj" in name:
            replicas = max(1, layout.tensor // 4)
        assert (held == replicas).all(), f"{name}: {held.min()} to {held.max()} copies"


def test_a_tied_head_lies_on_the_last_stage_too(tiny_path: str) -> None:
    first, last = shards(tiny_path, Layout(pipeline=2))
    assert [list(m.destinations()).count("model.embed_tokens.weight") for m in (first, last)] == [1, 1]
    assert "model.norm.weight" in last.destinations() and "model.norm.weight" not in first.destinations()
    assert "model.layers.2.mlp.down_proj.weight" in last.destinations()
    (whole,) = shards(tiny_path, Layout())
    assert whole.lm_head.weight is whole.embed_tokens.weight  # type: ignore[attr-defined]


@pytest.mark.parametrize("layout", [Layout(1, 2, 1), Layout(1, 2, 2)], ids=str)
def test_dummy_weights_are_the_same_at_every_layout(made_path: str, layout: Layout) -> None:
    (whole,) = shards(made_path, Layout(), "cpu")
    random_weights(whole, seed=3)
    expected = {name: tensor.clone() for name, (tensor, *_) in whole.destinations().items()}
    for model in shards(made_path, layout, "cpu"):
        random_weights(model, seed=3)
        for name, (tensor, part, _) in model.destinations().items():
            assert torch.equal(tensor, expected[name][part.slices]), name


def config(model: str, layout: Layout, **fields: object) -> EngineConfig:
    sizes = {"tensor_parallel_size": layout.tensor, "pipeline_parallel_size": layout.pipeline}
    return EngineConfig(model=model, device="cpu", max_num_seqs=2, **sizes, **fields)  # type: ignore[arg-type]


def test_the_rank_with_the_least_room_decides(made_path: str, ranks: Ranks) -> None:
    layout = Layout(1, 2, 2)
    answers = ranks.run(
        config(made_path, layout, num_gpu_blocks_override=20), [], by_rank={2: {"num_gpu_blocks_override": 7}}
    )
    assert not [answer["trace"] for answer in answers if "error" in answer]
    assert [answer["ready"].num_blocks for answer in answers] == [7] * 4
    # [layers, 2, KV heads, blocks, block_size, head_dim]: five layers in two stages, four KV heads on two ranks each.
    assert [answer["arena"] for answer in answers] == [[(2, 2, 7, 16, 16)] * 3] * 2 + [[(2, 2, 7, 16, 16)] * 2] * 2
    assert [answer["ready"].kv_bytes for answer in answers] == [7 * 3 * 2 * 2 * 16 * 16 * 4] * 2 + [
        7 * 2 * 2 * 2 * 16 * 16 * 4
    ] * 2
    bytes_of_all = sum(answer["ready"].weight_bytes for answer in answers)
    whole = Path(made_path, "model.safetensors").stat().st_size
    assert whole < bytes_of_all + 20_000 and bytes_of_all < 1.02 * whole  # norms twice, the rest once


def test_weights_are_read_from_disk_once(tmp_path: Path, ranks: Ranks) -> None:
    """Four ranks map one file, each reads its own parts: what they fetch from the disk together is the file, once."""
    model = make_model(tmp_path, width=8)
    file = tmp_path / "model.safetensors"
    size = file.stat().st_size
    fd = os.open(file, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        answers = ranks.run(config(model, Layout(1, 4, 1), num_gpu_blocks_override=20), [])
    finally:
        os.close(fd)
    assert not [answer["trace"] for answer in answers if "error" in answer]
    read = [answer["read"] for answer in answers]
    if sum(read) < size // 2:
        pytest.skip(f"the file system does not count reads or does not drop its cache: {read} of {size:,} bytes")
    assert sum(read) < 1.2 * size, f"{read} of {size:,} bytes"


# ------------------------------------------------------------ who is missing


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(RankMissingError) as error:
        init_parallel(Layout(1, 2, 2), 0, 1, f"file://{tmp_path}/meet", timeout=1)
    assert 0.9 < time.monotonic() - begin < 60
    assert str(error.value) == (
        f"ranks 0, 2, 3 of engine 0 did not join within 1 s; rank 1 waited at file://{tmp_path}/meet and met 1 of 4 "
        "ranks"
    )


def test_a_missing_leader_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening: nobody answers there
        port = taken.getsockname()[1]
        with pytest.raises(RankMissingError, match=rf"rank 3 waited 1 s for rank 2 at tcp://127.0.0.1:{port}, which"):
            init_parallel(Layout(2, 2, 1), 1, 3, f"tcp://127.0.0.1:{port}", timeout=1)


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"rank 0 cannot listen at tcp://127.0.0.1:{port}: .*in use"):
            init_parallel(Layout(1, 2, 1), 0, 0, f"tcp://127.0.0.1:{port}", timeout=2)


def test_bad_places_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rendezvous must be file:///path or tcp://host:port, got 'http://x'"):
        init_parallel(Layout(1, 2, 1), 0, 0, "http://x")
    with pytest.raises(ValueError, match="rank 0 is not one of engine 1 in dp 2 x tp 2 x pp 1"):
        init_parallel(Layout(2, 2, 1), 1, 0, "file:///x")
    with pytest.raises(ValueError, match="each needs a process and a rendezvous"):
        Worker(config("m", Layout(1, 2, 1)))._join()


def test_one_rank_needs_nobody() -> None:
    context = init_parallel(Layout(3, 1, 1), 2, 2, "")
    assert (context.answers, context.smallest(5)) == (True, 5)
    x = torch.ones(2, 3)
    assert context.tensor.all_reduce(x) is x and context.tensor.all_gather(x) is x
    context.close()


# ------------------------------------------------------------ SmolLM2: 9 heads, 3 KV heads


@pytest.fixture(scope="module")
def smol() -> str:
    try:
        resolve_model(SMOL)
    except ModelNotFoundError as error:
        pytest.skip(str(error))
    return SMOL


def test_two_ranks_cannot_share_nine_heads(smol: str) -> None:
    begin = time.monotonic()
    with pytest.raises(ValueError) as error:
        Worker(config(smol, Layout(1, 2, 1)), rendezvous="file:///nowhere").load()
    assert str(error.value) == (
        "tensor_parallel_size=2 does not divide the model's 9 attention heads; sizes that work for this model: 1, 3, 9"
    )
    assert time.monotonic() - begin < 20, "it was refused before anybody was waited for"


def test_three_ranks_answer_paris(smol: str, ranks: Ranks) -> None:
    tokenizer = load_tokenizer(resolve_model(smol))
    text = tokenizer.render_chat([{"role": "user", "content": "What is the capital of France?"}])
    ids = tokenizer.encode(text, add_special_tokens=False)
    greedy = RowSampling(seed=0, temperature=0.0)
    plans = [StepPlan(0, [], [AddedRow(0, "france", ids, len(ids), [0, 1, 2, 3], greedy)], [], [], [0], [0], [len(ids)],
                      [True])]  # fmt: skip
    plans += [StepPlan(n, [], [], [], [], [0], [len(ids) + n - 1], [1], [True]) for n in range(1, 6)]
    made = config(smol, Layout(1, 3, 1), num_gpu_blocks_override=4, max_model_len=64, max_num_batched_tokens=64)
    answers = ranks.run(made, plans, want_logits=False)
    assert not [answer["trace"] for answer in answers if "error" in answer]
    for answer in answers:
        tokens = [token for result in answer["results"] for (token,) in result.tokens]
        assert tokenizer.decode(tokens) == "The capital of France is Paris"
