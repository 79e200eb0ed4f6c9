"""Plans of what ranks send each other when the layout changes: everything arrives, once, from whoever holds it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvern_engine.layers.parameters import pieces
from kvern_engine.loading.parts import WeightPart
from kvern_engine.model_config import Experts, ModelConfig
from kvern_engine.models.registry import MODELS, CausalLM
from kvern_engine.parallel.groups import ParallelContext, TensorGroup
from kvern_engine.parallel.kv_reshard import KvMove, kv_rounds, plan_kv_moves
from kvern_engine.parallel.layout import Layout, feasible_tensor_sizes, model_shard
from kvern_engine.parallel.reshard import Move, NobodyHoldsError, Pieces, cut, plan_moves, rounds, volume
from kvern_engine.worker.load import random_weights

LAYOUTS = [Layout(4, 1, 1), Layout(2, 2, 1), Layout(1, 4, 1)]


# ------------------------------------------------------------ parts of one tensor


@st.composite
def regions(draw: st.DrawFn) -> tuple[Pieces, Pieces]:
    """A tensor of up to two dimensions, cut along one of them for those who hold it and along one for who wants it;
    some hold it whole, some nothing."""
    shape = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=2)))
    ranks = draw(st.integers(1, 5))

    def part() -> WeightPart:
        axis = draw(st.integers(0, len(shape) - 1))
        ranges = [(0, size) for size in shape]
        start = draw(st.integers(0, shape[axis]))
        ranges[axis] = (start, draw(st.integers(start, shape[axis])))
        return WeightPart(shape, tuple(ranges))

    whole = draw(st.integers(0, ranks - 1))
    held = {rank: {"w": WeightPart.whole(*shape) if rank == whole else part()} for rank in range(ranks)}
    return held, {rank: {"w": part()} for rank in range(ranks) if draw(st.booleans())}


@given(regions())
def test_every_number_arrives_once(case: tuple[Pieces, Pieces]) -> None:
    held, wanted = case
    moves = plan_moves(held, wanted)
    for rank, parts in wanted.items():
        got = np.zeros(parts["w"].shape, dtype=int)
        for move in moves:
            if move.target == rank:
                source = held[move.source]["w"].ranges
                assert all(a <= c and d <= b for (a, b), (c, d) in zip(source, move.ranges, strict=True))
                got[tuple(slice(*each) for each in move.ranges)] += 1
        expected = np.zeros(parts["w"].shape, dtype=int)
        expected[parts["w"].slices] = 1
        assert (got == expected).all()
        # What it held itself, nobody sends it.
        own = np.zeros_like(expected)
        own[held[rank]["w"].slices] = 1
        sent = sum(move.size for move in moves if move.target == rank and move.source != rank)
        assert sent == (expected & (1 - own)).sum()


def test_the_work_is_shared_among_those_that_can() -> None:
    whole, half = WeightPart.whole(8, 2), WeightPart((8, 2), ((0, 4), (0, 2)))
    held = {0: {"a": whole, "b": whole}, 1: {"a": whole, "b": whole}, 2: {}, 3: {}}
    moves = plan_moves(held, {2: {"a": half, "b": half}, 3: {"a": half, "b": half}})
    assert sorted(move.source for move in moves) == [0, 0, 1, 1]


def test_what_nobody_holds_is_named() -> None:
    held = {0: {"w": WeightPart((8, 2), ((0, 4), (0, 2)))}}
    with pytest.raises(NobodyHoldsError, match=r"no rank holds \[4:8, 0:2\] of w, which rank 1 needs"):
        plan_moves(held, {1: {"w": WeightPart.whole(8, 2)}})


@given(regions(), st.integers(1, 20))
def test_rounds_hold_every_move_in_small_pieces(case: tuple[Pieces, Pieces], most: int) -> None:
    moves = plan_moves(*case)
    parts = rounds(moves, most)
    for move in moves:
        count = np.zeros([stop for _, stop in move.ranges], dtype=int)
        for part in (piece for found in parts for piece in found):
            if (part.source, part.target) == (move.source, move.target):
                count[tuple(slice(*each) for each in part.ranges)] += 1
        inside = count[tuple(slice(*each) for each in move.ranges)]
        assert (inside == (move.source != move.target)).all()
    for found in parts:
        for pair in {(m.source, m.target) for m in found}:
            sizes = [m.size for m in found if (m.source, m.target) == pair]
            assert len(sizes) == 1 or sum(sizes) <= most
    for piece in (piece for move in moves for piece in cut(move, most)):
        assert piece.size <= most or piece.ranges[0][1] - piece.ranges[0][0] == 1


def test_a_number_by_itself_moves_too() -> None:
    assert plan_moves({0: {"s": WeightPart.whole()}}, {1: {"s": WeightPart.whole()}}) == [Move("s", 0, 1, ())]
    assert volume(()) == 1 and cut(Move("s", 0, 1, ()), 1) == [Move("s", 0, 1, ())]


# ------------------------------------------------------------ whole models


def family(name: str) -> ModelConfig:
    extra: dict[str, object] = {}
    if name in ("MixtralForCausalLM", "Qwen3MoeForCausalLM"):
        extra["experts"] = Experts(4, 2, 22)
    if name.startswith("Qwen3"):
        extra["qk_norm"] = True
    if name == "GPT2LMHeadModel":
        extra |= {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True, "hidden_act": "gelu_tanh"}
    if name == "Phi3ForCausalLM":
        extra["rotary_dim"] = 4
    kv_heads = 8 if name == "GPT2LMHeadModel" else 2  # fewer than ranks: they are held twice
    return ModelConfig(name, 67, 64, 50, 2, 8, kv_heads, 8, 64, tie_word_embeddings=name.startswith("G"), **extra)  # type: ignore[arg-type]


def models(config: ModelConfig, layout: Layout, device: str) -> list[CausalLM]:
    found = []
    for rank in range(layout.world):
        context = ParallelContext(layout, rank, TensorGroup(layout.tensor, layout.coordinates(rank)[2]))
        build = MODELS[config.architecture]
        found.append(
            build(config, max_positions=64, dtype=torch.float32, device=torch.device(device), parallel=context)
        )
    return found


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_family_is_resharded_exactly(name: str) -> None:
    """Weights moved by the plan are those that a rank of the other layout would have loaded, padding and all."""
    config = family(name)
    loaded = {layout: models(config, layout, "cpu") for layout in LAYOUTS}
    held = {}
    for layout, ranks in loaded.items():
        for model in ranks:
            random_weights(model, seed=5)
            model.add_cpu_layouts()  # as on a CPU, where they are kept in another order
        held[layout] = [pieces(model.destinations()) for model in ranks]
    for before in LAYOUTS:
        for after in LAYOUTS:
            targets = [pieces(model.destinations()) for model in models(config, after, "cpu")]
            for found in targets:
                for view, _ in found.values():
                    view.fill_(float("nan"))
            sources = held[before]
            moves = plan_moves(
                {r: {n: part for n, (_, part) in p.items()} for r, p in enumerate(sources)},
                {r: {n: part for n, (_, part) in p.items()} for r, p in enumerate(targets)},
            )
            for move in moves:
                assert before != after or move.source == move.target
                (source, has), (target, gets) = sources[move.source][move.name], targets[move.target][move.name]
                target[within(move, gets)] = source[within(move, has)]
            for rank, found in enumerate(targets):
                for key, (view, _) in found.items():
                    assert torch.equal(view, held[after][rank][key][0]), f"{key} at rank {rank}: {before} -> {after}"


def within(move: Move, part: WeightPart) -> tuple[slice, ...]:
    return tuple(slice(a - first, b - first) for (a, b), (first, _) in zip(move.ranges, part.ranges, strict=True))


def test_what_was_quantized_is_refused() -> None:
    (model,) = models(family("LlamaForCausalLM"), Layout(), "cpu")
    random_weights(model, seed=1)
    model.quantize_fp8()
    with pytest.raises(
        ValueError, match=r"q_proj.weight cannot be moved between ranks: it is kept as \[0, 64\], quant"
    ):
        pieces(model.destinations())


# ------------------------------------------------------------ KV


@given(
    st.sampled_from([(8, 8), (8, 4), (8, 2), (8, 1)]),
    st.sampled_from(LAYOUTS),
    st.sampled_from(LAYOUTS),
    st.integers(0, 2**32 - 1),
    st.integers(1, 400),
)
def test_kv_arrives_head_by_head(
    heads: tuple[int, int], before: Layout, after: Layout, seed: int, most_bytes: int
) -> None:
    model = ModelConfig("LlamaForCausalLM", 100, 64, 50, 2, *heads, 8, 64)
    if before.tensor not in feasible_tensor_sizes(model, 8) or after.tensor not in feasible_tensor_sizes(model, 8):
        return
    rng = np.random.default_rng(seed)
    old_blocks, new_blocks = 6, 30
    content = rng.integers(1, 10**9, (before.data, heads[1], old_blocks))  # of a block's head, whoever holds it
    blocks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    free = [iter(rng.permutation(new_blocks).tolist()) for _ in range(after.data)]
    for old in range(before.data):
        for block in range(old_blocks):
            new = int(rng.integers(after.data))
            if rng.random() < 0.6:
                blocks.setdefault((old, new), []).append((block, next(free[new])))
    moves = plan_kv_moves(model, before, after, blocks)
    sent = [part for found in kv_rounds(moves, 10, most_bytes) for part in found]
    arenas = {rank: np.zeros((heads[1], new_blocks), dtype=int) for rank in range(after.world)}
    for move in [move for move in moves if move.source == move.target] + sent:
        engine, stage, tensor_rank = before.coordinates(move.source)
        has = model_shard(model, before, stage, tensor_rank).kv_heads
        assert has.start <= move.heads[0] < move.heads[1] <= has.stop, "whoever sends a head has it"
        for old_block, new_block in zip(move.old, move.new, strict=True):
            for head in range(*move.heads):
                assert arenas[move.target][head, new_block] == 0, "nothing comes twice"
                arenas[move.target][head, new_block] = content[engine, head, old_block]
    for rank, arena in arenas.items():
        engine, stage, tensor_rank = after.coordinates(rank)
        wants = model_shard(model, after, stage, tensor_rank).kv_heads
        expected = np.zeros_like(arena)
        for (old, new), pairs in blocks.items():
            if new == engine:
                for old_block, new_block in pairs:
                    expected[wants.start : wants.stop, new_block] = content[old, wants.start : wants.stop, old_block]
        assert (arena == expected).all()
    assert all(len(move.old) * 10 <= max(most_bytes, 10 * heads[1]) for move in sent)


def test_stages_and_devices_stay() -> None:
    model = ModelConfig("LlamaForCausalLM", 100, 64, 50, 2, 8, 4, 8, 64)
    with pytest.raises(ValueError, match="a switch keeps devices and stages: from dp 2 x tp 1 x pp 1 to dp 1 x tp 1 x"):
        plan_kv_moves(model, Layout(2, 1, 1), Layout(1, 1, 2), {})
    assert plan_kv_moves(model, Layout(2), Layout(1, 2), {(0, 0): [(3, 5)]}) == [
        KvMove(0, 0, (0, 2), (3,), (5,)),
        KvMove(0, 1, (2, 4), (3,), (5,)),
    ]
