"""Layers and tables on their own: CPU layouts of a linear layer, rotary scalings, row state, uploads, the registry."""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from worker_harness import FixedRunner, plan

from kvern_engine.core.plan import AddedRow, RowSampling
from kvern_engine.layers.build import Build
from kvern_engine.layers.linear import Linear, padded_rows
from kvern_engine.layers.rotary import cos_sin_table
from kvern_engine.loading.config import read_model_config
from kvern_engine.loading.resolve import resolve_model
from kvern_engine.parallel.groups import TensorGroup
from kvern_engine.parallel.layout import ModelShard
from kvern_engine.worker.batch import BatchBuilder
from kvern_engine.worker.staging import Staging, offsets
from kvern_engine.worker.tables import Feature, RowTables, features_of

CPU = torch.device("cpu")
TINY = str(Path(__file__).parents[1] / "models_data" / "tiny-kjv")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(48, 160), (64, 64), (96, 40)])
def test_linear_in_every_layout(inputs: int, outputs: int, bias: bool) -> None:
    layer = Linear(inputs, outputs, bias=bias, dtype=torch.float32, device=CPU)
    layer.weight.normal_()
    if layer.bias is not None:
        layer.bias.normal_()
    weight = layer.weight.clone()
    layer.add_cpu_layouts()
    for rows in (1, 2, 3, 32, 70):
        x = torch.randn(rows, inputs)
        assert torch.allclose(layer(x), F.linear(x, weight, layer.bias), atol=1e-4)


def test_few_programs_are_kept_for_products() -> None:
    """oneDNN keeps one of half a megabyte for every number of rows that it is given."""
    given = [padded_rows(rows) for rows in range(1, 8193)]
    assert len(set(given)) == 80
    assert all(rows <= padded <= rows + max(3, rows // 4) for rows, padded in enumerate(given, 1))
    layer = Linear(48, 160, bias=True, dtype=torch.float32, device=CPU)
    layer.weight.normal_(), layer.bias.normal_()
    weight = layer.weight.clone()
    layer.add_cpu_layouts()
    for rows in (5, 31, 33, 129, 515, 2100):
        x = torch.randn(rows, 48)
        assert torch.allclose(layer(x), F.linear(x, weight, layer.bias), atol=1e-4)
        assert layer(x).shape == (rows, 160)


def test_a_shared_weight_stays() -> None:
    table = torch.randn(200, 32)
    head = Linear.sharing(table)
    head.add_cpu_layouts()
    assert table.shape == (200, 32)
    assert torch.allclose(head(torch.eye(32)[:1]), table.t()[:1], atol=1e-6)


def test_16_bit_weights_keep_one_layout() -> None:
    layer = Linear(32, 128, dtype=torch.bfloat16, device=CPU)
    layer.weight.normal_()
    layer.add_cpu_layouts()
    assert layer.weight.shape == (128, 32)


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ],
)
def test_rotary_as_in_transformers(scaling: dict[str, object] | None) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_theta": 500000.0, **(scaling or {"rope_type": "default"})}
    config = LlamaConfig(head_dim=64, max_position_embeddings=32768, rope_parameters=parameters)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(4000).unsqueeze(0))
    table = cos_sin_table(64, 4000, 500000.0, scaling, CPU)
    assert table.dtype == torch.float32
    assert torch.allclose(table[:, :32], cos[0, :, :32], atol=2e-3)  # theirs multiplies in float32
    assert torch.allclose(table[:, 32:], sin[0, :, :32], atol=2e-3)


def test_features() -> None:
    assert features_of(RowSampling(seed=1, temperature=0.0, top_k=5, top_p=0.5)) == Feature(0)
    assert features_of(RowSampling(seed=1, top_k=5)) == Feature.RANDOM | Feature.TOP_K
    assert features_of(RowSampling(seed=1, temperature=0.0, min_tokens=4)) == Feature(0)
    assert features_of(RowSampling(seed=1, temperature=0.0, logprobs=0)) == Feature.LOGPROBS


def tables(max_num_seqs: int = 64, max_model_len: int = 1024) -> RowTables:
    return RowTables(max_num_seqs=max_num_seqs, max_model_len=max_model_len, block_size=16, vocab_size=1000, device=CPU)


def row(index: int, length: int, blocks: list[int], sampling: RowSampling | None = None) -> AddedRow:
    return AddedRow(index, f"r{index}", list(range(length)), length, blocks, sampling or RowSampling(seed=index))


def test_batch_is_ordered_decodes_first() -> None:
    state = tables()
    added = [row(0, 5, [7]), row(1, 30, [3, 4]), row(2, 9, [9])]
    made = plan(0, [(1, 0, 20, False), (0, 4, 1, True), (2, 2, 7, True)], added=added)
    edits = state.apply(made)
    batch = BatchBuilder(state, 64).build(made, edits)
    assert batch.rows.tolist() == [0, 1, 2]
    assert batch.meta.num_decodes == 1
    assert batch.query_start.tolist() == batch.meta.query_start.tolist() == [0, 1, 21, 28]
    assert batch.token_ids.tolist() == [4, *range(20), *range(2, 9)]
    assert batch.positions.tolist() == [4, *range(20), *range(2, 9)]
    assert batch.meta.seq_lens.tolist() == [5, 20, 9]
    assert batch.meta.slots.tolist() == [7 * 16 + 4, *range(48, 68), *range(9 * 16 + 2, 9 * 16 + 9)]
    assert batch.meta.block_tables.tolist() == [[7, 0], [3, 4], [9, 0]]
    assert batch.sampling is not None and batch.sampling.hidden_index is not None
    assert batch.sampling.rows.tolist() == [0, 2]
    assert batch.sampling.hidden_index.tolist() == [0, 27]


def test_order_within_a_plan() -> None:
    """Removed, added, edited: a row that is removed and added again in one plan has its new state; edits come last."""
    state = tables()
    state.apply(plan(0, added=[row(3, 20, [1, 2], RowSampling(seed=1, logit_bias={1: 2.0}))]))
    edits = state.apply(plan(1, removed=[3], added=[row(3, 4, [8])], edits=[(3, 0, [5, 6])]))
    assert edits is not None
    state.set_blocks(*(torch.from_numpy(part) for part in edits))
    assert state.block_tables[3, :2].tolist() == [5, 6]
    assert Feature(int(state.host.features[3])) == Feature.RANDOM
    assert 3 not in state.host.extras


def test_rows_outside_the_tables_are_refused() -> None:
    state = tables(4, 64)
    with pytest.raises(ValueError, match=r"row 4 of r4 is outside 0\.\.3 \(max_num_seqs\)"):
        state.apply(plan(0, added=[row(4, 1, [0])]))
    with pytest.raises(ValueError, match=r"r0 has 65 tokens; max_model_len is 64"):
        state.apply(plan(0, added=[row(0, 65, [0] * 5)]))
    with pytest.raises(ValueError, match=r"r0 has 9 blocks; max_model_len takes 5"):
        state.apply(plan(0, added=[row(0, 5, [0] * 9)]))
    with pytest.raises(ValueError, match=r"block_edits of row 2: 5\+1 is outside its table of 5 blocks"):
        state.apply(plan(0, edits=[(2, 5, [1])]))


def test_a_plan_without_rows() -> None:
    runner = FixedRunner(torch.zeros(8))
    runner.runner.execute(plan(0, [(0, 0, 2, True)], added=[row(0, 2, [0])]))
    result = runner.runner.execute(plan(1, edits=[(0, 1, [3])], removed=[])).result()
    assert (result.step, result.rows, result.tokens) == (1, [], [])
    assert runner.tables.block_tables[0, 1] == 3


def test_copies_read_before_they_write() -> None:
    runner = FixedRunner(torch.zeros(8))
    layer = torch.arange(4.0).view(1, 1, 4, 1, 1).expand(2, 1, 4, 16, 2)
    runner.runner.arena[:] = [layer.clone(), layer + 10]
    runner.runner.execute(plan(0, copies=[(0, 1), (1, 2)]))
    assert [each[0, 0, :, 0, 0].tolist() for each in runner.runner.arena] == [[0, 0, 1, 3], [10, 10, 11, 13]]
    assert all((each == each[:1, :, :, :1, :1]).all() for each in runner.runner.arena), "K and V, whole blocks"


def test_applying_a_decode_plan_is_cheap() -> None:
    """64 rows that decode, a quarter of them into a new block: the host's part of a step."""
    state = tables()
    rows = [(i, 100, 1, True) for i in range(64)]
    state.apply(plan(0, added=[row(i, 100, list(range(7))) for i in range(64)]))
    builder = BatchBuilder(state, 2048)
    made = plan(1, rows, edits=[(i, 6, [i]) for i in range(16)])
    times = []
    for _ in range(200):
        begin = time.perf_counter()
        builder.build(made, state.apply(made))
        times.append(time.perf_counter() - begin)
    assert min(times) < 150e-6 * 10, f"{min(times) * 1e6:.0f} us"  # 150 us on an idle machine


def test_upload_offsets_and_cpu_views() -> None:
    assert offsets([4, 16, 17]) == [0, 16, 32, 64]
    array = np.arange(3, dtype=np.int64)
    (view,) = Staging(CPU, 64).upload(array)
    array[1] = 9
    assert view.tolist() == [0, 9, 2]


@pytest.mark.parametrize(("ranks", "inputs", "outputs"), [(1, 2, 1), (2, 1, 1), (4, 1, 1)])
def test_two_pieces_in_all_where_numbers_are_invariant(ranks: int, inputs: int, outputs: int) -> None:
    model = read_model_config(resolve_model(TINY))
    shard = ModelShard.whole(model)
    build = Build(model, shard, TensorGroup(ranks), torch.bfloat16, torch.device("cuda"), 64, invariant=True)
    assert (build.pieces, build.output_pieces) == (inputs, outputs)
    assert not build.in_parts and not build.sums_in_norm
    offloaded, other = build.on(torch.device("cpu")), replace(build, invariant=False)
    assert (offloaded.pieces, offloaded.output_pieces) == (inputs, outputs), "it computes on the GPU all the same"
    assert (other.pieces, other.output_pieces) == (0, 0)
    assert replace(build, group=TensorGroup(), invariant=False).in_parts
