"""Ranks that become those of another layout while requests run: same tokens, nothing computed twice, nothing left over.

The model is made up, eight heads and four KV heads on four ranks: at four ranks each holds one KV head.
"""

import pytest
from switch_harness import SwitchingPod, left_alone

from kvern_engine.config import EngineConfig
from kvern_engine.ipc import AddRequest
from kvern_engine.parallel.messages import Finish, MoveKv, Reform
from kvern_engine.request import SamplingParams


def config(model: str, data: int, tensor: int, **fields: object) -> EngineConfig:
    defaults: dict[str, object] = {"max_num_seqs": 8, "num_gpu_blocks_override": 80, "max_num_batched_tokens": 64}
    sizes = {"data_parallel_size": data, "tensor_parallel_size": tensor}
    return EngineConfig(model=model, device="cpu", **{**defaults, **fields}, **sizes)  # type: ignore[arg-type]


def requests(count: int, tokens: int = 40) -> list[AddRequest]:
    """Greedy and random ones, some with a common beginning, one with choices that fork."""
    found = []
    for i in range(count):
        prompt = list(range(2, 34)) + [100 + i] * 5 if i % 2 else [200 + i] * (9 + i)
        params = SamplingParams(
            temperature=0.0 if i % 3 else 0.9, seed=i, max_tokens=tokens, ignore_eos=True, n=3 if i == 4 else 1
        )
        found.append(AddRequest(f"r{i}", 0, prompt, params, float(i)))
    return found


@pytest.fixture(scope="module")
def undisturbed(made_path: str) -> dict[str, list[int]]:
    """What one rank that is left alone answers."""
    return left_alone(config(made_path, 1, 1), requests(8))


@pytest.mark.parametrize(
    ("tight", "room"), [(False, None), (True, None), (True, 1)], ids=["two arenas", "one arena", "layers in turn"]
)
def test_streams_go_on_through_every_layout(
    made_path: str,
    undisturbed: dict[str, list[int]],
    tmp_path_factory: pytest.TempPathFactory,
    tight: bool,
    room: int | None,
) -> None:
    pod = SwitchingPod(config(made_path, 4, 1), tmp_path_factory.mktemp("switch"), tight=tight, room=room)
    try:
        for i, request in enumerate(requests(8)):
            pod.add(i % 4, request)
        pod.steps(4)
        kept = recomputed = 0
        for tensor in (2, 4, 2, 1):
            placed = pod.switch(tensor)
            kept, recomputed = kept + placed.kept, recomputed + placed.recomputed
            pod.steps(4)
        pod.switch(4, keep=False)
        assert pod.layout.tensor == 1
        assert pod.lost == ({0, 1, 2, 3} if room else set()), "what was let go for the new arena is computed again"
        pod.run()
        assert pod.tokens() == undisturbed
        assert (kept, recomputed) == (36, 2), "one engine of four ranks has eight rows for ten choices"
        for core in pod.cores:
            assert core.scheduler.pool.num_used == 0
        # Prefixes were taken along: a prompt that was computed at the beginning is found at the end.
        for engine in range(4):
            prompt = [*range(2, 34), 9]
            pod.add(engine, AddRequest(f"again{engine}", 0, prompt, SamplingParams(max_tokens=1), 99.0))
        pod.run()
        assert 32 in [pod.outputs[f"again{engine}/0"][0].num_cached_tokens for engine in range(4)]
    finally:
        pod.close()


@pytest.mark.parametrize(
    ("tight", "room"), [(False, None), (True, None), (True, 1)], ids=["two arenas", "one arena", "layers in turn"]
)
def test_a_switch_leaves_nothing_behind(
    made_path: str, tmp_path_factory: pytest.TempPathFactory, tight: bool, room: int | None
) -> None:
    pod = SwitchingPod(config(made_path, 4, 1), tmp_path_factory.mktemp("switch"), tight=tight, room=room)
    try:
        for tensor in (2, 4, 1):
            pod.switch(tensor)
        first = pod.held()
        assert [rank[-2:] for rank in first] == [(1, 1)] * 4, "one worker and one runner a rank"
        for tensor in (2, 4, 1) * 3:
            pod.switch(tensor)
        assert pod.held() == first
        for tensor in (2, 4):
            pod.switch(tensor, keep=False)
        assert pod.held() == first
    finally:
        pod.close()


def test_who_cannot_switch_says_why_and_goes_on(made_path: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("switch")
    pod = SwitchingPod(config(made_path, 4, 1), folder)
    try:
        (alone,) = pod.ask(Reform(1, 2, 2, f"file://{folder}/nobody", 1.0), [0])
        assert alone.error is not None
        assert "ranks 1, 2, 3 of engine 0 did not join within 1 s; rank 0 waited at" in alone.error
        (early,) = pod.ask(MoveKv(1, []), [1])
        assert early.error == "there is no layout to move to"
        found = pod.ask(Reform(2, 1, 3, f"file://{folder}/three", 20.0))
        assert {each.error for each in found} == {
            "tensor_parallel_size=3 does not divide the model's 8 attention heads; sizes that work for this model: "
            "1, 2, 4, 8"
        }
        assert [each.error for each in pod.ask(Finish(2, False))] == [None] * 4
        for i, request in enumerate(requests(4, tokens=5)):
            pod.add(i, request)
        pod.run()
        assert all(len(tokens) == 5 for tokens in pod.tokens().values())
    finally:
        pod.close()
