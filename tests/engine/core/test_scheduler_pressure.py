"""The scheduler where memory is short: who is preempted, who may overtake, and that everybody gets through."""

import random

import pytest
from core_harness import Engine, expected

from kvern_engine.core.sequence import State


def preempted(engine: Engine) -> list[str]:
    return [s.request_id for s in engine.scheduler._books.waiting if s.state is State.PREEMPTED]


def run_until_preempted(engine: Engine) -> list[str]:
    while not preempted(engine):
        assert not engine.core.idle, "nobody was preempted"
        engine.step()
    return preempted(engine)


# -- victims -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_victim_loses_the_least_computed_work(depth: int) -> None:
    engine = Engine(num_blocks=10, depth=depth)
    engine.add("small", 5, max_tokens=30)
    engine.add("large", 17, max_tokens=20)
    assert run_until_preempted(engine) == ["small"]  # although it came first
    engine.run()
    for name in ("small", "large"):
        assert engine.tokens(name) == expected(engine, name)
        assert engine.reasons(name) == {0: "length"}
    assert engine.pool.num_free == 10


def test_priority_comes_before_work() -> None:
    engine = Engine(num_blocks=10, policy="priority")
    engine.add("urgent", 5, priority=-1, max_tokens=30)
    engine.add("patient", 17, priority=3, max_tokens=20)
    assert run_until_preempted(engine) == ["patient"]
    engine.run()
    assert engine.placements("urgent") == 1


def test_fcfs_ignores_priorities() -> None:
    engine = Engine(num_blocks=10)
    engine.add("urgent", 5, priority=-1, max_tokens=30)
    engine.add("patient", 17, priority=3, max_tokens=20)
    assert run_until_preempted(engine) == ["urgent"]


def test_one_that_needs_a_block_gives_way_itself_where_it_loses_least() -> None:
    engine = Engine(num_blocks=10)
    engine.add("large", 19, max_tokens=20)
    engine.add("small", 4, max_tokens=30)
    assert run_until_preempted(engine) == ["small"]
    engine.run()
    assert engine.placements("large") == 1


def test_what_others_share_is_not_lost() -> None:
    engine = Engine(num_blocks=15)
    engine.add("forks", 24, n=2, max_tokens=20)  # 24 tokens each, of which 20 are in blocks that both hold
    engine.step(2)
    engine.add("alone", 9, max_tokens=30)
    assert run_until_preempted(engine) == ["forks"]


def test_a_preempted_one_finds_its_own_blocks_again() -> None:
    engine = Engine(num_blocks=10)
    engine.add("large", 19, max_tokens=8)
    engine.add("small", 8, max_tokens=24, seed=1)
    run_until_preempted(engine)
    engine.run()
    resumed = [row for plan in engine.plans for row in plan.added if row.request_id == "small"][1]
    plan = next(plan for plan in engine.plans if resumed in plan.added)
    assert len(resumed.token_ids) > 8  # prompt and what had been generated
    assert plan.starts[plan.rows.index(resumed.row)] >= 8
    assert engine.core.stats().prefix_queries == 27  # counted at the first admission only
    assert engine.tokens("small") == expected(engine, "small")


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_a_preempted_one_waits_for_its_tokens_in_flight(depth: int) -> None:
    engine = Engine(num_blocks=10, depth=depth)
    engine.add("small", 5, max_tokens=30)
    engine.add("large", 17, max_tokens=20)
    run_until_preempted(engine)
    (victim,) = engine.scheduler._books.waiting
    known = len(victim.tokens)
    assert victim.in_flight == depth - 2 or victim.in_flight == depth - 1
    engine.run()
    resumed = [row for plan in engine.plans for row in plan.added if row.request_id == "small"][1]
    assert len(resumed.token_ids) >= known + depth - 2
    assert engine.tokens("small") == expected(engine, "small")


def test_a_finished_one_whose_last_token_is_in_flight_makes_room_without_loss() -> None:
    engine = Engine(num_blocks=9, depth=8)
    engine.add("done", 13, max_tokens=2)  # 4 blocks; scheduled to its end in two steps, of which nothing is back yet
    engine.add("grows", 15, max_tokens=16)  # 4 blocks, and needs two more before anything is back
    engine.step(7)
    assert [len(plan.block_edits) for plan in engine.plans] == [0, 0, 1, 0, 0, 0, 1]
    assert engine.plans[6].removed == [0]
    engine.run()
    assert engine.core.stats().preemptions == 0
    for name in ("done", "grows"):
        assert engine.tokens(name) == expected(engine, name)


def test_what_was_lost_before_counts_as_well() -> None:
    engine = Engine()
    engine.add("less", 5, max_tokens=30)
    engine.add("more", 9, max_tokens=30)
    engine.step(2)
    less, more = engine.scheduler._books.decodes
    assert engine.scheduler._victim(more) is less
    less.lost = 5
    assert engine.scheduler._victim(more) is more


def test_deferred_choices_do_not_overtake_a_preempted_one() -> None:
    engine = Engine(max_num_seqs=2)
    engine.add("old", 5, max_tokens=30)
    engine.add("forks", 9, n=2, max_tokens=30)
    engine.step(2)
    books = engine.scheduler._books
    books.preempt(books.decodes[0])
    assert [row.request_id for row in engine.step().added] == ["old"]


def test_a_queue_that_cannot_move_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(num_blocks=10)
    engine.add("a", 16, max_tokens=20)
    engine.step()
    engine.add("big", 30, max_tokens=5)
    engine.step()
    looked = []
    monkeypatch.setattr(type(engine.pool), "lookup", lambda self, digests: looked.append(1) or [])
    engine.step(8)
    assert not looked


# -- no thrashing, no starvation ---------------------------------------------------------------------------------------


def test_nobody_is_let_in_who_would_be_thrown_out_at_once() -> None:
    engine = Engine(num_blocks=10)
    engine.add("a", 16, max_tokens=20)
    engine.add("b", 12, max_tokens=20)
    engine.step()
    engine.add("c", 8, max_tokens=20)  # fits, but a and b could not grow any more
    engine.step(3)
    assert engine.core.stats().num_waiting == 1
    engine.run()
    assert engine.placements("c") == 1


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_preemptions_are_bounded_under_constant_pressure(depth: int, seed: int) -> None:
    rng = random.Random(seed)
    engine = Engine(num_blocks=10, depth=depth, max_num_batched_tokens=64)
    names = [f"r{i}" for i in range(40)]
    for name in names:
        engine.add(name, rng.randint(1, 20), max_tokens=rng.randint(1, 20))
    engine.run()
    stats = engine.core.stats()
    assert stats.preemptions <= len(names) // 2
    assert max(engine.placements(name) for name in names) <= 3  # nobody goes in and out
    computed = stats.step_tokens
    useful = sum(len(engine.messages[name].prompt_token_ids) + len(engine.tokens(name)) for name in names)
    assert computed <= 1.25 * useful
    for name in names:
        assert engine.tokens(name) == expected(engine, name)


@pytest.mark.parametrize("patience", [0, 4, 16])
def test_a_large_request_is_overtaken_a_bounded_number_of_times(patience: int) -> None:
    engine = Engine(num_blocks=10, patience=patience, max_num_seqs=4)
    engine.add("first", 8, max_tokens=12)
    engine.step()
    engine.add("large", 36, max_tokens=3)
    for i in range(100):
        engine.add(f"small{i}", 4, max_tokens=4)
    for _ in range(400):
        engine.step()
        if engine.reasons("large"):
            break
    overtook = sum(engine.first_step(f"small{i}") < engine.first_step("large") for i in range(100) if placed(engine, i))
    assert engine.reasons("large") == {0: "length"}
    assert overtook <= patience
    assert overtook > 0 or patience == 0
    engine.run()


def placed(engine: Engine, index: int) -> bool:
    return engine.placements(f"small{index}") > 0


def test_a_large_request_gets_through_an_endless_stream_of_small_ones() -> None:
    engine = Engine(num_blocks=10, depth=2, max_num_seqs=4)
    for i in range(4):
        engine.add(f"s{i}", 6, max_tokens=6)
    engine.step()
    engine.add("large", 30, max_tokens=8)
    for i in range(4, 300):
        engine.add(f"s{i}", 6, max_tokens=6)
        engine.step()
        if engine.reasons("large"):
            break
    assert engine.reasons("large") == {0: "length"}
    assert len(engine.plans) < 100


def test_nobody_overtakes_a_preempted_one() -> None:
    engine = Engine(num_blocks=10)
    engine.add("small", 5, max_tokens=30)
    engine.add("large", 17, max_tokens=20)
    run_until_preempted(engine)
    engine.add("tiny", 1, max_tokens=1)
    engine.run()
    again = [plan.step for plan in engine.plans for row in plan.added if row.request_id == "small"][1]
    assert engine.first_step("tiny") >= again


def test_priority_orders_the_queue_and_arrival_decides_between_equals() -> None:
    engine = Engine(max_num_seqs=1, policy="priority")
    engine.add("running", 3, priority=9, max_tokens=3)
    engine.step()
    for name, priority in (("c", 2), ("d", 2), ("a", 0), ("b", 1)):
        engine.add(name, 3, priority=priority, max_tokens=1)
    engine.run()
    order = sorted("abcd", key=engine.first_step)
    assert order == ["a", "b", "c", "d"]
    assert engine.placements("running") == 1  # waiting ones do not push running ones out


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_request_of_the_size_of_the_pool_runs_alone(depth: int) -> None:
    engine = Engine(num_blocks=10, depth=depth)
    engine.add("other", 10, max_tokens=20)
    engine.add("whole", 30, n=2, max_tokens=None)
    engine.run()
    for index in range(2):
        assert engine.tokens("whole", index) == expected(engine, "whole", index)
    assert len(engine.tokens("whole")) == 10
    assert engine.pool.num_free == 10


def test_waste_is_less_than_a_block_a_sequence() -> None:
    engine = Engine(num_blocks=40, block_size=4)
    rng = random.Random(3)
    for i in range(20):
        engine.add(f"r{i}", rng.randint(1, 12), max_tokens=rng.randint(1, 12))
    while not engine.core.idle:
        engine.step()
        stats = engine.core.stats()
        used = stats.blocks_total - stats.blocks_free
        assert round(stats.kv_waste * used * 4) <= 3 * stats.num_running
