"""Fields at their edges, and replicas that never come up: what keeps whom, and what is said."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvern_operator.autoscale.facts import counted
from kvern_operator.autoscale.replicas import decide
from kvern_operator.autoscale.terms import Held, Limits, Load, Memory, Replica, Step, Traffic, View

LIMITS = Limits(minimum=1, maximum=10, stabilization=300.0)
CHAT = Traffic(1000.0, 200.0)


def view(now: float, current: int, replicas: list[Replica], **more: object) -> View:
    return View(now, current, tuple(replicas), **{"traffic": CHAT, "step": Step(1024), **more})  # type: ignore[arg-type]


def ready(n: int, used: float = 0.0, waiting: float = 0.0, running: float = 1.0) -> list[Replica]:
    return [Replica(f"r{i}", True, 1e4, load=Load(100_000.0, used, waiting, running)) for i in range(n)]


def run(limits: Limits, current: int, seconds: float, look) -> list:
    now, memory, found = 0.0, Memory.new(0.0), []
    while now < seconds:
        made, memory = decide(limits, look(now, current), memory)
        current, now = made.target, now + 5.0
        found.append(made)
    return found


def test_without_an_idle_window_a_busy_service_stays():
    limits = replace(LIMITS, minimum=0, idle=0.0)
    busy = run(limits, 1, 60.0, lambda now, n: view(now, n, ready(1)))
    assert {made.target for made in busy} == {1}
    held = run(limits, 1, 60.0, lambda now, n: view(now, n, [Replica("r0", False, now)], held=Held(2.0)))
    assert {made.target for made in held} == {1}
    (_, made, *_) = run(limits, 1, 60.0, lambda now, n: view(now, n, ready(1, running=float(now < 5.0))))
    assert (made.kind, made.target) == ("zero", 0)


def test_without_a_window_pods_that_find_no_node_are_given_up_as_well():
    limits = replace(LIMITS, stabilization=0.0)

    def look(now: float, n: int) -> View:
        stuck = [Replica(f"p{i}", False, now, unschedulable=True) for i in range(n - 1)]
        return view(now, n, [*ready(1, 90_000.0, 60.0), *stuck], start_seconds=20.0)

    made = run(limits, 1, 100.0, look)
    given_up = next(d for d in made if d.limited_by == "unschedulable")
    assert (given_up.time, given_up.target) == (45.0, 1)


def test_a_replica_that_never_comes_up_keeps_no_other():
    """Of four one crashes on and on: when the load has gone, it goes first, and others after it."""

    def look(now: float, n: int) -> View:
        return view(now, n, [*ready(min(n, 3)), *([Replica("broken", False, 1e5)] if n > 3 else [])])

    made = run(LIMITS, 4, 900.0, look)
    assert made[-1].target == 1
    downs = [(d.current, d.target) for d in made if d.target < d.current]
    assert downs == [(4, 3), (3, 2), (2, 1)]
    young = run(LIMITS, 4, 900.0, lambda now, n: view(now, n, [*ready(3), Replica("new", False, 100.0)]))
    assert {d.target for d in young} == {4} and young[-1].reason == "1 replica is not ready yet"


def test_who_never_comes_up_is_no_spare_for_those_that_carry_the_load():
    """Three carry what two could not: the fourth goes, that never answered, and no other."""

    def look(now: float, n: int) -> View:
        broken = [Replica("broken", False, 1e5)] if n > 3 else []
        return view(now, n, [*ready(3, 60_000.0), *broken])

    made = run(LIMITS, 4, 900.0, look)
    assert {d.target for d in made} == {4, 3} and made[-1].target == 3


@pytest.mark.parametrize(
    ("n", "words"), [(0, "0 replicas are"), (1, "1 replica is"), (1.4, "1 replica is"), (2, "2 replicas are")]
)
def test_one_is_no_plural(n, words):
    assert counted(n, "replica is", "replicas are") == words


def test_a_budget_that_cannot_be_told_is_said():
    limits = replace(LIMITS, minimum=0, unknown='ConfigMap kvern-budget: gpus: "many" is not a whole number')
    for current, held in ((0, Held(3.0)), (2, Held())):
        made, _ = decide(limits, view(0.0, current, ready(current), held=held), Memory.new(0.0))
        assert (made.target, made.limited_by) == (current, "namespaceBudget")
        assert made.reason == f"nothing is decided: {limits.unknown}"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 400_000), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=20),
    st.integers(0, 2),
    st.sampled_from([0.0, 5.0, 60.0, 300.0]),
    st.sampled_from([0.0, 60.0, 900.0]),
)
def test_whatever_comes_up_or_not_the_bounds_are_kept_and_load_that_runs_is_served(history, least, window, idle):
    limits = replace(LIMITS, minimum=least, maximum=6, stabilization=window, idle=idle)
    now, memory, current = 0.0, Memory.new(0.0), max(least, 1)
    for tokens, broken, lost in history:
        for _ in range(12):
            up = max(current - broken - lost, 0)
            replicas = ready(up, tokens / max(up, 1), running=float(tokens > 0))
            replicas += [Replica(f"b{i}", False, 1e5) for i in range(min(broken, current - up))]
            replicas += [Replica(f"u{i}", False, now, unschedulable=True) for i in range(current - len(replicas))]
            made, memory = decide(limits, view(now, current, replicas), memory)
            assert least <= made.target <= 6
            if tokens > 0 and up:
                assert made.target >= 1
            current, now = made.target, now + 5.0
