"""The phases of a switch: whatever comes in whatever order, it ends, in the new layout or in the old one."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvern_engine.parallel.layout import Layout
from kvern_engine.parallel.switching import FORWARD, SECONDS, Party, Phase, Switch, Verdict, judge

LAYOUTS = [Layout(4, 1), Layout(2, 2), Layout(1, 4)]


def switch(source: Layout, target: Layout) -> Switch:
    return Switch(1, source, target, 7, 0.0)


@pytest.mark.parametrize("source", LAYOUTS, ids=str)
@pytest.mark.parametrize("target", LAYOUTS, ids=str)
def test_it_goes_through_all_phases(source: Layout, target: Layout) -> None:
    run, now, seen = switch(source, target), 0.0, [Phase.PREPARING]
    if (phase := run.start(now)) is not None:
        seen.append(phase)
    while not run.is_over:
        now += 0.5
        began = [run.arrived(party, now) for party in sorted(run.waiting, key=str)]
        seen += [phase for phase in began if phase is not None]
    assert seen == list(FORWARD) and run.progress == 1.0
    assert run.pause == 2.0 and run.handed == set(range(source.data))
    assert run.arrived(Party("worker", 0), now) is None


@given(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS), st.integers(0, 2**32))
def test_it_always_ends_and_only_the_dead_are_missing(source: Layout, target: Layout, seed: int) -> None:
    rng, run, now = random.Random(seed), switch(source, target), 0.0
    run.start(now)
    gone: set[Party] = set()
    failures = 0
    for _ in range(400):
        if run.is_over:
            break
        now += rng.random()
        before, chance = run.phase, rng.random()
        if chance < 0.85:
            living = sorted(run.waiting - gone, key=str)
            if living:
                run.arrived(rng.choice(living), now)
        elif chance < 0.9:
            rank = Party("worker", rng.randrange(4))
            gone |= {rank}
            failures += 1
            run.lost(rank, f"{rank} died", now)
        elif chance < 0.95:
            failures += 1
            run.failed("no memory", now)
        else:
            now = max(now, run.deadline)
            failures += 1
            _, late = run.expired(now)
            assert not late or before in (Phase.ROLLING_BACK, Phase.RESTORING)
            gone |= late
        assert not run.waiting & run.dead
        assert run.is_over or run.waiting, "a phase that waits for nobody is over"
    else:
        raise AssertionError(f"it hangs in {run.phase}")
    assert (run.phase is Phase.SWITCHED) == (failures == 0 or not run.reason)
    if run.phase is Phase.ROLLED_BACK:
        assert run.reason and sum(run.seconds.values()) <= now + 1e-6


def test_a_core_that_has_not_frozen_yet_is_waited_for_on_the_way_back() -> None:
    run = switch(Layout(2, 2), Layout(1, 4))
    assert run.start(0.0) is Phase.FREEZING
    run.arrived(Party("core", 0), 1.0)
    assert run.lost(Party("worker", 0), "worker 0 was killed", 2.0) is Phase.ROLLING_BACK
    # Core 0 ends with its worker; core 1 is to hand over before it can take its own back.
    assert run.waiting == {Party("core", 1), Party("worker", 2), Party("worker", 3)}
    for party in sorted(run.waiting, key=str):
        run.arrived(party, 3.0)
    assert (run.phase, run.waiting) == (Phase.RESTORING, {Party("core", 1)})
    assert run.arrived(Party("core", 1), 4.0) is Phase.ROLLED_BACK
    assert run.reason == "worker 0 was killed"


def test_who_does_not_answer_on_the_way_back_is_given_up() -> None:
    run = switch(Layout(4, 1), Layout(2, 2))
    run.start(0.0)
    for core in range(4):
        run.arrived(Party("core", core), 1.0)
    assert run.waiting == {Party("server", 0)}, "the last outputs of the old cores must have been read"
    run.arrived(Party("server", 0), 1.0)
    late = 1.0 + SECONDS[Phase.RESHARDING]
    for rank in (0, 1, 2):
        run.arrived(Party("worker", rank), 2.0)
    assert run.expired(late - 0.1) == (None, set())
    assert run.expired(late) == (Phase.ROLLING_BACK, set())
    assert run.reason == "Resharding took more than 90 s, waiting for worker 3"
    for rank in (0, 1, 2):
        run.arrived(Party("worker", rank), late)
    later = late + SECONDS[Phase.ROLLING_BACK]
    assert run.expired(later) == (Phase.RESTORING, {Party("worker", 3)})


def test_a_new_core_that_dies_while_everybody_serves_harms_nobody() -> None:
    run = switch(Layout(1, 4), Layout(4, 1))
    assert run.start(0.0) is None and run.waiting == {Party("core", i) for i in (1, 2, 3)}
    assert run.lost(Party("core", 2), "engine core 2 exited", 1.0) is Phase.ROLLED_BACK
    assert run.pause == 0.0


def ask(tensor: int, generation: int = 5, running: Switch | None = None, obstacle: str | None = None) -> Verdict:
    return judge(
        tensor,
        generation,
        current=Layout(4, 1),
        known_generation=5,
        running=running,
        feasible={1: 400, 2: 500, 4: 600},
        obstacle=obstacle,
    )


def test_what_those_who_ask_are_told() -> None:
    assert ask(1) == Verdict(200)
    assert ask(2) == Verdict(202, begin=True)
    assert ask(2, generation=4).error == "generation 4 is older than 5, which was asked for before."
    assert ask(2, generation=4).status == 409
    assert ask(3).error == "tensor must be one of 1, 2, 4 on the 4 devices of this pod, got 3."
    assert ask(2, obstacle="the ranks are in several pods").error == (
        "tensor must be 1, the present size, got 2: the ranks are in several pods."
    )
    running = switch(Layout(4, 1), Layout(2, 2))
    assert ask(2, running=running) == Verdict(202), "asking again does not begin anew"
    busy = ask(4, running=running)
    assert (busy.status, busy.code) == (409, "switch_in_progress")
    assert busy.error == "a switch from 1 to 2 is running (Preparing); ask again when it is over."
