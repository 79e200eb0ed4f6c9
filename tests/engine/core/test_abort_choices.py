"""Aborting single choices: the API server ends one at a stop string while its siblings go on."""

import pytest
from core_harness import Engine, expected


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("index", range(3))
def test_a_choice_ends_alone_at_any_time(depth: int, steps: int, index: int) -> None:
    """Steps 0..2: queued, being computed, forking; the siblings get the tokens that they would have got anyway."""
    engine = Engine(depth=depth, max_num_batched_tokens=8)
    engine.add("a", 14, n=3, max_tokens=30, temperature=1.0, seed=7)
    engine.add("b", 5, max_tokens=30)
    for _ in range(steps):
        engine.step()
    engine.core.abort([], [("a", index), ("a", index), ("a", 3), ("a", -1), ("nobody", 0)])
    engine.run()
    ends = {0: "length", 1: "length", 2: "length", index: "abort"}
    assert engine.reasons("a") == ends
    assert engine.reasons("b") == {0: "length"}
    for i, end in ends.items():
        tokens = expected(engine, "a", i)
        assert engine.tokens("a", i) == (tokens if end == "length" else tokens[: len(engine.tokens("a", i))])
    assert len(engine.tokens("a", index)) <= steps, "computed on behind the abort"
    assert engine.tokens("b") == expected(engine, "b")
    assert engine.pool.stats().used == 0 and not engine.scheduler.has_work


def test_a_choice_that_is_gone_holds_neither_row_nor_blocks() -> None:
    engine = Engine(caching=False)
    engine.add("a", 8, n=2, max_tokens=60, temperature=1.0)
    engine.step(6)
    both = engine.pool.stats().used
    engine.core.abort([], [("a", 0)])
    assert engine.step().rows == [1]
    assert engine.pool.stats().used < both
    assert engine.scheduler.stats(0).num_running == 1
    engine.core.abort([], [("a", 1)])
    engine.run()
    assert engine.reasons("a") == {0: "abort", 1: "abort"}
    assert engine.pool.stats().used == 0 and not engine.scheduler.has_work
