"""The scheduler's plans, value by value: batching, chunks, stops, prefixes, forks, aborts, statistics."""

from typing import Any

import pytest
from core_harness import Engine, expected

from kvern_engine.core.limits import SchedulerConfig
from kvern_engine.core.plan import StepPlan, StepResult
from kvern_engine.core.sequence import choice_seed
from kvern_engine.ipc import AddRequest
from kvern_engine.request import SamplingParams

# -- plans -------------------------------------------------------------------------------------------------------------


def test_prompt_then_decode() -> None:
    engine = Engine()
    message = engine.add("a", 6, max_tokens=4, seed=5, temperature=0.5, top_k=-1)
    plan = engine.step()
    (added,) = plan.added
    assert (added.row, added.request_id, added.token_ids, added.num_prompt_tokens) == (
        0,
        "a",
        message.prompt_token_ids,
        6,
    )
    assert added.blocks == [0, 1]
    assert (added.sampling.seed, added.sampling.temperature, added.sampling.top_k) == (5, 0.5, 0)
    assert (plan.step, plan.rows, plan.starts, plan.counts, plan.samples) == (0, [0], [0], [6], [True])
    plan = engine.step()
    assert (plan.step, plan.added, plan.rows, plan.starts, plan.counts) == (1, [], [0], [6], [1])
    engine.step()
    plan = engine.step()  # position 8 opens the third block
    assert plan.block_edits == [(0, 2, [2])]
    assert engine.core.idle
    assert engine.tokens("a") == expected(engine, "a")
    assert engine.reasons("a") == {0: "length"}


def test_a_row_is_removed_in_the_plan_after_its_end_and_reused() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add("a", 3, max_tokens=1)
    engine.add("b", 3, max_tokens=1)
    engine.step()
    plan = engine.step()
    assert plan.removed == [0]
    assert [row.request_id for row in plan.added] == ["b"] and plan.added[0].row == 0


def test_decodes_come_first_and_prompts_share_the_rest_of_the_budget() -> None:
    engine = Engine(max_num_batched_tokens=16, long_prefill_token_threshold=16)
    engine.add("a", 4, max_tokens=8)
    engine.step()
    engine.add("b", 10, max_tokens=8)
    engine.add("c", 10, max_tokens=8)
    plan = engine.step()
    assert (plan.rows, plan.counts, plan.samples) == ([0, 1, 2], [1, 10, 5], [True, True, False])
    plan = engine.step()
    assert (plan.rows, plan.starts, plan.counts, plan.samples) == (
        [0, 1, 2],
        [5, 10, 5],
        [1, 1, 5],
        [True, True, True],
    )


def test_threshold_caps_a_request_only_while_others_decode() -> None:
    engine = Engine(max_num_batched_tokens=32, long_prefill_token_threshold=3)
    engine.add("long", 40, max_tokens=2)
    assert engine.step().counts == [32]  # nobody decodes
    engine = Engine(max_num_batched_tokens=32, long_prefill_token_threshold=3)
    engine.add("a", 4, max_tokens=30)
    engine.step()
    engine.add("long", 40, max_tokens=2)
    assert engine.step().counts == [1, 3]


def test_governor_caps_the_step() -> None:
    engine = Engine(max_num_batched_tokens=64, itl_factor=2.0)
    engine.worker.seconds = 0.01
    engine.add("a", 4, max_tokens=50)
    engine.step(4)
    engine.scheduler.governor.observe(1, 10, 0.01 + 10 * 0.0005)  # 10 ms / 0.5 ms = 20 tokens
    engine.add("long", 100, max_tokens=2)
    assert engine.step().counts == [1, 16]


def test_a_short_prompt_gets_through_beside_a_long_one() -> None:
    engine = Engine(num_blocks=400, max_num_batched_tokens=32, max_model_len=1000)
    engine.add("long", 900, max_tokens=1)
    engine.step()
    engine.add("short", 20, max_tokens=1)
    engine.step(2)
    assert engine.reasons("short") == {0: "length"}
    assert engine.plans[1].counts == [16, 16]  # half each
    assert engine.plans[2].counts == [28, 4]  # what the short one does not need goes back
    engine.run()
    assert engine.reasons("long") == {0: "length"}


@pytest.mark.parametrize(("third", "counts"), [(70, [60, 60]), (30, [60, 60, 8])])
def test_no_prompt_begins_in_a_sliver_of_a_full_step(third: int, counts: list[int]) -> None:
    engine = Engine(num_blocks=400, max_num_batched_tokens=128)
    engine.add("a", 60, max_tokens=1)
    engine.add("b", 60, max_tokens=1)
    engine.add("c", third, max_tokens=1)
    assert engine.step().counts == counts  # 8 tokens are left: a ninth of the long one, a quarter of the other
    assert engine.step().counts == [third - sum(counts[2:])]
    engine.run()
    assert engine.reasons("c") == {0: "length"}


def test_a_crowd_at_the_door_may_take_longer_steps() -> None:
    engine = Engine(num_blocks=4000, max_num_seqs=64, max_num_batched_tokens=1024, itl_factor=2.0)
    engine.worker.seconds = 0.01
    engine.add("a", 4, max_tokens=50)
    engine.step(4)
    engine.scheduler.governor.observe(1, 10, 0.01 + 10 * 0.0005)  # 10 ms / 0.5 ms = 20 tokens
    for i in range(63):
        engine.add(f"other-{i}", 20, max_tokens=2)
    # 63 - 8 of 64 rows lie idle: 2 x (1 + 3 x 55 / 64) - 1 = 6.2 decode steps = 123 tokens
    assert sum(engine.step().counts[1:]) == 112


def engine_with_credit(num_blocks: int = 2000, **config: Any) -> Engine:
    """One stream decodes, in 5 ms; a prompt token beside it costs 50 us: usual chunks of 64, long steps up to 900."""
    engine = Engine(num_blocks, max_num_batched_tokens=2048, max_model_len=2000, itl_factor=1.8, **config)
    submit = engine.worker.submit

    def timed(plan: StepPlan) -> None:
        engine.worker.seconds = 0.005 + 0.00005 * sum(count for count in plan.counts if count > 1)
        submit(plan)

    engine.worker.submit = timed  # type: ignore[method-assign]
    engine.add("a", 4, max_tokens=1500)
    engine.step(4)
    engine.scheduler.governor.observe(1, 80, 0.005 + 80 * 0.00005)
    return engine


def test_long_prompts_are_computed_in_one_step_three_times_and_then_once_in_200() -> None:
    engine = engine_with_credit()
    for name, steps in (("first", 1), ("second", 1), ("third", 20), ("fourth", 180), ("fifth", 1)):
        engine.add(name, 600, max_tokens=1)
        engine.step(steps)
    chunks = [plan.counts[1] for plan in engine.plans if len(plan.counts) > 1]
    assert chunks[:3] == [600] * 3 and chunks[-1] == 600
    assert sum(chunks[3:-1]) == 600 and max(chunks[3:-1]) <= 80  # 0.8 x 5 ms / 50 us


def test_what_waits_is_computed_in_the_long_step_too() -> None:
    engine = engine_with_credit()
    engine.add("long", 600, max_tokens=1)
    engine.add("short", 50, max_tokens=1)
    assert engine.step().counts == [1, 600, 50]


def test_a_long_prompt_that_is_cached_is_no_reason_for_a_long_step() -> None:
    engine = engine_with_credit()
    prompt = list(range(5000, 5600))
    engine.add("first", prompt, max_tokens=1)
    assert engine.step().counts == [1, 600]
    engine.step(300)
    assert engine.scheduler.governor.has_credit
    engine.add("again", [*prompt, 1, 2], max_tokens=1)
    for name in "bcd":
        engine.add(name, 50, max_tokens=1)
    assert sum(engine.step().counts[1:]) == 64
    assert engine.scheduler.governor.has_credit


def test_a_long_prompt_that_finds_no_room_gives_its_step_to_nobody() -> None:
    """What comes before it is not long: it would spend the credit."""
    engine = engine_with_credit(num_blocks=90)
    engine.add("short", 180, max_tokens=1)
    engine.add("long", 330, max_tokens=1)
    assert engine.step().counts == [1, 64]
    assert engine.scheduler.governor.has_credit


def test_prompts_are_not_looked_at_where_no_long_step_can_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashing those of eight waiting prompts at once is a pause of its own."""
    engine = engine_with_credit()
    for name in "bcd":
        engine.add(name, 600, max_tokens=1)
        assert engine.step().counts == [1, 600]
    looked = []
    monkeypatch.setattr("kvern_engine.core.scheduler.wanted_tokens", lambda *given: looked.append(given) or [])
    engine.add("e", 600, max_tokens=1)
    engine.step(5)
    assert not looked


def test_in_a_pipeline_a_long_step_takes_as_many_more() -> None:
    governor = Engine(pipeline=2, max_num_batched_tokens=2048, itl_factor=1.8).scheduler.governor
    governor.observe(1, 0, 0.005)
    governor.observe(1, 50, 0.010)
    for _ in range(3):
        assert governor.cap(1, wanted=[400]) == 400
        governor.planned(1, 400)
    for _ in range(396):  # each of those three steps earned one, too
        governor.planned(1, 0)
    assert not governor.has_credit
    governor.planned(1, 0)
    assert governor.has_credit


def test_a_crowd_needs_no_credit() -> None:
    engine = engine_with_credit(max_num_seqs=64)
    engine.add("long", 780, max_tokens=2)
    for i in range(20):
        engine.add(f"other-{i}", 5, max_tokens=2)
    # 21 - 8 of 64 rows lie idle: 1.8 x (1 + 3 x 13 / 64) - 1 = 1.9 decode steps = 190 tokens
    assert sum(engine.step().counts[1:]) == 176
    assert engine.scheduler.governor.has_credit


def test_a_second_long_prompt_waits_until_the_first_is_through() -> None:
    engine = Engine(num_blocks=400, max_num_batched_tokens=32, max_model_len=1000)
    engine.add("first", 640, max_tokens=1)
    engine.add("second", 640, max_tokens=1)
    engine.run()
    assert engine.first_step("second") == 20  # 20 full steps: in halves both would be late


def test_without_chunks_a_prompt_waits_for_a_step_of_its_own() -> None:
    engine = Engine(max_num_batched_tokens=64, max_model_len=64, enable_chunked_prefill=False)
    engine.add("a", 40, max_tokens=3)
    engine.add("b", 40, max_tokens=3)
    assert engine.step().counts == [40]
    assert engine.step().counts == [1, 40]


def test_max_num_seqs_bounds_the_rows() -> None:
    engine = Engine(max_num_seqs=2)
    for name in "abc":
        engine.add(name, 3, max_tokens=5)
    engine.run()
    assert max(len(plan.rows) for plan in engine.plans) == 2
    assert engine.first_step("c") == 5


# -- ends --------------------------------------------------------------------------------------------------------------


def find_stop(engine: Engine, name: str, position: int) -> int:
    """The token that the request samples at `position`, if it does not stop there."""
    return expected(engine, name)[position]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_eos_ends_a_choice_and_its_overrun_is_dropped(depth: int) -> None:
    probe = Engine()
    probe.add("a", 6, max_tokens=9, seed=1)
    eos = find_stop(probe, "a", 3)
    engine = Engine(eos=(eos,), depth=depth)
    engine.add("a", 6, max_tokens=9, seed=1)
    engine.run()
    assert engine.tokens("a") == expected(probe, "a")[:4]
    last = engine.outputs["a"][-1]
    assert (last.token_ids, last.finish_reason, last.stop_reason) == ([eos], "stop", None)
    assert len(engine.plans) == 4 + (depth - 1)
    assert engine.pool.num_free == engine.pool.num_blocks


def test_a_request_may_bring_further_eos_ids() -> None:
    probe = Engine()
    probe.add("a", 6, max_tokens=9, seed=1)
    eos = find_stop(probe, "a", 3)
    engine = Engine(eos=(10**6,))
    prompt = probe.messages["a"].prompt_token_ids
    for name, ignore in (("a", False), ("b", True)):
        params = SamplingParams(max_tokens=9, seed=1, ignore_eos=ignore)
        engine.core.add_request(AddRequest(name, 0, prompt, params, 0.0, eos_token_ids=(eos,)))
    engine.run()
    last = engine.outputs["a"][-1]
    assert (last.token_ids, last.finish_reason, last.stop_reason) == ([eos], "stop", None)
    assert engine.outputs["b"][-1].finish_reason == "length"


def test_stop_token_names_itself_and_ignore_eos_goes_on() -> None:
    probe = Engine()
    probe.add("a", 6, max_tokens=9, seed=1)
    token = find_stop(probe, "a", 2)
    engine = Engine(eos=(token,))
    engine.add("a", 6, max_tokens=9, seed=1, ignore_eos=True)
    engine.add("b", probe.messages["a"].prompt_token_ids, max_tokens=9, seed=1, ignore_eos=True, stop_token_ids=[token])
    engine.add("c", probe.messages["a"].prompt_token_ids, max_tokens=9, seed=1, stop_token_ids=[token])
    engine.run()
    assert engine.reasons("a") == {0: "length"} and len(engine.tokens("a")) == 9
    assert engine.reasons("b") == {0: "stop"} and engine.outputs["b"][-1].stop_reason == token
    assert engine.reasons("c") == {0: "stop"} and engine.outputs["c"][-1].stop_reason is None


def test_min_tokens_suppresses_every_end() -> None:
    engine = Engine(eos=(1,), vocab=4)
    engine.add("a", 6, max_tokens=30, min_tokens=7, stop_token_ids=[2], seed=3)
    (added,) = engine.step().added
    assert (added.sampling.min_tokens, added.sampling.suppress) == (7, [1, 2])
    engine.run()
    assert len(engine.tokens("a")) >= 8
    assert not {1, 2} & set(engine.tokens("a")[:7])
    engine.add("b", 6, max_tokens=3)
    assert engine.step().added[0].sampling.suppress == []


def test_an_end_before_min_tokens_does_not_end() -> None:
    engine = Engine(eos=(1,))
    engine.add("a", 6, max_tokens=9, min_tokens=2)
    engine.scheduler.schedule()
    assert engine.scheduler.update(StepResult(0, [0], [[1]], 0.1))[0][0].finish_reason is None
    engine.scheduler.schedule()
    assert engine.scheduler.update(StepResult(1, [0], [[1]], 0.1))[0][0].finish_reason == "stop"


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("max_tokens", [None, 100])
def test_max_model_len_ends_with_length_and_nothing_is_scheduled_past_it(depth: int, max_tokens: int | None) -> None:
    engine = Engine(max_model_len=20, depth=depth)
    engine.add("a", 6, max_tokens=max_tokens)
    engine.run()
    assert engine.reasons("a") == {0: "length"}
    assert len(engine.tokens("a")) == 14
    assert max(plan.starts[0] + plan.counts[0] for plan in engine.plans) == 19
    assert len(engine.plans) == 14


def test_too_long_and_empty_prompts_are_refused_at_once() -> None:
    engine = Engine(num_blocks=10, block_size=4, max_model_len=100)
    engine.add("big", 40, max_tokens=1, n=2)
    engine.add("empty", [], max_tokens=1)
    engine.add("fits", 39, max_tokens=None)
    assert not engine.core.idle
    engine.run()
    assert engine.reasons("big") == {0: "error", 1: "error"}
    assert engine.outputs["big"][0].error == (
        "the prompt has 40 tokens and needs room for one more, but a request may have at most 40 (max_model_len 100, "
        "KV cache 10 blocks of 4 tokens): shorten the prompt to 39 tokens"
    )
    assert engine.outputs["empty"][0].error == "the prompt has no tokens; give at least one"
    assert engine.reasons("fits") == {0: "length"}


def test_an_id_in_use_is_an_error_of_the_caller() -> None:
    engine = Engine()
    engine.add("a", 3)
    with pytest.raises(ValueError, match="request_id must be unique, 'a' is running already"):
        engine.add("a", 3)


# -- prefixes ----------------------------------------------------------------------------------------------------------


def test_a_second_request_computes_only_what_is_new() -> None:
    engine = Engine()
    engine.add("a", list(range(10)), max_tokens=1)
    engine.run()
    engine.add("b", [*range(10), 77], max_tokens=1)
    plan = engine.step()
    assert (plan.starts, plan.counts) == ([8], [3])
    assert plan.added[0].blocks[:2] == [0, 1]
    assert engine.outputs["a"][0].num_cached_tokens == 0
    assert engine.outputs["b"][0].num_cached_tokens == 8
    stats = engine.core.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (21, 8)


def test_the_last_prompt_token_is_always_computed() -> None:
    engine = Engine()
    for name in "ab":
        engine.add(name, list(range(8)), max_tokens=1, seed=1)
        engine.run()
    assert (engine.plans[1].starts, engine.plans[1].counts) == ([4], [4])
    assert engine.tokens("a") == engine.tokens("b")


def test_generated_blocks_are_found_as_well() -> None:
    engine = Engine()
    engine.add("a", 6, max_tokens=7)
    engine.run()
    chat = engine.messages["a"].prompt_token_ids + engine.tokens("a")  # 13 tokens, 12 of them computed
    engine.add("b", [*chat, 5], max_tokens=1)
    assert engine.step().starts == [12]


def test_salt_isolates_tenants() -> None:
    engine = Engine()
    for name, salt in (("a", "one"), ("b", "two"), ("c", "one")):
        engine.add(name, list(range(9)), salt=salt, max_tokens=1)
        engine.run()
    assert [plan.starts for plan in engine.plans] == [[0], [0], [8]]


def test_a_shared_prefix_is_computed_once_even_where_all_arrive_together() -> None:
    engine = Engine(num_blocks=256, max_num_batched_tokens=128)
    prefix = list(range(40))
    for i in range(8):
        engine.add(f"r{i}", [*prefix, 500 + i], max_tokens=2)
    plan = engine.step()
    assert plan.counts == [41]
    plan = engine.step()
    assert plan.counts == [1] * 8 and plan.starts == [41] + [40] * 7
    engine.run()


def test_caching_off_finds_nothing_and_counts_nothing() -> None:
    engine = Engine(caching=False)
    for name in "ab":
        engine.add(name, list(range(9)), max_tokens=1)
        engine.run()
    assert engine.plans[1].starts == [0]
    assert engine.core.stats().prefix_queries == 0


def test_prompt_logprobs_skip_the_cache_and_cover_the_prompt_across_chunks() -> None:
    engine = Engine(max_num_batched_tokens=8)
    prompt = list(range(20))
    engine.add("a", prompt, max_tokens=1)
    engine.run()
    engine.add("b", prompt, max_tokens=2, prompt_logprobs=1, n=2)
    engine.run()
    first = engine.outputs["b"][0]
    assert [item.token_id for item in first.prompt_logprobs or []] == prompt[1:]
    assert first.num_cached_tokens == 0
    assert all(o.prompt_logprobs is None for o in engine.outputs["b"][1:])
    assert engine.core.stats().prefix_queries == 20


# -- forks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_choices_fork_after_the_prompt_and_copy_the_block_they_write(depth: int) -> None:
    engine = Engine(depth=depth)
    engine.add("a", 10, n=3, max_tokens=5, seed=40)
    first = engine.step()
    assert first.counts == [10] or engine.plans[0].counts == [10]
    engine.run()
    fork = engine.plans[1]
    assert [row.sampling.seed for row in engine.plans[0].added] == [40]
    assert [row.sampling.seed for row in fork.added] == [41, 42]
    assert (fork.rows, fork.starts, fork.counts) == ([0, 1, 2], [10, 9, 9], [1, 1, 1])
    parent = engine.plans[0].added[0].blocks
    assert [row.blocks[:2] for row in fork.added] == [parent[:2]] * 2
    assert fork.copies == [(parent[2], row.blocks[2]) for row in fork.added]
    assert len({parent[2], *(row.blocks[2] for row in fork.added)}) == 3
    for index in range(3):
        assert engine.tokens("a", index) == expected(engine, "a", index)
    assert engine.reasons("a") == {0: "length", 1: "length", 2: "length"}
    assert engine.pool.num_free == engine.pool.num_blocks


def test_a_fork_at_a_block_boundary_needs_no_copy() -> None:
    engine = Engine()
    engine.add("a", 9, n=2, max_tokens=3)
    engine.run()
    assert engine.plans[1].starts == [9, 8] and engine.plans[1].copies == []


def test_choices_without_a_sibling_left_compute_by_themselves() -> None:
    engine = Engine(max_num_seqs=1, caching=False)
    engine.add("a", 10, n=3, max_tokens=2)
    engine.step()
    assert engine.core.stats().num_waiting_deferred == 2
    engine.run()
    assert engine.placements("a") == 3
    for index in range(3):
        assert engine.tokens("a", index) == expected(engine, "a", index)


def test_seeds_without_a_seed_depend_on_request_and_engine_alone() -> None:
    params = SamplingParams(n=2)
    seeds = [choice_seed(params, "a", 0, 0), choice_seed(params, "b", 0, 0), choice_seed(params, "a", 1, 0)]
    assert len(set(seeds)) == 3
    assert choice_seed(params, "a", 0, 0) == seeds[0]
    assert choice_seed(params, "a", 0, 1) - seeds[0] in (1, 1 - 2**64)
    assert choice_seed(SamplingParams(seed=2**63 - 1), "a", 0, 1) == -(2**63)


# -- aborts and failures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_abort_at_any_time_ends_every_choice_once(depth: int, steps: int) -> None:
    engine = Engine(depth=depth, max_num_batched_tokens=8)
    engine.add("a", 20, n=3, max_tokens=20)
    engine.add("b", 6, max_tokens=12)
    engine.step(steps) if steps else None
    engine.core.abort(["a", "nobody"])
    engine.core.abort(["a"])
    engine.run()
    assert engine.reasons("a") == {0: "abort", 1: "abort", 2: "abort"}
    assert engine.tokens("b") == expected(engine, "b")
    assert engine.pool.num_free == engine.pool.num_blocks


def test_fail_all_gives_every_open_choice_the_reason() -> None:
    engine = Engine(depth=2)
    engine.add("a", 6, n=2, client=0)
    engine.add("b", 6, client=1)
    engine.step()
    outputs = engine.scheduler.fail_all("the worker is gone")
    assert {c: [(o.request_id, o.index) for o in items] for c, items in outputs.items()} == {
        0: [("a", 1), ("a", 0)],
        1: [("b", 0)],
    }
    assert all(o.finish_reason == "error" and o.error == "the worker is gone" for i in outputs.values() for o in i)
    assert engine.pool.num_free == engine.pool.num_blocks
    assert engine.core.idle


def test_results_must_come_in_order() -> None:
    engine = Engine()
    engine.add("a", 6)
    engine.scheduler.schedule()
    with pytest.raises(RuntimeError, match="result of step 3 where that of step 0 was due"):
        engine.scheduler.update(StepResult(3, [0], [[1]], 0.1))


def test_results_may_name_only_the_rows_that_sampled() -> None:
    engine = Engine(max_num_batched_tokens=8)
    engine.add("a", 3, max_tokens=2)
    engine.add("b", 9, max_tokens=2)
    plan = engine.scheduler.schedule()
    assert plan is not None and plan.samples == [True, False]
    outputs = engine.scheduler.update(StepResult(0, [0], [[7]], 0.1))
    assert [(o.request_id, o.token_ids) for o in outputs[0]] == [("a", [7])]


# -- what is reported --------------------------------------------------------------------------------------------------


def test_stats() -> None:
    engine = Engine(num_blocks=10, max_num_seqs=1, max_num_batched_tokens=8)
    idle = engine.core.stats()
    assert (idle.kv_cache_usage, idle.blocks_free, idle.num_running, idle.kv_waste) == (0.0, 10, 0, 0.0)
    engine.add("a", 6, max_tokens=3)
    engine.add("b", 6, n=2, max_tokens=3)
    engine.step()
    stats = engine.core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_waiting_deferred) == (1, 2, 1)
    assert (stats.kv_cache_usage, stats.blocks_total, stats.blocks_free) == (0.2, 10, 8)
    assert stats.kv_waste == 2 / 8
    assert (stats.steps, stats.step_tokens, stats.iteration_tokens) == (1, 6, [6])
    engine.run()
    done = engine.core.stats()
    assert (done.kv_cache_usage, done.num_running, done.num_waiting) == (0.0, 0, 0)
    assert done.blocks_cached > 0 and done.blocks_free == 10
    assert sum(done.iteration_tokens) == done.step_tokens - 6


def test_first_output_says_when_it_was_scheduled_and_what_was_cached() -> None:
    engine = Engine()
    engine.add("a", 6, n=2, max_tokens=3)
    engine.run()
    told = [(o.index, o.scheduled, o.num_cached_tokens) for o in engine.outputs["a"] if o.scheduled is not None]
    assert told == [(0, 1.0, 0)]


def test_logprobs_travel_with_their_tokens() -> None:
    engine = Engine(depth=2)
    engine.add("a", 6, max_tokens=5, logprobs=1)
    engine.add("b", 6, max_tokens=5)
    engine.run()
    assert [item.token_id for o in engine.outputs["a"] for item in o.logprobs or []] == engine.tokens("a")
    assert all(o.logprobs is None for o in engine.outputs["b"])


def test_config_errors_say_what_would_be_right() -> None:
    with pytest.raises(ValueError, match="max_num_seqs must be at least 1, got 0"):
        SchedulerConfig(max_num_seqs=0, max_num_batched_tokens=8, max_model_len=8)
    with pytest.raises(ValueError, match=r"max_num_batched_tokens must be at least max_num_seqs \(16\), got 8"):
        SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=8, max_model_len=8)
    with pytest.raises(ValueError, match=r"without chunked prefill .* at least max_model_len \(64\), got 8: raise it"):
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=8, max_model_len=64, enable_chunked_prefill=False)
