"""Replicas: each term by its numbers and words, then properties over any load and any history."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvern_operator.autoscale.replicas import SETTLE, decide
from kvern_operator.autoscale.terms import (
    Decision,
    Full,
    Held,
    Limits,
    Line,
    Load,
    Memory,
    Replica,
    Step,
    Traffic,
    View,
)

LIMITS = Limits(minimum=1, maximum=10, kv_target=0.8, queue_target=5, stabilization=300.0, idle=900.0)
CHAT = Traffic(input_tokens=1000.0, output_tokens=200.0)
SMALL = Step(max_num_seqs=1024)


def ready(n: int, used: float = 0.0, waiting: float = 0.0, running: float = 10.0, **more: object) -> list[Replica]:
    load = Load(100_000.0, used, waiting, running, **more)  # type: ignore[arg-type]
    return [Replica(f"r{i}", True, 1000.0, load=load) for i in range(n)]


def view(current: int, replicas: list[Replica], now: float = 10_000.0, **more: object) -> View:
    return View(now, current, tuple(replicas), **{"traffic": CHAT, "step": SMALL, **more})  # type: ignore[arg-type]


def old(now: float = 10_000.0, **more: object) -> Memory:
    """Of a process that has decided for an hour."""
    return replace(Memory.new(now - 3600.0), active_at=now, seen_at=now - 5.0, **more)  # type: ignore[arg-type]


def once(current: int, replicas: list[Replica], limits: Limits = LIMITS, memory: Memory | None = None, **more: object):
    return decide(limits, view(current, replicas, **more), memory or old())[0]


def run(limits: Limits, current: int, seconds: float, look, memory: Memory | None = None) -> list[Decision]:
    """Cycles of 5 s; `look(now, current)` is the view. The target takes effect at once."""
    now, memory, found = 10_000.0, memory or Memory.new(10_000.0), []
    end = now + seconds
    while now < end:
        decision, memory = decide(limits, look(now, current), memory)
        current, now = decision.target, now + 5.0
        found.append(decision)
    return found


# ---------------------------------------------------------------- terms


def test_demand_over_capacity_is_the_number_of_replicas():
    made = once(2, ready(2, used=79_000.0, waiting=40.0))
    # 2 x 79,000 in use + 80 x 1,000 waiting = 238,000; a replica takes 0.8 x 100,000
    assert (made.target, made.kind, made.limited_by) == (3, "up", None)
    assert made.reason == "kv: demand of 238,000 tokens / 80,000 a replica = 2.98"
    assert made.inputs["demandTokens"] == "238,000"
    assert made.inputs["capacityTokens"] == "80,000"


def test_preempted_requests_are_demand_and_a_symptom():
    calm = once(1, ready(1, used=70_000.0, waiting=9.0))
    assert (calm.target, calm.kind) == (1, "hold")
    made = once(1, ready(1, used=85_000.0, waiting=5.0, preempted=5.0, preempting=True))
    assert made.target == 2
    assert [t.name for t in made.terms if t.wanted == 2] == ["kv", "preemptions"]
    assert any("preempted at a KV usage of 0.85" in t.words for t in made.terms)


def test_a_queue_counts_from_its_second_sample_and_pods_that_load_are_its_answer():
    waiting = ready(2, used=40_000.0, waiting=6.0)
    first, memory = decide(LIMITS, view(2, waiting), old())
    assert first.target == 2
    second, memory = decide(LIMITS, view(2, waiting, now=10_005.0), memory)
    assert (second.target, second.reason) == (3, "queue: 12 requests wait, over 5 a replica for 2 samples")
    loading = [*waiting, Replica("new", False, 5.0)]
    for step in range(2, 20):  # no cascade while the third loads
        made, memory = decide(LIMITS, view(3, loading, now=10_000.0 + 5 * step), memory)
        assert made.target == 3


def test_the_floor_of_the_slo():
    limits = replace(LIMITS, itl_slo=0.020)
    traffic = replace(CHAT, rate=40.0, prefill_seconds=0.1)
    line = Line(0.005, 0.0001)  # 20 ms at 150 running; a replica has room for 90 requests
    made = once(2, ready(2, used=50_000.0), limits, traffic=traffic, line=line)
    # b* = min(150, 100,000 / 1,100 = 90.9): ITL 14.09 ms; 0.8 x 90.9 / (0.1 + 200 x 0.01409) = 24.92 requests/s
    assert made.target == 2
    assert made.reason.startswith("2 replicas are right: ")
    assert [t.wanted for t in made.terms if t.name == "slo" and t.words.startswith("40.00 requests/s / 24.92 a")] == [2]
    made = once(2, ready(2, used=50_000.0), limits, traffic=replace(traffic, rate=60.0), line=line)
    assert made.target == 3
    assert "60.00 requests/s / 24.92 a replica (80 % of 91 running, which keep ITL at 20 ms)" in made.reason


def test_no_number_of_replicas_makes_one_request_faster():
    limits = replace(LIMITS, itl_slo=0.020)
    made = once(2, ready(2, used=79_000.0), limits, traffic=replace(CHAT, rate=60.0), line=Line(0.025, 0.0001))
    assert made.target == 2
    assert made.inputs["slo"] == "not reachable with any number of replicas"


def test_prompts_say_how_much_a_replica_can_serve_while_no_queue_has_shown_it():
    limits = replace(LIMITS, ttft_slo=2.0)
    busy = replace(CHAT, rate=7.0, prefill_seconds=0.25)
    made = once(1, ready(1, used=60_000.0), limits, traffic=busy)
    # 1.75 prompts at a time: r + r^2 / (2 (1 - r)) = 1.75 at r = 0.735; 7 / 0.735 = 9.53 requests/s
    assert made.target == 2
    assert "/ 9.53 a replica (prompts of 0.25 s take 73% of what it can) = 0.73, with headroom 1.03" in made.reason
    known = old(full=(Full(60_000.0, 1100.0, 12_500.0),) * 3)
    assert once(1, ready(1, used=60_000.0), limits, known, traffic=busy).target == 1


def test_after_a_jump_as_much_as_it_took_stands_by_for_an_hour():
    memory = old(full=(Full(50_000.0, 1100.0, 12_000.0),) * 3)
    targets = {}
    for step in range(960):
        now = 10_000.0 + 5 * step
        rate = 14.0 if 300 <= 5 * step < 600 else 4.0
        made, memory = decide(LIMITS, view(2, ready(2, used=9000.0), now=now, traffic=replace(CHAT, rate=rate)), memory)
        targets[5 * step] = made
    assert targets[295].wanted == 1
    # 4 requests/s / 10 a replica, and the jump was 10 less 0.97 of chance, 0.9 replicas
    assert (targets[3600].target, targets[3600].reason.rpartition("with ")[2]) == (2, "headroom 1.30")
    assert (targets[4795].wanted, memory.jumps) == (1, ())


def test_ttft_over_its_slo_adds_one():
    limits = replace(LIMITS, ttft_slo=1.0)
    slow = replace(CHAT, ttft=1.5)
    _, memory = decide(limits, view(2, ready(2, used=79_000.0, waiting=1.0), traffic=slow), old())
    made, _ = decide(limits, view(2, ready(2, used=79_000.0, waiting=1.0), traffic=slow, now=10_005.0), memory)
    assert (made.target, made.reason) == (3, "ttft: TTFT p95 1500 ms is over 1000 ms for 2 samples")


def test_what_a_saturated_replica_held_bounds_its_capacity():
    """A replica whose rows are full at 30,000 tokens takes no 80,000, whatever its memory."""
    memory = old()
    for step in range(5):
        made, memory = decide(LIMITS, view(2, ready(2, used=30_000.0, waiting=20.0), now=10_000.0 + 5 * step), memory)
    assert made.inputs["capacityTokens"] == "30,000"
    other, _ = decide(LIMITS, view(2, ready(2, used=30_000.0), traffic=Traffic(9000.0, 200.0), now=10_030.0), memory)
    assert other.inputs["capacityTokens"] == "80,000"  # seen with other requests: of no use for these


def test_bounds_and_budgets_limit_and_say_so():
    heavy = ready(2, used=99_000.0, waiting=900.0)
    assert (once(2, heavy).target, once(2, heavy).limited_by) == (10, "maxReplicas")
    tight = replace(LIMITS, gpus=4, gpu_budget=15)
    assert (once(2, heavy, tight).target, once(2, heavy, tight).limited_by) == (3, "gpuBudget")
    shared = replace(LIMITS, granted=5)
    assert (once(2, heavy, shared).target, once(2, heavy, shared).limited_by) == (5, "namespaceBudget")
    assert once(4, ready(4), replace(LIMITS, granted=1)).target == 1  # the budget shrinks: at once
    assert once(1, ready(1), replace(LIMITS, minimum=3)).target == 3


@pytest.mark.parametrize("mode", ["Off", "External"])
def test_somebody_else_writes_the_number(mode):
    made = once(2, ready(2, used=99_000.0, waiting=900.0), replace(LIMITS, mode=mode, replicas=4))
    assert (made.target, made.kind) == (4, "given")
    assert made.reason.startswith("spec.replicas is 4 (")


def test_recommend_says_the_same_and_remembers_no_change():
    heavy = ready(2, used=99_000.0, waiting=900.0)
    made, memory = decide(replace(LIMITS, mode="Recommend"), view(2, heavy), old())
    assert made.target == 10
    assert memory.last_up == float("-inf")


def test_what_a_saturated_replica_computed_is_what_the_next_ones_are_planned_for():
    """Prompts fill a device at 30 % of its memory: the queue of a moment tells, and is not taken for memory."""
    memory = old()
    traffic = replace(CHAT, rate=10.0)
    for step in range(4):
        crowd = ready(2, used=30_000.0, waiting=20.0, speed=6000.0)
        made, memory = decide(LIMITS, view(2, crowd, now=10_000.0 + 5 * step, traffic=traffic), memory)
    # 6,000 tokens/s / 1,200 a request = 5 requests/s; 40 wait, to be worked off in 30 s
    assert made.target == 3
    assert made.reason == (
        "rate: 11.33 requests/s (10.00 come, 10.00 expected, 1.33 for the queue) / 5.00 a replica (what one served "
        "while requests waited) = 2.27, with headroom 2.57"
    )
    assert made.inputs["capacityTokens"] == "80,000"


def test_a_rise_is_met_before_it_is_there():
    memory = old(full=(Full(50_000.0, 1100.0, 6000.0),) * 3)
    for step in range(25):
        traffic = replace(CHAT, rate=4.0 + 0.05 * 5 * step)
        made, memory = decide(
            LIMITS, view(3, ready(3, used=20_000.0), now=10_000.0 + 5 * step, traffic=traffic), memory
        )
    # 10 come; 6 more than 120 s ago, of which 0.58 may be chance; in 120 + 30 s it will be 16.8. Three replicas serve
    # 15 at most: 213 requests will wait before another one is ready, to be worked off in 30 s.
    assert made.target == 6
    assert "(10.00 come, 16.78 expected, 7.11 for the queue)" in made.reason


# ---------------------------------------------------------------- what is not known


def test_without_metrics_nothing_moves():
    for replicas in ([Replica("r0", True, 900.0), Replica("r1", True, 900.0)], []):
        made = run(LIMITS, 4, 3600.0, lambda now, n, known=replicas: view(n, known, now, traffic=None))
        assert {d.target for d in made} == {4}


def test_one_silent_replica_blocks_removal_but_no_growth():
    quiet = [*ready(3), Replica("silent", True, 900.0)]
    held = run(LIMITS, 4, 3600.0, lambda now, n: view(n, quiet, now))
    assert {d.target for d in held} == {4}
    assert held[-1].limited_by == "missingMetrics"
    assert held[-1].reason == "1 of 4 replicas gave no metrics: nothing is removed"
    grown = once(4, [*ready(3, used=90_000.0, waiting=50.0), Replica("silent", True, 900.0)])
    assert grown.target == 7  # (3 x 90,000 + 150 x 1,000) / 80,000 = 5.25, and the silent one


def test_a_silent_router_blocks_removal_and_wakes_nobody():
    quiet = run(LIMITS, 4, 3600.0, lambda now, n: view(n, ready(n), now, held=None))
    assert {d.target for d in quiet} == {4}
    made = once(0, [], replace(LIMITS, minimum=0), held=None)
    assert (made.target, made.limited_by) == (0, "missingMetrics")


# ---------------------------------------------------------------- pods that do not come up


def test_pods_without_a_node_are_given_up_and_tried_again_later():
    heavy = ready(2, used=95_000.0, waiting=30.0)

    def look(now, n):
        late = [Replica(f"p{i}", False, now - 10_000.0, unschedulable=True) for i in range(n - 2)]
        return view(n, [*heavy, *late], now, start_seconds=60.0)

    made = run(LIMITS, 4, 240.0, look, old())
    assert made[0].target == 4
    fallen = next(d for d in made if d.target < 4)
    assert (fallen.target, fallen.limited_by) == (2, "unschedulable")
    assert fallen.time > 10_000.0 + 2 * 60.0
    assert "2 pods found no node within 120 s" in fallen.reason
    assert {d.target for d in made if d.time > fallen.time} == {2}
    assert made[-1].limited_by == "unschedulable"


def test_a_pod_that_loads_for_long_is_not_killed_and_does_not_block_when_others_start():
    stuck = Replica("stuck", False, 900.0)
    alone = once(3, [*ready(2, used=95_000.0, waiting=200.0), stuck], start_seconds=60.0)
    assert (alone.target, alone.limited_by) == (3, "slowStart")
    newer = Replica("newer", True, 100.0, load=ready(1, used=95_000.0, waiting=200.0)[0].load)
    beside = once(4, [*ready(2, used=95_000.0, waiting=200.0), newer, stuck], start_seconds=60.0)
    assert (beside.target, beside.limited_by) == (10, "maxReplicas")


# ---------------------------------------------------------------- down, zero and back


def test_clients_that_ask_when_they_are_answered_keep_the_rows_they_take():
    """Two dozen streams, each begun when one has ended, come at the rate they are served at: by it three replicas of
    eight rows would do for 29 that run and 20 that wait."""
    full = tuple(Full(300.0, 40.0, 60.0) for _ in range(3))
    traffic = Traffic(input_tokens=22.0, output_tokens=36.0, rate=2.0, prefix_hits=0.6)
    calm = old(calm=((9_950.0, 3),), full=full, rates=((9_880.0, 2.0),))
    limits = replace(LIMITS, maximum=4, stabilization=30.0)

    def made(running: float, waiting: float) -> Decision:
        eight = Step(max_num_seqs=8)
        return once(4, ready(4, 300.0, waiting, running), limits, calm, traffic=traffic, step=eight)

    crowd = made(7.25, 5.0)
    assert (crowd.target, crowd.kind) == (4, "hold")
    assert crowd.reason == "3 replicas run at most 24 requests at a time, 49 run or wait now"
    assert made(6.25, 0.0).reason == "3 replicas run at most 24 requests at a time, 25 run or wait now"
    assert (made(6.0, 0.0).target, made(6.0, 0.0).kind) == (3, "down")


def test_one_goes_at_a_time_after_the_window():
    made = run(LIMITS, 4, 900.0, lambda now, n: view(n, ready(n, used=120_000.0 / n), now), Memory.new(10_000.0))
    downs = [d.time - 10_000.0 for d in made if d.target < d.current]
    # 120,000 / 0.85 / 80,000 = 1.76: two are enough
    assert [d.target for d in made][-1] == 2
    assert downs[0] >= LIMITS.stabilization
    assert downs[1] - downs[0] >= SETTLE
    down = next(d for d in made if d.target < d.current)
    assert down.reason == "2 replicas would have been enough for 300 s, with 15 % to spare; one goes at a time"


def test_latency_keeps_what_tokens_would_let_go():
    limits = replace(LIMITS, itl_slo=0.020)
    near = replace(CHAT, itl=0.015)
    made = run(limits, 2, 900.0, lambda now, n: view(n, ready(n, used=1000.0), now, traffic=near))
    assert {d.target for d in made} == {2}
    assert made[-1].reason == "with 1 replica ITL would be 30 ms, over 80 % of 20 ms"


def test_panic_keeps_everybody():
    memory = old()
    for step in range(12):
        _, memory = decide(LIMITS, view(4, ready(4, used=1000.0), now=9_940.0 + 5 * step), memory)
    made, memory = decide(LIMITS, view(4, ready(4, used=9000.0), now=10_000.0), memory)
    assert memory.panic_until == 10_060.0
    assert (made.target, made.limited_by) == (4, "panic")


def test_to_zero_and_back():
    limits = replace(LIMITS, minimum=0, idle=600.0)
    idle = run(limits, 1, 1200.0, lambda now, n: view(n, ready(n, running=0.0), now))
    first = next(d for d in idle if d.target == 0)
    assert (first.kind, first.time, first.reason) == ("zero", 10_600.0, "no request for 600 s (idleSeconds is 600)")
    woken = once(0, [], limits, held=Held(3.0, 1500.0))
    assert (woken.target, woken.kind, woken.reason) == (1, "wake", "3 requests are held at the router")
    assert once(0, [], replace(LIMITS, minimum=1)).target == 1


def test_the_window_begins_with_the_last_request_seen_and_not_with_its_rate():
    def look(now: float, n: int) -> View:  # the last one at 900 s, between two looks
        return view(n, ready(n, running=0.0), now, traffic=replace(CHAT, rate=1.0, quiet=max(now - 10_900.0, 0.0)))

    made = run(replace(LIMITS, minimum=0, idle=600.0), 1, 1800.0, look)
    assert next(d.time for d in made if d.target == 0) == 11_500.0


def test_a_busy_service_never_goes_to_zero():
    limits, busy = replace(LIMITS, minimum=0, idle=60.0), view(1, ready(1, used=100.0, running=1.0))
    assert {d.target for d in run(limits, 1, 3600.0, lambda now, n: replace(busy, now=now))} == {1}


def test_nothing_grows_without_load():
    made = run(LIMITS, 1, 3600.0, lambda now, n: view(n, ready(n, running=0.0), now, traffic=None))
    assert {d.target for d in made} == {1}


def test_a_new_leader_sees_a_whole_window_before_it_removes_anything():
    made, _ = decide(LIMITS, view(4, ready(4)), replace(Memory.new(9_900.0), seen_at=9_996.0))
    assert (made.target, made.limited_by) == (4, "stabilization")
    assert made.reason == "0 would do, but only 100 s of 300 s have been seen"


# ---------------------------------------------------------------- properties

_AMOUNT = st.floats(0, 200_000)
_LOADS = st.builds(
    Load,
    kv_tokens=st.floats(1000, 200_000),
    used_tokens=_AMOUNT,
    waiting=st.floats(0, 500),
    running=st.floats(0, 500),
    preempted=st.floats(0, 50),
    preempting=st.booleans(),
)
_REPLICAS = st.lists(
    st.builds(
        Replica,
        uid=st.uuids().map(str),
        ready=st.booleans(),
        since=st.floats(0, 5000),
        unschedulable=st.booleans(),
        load=st.none() | _LOADS,
    ).map(lambda r: r if r.ready else replace(r, load=None)),
    max_size=6,
)
_TRAFFIC = st.none() | st.builds(
    Traffic,
    input_tokens=st.floats(1, 50_000),
    output_tokens=st.floats(1, 5000),
    rate=st.floats(0, 1000),
    prefix_hits=st.floats(0, 1),
    prefill_seconds=st.floats(0, 5),
    itl=st.none() | st.floats(0.001, 1),
    ttft=st.none() | st.floats(0.001, 60),
)
_VIEWS = st.builds(
    View,
    now=st.just(10_000.0),
    current=st.integers(0, 12),
    replicas=_REPLICAS.map(tuple),
    held=st.none() | st.builds(Held, st.floats(0, 100), st.floats(0, 100_000)),
    traffic=_TRAFFIC,
    line=st.none() | st.builds(Line, st.floats(0.001, 0.1), st.floats(0, 0.01)),
    step=st.builds(Step, st.integers(1, 1024), st.integers(1024, 16384), st.integers(1, 8)),
    start_seconds=st.floats(1, 1000),
    changing=st.booleans(),
)
_LIMITS = st.builds(
    Limits,
    mode=st.sampled_from(["Internal", "Recommend"]),
    minimum=st.integers(0, 5),
    maximum=st.integers(5, 12),
    gpus=st.integers(0, 8),
    gpu_budget=st.none() | st.integers(1, 60),
    granted=st.none() | st.integers(0, 12),
    itl_slo=st.none() | st.floats(0.005, 0.2),
    ttft_slo=st.none() | st.floats(0.1, 10),
    idle=st.floats(1, 900),
)
_MEMORY = st.builds(
    Memory,
    seen_since=st.floats(0, 10_000),
    seen_at=st.floats(9_900, 10_000),
    active_at=st.floats(0, 10_000),
    calm=st.lists(st.tuples(st.floats(9_700, 9_999), st.integers(0, 12)), max_size=4).map(
        lambda found: tuple(sorted(found, key=lambda e: (e[0], -e[1])))
    ),
    demand=st.lists(st.tuples(st.floats(9_900, 9_999), st.floats(0, 1e6)), max_size=4).map(lambda x: tuple(sorted(x))),
    full=st.lists(st.builds(Full, st.floats(1, 100_000), st.floats(1, 50_000), st.floats(0, 1e5)), max_size=10).map(
        tuple
    ),
    queued=st.integers(0, 3),
    slow=st.integers(0, 3),
    panic_until=st.floats(0, 10_060),
    last_up=st.floats(0, 10_000),
    last_down=st.floats(0, 10_000),
    overdue_until=st.floats(0, 10_300),
)


@settings(max_examples=100, deadline=None)
@given(_LIMITS, _VIEWS, _MEMORY)
def test_never_outside_of_bounds_or_budget_and_always_the_same(limits, seen, memory):
    made, after = decide(limits, seen, memory)
    most, _ = limits.most()
    assert made.target <= most
    # To zero only where the minimum is zero; below the minimum only where a budget is.
    assert made.target >= min(limits.minimum, most)
    if limits.gpu_budget is not None and limits.gpus:
        assert made.target * limits.gpus <= limits.gpu_budget
    assert decide(limits, seen, memory) == (made, after)
    assert made.reason
    assert made.current == seen.current
    assert all(len(text) <= 128 for text in made.inputs.values())


@settings(max_examples=100, deadline=None)
@given(_LIMITS, _VIEWS, _MEMORY)
def test_nothing_is_removed_on_missing_metrics(limits, seen, memory):
    silent = any(r.ready and r.load is None for r in seen.replicas)
    assume(silent or seen.held is None)
    assume(limits.least() <= seen.current <= limits.most()[0])
    made, _ = decide(limits, seen, memory)
    given_up = made.limited_by == "unschedulable"  # pods that have no node serve nobody
    assert made.target >= seen.current or given_up
    if all(r.load is None for r in seen.replicas) and not given_up and seen.current:
        assert made.target == seen.current


@settings(max_examples=100, deadline=None)
@given(_LIMITS, _VIEWS, _MEMORY, st.floats(0, 3), st.floats(0, 300), st.floats(0, 100))
def test_more_load_never_means_fewer_replicas(limits, seen, memory, used, waiting, rate):
    def heavier(replica):
        if replica.load is None:
            return replica
        load = replica.load
        return replace(
            replica, load=replace(load, used_tokens=load.used_tokens * (1 + used), waiting=load.waiting + waiting)
        )

    traffic = seen.traffic and replace(seen.traffic, rate=seen.traffic.rate + rate)
    more = replace(seen, replicas=tuple(heavier(r) for r in seen.replicas), traffic=traffic)
    less_made, _ = decide(limits, seen, memory)
    more_made, _ = decide(limits, more, memory)
    assert more_made.target >= less_made.target


@settings(max_examples=6, deadline=None)
@given(
    tokens=st.floats(0, 700_000),
    start=st.integers(1, 10),
    rate=st.floats(0, 100),
    slo=st.none() | st.floats(0.012, 0.05),
)
def test_constant_load_is_decided_once_for_all(tokens, start, rate, slo):
    limits = replace(LIMITS, itl_slo=slo)
    line = Line(0.006, 0.0001)

    def look(now, n):
        traffic = replace(CHAT, rate=rate, itl=None)
        running = rate * 2.0 / max(n, 1)
        used = min(tokens / max(n, 1), 100_000.0)
        waiting = max(tokens - 100_000.0 * n, 0.0) / 1000.0 / max(n, 1)
        return view(n, ready(n, used=used, waiting=waiting, running=running), now, traffic=traffic, line=line)

    made = run(limits, start, 3600.0, look)
    assert len({d.target for d in made[-100:]}) == 1
    targets = [d.target for d in made]
    turns = [b - a for a, b in pairwise([start, *targets]) if b != a]
    # A queue can ask for a little too much at first; after that it goes one way.
    signs = [x > 0 for x in turns]
    assert sum(a != b for a, b in pairwise(signs)) <= 1


@settings(max_examples=6, deadline=None)
@given(st.lists(st.floats(0, 900_000), min_size=3, max_size=60))
def test_no_replica_goes_within_the_window_after_one_came(levels):
    def look(now, n):
        tokens = levels[int((now - 10_000.0) // 60) % len(levels)]
        used = min(tokens / max(n, 1), 100_000.0)
        waiting = max(tokens - 100_000.0 * n, 0.0) / 1000.0 / max(n, 1)
        return view(n, ready(n, used=used, waiting=waiting), now)

    made = run(LIMITS, 1, 3600.0, look)
    ups = [d.time for d in made if d.target > d.current]
    for down in (d for d in made if d.target < d.current):
        assert down.target == down.current - 1
        assert all(not 0 <= down.time - up < LIMITS.stabilization for up in ups)
        # And then up again within the window only where more came than the whole window before had seen.
        before = [d for d in made if down.time - LIMITS.stabilization <= d.time <= down.time]
        after = next((d for d in made if d.time > down.time and d.target != d.current), down)
        if after.target > after.current and after.time - down.time < LIMITS.stabilization:
            assert after.wanted > max(d.wanted for d in before)
