"""The layout planner: options by their numbers, triggers, gate, the state machine, and properties over any history."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvern_operator.autoscale import cycle
from kvern_operator.autoscale.layout import (
    BAN_SECONDS,
    CHANGE_WINDOW,
    MOST_CHANGES,
    Look,
    Sizes,
    State,
    plan,
    speedup,
)
from kvern_operator.autoscale.shape import feasible_sizes, kv_tokens
from kvern_operator.autoscale.terms import Limits, Line, Load, Memory, Replica, Step, Traffic, View

AUTO = Sizes("Auto", 1, 8)
LIMITS = Limits(minimum=1, maximum=2, gpus=8)
TRAFFIC = Traffic(2000.0, 400.0, rate=1.0, prefill_seconds=0.2)
# 70B in bfloat16 on a replica of eight H200s, as the design has it: tokens of the whole replica
KV = ((2, 1_490_000), (4, 2_370_000), (8, 2_810_000))


def seen(now: float, used: float = 0.5, waiting: float = 0.0, size: int = 2, n: int = 2, **more: object) -> View:
    kv = float(dict(KV)[size])
    load = Load(kv, used * kv, waiting, 40.0)
    step = Step(1024, 8192, 8 // size)
    replicas = tuple(Replica(f"r{i}", True, 1e4, load=load) for i in range(n))
    return View(now, n, replicas, **{"traffic": TRAFFIC, "step": step, **more})  # type: ignore[arg-type]


def look(now: float, size: int | None = 2, **more: object) -> Look:
    return Look(now, size, 8, KV, **more)  # type: ignore[arg-type]


FULL = {"used": 0.97, "waiting": 100.0}


def crowded(state: State, now: float, sizes: Sizes = AUTO, limits: Limits = LIMITS, **more: object):
    return plan(sizes, limits, seen(now, **FULL), look(now, preempted=0.05, **more), state)


def after(seconds: float, sizes: Sizes = AUTO, state: State | None = None, limits: Limits = LIMITS):
    state, now = state or State(2), 0.0
    while True:
        made, state = crowded(state, now, sizes, limits)
        if made.changed or now >= seconds:
            return made, state, now
        now += 5.0


# ---------------------------------------------------------------- arithmetic


def test_capacity_before_any_pod_has_run():
    kappa, weights, memory = 2 * 80 * 8 * 128 * 2, 141e9, 0.92 * 141e9 - 2e9
    assert [kv_tokens(t, memory, weights, kappa, 8) * (8 // t) for t in (1, 2, 4, 8)] == [
        0,
        pytest.approx(1.37e6, rel=0.05),
        pytest.approx(2.25e6, rel=0.05),
        pytest.approx(2.67e6, rel=0.05),
    ]
    assert feasible_sizes(8, 1, heads=64, kv_heads=8, low=1, high=8) == [1, 2, 4, 8]
    assert feasible_sizes(6, 1, heads=64, kv_heads=8, low=1, high=8) == [1, 2]
    assert feasible_sizes(8, 2, heads=64, kv_heads=8, low=2, high=8) == [2, 4]
    assert (speedup(2), speedup(1)) == (pytest.approx(1.74), 1.0)


def test_what_a_replica_serves_bounds_every_size():
    """Prompts fill devices long before their memory: 9 requests/s over 5 a replica, whatever KV cache is left."""
    view = seen(0.0, 0.3, size=8, traffic=replace(TRAFFIC, rate=9.0))
    made, _ = plan(AUTO, LIMITS, view, look(0.0, 8), State(8), (), 5.0)
    assert [(o.size, o.replicas) for o in made.options] == [(2, 2.0), (4, 2.0), (8, 3.0)]
    assert made.options[-1].why_not == "needs 3 replicas, 2 are allowed"


# ---------------------------------------------------------------- triggers and gate


def test_more_than_the_allowed_replicas_can_carry_raises_the_size():
    """No request is preempted, and the present size would need three replicas where two are allowed."""
    state, now = State(2), 0.0
    while state.size == 2 and now < 900.0:
        made, state = plan(AUTO, LIMITS, seen(now, **FULL), look(now), state)
        now += 5.0
    assert (now - 5.0, state.size, made.changed) == (AUTO.raise_after, 4, True)
    assert made.reason == "size 2 needs 3 replicas, 2 are allowed: size 4 needs 2 replicas"
    assert not plan(AUTO, LIMITS, seen(900.0, **FULL), look(900.0), State(2), (), 0.1)[0].changed  # no size would do


def test_more_than_the_allowed_replicas_can_carry_lowers_the_size():
    state, now, busy = State(8), 0.0, replace(TRAFFIC, rate=9.0)
    while state.size == 8 and now < 1800.0:
        made, state = plan(AUTO, LIMITS, seen(now, size=8, traffic=busy), look(now, 8), state, (), 5.0)
        now += 5.0
    assert (now - 5.0, made.changed, state.size in (2, 4)) == (AUTO.lower_after, True, True)
    assert made.reason.startswith("size 8 needs 3 replicas, 2 are allowed: ")


def test_preemptions_at_the_budget_raise_the_size_after_five_minutes():
    made, state, now = after(900.0)
    assert (made.changed, made.target, now) == (True, 4, 300.0)
    assert (state.phase, state.before, state.size) == ("Changing", 2, 4)
    assert made.reason == (
        "5.0% of requests are preempted at a KV usage of 0.97, and no replica can be added: size 4 needs 2 replicas"
    )
    assert {o.size: o.why_not for o in made.options} == {2: "needs 3 replicas, 2 are allowed", 4: "", 8: ""}


def test_a_reason_that_goes_away_starts_the_clock_anew():
    state = State(2)
    for now in range(0, 290, 5):
        _, state = crowded(state, float(now))
    _, state = plan(AUTO, LIMITS, seen(290.0), look(290.0), state)
    assert state.raise_since is None
    made, state = crowded(state, 295.0)
    assert (made.changed, state.raise_since) == (False, 295.0)


def test_replicas_that_can_still_be_added_come_first():
    made, _, _ = after(900.0, limits=replace(LIMITS, maximum=5))
    assert (made.changed, made.reason) == (False, "nothing calls for another size")


def test_recommend_says_it_and_changes_nothing():
    made, state, _ = after(900.0, replace(AUTO, mode="Recommend"))
    assert (made.changed, made.target, made.recommended, state.size) == (False, 2, 4, 2)
    assert made.reason.endswith("size 4 needs 2 replicas (mode Recommend)")


def test_fixed_never_looks():
    made, state, _ = after(900.0, replace(AUTO, mode="Fixed"))
    assert (made.target, made.reason) == (2, "parallelism.tensor.mode is Fixed")
    assert state == State(2)


def test_a_request_too_long_for_an_engine_and_a_slow_single_one_raise_it():
    long = replace(TRAFFIC, longest=400_000.0)
    state = State(2)
    for now in (0.0, 300.0):
        made, state = plan(AUTO, LIMITS, seen(now, traffic=long), look(now), state)
    # an engine of size 2 has 372,500 tokens
    assert made.target == 4
    assert "an engine's 372,500 tokens are too few for requests of 400,000" in made.reason
    limits, slow = replace(LIMITS, itl_slo=0.020), replace(TRAFFIC, itl=0.030)
    state = State(2)
    for now in (0.0, 300.0):
        view = seen(now, used=0.1, traffic=slow, line=Line(0.027, 0.0001))
        view = replace(view, replicas=tuple(replace(r, load=replace(r.load, running=8.0)) for r in view.replicas))
        made, state = plan(AUTO, limits, view, look(now), state)
    assert made.target == 8  # one replica would do at size 4 as well: the most slack is taken
    assert made.reason.startswith("ITL 30 ms is over 20 ms at 2 running")


def test_a_queue_beside_free_memory_lowers_it_only_where_that_pays():
    line = Line(0.010, 0.0001)
    limits = replace(LIMITS, itl_slo=0.100, maximum=8)

    def made_at(rate: float):
        state, traffic = State(8), replace(TRAFFIC, rate=rate)
        for now in (0.0, 900.0):
            view = seen(now, used=0.1, waiting=9.0, size=8, line=line, traffic=traffic)
            made, state = plan(AUTO, limits, view, look(now, 8), state)
        return made

    pays = made_at(110.0)
    assert (pays.changed, pays.target) == (True, 4)
    assert pays.reason.startswith("9 requests wait a replica at a KV usage of 0.10: size 4 needs")
    useless = made_at(1.0)
    assert not useless.changed
    assert "size 4 would save 0 GPU-seconds in 30 min and cost 960" in useless.reason


def test_without_metrics_the_layout_stays_and_its_clocks_stop():
    _, state = crowded(State(2), 0.0)
    assert state.raise_since == 0.0
    blind = seen(5.0)
    blind = replace(blind, replicas=tuple(replace(r, load=None) for r in blind.replicas))
    made, state = plan(AUTO, LIMITS, blind, look(5.0, preempted=0.05), state)
    assert (made.reason, state.raise_since) == ("replicas, or their metrics, are missing: the layout stays", None)


# ---------------------------------------------------------------- a change


def verifying(attainment: float = 0.95) -> State:
    state = State(4, phase="Changing", before=2, since=0.0, attainment=attainment, changes=(0.0,))
    _, state = plan(AUTO, LIMITS, seen(30.0), look(30.0, None), state)
    assert state.phase == "Changing"
    _, state = plan(AUTO, LIMITS, seen(60.0, size=4), look(60.0, 4), state)
    assert state.phase == "Verifying"
    return state


def watched(state: State, seconds: float, attainment: float | None, limits: Limits = LIMITS):
    made, now = None, state.looked_at
    end = now + seconds
    while now < end and state.phase == "Verifying":
        now += 5.0
        made, state = plan(AUTO, limits, seen(now, size=4), look(now, 4, attainment=attainment), state)
    return made, state


def test_a_change_is_watched_and_proven():
    _, state = watched(verifying(), 595.0, 0.94)
    assert state.phase == "Verifying"
    made, state = watched(state, 10.0, 0.94)
    assert (state.phase, state.proven, state.bans) == ("Stable", (2, 4), ())
    assert made.reason == "size 4 has proven itself"


def test_a_change_that_hurts_is_taken_back_and_banned():
    made, state = watched(verifying(), 600.0, 0.80)
    assert (made.changed, made.target, state.phase, state.returning) == (True, 2, "Changing", True)
    assert made.reason == (
        "SLO attainment fell from 95.0% to 80.0% at size 4: back to 2, and not again within six hours"
    )
    now = state.since
    _, state = plan(AUTO, LIMITS, seen(now + 30), look(now + 30, 2), state)
    assert (state.phase, state.size) == ("Stable", 2)
    later = now + CHANGE_WINDOW + 10
    for moment in (later, later + 300):
        made, state = crowded(state, moment)
    assert (made.target, made.changed) == (8, True)
    assert next(o for o in made.options if o.size == 4).why_not.startswith("was tried, made latency worse")
    _, state = crowded(replace(state, phase="Stable", size=2), now + BAN_SECONDS + 10)
    assert state.bans == ()


def test_nothing_is_proven_while_nobody_sees():
    _, state = watched(verifying(), 3600.0, None, replace(LIMITS, itl_slo=0.05))
    assert (state.phase, state.watched) == ("Verifying", 0.0)


def test_without_an_slo_only_the_time_counts():
    """Nothing can be compared: a watch that never ended would keep every replica, and every size, for ever."""
    assert LIMITS.itl_slo is None and LIMITS.ttft_slo is None
    _, state = watched(verifying(), 595.0, None)
    assert state.phase == "Verifying"
    _, state = watched(state, 10.0, None)
    assert (state.phase, state.proven) == ("Stable", (2, 4))


def test_a_clock_that_is_put_back_takes_nothing_from_what_was_watched():
    state = replace(verifying(), watched=300.0, looked_at=5000.0)
    _, state = plan(AUTO, LIMITS, seen(1400.0, size=4), look(1400.0, 4, attainment=1.0), state)
    assert state.watched == 300.0


def test_while_nothing_comes_by_which_a_change_could_be_judged_replicas_go():
    """A change in the evening, and no request in the night: not every replica stays until the morning."""
    state, memory, now, targets = verifying(), Memory.new(0.0), 60.0, []
    limits = replace(LIMITS, maximum=3, itl_slo=0.05)
    while now < 3000.0:
        now += 5.0
        n = targets[-1] if targets else 3
        both = cycle.decide(limits, seen(now, 0.01, size=4, n=n), memory, AUTO, look(now, 4), state)
        memory, state = both.memory, both.state
        targets.append(both.replicas.target)
    assert state.phase == "Verifying"
    assert targets[: int(2 * AUTO.verify / 5) - 1] == [3] * (int(2 * AUTO.verify / 5) - 1) and targets[-1] == 1


# ---------------------------------------------------------------- bounds that are moved


def moved(state: State, low: int, high: int, now: float = 0.0, size: int | None = None, **more: object):
    sizes = Sizes("Auto", low, high)
    return plan(sizes, LIMITS, seen(now, size=size or state.size), look(now, size or state.size, **more), state)


def test_a_size_that_is_not_allowed_any_more_is_left_at_once():
    made, state = moved(State(8, changes=(-60.0,)), 1, 4)
    assert (made.changed, made.target, state.phase) == (True, 4, "Changing")
    assert made.reason == "size 8 is outside of 1..4: size 4 needs 2 replicas"
    _, state = moved(state, 1, 4, 30.0)
    assert (state.phase, state.before) == ("Stable", None)  # no way back out of the bounds, and nothing to watch
    assert not moved(state, 1, 4, 60.0)[0].changed
    said, same = plan(Sizes("Recommend", 1, 4), LIMITS, seen(0.0, size=8), look(0.0, 8), State(8))
    assert (said.changed, said.recommended, same.size) == (False, 4, 8) and said.reason.endswith("(mode Recommend)")


def test_bounds_that_are_moved_in_mid_change():
    bad = replace(verifying(), looked_at=60.0, dip_since=0.0, attainment=0.95)
    made, state = moved(bad, 4, 8, 65.0, attainment=0.5)
    assert (made.changed, state.size, state.phase) == (False, 4, "Verifying")  # 2 is not to be had any more
    changing = State(4, "Changing", before=2, changes=(0.0,))
    made, state = moved(changing, 1, 2, 30.0)
    made, state = moved(replace(state, phase="Stable"), 1, 2, 60.0)
    assert (made.changed, state.size) == (True, 2)


def test_what_was_tried_in_vain_within_the_bounds_is_not_tried_on_and_on():
    state, now, tried = State(8), 0.0, []
    while now < 7200.0:
        made, state = moved(state, 2, 4, now, size=8, failed="too little memory" if state.phase != "Stable" else "")
        tried += [made.target] if made.changed else []
        now += 5.0
    assert tried == [4, 8]
    assert state.size == 8


def test_dwell_and_the_limit_of_changes():
    recent = State(2, changes=(-600.0,), proven=(4,))
    made, _, _ = after(300.0, state=recent)
    assert not made.changed
    assert made.reason.endswith("the last change is 900 s ago (dwellSeconds is 1800)")
    made, _, _ = after(300.0, state=State(2, changes=(-1900.0,)))
    assert made.reason.endswith("1 change has been made within two hours")
    made, _, _ = after(300.0, state=State(2, changes=(-1900.0,), proven=(4,)))
    assert made.changed


def test_both_are_decided_together():
    """The change brings its replicas; while it is on its way or watched, nobody is removed."""
    limits = replace(LIMITS, maximum=3)
    state, memory, now = State(2), Memory.new(0.0), 0.0
    while state.phase == "Stable":
        view = seen(now, **FULL, n=3)
        both = cycle.decide(limits, view, memory, AUTO, look(now, preempted=0.05), state)
        memory, state, now = both.memory, both.state, now + 5.0
        assert now < 400.0
    assert (both.layout.changed, both.replicas.target) == (True, 3)
    for _ in range(200):
        now += 5.0
        both = cycle.decide(
            limits, replace(seen(now, used=0.01, n=3, size=4), current=3), memory, AUTO, look(now, None), state
        )
        memory, state = both.memory, both.state
        assert both.replicas.target == 3
    assert both.replicas.limited_by == "layoutChange"


# ---------------------------------------------------------------- properties


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 1),  # KV usage
            st.floats(0, 50),  # waiting
            st.floats(0, 0.2),  # preempted
            st.none() | st.floats(0, 1),  # attainment
            st.booleans(),  # metrics are there
            st.integers(1, 600),  # looks of 60 s... like this
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 4),
    st.integers(4, 8),
)
def test_any_history_keeps_to_the_sizes_and_to_two_changes_in_two_hours(history, low, high):
    sizes = Sizes("Auto", low, high)
    state, now, changes = State(4), 0.0, []
    for used, waiting, preempted, attainment, known, length in history:
        for _ in range(min(length, 40)):
            now += 60.0 if state.phase != "Verifying" else 10.0
            view = seen(now, used, waiting, size=state.size)
            if not known:
                view = replace(view, replicas=tuple(replace(r, load=None) for r in view.replicas))
            looked = look(now, state.size, preempted=preempted, attainment=attainment if known else None)
            before = state
            made, state = plan(sizes, LIMITS, view, looked, state)
            assert plan(sizes, LIMITS, view, looked, before) == (made, state)
            assert made.target in dict(KV)
            assert low <= made.target <= high
            assert made.changed == (made.target != before.size)
            if made.changed:
                assert known
                changes.append(now)
                assert sum(now - t < CHANGE_WINDOW for t in changes) <= MOST_CHANGES
            assert (8 // made.target) * made.target == 8


def test_a_change_that_fails_on_a_replica_is_taken_back_and_banned():
    changing = State(4, "Changing", before=2, since=0.0, changes=(0.0,))
    view = seen(30.0)
    made, state = plan(AUTO, LIMITS, view, look(30.0, size=None), changing)
    assert not made.changed and state == changing  # nothing has failed yet
    made, back = plan(AUTO, LIMITS, view, look(30.0, size=None, failed="a worker has too little memory"), changing)
    assert made.changed and made.target == 2 and "a worker has too little memory" in made.reason
    assert (back.phase, back.size, back.returning, back.changes) == ("Changing", 2, True, (0.0, 30.0))
    assert back.bans == ((4, 30.0 + BAN_SECONDS),)
    # What fails on the way back is tried on: nothing else is known to work.
    made, again = plan(AUTO, LIMITS, view, look(40.0, size=None, failed="no answer"), back)
    assert not made.changed and again == back
    _, done = plan(AUTO, LIMITS, view, look(50.0, size=2), back)
    assert (done.phase, done.size) == ("Stable", 2)
