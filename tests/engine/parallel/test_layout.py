"""Who is which rank, and what of a model it holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvern_engine.config import EngineConfig
from kvern_engine.model_config import ModelConfig
from kvern_engine.parallel.layout import (
    Layout,
    ModelShard,
    check_layout,
    even_slice,
    feasible_tensor_sizes,
    model_shard,
    stage_layers,
)


def model(heads: int, kv_heads: int, layers: int = 4, vocab: int = 100, inner: int = 50) -> ModelConfig:
    return ModelConfig("LlamaForCausalLM", vocab, heads * 8, inner, layers, heads, kv_heads, 8, 64)


sizes = st.integers(1, 4)


@given(sizes, sizes, sizes)
def test_coordinates_are_one_to_one(data: int, tensor: int, pipeline: int) -> None:
    layout = Layout(data, tensor, pipeline)
    found = [layout.coordinates(rank) for rank in range(layout.world)]
    assert len(set(found)) == layout.world == data * tensor * pipeline
    assert [layout.rank_of(*at) for at in found] == list(range(layout.world))
    assert [rank for engine in range(data) for rank in layout.ranks_of(engine)] == list(range(layout.world))
    for engine in range(data):
        stages = [layout.stage_ranks(engine, stage) for stage in range(pipeline)]
        assert [rank for stage in stages for rank in stage] == layout.ranks_of(engine)
        assert layout.answering_rank(engine) == stages[-1][0]


def test_bad_sizes_and_ranks() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size must be at least 1, got 0"):
        Layout(1, 0, 1)
    with pytest.raises(ValueError, match=r"within 0\.\.3 .* got 4"):
        Layout(1, 2, 2).coordinates(4)
    config = EngineConfig(model="m", tensor_parallel_size=2, pipeline_parallel_size=3, data_parallel_size=4)
    assert Layout.of(config) == Layout(4, 2, 3)


@given(st.integers(1, 100), st.integers(1, 8))
def test_stages_hold_each_layer_once(layers: int, pipeline: int) -> None:
    held = [stage_layers(layers, pipeline, stage) for stage in range(pipeline)]
    assert [layer for stage in held for layer in stage] == list(range(layers))
    lengths = [len(stage) for stage in held]
    assert max(lengths) - min(lengths) <= 1 and lengths[-1] == min(lengths)


@given(st.integers(1, 1000), st.integers(1, 9))
def test_slices_cover_once(total: int, parts: int) -> None:
    held = [even_slice(total, parts, index) for index in range(parts)]
    assert [i for part in held for i in range(part.start, part.stop)] == list(range(total))
    assert len({part.size for part in held}) == 1
    assert all(part.stop - part.start <= part.size for part in held)


@given(st.sampled_from([(8, 4), (9, 3), (4, 2), (32, 8), (6, 1), (12, 4)]), st.integers(1, 32))
def test_every_head_meets_its_kv_head(heads: tuple[int, int], size: int) -> None:
    config = model(*heads)
    if size not in feasible_tensor_sizes(config, 32):
        with pytest.raises(ValueError, match="sizes that work for this model: 1"):
            check_layout(config, Layout(tensor=size))
        return
    for rank in range(size):
        shard = model_shard(config, Layout(tensor=size), 0, rank)
        held = range(shard.heads.start, shard.heads.stop)
        group = config.num_heads // config.num_kv_heads
        own_group = shard.heads.size // shard.kv_heads.size
        assert len(held) == shard.heads.size and shard.kv_heads.stop - shard.kv_heads.start == shard.kv_heads.size
        for place, head in enumerate(held):  # the kernels pair them by place
            assert shard.kv_heads.start + place // own_group == head // group


def test_feasible_sizes() -> None:
    assert feasible_tensor_sizes(model(9, 3), 8) == [1, 3]
    assert feasible_tensor_sizes(model(8, 4), 8) == [1, 2, 4, 8]
    assert feasible_tensor_sizes(model(4, 2), 8) == [1, 2, 4]
    assert feasible_tensor_sizes(model(12, 4), 12) == [1, 2, 4, 12]


def test_refusals_say_what_works() -> None:
    with pytest.raises(ValueError) as error:
        check_layout(model(9, 3), Layout(tensor=2))
    assert str(error.value) == (
        "tensor_parallel_size=2 does not divide the model's 9 attention heads; sizes that work for this model: 1, 3, 9"
    )
    with pytest.raises(ValueError, match=r"=6 neither divides the model's 4 KV heads nor is a multiple of them; .* 12"):
        check_layout(model(12, 4), Layout(tensor=6))
    with pytest.raises(ValueError, match="pipeline_parallel_size=5 is more than the model's 4 layers; use 1 to 4"):
        check_layout(model(8, 4), Layout(pipeline=5))


def test_one_rank_holds_all() -> None:
    config = model(8, 4)
    shard = ModelShard.whole(config)
    assert (shard.layers, shard.is_first, shard.is_last) == (range(4), True, True)
    assert (shard.heads.size, shard.kv_heads.size, shard.inner.size, shard.vocab.size) == (8, 4, 50, 100)


def test_padding() -> None:
    shards = [model_shard(model(8, 4, vocab=97, inner=50), Layout(tensor=4), 0, rank) for rank in range(4)]
    assert [(s.vocab.start, s.vocab.stop, s.vocab.size) for s in shards] == [
        (0, 25, 25),
        (25, 50, 25),
        (50, 75, 25),
        (75, 97, 25),
    ]
    assert [s.inner.size for s in shards] == [13] * 4
