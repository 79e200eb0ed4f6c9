"""How long something has lasted, whatever the wall clock does meanwhile."""

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from kvern_operator.stopwatch import Stopwatch

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def test_only_the_first_look_reads_the_wall_clock():
    now = [100.0]
    watch = Stopwatch(lambda: now[0])
    assert watch.elapsed("a", BEGAN, BEGAN + timedelta(seconds=40)) == timedelta(seconds=40)
    now[0] = 103.0
    assert watch.elapsed("a", BEGAN, BEGAN + timedelta(days=1)) == timedelta(seconds=43)
    assert watch.elapsed("a", BEGAN, BEGAN - timedelta(days=1)) == timedelta(seconds=43)


def test_a_beginning_in_the_future_is_now_and_another_beginning_is_another_time():
    now = [0.0]
    watch = Stopwatch(lambda: now[0])
    assert watch.elapsed("a", BEGAN, BEGAN - timedelta(hours=1)) == timedelta(0)
    now[0] = 7.0
    assert watch.elapsed("a", BEGAN, BEGAN) == timedelta(seconds=7)
    assert watch.elapsed("a", BEGAN + timedelta(seconds=1), BEGAN + timedelta(seconds=2)) == timedelta(seconds=1)


def test_what_is_not_kept_is_forgotten():
    watch = Stopwatch(lambda: 0.0)
    watch.elapsed("a", BEGAN, BEGAN + timedelta(seconds=5))
    watch.keep(["b"])
    assert watch.elapsed("a", BEGAN, BEGAN + timedelta(seconds=9)) == timedelta(seconds=9)


@given(st.integers(-10_000, 10_000), st.lists(st.tuples(st.floats(0, 100), st.integers(-10_000, 10_000)), max_size=20))
def test_it_only_goes_on_and_as_fast_as_ones_own_clock(first, steps):
    now, watch = [0.0], Stopwatch(lambda: now[0])
    before = watch.elapsed("a", BEGAN, BEGAN + timedelta(seconds=first))
    assert before >= timedelta(0)
    for wait, wall in steps:
        now[0] += wait
        after = watch.elapsed("a", BEGAN, BEGAN + timedelta(seconds=wall))
        assert abs((after - before).total_seconds() - wait) < 1e-3
        before = after
