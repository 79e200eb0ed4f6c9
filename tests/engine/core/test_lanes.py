"""Micro-batches of a pipeline: equal lanes, taken in turns, none twice before its tokens are there."""

import itertools

import pytest
from core_harness import Engine, expected

from kvern_engine.core.lanes import Lane, whose_turn


def lane(last_step: int, decodes: int = 1) -> Lane:
    made = Lane()
    made.last_step, made.decodes = last_step, [None] * decodes  # type: ignore[list-item]
    return made


def test_the_lane_that_has_waited_longest_takes_its_turn() -> None:
    lanes = [lane(4), lane(3), lane(5)]
    assert whose_turn(lanes, 6, 6) is lanes[1]
    assert whose_turn(lanes, 6, 3) is lanes[1], "three steps lie behind it: its token is on its way to the first stage"
    assert whose_turn([lane(5), lane(4, 0)], 6, 5).decodes == [], "lane 0 may not be computed: the other takes prompts"
    first = lane(5)
    assert whose_turn([first, lane(4, 0)], 6, 6) is first, "its result is known, and the other has nothing to decode"


@pytest.mark.parametrize("pipeline", [1, 2, 3, 4])
@pytest.mark.parametrize("requests", [1, 3, 8])
def test_every_step_decodes_its_share_and_the_tokens_are_the_same(pipeline: int, requests: int) -> None:
    engine = Engine(num_blocks=200, depth=pipeline + 1, pipeline=pipeline, max_model_len=100)
    engine.worker.pipeline = pipeline
    names = [f"r{i}" for i in range(requests)]
    for name in names:
        engine.add(name, 5, max_tokens=60)
    engine.run()
    for name in names:
        assert engine.tokens(name) == expected(engine, name)
    middle = engine.plans[3 * pipeline : -4 * pipeline]
    sizes = [len(plan.rows) for plan in middle]
    assert max(sizes) - min(sizes) <= 1 and max(sizes) == -(-requests // pipeline)
    distance = min(pipeline, requests)
    for plans in itertools.pairwise(middle[::distance]):
        assert plans[0].rows == plans[1].rows, "a lane keeps its sequences"


def test_lanes_are_evened_out_when_requests_end() -> None:
    engine = Engine(num_blocks=200, depth=3, pipeline=2, max_model_len=200)
    engine.worker.pipeline = 2
    for i in range(8):  # those of one lane end early
        engine.add(f"r{i}", 5, max_tokens=100 if i < 4 else 20)
    engine.run()
    late = engine.plans[-60:-20]
    assert {len(plan.rows) for plan in late} == {2}
    assert all(engine.reasons(f"r{i}") == {0: "length"} for i in range(8))


def test_a_pipeline_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="pipeline must be at least 1, got 0"):
        Engine(pipeline=0)
